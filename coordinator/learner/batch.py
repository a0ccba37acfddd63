"""From groups of unequal length to rectangular tensors.

- Prompts are padded on the left, completions on the right: the two meet in one column, where a prompt's cache ends and
  its completions begin.
- A padded place has mask 0 and log-probability 0, and no say in any mean.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch.nn.utils.rnn import pad_sequence

from protocol.learning import TrainingGroup
from protocol.rollout import unpack_tokens


@dataclass(frozen=True)
class Tensors:
    """One update's data: G prompts of at most P tokens, N samples of at most T tokens."""

    prompts: torch.Tensor  # [G, P] int64
    prompt_mask: torch.Tensor  # [G, P] 1 = token, 0 = padding
    owners: torch.Tensor  # [N] the group of each sample
    tokens: torch.Tensor  # [N, T] int64
    mask: torch.Tensor  # [N, T] float, 1 = token
    behaviour: torch.Tensor  # [N, T] log-probabilities by the version that sampled
    rewards: torch.Tensor  # [N]


def collate(groups: Sequence[TrainingGroup]) -> Tensors:
    """The tensors of one update."""
    samples = [(number, sample) for number, group in enumerate(groups) for sample in group.samples]
    prompts = [_tokens(group.prompt) for group in groups]
    tokens = [_tokens(sample.tokens) for _, sample in samples]
    behaviour = [torch.from_numpy(np.frombuffer(sample.logprobs, "<f4").astype(np.float32)) for _, sample in samples]
    return Tensors(
        prompts=pad_sequence(prompts, batch_first=True, padding_side="left"),
        prompt_mask=pad_sequence([torch.ones_like(prompt) for prompt in prompts], True, padding_side="left"),
        owners=torch.tensor([number for number, _ in samples]),
        tokens=pad_sequence(tokens, batch_first=True),
        mask=pad_sequence([torch.ones(len(row)) for row in tokens], batch_first=True),
        behaviour=pad_sequence(behaviour, batch_first=True),
        rewards=torch.tensor([sample.reward for _, sample in samples], dtype=torch.float32),
    )


def _tokens(data: bytes) -> torch.Tensor:
    return torch.from_numpy(unpack_tokens(data).astype(np.int64))
