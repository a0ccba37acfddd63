"""Extension of vLLM's worker: overwrites its weights with those of another version.

- With several cards, each has a worker in a process of its own. Each reads the whole tensors and keeps its part.
- vLLM imports this module before it builds a model, also in such a process: so here weights are kept unpacked on a CPU.
- The tensors go through the model's own `load_weights`, which knows how they are fused; their storage stays, so
  captured graphs stay valid.
- An adapter is added to the tensors while they are loaded, one at a time: vLLM's own adapters would not compute the
  same as the merged weights, which are the policy.
- `model` checks beforehand that the folder holds the same tensors; the canary checks afterwards that they were loaded.
"""

from pathlib import Path
from typing import Any

from vllm import _custom_ops
from vllm.platforms import current_platform

from swarm_node.engine.torch.weights import mapped_tensors

if current_platform.is_cpu():
    # A packed copy of a weight would stay when the weight is swapped; some weights would exist only as the copy.
    _custom_ops._supports_onednn = False


class WorkerExtension:
    """Mixin of the worker class; vLLM refuses names that the worker already has."""

    model_runner: Any

    def swap_policy(self, folder: str) -> None:
        """Copy every tensor of a policy folder into the model."""
        with mapped_tensors(Path(folder)) as tensors:
            self.model_runner.model.load_weights(tensors.items())
