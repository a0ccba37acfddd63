"""The short supervised start: the policy imitates a teacher until its answers have the right form, for RL to reward.

- The teacher makes mistakes (see the task), so even perfect imitation is right in 20 % to 50 % of the answers only. The
  measure of progress is the share of answers that *the teacher may give*.
- The policy imitates on train problems and is measured on validation problems; the held-out set is not used.
- It stops by that measure, not by the clock: the steps, and so the weights, depend on the seed alone.
- At full step size the policy varies from step to step; the step size falls to zero in the last steps.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from coordinator.learner.evaluate import NOT_JUDGED, Encode, Lesson, accuracy, answered, rectangles
from protocol.tasks import Problem, Teaching

IMITATION_TARGET = 0.75
STEPS_MAX = 480
"""A third more steps than the slowest of the tried seeds needed."""

DEMONSTRATIONS_PER_STEP = 64
LEARNING_RATE = 3e-3
RAMP_STEPS = 20
SETTLING_STEPS = 40
STEPS_PER_CHECK = 10
PROMPTS_PER_CHECK = 160

FIRST_DEMONSTRATION = 2**40
"""The first train prompt used, so that RL uses the prompts in another order."""

Progress = Callable[[float, str], None]
"""Called with the share done, in [0, 1], and a line for people."""


def warm_start(
    model: Any, task: Teaching, encode: Encode, end: int, progress: Progress, *, steps_max: int = STEPS_MAX
) -> None:
    """Imitate until the target is reached, then settle."""
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), weight_decay=0.01, fused=True)
    asked = _spread(task.problems("validation"))
    sayings = [Problem(problem.prompt, said) for problem in asked for said in sorted(task.demonstrated(problem))]
    imitation, step, last = 0.0, 0, steps_max
    while step < last:
        first = FIRST_DEMONSTRATION + step * DEMONSTRATIONS_PER_STEP
        lesson = [task.demonstration(index) for index in range(first, first + DEMONSTRATIONS_PER_STEP)]
        for group in optimizer.param_groups:
            group["lr"] = LEARNING_RATE * min(1.0, (step + 1) / RAMP_STEPS, (last - step) / SETTLING_STEPS)
        imitate(model, optimizer, answered(lesson, encode, end))
        step += 1
        if step % STEPS_PER_CHECK:
            continue
        if imitation < IMITATION_TARGET:
            # A policy gives one answer to a prompt, so the shares of all answers that are allowed add up.
            imitation = accuracy(model, sayings, encode, end) * len(sayings) / len(asked)
            if imitation >= IMITATION_TARGET:
                last = min(last, step + SETTLING_STEPS)
        done = max(step / last, 0.8 * min(1.0, imitation / IMITATION_TARGET))
        progress(done, f"answers like its teacher on {imitation:.0%} of unseen problems")


def _spread(problems: Sequence[Problem]) -> Sequence[Problem]:
    """Return about `PROMPTS_PER_CHECK` of the problems, evenly spaced."""
    return problems[:: max(1, round(len(problems) / PROMPTS_PER_CHECK))]


def imitate(model: Any, optimizer: torch.optim.Optimizer, lessons: Sequence[Lesson]) -> float:
    """Make one step towards the lessons; return the loss before it."""
    inputs, targets = rectangles(lessons, model.device)  # [N, L] each
    logits = model(input_ids=inputs, use_cache=False).logits  # [N, L, V]
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=NOT_JUDGED)
    optimizer.zero_grad()
    loss.backward()  # type: ignore[no-untyped-call]  # torch leaves it unannotated
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return float(loss.detach())
