"""From groups of unequal length to the tensors of one update, and to the pieces in which it is computed.

- What a loss looks at is small and rectangular: [N, T], completions padded on the right. What a model computes is
  large, so it is packed instead (see `packing`), and nothing here is ever fed to a model.
- A padded place has mask 0 and log-probability 0, and no say in any mean.
- A piece is whole samples of similar length, so that attention, which alone is computed in rectangles, wastes little.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch.nn.utils.rnn import pad_sequence

from protocol.learning import TrainingGroup
from protocol.rollout import unpack_tokens


@dataclass(frozen=True)
class Tensors:
    """One update's data: G prompts, N samples of at most T tokens."""

    prompts: tuple[torch.Tensor, ...]  # G times [P_g] int64
    owners: torch.Tensor  # [N] the group of each sample, in ascending order
    tokens: torch.Tensor  # [N, T] int64
    mask: torch.Tensor  # [N, T] float, 1 = token
    behaviour: torch.Tensor  # [N, T] log-probabilities by the version that sampled
    rewards: torch.Tensor  # [N]

    @property
    def lengths(self) -> torch.Tensor:
        return self.mask.sum(1).long()  # [N]


def collate(groups: Sequence[TrainingGroup]) -> Tensors:
    """The tensors of one update."""
    samples = [(number, sample) for number, group in enumerate(groups) for sample in group.samples]
    tokens = [_tokens(sample.tokens) for _, sample in samples]
    behaviour = [torch.from_numpy(np.frombuffer(sample.logprobs, "<f4").astype(np.float32)) for _, sample in samples]
    return Tensors(
        prompts=tuple(_tokens(group.prompt) for group in groups),
        owners=torch.tensor([number for number, _ in samples]),
        tokens=pad_sequence(tokens, batch_first=True),
        mask=pad_sequence([torch.ones(len(row)) for row in tokens], batch_first=True),
        behaviour=pad_sequence(behaviour, batch_first=True),
        rewards=torch.tensor([sample.reward for _, sample in samples], dtype=torch.float32),
    )


def pieces(data: Tensors, chosen: torch.Tensor, tokens_max: int) -> Iterator[torch.Tensor]:
    """The chosen samples in pieces of at most so many tokens, prompts counted once; one sample is never cut.

    A group stays together where it fits, since its prompt is computed in every piece that it has samples in.
    """
    if not tokens_max:
        tokens_max = int(data.mask.sum()) + sum(map(len, data.prompts))
    lengths, owners = data.lengths, data.owners
    longest = torch.zeros(len(data.prompts), dtype=torch.long).scatter_reduce(0, owners, lengths, "amax")
    order = sorted(chosen.tolist(), key=lambda row: (int(longest[owners[row]]), int(owners[row]), int(lengths[row])))
    piece: list[int] = []
    room, prompt = tokens_max, -1
    for row in order:
        cost = int(lengths[row]) + (len(data.prompts[owners[row]]) if owners[row] != prompt else 0)
        if piece and cost > room:
            yield torch.tensor(piece).sort().values
            piece, room = [], tokens_max
            cost = int(lengths[row]) + len(data.prompts[owners[row]])
        piece.append(row)
        room, prompt = room - cost, int(owners[row])
    if piece:
        yield torch.tensor(piece).sort().values


def _tokens(data: bytes) -> torch.Tensor:
    return torch.from_numpy(unpack_tokens(data).astype(np.int64))
