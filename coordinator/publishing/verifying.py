"""Verification of a published version: it is rebuilt from the stored chunks, as on a new node, and compared.

1. the trust metadata, as a new node would check it: from the first root to the newest manifest,
2. the manifest's bytes, against the store and the signed list; if the version is no longer in the list, against the
   parent digest in the next manifest, and so on up to a manifest in the list,
3. every chunk: its length and its name,
4. every file: the anchor, each patch after it, and the resulting file.

- It only reads, so a coordinator may be running. All differences are reported, not only the first.
- The timestamp may be expired: a stopped round signs no new one.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from datetime import datetime, timedelta

from tuf.api.exceptions import LengthOrHashMismatchError, RepositoryError
from tuf.api.metadata import Metadata, TargetFile, Targets, Timestamp

from coordinator.base.files import read_at_most
from coordinator.publishing.publish import Publisher
from coordinator.publishing.signed_metadata import SignedMetadata
from protocol import limits
from protocol.errors import NotFound, PatchInvalid, SwarmError
from protocol.ids import ChunkId
from protocol.policy import chunks, delta, root_document, trust
from protocol.policy.manifest import FileEntry, Patch, PolicyManifest, open_manifest, target_path

Moved = Callable[[int], None]
"""A callback with the number of bytes checked since the last call."""


class Verification:
    """The comparison of a version with its signatures; `recorded` is the digest of its manifest in the store."""

    def __init__(
        self, version: int, *, recorded: str, metadata: SignedMetadata, publisher: Publisher, now: datetime
    ) -> None:
        self._version = version
        self._recorded = recorded
        self._metadata = metadata
        self._publisher = publisher
        self._now = now
        self.manifest: PolicyManifest | None = None
        """The manifest to compare with; None if it cannot be read."""
        self._listed: dict[str, TargetFile] = {}
        """The targets that a node would trust now."""
        self._missing = 0

    @property
    def total_bytes(self) -> int:
        """Return about how many bytes must be checked."""
        if self.manifest is None:
            return 0
        return sum(self.manifest.chunk_sizes().values()) + sum(entry.size_bytes for entry in self.manifest.files)

    def documents(self) -> list[str]:
        """Run steps 1 and 2; return the problems of the metadata and the manifest."""
        problems: list[str] = []
        try:
            self._listed = self._trusted()
        except (SwarmError, RepositoryError, OSError) as error:
            problems.append(f"trust metadata: {error}")
        data = self._metadata.read(target_path(self._version))
        if data is None:
            return [*problems, "manifest: it is missing"]
        if chunks.digest(data) != self._recorded:
            problems.append(f"manifest: its digest is {chunks.digest(data)}, the store has {self._recorded}")
        if self._listed and (wrong := self._unlisted(data)):
            problems.append(f"manifest: {wrong}")
        try:
            self.manifest = open_manifest(data, round_id=self._metadata.round_id, version=self._version)
        except SwarmError as error:
            problems.append(f"manifest: {error}")
        return problems

    def content(self, moved: Moved) -> list[str]:
        """Run steps 3 and 4; return the problems of chunks and files. Raise `NotFound` if the version was deleted."""
        assert self.manifest is not None
        problems = [line for entry in self.manifest.files for line in self._file(entry, moved)]
        if self._missing and not self._is_kept():
            raise NotFound(
                f"Version {self._version} was deleted: {self._missing} of its chunks are missing.",
                hint="`swarm-coordinator policy list` shows the versions that are kept.",
            )
        return problems

    def _is_kept(self) -> bool:
        """Return True if nodes may still request the version; a coordinator may have published since the start."""
        with suppress(SwarmError, RepositoryError, OSError):
            return target_path(self._version) in self._trusted()
        return target_path(self._version) in self._listed

    def _trusted(self) -> dict[str, TargetFile]:
        """(1) Return the targets that a node would trust now."""
        roots = self._metadata.roots()
        talk = trust.refresh(root_document.pin(roots[0], self._metadata.round_id), self._moment())
        try:
            wanted = next(talk)
            while True:
                data = self._metadata.read(wanted.name)
                if data is None and not wanted.optional:
                    raise NotFound(f"{wanted.name} is missing.")
                if data is not None and len(data) > wanted.max_bytes:
                    raise NotFound(f"{wanted.name} is longer than {wanted.max_bytes} bytes.")
                wanted = talk.send(data)
        except StopIteration as end:
            return dict(Metadata[Targets].from_bytes(end.value.documents.targets).signed.targets)

    def _moment(self) -> datetime:
        """Return the current time; for a stopped round, the last moment at which its timestamp was fresh."""
        with suppress(RepositoryError):  # `refresh` reports the error
            timestamp = Metadata[Timestamp].from_bytes(self._metadata.read("timestamp.json") or b"").signed
            return min(self._now, timestamp.expires - timedelta(seconds=1))
        return self._now

    def _unlisted(self, data: bytes) -> str:
        """(2) Return why no signed list contains these bytes; "" if one does."""
        version = self._version
        while target_path(version) not in self._listed:
            after = self._metadata.read(target_path(version + 1))
            if after is None:
                return f"no signed list contains version {version}, and there is no later version"
            try:
                parent = PolicyManifest.from_bytes(after, max_bytes=limits.MANIFEST_MAX_BYTES).parent
            except SwarmError as error:
                return f"the manifest of version {version + 1} cannot be read: {error}"
            if parent != chunks.digest(data):
                return f"version {version + 1} has another parent than this version {version}"
            version, data = version + 1, after
        try:
            self._listed[target_path(version)].verify_length_and_hashes(data)
        except LengthOrHashMismatchError as error:
            return f"the signed list has another version {version}: {error}"
        return ""

    def _file(self, entry: FileEntry, moved: Moved) -> Iterator[str]:
        """(3) (4) Yield the problems of one file, its chunks and its patches."""
        problems: list[str] = []
        # For a version that is no longer in the list, only the chunks that rebuild it must exist.
        served = entry.patches if target_path(self._version) in self._listed else entry.after_anchor
        anchor = self._join(entry.path, entry.anchor_size_bytes, entry.chunks, problems, moved)
        steps = [
            (patch, self._join(f"a patch of {entry.path}", patch.size_bytes, patch.chunks, problems, moved))
            for patch in served
        ]
        yield from problems
        route = steps[len(steps) - len(entry.after_anchor) :] if entry.after_anchor else []
        if anchor is None or any(data is None for _, data in route):
            yield f"{entry.path}: cannot be rebuilt"
            return
        yield from self._rebuilt(entry, anchor, [(patch, data) for patch, data in route if data is not None])
        moved(entry.size_bytes)

    def _rebuilt(self, entry: FileEntry, data: bytes, route: list[tuple[Patch, bytes]]) -> Iterator[str]:
        ends = [*(patch.base_digest for patch, _ in route[1:]), entry.digest] if route else []
        if chunks.digest(data) != entry.anchor_digest:
            yield f"{entry.path}: its anchor's digest is {chunks.digest(data)}, the signed one is {entry.anchor_digest}"
            return
        for (patch, stored), wanted in zip(route, ends, strict=True):
            try:
                data = b"".join(delta.apply(data, stored, base_digest=patch.base_digest))
            except PatchInvalid as error:
                yield f"{entry.path}: a patch does not apply: {error}"
                return
            if chunks.digest(data) != wanted:
                yield f"{entry.path}: a patch leads to {chunks.digest(data)}, the signed digest is {wanted}"
                return
        if len(data) != entry.size_bytes:
            yield f"{entry.path}: it has {len(data)} bytes, the signed size is {entry.size_bytes}"

    def _join(
        self, what: str, size_bytes: int, names: Iterable[str], problems: list[str], moved: Moved
    ) -> bytes | None:
        """Return the joined chunks of one file or patch; their problems are added to `problems`."""
        assert self.manifest is not None
        each, parts, whole = self.manifest.chunk_size_bytes, list[bytes](), True
        for start, name in zip(range(0, size_bytes, each), names, strict=True):
            length = min(size_bytes - start, each)
            data, wrong = self._chunk(name, length)
            moved(length)
            if wrong:
                problems.append(f"{what}: chunk {name[:12]}… {wrong}")
                whole = False
            parts.append(data)
        return b"".join(parts) if whole else None

    def _chunk(self, name: str, length: int) -> tuple[bytes, str]:
        """Return a chunk's bytes, and its problem or ""."""
        path = self._publisher.blobs / chunks.blob_path(ChunkId(name))
        if not path.exists():
            self._missing += 1
            return b"", "is missing"
        try:
            data = read_at_most(path, length)
        except (OSError, ValueError) as error:
            return b"", f"cannot be read: {error}"
        if len(data) != length:
            return b"", f"has {len(data)} bytes of {length}"
        actual = chunks.chunk_id(data)
        return (data, "") if actual == name else (b"", f"holds the bytes of {actual[:12]}…")
