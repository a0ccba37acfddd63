"""`make bench-verification`: false rejects, detection and cost, as tables for docs/verification.md.

- `--groups N` of 16 rollouts in every cell; `--folder F` keeps the policies, so that another run need not train them.
- `--calibrate FILE` measures the tolerances of both classes on prompts that no cell uses, and writes them there.
- A cheat is judged twice, by the tolerances of torch/fp32/cpu and of torch/bf16/cpu: it would say that it belongs to the
  looser class.
"""

import argparse
import tempfile
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import torch
from transformers.utils import logging as transformers_logging

from bench.harness import Bench, quick_from_environment
from bench.verification.cells import Cell, Said, generate, judged, load, replayed
from bench.verification.cheats import Cheater
from bench.verification.model import SHAPE, Text, train, versions
from bench.verification.sampler import Group
from coordinator.audit.calibration import SHIPPED, Calibration, Tolerance, derive, read
from coordinator.audit.scorer import Scorer
from coordinator.learner.embedded import DEFAULT_SHAPE, Shape
from protocol.rollout import Completion, pack_tokens, unpack_tokens
from swarm_node.engine.messages import GroupDone, Request
from swarm_node.engine.torch_engine import TorchEngine

SAMPLES = 16
CALIBRATION_GROUPS = 64
CALIBRATION_FIRST, FIRST = 50_000, 60_000
"""Prompts: of the calibration, of the cells."""

FP32, BF16 = "torch/fp32/cpu", "torch/bf16/cpu"
QUICK_SHAPE = Shape(hidden=64, layers=2, heads=2, intermediate=128)


class Trial:
    """The policies and what is known of honest nodes."""

    def __init__(self, folder: Path, quick: bool) -> None:
        shape, small = (QUICK_SHAPE, QUICK_SHAPE) if quick else (SHAPE, DEFAULT_SHAPE)
        steps, updates = (30, 7) if quick else (240, 26)
        start = train(folder, seed=1, steps=steps, shape=shape)
        self.small = train(folder / "small", seed=2, steps=steps, shape=small)
        self.chain = versions(start, folder / "lr1e-05", learning_rate=1e-5, updates=updates, keep=6)
        self.slow = versions(start, folder / "lr1e-06", learning_rate=1e-6, updates=updates, keep=6)
        self.text = Text(start)
        self.tolerances: dict[str, Tolerance] = {}

    def groups(self, first: int, count: int) -> list[Group]:
        return [Group(n, self.text.prompt(n), seed=n, samples=SAMPLES) for n in range(first, first + count)]

    def calibrate(self, path: Path) -> None:
        """Probe both classes as honest nodes, and write what was found."""
        groups, scorer = self.groups(CALIBRATION_FIRST, CALIBRATION_GROUPS), scores(self.chain[-1])
        classes = []
        for name, dtype in ((FP32, torch.float32), (BF16, torch.bfloat16)):
            said = generate(load(self.chain[-1], dtype), groups, self.text)
            classes.append(derive(name, replayed(scorer, groups, said)))
        model = "a Qwen3 of 5.3 million parameters on worksheets of sums, replayed in float32"
        made = Calibration(version=1, made=datetime.now(UTC).date(), model=model, classes=tuple(classes))
        path.write_text(made.model_dump_json(indent=2) + "\n")


def scores(folder: Path, dtype: torch.dtype = torch.float32) -> Scorer:
    return Scorer(folder, temperature=1.0, dtype=dtype)


def honest_cells(trial: Trial, groups: list[Group], honest: Said) -> list[tuple[str, Cell]]:
    """Honest rollouts: (class, cell)."""
    claimed = trial.chain[-1]
    plain, rough = scores(claimed), scores(claimed, torch.bfloat16)
    bf16 = generate(load(claimed, torch.bfloat16), groups, trial.text)
    neighbours = [scores(trial.chain[-2]), scores(trial.chain[-3])]

    def cell(name: str, said: Said, scorer: Scorer, tolerance: str) -> tuple[str, Cell]:
        others = {-1 - n: replayed(other, groups, said) for n, other in enumerate(neighbours)}
        return tolerance, judged(name, replayed(scorer, groups, said), trial.tolerances[tolerance], others)

    return [
        cell("fp32 node (shipped engine), fp32 replay", shipped(claimed, groups, trial.text), plain, FP32),
        cell("fp32 node, fp32 replay", honest, plain, BF16),
        cell("bf16 node, fp32 replay", bf16, plain, BF16),
        cell("fp32 node, bf16 replay", honest, rough, BF16),
        cell("bf16 node, bf16 replay", bf16, rough, BF16),
    ]


def shipped(folder: Path, groups: list[Group], text: Text) -> Said:
    """The same leases, answered by the engine that nodes run."""
    engine, done = TorchEngine(), list[GroupDone]()
    engine.load(folder)
    requests = [
        Request(
            request_id=str(place),
            prompt=pack_tokens(group.prompt),
            seed=group.seed,
            samples=group.samples,
            max_new_tokens=text.bounds.max_new_tokens,
            temperature=1.0,
        )
        for place, group in enumerate(groups)
    ]
    engine.generate(requests, done.append)
    return [
        tuple(
            Completion(
                unpack_tokens(row.tokens),
                np.frombuffer(row.logprobs, "<f4"),
                row.finish,
            )
            for row in group.samples
        )
        for group in sorted(done, key=lambda group: int(group.request_id))
    ]


def cheating_cells(trial: Trial, groups: list[Group], honest: Said) -> list[tuple[str, Cell]]:
    """Every cheat, judged by both classes."""
    plain = scores(trial.chain[-1])
    cheater = Cheater(trial.chain[-1], trial.small, trial.chain, trial.slow, groups, trial.text, plain)
    found = []
    for made in (cheater.models(), cheater.samplers(), cheater.choosers(honest), cheater.editors(honest)):
        for name, said, touched in made:
            measured = replayed(plain, groups, said)
            found += [(of, judged(name, measured, trial.tolerances[of], cheats=touched)) for of in (FP32, BF16)]
            print(name, flush=True)
    return found


def stale_cells(trial: Trial, groups: list[Group]) -> list[tuple[str, Cell]]:
    """Older versions, which the auditor compares with the two before the claimed one."""
    found = []
    for rate, chain, steps in (("1e-5", trial.chain, (1, 2, 5)), ("1e-6", trial.slow, (1, 5))):
        plain, neighbours = scores(chain[-1]), [scores(chain[-2]), scores(chain[-3])]
        cheater = Cheater(chain[-1], trial.small, chain, trial.slow, groups, trial.text, plain)
        for name, own, _ in cheater.stale(chain, steps):
            for disguise, said in (("", own), (", prefilled", cheater.prefilled(own))):
                measured = replayed(plain, groups, said)
                others = {-1 - n: replayed(other, groups, said) for n, other in enumerate(neighbours)}
                label = f"{name} at {rate}{disguise}"
                found += [(of, judged(label, measured, trial.tolerances[of], others)) for of in (FP32, BF16)]
                print(label, flush=True)
    return found


def table(cells: Sequence[tuple[str, Cell]]) -> str:
    """Markdown."""
    lines = [
        "| rollouts | tolerances | rollouts alone: hard | groups of 16: soft or hard | hard | groups to 95 % | "
        "ten groups together: hard | by rule |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for of, cell in cells:
        soft = 1 - cell.grouped.get(0, 0) / max(1, cell.groups)  # type: ignore[call-overload]  # an IntEnum is its int
        rules = ", ".join(f"{rule} {count}" for rule, count in cell.rules.items())
        lines.append(
            f"| {cell.name} | {of.split('/')[1]} | {cell.hard(cell.alone):.1%} of {cell.rollouts:,} | {soft:.0%} | "
            f"{cell.hard(cell.grouped):.0%} of {cell.groups} | {cell.groups_to_95:g} | {cell.hard(cell.pooled):.0%} of "
            f"{cell.pools} | {rules} |"
        )
    return "\n".join(lines)


def cost(bench: Bench, trial: Trial, groups: list[Group], rounds: int) -> None:
    """Tokens per second of verifier and engine, in turns."""
    engine, scorer = TorchEngine(), scores(trial.chain[-1])
    engine.load(trial.chain[-1])
    for _ in range(rounds):
        began = time.perf_counter()
        said = shipped(trial.chain[-1], groups, trial.text)
        tokens = sum(len(row.tokens) for rows in said for row in rows)
        bench.measure("generation, shipped engine", tokens / (time.perf_counter() - began), unit="tokens/s")
        began = time.perf_counter()
        replayed(scorer, groups, said)
        bench.measure("replay", tokens / (time.perf_counter() - began), unit="tokens/s")
    bench.ratio("replay / generation", "replay", "generation, shipped engine")


def main() -> int:
    """Train, cheat, judge."""
    quick = quick_from_environment()
    parser = argparse.ArgumentParser(prog="bench verification", description=__doc__)
    parser.add_argument("--groups", type=int, default=4 if quick else 64)
    parser.add_argument("--folder", type=Path, help="keep the policies here")
    parser.add_argument("--calibrate", type=Path, help="write tolerances and end")
    options = parser.parse_args()
    torch.set_num_threads(1)
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]  # transformers annotates half
    with tempfile.TemporaryDirectory() as temporary:
        trial = Trial(options.folder or Path(temporary), quick)
        if options.calibrate:
            trial.calibrate(options.calibrate)
            return 0
        return measure_all(trial, options.groups, quick)


def measure_all(trial: Trial, count: int, quick: bool) -> int:
    """Every cell, the cost, and the goals."""
    bench = Bench("verification", inputs={"groups": count, "samples": SAMPLES}, quick=quick)
    tolerances = read(SHIPPED)
    trial.tolerances = {name: tolerances.of(name) for name in (FP32, BF16)}
    groups = trial.groups(FIRST, count)
    honest = generate(load(trial.chain[-1]), groups, trial.text)
    sound = honest_cells(trial, groups, honest)
    print(table(sound), flush=True)
    cheats = [*cheating_cells(trial, groups, honest), *stale_cells(trial, groups)]
    print(table(cheats))
    for _, cell in sound:
        bench.goal(f"{cell.name}: rollouts that fail hard, %", 100 * cell.hard(cell.alone), at_most=0.1)
        bench.goal(f"{cell.name}: groups that fail hard", cell.hard(cell.grouped), at_most=0.0)
    for of, cell in cheats:
        bench.goal(f"{cell.name}, {of}: groups to 95 %", min(cell.groups_to_95, 1e6), at_most=10.0)
    cost(bench, trial, groups[:16], 3)
    return bench.finish()


if __name__ == "__main__":
    raise SystemExit(main())
