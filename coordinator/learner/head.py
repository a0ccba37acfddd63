"""The log-probabilities of chosen tokens under the output layer, without ever holding the logits of all places.

- The vocabulary is the widest thing in a small model: at 151,936 tokens, the logits of a thousand places are 600 MB. So
  places go through in chunks, forward and again backward, and of each only three numbers stay: what its logits add
  up to, the logit of the token that was drawn, and the entropy.
- Products are in `dtype`, everything after them in float32.
"""

from itertools import pairwise
from typing import Any

import torch

CHUNK_BYTES = 64 * 2**20
"""Of logits at a time; large enough for matrix products at full speed."""


class _SelectedLogprobs(torch.autograd.Function):
    """hidden [R, H], weight [V, H], source [M] ascending, tokens [M] → log-probabilities [M], entropy [R]."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        source: torch.Tensor,
        tokens: torch.Tensor,
        temperature: float,
        dtype: torch.dtype,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        total, entropy = (hidden.new_empty(len(hidden), dtype=torch.float32) for _ in range(2))
        logprobs = hidden.new_empty(len(source), dtype=torch.float32)
        head = weight.to(dtype)
        for rows, pairs in _chunks(len(hidden), weight.shape[0], source):
            logits = _logits(hidden[rows], head, temperature, dtype)  # [rows, V]
            total[rows] = logits.logsumexp(1)
            within = source[pairs] - rows.start
            logprobs[pairs] = logits[within, tokens[pairs]] - total[rows][within]
            expected = (logits - total[rows, None]).exp_().mul_(logits).sum(1)
            entropy[rows] = total[rows] - expected
        ctx.save_for_backward(hidden, weight, source, tokens, total)
        ctx.temperature, ctx.dtype = temperature, dtype
        ctx.mark_non_differentiable(entropy)
        return logprobs, entropy

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor, _: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        hidden, weight, source, tokens, total = ctx.saved_tensors
        head = weight.to(ctx.dtype)
        to_hidden = torch.empty_like(hidden)
        to_weight = torch.zeros_like(weight) if ctx.needs_input_grad[1] else None
        of_row = torch.zeros_like(total).index_add_(0, source, gradient)  # [R]
        for rows, pairs in _chunks(len(hidden), weight.shape[0], source):
            logits = _logits(hidden[rows], head, ctx.temperature, ctx.dtype)
            away = logits.sub_(total[rows, None]).exp_().mul_(-of_row[rows, None])  # [rows, V] −p · Σ gradient
            away.index_put_((source[pairs] - rows.start, tokens[pairs]), gradient[pairs], accumulate=True)
            away = away.div_(ctx.temperature).to(ctx.dtype)
            to_hidden[rows] = (away @ head).to(hidden.dtype)
            if to_weight is not None:
                to_weight.addmm_(away.T.to(weight.dtype), hidden[rows].to(weight.dtype))
        return to_hidden, to_weight, None, None, None, None


def selected_logprobs(
    hidden: torch.Tensor,  # [R, H] states that predict something
    weight: torch.Tensor,  # [V, H]
    source: torch.Tensor,  # [M] the state of each prediction, ascending
    tokens: torch.Tensor,  # [M] the token that was drawn
    *,
    temperature: float,
    dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probabilities [M] with gradient, and the entropy of each state [R] without."""
    logprobs, entropy = _SelectedLogprobs.apply(  # type: ignore[no-untyped-call]  # torch leaves it unannotated
        hidden, weight, source, tokens, temperature, dtype
    )
    return logprobs, entropy


def _chunks(rows: int, vocabulary: int, source: torch.Tensor) -> list[tuple[slice, slice]]:
    """Slices of the states, each with the slice of the predictions that are theirs."""
    size = max(1, CHUNK_BYTES // (4 * vocabulary))
    bounds = torch.arange(0, rows + size, size).clamp(max=rows)
    ends = torch.searchsorted(source, bounds.to(source.device)).tolist()
    marks = list(zip(bounds.tolist(), ends, strict=True))
    return [(slice(a, b), slice(p, q)) for (a, p), (b, q) in pairwise(marks) if b > a]


def _logits(hidden: torch.Tensor, head: torch.Tensor, temperature: float, dtype: torch.dtype) -> torch.Tensor:
    logits = (hidden.to(dtype) @ head.T).float()
    return logits if temperature == 1.0 else logits.div_(temperature)
