"""The chunk store of a node, a folder of verified chunks named by their hashes, and the files that grow from chunks.

- Bytes are verified before they are written and again each time they are read, so neither a peer nor a bad disk can
  make us serve anything else. A caller of `mapped` verifies the file that it builds from the bytes.
- A file gets its name when all its bytes are written. It is not synced: a chunk that a power cut damaged is found out
  when it is read, and fetched again. What a crash leaves unfinished is removed by `clean`.
- One process owns the folder (writes, cleans, prunes); others may read along, as the seeder does.
- All methods block; callers on an event loop use a thread.

A file grows from chunks in any order, and is checked while it grows.

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
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from blake3 import blake3

from protocol import limits
from protocol.errors import ChunkMismatch, ManifestInvalid, UnknownChunk
from protocol.ids import ChunkId
from protocol.policy.chunks import blob_path, chunk_id, split, verify
from swarm_node.base.disk import disk_named, mapped, write_whole

_TEMP = "incoming"
"""Subfolder of unfinished files; its name is not two hex digits, so it contains no chunks."""


class BlobStore:
    """Chunks below one folder."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def clean(self) -> None:
        """Prepare the folder for its owner: create it, and remove unfinished files of an earlier run."""
        with disk_named(self.root):
            (self.root / _TEMP).mkdir(parents=True, exist_ok=True)
        for leftover in (self.root / _TEMP).iterdir():
            leftover.unlink(missing_ok=True)

    def path(self, chunk: ChunkId) -> Path:
        return self.root / blob_path(chunk)

    def has(self, chunk: ChunkId) -> bool:
        with disk_named(self.root):
            return self.path(chunk).is_file()

    def read(self, chunk: ChunkId) -> bytes:
        """Return the verified bytes; a file that does not match its hash is removed and counts as absent."""
        try:
            with disk_named(self.root), suppress(FileNotFoundError, NotADirectoryError):
                data = self.path(chunk).read_bytes()
                verify(chunk, data)
                return data
        except ChunkMismatch as error:
            with disk_named(self.root):
                self.path(chunk).unlink(missing_ok=True)
            raise UnknownChunk(
                f"Chunk {chunk[:12]}… was damaged on the disk and was removed.",
                hint="It is downloaded again. If this repeats, check the disk.",
            ) from error
        raise _absent(chunk)

    def remove_damaged(self, chunks: Iterable[ChunkId]) -> None:
        """Verify these chunks, and remove those that do not match their hashes."""
        for chunk in chunks:
            with suppress(UnknownChunk):
                self.read(chunk)

    def mapped(self, chunk: ChunkId) -> memoryview:
        """Return the stored bytes, without verifying them again."""
        try:
            return mapped(self.path(chunk))
        except FileNotFoundError:
            raise _absent(chunk) from None

    def write(self, chunk: ChunkId, data: bytes | memoryview) -> None:
        """Store bytes under their name; writing a chunk twice changes nothing."""
        verify(chunk, data)
        if self.has(chunk):
            return
        with disk_named(self.root):
            try:
                write_whole(self.path(chunk), data, temp_folder=self.root / _TEMP)
            except FileNotFoundError:  # the folder was removed; checking each time would cost as much as writing
                (self.root / _TEMP).mkdir(parents=True, exist_ok=True)
                write_whole(self.path(chunk), data, temp_folder=self.root / _TEMP)

    def prune(self, keep: Collection[ChunkId]) -> int:
        """Remove all chunks except `keep`; return the number of removed chunks."""
        wanted = set(keep)
        gone = [path for path in self._files() if path.name not in wanted]
        for path in gone:
            path.unlink(missing_ok=True)
        return len(gone)

    def _files(self) -> Iterator[Path]:
        for folder in self.root.iterdir() if self.root.is_dir() else ():
            if folder.is_dir() and folder.name != _TEMP:
                yield from folder.iterdir()


def _absent(chunk: ChunkId) -> UnknownChunk:
    return UnknownChunk(f"Chunk {chunk[:12]}… is not stored here.")


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
