"""The chunk store of a node: a folder of verified chunks, named by their hashes.

- Bytes are verified before they are written and again each time they are read, so neither a peer nor a bad disk can
  make us serve anything else. A caller of `mapped` verifies the file that it builds from the bytes.
- A file gets its name when all its bytes are written. It is not synced: a chunk that a power cut damaged is found out
  when it is read, and fetched again. What a crash leaves unfinished is removed by `clean`.
- One process owns the folder (writes, cleans, prunes); others may read along, as the seeder does.
- All methods block; callers on an event loop use a thread.
"""

from collections.abc import Collection, Iterable, Iterator
from contextlib import suppress
from pathlib import Path

from protocol.errors import ChunkMismatch, UnknownChunk
from protocol.ids import ChunkId
from protocol.policy.chunks import blob_path, verify
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
