"""Assembly of a policy folder for the engine, from verified chunks and files of earlier versions.

- A policy folder appears under its final name only when every file in it is complete and synced. Until then it is a
  draft, whose files grow while their chunks arrive (`GrowingFile`), so that little is left to do after the last chunk.
- Its name contains version and manifest digest, so a folder cannot be mistaken for another version's.
- Each file's digest is checked when it is written, and again when a folder of an earlier run is used.
- File names come from a signed manifest and are checked anyway: nothing is written outside the folder.
- A file of an earlier version is a base only if it has the digest that a patch requires; it is never modified. A patch
  creates a new file, whose digest is checked, too; both versions share an unchanged file.
- All functions block; callers on an event loop use a thread.
"""

import os
import shutil
from collections.abc import Collection, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import product
from pathlib import Path, PurePath

from blake3 import blake3

from protocol import limits
from protocol.errors import ManifestInvalid
from protocol.ids import ChunkId
from protocol.policy import chunks, delta
from protocol.policy.manifest import FileEntry, Patch, PolicyManifest
from swarm_node.base.disk import disk_named, mapped, sync_folder
from swarm_node.chunks.arrivals import Arrivals
from swarm_node.chunks.blobs import BlobStore, GrowingFile

_UNFINISHED = ".unfinished"
TAKEN = ".taken"
"""Folder of links to files of other rounds, while a version is built (`other_rounds`)."""
_READ_BYTES = 1 << 20

PLACED_AT_ONCE_BYTES = limits.MIB
"""Smallest amount that wakes the thread: small chunks arrive by the hundred. Far less than arrivals keep in memory."""


def folder_of(policies: Path, manifest: PolicyManifest) -> Path:
    """Return the folder of a version."""
    return policies / f"{manifest.version:012d}-{chunks.digest(manifest.to_bytes())[:16]}"


def find(policies: Path, manifest: PolicyManifest) -> Path | None:
    """Return the folder of a version if it exists and is valid; remove an invalid one."""
    folder = folder_of(policies, manifest)
    if not folder.is_dir():
        return None
    if all(_is_sound(folder / safe_name(entry), entry) for entry in manifest.files):
        return folder
    shutil.rmtree(folder)
    return None


Digests = dict[tuple[int, int, int, int], str]
"""Digests of files by device, inode, size and time of the last write."""


def held_files(policies: Path, manifest: PolicyManifest, known: Digests | None = None) -> dict[str, Path]:
    """Return the undamaged files of earlier versions that this one can be built from, by digest.

    Digests in `known` are used, and new ones are added.
    """
    known = {} if known is None else known
    folders = [*sorted(_of_versions(policies), reverse=True), *sorted((policies / TAKEN).glob("*"))]
    paths: dict[str, Path] = {}
    for entry in manifest.files:
        sizes = entry.sizes()
        for path in (folder / safe_name(entry) for folder in folders):
            if path.is_file() and path.stat().st_size in sizes.values() and (name := _known(path, known)) in sizes:
                paths[name] = path
                break  # the newest folder is closest to this version
    return paths


def assemble(
    policies: Path, manifest: PolicyManifest, blobs: BlobStore, bases: Mapping[str, Path] | None = None
) -> Path:
    """Build the folder of a version from stored chunks and `bases`; keep an existing valid one."""
    existing = find(policies, manifest)
    if existing is not None:
        return existing
    draft = Draft(policies, manifest, blobs, bases or {})
    try:
        return draft.finish()
    finally:
        draft.discard()


class Draft:
    """The unfinished folder of a version; only one at a time, and remains of an earlier one are removed.

    Its methods block, except `following`: a thread of the draft writes arriving chunks to their places.
    """

    def __init__(self, policies: Path, manifest: PolicyManifest, blobs: BlobStore, bases: Mapping[str, Path]) -> None:
        self._policies, self._manifest, self._blobs, self._bases = policies, manifest, blobs, bases
        self._folder = policies / _UNFINISHED
        self._growing: dict[str, GrowingFile] = {}
        self._placing = ThreadPoolExecutor(1, thread_name_prefix="placing")
        names = [safe_name(entry) for entry in manifest.files]
        clear(policies)
        with disk_named(policies):
            self._folder.mkdir(parents=True)
            try:
                self._growing = {
                    name: self._grow(name, entry)
                    for name, entry in zip(names, manifest.files, strict=True)
                    if entry.route(bases).held is None
                }
            except BaseException:
                self.discard()
                raise

    @contextmanager
    def following(self, arrivals: Arrivals) -> Iterator[None]:
        """Place chunks while they arrive, for the duration of the block. `finish` handles the last ones and failed
        ones."""
        before, seen = arrivals.downloads, 0
        at_once = max(1, PLACED_AT_ONCE_BYTES // self._manifest.chunk_size_bytes)

        def place_new() -> None:
            nonlocal seen
            if arrivals.downloads > before and len(arrivals.held_chunks) >= seen + at_once:
                came = arrivals.came_after(seen)
                seen += len(came)
                self._placing.submit(self._place, came, arrivals)

        with arrivals.listening(place_new):
            yield

    def finish(self) -> Path:
        """Complete all files; the folder gets its final name when every file in it is valid and synced."""
        self._placing.shutdown()
        with disk_named(self._policies):
            for entry in self._manifest.files:
                self._complete(entry)
            sync_folder(self._folder)
            final = folder_of(self._policies, self._manifest)
            self._folder.rename(final)
            sync_folder(self._policies)
        return final

    def discard(self) -> None:
        """Remove the unfinished folder."""
        self._placing.shutdown(cancel_futures=True)
        shutil.rmtree(self._folder, ignore_errors=True)

    def _grow(self, name: str, entry: FileEntry) -> GrowingFile:
        return GrowingFile(
            _step(self._folder / name, 0) if entry.after_anchor else self._folder / name,
            entry.chunks,
            chunk_size_bytes=self._manifest.chunk_size_bytes,
            size_bytes=entry.anchor_size_bytes,
            digest=entry.anchor_digest,
            blobs=self._blobs,
        )

    def _place(self, came: Iterable[ChunkId], arrivals: Arrivals) -> None:
        for chunk, growing in product(came, self._growing.values()):
            growing.place(chunk, arrivals.fresh(chunk))

    def _complete(self, entry: FileEntry) -> None:
        """Build an entry by its shortest route from the existing files, one file per step; keep only the last."""
        target, route, sizes = self._folder / entry.path, entry.route(self._bases), entry.sizes()
        digests = list(sizes)[-1 - len(route.patches) :]
        paths = [*(_step(target, number) for number in range(len(route.patches))), target]
        if entry.path in self._growing:
            self._growing[entry.path].finish()
        elif route.held is not None and route.patches:
            paths[0] = self._bases[route.held]
        elif route.held is not None:
            _take_over(self._bases[route.held], target, entry)
        for patch, base, path, digest in zip(route.patches, paths, paths[1:], digests[1:], strict=False):
            _apply(base, patch, path, digest, sizes[digest], self._blobs)
            if base.parent == target.parent:
                base.unlink()
        with target.open("rb") as file:
            os.fsync(file.fileno())


def restock(folder: Path, manifest: PolicyManifest, blobs: BlobStore) -> None:
    """Store the chunks of a new anchor, cut from a file that was built without it: new nodes will request them."""
    for entry in manifest.files:
        if entry.patches and not entry.patches_after_anchor:
            pieces = chunks.split(mapped(folder / safe_name(entry)), manifest.chunk_size_bytes)
            for chunk, piece in zip(entry.chunks, pieces, strict=True):
                blobs.write(ChunkId(chunk), piece)


def clear_taken(policies: Path) -> None:
    """Remove the links to files of other rounds."""
    shutil.rmtree(policies / TAKEN, ignore_errors=True)


def versions_in(folders: Iterable[Path]) -> list[Path]:
    """Return the folders of versions in several rounds."""
    return [version for folder in folders for version in sorted(_of_versions(folder), reverse=True)]


def clear(policies: Path) -> None:
    """Remove an unfinished folder left by a crash."""
    shutil.rmtree(policies / _UNFINISHED, ignore_errors=True)


def prune(policies: Path, keep: Collection[Path]) -> int:
    """Remove all policy folders except `keep`, and what a crash left; return the number of removed folders.

    Files of other programs, such as a file manager, stay.
    """
    clear(policies)
    clear_taken(policies)
    gone = [folder for folder in _of_versions(policies) if folder not in keep]
    for folder in gone:
        shutil.rmtree(folder)
    return len(gone)


def _of_versions(policies: Path) -> list[Path]:
    """Return the folders that have the name of a version."""
    return [path for path in policies.glob("[0-9]*-*") if path.is_dir() and not path.is_symlink()]


def safe_name(entry: FileEntry) -> str:
    """Return the name of a file in its folder; raise an error for a path to another folder."""
    if PurePath(entry.path).name != entry.path or entry.path[:1] in ("", ".") or "\\" in entry.path:
        raise ManifestInvalid(f"{entry.path!r} is not a bare file name.")
    return entry.path


def _step(target: Path, number: int) -> Path:
    """Return the path of an intermediate file of a patched file."""
    return target.with_name(f".{target.name}.{number}")


def _take_over(held: Path, target: Path, entry: FileEntry) -> None:
    """Hard-link an unchanged file to the existing one: its digest is known, and neither is ever modified."""
    try:
        target.hardlink_to(held)
    except FileExistsError:
        raise
    except OSError:  # a file system without hard links, or the limit of links for this file
        _write(target, _read(held), entry.size_bytes, entry.digest)


def _apply(base: Path, patch: Patch, target: Path, digest: str, size_bytes: int, blobs: BlobStore) -> None:
    """Write the file that a patch makes from its base."""
    packed = target.with_name(".patch")
    _write(packed, (blobs.read(ChunkId(chunk)) for chunk in patch.chunks), patch.size_bytes)
    with ThreadPoolExecutor(os.cpu_count()) as threads:
        blocks = delta.apply(mapped(base), mapped(packed), base_digest=patch.base_digest, each=threads.map)
        _write(target, blocks, size_bytes, digest)
    packed.unlink()


def _write(target: Path, pieces: Iterable[delta.Buffer], size_bytes: int, digest: str | None = None) -> None:
    """Write a new file, and check its size and digest."""
    hasher = blake3(max_threads=blake3.AUTO)
    # Exclusive: two entries that are the same file on this file system must not overwrite each other.
    with target.open("xb") as file:
        for piece in pieces:
            if file.tell() + len(piece) > size_bytes:
                raise ManifestInvalid(f"{target.name} becomes larger than the manifest says.")
            hasher.update(piece)
            file.write(piece)
        written = file.tell()
    if written != size_bytes or digest not in (None, hasher.hexdigest()):
        raise ManifestInvalid(
            f"The chunks of {target.name} are sound, but do not make the file the manifest describes."
        )


def _read(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        while data := file.read(_READ_BYTES):
            yield data


def _digest(path: Path) -> str:
    return blake3(mapped(path), max_threads=blake3.AUTO).hexdigest()


def _known(path: Path, known: Digests) -> str:
    """Return the digest of a file, computed if it is not in `known`."""
    found = path.stat()
    identity = (found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns)
    if identity not in known:
        known[identity] = _digest(path)
    return known[identity]


def _is_sound(path: Path, entry: FileEntry) -> bool:
    try:
        return path.stat().st_size == entry.size_bytes and _digest(path) == entry.digest
    except FileNotFoundError:
        return False
