"""The layout of a safetensors file: its header, read as untrusted bytes.

    u64 LE header size · header: JSON of name → {dtype, shape, data_offsets: [begin, end]} · the tensors' bytes

- The tensors cover the data without hole or overlap: every byte of a file belongs to its header or to one tensor.
- Any other file is rejected (`PatchInvalid`): it can be published whole, but not patched.
"""

import json
from dataclasses import dataclass
from typing import Any

from protocol import limits
from protocol.errors import PatchInvalid

PREFIX_BYTES = 8

ELEMENT_BYTES = {
    "F64": 8, "I64": 8, "U64": 8, "C64": 4, "F32": 4, "I32": 4, "U32": 4, "F16": 2, "BF16": 2, "I16": 2, "U16": 2,
}  # fmt: skip
"""Element width by dtype; other dtypes are handled as bytes."""


@dataclass(frozen=True)
class Tensor:
    """The place of a tensor in its file."""

    name: str
    begin: int
    end: int
    element_bytes: int


def header_of(file: memoryview) -> bytes:
    """Return the bytes before the first tensor, the size prefix included."""
    size = PREFIX_BYTES + int.from_bytes(file[:PREFIX_BYTES], "little")
    if size > min(len(file), limits.TENSORS_HEADER_MAX_BYTES):
        raise PatchInvalid(f"A file of {len(file)} bytes announces a tensor header of {size} bytes.")
    return bytes(file[:size])


def layout(header: bytes, file_size: int) -> list[Tensor]:
    """Return the tensors in the order of their bytes; `header` includes its prefix."""
    tensors = [
        _tensor(name, entry, len(header)) for name, entry in _entries(header[PREFIX_BYTES:]) if name != "__metadata__"
    ]
    tensors.sort(key=lambda tensor: (tensor.begin, tensor.end, tensor.name))
    position = len(header)
    for tensor in tensors:
        if tensor.begin != position:
            raise PatchInvalid(f"Tensor {tensor.name[:100]!r} begins at {tensor.begin}, not at {position}.")
        position = tensor.end
    if position != file_size:
        raise PatchInvalid(f"The tensors end at {position}, the file at {file_size}.")
    return tensors


def _entries(text: bytes) -> list[tuple[str, Any]]:
    """Return the members of the header object; a name that occurs twice is rejected as ambiguous."""
    try:
        members = json.loads(text.decode(), object_pairs_hook=tuple)
    except (ValueError, RecursionError) as error:
        raise PatchInvalid(f"The tensor header is not JSON: {str(error)[:100]}.") from error
    if not isinstance(members, tuple) or len(dict(members)) != len(members):
        raise PatchInvalid("The tensor header is not a JSON object, or names a tensor twice.")
    return list(members)


def _tensor(name: str, entry: Any, data_begin: int) -> Tensor:
    fields = dict(entry) if isinstance(entry, tuple) else {}
    dtype, offsets = fields.get("dtype"), fields.get("data_offsets")
    if not isinstance(dtype, str) or not isinstance(offsets, list) or [*map(type, offsets)] != [int, int]:
        raise PatchInvalid(f"Tensor {name[:100]!r} has no dtype, or not two offsets.")
    begin, end = offsets
    width = ELEMENT_BYTES.get(dtype, 1)
    if not 0 <= begin <= end or (end - begin) % width:
        raise PatchInvalid(f"Tensor {name[:100]!r} has the invalid offsets {begin} and {end}.")
    return Tensor(name, data_begin + begin, data_begin + end, width)
