"""The node's key: created once, readable only by its user, and the same for HTTP, libp2p and the ledger."""

import os
import secrets
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from protocol.errors import ConfigInvalid, SwarmError
from protocol.wire.signing import NodeKey
from swarm_node.base import disk
from swarm_node.base.disk import disk_named, sync_folder

FILE = "node.key"
"""File in a node's home."""


@dataclass(frozen=True)
class Identity:
    """A key and its 32-byte seed, which libp2p needs too."""

    key: NodeKey
    seed: bytes = field(repr=False)


def load_or_create(path: Path) -> Identity:
    """Return the identity in a file; create a new one if there is none."""
    with disk_named(path.parent):
        path.parent.mkdir(parents=True, exist_ok=True)
        if not path.exists():
            _create(path)
    return _load(path)


def find_identity(home: Path) -> Identity:
    """Return the identity of an existing node; raise an error in a home without one."""
    path = home / FILE
    if not path.exists():
        raise ConfigInvalid(
            f"There is no node in {home}.", hint="Give its folder with --home; `swarm-node join` creates a new node."
        )
    return _load(path)


@contextmanager
def only_agent(home: Path) -> Iterator[None]:
    """Hold the home's lock for the duration of the block, so that no other agent uses it."""
    taken = ConfigInvalid(f"Another agent is running in {home}.", hint="Stop it, or use another --home for this one.")
    with disk.hold_lock(home / "agent.lock", taken):
        yield


def require_no_agent(home: Path) -> None:
    """Raise an error if an agent holds the home's lock."""
    if home.exists():
        with only_agent(home):
            pass


def has_agent(home: Path) -> bool:
    """Return True if an agent holds the home's lock, or if that cannot be checked."""
    try:
        require_no_agent(home)
    except SwarmError:
        return True
    return False


def put(path: Path, seed: bytes) -> None:
    """Write a key to a new file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    _create(path, seed)
    if _load(path).seed != seed:
        raise ConfigInvalid(f"{path} holds another key already.", hint="Existing keys are never overwritten.")


def _create(path: Path, seed: bytes | None = None) -> None:
    """Create a key file atomically; a file that another process created meanwhile stays."""
    # A temporary file is readable by its owner only, from its first byte on.
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w") as file:
            file.write((seed or secrets.token_bytes(32)).hex())
            file.flush()
            os.fsync(file.fileno())
        with suppress(FileExistsError):
            os.link(temporary, path)
    finally:
        Path(temporary).unlink()
    sync_folder(path.parent)


def _load(path: Path) -> Identity:
    try:
        seed = bytes.fromhex(path.read_text().strip())
    except (ValueError, UnicodeDecodeError):
        seed = b""
    if len(seed) != 32:
        raise ConfigInvalid(
            f"{path} does not hold a node key.", hint="Restore it from a backup, or remove it to become a new node."
        )
    return Identity(NodeKey(seed), seed)
