"""A checkpoint: a folder that is whole or not there, whatever kills those who write it.

    000000012/     .metadata · __0_0.distcp · __1_0.distcp · …     tensors, a file from each rank
                   beside                                          plain values, by rank 0

- It is written as a draft, every file synced; its name, and the removal of older ones, come last. At any moment the
  newest name is that of a whole checkpoint. What a kill left half-written is overwritten by the next.
- Its name is the number of updates: what is there under that name is the same state already.
- Any number of ranks can read what any other number wrote: the format is that of `torch.distributed.checkpoint`.
- Reading one runs nobody's code: tensors and plain values come out of it, and nothing else.
"""

import pickle
import shutil
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from coordinator.base.files import sync
from coordinator.learner.ranks import Ranks
from protocol import limits
from protocol.errors import ConfigInvalid, SwarmError
from protocol.wire import canonical

BESIDE = "beside"
BESIDE_MAX_BYTES = limits.MIB

_METADATA_MAY_NAME = {
    ("collections", "OrderedDict"),
    ("pathlib", "PosixPath"),
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    *(
        ("torch.distributed.checkpoint.metadata", name)
        for name in (
            "BytesStorageMetadata",
            "ChunkStorageMetadata",
            "Metadata",
            "MetadataIndex",
            "StorageMeta",
            "TensorProperties",
            "TensorStorageMetadata",
            "_MEM_FORMAT_ENCODING",
        )
    ),
}


def newest(folder: Path) -> Path | None:
    """The last whole checkpoint."""
    return max((path for path in folder.glob("*") if path.name.isdigit()), default=None)


def write(folder: Path, number: int, tensors: dict[str, torch.Tensor], beside: dict[str, Any], ranks: Ranks) -> None:
    """Write the checkpoint after so many updates; it is durable when this returns on rank 0."""
    final = folder / f"{number:09d}"
    draft = final.with_suffix(".new")
    if ranks.broadcast(final.exists()):
        return
    if ranks.first:
        shutil.rmtree(draft, ignore_errors=True)
        draft.mkdir(parents=True)
    ranks.meet()
    with _quiet():
        save(tensors, storage_writer=FileSystemWriter(draft, sync_files=True), no_dist=ranks.size == 1)
    if not ranks.first:
        return
    (draft / BESIDE).write_bytes(canonical.encode(beside))
    sync(draft / BESIDE)
    sync(draft)
    draft.rename(final)
    sync(folder)  # the rename itself must survive a power cut
    for path in folder.iterdir():
        if path != final:
            shutil.rmtree(path)


def read_beside(path: Path) -> dict[str, Any]:
    """The plain values of a checkpoint."""
    try:
        found = canonical.decode((path / BESIDE).read_bytes(), max_bytes=BESIDE_MAX_BYTES)
        return {**found, "update": int(found["update"]), "steps": int(found["steps"])}
    except (OSError, KeyError, TypeError, ValueError, SwarmError) as error:
        raise _unreadable(path, error) from error


def require_whole(path: Path) -> None:
    """Refuse a checkpoint that cannot be read, or lacks a part of what it says it has."""
    read_beside(path)
    try:
        metadata = _CheckpointUnpickler(path).read_metadata()
        parts = [(path / part.relative_path, part.offset + part.length) for part in metadata.storage_data.values()]
        lost = sorted({file.name for file, end in parts if not file.is_file() or file.stat().st_size < end})
    except FileNotFoundError as error:
        raise _lacking(path, Path(error.filename).name) from error
    except (OSError, EOFError, ValueError, AttributeError, pickle.UnpicklingError) as error:
        raise _unreadable(path, error) from error
    if lost:
        raise _lacking(path, ", ".join(lost))


def read_tensors(path: Path, tensors: dict[str, torch.Tensor], ranks: Ranks) -> None:
    """Fill these tensors, or each rank's shards of them."""
    require_whole(path)
    try:
        with _quiet():
            load(tensors, storage_reader=_CheckpointUnpickler(path), no_dist=ranks.size == 1)
    except (CheckpointException, OSError, RuntimeError, EOFError, ValueError, pickle.UnpicklingError) as error:
        raise _unreadable(path, error) from error


@contextmanager
def _quiet() -> Iterator[None]:
    """Without the warning that there is one process only."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        yield


class _CheckpointUnpickler(FileSystemReader):
    """Torch's own, but for the description, which torch would unpickle whatever it asks for."""

    def read_metadata(self, *_: Any, **__: Any) -> Metadata:
        with (Path(self.path) / ".metadata").open("rb") as file:
            metadata: Metadata = _MetadataUnpickler(file).load()
        metadata.storage_meta = StorageMeta(load_id=self.load_id)
        return metadata


class _MetadataUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if is_dtype or (module, name) in _METADATA_MAY_NAME:
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"it asks for {module}.{name}")


def _lacking(path: Path, names: str) -> ConfigInvalid:
    return ConfigInvalid(
        f"{path} is no checkpoint that can be read: it lacks {names}, or a part of it.",
        hint="Bring the whole folder back from a copy of the disk; backups by an older coordinator lack `.metadata`.",
    )


def _unreadable(path: Path, error: BaseException) -> ConfigInvalid:
    reason = str(error).strip().rpartition("\n")[2]
    return ConfigInvalid(
        f"{path} is no checkpoint of this policy that can be read: {reason}",
        hint="model.path and learner.lora_rank must stay what they were when the round began.",
    )
