"""Greedy exact-match accuracy, and what a model says of texts whose right continuation is known.

- A greedy completion equals the answer exactly when each token of the answer, the end token included, is the likeliest
  after those before it. So one forward pass over the answers tells what decoding them one by one would.
- Logits are the widest thing in a small model: no more of them are held than `LOGITS_MAX`, whatever the vocabulary.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence

from protocol.tasks import Problem, Prompt

Encode = Callable[[Prompt], list[int]]
"""Text → tokens, without special ones; messages as the policy's template has them."""

Lesson = tuple[list[int], list[int]]
"""Tokens, and what is to be said next at each, or `NOT_JUDGED`."""

NOT_JUDGED = -100
"""The target of prompt and padding, as `torch.nn.functional.cross_entropy` ignores it."""

LOGITS_MAX = 2**26
"""A quarter of a gigabyte in float32, and every held-out sum of the demo at once."""


def lesson(asked: Sequence[int], said: Sequence[int]) -> Lesson:
    """What is to be said after what was asked, and nothing else."""
    return [*asked, *said[:-1]], [NOT_JUDGED] * (len(asked) - 1) + [*said]


def answered(problems: Sequence[Problem], encode: Encode, end: int) -> list[Lesson]:
    """Problems with their answers."""
    return [lesson(encode(problem.prompt), [*encode(problem.answer), end]) for problem in problems]


def rectangles(lessons: Sequence[Lesson], device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs and next-token targets, padded: [N, L], [N, L]."""
    inputs = pad_sequence([torch.tensor(tokens) for tokens, _ in lessons], True)
    targets = pad_sequence([torch.tensor(then) for _, then in lessons], True, padding_value=NOT_JUDGED)
    return inputs.to(device), targets.to(device)


def scored(
    model: Any, lessons: Sequence[Lesson], *, logits_max: int = LOGITS_MAX
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Logits [n, L, V] and targets [n, L] of the lessons in their order, some rows at a time."""
    longest = max(len(tokens) for tokens, _ in lessons)
    rows = max(1, logits_max // (longest * model.config.get_text_config().vocab_size))
    for start in range(0, len(lessons), rows):
        inputs, targets = rectangles(lessons[start : start + rows], model.device)
        with torch.no_grad():  # in inference mode, what sharded weights are gathered into could take no gradient later
            logits = model(input_ids=inputs, use_cache=False).logits
        yield logits, targets


def accuracy(
    model: Any, problems: Sequence[Problem], encode: Encode, end: int, *, logits_max: int = LOGITS_MAX
) -> float:
    """The share of problems that greedy decoding answers exactly."""
    right = 0
    for logits, targets in scored(model, answered(problems, encode, end), logits_max=logits_max):
        right += int(((logits.argmax(-1) == targets) | (targets == NOT_JUDGED)).all(1).sum())
    return right / len(problems)
