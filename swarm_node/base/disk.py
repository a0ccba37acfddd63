"""Durable files: a file is complete or absent after a crash, and disk errors are typed.

- A file gets its final name only when its bytes are on the disk: write → fsync → rename → fsync of the folder.
- A write that fails leaves nothing behind.
- A disk error is this node's own and may be temporary: no other node is blamed, and no work ends because of it.

POSIX file locks, which end with the process that holds them.

- Without them two agents could share a key and a home. On a system without locks, commands fail before any change.
"""

import errno
import mmap
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path

from protocol.errors import ConfigInvalid, DiskFull, SwarmError

_RUN, _serial = secrets.token_hex(8), count()
"""Names for unfinished files that no other process and no earlier run has used."""

_NO_ROOM = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
"""A full disk, a full quota, and the shell's file size limit are handled alike."""

_CLOSED = {errno.EACCES, errno.EPERM, errno.EROFS}
"""A working disk on which this user may not write."""


class DiskFailed(DiskFull):
    """The disk fails for another reason than lack of space; callers that can wait for space wait, too."""

    code = "disk_failed"


@contextmanager
def disk_named(folder: Path) -> Iterator[None]:
    """Raise `DiskFull` or `DiskFailed` in the place of the operating system's error."""
    try:
        yield
    except OSError as error:
        reason = os.strerror(error.errno) if error.errno else str(error)
        if error.errno in _NO_ROOM:
            raise DiskFull(
                f"No disk space left in {folder} ({reason}).",
                hint="Free some space, or move the node's folder to a larger disk. A running agent then continues.",
            ) from error
        if error.errno in _CLOSED:
            raise DiskFailed(
                f"Cannot write to {folder} ({reason}).",
                hint="Make the folder writable for this user, or choose another folder with --home.",
            ) from error
        raise DiskFailed(
            f"Disk error in {folder} ({reason}).",
            hint="Check that the folder exists and the disk works; see the system's log.",
        ) from error


def existing(folder: Path) -> Path:
    """Return the folder, or its nearest existing parent."""
    return next(path for path in (folder, *folder.absolute().parents) if path.exists())


def sync_folder(folder: Path) -> None:
    """Make the names in a folder durable."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def mapped(path: Path) -> memoryview:
    """Map a file's bytes into memory; they stay valid while they are referenced."""
    with path.open("rb") as file:
        if os.fstat(file.fileno()).st_size == 0:
            return memoryview(b"")  # an empty file cannot be mapped
        return memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))


def write_durably(target: Path, data: bytes | memoryview, *, temp_folder: Path) -> None:
    """Write a complete file under its final name; `temp_folder` must be on the same file system."""
    with disk_named(target.parent):
        write_whole(target, data, temp_folder=temp_folder, sync=True)
        sync_folder(target.parent)


def write_whole(target: Path, data: bytes | memoryview, *, temp_folder: Path, sync: bool = False) -> None:
    """Write a file that appears under its final name with all its bytes, or not at all."""
    temp = temp_folder / f"{_RUN}-{next(_serial)}"
    # Few system calls: each releases the GIL, which this thread then has to acquire again.
    handle = os.open(temp, os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0), 0o600)
    try:
        try:
            left = memoryview(data)
            while left:
                left = left[os.write(handle, left) :]
            if sync:
                os.fsync(handle)
        finally:
            os.close(handle)
        try:
            temp.replace(target)
        except FileNotFoundError:
            target.parent.mkdir(exist_ok=True)
            temp.replace(target)
    except BaseException:
        temp.unlink(missing_ok=True)
        raise


try:
    import fcntl
except ImportError:  # native Windows
    fcntl = None  # type: ignore[assignment]  # checked by `require`


def require() -> None:
    """Refuse to work on a system without such locks."""
    if fcntl is None:
        raise ConfigInvalid(
            "The node does not run on Windows directly: it needs POSIX file locks. Nothing was changed.",
            hint="It runs in WSL 2, which installers\\install.ps1 sets up.",
        )


@contextmanager
def hold_lock(path: Path, taken: SwarmError) -> Iterator[None]:
    """Hold the lock of this file for the duration of the block; raise `taken` if another process holds it."""
    require()
    with disk_named(path.parent):
        lock = path.open("w")
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise taken from None
        yield
