"""The auditor's own node: one policy version in 16 bits, which samples as an honest node on torch does.

- All weights and logits are in that precision, and probabilities are computed in float32, as in `swarm_node`'s torch
  engine for architectures without a decoder of its own.
- The rows of a group share one prompt, so none of them needs padding.
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch.nn.functional import linear

from coordinator.audit.rounding import Drawing
from coordinator.audit.scorer import load_policy, nobody_watches
from coordinator.base.files import read_at_most
from coordinator.rules.replay import Integers
from coordinator.tasks.task_text import policy_bounds
from protocol.errors import AuditFailed
from protocol.limits import POLICY_CONFIG_MAX_BYTES, TOKENS_MAX
from protocol.work.rollout import Completion
from protocol.work.sampling import pick, uniform_table

PRECISIONS = {"bf16": torch.bfloat16, "fp16": torch.float16}
"""The precisions by their names in classes of nodes. Others belong to engines that an auditor does not have."""


class ReferenceNode:
    """A model in memory, ready to sample."""

    def __init__(
        self, folder: Path, precision: str, *, device: str = "cpu", moved: Callable[[], None] = nobody_watches
    ) -> None:
        self.numerics = f"torch/{precision}/{torch.device(device).type}"
        self._device = torch.device(device)
        self._moved = moved
        try:
            self._model = load_policy(folder, PRECISIONS[precision], device)
            if self._device.type == "cpu":
                _multiply_in_float32(self._model)
            bounds = policy_bounds(lambda name: read_at_most(folder / name, POLICY_CONFIG_MAX_BYTES), TOKENS_MAX)
        except AuditFailed:
            raise
        except Exception as error:  # invalid files can raise any error
            raise AuditFailed(f"The policy in {folder} cannot be loaded: {error!r}") from error
        self._end_tokens = sorted(bounds.end_tokens)

    def sample(self, drawing: Drawing) -> list[Completion]:
        """Return the completions that an honest node samples for one prompt."""
        try:
            with torch.inference_mode():
                return self._sample(drawing)
        except RuntimeError as error:  # out of memory, or an operation that torch lacks in this precision
            raise AuditFailed(f"The policy cannot be sampled as {self.numerics}: {error}"[:300]) from error

    def _sample(self, drawing: Drawing) -> list[Completion]:
        count, length, temperature = drawing.count, drawing.length, drawing.temperature
        chances = uniform_table([drawing.seed] * count, range(count), length)  # [count, length]
        tokens, logprobs = np.zeros((count, length), np.int64), np.zeros((count, length), np.float32)
        lengths = np.full(count, length)
        out = self._forward(drawing.prompt.astype(np.int64)[None], None)
        out.past_key_values.reorder_cache(torch.zeros(count, dtype=torch.long, device=self._device))
        scores = self._scores(out, temperature).expand(count, -1)
        for place in range(length):
            tokens[:, place], logprobs[:, place] = _drawn(scores, chances[:, place])
            ended = np.isin(tokens[:, place], self._end_tokens)
            lengths = np.where(ended, np.minimum(lengths, place + 1), lengths)
            if place + 1 >= lengths.max():
                break
            out = self._forward(tokens[:, place, None], out.past_key_values)
            scores = self._scores(out, temperature)
        return [
            Completion(tokens[row, :end].astype("<u4"), logprobs[row, :end].astype("<f4"), finish="length")
            for row, end in enumerate(lengths.tolist())
        ]

    def _forward(self, tokens: Integers, cache: Any) -> Any:
        inputs = torch.from_numpy(tokens).to(self._device)
        out = self._model(input_ids=inputs, past_key_values=cache, use_cache=True, logits_to_keep=1)
        self._moved()
        return out

    def _scores(self, out: Any, temperature: float) -> torch.Tensor:
        return torch.log_softmax(out.logits[:, -1].float() / temperature, dim=-1).cpu()


def _multiply_in_float32(model: Any) -> None:
    """Compute each matrix product in float32 and round it once, as accelerators do; few processors support this.

    On other processors, torch takes four times as long for a product in bf16 as for one in float32.
    """
    for module in model.modules():
        if type(module) is nn.Linear:
            module.forward = partial(_rounded_linear, module)  # type: ignore[method-assign]  # replaces the method of this module only


def _rounded_linear(module: nn.Linear, inputs: torch.Tensor) -> torch.Tensor:
    return linear(inputs.float(), module.weight.float(), _widened(module.bias)).to(inputs.dtype)


def _widened(bias: torch.Tensor | None) -> torch.Tensor | None:
    return None if bias is None else bias.float()


def _drawn(scores: torch.Tensor, chances: NDArray[np.float64]) -> tuple[Integers, NDArray[np.float32]]:
    """Return the token that each row's uniform picks, and its log-probability."""
    odds = scores.exp().numpy()
    tokens = np.array([pick(row, chance) for row, chance in zip(odds, chances, strict=True)], np.int64)
    return tokens, scores.numpy()[np.arange(len(tokens)), tokens]
