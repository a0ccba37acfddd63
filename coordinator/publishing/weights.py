"""Whether a folder's weights may stand in a version's place: the same tensors, and nothing in them but numbers.

- Read from the safetensors files as they are, a piece at a time: no torch, and no more memory than a piece.
"""

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from coordinator.base.files import mapped
from protocol.errors import ConfigInvalid, PatchInvalid
from protocol.policy.tensors import header_of, layout

SUFFIX = ".safetensors"

PIECE_BYTES = 1 << 24

EXPONENTS = {
    "F16": ("<u2", 0x7C00),
    "BF16": ("<u2", 0x7F80),
    "F32": ("<u4", 0x7F80_0000),
    "F64": ("<u8", 0x7FF0_0000_0000_0000),
}
"""By dtype the unsigned integer of its width and the exponent's bits: all set, they make infinity or no number."""

Shapes = dict[str, tuple[int, ...]]


def weight_files(folder: Path) -> list[Path]:
    """The files of weights in a folder."""
    return sorted(folder.glob(f"*{SUFFIX}"))


def shapes(files: Iterable[Path]) -> Shapes:
    """Every tensor's shape, by its name."""
    found: Shapes = {}
    for path in files:
        for name, entry in _entries(path).items():
            found[name] = tuple(entry["shape"])
    return found


def matrix_types(files: Iterable[Path]) -> set[str]:
    """Types, as safetensors names them, of all tensors that are no vectors."""
    return {entry["dtype"] for path in files for entry in _entries(path).values() if len(entry["shape"]) > 1}


def require_same(found: Shapes, wanted: Shapes) -> None:
    """Refuse tensors that are not those of the policy, and name one that differs."""
    for name in sorted(found.keys() | wanted.keys()):
        here, there = found.get(name), wanted.get(name)
        if here == there:
            continue
        text = f"{name[:100]} is {_told(here)}, and {_told(there)} in this round's policy."
        raise ConfigInvalid(text, hint="Only weights of the same architecture can be published.")


def require_finite(files: Iterable[Path]) -> None:
    """Refuse weights that are infinite or no numbers, and say where the first one stands."""
    for path in files:
        data = mapped(path)
        entries = _entries(path)
        for tensor in layout(header_of(data), len(data)):
            kind = EXPONENTS.get(entries[tensor.name]["dtype"])
            if kind and not all(_finite(piece, *kind) for piece in _pieces(data[tensor.begin : tensor.end])):
                raise ConfigInvalid(
                    f"{path.name} has numbers in {tensor.name[:100]} that are infinite or none at all.",
                    hint="A version of them would sample nothing: choose another.",
                )


def _entries(path: Path) -> dict[str, Any]:
    """The header's members; one that is broken is refused by name."""
    data = mapped(path)
    try:
        header = header_of(data)
        layout(header, len(data))
    except PatchInvalid as error:
        raise ConfigInvalid(f"{path.name} is no whole safetensors file: {error}") from error
    found: dict[str, Any] = json.loads(header[8:])
    found.pop("__metadata__", None)
    return found


def _pieces(data: memoryview) -> Iterator[memoryview]:
    for start in range(0, len(data), PIECE_BYTES):
        yield data[start : start + PIECE_BYTES]


def _finite(piece: memoryview, kind: str, exponent: int) -> bool:
    bits = np.frombuffer(piece, dtype=kind)
    return not bool(((bits & exponent) == exponent).any())


def _told(shape: tuple[int, ...] | None) -> str:
    return "missing" if shape is None else "×".join(map(str, shape)) or "one number"
