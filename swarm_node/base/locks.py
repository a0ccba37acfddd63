"""POSIX file locks, which end with the process that holds them.

- Without them two agents could share a key and a home. On a system without locks, commands fail before any change.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from protocol.errors import ConfigInvalid, SwarmError
from swarm_node.base.disk import disk_named

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
