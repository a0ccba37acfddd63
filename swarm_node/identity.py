"""The node's key: made once, readable by its owner only, and the same for HTTP, libp2p and the ledger."""

import os
import secrets
from dataclasses import dataclass, field
from pathlib import Path

from protocol.errors import ConfigInvalid
from protocol.signing import NodeKey
from swarm_node.disk import sync_folder


@dataclass(frozen=True)
class Identity:
    """A key and its 32-byte seed, which libp2p needs too."""

    key: NodeKey
    seed: bytes = field(repr=False)


def load_or_create(path: Path) -> Identity:
    """The identity in a file; a new one if there is none."""
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        return _load(path)
    seed = secrets.token_bytes(32)
    with os.fdopen(handle, "w") as file:
        file.write(seed.hex())
        file.flush()
        os.fsync(file.fileno())
    sync_folder(path.parent)
    return Identity(NodeKey(seed), seed)


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
