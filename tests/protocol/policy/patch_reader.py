"""A reader of patches that was written from the docstring of `protocol.policy.delta` alone, for honest patches.

It shares no code with that module: so a patch has the bytes that the docstring promises to other clients.
"""

import json
import struct
from typing import Any

import numpy as np
import zstandard
from blake3 import blake3

BLOCK = 4 << 20
WIDTHS = {8: ("F64", "I64", "U64"), 4: ("F32", "I32", "U32", "C64"), 2: ("F16", "BF16", "I16", "U16")}


class PatchReader:
    """The rest of a patch that is read from its front."""

    def __init__(self, patch: bytes) -> None:
        self.rest = patch

    def take(self, count: int) -> bytes:
        taken, self.rest = self.rest[:count], self.rest[count:]
        assert len(taken) == count
        return taken

    def number(self) -> int:
        return int.from_bytes(self.take(4), "little")

    def stream(self) -> np.ndarray[Any, Any]:
        return np.frombuffer(zstandard.decompress(self.take(self.number())), np.uint8)


def patched(base: bytes, patch: bytes) -> bytes:
    """Return the new file."""
    reader = PatchReader(patch)
    magic, digest, base_size, size, header_size, packed_size = struct.unpack("<8s32sQQII", reader.take(64))
    assert (magic, digest, base_size) == (b"ESDELTA1", blake3(base).digest(), len(base))
    old_header = base[: 8 + int.from_bytes(base[:8], "little")]
    header = zstandard.decompress(reader.take(packed_size)) if packed_size else old_header
    assert len(header) == header_size
    old = {(name, end - begin): base[begin:end] for begin, end, name, _ in _tensors(old_header)}
    new = header
    for begin, end, name, width in _tensors(header):
        before = old.get((name, end - begin), bytes(end - begin))
        blocks = [before[at : at + BLOCK] for at in range(0, max(1, len(before)), BLOCK)]
        tensor = b"".join(_block(reader, block, width) for block in blocks)
        assert reader.take(32) == blake3(tensor).digest()
        new += tensor
    assert (reader.rest, len(new)) == (b"", size)
    return new


def _tensors(header: bytes) -> list[tuple[int, int, str, int]]:
    """Return where each tensor begins and ends in its file, its name, and the width of its elements."""
    widths = {dtype: width for width, dtypes in WIDTHS.items() for dtype in dtypes}
    entries = {name: entry for name, entry in json.loads(header[8:]).items() if name != "__metadata__"}
    return sorted(
        (*(len(header) + offset for offset in entry["data_offsets"]), name, widths.get(entry["dtype"], 1))
        for name, entry in entries.items()
    )


def _block(reader: PatchReader, block: bytes, width: int) -> bytes:
    count = reader.number()
    if not count:
        return block
    place, places = -1, []
    gap = 0
    for byte in reader.stream().tolist():
        gap += byte
        if byte < 255:
            place += gap + 1
            places.append(place)
            gap = 0
    changes = np.stack([reader.stream() for _ in range(width)], axis=1)
    assert len(places) == count == len(changes)
    elements = np.frombuffer(block, np.uint8).reshape(-1, width).copy()
    top, every = 1 << (8 * width - 1), (1 << 8 * width) - 1
    for at, change in zip(places, changes, strict=True):
        number = int.from_bytes(elements[at].tobytes(), "little")
        zigzag = int.from_bytes(change.tobytes(), "little")
        ordered = number ^ every if number & top else number | top
        ordered = (ordered + (zigzag >> 1 if zigzag % 2 == 0 else -(zigzag + 1 >> 1))) & every
        number = ordered & ~top if ordered & top else ordered ^ every
        elements[at] = np.frombuffer(number.to_bytes(width, "little"), np.uint8)
    return elements.tobytes()
