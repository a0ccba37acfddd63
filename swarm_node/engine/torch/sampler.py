"""Logits of the torch engine, from which `swarm_exact.drawing` draws."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from swarm_exact.drawing import draw
from swarm_node.engine.decoder import OwnTemperatures

EXACT = ("cpu", "cuda")
"""Devices that compute in float64; Apple's and many of Intel's do not, so their logits are drawn from on the CPU."""


@dataclass(frozen=True)
class TorchLogits:
    """`Logits` on torch: [rows, V], in float32; on a device in `EXACT`."""

    values: torch.Tensor

    def __post_init__(self) -> None:
        if self.values.device.type not in EXACT:
            object.__setattr__(self, "values", self.values.cpu())

    def draw(
        self, temperatures: Sequence[float], uniforms: Sequence[float], own: OwnTemperatures = ()
    ) -> tuple[list[int], list[float]]:
        device = self.values.device
        exact = torch.tensor(uniforms, dtype=torch.float64, device=device)
        heats = torch.tensor(temperatures, dtype=torch.float32, device=device)
        tokens, logprobs = draw(self.values, heats, exact, drawn_at(temperatures, own, device))
        return tokens.tolist(), logprobs.tolist()

    def logprobs(self, tokens: Sequence[int]) -> NDArray[np.float32]:
        chosen = torch.tensor(tokens, device=self.values.device)[:, None]
        scores: NDArray[np.float32] = torch.log_softmax(self.values, dim=-1).gather(1, chosen)[:, 0].cpu().numpy()
        return scores


def drawn_at(temperatures: Sequence[float], own: OwnTemperatures, device: torch.device) -> torch.Tensor | None:
    """Return the temperature at which each row is drawn; None if that is the version's in every row."""
    if all(each is None for each in own):
        return None
    chosen = [each if each is not None else temperature for temperature, each in zip(temperatures, own, strict=True)]
    return torch.tensor(chosen, dtype=torch.float32, device=device)
