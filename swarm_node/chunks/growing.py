"""A file that grows from chunks in any order, and is checked while it grows.

- Chunks are copied to their places from memory if they arrived recently, otherwise from the store. They are not checked
  again one by one: the file's digest covers all their bytes, and is computed over the written file, from its beginning
  to the first gap.
- The digest is computed although the signed names of the chunks already determine the file: it checks the copying, and
  that the manifest does not contradict itself. Chunks arrive almost in order, so little is left to hash at the end.
- After a wrong digest the cause is found: a chunk that was damaged on the disk is removed from the store and fetched
  again; if every chunk is valid, the manifest describes another file.
- Written bytes are synced in portions, so that the last sync is short.
"""

import os
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

from blake3 import blake3

from protocol import limits
from protocol.errors import ManifestInvalid, UnknownChunk
from protocol.ids import ChunkId
from protocol.policy.chunks import chunk_id, split
from swarm_node.base.disk import mapped
from swarm_node.chunks.blobs import BlobStore

_SYNC_BYTES = 64 * limits.MIB
"""Bytes written between two syncs: a disk writes them in a fraction of a second, and small policies are synced once."""


class GrowingFile:
    """An unfinished file; its methods block, and only one thread at a time may use it."""

    def __init__(
        self,
        path: Path,
        chunks: Sequence[str],
        *,
        chunk_size_bytes: int,
        size_bytes: int,
        digest: str,
        blobs: BlobStore,
    ) -> None:
        self.path = path
        self._chunks = [ChunkId(chunk) for chunk in chunks]
        self._chunk_size_bytes, self._size_bytes, self._digest, self._blobs = (
            chunk_size_bytes,
            size_bytes,
            digest,
            blobs,
        )
        self._gaps: defaultdict[ChunkId, list[int]] = defaultdict(list)
        """Positions of the chunks that are not in place yet."""
        for position, chunk in enumerate(self._chunks):
            self._gaps[chunk].append(position)
        self._beyond: set[int] = set()
        """Positions that are filled but not hashed yet, because of a gap before them."""
        self._hashed = 0
        """Positions before the first gap."""
        self._hasher = blake3()
        self._unsynced_bytes = 0
        # Exclusive: two entries that are the same file on this file system must not overwrite each other.
        with path.open("xb") as file:
            file.truncate(size_bytes)
        self._written = mapped(path)

    def place(self, chunk: ChunkId, data: bytes | None = None) -> None:
        """Copy a chunk to its positions; a chunk that is already in place, or not part of this file, changes nothing.

        Without `data`, the stored bytes are used.
        """
        if chunk not in self._gaps:
            return
        source = self._blobs.mapped(chunk) if data is None else memoryview(data)
        with self.path.open("r+b", buffering=0) as file:
            for position in self._gaps[chunk]:
                start = position * self._chunk_size_bytes
                if len(source) != min(self._chunk_size_bytes, self._size_bytes - start):
                    self._blobs.read(chunk)
                    raise self._contradicted()
                file.seek(start)
                left = source
                while left:
                    left = left[file.write(left) :]
                self._unsynced_bytes += len(source)
            if self._unsynced_bytes >= _SYNC_BYTES:
                os.fdatasync(file.fileno())
                self._unsynced_bytes = 0
        self._beyond.update(self._gaps.pop(chunk))
        self._hash()

    def finish(self) -> None:
        """Place the remaining chunks; the file is then exactly the manifest's."""
        for chunk in list(self._gaps):
            self.place(chunk)
        if self._hasher.hexdigest() != self._digest:
            self._raise_culprit()

    def _hash(self) -> None:
        end = self._hashed
        while end in self._beyond:
            self._beyond.discard(end)
            end += 1
        if end > self._hashed:
            start, self._hashed = self._hashed, end
            self._hasher.update(self._written[start * self._chunk_size_bytes : end * self._chunk_size_bytes])

    def _raise_culprit(self) -> None:
        for chunk, piece in zip(self._chunks, split(mapped(self.path), self._chunk_size_bytes), strict=True):
            self._blobs.read(chunk)
            if chunk_id(piece) != chunk:
                raise UnknownChunk(
                    f"Chunk {chunk[:12]}… was damaged while it was copied to {self.path.name}.",
                    hint="It will be tried again; if this repeats, check the disk.",
                )
        raise self._contradicted()

    def _contradicted(self) -> ManifestInvalid:
        return ManifestInvalid(
            f"The chunks of {self.path.name} are sound, but do not make the file the manifest describes."
        )
