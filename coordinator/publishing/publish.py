"""Publication: signed versions that nodes may load, made of the learner's uploaded files.

Order, each step durable before the next and harmless to repeat: chunks → manifest → trust metadata → the store.
A version exists for dispatch only when the last step is done, so no lease names a version that cannot be fetched.

- The chunks of a version are synced together, and no chunk gets its name before: a name guarantees complete bytes.
- The learner uploads into `uploads/<version>/`; names and digests are checked against its own list. Files that it does
  not upload must be unchanged since the version before: the base of adapters is sent once. Uploads are not synced: if a
  power cut loses one, the publication finds it missing.
- The uploads of the newest version are kept: the next version's patches are made against them. If they are missing or
  damaged, the next version is published in full.
- Files that nodes would refuse to fetch are not signed (`protocol.policy.folder`).
- Chunks of versions that a rollout may still use, or that the operator keeps (`publish.keep`), are kept, and others
  deleted. Chunks that an audit or an evaluation waits for stay, the newest first, if their additional size fits into
  `room_bytes` and into half of the free space: the disk must not fill up if no auditor runs. A chunk is counted once.

Patches of a file:

- A patch is at most half as large as the file; otherwise it is not worth it. If most weights change, every version is
  full.
- A newcomer fetches the anchor and the patches after it: less than twice the file. When another patch would exceed
  that, or the limit of patches, the version becomes the anchor; nodes with the version before still fetch the patch.
- A patch is published only after a check that it leads from the base to exactly the uploaded file.
"""

import logging
import os
import shutil
from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from blake3 import blake3

from coordinator.base.files import ArrivingFile, DurableFiles, mapped, together
from coordinator.publishing.signed_metadata import SignedMetadata, utc_now
from protocol import limits
from protocol.errors import ManifestInvalid, MessageTooLarge, PatchInvalid
from protocol.ids import ChunkId
from protocol.policy import chunks, delta
from protocol.policy.folder import require_files
from protocol.policy.manifest import FileEntry, Patch, PolicyManifest, Sampler, open_manifest, target_path
from protocol.work.learning import Publication, UploadedFile

PATCHED = ".safetensors"
"""The files that may be patched; the others are small, or never change."""

OFFERED = "offered"
"""The folder below `uploads/` with the files that trainers have sent."""

WORTH_IT = 2
"""The factor by which a patch must be smaller than the file: a larger one costs nodes more time than it saves."""


def write_patch(base: memoryview, base_digest: str, new: memoryview, new_digest: str, target: Path) -> bool:
    """Write the patch to `target`; return True if it is worth it and leads to exactly the new file."""
    with ThreadPoolExecutor(os.cpu_count()) as threads, target.open("wb") as file:
        try:
            for piece in delta.encode(base, new, base_digest=base_digest, each=threads.map):
                if (file.tell() + len(piece)) * WORTH_IT > len(new):
                    return False
                file.write(piece)
            file.flush()
            hasher = blake3(max_threads=blake3.AUTO)
            for block in delta.apply(base, mapped(target), base_digest=base_digest, each=threads.map):
                hasher.update(block)
        except PatchInvalid:  # not tensor files, which patches need
            return False
    return hasher.hexdigest() == new_digest


def apply_patch(base: Path, base_digest: str, patch: Path, target: Path, digest: str, *, max_bytes: int) -> None:
    """Write the file of this digest, to which the patch leads from a base whose digest the caller computed."""
    made, size_bytes = ArrivingFile(target), 0
    try:
        with ThreadPoolExecutor(os.cpu_count()) as threads:
            for block in delta.apply(mapped(base), mapped(patch), base_digest=base_digest, each=threads.map):
                size_bytes += len(block)
                if size_bytes > max_bytes:
                    raise MessageTooLarge(f"The patched file is larger than the limit of {max_bytes:,} bytes.")
                made.write(block)
        try:
            made.finish(digest)
        except ManifestInvalid:
            raise PatchInvalid(f"The patch does not lead to a file with the digest {digest[:12]}….") from None
    finally:
        made.discard()


def extend(previous: FileEntry, patch: Patch, size_bytes: int) -> tuple[tuple[Patch, ...], int]:
    """Return the chain with `patch` added, and how many of its patches follow the anchor; 0: the new file is the
    anchor.
    """
    patches = (*previous.patches, patch)
    count = previous.patches_after_anchor + 1
    fetched = previous.anchor_size_bytes + _bytes(patches[-count:])
    if count > limits.PATCHES_MAX or fetched >= 2 * size_bytes:
        count = 0
    while len(patches) > max(count, 1) and (len(patches) > limits.PATCHES_MAX or _bytes(patches) >= size_bytes):
        patches = patches[1:]
    return patches, count


def _bytes(patches: tuple[Patch, ...]) -> int:
    return sum(patch.size_bytes for patch in patches)


log = logging.getLogger(__name__)


class KeptVersions(NamedTuple):
    """The size of the versions on the disk that only audits and evaluations need."""

    size_bytes: int
    room_bytes: int
    """The limit of `size_bytes`."""


class Publisher:
    """The publisher of the versions of one round."""

    def __init__(
        self,
        *,
        folder: Path,
        metadata: SignedMetadata,
        task: str,
        sampler: Sampler,
        chunk_size_bytes: int,
        keep: int,
        patches: bool = True,
        room_bytes: int = 20 * 1024 * limits.MIB,
    ) -> None:
        self.blobs = folder / "blobs"
        self.uploads = folder / "uploads"
        self._metadata = metadata
        self._round_id = metadata.round_id
        self._task = task
        self._sampler = sampler
        self._chosen_size_bytes = self._chunk_size_bytes = chunk_size_bytes
        self._keep = keep
        self._patches = patches
        self._room_bytes = room_bytes

    def publish(self, publication: Publication) -> tuple[PolicyManifest, str]:
        """Cut, describe and sign an uploaded version; return the manifest and its digest."""
        for upload in publication.files:
            self._keep_upload(publication.version, upload)
        if not self._chosen_size_bytes:
            paths = [self.uploads / str(publication.version) / upload.path for upload in publication.files]
            total_bytes = sum(path.stat().st_size for path in paths if path.is_file())
            self._chunk_size_bytes = chunks.fitting_size(total_bytes)
        with together(self.blobs / "incoming") as batch:
            files = tuple(self._store(publication.version, upload, batch) for upload in publication.files)
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
        require_files(manifest)
        data = manifest.to_bytes()
        self._metadata.add_manifest(publication.version, data, self._keep, utc_now())
        return manifest, chunks.digest(data)

    def unchanged(self, version: int) -> tuple[UploadedFile, ...]:
        """Return the files of the version before, which need no second upload if this version has them, too."""
        before = self.manifest(version - 1)
        folder = self.uploads / str(version - 1)
        return tuple(
            UploadedFile(path=entry.path, digest=entry.digest)
            for entry in (before.files if before else ())
            if (folder / entry.path).is_file()
        )

    def forget_old(self, newest: int, *, audited: int | None = None, kept: Collection[int] = ()) -> KeptVersions:
        """Delete uploads and chunks that no version in use needs; `audited` is the oldest one that an audit waits for.

        The chunks that rebuild the versions in `kept` stay.
        """
        in_use = self._in_use(newest).start
        wanted = set(self.chunks_in_use(newest))
        for version in kept:
            if manifest := self.manifest(version):
                wanted.update(manifest.chunk_sizes_for(()))
        for_audits = self._keep_for_audits(in_use, max(1, audited or in_use), wanted)
        for blob in self.blobs.glob("??/*"):
            if len(blob.name) == 64 and blob.name not in wanted:
                blob.unlink(missing_ok=True)
        for upload in self.uploads.glob("*"):  # a restored round has no such folder before its next version
            if upload.name.isdigit() and int(upload.name) < newest:
                shutil.rmtree(upload)
        return for_audits

    def chunks_in_use(self, newest: int) -> frozenset[str]:
        """Return every chunk that leads to a version that nodes may still fetch."""
        return frozenset(chunk for version in self._in_use(newest) for chunk in self._chunks(version))

    def _in_use(self, newest: int) -> range:
        return range(max(1, newest - self._keep + 1), newest + 1)

    def _keep_for_audits(self, in_use: int, audited: int, wanted: set[str]) -> KeptVersions:
        """Add the chunks of older versions, the newest first, as far as they fit; deleted chunks need no space."""
        room_bytes, size_bytes = self._room(wanted), 0
        for version in range(in_use - 1, audited - 1, -1):
            more = {name: size for name, size in self._chunks(version).items() if name not in wanted}
            more_bytes = sum(size for name, size in more.items() if self._holds(name))
            if size_bytes + more_bytes > room_bytes:
                log.warning(
                    "versions deleted that claims wait for: first=%d last=%d room_bytes=%d; their audits are pardoned. "
                    "Start another auditor, or raise audit.kept_gib (half of what the disk has free is the most).",
                    audited, version, room_bytes,
                )  # fmt: skip
                break
            wanted.update(more)
            size_bytes += more_bytes
        return KeptVersions(size_bytes, room_bytes)

    def _room(self, wanted: set[str]) -> int:
        """Return the limit of the chunks to keep beyond `wanted`; those already on the disk count as free space."""
        held = sum(blob.stat().st_size for blob in self.blobs.glob("??/*") if blob.name not in wanted)
        return min(self._room_bytes, (shutil.disk_usage(self.blobs).free + held) // 2)

    def _chunks(self, version: int) -> dict[str, int]:
        manifest = self.manifest(version)
        return manifest.chunk_sizes() if manifest else {}

    def _holds(self, name: str) -> bool:
        return (self.blobs / chunks.blob_path(ChunkId(name))).exists()

    def manifest(self, version: int) -> PolicyManifest | None:
        """Return the manifest of a published version; None if there is none."""
        data = self._metadata.read(target_path(version))
        return open_manifest(data, round_id=self._round_id, version=version) if data else None

    def read_chunk(self, chunk: ChunkId) -> bytes | None:
        path = self.blobs / chunks.blob_path(chunk)
        return path.read_bytes() if path.is_file() else None

    def read_file(self, version: int, name: str) -> bytes:
        """Return a file of a published version, rebuilt in memory from its chunks like on a new node."""
        entry = _entry(self.manifest(version), name)
        if entry is None:
            raise ManifestInvalid(f"Version {version} has no file {name}.")
        data = self._join(entry.chunks)
        for patch in entry.after_anchor:
            data = b"".join(delta.apply(data, self._join(patch.chunks), base_digest=patch.base_digest))
        return data

    def write_folder(self, version: int, folder: Path) -> int | None:
        """Write a version's folder from its chunks; return its update, or None if the chunks were deleted."""
        manifest = self.manifest(version)
        if manifest is None:
            return None
        beside = folder.with_name(f"{folder.name}.new")
        shutil.rmtree(beside, ignore_errors=True)
        beside.mkdir(parents=True)
        try:
            for entry in manifest.files:
                self._write(entry, beside / entry.path)
        except FileNotFoundError:  # a chunk that only deleted versions needed
            shutil.rmtree(beside)
            return None
        beside.rename(folder)
        return manifest.update

    def _keep_upload(self, version: int, upload: UploadedFile) -> None:
        """Link an unchanged file that was not uploaded again to that of the version before: one file, two names."""
        target = self.uploads / str(version) / upload.path
        if not target.exists() and upload in self.unchanged(version):
            target.parent.mkdir(parents=True, exist_ok=True)
            target.hardlink_to(self.uploads / str(version - 1) / upload.path)

    def _store(self, version: int, upload: UploadedFile, batch: DurableFiles) -> FileEntry:
        """Write the patch or the chunks of a file, or nothing if it is unchanged since the version before."""
        path = self.uploads / str(version) / upload.path
        if not path.is_file():
            raise ManifestInvalid(f"{upload.path} was not uploaded.", hint="Upload the version again.")
        before = self._entry_before(version, upload.path)
        if before is not None and before.digest == upload.digest:
            return before
        data = mapped(path)
        if _digest(data) != upload.digest:
            raise ManifestInvalid(f"The upload of {upload.path} is damaged.", hint="Upload the version again.")
        patch = self._patch(version, before, upload, data, batch) if before else None
        patches, after_anchor = extend(before, patch, len(data)) if before and patch else ((), 0)
        return FileEntry(
            path=upload.path,
            size_bytes=len(data),
            digest=upload.digest,
            chunks=before.chunks if before and after_anchor else self._cut(data, batch),
            patches=patches,
            patches_after_anchor=after_anchor,
        )

    def _entry_before(self, version: int, name: str) -> FileEntry | None:
        """Return the file of this name in the version before, if its chunks exist and have the current chunk size."""
        manifest = self.manifest(version - 1)
        entry = _entry(manifest, name)
        if manifest is None or entry is None or manifest.chunk_size_bytes != self._chunk_size_bytes:
            return None
        names = (*entry.chunks, *(chunk for patch in entry.patches for chunk in patch.chunks))
        return entry if all((self.blobs / chunks.blob_path(ChunkId(chunk))).exists() for chunk in names) else None

    def _patch(
        self, version: int, before: FileEntry, upload: UploadedFile, new: memoryview, batch: DurableFiles
    ) -> Patch | None:
        """Store the patch from the version before to this file; return None if there is none that is worth it."""
        path = self.uploads / str(version - 1) / upload.path
        # A chain that returned to an earlier digest would have two patches with the same base.
        if not self._patches or not upload.path.endswith(PATCHED) or upload.digest in before.sizes():
            return None
        if not path.is_file() or _digest(base := mapped(path)) != before.digest:
            return None
        target = self.uploads / str(version) / f".{upload.path}.patch"
        try:
            if not write_patch(base, before.digest, new, upload.digest, target):
                return None
            patch = mapped(target)
            return Patch(
                base_digest=before.digest,
                base_size_bytes=len(base),
                size_bytes=len(patch),
                chunks=self._cut(patch, batch),
            )
        finally:
            target.unlink(missing_ok=True)

    def _cut(self, data: memoryview, batch: DurableFiles) -> tuple[str, ...]:
        """Write the chunks that do not exist yet; return all names in order."""
        names = []
        for piece in chunks.split(data, self._chunk_size_bytes):
            name = chunks.chunk_id(piece)
            path = self.blobs / chunks.blob_path(name)
            if path not in batch and not path.exists():
                batch.add(path, piece)
            names.append(name)
        return tuple(names)

    def _write(self, entry: FileEntry, path: Path) -> None:
        """Write a file from its chunks; only pieces of it are in memory."""
        with path.open("wb") as file:
            file.writelines(map(self._read, entry.chunks))
        for patch in entry.after_anchor:
            patched = path.with_name(f"{path.name}.patched")
            with patched.open("wb") as file:
                file.writelines(delta.apply(mapped(path), self._join(patch.chunks), base_digest=patch.base_digest))
            patched.replace(path)

    def _read(self, name: str) -> bytes:
        return (self.blobs / chunks.blob_path(ChunkId(name))).read_bytes()

    def _join(self, names: tuple[str, ...]) -> bytes:
        return b"".join(map(self._read, names))


def _entry(manifest: PolicyManifest | None, name: str) -> FileEntry | None:
    return next((entry for entry in manifest.files if entry.path == name), None) if manifest else None


def _digest(data: memoryview) -> str:
    """Return the digest of a large file, computed on all cores."""
    return blake3(data, max_threads=blake3.AUTO).hexdigest()
