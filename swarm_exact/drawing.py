"""`protocol.work.sampling` on tensors: a token for each row, and its log-probability.

- Probabilities are float32 and summed in float64 in token-id order, as in the definition: the same logits give the same
  token, bit for bit.
- Log-probabilities are those at the version's temperature. Only a batch with rows that are drawn at another one costs a
  second softmax.
- Rows are processed a few at a time, so that a large vocabulary stays in the CPU cache.
"""

import torch

from protocol import limits

BLOCK_VALUES = 2**18
"""Logits processed at once: with their sums 4 MiB, about the size of one core's caches."""


def draw(
    logits: torch.Tensor, temperatures: torch.Tensor, uniforms: torch.Tensor, own: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return tokens [rows] and their log-probabilities [rows], from logits [rows, V] and uniforms [rows].

    `own` are the temperatures at which the rows are drawn, if they are not those of the log-probabilities. The
    log-probability is NaN where the logits are no distribution; the token is then meaningless.
    """
    step = max(1, BLOCK_VALUES // logits.shape[1]) if logits.device.type == "cpu" else len(logits)
    blocks = (torch.split(values, step) for values in (logits, temperatures, uniforms, *([] if own is None else [own])))
    parts = [_draw(*block) for block in zip(*blocks, strict=True)]
    tokens, logprobs = zip(*parts, strict=True)
    return torch.cat(tokens), torch.cat(logprobs)


def _draw(
    logits: torch.Tensor, temperatures: torch.Tensor, uniforms: torch.Tensor, own: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    scores = drawn = torch.log_softmax(logits / temperatures[:, None], dim=-1)
    if own is not None:
        drawn = torch.log_softmax(logits / own.where(own > 0, 1.0)[:, None], dim=-1)
    cumulative = drawn.exp().cumsum(-1, dtype=torch.float64)
    total = cumulative[:, -1]
    targets = torch.minimum(uniforms * total, torch.nextafter(total, torch.zeros_like(total)))
    tokens = torch.searchsorted(cumulative, targets[:, None], right=True)
    if own is not None:
        tokens = tokens.where(own[:, None] > 0, logits.argmax(-1, keepdim=True))  # the first of equal ones
    tokens.clamp_(max=logits.shape[1] - 1)
    # Rounding may exceed 0; a token drawn at a higher temperature may be less likely than any that this one draws.
    logprobs = scores.gather(1, tokens)[:, 0].clamp_(limits.LOGPROB_MIN, 0)
    return tokens[:, 0], logprobs.where(total.isfinite(), torch.nan)
