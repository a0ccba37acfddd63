"""From the learner's uploaded files to a signed version that nodes may load.

Order, each step durable before the next and harmless to repeat: chunks → manifest → trust metadata → the store.
A version exists for dispatch only when the last step is done, so no lease names a version that nobody can fetch.

- The learner uploads into `uploads/<version>/`; names and digests are checked against its own list.
- Chunks of the versions that a rollout may still use are kept; older ones are deleted.
"""

import shutil
from pathlib import Path

import sqlalchemy as sa

from coordinator.files import write_durably
from coordinator.signed_metadata import SignedMetadata, utc_now
from coordinator.tables import versions
from protocol import chunks
from protocol.errors import ManifestInvalid, OutOfOrder
from protocol.ids import ChunkId
from protocol.learning import Publication, Upload
from protocol.manifest import FileEntry, PolicyManifest, Sampler, open_manifest, target_path


class Publisher:
    """Publishes the versions of one round."""

    def __init__(
        self, *, folder: Path, metadata: SignedMetadata, task: str, sampler: Sampler, chunk_size_bytes: int, keep: int
    ) -> None:
        self.blobs = folder / "blobs"
        self.uploads = folder / "uploads"
        self._metadata = metadata
        self._round_id = metadata.round_id
        self._task = task
        self._sampler = sampler
        self._chunk_size_bytes = chunk_size_bytes
        self._keep = keep

    def publish(self, publication: Publication) -> tuple[PolicyManifest, str]:
        """Cut, describe and sign an uploaded version; returns the manifest and its digest."""
        folder = self.uploads / str(publication.version)
        files = tuple(self._store(folder, upload) for upload in publication.files)
        parent = self._metadata.read(target_path(publication.version - 1)) if publication.version > 1 else None
        manifest = PolicyManifest(
            round_id=self._round_id,
            version=publication.version,
            update=publication.update,
            parent=chunks.digest(parent) if parent else None,
            task=self._task,
            sampler=self._sampler,
            chunk_size_bytes=self._chunk_size_bytes,
            files=files,
        )
        data = manifest.to_bytes()
        self._metadata.add_manifest(publication.version, data, self._keep, utc_now())
        return manifest, chunks.digest(data)

    def forget_old(self, newest: int) -> None:
        """Delete uploads and chunks that no version still in use needs."""
        wanted: set[str] = set()
        for version in range(max(1, newest - self._keep + 1), newest + 1):
            if manifest := self.manifest(version):
                wanted.update(manifest.chunk_sizes())
        for blob in self.blobs.glob("??/*"):
            if len(blob.name) == 64 and blob.name not in wanted:
                blob.unlink(missing_ok=True)
        for upload in self.uploads.iterdir():
            if upload.name.isdigit() and int(upload.name) <= newest:
                shutil.rmtree(upload)

    def manifest(self, version: int) -> PolicyManifest | None:
        """The manifest of a published version."""
        data = self._metadata.read(target_path(version))
        return open_manifest(data, round_id=self._round_id, version=version) if data else None

    def read_chunk(self, chunk: ChunkId) -> bytes | None:
        path = self.blobs / chunks.blob_path(chunk)
        return path.read_bytes() if path.is_file() else None

    def read_file(self, version: int, name: str) -> bytes:
        """A whole file of a published version, put together from its chunks."""
        manifest = self.manifest(version)
        entry = next((entry for entry in manifest.files if entry.path == name), None) if manifest else None
        if entry is None:
            raise ManifestInvalid(f"Version {version} has no file {name}.")
        return b"".join((self.blobs / chunks.blob_path(ChunkId(chunk))).read_bytes() for chunk in entry.chunks)

    def _store(self, folder: Path, upload: Upload) -> FileEntry:
        """Write one file's chunks that are not there yet."""
        try:
            data = (folder / upload.path).read_bytes()
        except FileNotFoundError:
            raise ManifestInvalid(f"{upload.path} was not uploaded.", hint="Upload the version again.") from None
        if chunks.digest(data) != upload.digest:
            raise ManifestInvalid(f"The upload of {upload.path} is damaged.", hint="Upload the version again.")
        names = []
        for piece in chunks.split(data, self._chunk_size_bytes):
            name = chunks.chunk_id(piece)
            path = self.blobs / chunks.blob_path(name)
            if not path.exists():
                write_durably(path, piece)
            names.append(name)
        return FileEntry(path=upload.path, size_bytes=len(data), digest=upload.digest, chunks=tuple(names))


def record(connection: sa.Connection, manifest: PolicyManifest, digest: str, *, now_ms: int) -> None:
    """Let dispatch know of a published version; the same one again changes nothing."""
    row = connection.execute(
        sa.select(versions.c.manifest_digest).where(versions.c.version == manifest.version)
    ).first()
    if row is not None:
        if row[0] != digest:
            raise OutOfOrder(f"Version {manifest.version} was already published with other content.")
        return
    newest, _ = newest_version(connection)
    if manifest.version != newest + 1:
        raise OutOfOrder(f"Version {manifest.version} does not follow version {newest}.")
    connection.execute(
        sa.insert(versions).values(
            version=manifest.version,
            policy_update=manifest.update,
            manifest_digest=digest,
            size_bytes=sum(entry.size_bytes for entry in manifest.files),
            published_ms=now_ms,
        )
    )


def newest_version(connection: sa.Connection) -> tuple[int, int]:
    """The newest version and its update; (0, 0) before the first."""
    row = connection.execute(
        sa.select(versions.c.version, versions.c.policy_update).order_by(versions.c.version.desc()).limit(1)
    ).first()
    return (row[0], row[1]) if row else (0, 0)
