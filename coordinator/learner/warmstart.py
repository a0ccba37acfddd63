"""The short supervised start: the policy imitates a teacher until it mostly speaks like one, so that RL has rewards to see.

- The teacher makes mistakes (see the task), so imitation ends between 20 and 50 % right however well it is learned: how
  far it got is measured by how often the policy says *something the teacher may say*.
- It imitates on train problems and is measured on validation problems; the held-out set is never looked at.
- It stops by that measure, not by the clock: the steps, and so the weights, depend on the seed alone.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from coordinator.learner.evaluate import NOT_JUDGED, Encode, accuracy, answered
from protocol.tasks import Task

IMITATION_TARGET = 0.75
STEPS_MAX = 480
"""A third more than the slowest of the tried seeds needed."""

DEMONSTRATIONS_PER_STEP = 64
LEARNING_RATE = 3e-3
RAMP_STEPS = 20
STEPS_PER_CHECK = 10
PROMPTS_PER_CHECK = 160

FIRST_DEMONSTRATION = 2**40
"""Train prompts from here on, so that RL meets them in another order."""

Progress = Callable[[float, str], None]
"""Called with the share done, in [0, 1], and a line for people."""


def warm_start(model: Any, task: Task, encode: Encode, end: int, progress: Progress) -> None:
    """Imitate until the target is reached."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.01, fused=True)
    prompts = _spread([prompt for prompt, _ in task.validation()])
    sayings = [(prompt, said) for prompt in prompts for said in sorted(task.demonstrated(prompt))]
    imitation, step = 0.0, 0
    while imitation < IMITATION_TARGET and step < STEPS_MAX:
        for group in optimizer.param_groups:
            group["lr"] = LEARNING_RATE * min(1.0, (step + 1) / RAMP_STEPS)
        first = FIRST_DEMONSTRATION + step * DEMONSTRATIONS_PER_STEP
        lesson = [task.demonstration(index) for index in range(first, first + DEMONSTRATIONS_PER_STEP)]
        _step(model, optimizer, lesson, encode, end)
        step += 1
        if step % STEPS_PER_CHECK == 0:
            # A policy says one thing to a prompt, so the shares of all that may be said add up.
            imitation = accuracy(model, sayings, encode, end) * len(sayings) / len(prompts)
            done = max(imitation / IMITATION_TARGET, step / STEPS_MAX)
            progress(min(1.0, done), f"speaks like its teacher on {imitation:.0%} of unseen problems")


def _spread(prompts: Sequence[str]) -> Sequence[str]:
    """About `PROMPTS_PER_CHECK` of the prompts, from all over their order."""
    return prompts[:: max(1, round(len(prompts) / PROMPTS_PER_CHECK))]


def _step(
    model: Any, optimizer: torch.optim.Optimizer, lesson: list[tuple[str, str]], encode: Encode, end: int
) -> None:
    inputs, targets = answered(lesson, encode, end)  # [N, L] each
    logits = model(input_ids=inputs, use_cache=False).logits  # [N, L, V]
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=NOT_JUDGED)
    optimizer.zero_grad()
    loss.backward()  # type: ignore[no-untyped-call]  # torch leaves it unannotated
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
