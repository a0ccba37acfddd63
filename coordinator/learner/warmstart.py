"""The short supervised start: the policy imitates a teacher until its answers have the right form, for RL to reward.

- The teacher makes mistakes (see the task), so even perfect imitation is right in 20 % to 50 % of the answers only. The
  measure of progress is the share of answers that *the teacher may give*.
- The policy imitates on train problems and is measured on validation problems; the held-out set is not used.
- It stops by that measure, not by the clock: the steps, and so the weights, depend on the seed alone.
- At full step size the policy varies from step to step; the step size falls to zero in the last steps.

Greedy exact-match accuracy, and a model's scores of texts whose right continuation is known.

- A greedy completion equals the answer exactly when each token of the answer, the end token included, is the likeliest
  after those before it. So one forward pass over the answers gives the same result as decoding them one by one.
- Logits are the largest tensor of a small model: at most `LOGITS_MAX` are held, for any size of the vocabulary.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence

from protocol.tasks import Problem, Prompt, Teaching

Encode = Callable[[Prompt], list[int]]
"""Text → tokens, without special ones; messages in the format of the policy's template."""

Lesson = tuple[list[int], list[int]]
"""The tokens, and for each the next token to say, or `NOT_JUDGED`."""

NOT_JUDGED = -100
"""The target of prompt and padding, which `torch.nn.functional.cross_entropy` ignores."""

LOGITS_MAX = 2**26
"""256 MiB in float32; every held-out sum of the demo fits at once."""


def lesson(asked: Sequence[int], said: Sequence[int]) -> Lesson:
    """Return the lesson to say `said` after `asked`; only `said` is judged."""
    return [*asked, *said[:-1]], [NOT_JUDGED] * (len(asked) - 1) + [*said]


def answered(problems: Sequence[Problem], encode: Encode, end: int) -> list[Lesson]:
    """Return a lesson for each problem with its answer."""
    return [lesson(encode(problem.prompt), [*encode(problem.answer), end]) for problem in problems]


def rectangles(lessons: Sequence[Lesson], device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Return inputs and next-token targets, padded: [N, L], [N, L]."""
    inputs = pad_sequence([torch.tensor(tokens) for tokens, _ in lessons], True)
    targets = pad_sequence([torch.tensor(then) for _, then in lessons], True, padding_value=NOT_JUDGED)
    return inputs.to(device), targets.to(device)


def scored(
    model: Any, lessons: Sequence[Lesson], *, logits_max: int = LOGITS_MAX
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield logits [n, L, V] and targets [n, L] of the lessons in their order, some rows at a time."""
    longest = max(len(tokens) for tokens, _ in lessons)
    rows = max(1, logits_max // (longest * model.config.get_text_config().vocab_size))
    for start in range(0, len(lessons), rows):
        inputs, targets = rectangles(lessons[start : start + rows], model.device)
        with torch.no_grad():  # in inference mode, the buffers of gathered sharded weights could take no gradient later
            logits = model(input_ids=inputs, use_cache=False).logits
        yield logits, targets


MEASURED_MAX = 512
"""About the most problems that are measured. The demo has 490; a file of an operator may have any number, and the first
version waits for the measurement."""


def evenly_spaced(problems: Sequence[Problem]) -> Sequence[Problem]:
    """Return about `MEASURED_MAX` of the problems, evenly spaced; all if there are fewer."""
    return problems[:: max(1, round(len(problems) / MEASURED_MAX))]


def no_watchdog() -> None:
    """Report progress to nobody."""


def accuracy(
    model: Any,
    problems: Sequence[Problem],
    encode: Encode,
    end: int,
    *,
    logits_max: int = LOGITS_MAX,
    moved: Callable[[], None] = no_watchdog,
) -> float:
    """Return the share of problems that greedy decoding answers exactly; `moved` is called after each part."""
    right = 0
    for logits, targets in scored(model, answered(problems, encode, end), logits_max=logits_max):
        right += int(((logits.argmax(-1) == targets) | (targets == NOT_JUDGED)).all(1).sum())
        moved()
    return right / len(problems)


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
