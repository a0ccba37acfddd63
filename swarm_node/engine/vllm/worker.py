"""Extension of vLLM's worker: overwrites its weights with those of another version.

- The tensors go through the model's own `load_weights`, which knows how they are fused; their storage stays, so
  captured graphs stay valid.
- An adapter is added to the tensors while they are loaded, one at a time: vLLM's own adapters would not compute the
  same as the merged weights, which are the policy.
- `model` checks beforehand that the folder holds the same tensors; the canary checks afterwards that they were loaded.
"""

from pathlib import Path
from typing import Any

from swarm_node.engine.torch.weights import mapped_tensors


class WorkerExtension:
    """Mixin of the worker class; vLLM refuses names that the worker already has."""

    model_runner: Any

    def swap_policy(self, folder: str) -> None:
        """Copy every tensor of a policy folder into the model."""
        with mapped_tensors(Path(folder)) as tensors:
            self.model_runner.model.load_weights(tensors.items())

    def count_parameters(self) -> int:
        return sum(parameter.numel() for parameter in self.model_runner.model.parameters())
