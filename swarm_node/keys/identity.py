"""The node's key: created once, readable only by its user, and the same for HTTP, libp2p and the ledger; its rotation.

- `rotate` moves the old key and its files aside; chunks and versions stay. It needs a stopped agent, which would
  continue to sign with the old key.
- With `keep_history`, the old key delegates to the new one: the old key becomes the owner, so trust and earnings stay
  together. Not after a theft: the holder of the old key would be the owner.
- The new key replaces the old one last, in one step: after an interruption, rotating again completes it. Files that the
  node wrote with its old key in between are also moved aside, under the next free name.
"""

import os
import secrets
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import chain, count
from pathlib import Path
from typing import TYPE_CHECKING

from protocol.errors import ConfigInvalid, SwarmError
from protocol.ids import NodeId
from swarm_node.base import disk
from swarm_node.base.disk import disk_named, sync_folder, write_durably

if TYPE_CHECKING:
    from protocol.wire.signing import NodeKey

FILE = "node.key"
"""File in a node's home."""


@dataclass(frozen=True)
class Identity:
    """A key and its 32-byte seed, which libp2p needs too."""

    key: "NodeKey"
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
    from protocol.wire.signing import NodeKey  # not for commands that only look whether there is a node

    try:
        seed = bytes.fromhex(path.read_text().strip())
    except OSError as error:
        raise ConfigInvalid(
            f"{path} cannot be read: {error.strerror}.",
            hint="Run the command as the user who owns this file, or give another folder with --home.",
        ) from None
    except ValueError:
        seed = b""
    if len(seed) != 32:
        raise ConfigInvalid(
            f"{path} does not hold a node key.", hint="Restore it from a backup, or remove it to become a new node."
        )
    return Identity(NodeKey(seed), seed)


OF_THE_KEY = ("outbox", "claims", "receipts", "payouts", "address.json")
"""Files and folders of a key, in the folder of a round."""


NEXT = "next.key"
"""File of the new key until it replaces the old one."""


def rotate(home: Path, *, drop_unsent: bool, keep_history: bool = False, number: int = 1) -> tuple[NodeId, NodeId]:
    """Replace the key; return the old and the new node id. `number` is that of the delegation with `keep_history`."""
    from protocol.people.owner import Delegation, seal_statement
    from swarm_node.keys import delegation

    key = home / FILE
    find_identity(home)
    with only_agent(home):
        if not drop_unsent and any(home.glob("rounds/*/outbox/*.rollout")):
            raise ConfigInvalid(
                "Finished work is not sent yet, and only the old key can send it.",
                hint="Join again to send it, or discard it with --drop-unsent.",
            )
        old_key = find_identity(home).key
        old = old_key.node_id
        if keep_history and _works_for_another(home, old):
            raise ConfigInvalid(
                "This node works for an owner, who keeps its history.",
                hint="Rotate without --keep-history; then the owner delegates the new key.",
            )
        new = load_or_create(home / NEXT).key.node_id
        aside = home / f"old-{old[-8:]}"
        aside.mkdir(exist_ok=True)
        for path in (home / delegation.FILE, *_of_rounds(home)):
            if path.exists():
                target = _free(aside / path.relative_to(home))
                target.parent.mkdir(parents=True, exist_ok=True)
                path.replace(target)
        if keep_history:
            word = seal_statement(old_key, Delegation(node_id=new, number=number))
            write_durably(home / delegation.FILE, word, temp_folder=home)
        write_durably(aside / FILE, key.read_bytes(), temp_folder=aside)
        (home / NEXT).replace(key)
        sync_folder(home)
        return old, new


def _works_for_another(home: Path, me: NodeId) -> bool:
    """Return True if the home has a delegation, other than that of its own key after an interrupted rotation."""
    from protocol.people.owner import open_statement
    from swarm_node.keys import delegation

    path = home / delegation.FILE
    try:
        return path.exists() and open_statement(path.read_bytes())[0] != me
    except SwarmError:  # invalid, so it is not ours
        return True


def _free(wanted: Path) -> Path:
    """Return the wanted path, or else the first free one of `name-2`, `name-3` …."""
    others = (wanted.with_name(f"{wanted.name}-{number}") for number in count(2))
    return next(path for path in chain([wanted], others) if not path.exists())


def _of_rounds(home: Path) -> list[Path]:
    return [folder / name for folder in home.glob("rounds/*") for name in OF_THE_KEY]
