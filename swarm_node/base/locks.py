"""One process at a time: locks that end with whoever holds them, however that ends. They are POSIX's.

- Without them two agents could share a key and a home. A system that has none is told so before anything is changed.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from protocol.errors import ConfigInvalid, SwarmError
from swarm_node.base.disk import disk_named

try:
    import fcntl
except ImportError:  # Windows by itself
    fcntl = None  # type: ignore[assignment]  # asked for by `require`


def require() -> None:
    """Refuse to work on a system without such locks."""
    if fcntl is None:
        raise ConfigInvalid(
            "The node does not run on Windows directly: it needs POSIX file locks. Nothing was changed.",
            hint="It runs in WSL 2, which installers\\install.ps1 sets up.",
        )


@contextmanager
def hold_lock(path: Path, taken: SwarmError) -> Iterator[None]:
    """Hold the lock of this file until the end; raises `taken` if somebody else does."""
    require()
    with disk_named(path.parent):
        lock = path.open("w")
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise taken from None
        yield
