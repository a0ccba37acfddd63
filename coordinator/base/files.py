"""Files that survive a crash: written aside, synced, then renamed, so that a reader sees the old or the new one.

- Only their user can read files, except public ones: signed documents and chunks, which a web server of another user
  may serve. A folder that is made for a file is as open as the file.
- Many files of one step are all written before the first is synced, and all synced before the first gets its name: the
  disk works through them at its own speed.
- An upload is written and hashed as it arrives. It is not synced: its reader checks the digest again.
- A full disk has its own error, and a file that could not be written completely is removed.
- Files that others may have made are read with `read_at_most`.
"""

import errno
import logging
import mmap
import os
import shutil
import sqlite3
import stat
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from blake3 import blake3

from protocol.errors import ConfigInvalid, DiskFull, ManifestInvalid

log = logging.getLogger(__name__)

_NO_ROOM = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
"""Error numbers that count as a full disk: disk, quota, and the shell's file size limit."""


PUBLIC = ("public", "metadata", "blobs")
"""The parts of a round's folder that others may read: `public` links to the other two."""

_SYNCS_AT_ONCE = 16
"""Syncs at a time: a file system writes its journal once for all that wait for it."""


@contextmanager
def full_disk_named(folder: Path) -> Iterator[None]:
    """Raise `DiskFull` in the place of the operating system's error, or of SQLite's."""
    try:
        yield
    except OSError as error:
        if error.errno not in _NO_ROOM:
            raise
        raise _disk_full(folder, os.strerror(error.errno or 0)) from error
    except sqlite3.OperationalError as error:
        if error.sqlite_errorcode != sqlite3.SQLITE_FULL:
            raise
        raise _disk_full(folder, str(error)) from error


def _disk_full(folder: Path, reason: str) -> DiskFull:
    return DiskFull(
        f"The coordinator has no disk space left below {folder} ({reason}).",
        hint="Free some space there, then repeat the interrupted command.",
    )


@contextmanager
def unwritable_named(folder: Path) -> Iterator[None]:
    """Raise `ConfigInvalid` in the place of the operating system's error where a folder cannot be made or written."""
    try:
        yield
    except OSError as error:
        if error.errno in _NO_ROOM:
            raise
        raise ConfigInvalid(
            f"The folder {folder} cannot be written ({os.strerror(error.errno or 0)}).",
            hint="Name another folder, or give this user the right to write there.",
        ) from error


def private_from_now_on() -> None:
    """Make all later files of this process and its children private: libraries set no mode when they write."""
    os.umask(0o077)


def make_folder(path: Path, *, public: bool = False) -> Path:
    """Make a folder and those above it, unless it exists, and return its path."""
    if not path.is_dir():
        make_folder(path.parent, public=public)
        path.mkdir(mode=0o700, exist_ok=True)
        if public:  # independent of the umask
            path.chmod(0o755)
    return path


def nearest_folder(path: Path) -> Path:
    """Return the folder, or the nearest one above it that exists."""
    path = path.absolute()
    while not path.exists():
        path = path.parent
    return path


def move_durably(folder: Path, target: Path) -> None:
    """Move a folder to a place on the same disk, instead of the folder that may be there."""
    make_folder(target.parent)
    if target.exists():
        shutil.rmtree(target)
    folder.rename(target)
    sync(target.parent)


def open_private(path: Path) -> IO[str]:
    """Open a file for appending or locking; other users can neither read nor lock it."""
    return os.fdopen(os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600), "a")


def close_to_others(folder: Path) -> list[str]:
    """Remove other users' access to all but the public part of a round's folder; return the names that changed.

    Files in a closed folder are out of reach anyway. Links are skipped: their targets may be others'.
    """
    closed = []
    for path in sorted(folder.iterdir()):
        if path.name in PUBLIC or path.is_symlink():
            continue
        try:
            mode = stat.S_IMODE(path.stat().st_mode)
            if mode & 0o077:
                path.chmod(mode & 0o700)
                closed.append(path.name)
        except FileNotFoundError:  # a command that has just ended removed it
            pass
        except PermissionError:
            log.warning("%s is accessible to other users of this machine, and owned by one of them", path)
    return closed


def write_durably(path: Path, data: bytes | memoryview, *, public: bool = False) -> None:
    """Replace a file in one step; one that is not public can be read by its owner only, from its first byte on."""
    with full_disk_named(path.parent):
        make_folder(path.parent, public=public)
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        temporary = Path(name)
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(data)
                file.flush()
                os.fchmod(file.fileno(), 0o644 if public else 0o600)
                os.fsync(file.fileno())
            temporary.replace(path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
        sync(path.parent)


class DurableFiles:
    """Public files that become durable together; `together` makes such a batch."""

    def __init__(self, aside: Path) -> None:
        self._aside = aside
        self._pending: dict[Path, Path] = {}

    def __contains__(self, path: Path) -> bool:
        return path in self._pending

    def add(self, path: Path, data: bytes | memoryview) -> None:
        """Write a file that gets its name with all the others."""
        temporary = self._aside / str(len(self._pending))
        with temporary.open("xb") as file:
            os.fchmod(file.fileno(), 0o644)
            file.write(data)
        self._pending[path] = temporary

    def commit(self) -> None:
        with ThreadPoolExecutor(_SYNCS_AT_ONCE) as threads:
            list(threads.map(sync, self._pending.values()))
            folders = {path.parent for path in self._pending}
            for folder in folders:
                make_folder(folder, public=True)
            for path, temporary in self._pending.items():
                temporary.replace(path)
            list(threads.map(sync, folders | {folder.parent for folder in folders}))


@contextmanager
def together(aside: Path) -> Iterator[DurableFiles]:
    """Yield a batch of files that becomes durable when the body succeeds; `aside` holds files without a name yet."""
    shutil.rmtree(aside, ignore_errors=True)  # left by a crash
    with full_disk_named(aside.parent):
        make_folder(aside.parent, public=True)
        aside.mkdir()
        try:
            batch = DurableFiles(aside)
            yield batch
            batch.commit()
        finally:
            shutil.rmtree(aside, ignore_errors=True)


class ArrivingFile:
    """A file that is written piece by piece, and gets its name if it has the expected digest."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._hasher = blake3()
        with full_disk_named(path.parent):
            make_folder(path.parent)
            handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        self._file, self._temporary = os.fdopen(handle, "wb"), Path(name)

    def write(self, piece: bytes | bytearray | memoryview) -> None:
        with full_disk_named(self._path.parent):
            self._file.write(piece)
        self._hasher.update(piece)

    def finish(self, digest: str | None) -> None:
        """Give the file its name if it has the digest, or refuse it; without one, its reader checks the content."""
        if digest is not None and self._hasher.hexdigest() != digest:
            raise ManifestInvalid(f"{self._path.name} was damaged during the upload.", hint="Upload it again.")
        with full_disk_named(self._path.parent):
            self._file.close()
        self._temporary.replace(self._path)

    def discard(self) -> None:
        """Remove the file if it has no name yet; harmless otherwise."""
        with suppress(OSError):  # the last write may fail, too
            self._file.close()
        self._temporary.unlink(missing_ok=True)


def link_or_copy(path: Path, target: Path) -> None:
    """Link a file to `target`, or copy it, synced, where hard links are not supported."""
    try:
        os.link(path, target)
    except FileNotFoundError:
        raise
    except OSError:  # a file system without hard links
        shutil.copyfile(path, target)
        sync(target)


def sync(path: Path) -> None:
    """Make a file's bytes durable, or a folder's names."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def mapped(path: Path) -> memoryview:
    """Return a file's bytes, read from disk on access; they stay valid as long as the view exists."""
    with path.open("rb") as file:
        if os.fstat(file.fileno()).st_size == 0:
            return memoryview(b"")  # an empty file cannot be mapped
        return memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))


def file_digest(path: Path) -> str:
    """Return the BLAKE3 digest of a file, computed on all cores."""
    return blake3(max_threads=blake3.AUTO).update_mmap(path).hexdigest()


def read_at_most(path: Path, max_bytes: int) -> bytes:
    """Return a file's bytes, if it is a regular file of at most `max_bytes`."""
    if not path.is_file():  # a pipe would block
        raise ValueError(f"{path} is not a file")
    with path.open("rb") as file:
        data = file.read(max_bytes + 1)
    if len(data) > max_bytes:
        raise ValueError(f"{path} is larger than {max_bytes} bytes")
    return data
