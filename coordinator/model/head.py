"""The log-probabilities of chosen tokens by the output layer, without ever holding the logits of all places.

- The vocabulary is the largest dimension of a small model: with 151,936 tokens, the logits of 1000 places are 600 MB.
  So places are computed in chunks, in the forward pass and again in the backward pass. Only three numbers of each are
  kept: the log of the sum of its exponentiated logits, the logit of the drawn token, and the entropy.
- Products are in `dtype`, all results after them in float32.
- Changes to logits are recognised by their names in the configurations of model families: a factor (Cohere, Granite,
  Falcon-H1), a cap (Gemma 2), a bias (Phi). The comparison in `forward` must detect any other change.
"""

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch

CHUNK_BYTES = 64 * 2**20
"""The least bytes of logits at a time; large enough for matrix products at full speed in small models."""

OF_GRADIENT = 8
"""The logits at a time have at least an eighth of the bytes of the gradient of the output layer's weight.

Each chunk reads and writes that whole gradient, so few chunks are faster. The gradient exists anyway, and an eighth
more rarely matters. The size depends on shapes only, so an update does not depend on a card's free memory.
"""


def body_of(model: Any) -> Any:
    """Return the part of a causal model that computes its last states."""
    body = model.get_decoder()
    return model.model if body is model else body


@dataclass(frozen=True)
class Head:
    """The output layer: logits = cap · tanh(factor · (W h + bias) / cap)."""

    output: Any
    factor: float = 1.0
    cap: float = 0.0
    """The cap; 0 means none."""

    @staticmethod
    def for_model(model: Any) -> "Head":
        """Return the head that a model's configuration describes."""
        config = model.config.get_text_config()

        def named(*names: str) -> float:
            return float(next((value for name in names if (value := getattr(config, name, None))), 0.0))

        factor = (named("logit_scale", "lm_head_multiplier") or 1.0) / (named("logits_scaling") or 1.0)
        return Head(model.get_output_embeddings(), factor, named("final_logit_softcapping", "logits_soft_cap"))

    def logits(self, states: torch.Tensor) -> torch.Tensor:
        """Return the logits of states, [..., H] → [..., V], in float32."""
        logits: torch.Tensor = self.output(states).float() * self.factor
        return (logits / self.cap).tanh_() * self.cap if self.cap else logits

    def selected_logprobs(
        self,
        hidden: torch.Tensor,
        source: torch.Tensor,
        tokens: torch.Tensor,
        *,
        temperature: float,
        dtype: torch.dtype,
        entropy_gradient: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return `selected_logprobs` with this head."""
        weight, bias = self.output.weight, getattr(self.output, "bias", None)
        if bias is not None:  # a column of the matrix, for an input that is always 1
            weight = torch.cat([weight, bias[:, None]], dim=1)
            hidden = torch.cat([hidden, torch.ones_like(hidden[:, :1])], dim=1)
        cap = self.cap / self.factor
        temperature = temperature / self.factor
        return selected_logprobs(
            hidden,
            weight,
            source,
            tokens,
            temperature=temperature,
            dtype=dtype,
            cap=cap,
            entropy_gradient=entropy_gradient,
        )


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
        cap: float,
        entropy_gradient: bool,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        total, entropy = (hidden.new_empty(len(hidden), dtype=torch.float32) for _ in range(2))
        logprobs = hidden.new_empty(len(source), dtype=torch.float32)
        head = weight.to(dtype)
        ctx.chunk_rows = chunk_rows(weight, learns=ctx.needs_input_grad[1])
        for rows, pairs in _chunks(len(hidden), ctx.chunk_rows, source):
            logits = _logits(hidden[rows], head, temperature, dtype, cap)  # [rows, V]
            total[rows] = logits.logsumexp(1)
            within = source[pairs] - rows.start
            logprobs[pairs] = logits[within, tokens[pairs]] - total[rows][within]
            expected = (logits - total[rows, None]).exp_().mul_(logits).sum(1)
            entropy[rows] = total[rows] - expected
            del logits  # before the next chunk is computed
        ctx.save_for_backward(hidden, weight, source, tokens, total, entropy)
        ctx.temperature, ctx.dtype, ctx.cap, ctx.entropy_gradient = temperature, dtype, cap, entropy_gradient
        if not entropy_gradient:
            ctx.mark_non_differentiable(entropy)
        return logprobs, entropy

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor, of_entropy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Return the gradients of `hidden` and `weight`.

        For each state, with p its probabilities, H its entropy, and m the tokens that it predicts:

            ∂loss/∂logit_v = Σ_m gradient_m · (1[v = token_m] − p_v) − of_entropy · p_v · (log p_v + H)
        """
        hidden, weight, source, tokens, total, entropy = ctx.saved_tensors
        head = weight.to(ctx.dtype)
        to_hidden = torch.empty_like(hidden)
        to_weight = torch.zeros_like(weight) if ctx.needs_input_grad[1] else None
        of_row = torch.zeros_like(total).index_add_(0, source, gradient)  # [R] Σ_m gradient_m
        for rows, pairs in _chunks(len(hidden), ctx.chunk_rows, source):
            logits = _logits(hidden[rows], head, ctx.temperature, ctx.dtype, ctx.cap)
            cap_slope = 1.0 - (logits * (ctx.temperature / ctx.cap)) ** 2 if ctx.cap else 1.0
            slopes = logits.sub_(total[rows, None])  # [rows, V] log p, changed in place to ∂loss/∂logit
            factor = -of_row[rows, None]
            if ctx.entropy_gradient:  # this needs one more chunk of logits in memory
                surprise = slopes + entropy[rows, None]
                factor = surprise.mul_(of_entropy[rows, None]).neg_().add_(factor)
            slopes = slopes.exp_().mul_(factor)
            slopes.index_put_((source[pairs] - rows.start, tokens[pairs]), gradient[pairs], accumulate=True)
            slopes = slopes.div_(ctx.temperature).mul_(cap_slope).to(ctx.dtype)
            to_hidden[rows] = (slopes @ head).to(hidden.dtype)
            if to_weight is not None:
                to_weight.addmm_(slopes.T.to(weight.dtype), hidden[rows].to(weight.dtype))
            del logits, slopes, cap_slope  # before the next chunk is computed
        return to_hidden, to_weight, None, None, None, None, None, None


def selected_logprobs(
    hidden: torch.Tensor,  # [R, H] states that predict something
    weight: torch.Tensor,  # [V, H]
    source: torch.Tensor,  # [M] the state of each prediction, ascending
    tokens: torch.Tensor,  # [M] the token that was drawn
    *,
    temperature: float,
    dtype: torch.dtype,
    cap: float = 0.0,  # the cap of the logits, by tanh; 0: none
    entropy_gradient: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return log-probabilities [M] with gradient, and the entropy of each state [R], with `entropy_gradient` if set."""
    logprobs, entropy = _SelectedLogprobs.apply(  # type: ignore[no-untyped-call]  # torch leaves it unannotated
        hidden, weight, source, tokens, temperature, dtype, cap, entropy_gradient
    )
    return logprobs, entropy


def chunk_rows(weight: torch.Tensor, *, learns: bool) -> int:
    """Return the number of states in a chunk; `learns` is True if the output layer's weight has a gradient."""
    size_bytes = max(CHUNK_BYTES, weight.numel() * 4 // OF_GRADIENT if learns else 0)
    return max(1, size_bytes // (4 * weight.shape[0]))


def _chunks(rows: int, size: int, source: torch.Tensor) -> list[tuple[slice, slice]]:
    """Return slices of the states, `size` in each, and the slice of the predictions of each."""
    bounds = torch.arange(0, rows + size, size).clamp(max=rows)
    ends = torch.searchsorted(source, bounds.to(source.device)).tolist()
    marks = list(zip(bounds.tolist(), ends, strict=True))
    return [(slice(a, b), slice(p, q)) for (a, p), (b, q) in pairwise(marks) if b > a]


def _logits(
    hidden: torch.Tensor, head: torch.Tensor, temperature: float, dtype: torch.dtype, cap: float
) -> torch.Tensor:
    logits = (hidden.to(dtype) @ head.T).float()
    if cap:
        logits = logits.div_(cap).tanh_().mul_(cap)
    return logits if temperature == 1.0 else logits.div_(temperature)
