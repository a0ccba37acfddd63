"""`make bench-exact`: what exact sampling costs, which bits differ, and which cheats are paid.

- Two policies: a small Qwen3 that is trained here, and SmolLM2, or another by `--model FOLDER`.
- Speed: tokens per second of processor time of one thread, the exact engine and today's in turns.
- Bits: the same groups on 1 and 2 threads, with 8 to 256 slots, forwards and backwards, and replayed by the auditor.
- Cheats: those of `bench-verification`, each with the log-probabilities that a replay of its tokens gives. A group is
  paid if it does not fail hard. A group with exactly the honest tokens is honest work, and none of the cheats counted.
- Processors: with other instruction sets (`ATEN_CPU_CAPABILITY`) a child has another class if it gives other bits.
"""

import argparse
import hashlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import combinations
from pathlib import Path

import numpy as np
import torch
from transformers.utils import logging as transformers_logging

from bench.harness import ROOT, Bench, quick_from_environment
from bench.verification.cells import Said, generate, load, prefill
from bench.verification.cheats import Cheater
from bench.verification.model import Text, train, versions
from bench.verification.sampler import Group
from coordinator.audit.exact_scorer import ExactScorer
from coordinator.learner.embedded import EmbeddedShape
from coordinator.rules.calibration import SHIPPED, read
from coordinator.rules.replay import Prefill, measure
from coordinator.rules.verdict import AuditOutcome, judge_exactly
from protocol.work.lease import EXACT
from protocol.work.rollout import Completion, pack_tokens, unpack_tokens
from swarm_node.engine.messages import GroupDone, SampleRequest
from swarm_node.engine.torch.engine import TorchEngine

SMOLLM2 = ROOT / ".venv-real" / "smollm2"
SAMPLES = 16
CAPABILITIES = ("default", "avx2", "avx512")


def main() -> int:
    """Train, sample, cheat, judge."""
    quick = quick_from_environment()
    parser = argparse.ArgumentParser(
        prog="bench exact", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--groups", type=int, default=2 if quick else 16, help="of every cheat")
    parser.add_argument("--model", type=Path, default=SMOLLM2, help="the large policy")
    parser.add_argument("--folder", type=Path, help="keep the small policies here")
    parser.add_argument("--probe", type=Path, help="print the class of this policy and a digest of answers, and end")
    options = parser.parse_args()
    torch.set_num_threads(1)
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]  # transformers annotates half
    if options.probe:
        engine = loaded(options.probe, EXACT)
        print(engine._loaded().numerics, digest(sampled(engine, requests(options.probe, 2, 16, 12))))
        return 0
    bench = Bench("exact", inputs={"groups": options.groups, "samples": SAMPLES}, quick=quick)
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.folder or Path(temporary)
        small = EmbeddedShape(hidden=64, layers=2, heads=2, intermediate=128)
        shape = small if quick else EmbeddedShape(hidden=256, layers=4, heads=4, intermediate=768)
        start = train(folder, seed=1, steps=30 if quick else 120, shape=shape)
        older = train(folder / "small", seed=2, steps=30, shape=small)
        chains = {
            rate: versions(start, folder / rate, learning_rate=float(rate), updates=3, keep=2)
            for rate in ("1e-5", "1e-6")
        }
        measure_policy(bench, "small", chains["1e-5"][-1], (8, 64, 256), 40, 3)
        if options.model.is_dir():
            measure_policy(bench, "SmolLM2", options.model, (8, 64), 8 if quick else 24, 2 if quick else 3)
        cheat(bench, chains, older, options.groups)
        processors(bench, chains["1e-5"][-1])
    return bench.finish()


def requests(folder: Path, groups: int, samples: int, length: int) -> list[SampleRequest]:
    """Leases with prompts of 5 to 70 tokens that mean nothing."""
    return [
        SampleRequest(
            request_id=str(number), version=1, seed=number, samples=samples, max_new_tokens=length, temperature=1.0,
            prompt=pack_tokens([7 + (number * 31 + place * 17) % 250 for place in range(5 + number * 13 % 66)]),
        )
        for number in range(groups)
    ]  # fmt: skip  # one field after the other


def loaded(folder: Path, dtype: str, slots: int = 256) -> TorchEngine:
    engine = TorchEngine(device="cpu", dtype=dtype, slots=slots)
    engine.load(folder, 1)
    return engine


def sampled(engine: TorchEngine, asked: Sequence[SampleRequest]) -> dict[str, list[Completion]]:
    done = dict[str, list[Completion]]()

    def keep(group: GroupDone) -> None:
        rows = group.samples
        done[group.request_id] = [
            Completion(unpack_tokens(row.tokens), np.frombuffer(row.logprobs, "<f4"), row.finish) for row in rows
        ]

    engine.generate(asked, keep)
    return done


def digest(answers: dict[str, list[Completion]]) -> str:
    """Return a digest of all bits of some answers."""
    whole = hashlib.sha256()
    for name in sorted(answers):
        for said in answers[name]:
            whole.update(said.tokens.tobytes() + said.logprobs.tobytes())
    return whole.hexdigest()[:16]


def measure_policy(bench: Bench, name: str, folder: Path, rows: Sequence[int], length: int, rounds: int) -> None:
    """Speed, in turns, and the bits that differ."""
    engines = {"exact": loaded(folder, EXACT), "today": loaded(folder, "auto")}
    for count in rows:
        asked = requests(folder, -(-count // SAMPLES), min(count, SAMPLES), length)
        for _ in range(rounds):
            for kind, engine in engines.items():
                began = time.process_time()
                answers = sampled(engine, asked)
                tokens = sum(len(said.tokens) for group in answers.values() for said in group)
                speed = tokens / (time.process_time() - began)
                bench.measure(f"{name}, {count} rows, {kind}", speed, unit="tokens/s")
        ratio = bench.ratio(f"{name}, {count} rows: exact ÷ today", *(f"{name}, {count} rows, {k}" for k in engines))
        bench.goal(f"{name}, {count} rows: exact ÷ today", ratio, at_least=0.7)
    differing(bench, name, folder, engines["exact"], max(rows), length)


def differing(bench: Bench, name: str, folder: Path, first: TorchEngine, rows: int, length: int) -> None:
    """Count the tokens and log-probabilities that differ in any bit, in other company and in the auditor's replay."""
    asked = requests(folder, rows // SAMPLES, SAMPLES, length)
    expected, tokens, others = sampled(first, asked), 0, 0
    for threads in (1, 2):
        torch.set_num_threads(threads)
        for slots in (SAMPLES, 37, 256):
            answers = sampled(loaded(folder, EXACT, slots), asked[::-1] if slots == 37 else asked)
            for group, said in expected.items():
                for one, other in zip(said, answers[group], strict=True):
                    tokens += len(one.tokens)
                    others += differences(one, other)
        scorer = ExactScorer(folder, threads=threads)
        for request in asked:
            said = expected[request.request_id]
            claim = Prefill(unpack_tokens(request.prompt), [row.tokens for row in said], request.seed, 1.0)
            measured = measure(said, scorer.score([claim])[0])
            tokens += len(measured)
            others += int(((measured.errors != 0) | (measured.claimed != measured.dictated)).sum())
    torch.set_num_threads(1)
    bench.measure(f"{name}: tokens compared", tokens)
    bench.goal(f"{name}: tokens that differ in any bit", others, at_most=0)


def differences(one: Completion, other: Completion) -> int:
    """Count the positions of two answers that are not equal to the bit."""
    if len(one.tokens) != len(other.tokens):
        return max(len(one.tokens), len(other.tokens))
    bits = one.logprobs.view(np.uint32) != other.logprobs.view(np.uint32)
    return int((bits | (one.tokens != other.tokens)).sum())


def cheat(bench: Bench, chains: dict[str, list[Path]], small: Path, count: int) -> None:
    """Judge every cheat, group by group, as an auditor of the exact class does."""
    claimed = chains["1e-5"][-1]
    text = Text(claimed)
    groups = [
        Group(number, text.prompt(number), seed=number, samples=SAMPLES) for number in range(60_000, 60_000 + count)
    ]
    for rate, chain in chains.items():
        scorer, honest = ExactScorer(chain[-1]), exactly(chain[-1], groups, text)
        if rate == "1e-5":
            judged(bench, "honest work", scorer, groups, honest, honest)
            for name, said in cheats(claimed, small, groups, text, honest):
                judged(bench, name, scorer, groups, said, honest)
        judged(bench, f"version v−1 at {rate}", scorer, groups, exactly(chain[-2], groups, text), honest)


def cheats(claimed: Path, small: Path, groups: list[Group], text: Text, honest: Said) -> Iterator[tuple[str, Said]]:
    """Yield the cheats with one version."""
    cheater = Cheater(claimed, small, groups, text)
    for made in (cheater.others(), cheater.choosers(honest), cheater.editors(honest)):
        for name, said, _ in made:
            yield name, said
    yield "temperature 0.98", generate(load(claimed), groups, text, temperature=0.98)
    yield "computed in bf16", generate(load(claimed, torch.bfloat16), groups, text)


def exactly(folder: Path, groups: Sequence[Group], text: Text) -> Said:
    """Answer the groups as an honest exact node does."""
    asked = [
        SampleRequest(
            request_id=str(place), version=1, prompt=pack_tokens(group.prompt), seed=group.seed, samples=SAMPLES,
            max_new_tokens=text.bounds.max_new_tokens, temperature=1.0,
        )
        for place, group in enumerate(groups)
    ]  # fmt: skip  # one field after the other
    answers = sampled(loaded(folder, EXACT), asked)
    return [tuple(answers[str(place)]) for place in range(len(groups))]


def judged(bench: Bench, name: str, scorer: ExactScorer, groups: list[Group], said: Said, honest: Said) -> None:
    """Count the groups of a cheat with other tokens than the honest ones, and those of them that would be paid."""
    tolerance = read(SHIPPED).tolerances_of("torch/fp32/cpu")
    dishonest = paid = refused = 0
    for group, rows, right in zip(groups, said, honest, strict=True):
        measured = measure(rows, scorer.score([prefill(group, rows)])[0])
        disguised = replace(measured, claimed_logprobs=measured.logprobs)
        hard = judge_exactly(disguised, tolerance, 1).outcome is AuditOutcome.HARD
        differs = any(one.tokens.tobytes() != other.tokens.tobytes() for one, other in zip(rows, right, strict=True))
        dishonest, paid, refused = dishonest + differs, paid + (differs and not hard), refused + (hard and not differs)
    bench.measure(f"{name}: groups with other tokens", 100 * dishonest / len(groups), unit="%")
    bench.goal(f"{name}: such groups that are paid", paid, at_most=0)
    bench.goal(f"{name}: groups with the honest tokens that fail", refused, at_most=0)


def processors(bench: Bench, folder: Path) -> None:
    """Compare classes and bits under other instruction sets."""
    found = dict[str, list[str]]()
    for capability in CAPABILITIES:
        done = subprocess.run(
            [sys.executable, "-P", "-m", "bench.exact", "--probe", str(folder)],
            env={**os.environ, "ATEN_CPU_CAPABILITY": capability, "PYTHONPATH": str(ROOT)},
            capture_output=True, text=True, check=False, cwd=ROOT,
        )  # fmt: skip  # one option after the other
        if done.returncode == -signal.SIGILL:
            print(f"ATEN_CPU_CAPABILITY={capability}: this processor has no such instructions", flush=True)
            continue
        done.check_returncode()
        found[capability] = done.stdout.split()
        print(f"ATEN_CPU_CAPABILITY={capability}: {done.stdout.strip()}", flush=True)
    for one, other in combinations(found, 2):
        told_apart = found[one][0] != found[other][0] or found[one][1] == found[other][1]
        bench.check(f"{one} and {other}: one class only with equal bits", told_apart)
    bench.goal("instruction sets compared", len(found), at_least=2)


if __name__ == "__main__":
    raise SystemExit(main())
