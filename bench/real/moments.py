"""AdamW's moments in bfloat16 beside float32: the same updates of SmolLM2 with all weights trained, and the loss.

- Both train on the same groups in the same order: the right equation of `examples/sums.py` beside a wrong one, so that
  the loss of the right equations, in nats a token, falls steadily and no sampling adds noise.
- Judged are the loss of held-out equations after the last update, and, on the way, how far the curves are apart.
"""

import runpy
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
from transformers import AutoTokenizer

from bench.harness import Bench
from bench.real.curve import TASK, settings
from coordinator.learner.policy import TrainedPolicy
from coordinator.learner.settings import train_settings
from coordinator.model.batch import collate
from protocol.work.learning import TrainingGroup, TrainingSample
from protocol.work.rollout import pack_logprobs, pack_tokens

DTYPES: tuple[Literal["float32", "bfloat16"], ...] = ("float32", "bfloat16")
GROUPS, HELD_OUT = 6, 24
APART_MAX = 0.02
"""The most by which the losses may differ, as a share of what float32 has gained."""


def measure(bench: Bench, model: Path, scratch: Path, updates: int) -> None:
    """Train with each type of moments, and compare."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    rows = {split: list(runpy.run_path(str(TASK))["problems"](split, 0)) for split in ("train", "held_out")}
    held_out = collate([_group(tokenizer, rows["held_out"][number], None, number) for number in range(HELD_OUT)])
    curves = dict[str, list[float]]()
    for dtype in DTYPES:
        config = settings(scratch / f"moments-{dtype}", model, 0, updates)
        chosen = replace(train_settings(config), optimizer_dtype=dtype)
        chosen = replace(
            chosen,
            algorithm=replace(chosen.algorithm, correction=replace(chosen.algorithm.correction, mode="none")),
        )
        policy = TrainedPolicy(model, chosen)
        name = f"moments in {dtype}: loss of held-out equations"
        for update in range(updates + 1):
            loss = -float((policy.logprobs(held_out) * held_out.mask).sum() / held_out.mask.sum())
            bench.measure(name, loss, unit="nats a token")
            curves.setdefault(dtype, []).append(loss)
            if update < updates:
                policy.train_step(_batch(tokenizer, rows["train"], update))
        bench.measure(f"moments in {dtype}", _bytes_per_parameter(policy), unit="B/parameter")
    exact, small = (np.array(curves[dtype]) for dtype in DTYPES)
    gained = exact[0] - exact[-1]
    bench.measure("moments: gain with float32", gained, unit="nats a token")
    bench.measure("moments: curves apart, at most", 100 * float(np.abs(small - exact).max()) / gained, unit="% of it")
    bench.goal(
        "moments: losses after the last update apart", float(abs(small[-1] - exact[-1]) / gained), at_most=APART_MAX
    )


def _batch(tokenizer: Any, rows: Sequence[Mapping[str, Any]], update: int) -> list[TrainingGroup]:
    places = [(update * GROUPS + number) % len(rows) for number in range(GROUPS)]
    return [_group(tokenizer, rows[place], rows[(place + 1) % len(rows)]["answer"], place) for place in places]


def _group(tokenizer: Any, row: Mapping[str, Any], wrong: str | None, number: int) -> TrainingGroup:
    prompt = tokenizer.apply_chat_template(row["prompt"], tokenize=True, add_generation_prompt=True)["input_ids"]
    replies = [(row["answer"], 1.0), *([(wrong, 0.0)] if wrong else [])]
    samples = tuple(
        _sample([*tokenizer(text)["input_ids"], tokenizer.eos_token_id], reward) for text, reward in replies
    )
    return TrainingGroup(claim_id=f"{number:064x}", prompt=pack_tokens(prompt), policy_update=0, samples=samples)


def _sample(tokens: list[int], reward: float) -> TrainingSample:
    return TrainingSample(tokens=pack_tokens(tokens), logprobs=pack_logprobs([0.0] * len(tokens)), reward=reward)


def _bytes_per_parameter(policy: TrainedPolicy) -> float:
    states = policy._optimizer.state.values()
    moments = [value for state in states for name, value in state.items() if name != "step"]
    return float(sum(moment.nbytes for moment in moments) / policy.model.num_parameters())
