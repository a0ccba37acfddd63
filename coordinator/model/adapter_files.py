"""Reading an adapter in a policy folder, to load the policy or to merge the adapter.

- Weights are computed one at a time, from the base on the disk.
"""

import shutil
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from protocol.policy import adapter
from swarm_exact.merging import merged


def adapted_weights(folder: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield each weight that an adapter in the folder changes, merged, in the type in which it is stored."""
    if not (folder / adapter.CONFIG).exists():
        return
    scale = adapter.scale((folder / adapter.CONFIG).read_bytes())
    with ExitStack() as stack:
        matrices: Any = stack.enter_context(safe_open(folder / adapter.WEIGHTS, framework="pt"))
        base = {
            name: part
            for path in sorted(folder.glob("*.safetensors"))
            if path.name != adapter.WEIGHTS
            for part in [stack.enter_context(safe_open(path, framework="pt"))]
            for name in part.keys()  # noqa: SIM118  # a safetensors file is not a mapping
        }
        for name in adapter.adapted(matrices.keys()):
            down, up = (matrices.get_tensor(part) for part in adapter.names(name))
            yield name, merged(name, base[name].get_tensor(name), down, up, scale)


def merge(folder: Path) -> None:
    """Merge the adapter into its base, in this folder."""
    changed = dict(adapted_weights(folder))
    for path in sorted(folder.glob("*.safetensors")):
        if path.name == adapter.WEIGHTS:
            continue
        with safe_open(path, framework="pt") as part:
            names = list(part.keys())
            tensors = {name: changed[name] if name in changed else part.get_tensor(name) for name in names}
            metadata = part.metadata()
        beside = path.with_suffix(".new")
        save_file(tensors, beside, metadata)
        beside.replace(path)
    for name in adapter.FILES:
        (folder / name).unlink(missing_ok=True)


def keep_adapter(folder: Path) -> None:
    """Delete all files except the adapter in this folder."""
    for path in list(folder.iterdir()):
        if path.name not in adapter.FILES:
            shutil.rmtree(path) if path.is_dir() else path.unlink()
