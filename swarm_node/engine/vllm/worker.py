"""What vLLM's worker can do besides: take another version's weights over those it has.

- The tensors go through the model's own `load_weights`, which knows how they are fused; their storage stays, so
  captured graphs stay valid.
- An adapter is added to the tensors on their way, one at a time: vLLM's own adapters would compute something else than
  the merged weights, which are the policy.
- Whether the folder holds the same tensors is asked before (`model`), whether they arrived by the canary after.
"""

from pathlib import Path
from typing import Any

from swarm_node.engine.torch.weights import mapped_tensors


class WorkerExtension:
    """Mixed into the worker class by its name, so these names must not be the worker's own."""

    model_runner: Any

    def swap_policy(self, folder: str) -> None:
        """Copy every tensor of a policy folder into the model."""
        with mapped_tensors(Path(folder)) as tensors:
            self.model_runner.model.load_weights(tensors.items())

    def count_parameters(self) -> int:
        return sum(one.numel() for one in self.model_runner.model.parameters())
