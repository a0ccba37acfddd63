"""The short supervised start: until the policy gets a third of unseen problems right, so that RL has rewards to work on.

- It learns from train problems and watches validation problems; the held-out set is never looked at.
- It stops by accuracy, not by time: the steps, and so the weights, depend on the seed alone.
- Sums are learned in a sudden rise after a plateau. Past `NEAR_ACCURACY` steps get smaller and checks more frequent, or
  the target would be overshot between two of them.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from coordinator.learner.evaluate import NOT_JUDGED, Encode, accuracy, answered
from protocol.tasks import Task

TARGET_ACCURACY = 0.32
NEAR_ACCURACY = 0.10
STEPS_MAX = 800
"""Three times what the slowest of the tried seeds needed."""

PROBLEMS_PER_STEP = 64
LEARNING_RATE = 3e-3
CAREFUL_LEARNING_RATE = 1e-3
RAMP_STEPS = 20
STEPS_PER_CHECK = 10
CAREFUL_STEPS_PER_CHECK = 5
PROBLEMS_PER_CHECK = 256

FIRST_PROBLEM = 2**40
"""Train problems from here on, so that RL meets them in another order."""

Progress = Callable[[float, str], None]
"""Called with the share done, in [0, 1], and a line for people."""


def warm_start(model: Any, task: Task, encode: Encode, end: int, progress: Progress) -> float:
    """Train until the target is reached; returns the accuracy on the validation problems."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.01)
    validation = _spread(task.validation())
    reached, step = 0.0, 0
    while reached < TARGET_ACCURACY and step < STEPS_MAX:
        near = reached >= NEAR_ACCURACY
        for group in optimizer.param_groups:
            group["lr"] = (CAREFUL_LEARNING_RATE if near else LEARNING_RATE) * min(1.0, (step + 1) / RAMP_STEPS)
        _step(model, optimizer, _problems(task, step), encode, end)
        step += 1
        if step % (CAREFUL_STEPS_PER_CHECK if near else STEPS_PER_CHECK) == 0:
            reached = accuracy(model, validation, encode, end)
            progress(
                min(1.0, max(reached / TARGET_ACCURACY, step / STEPS_MAX)), f"{reached:.0%} right on unseen problems"
            )
    return reached


def _problems(task: Task, step: int) -> list[tuple[str, str]]:
    first = FIRST_PROBLEM + step * PROBLEMS_PER_STEP
    prompts = [task.prompt(index) for index in range(first, first + PROBLEMS_PER_STEP)]
    return [(prompt, task.answer(prompt)) for prompt in prompts]


def _spread(problems: Sequence[tuple[str, str]]) -> Sequence[tuple[str, str]]:
    """About `PROBLEMS_PER_CHECK` of the problems, from all over their order."""
    return problems[:: max(1, round(len(problems) / PROBLEMS_PER_CHECK))]


def _step(
    model: Any, optimizer: torch.optim.Optimizer, problems: list[tuple[str, str]], encode: Encode, end: int
) -> None:
    inputs, targets = answered(problems, encode, end)  # [N, L] each
    logits = model(input_ids=inputs, use_cache=False).logits  # [N, L, V]
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=NOT_JUDGED)
    optimizer.zero_grad()
    loss.backward()  # type: ignore[no-untyped-call]  # torch leaves it unannotated
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
