"""Weights as files that can be sent: from a folder in hub format, a model, or a state_dict."""

import json
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from blake3 import blake3

from protocol.errors import ConfigInvalid
from protocol.policy.folder import kind_of

WEIGHTS = "model.safetensors"

SENT = ("*.safetensors", "*.safetensors.index.json", "config.json", "adapter_config.json", "tokenizer.json")
"""The files of a folder that are sent. The round has the others already."""


@contextmanager
def files_to_send(weights: Any) -> Iterator[dict[Path, str]]:
    """Yield the files of some weights with their BLAKE3 digests, while the block lasts.

    `weights` is a folder in hub format, an adapter's folder, a model with `save_pretrained`, or a state_dict.
    """
    with TemporaryDirectory(prefix="echo-swarm-") as scratch:
        folder = Path(weights) if isinstance(weights, str | Path) else _written(weights, Path(scratch))
        files = sorted({path for pattern in SENT for path in folder.glob(pattern) if kind_of(path.name)})
        if not any(path.suffix == ".safetensors" for path in files):
            raise ConfigInvalid(
                f"{folder} has no weights as safetensors.", hint="`model.save_pretrained(folder)` writes such a folder."
            )
        yield {path: digest_of(path) for path in files}


def digest_of(path: Path) -> str:
    """Return the BLAKE3 digest of a file."""
    return blake3(max_threads=blake3.AUTO).update_mmap(path).hexdigest()


def _written(weights: Any, folder: Path) -> Path:
    """Write a model or a state_dict into `folder`, and return it."""
    if hasattr(weights, "save_pretrained"):
        with _without_progress_bars():
            weights.save_pretrained(folder)
        return folder
    if not isinstance(weights, Mapping) or not weights:
        raise ConfigInvalid(
            f"{type(weights).__name__} cannot be published.",
            hint="Give a folder, a model with `save_pretrained`, or a state_dict with the names of the hub format.",
        )
    from safetensors.torch import save_file

    save_file(dict(_separate(weights)), folder / WEIGHTS, metadata={"format": "pt"})
    return folder


@contextmanager
def _without_progress_bars() -> Iterator[None]:
    """Let transformers draw no bar: a training publishes thousands of versions, and prints its own lines."""
    bars = sys.modules.get("transformers.utils.logging")
    if bars is None or not bars.is_progress_bar_enabled():
        yield
        return
    bars.disable_progress_bar()
    try:
        yield
    finally:
        bars.enable_progress_bar()


def _separate(state: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the tensors of a state_dict in host memory, whole; of tied ones the first, as the hub format has it."""
    seen = set[tuple[int, str]]()
    for name, tensor in state.items():
        whole = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor  # of a sharded model
        place = (whole.data_ptr(), json.dumps(list(whole.shape)))
        if whole.numel() and place in seen:
            continue
        seen.add(place)
        yield name, whole.detach().cpu().contiguous()
