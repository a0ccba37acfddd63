"""An engine for the bench: any dtype, temperature and truncation; the shipped one has only what is honest.

- Prompts of one call have one length, so nothing is padded; rows that have ended run on until the last one ends.
- With top_p = 1 it draws what the shipped engine draws: `protocol.work.sampling`, at the temperature asked for.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from protocol.work.rollout import Completion, PolicyBounds
from protocol.work.sampling import uniform_table


@dataclass(frozen=True)
class Group:
    """The request of a lease."""

    number: int
    prompt: list[int]
    seed: int
    samples: int


def sample(
    model: Any, groups: Sequence[Group], bounds: PolicyBounds, *, temperature: float = 1.0, top_p: float = 1.0
) -> list[tuple[Completion, ...]]:
    """The completions of every group, with the log-probabilities of what was drawn from."""
    rows = [(group, number) for group in groups for number in range(group.samples)]
    uniforms = torch.from_numpy(
        uniform_table([group.seed for group, _ in rows], [number for _, number in rows], bounds.max_new_tokens)
    )
    fed = torch.tensor([group.prompt for group, _ in rows])
    ended = torch.zeros(len(rows), dtype=torch.bool)
    tokens, logprobs, cache = [], [], None
    with torch.inference_mode():
        for position in range(bounds.max_new_tokens):
            out = model(input_ids=fed, past_key_values=cache, use_cache=True, logits_to_keep=1)
            cache = out.past_key_values
            scores = truncated(torch.log_softmax(out.logits[:, -1].float() / temperature, -1), top_p)
            drawn = draw(scores, uniforms[:, position])
            tokens.append(drawn)
            logprobs.append(scores.gather(1, drawn[:, None])[:, 0])
            ended |= torch.isin(drawn, torch.tensor(sorted(bounds.end_tokens)))
            if ended.all():
                break
            fed = drawn[:, None]
    said = iter(zip(torch.stack(tokens, 1).numpy(), torch.stack(logprobs, 1).numpy(), strict=True))
    return [tuple(_cut(*next(said), bounds) for _ in range(group.samples)) for group in groups]


def draw(scores: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
    """`protocol.work.sampling.pick` for every row."""
    cumulative = scores.exp().double().cumsum(-1)
    return torch.searchsorted(cumulative, uniforms[:, None] * cumulative[:, -1:], right=True)[:, 0]


def truncated(scores: torch.Tensor, top_p: float) -> torch.Tensor:
    """The distribution without its tail: the likeliest tokens that make up top_p together."""
    if top_p >= 1:
        return scores
    ranked, order = scores.sort(-1, descending=True)
    before = ranked.exp().cumsum(-1) - ranked.exp()
    dropped = torch.zeros_like(scores, dtype=torch.bool).scatter(-1, order, before >= top_p)
    return torch.log_softmax(scores.masked_fill(dropped, -torch.inf), -1)


def _cut(tokens: np.ndarray, logprobs: np.ndarray, bounds: PolicyBounds) -> Completion:
    """A row up to its end token."""
    ends = np.isin(tokens, list(bounds.end_tokens))
    length = int(ends.argmax()) + 1 if ends.any() else bounds.max_new_tokens
    return Completion(tokens[:length].astype(np.uint32), logprobs[:length], "stop" if ends.any() else "length")
