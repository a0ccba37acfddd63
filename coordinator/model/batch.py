"""The tensors of one update, made of groups of unequal length, and the pieces in which it is computed.

- The inputs of a loss are small and rectangular: [N, T], completions padded on the right. A model's inputs are large,
  so they are packed instead (see `packing`); the tensors of this module are never a model's input.
- A padded place has mask 0 and log-probability 0, and counts in no mean. The same is true for an environment's text,
  which is input of the model like a prompt.
- A piece has whole samples, of groups whose longest are of similar length: only attention is computed in rectangles.
"""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil

import numpy as np
import torch
from torch.nn.utils.rnn import pad_sequence

from protocol.work.learning import TrainingGroup, TrainingSample
from protocol.work.rollout import unpack_tokens


@dataclass(frozen=True)
class Tensors:
    """The data of one update: G prompts, N samples of at most T tokens."""

    prompts: tuple[torch.Tensor, ...]  # G times [P_g] int64
    owners: torch.Tensor  # [N] the group of each sample, in ascending order
    tokens: torch.Tensor  # [N, T] int64
    mask: torch.Tensor  # [N, T] float, 1 = token that was drawn; 0 = an environment's text, or padding
    behaviour: torch.Tensor  # [N, T] log-probabilities by the version that sampled
    rewards: torch.Tensor  # [N]
    weights: torch.Tensor  # [N] the factors of advantages
    taught: torch.Tensor  # [N, T] the mask without the tokens that the task's reward skips

    @property
    def lengths(self) -> torch.Tensor:
        """Return the tokens of each sample, which always ends with a drawn one: [N]."""
        return (self.mask * torch.arange(1, self.mask.shape[1] + 1)).amax(1).long()


def collate(groups: Sequence[TrainingGroup]) -> Tensors:
    """Return the tensors of one update."""
    samples = [(number, sample) for number, group in enumerate(groups) for sample in group.samples]
    tokens = [_tokens(sample.tokens) for _, sample in samples]
    behaviour = [torch.from_numpy(np.frombuffer(sample.logprobs, "<f4").astype(np.float32)) for _, sample in samples]
    mask = pad_sequence([_drawn(sample) for _, sample in samples], batch_first=True)
    taught = mask.clone()
    for row, (_, sample) in enumerate(samples):
        for start, end in sample.skip:
            taught[row, start:end] = 0.0
    return Tensors(
        prompts=tuple(_tokens(group.prompt) for group in groups),
        owners=torch.tensor([number for number, _ in samples]),
        tokens=pad_sequence(tokens, batch_first=True),
        mask=mask,
        behaviour=pad_sequence(behaviour, batch_first=True),
        rewards=torch.tensor([sample.reward for _, sample in samples], dtype=torch.float32),
        weights=torch.tensor([sample.weight for _, sample in samples], dtype=torch.float32),
        taught=taught,
    )


def minibatches(data: Tensors, count: int) -> list[torch.Tensor]:
    """Split the groups into `count` parts, or one for each group: → for each part the mask of its samples, [N] bool.

    Neighbours are in different parts: groups are in the order in which they were made, and neighbours in a file of
    problems are often alike.
    """
    count = min(count, len(data.prompts))
    return [data.owners % count == part for part in range(count)]


def pieces(
    data: Tensors, chosen: torch.Tensor, tokens_max: int, *, hands: int = 1, packed: bool = True
) -> list[torch.Tensor]:
    """Return the chosen samples in pieces of at most `tokens_max` tokens; a sample is never split.

    Prompts are counted once if samples are packed, else with each of their samples.

    A group stays together if it fits, since its prompt is computed in every piece that has samples of it. There are as
    few pieces as the bound allows, but the same number for each of the `hands` ranks, and of about the same size, as
    ranks wait for each other.
    """
    lengths, owners = data.lengths, data.owners
    longest = torch.zeros(len(data.prompts), dtype=torch.long).scatter_reduce(0, owners, lengths, "amax").tolist()
    samples = [(longest[owners[row]], int(owners[row]), int(lengths[row]), row) for row in chosen.tolist()]
    samples.sort()

    def cut(most: int) -> list[list[int]]:
        parts, room, prompt = list[list[int]](), -1, -1
        for _, owner, length, row in samples:
            cost = length + (0 if packed and owner == prompt else len(data.prompts[owner]))
            if cost > room:
                parts.append([])
                room, cost = most, length + len(data.prompts[owner])
            parts[-1].append(row)
            room, prompt = room - cost, owner
        return parts

    most = tokens_max or sum(length + len(data.prompts[owner]) for _, owner, length, _ in samples)
    wanted = hands * ceil(len(cut(most)) / hands)
    # The smallest bound that gives no more pieces than wanted makes them of about the same size.
    least = bisect_left(range(most), True, key=lambda size: len(cut(size)) <= wanted)
    return [torch.tensor(piece).sort().values for piece in cut(least)]


def _drawn(sample: TrainingSample) -> torch.Tensor:
    """Return 1 for each token that was drawn: [T]."""
    if not sample.sampled:
        return torch.ones(len(sample.tokens) // 4)
    return torch.from_numpy(np.frombuffer(sample.sampled, np.uint8).astype(np.float32))


def _tokens(data: bytes) -> torch.Tensor:
    return torch.from_numpy(unpack_tokens(data).astype(np.int64))
