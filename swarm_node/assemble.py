"""From verified chunks to the folder an engine loads.

- A policy folder appears under its final name only when every file in it is whole and synced.
- Its name binds version and manifest, so a folder can never be taken for another version's.
- Each file's digest is checked as it is written, and again when a folder of an earlier run is taken up.
- File names come from a signed manifest and are checked all the same: nothing is written outside the folder.
- All functions block; callers on an event loop use a thread.
"""

import os
import shutil
import tempfile
from collections.abc import Collection
from pathlib import Path, PurePath

from blake3 import blake3

from protocol.chunks import digest
from protocol.errors import ManifestInvalid
from protocol.ids import ChunkId
from protocol.manifest import FileEntry, PolicyManifest
from swarm_node.blobs import BlobStore
from swarm_node.disk import full_disk_named, sync_folder

_UNFINISHED = ".unfinished-"
_READ_BYTES = 1 << 20


def folder_of(policies: Path, manifest: PolicyManifest) -> Path:
    """Where the files of a version lie."""
    return policies / f"{manifest.version:012d}-{digest(manifest.to_bytes())[:16]}"


def find(policies: Path, manifest: PolicyManifest) -> Path | None:
    """The folder of a version if it is there and sound; an unsound one is removed."""
    folder = folder_of(policies, manifest)
    if not folder.is_dir():
        return None
    if all(_is_sound(folder / _safe_name(entry), entry) for entry in manifest.files):
        return folder
    shutil.rmtree(folder)
    return None


def assemble(policies: Path, manifest: PolicyManifest, blobs: BlobStore) -> Path:
    """Build the folder of a version whose chunks are all stored; an existing sound one is kept."""
    existing = find(policies, manifest)
    if existing is not None:
        return existing
    with full_disk_named(policies):
        policies.mkdir(parents=True, exist_ok=True)
        temp = Path(tempfile.mkdtemp(prefix=_UNFINISHED, dir=policies))
        try:
            for entry in manifest.files:
                _write_file(temp / _safe_name(entry), entry, blobs)
            sync_folder(temp)
            final = folder_of(policies, manifest)
            temp.rename(final)
            sync_folder(policies)
        except BaseException:
            shutil.rmtree(temp, ignore_errors=True)
            raise
    return final


def prune(policies: Path, keep: Collection[Path]) -> int:
    """Remove all policy folders but these, and what crashes left unfinished; returns how many went."""
    gone = [folder for folder in policies.iterdir() if folder not in keep] if policies.is_dir() else []
    for folder in gone:
        shutil.rmtree(folder)
    return len(gone)


def _safe_name(entry: FileEntry) -> str:
    if PurePath(entry.path).name != entry.path or entry.path[:1] in ("", ".") or "\\" in entry.path:
        raise ManifestInvalid(f"{entry.path!r} is not a bare file name.")
    return entry.path


def _write_file(target: Path, entry: FileEntry, blobs: BlobStore) -> None:
    hasher = blake3()
    # Exclusive: two entries that are one file on this file system must not overwrite each other.
    with target.open("xb") as file:
        for chunk in entry.chunks:
            data = blobs.read(ChunkId(chunk))
            hasher.update(data)
            file.write(data)
        file.flush()
        os.fsync(file.fileno())
        size_bytes = file.tell()
    if size_bytes != entry.size_bytes or hasher.hexdigest() != entry.digest:
        raise ManifestInvalid(f"The chunks of {entry.path} are sound, but do not make the file the manifest describes.")


def _is_sound(path: Path, entry: FileEntry) -> bool:
    try:
        if path.stat().st_size != entry.size_bytes:
            return False
        hasher = blake3()
        with path.open("rb") as file:
            while data := file.read(_READ_BYTES):
                hasher.update(data)
    except FileNotFoundError:
        return False
    return hasher.hexdigest() == entry.digest
