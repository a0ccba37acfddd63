"""`make bench-exact`: what exact sampling costs, which bits differ, and which cheats are paid.

- Two policies: a small Qwen3 that is trained here, and SmolLM2, or another by `--model FOLDER`.
- Each part runs alone by `--part`; with `--folder` the policies are kept, and the bits continue where they stopped.
- Speed: tokens per second of processor time of one thread, the exact engine and today's in turns.
- Bits: the same groups on 1 and 2 threads, with 1 to 256 slots, forwards and backwards, and replayed by the auditor, in
  rounds with other prompts and seeds until `--tokens` are compared, or `--minutes` are over.
- Cheats: those of `bench-verification`, each with the log-probabilities that a replay of its tokens gives. A group is
  paid if it does not fail hard. A group with exactly the honest tokens is honest work, and none of the cheats counted.
- llama.cpp: the tokens and log-probabilities that differ with other slots and threads. It is no exact engine.
- Processors: with other instruction sets (`ATEN_CPU_CAPABILITY`) a child has another class if it gives other bits.
"""

import argparse
import hashlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import combinations, product
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from transformers.utils import logging as transformers_logging

from bench.exact_class import loaded, requests, sampled
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
from swarm_node.engine.messages import SampleRequest
from swarm_node.engine.torch.engine import TorchEngine

SMOLLM2 = ROOT / ".venv-real" / "smollm2"
SAMPLES = 16
SEED_GROUPS = 10**6
"""Groups of one `--seed`."""

CAPABILITIES = ("default", "avx2", "avx512")
POLICIES = ("small", "SmolLM2")
PARTS = ("speed", "bits", "cheats", "processors", "llama")


def main() -> int:
    """Train, sample, cheat, judge."""
    quick = quick_from_environment()
    parser = argparse.ArgumentParser(
        prog="bench exact", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--part", choices=PARTS, action="append", help="only this part; repeatable")
    parser.add_argument("--groups", type=int, default=2 if quick else 16, help="of every cheat")
    parser.add_argument("--model", type=Path, default=SMOLLM2, help="the large policy")
    parser.add_argument("--folder", type=Path, help="keep the small policies and the counts of the bits here")
    parser.add_argument("--tokens", type=int, default=0 if quick else 10**6, help="of each policy, for the bits")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="for the bits, of each policy")
    parser.add_argument("--policy", choices=POLICIES, action="append", help="speed and bits of this one; repeatable")
    parser.add_argument("--seed", type=int, default=0, help="other prompts and seeds, for the bits")
    options = parser.parse_args()
    torch.set_num_threads(1)
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]  # transformers annotates half
    parts = options.part or PARTS
    inputs = {
        "groups": options.groups, "samples": SAMPLES, "parts": list(parts), "tokens": options.tokens,
        "seed": options.seed,
    }  # fmt: skip  # one line for what is not a seed
    bench = Bench("exact", inputs=inputs, quick=quick)
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.folder or Path(temporary)
        names = [name for name in options.policy or POLICIES if name == "small" or options.model.is_dir()]
        policies = dict[str, Sizes]()
        needed = "small" in names or set(parts) - {"speed", "bits"}
        chains, older = trained(folder, quick) if needed else ({}, folder)
        if "small" in names:
            policies["small"] = Sizes(chains["1e-5"][-1], (8, 64, 256), 40, 3)
        if "SmolLM2" in names:
            policies["SmolLM2"] = Sizes(options.model, (8, 64), 8 if quick else 24, 2 if quick else 3)
        for name, sizes in policies.items():
            if "speed" in parts:
                speed(bench, name, sizes)
            if "bits" in parts:
                end_s = time.monotonic() + 60 * options.minutes
                record = folder / f"bits-{name}-{options.seed}.json"
                bits(bench, name, sizes, record, options.tokens, end_s, options.seed * SEED_GROUPS)
        if "cheats" in parts:
            cheat(bench, chains, older, options.groups)
        if "processors" in parts:
            processors(bench, chains["1e-5"][-1])
        if "llama" in parts:
            llama(bench, chains["1e-5"][-1])
    return bench.finish()


def trained(folder: Path, quick: bool) -> tuple[dict[str, list[Path]], Path]:
    """Return two versions of the small policy at each rate of learning, and another small one."""
    small = EmbeddedShape(hidden=64, layers=2, heads=2, intermediate=128)
    shape = small if quick else EmbeddedShape(hidden=256, layers=4, heads=4, intermediate=768)
    start = train(folder, seed=1, steps=30 if quick else 120, shape=shape)
    older = train(folder / "small", seed=2, steps=30, shape=small)
    chains = {
        rate: versions(start, folder / rate, learning_rate=float(rate), updates=3, keep=2) for rate in ("1e-5", "1e-6")
    }
    return chains, older


class Sizes(NamedTuple):
    """A policy, and how much of it is measured."""

    folder: Path
    rows: tuple[int, ...]
    length: int
    rounds: int


def speed(bench: Bench, name: str, sizes: Sizes) -> None:
    """Measure the speed of both engines, in turns."""
    folder, length = sizes.folder, sizes.length
    engines = {"exact": loaded(folder, EXACT), "today": loaded(folder, "auto")}
    for count in sizes.rows:
        asked = requests(-(-count // SAMPLES), min(count, SAMPLES), length)
        for _ in range(sizes.rounds):
            for kind, engine in engines.items():
                began = time.process_time()
                answers = sampled(engine, asked)
                tokens = sum(len(said.tokens) for group in answers.values() for said in group)
                rate = tokens / (time.process_time() - began)
                bench.measure(f"{name}, {count} rows, {kind}", rate, unit="tokens/s")
        ratio = bench.ratio(f"{name}, {count} rows: exact ÷ today", *(f"{name}, {count} rows, {k}" for k in engines))
        bench.goal(f"{name}, {count} rows: exact ÷ today", ratio, at_least=0.7)


def bits(bench: Bench, name: str, sizes: Sizes, record: Path, least: int, end_s: float, first: int) -> None:
    """Compare rounds of groups until so many tokens were compared; the record counts them over several runs."""
    engines = dict[tuple[int, int], TorchEngine]()
    for threads, slots in product((1, 2), (16, 37, 256)):
        torch.set_num_threads(threads)  # the engine compares its products with these when it loads
        engines[threads, slots] = loaded(sizes.folder, EXACT, slots)
    torch.set_num_threads(1)
    single, policy = loaded(sizes.folder, EXACT, 1), file_digest(sizes.folder / "model.safetensors")
    done = json.loads(record.read_bytes()) if record.exists() else {}
    if done.get("policy") != policy or done.get("class") != single._loaded().numerics:
        done = {"policy": policy, "class": single._loaded().numerics, "rounds": 0, "tokens": 0, "differing": 0}
    before = done["rounds"]
    while done["rounds"] == before or (done["tokens"] < least and time.monotonic() < end_s):
        groups = max(sizes.rows) // SAMPLES
        asked = requests(groups, SAMPLES, sizes.length, first + done["rounds"] * groups)
        tokens, others = differing(sizes.folder, engines, single, asked)
        done |= {
            "rounds": done["rounds"] + 1,
            "tokens": done["tokens"] + tokens,
            "differing": done["differing"] + others,
        }
        record.write_text(json.dumps(done))
        print(f"{name}: {done['tokens']:,} tokens compared, {done['differing']} differ", file=sys.stderr, flush=True)
    bench.measure(f"{name}: tokens compared", done["tokens"])
    if least:
        bench.goal(f"{name}: tokens compared in all runs", done["tokens"], at_least=least)
    bench.goal(f"{name}: tokens that differ in any bit", done["differing"], at_most=0)


def differing(
    folder: Path, engines: dict[tuple[int, int], TorchEngine], single: TorchEngine, asked: list[SampleRequest]
) -> tuple[int, int]:
    """Return the tokens compared, and those that differ in any bit, in other company and in the auditor's replay."""
    torch.set_num_threads(1)
    expected, tokens, others = sampled(engines[1, 256], asked), 0, 0
    answers = [sampled(single, asked[:1])]  # each sample alone
    for (threads, slots), engine in engines.items():
        torch.set_num_threads(threads)
        answers.append(sampled(engine, asked[::-1] if slots == 37 else asked))
    for group, rows in (item for each in answers for item in each.items()):
        for one, other in zip(expected[group], rows, strict=True):
            tokens += len(one.tokens)
            others += differences(one, other)
    for threads in (1, 2):
        scorer = ExactScorer(folder, threads=threads)
        for request in asked:
            said = expected[request.request_id]
            claim = Prefill(unpack_tokens(request.prompt), [row.tokens for row in said], request.seed, 1.0)
            measured = measure(said, scorer.score([claim])[0])
            tokens += len(measured)
            others += int(((measured.errors != 0) | (measured.claimed != measured.dictated)).sum())
    torch.set_num_threads(1)
    return tokens, others


def llama(bench: Bench, folder: Path) -> None:
    """Count the tokens that llama.cpp gives other bits with other slots and threads, in float32."""
    from swarm_node.engine.llama.engine import LlamaEngine

    asked = requests(4, SAMPLES, 40)
    answers = dict[tuple[int, int, int], dict[str, list[Completion]]]()
    for threads, slots in ((1, 64), (1, 64), (1, 16), (2, 64)):
        engine = LlamaEngine(dtype="float32", threads=threads, slots=slots)
        engine.load(folder, 1)
        answers[len(answers), threads, slots] = sampled(engine, asked)
    expected = answers[0, 1, 64]
    for (number, threads, slots), said in list(answers.items())[1:]:
        pairs = [(one, other) for group, rows in expected.items() for one, other in zip(rows, said[group], strict=True)]
        total = sum(len(one.tokens) for one, _ in pairs)
        others = sum(differences(one, other) for one, other in pairs)
        what = "the same again" if number == 1 else f"{threads} threads, {slots} slots"
        bench.measure(f"llama.cpp in float32, {what}: tokens with other bits", 100 * others / total, unit="%")


def file_digest(path: Path) -> str:
    """Return the digest of a policy's weights: counts of others are not continued."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


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
            [sys.executable, "-P", "-m", "bench.exact_class", str(folder)],
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
