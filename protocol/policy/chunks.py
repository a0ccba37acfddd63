"""Chunks: pieces of files named by the BLAKE3 hash of their bytes.

- Every receiver checks the name of arriving bytes before it writes, announces or serves them.
- The same bytes have the same name in every version, so unchanged chunks are never fetched twice.
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
"""More and smaller chunks spread more evenly through a swarm, but cost more CPU time."""

_FITTING_MIN_BYTES, _FITTING_STEP_BYTES = 64 * limits.KIB, 16 * limits.KIB
"""The smallest size and its steps: in smaller chunks, frames and system calls cost more than the bytes."""

Sliced = TypeVar("Sliced", bytes, memoryview)


def digest(data: bytes | memoryview) -> Digest:
    """Return the BLAKE3 hash of a whole document or file, as 64 hex digits."""
    return Digest(blake3(data).hexdigest())


def chunk_id(data: bytes | memoryview) -> ChunkId:
    """Return the name of a chunk."""
    return ChunkId(blake3(data).hexdigest())


def verify(chunk: ChunkId, data: bytes | memoryview) -> None:
    """Raise `ChunkMismatch` unless the bytes have this name."""
    actual = chunk_id(data)
    if actual != chunk:
        raise ChunkMismatch(f"Chunk {chunk[:12]}… was expected, but chunk {actual[:12]}… arrived.")


def split(data: Sliced, chunk_size_bytes: int) -> Iterator[Sliced]:
    """Cut a file into chunks; an empty file has none."""
    for start in range(0, len(data), chunk_size_bytes):
        yield data[start : start + chunk_size_bytes]


def fitting_size(total_bytes: int) -> int:
    """Return the chunk size for a version of `total_bytes`: a few hundred chunks spread evenly and cost little each."""
    steps = math.ceil(total_bytes / _FITTING_COUNT / _FITTING_STEP_BYTES)
    return min(max(steps * _FITTING_STEP_BYTES, _FITTING_MIN_BYTES), limits.CHUNK_MAX_BYTES)


def blob_path(chunk: ChunkId) -> PurePosixPath:
    """Return a chunk's path below a blob folder: two hex digits, then the whole name."""
    return PurePosixPath(chunk[:2], chunk)
