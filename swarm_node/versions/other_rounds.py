"""The files of a home's other rounds: what two rounds share, such as a base model, is stored and fetched once.

- Files and chunks are taken over by hard links, so each round still keeps and removes its own, and a link costs no
  disk space. Where the file system has none, they are fetched again.
- A taken file is used only if it has the digest of the signed manifest (`assemble.held_files`). A chunk is taken only
  if it is sound: a damaged one would be linked again after each removal.
- Two rounds of one agent that need the same weights at the same time fetch them once: the second waits. It waits once
  for the same weights, and for all together at most `WAIT_S`, so that a slow or hostile round does not stop it.
"""

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import trio

from protocol.errors import DiskFull, UnknownChunk
from protocol.ids import ChunkId
from protocol.policy.manifest import PolicyManifest
from swarm_node.base.disk import disk_named
from swarm_node.chunks.blobs import BlobStore
from swarm_node.coordinator_api.join_string import POLICIES
from swarm_node.versions import assemble

BLOBS = "blobs"
"""Folder of a round's chunks."""

WAIT_S = 600.0
"""Longest wait of a round for others that fetch the same weights."""


class OtherRounds:
    """The rounds of one home, as each of them sees the others."""

    def __init__(self, rounds: Path) -> None:
        self._rounds = rounds
        self._fetching: dict[Path, frozenset[str]] = {}
        """The weights that each round is fetching, by their digests."""
        self._changed = trio.Event()
        self._awaited: dict[Path, set[str]] = defaultdict(set)
        """The weights that each round has had, or has waited for."""
        self._patience_s: dict[Path, float] = defaultdict(lambda: WAIT_S)
        """The rest of each round's `WAIT_S`."""

    @contextmanager
    def fetching(self, policies: Path, manifest: PolicyManifest) -> Iterator[None]:
        """Record that a round fetches a version, for the duration of the block."""
        self._fetching[policies] = _weights(manifest)
        try:
            yield
        finally:
            del self._fetching[policies]
            self._changed.set()
            self._changed = trio.Event()

    async def wait_for_shared(self, policies: Path, manifest: PolicyManifest, *, slice_s: float) -> bool:
        """Wait while another round fetches weights of this version; return False to wait on after `slice_s`."""
        wanted = _weights(manifest) - self._awaited[policies]
        began, patience_s = trio.current_time(), self._patience_s[policies]
        with trio.move_on_after(min(slice_s, patience_s)):
            while any(wanted & theirs for folder, theirs in self._fetching.items() if folder != policies):
                await self._changed.wait()
            self._awaited[policies] |= wanted
            return True
        self._patience_s[policies] -= trio.current_time() - began
        return patience_s <= slice_s

    def take_over(self, policies: Path, manifest: PolicyManifest, blobs: BlobStore) -> None:
        """Link the files and chunks of other rounds that a version may need; `assemble.clear_taken` removes
        the links to files."""
        assemble.clear_taken(policies)
        for number, version in enumerate(assemble.versions_in(self._folders(policies, POLICIES))):
            for name in map(assemble.safe_name, manifest.files):
                _link(version / name, policies / assemble.TAKEN / str(number) / name, policies)
        for chunk in manifest.chunk_sizes():
            if not blobs.has(ChunkId(chunk)):
                self._take_chunk(ChunkId(chunk), blobs)

    def _take_chunk(self, chunk: ChunkId, blobs: BlobStore) -> None:
        for folder in self._folders(blobs.root, BLOBS):
            with suppress(UnknownChunk, DiskFull):  # it is not there, or damaged
                BlobStore(folder).read(chunk)
                if _link(BlobStore(folder).path(chunk), blobs.path(chunk), blobs.root):
                    return

    def _folders(self, own: Path, name: str) -> list[Path]:
        """Return a folder of every other round."""
        return [path for path in sorted(self._rounds.glob(f"*/{name}")) if path != own]


def _weights(manifest: PolicyManifest) -> frozenset[str]:
    return frozenset(entry.digest for entry in manifest.files if entry.path.endswith(".safetensors"))


def _link(source: Path, target: Path, folder: Path) -> bool:
    """Link a file that another round may remove at any time; return False if that is not possible."""
    if not source.is_file():
        return False
    with disk_named(folder):
        target.parent.mkdir(parents=True, exist_ok=True)
    with suppress(OSError):  # it is gone, or the file system has no links
        target.hardlink_to(source)
        return True
    return False
