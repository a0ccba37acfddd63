"""Many samples as one sequence without padding, each prompt in it only once.

    packed:  prompt 0 · prompt 1 · … · sample 0 · sample 1 · …        L tokens, all that a model's layers compute

- A sample's last token is predicted, and is no input; its first token is predicted from the last place of its prompt.
- Only attention needs rectangles. A `Rectangle` has the position of each packed token in one; its padding is zero and
  has no gradient. A prompt attends to itself; a sample attends to its prompt and itself.
- Samples whose lengths differ much are split into bands, each a rectangle of its own: otherwise one endless sample
  would pad all others to its length.
- A layer with a sliding window, as every other layer of Gemma, passes it with each call: places outside of it are
  masked. Attention's caps (Gemma 2) and sinks (GPT-OSS), which torch's own function lacks, are computed in this module.
- A transformers model gets all this as the argument `packing` and passes it to its attention; without it, attention is
  the usual one.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from coordinator.model.batch import Tensors
from swarm_exact.cards import repeat_heads

IMPLEMENTATION = "shared_prompts"

WINDOW = "window_when_packed"
"""The attribute set on every attention layer that passed a window; a layer without it would attend too far."""

PADDED_MAX = 2**13
"""The largest rectangle that is not split, however much of it is padding: more calls would cost more."""


_imitates_card: ContextVar[bool] = ContextVar("imitates_card", default=False)


@contextmanager
def imitating_card() -> Iterator[None]:
    """Compute attention as on a graphics card in this block, to measure the memory that it takes there."""
    before = _imitates_card.set(True)
    try:
        yield
    finally:
        _imitates_card.reset(before)


@dataclass(frozen=True)
class Rectangle:
    """Rows of unequal length, packed one after the other: R rows of at most W of the L tokens."""

    index: torch.Tensor  # [R, W] the packed place of each token, 0 for padding
    padding: torch.Tensor  # [R, W] bool
    row: torch.Tensor  # [L] the position of each packed token
    column: torch.Tensor  # [L]

    @staticmethod
    def of(lengths: torch.Tensor) -> "Rectangle":
        columns = torch.arange(int(lengths.max()) if len(lengths) else 0)
        padding = columns >= lengths[:, None]
        index = ((lengths.cumsum(0) - lengths)[:, None] + columns).masked_fill(padding, 0)
        return Rectangle(index, padding, *(~padding).nonzero(as_tuple=True))

    def to(self, device: torch.device) -> "Rectangle":
        return Rectangle(*(getattr(self, field.name).to(device) for field in fields(self)))

    @property
    def size(self) -> int:
        """Return the number of packed tokens."""
        return len(self.row)

    @property
    def lengths(self) -> torch.Tensor:
        """Return the tokens of each row: [R]."""
        return (~self.padding).sum(1)

    def spread(self, packed: torch.Tensor) -> torch.Tensor:
        """Copy packed [L, …] to rectangular [R, W, …], zero at padding."""
        return packed[self.index].masked_fill_(self.padding[:, :, None, None], 0)

    def gather(self, spread: torch.Tensor) -> torch.Tensor:
        """Copy rectangular [R, W, …] to packed [L, …]."""
        return spread[self.row, self.column]


@dataclass(frozen=True)
class Band:
    """Samples of similar length, one after the other."""

    samples: Rectangle
    owners: torch.Tensor  # [R] the prompt of each
    starts: torch.Tensor  # [R] the length of that prompt
    visible: (
        torch.Tensor
    )  # [R or 1, 1, W, P + W] bool: the places of the prompt and the sample that each place attends to

    @property
    def prompt_width(self) -> int:
        """Return P, the length of the longest of their prompts."""
        return self.visible.shape[3] - self.visible.shape[2]

    def within(self, window: int | None) -> torch.Tensor:
        """Return the visible places in layers that attend to the last `window` places only."""
        width = self.samples.index.shape[1]
        if window is None or self.visible.shape[3] <= window:
            return self.visible
        columns = torch.arange(max(width, self.prompt_width), device=self.visible.device)
        asked = self.starts[: len(self.visible), None] + columns[:width]  # [R or 1, W]
        places = torch.cat([columns[: self.prompt_width].expand(len(asked), -1), asked], dim=1)  # [R or 1, P + W]
        return self.visible & (asked[:, :, None] - places[:, None] < window)[:, None]

    def to(self, device: torch.device) -> "Band":
        return Band(*(getattr(self, field.name).to(device) for field in fields(self)))


@dataclass(frozen=True)
class Packing:
    """A piece of a batch as a model's input, and the places where the completion tokens are predicted."""

    tokens: torch.Tensor  # [1, L]
    positions: torch.Tensor  # [1, L]
    prompts: Rectangle
    bands: tuple[Band, ...]  # samples of more than one token: a completion of one token is no input
    rows: torch.Tensor  # [R] the packed places that predict something, in ascending order
    source: torch.Tensor  # [M] the one of them that predicts each completion token, in ascending order
    targets: torch.Tensor  # [M] the token
    places: torch.Tensor  # [M] row · T + column of that token in the piece's rectangle [n, T]


def pack(data: Tensors, chosen: torch.Tensor, device: torch.device) -> Packing:
    """Pack the chosen samples of a batch, with the prompts that they need."""
    groups, owners = torch.unique(data.owners[chosen], return_inverse=True)
    prompt_tokens = [data.prompts[group] for group in groups.tolist()]
    prompt_lengths = torch.tensor([len(prompt) for prompt in prompt_tokens])
    lengths = data.lengths[chosen]
    width = int(lengths.max())
    prompts = Rectangle.of(prompt_lengths)
    fed = [rows for rows in similar(lengths - 1) if len(rows)]  # the rows of each band's samples in the piece
    bands = [_band(prompts, owners[rows], lengths[rows] - 1) for rows in fed]
    nowhere = torch.zeros(0, dtype=torch.long)
    # The position of every input token in the piece's rectangle [n, T].
    row = torch.cat([nowhere, *(rows[band.samples.row] for rows, band in zip(fed, bands, strict=True))])
    column = torch.cat([nowhere, *(band.samples.column for band in bands)])

    # First tokens are predicted by the prompts' ends, the others by the places of the tokens before them.
    following = torch.arange(len(row))
    places = torch.cat([torch.arange(len(chosen)) * width, row * width + column + 1])
    return Packing(
        tokens=torch.cat([*prompt_tokens, data.tokens[chosen[row], column]])[None].to(device),
        positions=torch.cat([prompts.column, prompt_lengths[owners[row]] + column])[None].to(device),
        prompts=prompts.to(device),
        bands=tuple(band.to(device) for band in bands),
        rows=torch.cat([prompt_lengths.cumsum(0) - 1, prompts.size + following]).to(device),
        source=torch.cat([owners, len(groups) + following]).to(device),
        targets=data.tokens[chosen, :width].flatten()[places].to(device),
        places=places.to(device),
    )


def similar(lengths: torch.Tensor) -> list[torch.Tensor]:
    """Return the samples that have a length, in parts, each longer than half the longest, until the rest is small."""
    left = (lengths > 0).nonzero()[:, 0]
    parts = []
    while len(left) and len(left) * int(lengths[left].max()) > PADDED_MAX:
        long = lengths[left] > lengths[left].max() // 2
        parts.append(left[long])
        left = left[~long]
    return [*parts, left]


def _band(prompts: Rectangle, owners: torch.Tensor, lengths: torch.Tensor) -> Band:
    """Return the band of samples; each place attends to its prompt and to the places before it. Padding is last."""
    samples = Rectangle.of(lengths)
    prompt = ~prompts.padding[owners]  # [R, P]
    prompt = prompt[:, : int(prompt.sum(1).max())]
    if bool(prompt.all()):
        prompt = prompt[:1]
    width = samples.index.shape[1]
    itself = torch.ones(width, width, dtype=torch.bool).tril().expand(len(prompt), -1, -1)
    visible = torch.cat([prompt[:, None].expand(-1, width, -1), itself], dim=2)
    return Band(samples, owners, prompts.lengths[owners], visible[:, None])


class _Spread(torch.autograd.Function):
    """`Rectangle.spread`, whose gradient is `gather`: padding has no gradient."""

    @staticmethod
    def forward(ctx: Any, packed: torch.Tensor, rectangle: Rectangle) -> torch.Tensor:
        ctx.rectangle = rectangle
        return rectangle.spread(packed)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return ctx.rectangle.gather(gradient), None


class _Gather(torch.autograd.Function):
    """`Rectangle.gather`, whose gradient is `spread`: each place occurs once, so no gradients are added up."""

    @staticmethod
    def forward(ctx: Any, spread: torch.Tensor, rectangle: Rectangle) -> torch.Tensor:
        ctx.rectangle = rectangle
        return rectangle.gather(spread)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return ctx.rectangle.spread(gradient), None


def _spread(packed: torch.Tensor, rectangle: Rectangle) -> torch.Tensor:
    rows: torch.Tensor = _Spread.apply(packed, rectangle)  # type: ignore[no-untyped-call]  # torch leaves it unannotated
    return rows


def _gather(spread: torch.Tensor, rectangle: Rectangle) -> torch.Tensor:
    rows: torch.Tensor = _Gather.apply(spread, rectangle)  # type: ignore[no-untyped-call]  # torch leaves it unannotated
    return rows


def _attend(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, visible: torch.Tensor | None, scale: float, extras: Any
) -> torch.Tensor:
    """Compute attention of [R, heads, Q, D] to [R, kv_heads, K, D]: → [R, Q, heads, D]; causal if `visible` is None."""
    cap, sinks = extras.get("softcap"), extras.get("s_aux")
    grouped = query.shape[1] != key.shape[1]
    if grouped and (query.is_cuda or _imitates_card.get()):
        key, value, grouped = repeat_heads(key, query), repeat_heads(value, query), False
    if cap is None and sinks is None:
        values: torch.Tensor = scaled_dot_product_attention(
            query, key, value, attn_mask=visible, is_causal=visible is None, scale=scale, enable_gqa=grouped
        )
        return values.transpose(1, 2)
    key, value = (part.repeat_interleave(query.shape[1] // part.shape[1], dim=1) for part in (key, value))
    scores = query @ key.transpose(2, 3) * scale  # [R, heads, Q, K]
    if cap is not None:
        scores = (scores / cap).tanh() * cap
    if visible is None:
        visible = torch.ones(scores.shape[2:], dtype=torch.bool, device=scores.device).tril()
    scores = scores.masked_fill(~visible, float("-inf"))
    if sinks is None:
        weights = scores.float().softmax(-1)
    else:  # a place without content that every query attends to
        sink = sinks.reshape(1, -1, 1, 1).expand(len(scores), -1, scores.shape[2], -1)
        weights = torch.cat([scores, sink], dim=-1).float().softmax(-1)[..., :-1]
    return (weights.to(value.dtype) @ value).transpose(1, 2)


def _shared_prompt_attention(
    module: Any,
    query: torch.Tensor,  # [1, heads, L, D]
    key: torch.Tensor,  # [1, kv_heads, L, D]
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float,
    packing: Packing | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """Compute attention in transformers' interface; the result is [1, L, heads, D]."""
    if packing is None:
        if others.get("softcap") is None and others.get("s_aux") is None:
            return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **others)
        if attention_mask is None and query.shape[2] == 1:  # one place, which attends to all places before it
            attention_mask = torch.ones(1, 1, dtype=torch.bool, device=query.device)
        return _attend(query, key, value, attention_mask, scaling, others), None
    if (window := others.get("sliding_window")) is not None:
        setattr(module, WINDOW, window)
    packed = [part[0].transpose(0, 1) for part in (query, key, value)]  # each [L, heads, D]
    end = packing.prompts.size
    asked, keys, values = (_spread(part[:end], packing.prompts) for part in packed)
    near = _near(packing.prompts, window)
    answers = [_gather(_rows_attend(asked, keys, values, near, scaling, others), packing.prompts)]
    for band in packing.bands:
        start, end = end, end + band.samples.size
        q, k, v = (_spread(part[start:end], band.samples) for part in packed)
        before = slice(0, band.prompt_width)
        k = torch.cat([keys[:, before].index_select(0, band.owners), k], dim=1)
        v = torch.cat([values[:, before].index_select(0, band.owners), v], dim=1)
        answers.append(_gather(_rows_attend(q, k, v, band.within(window), scaling, others), band.samples))
    return torch.cat(answers)[None], None


def _rows_attend(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, visible: torch.Tensor | None, scale: float, extras: Any
) -> torch.Tensor:
    """Compute `_attend` for tensors in the order [R, places, heads, D]."""
    return _attend(query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2), visible, scale, extras)


def _near(prompts: Rectangle, window: int | None) -> torch.Tensor | None:
    """Return the visible places of prompts in layers with a window; None if all earlier places are visible."""
    width = prompts.index.shape[1]
    if window is None or width <= window:
        return None
    return torch.ones(width, width, dtype=torch.bool, device=prompts.index.device).tril().triu(1 - window)


AttentionInterface.register(IMPLEMENTATION, _shared_prompt_attention)
AttentionMaskInterface.register(IMPLEMENTATION, sdpa_mask)
