"""An update of the learner against TRL's, on completions that the real model has sampled."""

from collections.abc import Mapping
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

from bench.harness import Bench, Child
from bench.learner import Way, open_side
from bench.replay import SAMPLES, requests, sample
from protocol.work.rollout import unpack_tokens
from swarm_node.engine.torch.engine import TorchEngine

AGREE = 1e-3
"""Largest difference of the losses, and of the lengths of the gradients in proportion."""

MICRO_BATCH = 8
"""Samples at once in the second case: TRL's own `per_device_train_batch_size`."""

SIDES = ("ours", "trl")


def make_batches(folder: Path, *, groups: int, tokens: int, count: int) -> list[dict[str, Any]]:
    """Completions of the real model, drawn by our engine; half of each group is rewarded."""
    engine = TorchEngine(device="cpu", dtype="float32")
    engine.load(folder, 1)
    batches = []
    for number in range(count):
        asked = requests(folder, groups, tokens, seed=1000 * number)
        done, _ = sample(engine, asked)
        batches.append(
            {
                "prompts": [unpack_tokens(request.prompt).tolist() for request in asked],
                "completions": [[unpack_tokens(row.tokens).tolist() for row in group.samples] for group in done],
                "rewards": [[float(place % 2) for place in range(SAMPLES)] for _ in asked],
            }
        )
    return batches


def measure(bench: Bench, folder: Path, batches: list[dict[str, Any]], *, threads: int, tokens: int) -> None:
    """Measure both cases: the whole batch at once, and in pieces."""
    longest = max(len(prompt) for batch in batches for prompt in batch["prompts"])
    for at_once, name in ((0, "all at once"), (MICRO_BATCH, f"{MICRO_BATCH} samples at once")):
        way = Way(longest=tokens, prompt=longest, threads=threads, recompute=True, at_once=at_once)
        with ExitStack() as stack:
            sides = {side: stack.enter_context(closing(open_side(side, folder, way))) for side in SIDES}
            _measure(bench, f"update, {name}", sides, batches)


def _measure(bench: Bench, name: str, sides: Mapping[str, Child], batches: list[dict[str, Any]]) -> None:
    for number, batch in enumerate(batches):
        answers = {side: child.ask(batch) for side, child in sides.items()}
        print(f"{name}, {number + 1} of {len(batches)}: {answers}", flush=True)
        if not number:  # from the same weights; it also makes the optimizer's state, so its time does not count
            _require_agreement(bench, name, answers["ours"], answers["trl"])
            continue
        for side, answer in answers.items():
            bench.measure(f"{name}: {side}", answer["seconds"], unit="s")
            bench.measure(f"{name}: {side}, peak", answer["peak"], unit="MiB")
    times = bench.ratio(f"{name}: TRL ÷ ours", f"{name}: trl", f"{name}: ours")
    bench.goal(f"{name}: at least 1.5 times as fast as TRL", times, at_least=1.5)
    memory = bench.ratio(f"{name}: peak, ours ÷ TRL", f"{name}: ours, peak", f"{name}: trl, peak")
    bench.goal(f"{name}: at most 0.6 of TRL's memory", memory, at_most=0.6)


def _require_agreement(bench: Bench, name: str, ours: Mapping[str, float], theirs: Mapping[str, float]) -> None:
    """Compare the first step, and end the bench where it is not the same computation."""
    loss, norm = abs(ours["loss"] - theirs["loss"]), abs(ours["norm"] / theirs["norm"] - 1)
    same = bench.goal(f"{name}: losses agree", loss, at_most=AGREE)
    if not bench.goal(f"{name}: gradients agree", norm, at_most=AGREE) or not same:
        raise RuntimeError(f"{name}: the sides compute different updates: {ours}, {theirs}.")
