"""Greedy exact-match accuracy, and the tensors of problems whose answers are known.

- A greedy completion equals the answer exactly when each token of the answer, the end token included, is the likeliest
  after those before it. So one forward pass over the answers tells what decoding them one by one would.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence

from protocol.tasks import Problem, Prompt

Encode = Callable[[Prompt], list[int]]
"""Text → tokens, without special ones; messages as the policy's template has them."""

NOT_JUDGED = -100
"""The target of prompt and padding, as `torch.nn.functional.cross_entropy` ignores it."""

ROWS_AT_ONCE = 512


def answered(problems: Sequence[Problem], encode: Encode, end: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs and next-token targets of problems with their answers: [N, L], [N, L]."""
    inputs, targets = [], []
    for problem in problems:
        asked, said = encode(problem.prompt), [*encode(problem.answer), end]
        inputs.append(torch.tensor(asked + said[:-1]))
        targets.append(torch.tensor([NOT_JUDGED] * (len(asked) - 1) + said))
    return pad_sequence(inputs, True), pad_sequence(targets, True, padding_value=NOT_JUDGED)


def accuracy(model: Any, problems: Sequence[Problem], encode: Encode, end: int) -> float:
    """The share of problems that greedy decoding answers exactly."""
    inputs, targets = answered(problems, encode, end)
    right = 0
    with torch.no_grad():  # in inference mode, what sharded weights are gathered into could take no gradient later
        for start in range(0, len(inputs), ROWS_AT_ONCE):
            rows, wanted = inputs[start : start + ROWS_AT_ONCE], targets[start : start + ROWS_AT_ONCE]
            likeliest = model(input_ids=rows, use_cache=False).logits.argmax(-1)  # [N, L]
            right += int(((likeliest == wanted) | (wanted == NOT_JUDGED)).all(1).sum())
    return right / len(problems)
