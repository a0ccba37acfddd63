"""`make bench-verification`: false rejects, detection and cost, as tables for bench/RESULTS.md.

- `--groups N` of 16 rollouts in every honest cell, `--cheating N` in the others; `--folder F` keeps the policies, so
  that another run need not train them.
- `--parts honest …` measures some of it only.
- `--calibrate FILE` measures the tolerances of every class, or of those of `--classes`, on prompts that no cell uses,
  and writes them there, beside those that ship.
- `--vllm PYTHON` takes the classes of vLLM in besides, sampled by its engine child under that interpreter.
- A cheat is judged twice, by the tolerances of torch/fp32/cpu and of torch/bf16/cpu: it would say that it belongs to
  the looser class.
"""

import argparse
import tempfile
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
import trio
from transformers.utils import logging as transformers_logging

from bench.harness import Bench, quick_from_environment
from bench.verification.cells import Cell, Said, generate, judged, load, prefilled, replayed
from bench.verification.cheats import Cheater
from bench.verification.model import SHAPE, Text, train, versions
from bench.verification.sampler import Group
from coordinator.audit.scorer import VersionScorer
from coordinator.learner.embedded import DEFAULT_SHAPE, EmbeddedShape
from coordinator.rules.calibration import SHIPPED, Tolerance, derive, read
from coordinator.rules.replay import ReplayMeasurement
from coordinator.rules.verdict import AuditOutcome
from protocol.work.rollout import Completion, pack_tokens, unpack_tokens
from swarm_node.engine.client import open_engine
from swarm_node.engine.engine import Engine
from swarm_node.engine.llama.engine import LlamaEngine
from swarm_node.engine.messages import GroupDone, GroupFailed, SampleRequest
from swarm_node.engine.torch.engine import TorchEngine
from swarm_node.engine.vllm import command as vllm_command

SAMPLES = 16
CALIBRATION_GROUPS = 64
CALIBRATION_FIRST, FIRST = 50_000, 60_000
"""Prompts: of the calibration, of the cells."""

MODEL = "a Qwen3 of 5.3 million parameters on worksheets of sums, replayed in float32"
FP32, BF16 = "torch/fp32/cpu", "torch/bf16/cpu"
LLAMA = {"llama/fp32/cpu": "float32", "llama/fp16/cpu": "float16", "llama/q8_0/cpu": "q8_0"}
CLASSES = (FP32, BF16, *LLAMA)
BACK = (1, 2, 4)
"""The distances back to the versions that auditors compare with."""
PARTS = ("honest", "cheats", "stale", "cost")
QUICK_SHAPE = EmbeddedShape(hidden=64, layers=2, heads=2, intermediate=128)


class Trial:
    """The policies and what is known of honest nodes."""

    def __init__(self, folder: Path, quick: bool, vllm_python: str = "") -> None:
        self.vllm = commands_of_vllm(vllm_python) if vllm_python else {}
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

    def calibrate(self, path: Path, names: Sequence[str]) -> None:
        """Probe classes as honest nodes, and write what was found."""
        groups, scorer = self.groups(CALIBRATION_FIRST, CALIBRATION_GROUPS), scores(self.chain[-1])
        made = read(SHIPPED)
        for name in names:
            derived = derive(name, replayed(scorer, groups, self.honest(name, groups)))
            made = made.with_class(derived, made=datetime.now(UTC).date(), model=MODEL)
        path.write_text(made.model_dump_json(indent=2) + "\n")

    def honest(self, name: str, groups: Sequence[Group]) -> Said:
        """Return the completions of an honest node of this class under the newest version."""
        if name in self.vllm:
            return by_child(self.vllm[name], self.chain[-1], groups, self.text)
        if name in LLAMA:
            return shipped(LlamaEngine(dtype=LLAMA[name]), self.chain[-1], groups, self.text)
        dtype = torch.float32 if name == FP32 else torch.bfloat16
        return generate(load(self.chain[-1], dtype), groups, self.text)


def commands_of_vllm(python: str) -> dict[str, list[str]]:
    """The child of each class that this vLLM has."""
    device = vllm_command.probe(python).device
    dtypes = {"fp32": "float32", "bf16": "bfloat16"}
    return {f"vllm/{short}/{device}": vllm_command.command(python, 1, dtype) for short, dtype in dtypes.items()}


def scores(folder: Path, dtype: torch.dtype = torch.float32) -> VersionScorer:
    return VersionScorer(folder, dtype=dtype)


def honest_cells(trial: Trial, groups: list[Group]) -> list[tuple[str, Cell]]:
    """Honest rollouts: (class, cell)."""
    claimed = trial.chain[-1]
    plain, rough = scores(claimed), scores(claimed, torch.bfloat16)
    honest = generate(load(claimed), groups, trial.text)
    bf16 = generate(load(claimed, torch.bfloat16), groups, trial.text)
    before = {
        scorer: {back: scores(trial.chain[-1 - back], dtype) for back in BACK}
        for scorer, dtype in ((plain, torch.float32), (rough, torch.bfloat16))
    }
    engine = shipped(TorchEngine(), claimed, groups, trial.text)

    def cell(name: str, said: Said, scorer: VersionScorer, tolerance: str) -> tuple[str, Cell]:
        other = {-back: replayed(older, groups, said) for back, older in before[scorer].items()}
        return printed(tolerance, judged(name, replayed(scorer, groups, said), trial.tolerances[tolerance], other))

    return [
        cell("fp32 node (shipped engine), fp32 replay", engine, plain, FP32),
        cell("fp32 node, fp32 replay", honest, plain, FP32),
        cell("bf16 node, fp32 replay", bf16, plain, BF16),
        cell("fp32 node, bf16 replay", honest, rough, BF16),
        cell("bf16 node, bf16 replay", bf16, rough, BF16),
        *(cell(f"{name} node, fp32 replay", trial.honest(name, groups), plain, name) for name in (*LLAMA, *trial.vllm)),
    ]


def shipped(engine: Engine, folder: Path, groups: Sequence[Group], text: Text) -> Said:
    """Answer the leases with an engine that nodes run."""
    done = list[GroupDone]()
    engine.load(folder, 0)
    engine.generate(asked(groups, text), done.append)
    return said_by(done)


def by_child(command: list[str], folder: Path, groups: Sequence[Group], text: Text) -> Said:
    """Answer the leases with an engine's child."""

    async def sample() -> list[GroupDone]:
        done = []
        async with open_engine(command) as engine:
            await engine.load(folder, 0)
            await engine.submit(asked(groups, text))
            while group := await engine.finished():
                if isinstance(group, GroupFailed):
                    raise RuntimeError(group.message)
                if isinstance(group, GroupDone):
                    done.append(group)
        return done

    return said_by(trio.run(sample))


def asked(groups: Sequence[Group], text: Text) -> list[SampleRequest]:
    """The leases of some groups, as an engine hears of them."""
    return [
        SampleRequest(
            request_id=str(place),
            version=0,
            prompt=pack_tokens(group.prompt),
            seed=group.seed,
            samples=group.samples,
            max_new_tokens=text.bounds.max_new_tokens,
            temperature=1.0,
        )
        for place, group in enumerate(groups)
    ]


def said_by(done: list[GroupDone]) -> Said:
    """Return the completions of an engine, in the order of the groups."""
    return [
        tuple(
            Completion(unpack_tokens(row.tokens), np.frombuffer(row.logprobs, "<f4"), row.finish)
            for row in group.samples
        )
        for group in sorted(done, key=lambda group: int(group.request_id))
    ]


def cheating_cells(trial: Trial, groups: list[Group]) -> list[tuple[str, Cell]]:
    """Every cheat, undisguised where it has log-probabilities of its own, and disguised."""
    claimed = trial.chain[-1]
    plain, cheater, cells = scores(claimed), Cheater(claimed, trial.small, groups, trial.text), []
    honest = generate(load(claimed), groups, trial.text)
    for name, said, _ in cheater.others():
        measured = replayed(plain, groups, said)
        cells += both(trial, name, measured) + both(trial, f"{name}, prefilled", [*map(prefilled, measured)])
    for made in (cheater.choosers(honest), cheater.editors(honest)):
        for name, said, touched in made:
            measured = [prefilled(group) for group in replayed(plain, groups, said)]
            cells += both(trial, f"{name}, prefilled", measured, cheats=touched)
    return cells


def stale_cells(trial: Trial, groups: list[Group]) -> list[tuple[str, Cell]]:
    """Older versions, compared as auditors do."""
    cells = []
    for rate, chain, steps in (("1e-5", trial.chain, (1, 2, 5)), ("1e-6", trial.slow, (1, 5))):
        plain, before = scores(chain[-1]), {back: scores(chain[-1 - back]) for back in BACK}
        for step, (dtype, by) in product(steps, ((torch.float32, ""), (torch.bfloat16, ", by a bf16 node"))):
            said = generate(load(chain[-1 - step], dtype), groups, trial.text)
            measured = replayed(plain, groups, said)
            other = {-back: replayed(scorer, groups, said) for back, scorer in before.items()}
            name = f"version v−{step} at {rate}{by}"
            cells += both(trial, name, measured, neighbours=other)
            cells += both(trial, f"{name}, prefilled", [*map(prefilled, measured)], neighbours=other)
    return cells


def both(trial: Trial, name: str, measured: list[ReplayMeasurement], **more: Any) -> list[tuple[str, Cell]]:
    """A cell by the tolerances of either class."""
    return [printed(of, judged(name, measured, trial.tolerances[of], **more)) for of in (FP32, BF16)]


HEADING = """\
| rollouts | tolerances | alone: hard | group of 16: hard | soft or hard | groups to 95 % | ten groups: hard | by |
|---|---|---|---|---|---|---|---|"""


def printed(of: str, cell: Cell) -> tuple[str, Cell]:
    """Show a row of the table as soon as it is there."""
    caught = sum(count for outcome, count in cell.grouped.items() if outcome is not AuditOutcome.PASS)
    print(
        f"| {cell.name} | {of.split('/')[1]} | {cell.hard(cell.alone):.1%} of {cell.rollouts:,} | "
        f"{cell.hard(cell.grouped):.0%} of {cell.groups} | {caught / max(1, cell.groups):.0%} | "
        f"{cell.groups_to_95:g} | {cell.hard(cell.pooled):.0%} of {cell.pools} | "
        f"{', '.join(f'{rule} {count}' for rule, count in cell.rules.items())} |",
        flush=True,
    )
    return of, cell


def cost(bench: Bench, trial: Trial, groups: list[Group], rounds: int) -> None:
    """Tokens per second of verifier and engine, in turns."""
    scorer = scores(trial.chain[-1])
    for _ in range(rounds):
        began = time.perf_counter()
        said = shipped(TorchEngine(), trial.chain[-1], groups, trial.text)
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
    parser.add_argument("--cheating", type=int, default=2 if quick else 64, help="groups that a cheat answers")
    parser.add_argument("--parts", nargs="*", choices=PARTS, default=PARTS, help="leave out the others")
    parser.add_argument("--folder", type=Path, help="keep the policies here")
    parser.add_argument("--calibrate", type=Path, help="write tolerances and end")
    parser.add_argument("--classes", nargs="*", choices=CLASSES, default=CLASSES, help="calibrate these only")
    parser.add_argument("--vllm", default="", help="the interpreter of vLLM's environment, to take its classes in")
    options = parser.parse_args()
    torch.set_num_threads(1)
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]  # transformers annotates half
    with tempfile.TemporaryDirectory() as temporary:
        trial = Trial(options.folder or Path(temporary), quick, options.vllm)
        if options.calibrate:
            trial.calibrate(options.calibrate, [*options.classes, *trial.vllm])
            return 0
        return measure_all(trial, options, quick)


def measure_all(trial: Trial, options: argparse.Namespace, quick: bool) -> int:
    """Every cell, the cost, and the goals."""
    inputs = {"groups": options.groups, "cheating": options.cheating, "samples": SAMPLES, "parts": options.parts}
    bench = Bench("verification", inputs=inputs, quick=quick)
    tolerances = read(SHIPPED)
    trial.tolerances = {name: tolerances.tolerances_of(name) for name in (*CLASSES, *trial.vllm)}
    groups = trial.groups(FIRST, options.groups)
    cheating = groups[: options.cheating]
    print(HEADING)
    for _, cell in honest_cells(trial, groups) if "honest" in options.parts else ():
        bench.goal(f"{cell.name}: rollouts that fail hard, %", 100 * cell.hard(cell.alone), at_most=0.1)
        bench.goal(f"{cell.name}: groups that fail hard", cell.hard(cell.grouped), at_most=0.0)
    cheats = cheating_cells(trial, cheating) if "cheats" in options.parts else []
    cheats += stale_cells(trial, cheating) if "stale" in options.parts else []
    for of, cell in cheats:
        bench.goal(f"{cell.name}, {of}: groups to 95 %", min(cell.groups_to_95, 1e6), at_most=10.0)
    if "cost" in options.parts:
        cost(bench, trial, groups[:8], 3)
    return bench.finish()


if __name__ == "__main__":
    raise SystemExit(main())
