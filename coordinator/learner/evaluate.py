"""Greedy exact-match accuracy, and a model's scores of texts whose right continuation is known.

- A greedy completion equals the answer exactly when each token of the answer, the end token included, is the likeliest
  after those before it. So one forward pass over the answers gives the same result as decoding them one by one.
- Logits are the largest tensor of a small model: at most `LOGITS_MAX` are held, for any size of the vocabulary.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence

from protocol.tasks import Problem, Prompt

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


def accuracy(
    model: Any, problems: Sequence[Problem], encode: Encode, end: int, *, logits_max: int = LOGITS_MAX
) -> float:
    """Return the share of problems that greedy decoding answers exactly."""
    right = 0
    for logits, targets in scored(model, answered(problems, encode, end), logits_max=logits_max):
        right += int(((logits.argmax(-1) == targets) | (targets == NOT_JUDGED)).all(1).sum())
    return right / len(problems)
