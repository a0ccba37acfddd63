"""The memory that an auditor needs, from a configuration alone: by phase, where it computes.

    load          the versions that it compares, and the largest weight while the last one is loaded
    self-check    the versions, and many samples at once compared with each alone
    replay        the versions, the activations of the fullest pass, and a slice of its logits
    rounding      the same beside a version in 16 bits, whose honest samples it measures

- Activations are measured on a model of fake tensors (see `simulated`); of a slice of logits, copies are counted.
- Weights for a card pass through the memory of the machine while they are loaded.
- Replays to the bit (classes `exact`) are not included: they take two more versions in float32.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from coordinator.audit.rounding import PRECISIONS
from coordinator.audit.scorer import BLOCK, HEAD_LOGITS_MAX
from coordinator.config import Config
from coordinator.learner.simulated import MEASURED_LAYERS, PhasedNeed, SimulatedModel
from coordinator.model.batch import Tensors
from coordinator.model.forward import predict
from coordinator.model.head import Head
from protocol import limits

PROCESS_BYTES = {"cpu": 700 * 2**20, "cuda": 3 * 2**30}
"""Memory of a process with torch and transformers, without any tensor; CUDA's libraries take more."""

ROUNDED_BYTES = 2
"""Bytes of a number in 16 bits."""


@dataclass(frozen=True, kw_only=True)
class AuditorNeed(PhasedNeed):
    """The bytes that an auditor needs; phases are those of tensors on its device."""

    device: str
    dtype: str
    parameters: int
    loaded_bytes: int
    """Bytes of one version."""

    @property
    def on_card(self) -> bool:
        return self.device != "cpu"

    @property
    def host_bytes(self) -> int:
        """Return the bytes of the machine's memory; weights for a card pass through it."""
        kind = self.device.partition(":")[0]
        return PROCESS_BYTES[kind] + (self.loaded_bytes if self.on_card else self.peak_bytes)

    @property
    def place(self) -> str:
        """Return how the auditor computes, and where: `float32 on cuda:1`."""
        return f"{self.dtype} on {self.device}"


class SimulatedReplay(SimulatedModel):
    """A model of fake tensors in the layout of an auditor's version."""

    def __init__(self, described: Any) -> None:
        super().__init__(described, narrow=True)
        self.self_check_bytes = self.choose_attention()  # first: all else is measured with it

    def replayed(self, data: Tensors, *, on_card: bool) -> int:
        """Return the peak of one pass over `data`; layers add no memory, since nothing is kept for a gradient."""
        if self.is_uniform:
            self.cut(MEASURED_LAYERS[1])

        def work() -> None:
            with torch.no_grad():
                found = predict(self.model, data, torch.arange(len(data.mask)))
                words = int(self.model.get_output_embeddings().weight.shape[0])
                count = min(max(1, HEAD_LOGITS_MAX // words), len(found.source))
                Head.for_model(self.model).logits(found.states[found.source[:count]])
                torch.empty(count, scored_bytes(words), dtype=torch.uint8, device="meta")

        return self._peak(work, on_card=on_card)


def scored_bytes(words: int) -> int:
    """Return the bytes of a position in `score_positions`, with a temperature of the lease's own, at its two peaks.

    Edges: logits, log-probabilities at both temperatures, one copy that is masked, that of torch's logsumexp, and four
    masks, which take a quarter each. Pick: the first three, the probabilities in blocks, and three blocks in float64.
    """
    return max(6 * 4 * words, 4 * 4 * words + 3 * 8 * BLOCK)


def auditor_need(config: Config, described: Any, fullest: Tensors, *, device: str | None = None) -> AuditorNeed:
    """Return the bytes that the round's auditor needs for its `fullest` pass, or one on another `device`."""
    place = device or config.audit.device
    model = SimulatedReplay(described)
    replay = model.replayed(fullest, on_card=place != "cpu")
    versions = limits.AUDITOR_VERSIONS_MAX * model.weights_bytes
    largest = max(weight.nbytes for weight in model.model.parameters())
    phases = {"load": versions + largest, "self-check": versions + model.self_check_bytes, "replay": versions + replay}
    if measures_rounding(config.audit.classes):
        phases["rounding"] = phases["replay"] + ROUNDED_BYTES * model.parameters
    return AuditorNeed(
        device=place,
        dtype=config.audit.dtype,
        parameters=model.parameters,
        phases=phases,
        loaded_bytes=model.weights_bytes,
    )


def measures_rounding(classes: Sequence[str]) -> bool:
    """Return True if nodes in 16 bits may be admitted."""
    return not classes or any(PRECISIONS & set(name.split("/")) for name in classes)
