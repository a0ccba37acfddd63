"""Chunks: pieces of files named by the BLAKE3 hash of their bytes.

- A name is checked before the bytes are written, announced or served, by everyone, every time they arrive.
- The same bytes have the same name in every version, so what did not change is never fetched twice.
"""

import math
from collections.abc import Iterator
from pathlib import PurePosixPath
from typing import TypeVar

from blake3 import blake3

from protocol import limits
from protocol.errors import ChunkMismatch
from protocol.ids import ChunkId, Digest

_FITTING_COUNT = 512
"""More and smaller chunks flow more evenly through a swarm, and cost more processor time."""

_FITTING_MIN_BYTES, _FITTING_STEP_BYTES = 64 * limits.KIB, 16 * limits.KIB
"""Below the least, frames and system calls cost more than the bytes."""

Sliced = TypeVar("Sliced", bytes, memoryview)


def digest(data: bytes | memoryview) -> Digest:
    """The BLAKE3 hash of a whole document or file, as 64 hex digits."""
    return Digest(blake3(data).hexdigest())


def chunk_id(data: bytes | memoryview) -> ChunkId:
    """The name of a chunk."""
    return ChunkId(blake3(data).hexdigest())


def verify(chunk: ChunkId, data: bytes | memoryview) -> None:
    """Raise `ChunkMismatch` unless the bytes are the ones the name promises."""
    actual = chunk_id(data)
    if actual != chunk:
        raise ChunkMismatch(f"Chunk {chunk[:12]}… was promised, bytes of {actual[:12]}… came.")


def split(data: Sliced, chunk_size_bytes: int) -> Iterator[Sliced]:
    """Cut a file into chunks; an empty file has none."""
    for start in range(0, len(data), chunk_size_bytes):
        yield data[start : start + chunk_size_bytes]


def fitting_size(total_bytes: int) -> int:
    """The chunk size for a version of so many bytes: a few hundred chunks, which flow smoothly and cost little each."""
    steps = math.ceil(total_bytes / _FITTING_COUNT / _FITTING_STEP_BYTES)
    return min(max(steps * _FITTING_STEP_BYTES, _FITTING_MIN_BYTES), limits.CHUNK_MAX_BYTES)


def blob_path(chunk: ChunkId) -> PurePosixPath:
    """Where a chunk lies below a blob folder: two hex digits, then the whole name."""
    return PurePosixPath(chunk[:2], chunk)
