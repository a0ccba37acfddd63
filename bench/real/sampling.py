"""Sampling on the real model: every contender draws the same work, in turns."""

import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from bench.harness import Bench, Child
from bench.real.samplers import Asked, command, endless
from bench.replay import requests
from bench.vllm.__main__ import Rival
from protocol.work.rollout import pack_tokens, unpack_tokens
from swarm_node.engine.messages import SampleRequest


class Pair(NamedTuple):
    """An engine of ours, its rival in the same precision, and the least ratio of their speeds."""

    ours: str
    rival: str
    dtype: str
    least: float


PAIRS = (
    Pair("torch", "generate", "float32", 2.0),
    Pair("llama", "llama.cpp", "float16", 0.95),
    Pair("llama", "llama.cpp", "float32", 0.95),
)

GROUPS = 8

WARM_UP_TOKENS = 8
"""Length of the longest completion of the warm-up."""


@dataclass(frozen=True)
class Contender:
    """A process that samples, by its name."""

    name: str
    child: Child

    def measure(self, bench: Bench, work: list[Asked]) -> None:
        """Draw the work, and record speed and memory."""
        answer = self.child.ask(work)
        if answer["tokens"] != (wanted := count(work)):
            raise RuntimeError(f"{self.name} drew {answer['tokens']} tokens, not {wanted}.")
        bench.measure(f"sampling: {self.name}", answer["tokens"] / answer["seconds"], unit="tokens/s")
        bench.measure(f"sampling: {self.name}, peak", answer["peak"], unit="MiB")


def count(work: list[Asked]) -> int:
    """The tokens that are asked for."""
    return sum(asked.samples * asked.tokens for asked in work)


def make_work(folder: Path, samples: int, longest: int) -> list[Asked]:
    """Return a group for each question, of an eighth of the longest length, of two eighths, and so on."""
    return [
        Asked(unpack_tokens(request.prompt).tolist(), samples, max(1, number * longest // GROUPS))
        for number, request in enumerate(requests(folder, GROUPS, longest), 1)
    ]


def measure(
    bench: Bench, model: Path, scratch: Path, *, threads: int, samples: int, longest: int, rounds: int, vllm: str
) -> None:
    """All contenders, round by round."""
    folder = endless(model, scratch / "endless")
    work, few = (make_work(model, samples, tokens) for tokens in (longest, WARM_UP_TOKENS))
    kinds = [(kind, pair.dtype) for pair in PAIRS for kind in (pair.ours, pair.rival)]
    with ExitStack() as stack:
        contenders = [
            Contender(f"{kind} {dtype}", stack.enter_context(closing(Child(command(kind, dtype, folder, threads)))))
            for kind, dtype in kinds
        ]
        rival = stack.enter_context(_opened(vllm, folder, few)) if vllm else None
        for contender in contenders:
            contender.child.ask(few)
        for number in range(rounds):
            for contender in contenders:
                contender.measure(bench, work)
                print(f"sampling, {number + 1} of {rounds}: {contender.name}", flush=True)
            if rival:
                _measure_vllm(bench, rival, work)
    _judge(bench, with_vllm=bool(rival))


def _judge(bench: Bench, *, with_vllm: bool) -> None:
    for pair in PAIRS:
        ours, rival = (f"{kind} {pair.dtype}" for kind in (pair.ours, pair.rival))
        ratio = bench.ratio(f"sampling: {ours} ÷ {rival}", f"sampling: {ours}", f"sampling: {rival}")
        bench.goal(f"sampling: {ours} at least {pair.least:g} × {rival}", ratio, at_least=pair.least)
        bench.ratio(f"sampling: peak, {ours} ÷ {rival}", f"sampling: {ours}, peak", f"sampling: {rival}, peak")
    if with_vllm:
        bench.ratio("sampling: torch float32 ÷ vLLM", "sampling: torch float32", "sampling: vLLM float32")


@contextmanager
def _opened(python: str, folder: Path, few: list[Asked]) -> Iterator[Rival]:
    """vLLM's own `LLM.generate`, warmed up."""
    with closing(Rival(python, "cpu", folder)) as rival:
        rival.wait()
        rival.sample(_one_by_one(few))
        yield rival


def _measure_vllm(bench: Bench, rival: Rival, work: list[Asked]) -> None:
    began = time.perf_counter()
    rival.sample(_one_by_one(work))
    bench.measure("sampling: vLLM float32", count(work) / (time.perf_counter() - began), unit="tokens/s")


def _one_by_one(work: list[Asked]) -> list[SampleRequest]:
    """Each sample as a request of its own, as vLLM's rival takes them."""
    return [
        SampleRequest(
            request_id=f"{number} {place}",
            version=1,
            prompt=pack_tokens(asked.prompt),
            seed=0,
            samples=1,
            max_new_tokens=asked.tokens,
            temperature=1.0,
        )
        for number, asked in enumerate(work)
        for place in range(asked.samples)
    ]
