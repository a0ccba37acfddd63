"""A checkpoint: a folder that is whole or does not exist, even if its writers are killed at any moment.

    000000012/     .metadata · __0_0.distcp · __1_0.distcp · …     tensors, a file from each rank
                   beside                                          plain values, by rank 0

- It is written as a draft in two steps: `write` hands the bytes to the system, so that weights may change, and the job
  that it returns syncs every file and renames the draft. Older ones are removed last, except those that a replay of a
  drawn update or a retraction begins with (`needed`). At any moment the newest name is that of a whole checkpoint. A
  draft that a kill left is overwritten by the next.
- Its name is the number of updates: an existing checkpoint of that name has the same state.
- Any number of ranks can read what any other number wrote: the format is that of `torch.distributed.checkpoint`.
- Reading a checkpoint runs no code from it: it returns tensors and plain values only. An auditor reads those of
  strangers, and torch would unpickle two things without restrictions: the metadata, and what the metadata calls bytes.

The root of a training state (`state_root`) is a Merkle root over everything that the next update depends on.

- Each tensor of a checkpoint is a leaf: its name, type and shape, and the BLAKE3 of its bytes. The first leaf has the
  number of updates and of optimizer steps. The tree is that of the log, RFC 6962.
- The tensors are read one after the other, in parts of `PART_BYTES`: no second copy of the state is in memory.
- The root does not depend on the number of ranks: rank 0 gathers each tensor and hashes it.
"""

import pickle
import re
import shutil
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from io import BytesIO
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from blake3 import blake3
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata
from torch.distributed.checkpoint.planner import ReadItem
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from coordinator.base.files import link_or_copy, sync
from coordinator.learner.ranks import Ranks
from ledger import tree
from ledger.tree import leaf_hash
from protocol import limits
from protocol.errors import ConfigInvalid, NotFound, SwarmError
from protocol.wire import canonical

BESIDE = "beside"

ATTEMPTS = 20
"""Attempts to hold a checkpoint, which takes milliseconds; it is replaced every few updates."""
BESIDE_MAX_BYTES = limits.MIB

_MALFORMED = (OSError, EOFError, LookupError, TypeError, ValueError, AttributeError, pickle.UnpicklingError)
"""Errors that malformed files cause."""

_FILE = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,119}")

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
    """Return the newest whole checkpoint; None if there is none."""
    return max((path for path in folder.glob("*") if path.name.isdigit()), default=None)


def hold_newest(folder: Path, place: Path) -> Path | None:
    """Hold the newest checkpoint in `place`, where a running learner does not delete it; None before the first.

    The learner gives a new checkpoint its name, then deletes the old one. So a checkpoint that is still the newest
    after all its files were held is complete; otherwise the next one is tried.
    """
    for _ in range(ATTEMPTS):
        last = newest(folder)
        if last is None:
            return None
        shutil.rmtree(place, ignore_errors=True)
        held = place / last.name
        held.mkdir(parents=True)
        try:
            for file in sorted(last.iterdir()):
                link_or_copy(file, held / file.name)
        except FileNotFoundError:
            continue
        if newest(folder) == last:
            return held
    raise NotFound("The learner replaced its checkpoint at every attempt.", hint="Repeat the command.")


def needed(numbers: Sequence[int], drawn: Collection[int] | None, dense: int = 0) -> set[int]:
    """Return the checkpoints to keep: the newest, and, if updates are drawn, those that one may be replayed from.

    Whether an update is drawn is known two batches later, so the three newest are kept until then. With `dense`, those
    that a retraction begins with are kept, too (`thinned`).
    """
    ordered = sorted(numbers)
    kept = set(ordered[-1:])
    if drawn is not None:
        kept |= {*ordered[-3:]}
        kept |= {first for first, last in pairwise(ordered) if any(first < update <= last for update in drawn)}
    return kept | (thinned(ordered, dense) if dense else set())


def thinned(ordered: Sequence[int], dense: int) -> set[int]:
    """Return the newest `dense` checkpoints, the oldest, and fewer and fewer in between, the older they are.

    One is removed if the gap that it leaves is at most the age of the checkpoint behind that gap. So a replay from the
    last checkpoint before an update, up to now, makes at most twice the updates since then, and one interval more. The
    age doubles with every second checkpoint: of n older ones, about 2 log₂ n stay.
    """
    kept = list(ordered[:1])
    for number, following in pairwise(ordered[1 : len(ordered) - dense + 1]):
        if following - kept[-1] > ordered[-1] - following:
            kept.append(number)
    return {*kept, *ordered[-dense:]}


def write(
    folder: Path,
    number: int,
    tensors: dict[str, torch.Tensor],
    beside: dict[str, Any],
    ranks: Ranks,
    drawn: Collection[int] | None = None,
    dense: int = 0,
) -> Callable[[], None]:
    """Write the checkpoint after `number` updates; return the job that makes it durable and names it.

    Several ranks sync their files at once, as they may be on several machines.
    """
    final = folder / f"{number:09d}"
    draft = final.with_suffix(".new")
    if ranks.broadcast(final.exists()):
        return _nothing
    if ranks.first:
        shutil.rmtree(draft, ignore_errors=True)
        draft.mkdir(parents=True)
    ranks.meet()
    with _quiet():
        writer = FileSystemWriter(draft, sync_files=ranks.size > 1)
        save(tensors, storage_writer=writer, no_dist=ranks.size == 1)
    if not ranks.first:
        return _nothing
    (draft / BESIDE).write_bytes(canonical.encode(beside))
    return partial(_settle, draft, final, drawn, dense)


def _settle(draft: Path, final: Path, drawn: Collection[int] | None, dense: int) -> None:
    folder = final.parent
    for path in draft.iterdir():
        sync(path)
    sync(draft)
    draft.rename(final)
    sync(folder)  # the rename itself must survive a power cut
    keep = needed([int(path.name) for path in folder.iterdir() if path.name.isdigit()], drawn, dense)
    for path in folder.iterdir():
        if not (path.name.isdigit() and int(path.name) in keep):
            shutil.rmtree(path)


def _nothing() -> None:
    """Do nothing: this checkpoint is durable, or another rank makes it so."""


def read_beside(path: Path) -> dict[str, Any]:
    """Return the plain values of a checkpoint."""
    try:
        values = canonical.decode((path / BESIDE).read_bytes(), max_bytes=BESIDE_MAX_BYTES)
        return {**values, "update": int(values["update"]), "steps": int(values["steps"])}
    except (OSError, KeyError, TypeError, ValueError, SwarmError) as error:
        raise _unreadable(path, error) from error


def require_whole(path: Path) -> None:
    """Refuse a checkpoint that cannot be read, or whose files are incomplete."""
    read_beside(path)
    try:
        metadata = _CheckpointUnpickler(path).read_metadata()
        parts = [(path / part.relative_path, part.offset + part.length) for part in metadata.storage_data.values()]
        lost = sorted({file.name for file, end in parts if not file.is_file() or file.stat().st_size < end})
    except FileNotFoundError as error:
        raise _lacking(path, Path(error.filename).name) from error
    except _MALFORMED as error:
        raise _unreadable(path, error) from error
    if lost:
        raise _lacking(path, ", ".join(lost))


def read_tensors(path: Path, tensors: dict[str, torch.Tensor], ranks: Ranks) -> None:
    """Read a checkpoint into `tensors`, or into each rank's shards of them."""
    require_whole(path)
    try:
        with _quiet():
            reader, planner = _CheckpointUnpickler(path), _OnlyTensors()
            load(tensors, storage_reader=reader, planner=planner, no_dist=ranks.size == 1)
    except CheckpointException as error:
        if any(_is_of_this_machine(failure) for failure, _ in error.failures.values()):
            raise RuntimeError(f"{path} could not be read here: {_reason(error)}") from error
        raise _unreadable(path, error) from error
    except _MALFORMED as error:
        raise _unreadable(path, error) from error
    except RuntimeError as error:
        if ranks.size > 1:  # another rank ended: that says nothing about the files
            raise
        raise _unreadable(path, error) from error


@contextmanager
def _quiet() -> Iterator[None]:
    """Suppress the warning that there is only one process."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        yield


class _CheckpointUnpickler(FileSystemReader):
    """Torch's own reader, except for the metadata, which torch would unpickle without restrictions."""

    def read_metadata(self, *_: Any, **__: Any) -> Metadata:
        with (Path(self.path) / ".metadata").open("rb") as file:
            metadata: Metadata = _MetadataUnpickler(file).load()
        if any(type(each) is not TensorStorageMetadata for each in metadata.state_dict_metadata.values()):
            raise pickle.UnpicklingError("it has an entry that is no tensor")
        for part in metadata.storage_data.values():
            if not _FILE.fullmatch(part.relative_path):
                raise pickle.UnpicklingError("it names a file outside of it")
            if part.transform_descriptors:
                raise pickle.UnpicklingError("its tensors are transformed")
        metadata.storage_meta = StorageMeta(load_id=self.load_id)
        return metadata


class _OnlyTensors(DefaultLoadPlanner):
    """Torch's own planner, except for bytes, which torch would unpickle without restrictions."""

    def load_bytes(self, read_item: ReadItem, value: BytesIO) -> None:
        raise pickle.UnpicklingError(f"{read_item.dest_index.fqn} is no tensor")


class _MetadataUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if module == "pathlib._local":  # the place of its classes in Python 3.13 alone; another Python may have written
            module = "pathlib"
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if is_dtype or (module, name) in _METADATA_MAY_NAME:
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"it requests {module}.{name}")


def _lacking(path: Path, names: str) -> ConfigInvalid:
    return ConfigInvalid(
        f"The checkpoint {path} cannot be read: {names} is missing or incomplete.",
        hint="Restore the whole folder from a copy of the disk; backups by an older coordinator lack `.metadata`.",
    )


def _is_of_this_machine(failure: BaseException) -> bool:
    """Return True for a failure that may be due to a machine's memory, disk or card, and says nothing of the files.

    The files are there in their full length, as `require_whole` found.
    """
    return isinstance(failure, MemoryError | OSError) or (
        isinstance(failure, RuntimeError) and any(word in str(failure) for word in ("memory", "CUDA error"))
    )


def _reason(error: BaseException) -> str:
    return str(error).strip().rpartition("\n")[2]


def _unreadable(path: Path, error: BaseException) -> ConfigInvalid:
    return ConfigInvalid(
        f"{path} cannot be read as a checkpoint of this policy: {_reason(error)}",
        hint="model.path and learner.lora_rank must be the same as when the round began.",
    )


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
