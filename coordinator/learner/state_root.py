"""The root of a training state: a Merkle root over everything that the next update depends on.

- Each tensor of a checkpoint is a leaf: its name, type and shape, and the BLAKE3 of its bytes. The first leaf has the
  number of updates and of optimizer steps. The tree is that of the log, RFC 6962.
- The tensors are read one after the other, in parts of `PART_BYTES`: no second copy of the state is in memory.
- The root does not depend on the number of ranks: rank 0 gathers each tensor and hashes it.
"""

from collections.abc import Mapping

import torch
from blake3 import blake3

from coordinator.learner.ranks import Ranks
from ledger import tree
from ledger.tree import leaf_hash
from protocol.wire import canonical

PART_BYTES = 2**26


def state_root(tensors: Mapping[str, torch.Tensor], update: int, steps: int, ranks: Ranks) -> str:
    """Return the root as hex digits, on rank 0; all ranks call this with their shards, the others get an empty text."""
    leaves = [leaf_hash(canonical.encode({"update": update, "steps": steps}))]
    for name in sorted(tensors):
        tensor = tensors[name]
        whole = ranks.gather(ranks.local(tensor), tensor) if ranks.size > 1 else tensor
        if whole is None:
            continue
        described = {"name": name, "dtype": str(whole.dtype), "shape": list(whole.shape), "digest": _digest(whole)}
        leaves.append(leaf_hash(canonical.encode(described)))
    return tree.root_of(leaves).hex() if ranks.first else ""


def _digest(tensor: torch.Tensor) -> str:
    hasher = blake3()
    flat = tensor.detach().reshape(-1).view(torch.uint8)
    for start in range(0, len(flat), PART_BYTES):
        hasher.update(flat[start : start + PART_BYTES].cpu().numpy().data)
    return hasher.hexdigest()
