"""Weights as files that can be sent: from a folder in hub format, a model, or a state_dict.

They are sent in the form in which the round publishes them, so that of a version only what changed is sent.

    a trainer's files ─ cast, ordered ─▶ the round's files ─ compared with those sent last ─▶ patches

- The round casts every version to its own types. Casting here halves what a trainer in float32 sends, and numbers of
  those types stay as they are; the round's files of consecutive versions then differ in few numbers.
- The files that were sent last are kept: they are the bases of patches as long as they are the round's newest version.
  Where they are not (a new process, another trainer, a rollback), whole files are sent.
- Weights that do not have the names and shapes of the round's are sent as they are: the coordinator says what differs.
"""

import json
import math
import mmap
import os
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory, mkdtemp
from typing import Any, NamedTuple

import numpy as np
from blake3 import blake3
from numpy.typing import NDArray
from pydantic import BaseModel, Field

from protocol.errors import ConfigInvalid, MalformedMessage, PatchInvalid
from protocol.ids import Hex64
from protocol.policy import delta, rounding
from protocol.policy.delta import Buffer
from protocol.policy.folder import kind_of
from protocol.policy.manifest import FileName
from protocol.policy.tensors import PREFIX_BYTES, Tensor, header_of, layout

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


SUFFIX = ".safetensors"

INDEX = "model.safetensors.index.json"

CAST_AT_ONCE = 1 << 22
"""Elements that are cast at a time."""

_FLOATS = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": "<u2"}


class TensorType(NamedTuple):
    """The type and shape of a tensor, as a header has them."""

    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class OwnTensor:
    """A tensor of a trainer's file."""

    name: str
    type: TensorType
    data: memoryview

    def cast_to(self, dtype: str) -> Iterator[Buffer]:
        """Yield the bytes of the tensor in another type, by way of float32; bfloat16 is rounded as versions are."""
        if dtype == self.type.dtype:
            yield self.data
            return
        count, *sizes = self.type.shape or (1,)
        table = np.frombuffer(self.data, _FLOATS[self.type.dtype]).reshape(count, math.prod(sizes))
        of_rows, of_columns = rounding.thresholds(self.name, 0, *table.shape)
        for rows, columns in rounding.pieces(*table.shape, CAST_AT_ONCE):
            piece = _widened(table[rows, columns], self.type.dtype)
            if dtype == "BF16":
                yield rounding.rounded(piece, of_rows[rows], of_columns[columns]).tobytes()
            else:
                yield _narrowed(piece, dtype).tobytes()


@dataclass(frozen=True)
class PublishedFile:
    """A file of weights of the round's newest version."""

    name: str
    digest: str
    header: bytes
    """The bytes before the first tensor; none if it is no file of tensors."""
    size_bytes: int


class _DescribedFiles(BaseModel):
    """The answer of `GET /v1/trainer/files`. Its names become those of files on this machine."""

    files: list["_DescribedFile"]


class _DescribedFile(BaseModel):
    name: FileName
    digest: Hex64
    header: str
    size_bytes: int = Field(ge=0)


class LastSent:
    """The files of weights that were sent last, on this machine's disk."""

    def __init__(self) -> None:
        self._scratch: TemporaryDirectory[str] | None = None
        self._folder: Path | None = None
        self._files: dict[str, Path] = {}
        """The files by their digests."""

    def file(self, digest: str) -> Path | None:
        """Return the file of a digest, if it was sent last."""
        return self._files.get(digest)

    def make_folder(self) -> Path:
        """Return a new folder, for files that are about to be sent."""
        if self._scratch is None:
            self._scratch = TemporaryDirectory(prefix="echo-swarm-sent-", ignore_cleanup_errors=True)
        return Path(mkdtemp(dir=self._scratch.name))

    def replace(self, folder: Path, files: Mapping[Path, str]) -> None:
        """Keep the files of `folder` instead of the ones before."""
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
        self._folder = folder
        self._files = {digest: path for path, digest in files.items() if path.parent == folder}

    def close(self) -> None:
        """Delete the files."""
        self._files = {}
        if self._scratch is not None:
            self._scratch.cleanup()


def read_published(body: Mapping[str, Any]) -> dict[str, PublishedFile]:
    """Read the answer of `GET /v1/trainer/files`, by the names of the files."""
    try:
        entries = _DescribedFiles.model_validate(body).files
        headers = [_header(entry.header) for entry in entries]
    except ValueError:
        raise MalformedMessage(
            "The coordinator describes the files of its newest version in a form that is not known.",
            hint="Install the release of echo-swarm that the round has, or publish with patch=False.",
        ) from None
    return {
        entry.name: PublishedFile(entry.name, entry.digest, header, entry.size_bytes)
        for entry, header in zip(entries, headers, strict=True)
        if entry.name.endswith(SUFFIX)
    }


def in_published_form(
    files: Mapping[Path, str], published: Mapping[str, PublishedFile], folder: Path
) -> dict[Path, str]:
    """Return the files to send, with their digests.

    Weights with the names and shapes of the round's are written to `folder`, as the round publishes them. Others, and
    all files that are no weights, are returned as they are.
    """
    try:
        own = _read_tensors([path for path in files if path.suffix == SUFFIX])
        targets = _targets(own, published)
    except PatchInvalid:  # the coordinator says what is wrong with them
        return dict(files)
    if not targets:
        return dict(files)
    made = {path: digest for path, digest in files.items() if path.suffix != SUFFIX and path.name != INDEX}
    for target, tensors in targets.items():
        path = folder / target.name
        with path.open("wb") as file:
            file.write(target.header)
            for tensor in tensors:
                file.writelines(own[tensor.name].cast_to(_typed(target.header)[tensor.name].dtype))
        made[path] = digest_of(path)
    if len(targets) > 1:
        index = folder / INDEX
        places = {tensor.name: target.name for target, tensors in targets.items() for tensor in tensors}
        index.write_text(json.dumps({"metadata": {}, "weight_map": places}))
        made[index] = digest_of(index)
    return made


def size_of(path: Path) -> int:
    """Return the size of a file."""
    return path.stat().st_size


def write_patch(base: Path, base_digest: str, path: Path, target: Path) -> bool:
    """Write the patch from `base` to the file at `path`; return True if it is smaller than that file."""
    size_bytes = size_of(path)
    with ThreadPoolExecutor(os.cpu_count()) as threads, target.open("wb") as file:
        try:
            for piece in delta.encode(_mapped(base), _mapped(path), base_digest=base_digest, each=threads.map):
                if file.tell() + len(piece) >= size_bytes:
                    return False
                file.write(piece)
        except PatchInvalid:  # not files of tensors
            return False
    return True


def _header(text: str) -> bytes:
    """Return the bytes before the first tensor of a file with this header."""
    data = text.encode()
    return len(data).to_bytes(PREFIX_BYTES, "little") + data if data else b""


def _typed(header: bytes) -> dict[str, TensorType]:
    """Return the type of each tensor of a header; its layout was checked before."""
    entries = json.loads(header[PREFIX_BYTES:])
    entries.pop("__metadata__", None)
    return {name: TensorType(entry["dtype"], tuple(entry["shape"])) for name, entry in entries.items()}


def _read_tensors(files: Sequence[Path]) -> dict[str, OwnTensor]:
    """Return the tensors of safetensors files, by their names."""
    tensors: dict[str, OwnTensor] = {}
    for path in files:
        data = _mapped(path)
        header = header_of(data)
        places, types = layout(header, len(data)), _typed(header)
        tensors |= {
            place.name: OwnTensor(place.name, types[place.name], data[place.begin : place.end]) for place in places
        }
    return tensors


def _targets(own: Mapping[str, OwnTensor], published: Mapping[str, PublishedFile]) -> dict[PublishedFile, list[Tensor]]:
    """Return the round's files that these tensors fill, with their tensors in order; none unless every one fits."""
    targets: dict[PublishedFile, list[Tensor]] = {}
    fitting = set[str]()
    for file in published.values():
        tensors = layout(file.header, file.size_bytes) if file.header else []
        if not any(tensor.name in own for tensor in tensors):
            continue
        types = _typed(file.header)
        if not all(tensor.name in own and _fits(own[tensor.name].type, types[tensor.name]) for tensor in tensors):
            return {}
        if fitting & types.keys():  # a tensor in several files would be written as often
            return {}
        targets[file] = tensors
        fitting |= types.keys()
    return targets if fitting == own.keys() else {}


def _fits(own: TensorType, wanted: TensorType) -> bool:
    return own == wanted or (own.shape == wanted.shape and {own.dtype, wanted.dtype} <= _FLOATS.keys())


def _widened(values: NDArray[Any], dtype: str) -> NDArray[np.float32]:
    """Return numbers in float32."""
    if dtype == "BF16":
        return (values.astype("<u4") << np.uint32(16)).view("<f4")
    with np.errstate(over="ignore"):
        return values.astype("<f4")


def _narrowed(values: NDArray[np.float32], dtype: str) -> NDArray[Any]:
    """Return float32 numbers in another type than bfloat16, rounded to the nearest, ties to even."""
    with np.errstate(over="ignore"):
        return values.astype(_FLOATS[dtype])


def _mapped(path: Path) -> memoryview:
    """Return a file's bytes, which are read when they are used."""
    if not size_of(path):
        return memoryview(b"")  # an empty file cannot be mapped
    with path.open("rb") as file:
        return memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
