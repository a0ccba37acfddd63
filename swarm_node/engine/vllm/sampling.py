"""`protocol.work.sampling` inside vLLM: a logits processor of its V1 model runner, for every row of a batch at once.

- It draws the token itself, and keeps only one finite logit per row: that of the token, with its log-probability at the
  version's temperature as the value. vLLM then samples greedily, with `logprobs_mode="processed_logits"`, and can only
  return this token.
- Where the logits are no distribution, that value is infinite, which no valid policy gives.
- `extra_args` of a request define the draw: `seed`, `sample`, `temperature`, `own_temperature`, and `start`, the
  position of its first token; or `forced`, fixed tokens whose log-probabilities the canary needs.
- The position is `start` plus the request's number of tokens, also after a preemption, which computes a text again.
"""

from dataclasses import dataclass
from typing import Any

import torch
from vllm import SamplingParams
from vllm.v1.sample.logits_processor import BatchUpdate, LogitsProcessor, MoveDirectionality

from protocol.work.sampling import uniform_table
from swarm_exact import drawing
from swarm_node.engine.torch import sampler


@dataclass(frozen=True)
class RequestDraw:
    """Draw parameters of one request."""

    temperature: float
    own_temperature: float | None
    uniforms: list[float]
    """The uniform number of each position from `start` on."""
    forced: list[int]
    drawn: list[int]
    """The request's tokens so far: vLLM's own list, which grows."""


class SeedBound(LogitsProcessor):  # type: ignore[misc]  # vLLM is not there when types are checked
    """Logits processor of a whole engine; rows are those of the batch."""

    def __init__(self, vllm_config: Any, device: torch.device, is_pin_memory: bool) -> None:
        self._rows: dict[int, RequestDraw] = {}

    def is_argmax_invariant(self) -> bool:
        return False

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        if batch_update is None:
            return
        for index in batch_update.removed:
            self._rows.pop(index, None)
        added = [(index, params, drawn) for index, params, _, drawn in batch_update.added]
        for (index, params, drawn), uniforms in zip(added, _uniforms([params for _, params, _ in added]), strict=True):
            wanted = params.extra_args
            temperatures = wanted["temperature"], wanted["own_temperature"]
            self._rows[index] = RequestDraw(*temperatures, uniforms, wanted["forced"], drawn)
        for first, second, direction in batch_update.moved:
            moving, other = self._rows.pop(first, None), self._rows.pop(second, None)
            if moving is not None:
                self._rows[second] = moving
            if other is not None and direction == MoveDirectionality.SWAP:
                self._rows[first] = other

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        rows = [self._rows[index] for index in range(len(logits))]
        places = [len(row.drawn) for row in rows]
        temperatures = [row.temperature for row in rows]
        own = sampler.drawn_at(temperatures, [row.own_temperature for row in rows], logits.device)
        chances = [row.uniforms[place] for row, place in zip(rows, places, strict=True)]
        uniforms = torch.tensor(chances, dtype=torch.float64, device=logits.device)
        tokens, logprobs = drawing.draw(
            logits, torch.tensor(temperatures, dtype=torch.float32, device=logits.device), uniforms, own
        )
        for number, (row, place) in enumerate(zip(rows, places, strict=True)):
            if row.forced:
                tokens[number] = row.forced[place]
                logprobs[number] = torch.log_softmax(logits[number], dim=-1)[row.forced[place]]
        only = torch.full_like(logits, -torch.inf)
        return only.scatter_(1, tokens[:, None], logprobs.nan_to_num(nan=torch.inf)[:, None])


def _uniforms(wanted: list[SamplingParams]) -> list[list[float]]:
    """Return each request's uniform numbers, one for each token that it may draw."""
    if not wanted:
        return []
    seeds, samples, starts = ([params.extra_args[name] for params in wanted] for name in ("seed", "sample", "start"))
    ends = [start + params.max_tokens for start, params in zip(starts, wanted, strict=True)]
    table = uniform_table(seeds, samples, max(ends)).tolist()
    return [row[start:end] for row, start, end in zip(table, starts, ends, strict=True)]
