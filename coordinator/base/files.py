"""Files that survive a crash: written aside, synced, then renamed, so that a reader sees the old or the new one.

- What is written belongs to its user alone, but for what is public: signed documents and chunks, which a web server of
  another user may hand out. A folder that is made for a file is as open as the file.
- Many files of one step are all written before the first is synced, and all synced before the first gets its name: the
  disk works through them at its own speed.
- An upload is written as it comes and hashed on the way. It is not synced: whoever uses it checks its digest again.
- A full disk has a name, and what could not be written whole leaves nothing behind.
- What a stranger may have made is read with `read_at_most`.
"""

import errno
import logging
import mmap
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from blake3 import blake3

from protocol.errors import DiskFull, ManifestInvalid

log = logging.getLogger(__name__)

_NO_ROOM = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
"""A full disk, a full quota, and the shell's file size limit: the same to whoever waits for the bytes."""


PUBLIC = ("public", "metadata", "blobs")
"""What of a round's folder others may read: `public` leads to the other two."""

_SYNCS_AT_ONCE = 16
"""A file system writes its journal once for all who wait for it."""


@contextmanager
def full_disk_named(folder: Path) -> Iterator[None]:
    """Raise `DiskFull` in the place of the operating system's error."""
    try:
        yield
    except OSError as error:
        if error.errno not in _NO_ROOM:
            raise
        raise DiskFull(
            f"The coordinator has no room left below {folder} ({os.strerror(error.errno or 0)}).",
            hint="Free some space there; what was interrupted can be repeated.",
        ) from error


def private_from_now_on() -> None:
    """For a process that writes into a round's folder, and its children: libraries ask for no mode when they write."""
    os.umask(0o077)


def make_folder(path: Path, *, public: bool = False) -> Path:
    """A folder, with those above it, where there is none."""
    if not path.is_dir():
        make_folder(path.parent, public=public)
        path.mkdir(mode=0o700, exist_ok=True)
        if public:  # whatever the umask
            path.chmod(0o755)
    return path


def open_private(path: Path) -> IO[str]:
    """A file to append to, or to lock, that nobody else can lock either."""
    return os.fdopen(os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600), "a")


def close_to_others(folder: Path) -> list[str]:
    """Take from others what they may do with all but the public part of a round's folder; the names that it was of.

    What lies in a folder that is closed is out of reach as it is. Links lead to what may be others'.
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
        except FileNotFoundError:  # of a command that has just ended
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
    """Public files that become durable together; `together` makes one."""

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
    """A batch that is durable, all of it, when the body has ended well; `aside` is for files without a name yet."""
    shutil.rmtree(aside, ignore_errors=True)  # what a crash left
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
    """A file that is written piece by piece, and gets its name if it has the digest that was promised."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._hasher = blake3()
        with full_disk_named(path.parent):
            make_folder(path.parent)
            handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        self._file, self._temporary = os.fdopen(handle, "wb"), Path(name)

    def write(self, piece: bytes | bytearray) -> None:
        with full_disk_named(self._path.parent):
            self._file.write(piece)
        self._hasher.update(piece)

    def finish(self, digest: str) -> None:
        """Give the file its name, or refuse it."""
        if self._hasher.hexdigest() != digest:
            raise ManifestInvalid(f"{self._path.name} was damaged on its way.", hint="Upload it again.")
        with full_disk_named(self._path.parent):
            self._file.close()
        self._temporary.replace(self._path)

    def discard(self) -> None:
        """Remove what did not get its name; harmless after that."""
        with suppress(OSError):  # a last write that finds no room either
            self._file.close()
        self._temporary.unlink(missing_ok=True)


def sync(path: Path) -> None:
    """Make a file's bytes durable, or a folder's names."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def mapped(path: Path) -> memoryview:
    """A file's bytes, read as they are looked at; they stay valid while somebody holds them."""
    with path.open("rb") as file:
        if os.fstat(file.fileno()).st_size == 0:
            return memoryview(b"")  # which cannot be mapped
        return memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))


def read_at_most(path: Path, max_bytes: int) -> bytes:
    """A file's bytes, if it is a plain one and no larger than this."""
    if not path.is_file():  # a pipe would keep us waiting
        raise ValueError(f"{path} is no file")
    with path.open("rb") as file:
        data = file.read(max_bytes + 1)
    if len(data) > max_bytes:
        raise ValueError(f"{path} is larger than {max_bytes} bytes")
    return data
