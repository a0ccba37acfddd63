"""Checks that a folder's weights can replace a version: the same tensors, with finite numbers only.

- The safetensors files are read in pieces: without torch, and with the memory of one piece.
"""

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from coordinator.base.files import mapped
from protocol.errors import ConfigInvalid, PatchInvalid
from protocol.policy.tensors import PREFIX_BYTES, header_of, layout

SUFFIX = ".safetensors"

PIECE_BYTES = 1 << 24

EXPONENTS = {
    "F16": ("<u2", 0x7C00),
    "BF16": ("<u2", 0x7F80),
    "F32": ("<u4", 0x7F80_0000),
    "F64": ("<u8", 0x7FF0_0000_0000_0000),
}
"""The unsigned integer of each dtype's width, and the exponent's bits, which are all set for infinity and NaN."""

Shapes = dict[str, tuple[int, ...]]


def weight_files(folder: Path) -> list[Path]:
    """Return the weight files in a folder."""
    return sorted(folder.glob(f"*{SUFFIX}"))


def shapes(files: Iterable[Path]) -> Shapes:
    """Return the shape of every tensor, by its name."""
    shapes_by_name: Shapes = {}
    for path in files:
        for name, entry in _entries(path).items():
            shapes_by_name[name] = tuple(entry["shape"])
    return shapes_by_name


def header_text(path: Path) -> str:
    """Return a file's safetensors header, its padding included; nothing if the file has another format."""
    try:
        return header_of(mapped(path))[PREFIX_BYTES:].decode()
    except (PatchInvalid, UnicodeDecodeError):
        return ""


def matrix_types(files: Iterable[Path]) -> set[str]:
    """Return the types, in safetensors' notation, of all tensors that are not vectors."""
    return {entry["dtype"] for path in files for entry in _entries(path).values() if len(entry["shape"]) > 1}


def require_same(found: Shapes, wanted: Shapes) -> None:
    """Refuse tensors that differ from those of the policy, and name the first difference."""
    for name in sorted(found.keys() | wanted.keys()):
        ours, theirs = found.get(name), wanted.get(name)
        if ours == theirs:
            continue
        text = f"{name[:100]} {_shape_text(ours)}; in this round's policy it {_shape_text(theirs)}."
        tied = " A tied weight is sent once: leave its copy out." if theirs is None else ""
        raise ConfigInvalid(text, hint=f"Only weights of the same architecture can be published.{tied}")


def require_finite(files: Iterable[Path]) -> None:
    """Refuse weights with NaN or infinite values, and name the first tensor with one."""
    for path in files:
        data = mapped(path)
        entries = _entries(path)
        for tensor in layout(header_of(data), len(data)):
            kind = EXPONENTS.get(entries[tensor.name]["dtype"])
            if kind and not all(_finite(piece, *kind) for piece in _pieces(data[tensor.begin : tensor.end])):
                raise ConfigInvalid(
                    f"{path.name} contains NaN or infinite values in {tensor.name[:100]}.",
                    hint="Nodes cannot sample with such weights: choose another version.",
                )


def _entries(path: Path) -> dict[str, Any]:
    """Return the header's entries; a broken file is refused by its name."""
    data = mapped(path)
    try:
        header = header_of(data)
        layout(header, len(data))
    except PatchInvalid as error:
        raise ConfigInvalid(f"{path.name} is not a complete safetensors file: {error}") from error
    entries: dict[str, Any] = json.loads(header[8:])
    entries.pop("__metadata__", None)
    return entries


def _pieces(data: memoryview) -> Iterator[memoryview]:
    for start in range(0, len(data), PIECE_BYTES):
        yield data[start : start + PIECE_BYTES]


def _finite(piece: memoryview, kind: str, exponent: int) -> bool:
    bits = np.frombuffer(piece, dtype=kind)
    return not bool(((bits & exponent) == exponent).any())


def _shape_text(shape: tuple[int, ...] | None) -> str:
    return "is missing" if shape is None else f"has shape {list(shape)}"
