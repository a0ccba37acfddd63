"""The decoder of exact nodes: the cache's rows over `swarm_exact.model`, whose results depend on each text alone.

- The auditor of a round uses the same model; both compute in float32.
- Prompts are computed without padding, all tokens of all prompts in one call.
"""

from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import torch

from swarm_exact.model import ExactModel, numerics
from swarm_exact.shape import ModelShape
from swarm_node.engine.decoder import SavedRow
from swarm_node.engine.torch import weights
from swarm_node.engine.torch.sampler import TorchLogits

WIDTH_STEP = 64
"""Positions for which the cache has space beyond the prompts."""


class ExactDecoder:
    """`Decoder` of one policy folder."""

    joins_midway = True

    def __init__(self, folder: Path, config: dict[str, Any], device: torch.device) -> None:
        shape = ModelShape.from_config(config)
        self._model = ExactModel(shape, device)
        self.device = device
        self.vocab_size, self.positions_max = shape.vocabulary, int(config["max_position_embeddings"])
        self.parameters = self._model.weights.parameters
        self._cache = self._model.cache()
        self._lengths = torch.zeros(0, dtype=torch.long, device=device)  # [live rows]
        self._tensors = weights.ModelTensors(self._model.weights.places, self._model.weights.ignored)
        if wrong := self._tensors.fill(folder):
            raise ValueError(f"its tensors are not those that config.json describes: {', '.join(wrong[:5])}")
        self._model.check()
        self.numerics = numerics(shape, device)

    def swap(self, folder: Path) -> bool:
        return self._tensors.swap(folder, used=self._model.weights.named)

    def prefill(self, prompts: Sequence[Sequence[int]], copies: Sequence[int]) -> TorchLogits:
        counts = torch.tensor(copies, device=self.device)
        owners = torch.arange(len(prompts), device=self.device).repeat_interleave(counts)
        first, last = len(self._lengths), len(self._lengths) + len(owners)
        starts = first + counts.cumsum(0) - counts  # the first row of each prompt
        self._make_rows(last, max(map(len, prompts)))
        states = self._extend(prompts, starts.tolist(), [0] * len(prompts))
        for prompt, start, copied in zip(prompts, starts.tolist(), copies, strict=True):
            self._cache.copy(start, copied - 1, len(prompt))
        lengths = torch.tensor([len(prompt) for prompt in prompts], device=self.device)
        self._lengths = torch.cat((self._lengths, lengths[owners]))
        return TorchLogits(self._model.logits(states)[owners])

    def decode(self, tokens: Sequence[int]) -> TorchLogits:
        rows = len(self._lengths)
        self._cache.grow(rows, int(self._lengths.max()) + 1, rows)
        states = self._model.extend(self._cache, torch.tensor(tokens, device=self.device), None, self._lengths)
        self._lengths = self._lengths + 1
        return TorchLogits(self._model.logits(states))

    def move(self, sources: Sequence[int], targets: Sequence[int], rows: int) -> None:
        if sources:
            self._cache.values[:, :, :, targets] = self._cache.values[:, :, :, sources]
            self._lengths[targets] = self._lengths[sources]
        self._lengths = self._lengths[:rows].clone()

    def save(self, row: int) -> SavedRow:
        values = self._cache.values[:, :, :, row].clone()
        return SavedRow(values, int(self._lengths[row]), values.numel() * values.element_size())

    def resume(self, saved: Sequence[SavedRow], texts: Sequence[Sequence[int]]) -> TorchLogits:
        first, last = len(self._lengths), len(self._lengths) + len(saved)
        self._make_rows(last, max(map(len, texts)))
        for number, row in enumerate(saved, first):
            blocks = min(row.values.shape[2], self._cache.values.shape[2])
            self._cache.values[:, :, :blocks, number] = row.values[:, :, :blocks]
        new = [text[row.length :] for row, text in zip(saved, texts, strict=True)]
        states = self._extend(new, list(range(first, last)), [row.length for row in saved])
        lengths = torch.tensor([len(text) for text in texts], device=self.device)
        self._lengths = torch.cat((self._lengths, lengths))
        return TorchLogits(self._model.logits(states))

    def clear(self) -> None:
        self._lengths = self._lengths[:0].clone()
        self._cache.clear()

    def _make_rows(self, last: int, width: int) -> None:
        """Make space for new rows up to `last`, filled with zeros: a NaN of an earlier sample would spread."""
        first = len(self._lengths)
        if not self._cache.grow(last, width + WIDTH_STEP, first):
            self._cache.values[:, :, :, first:last] = 0

    def _extend(self, texts: Sequence[Sequence[int]], rows: Sequence[int], starts: Sequence[int]) -> torch.Tensor:
        """Add texts to rows, from positions on; return the state of each text's last token: [texts, hidden]."""
        lengths = torch.tensor([len(text) for text in texts], device=self.device)
        owners = torch.arange(len(texts), device=self.device).repeat_interleave(lengths)
        places = torch.cat([torch.arange(len(text), device=self.device) for text in texts])
        tokens = torch.tensor([*chain.from_iterable(texts)], device=self.device)
        begun = torch.tensor(starts, device=self.device)[owners]
        states = self._model.extend(self._cache, tokens, torch.tensor(rows, device=self.device)[owners], begun + places)
        return states[lengths.cumsum(0) - 1]
