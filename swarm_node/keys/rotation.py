"""Rotation of a node's key: the old key and its files are moved aside; chunks and versions stay.

- With `keep_history`, the old key delegates to the new one: the old key becomes the owner, so trust and earnings stay
  together. Not after a theft: the holder of the old key would be the owner.
- Not while the agent runs: it would continue to sign with the old key.
- The new key replaces the old one last, in one step: after an interruption, rotating again completes it. Files that the
  node wrote with its old key in between are also moved aside, under the next free name.
"""

from itertools import chain, count
from pathlib import Path

from protocol.errors import ConfigInvalid, SwarmError
from protocol.ids import NodeId
from protocol.people.owner import Delegation, open_statement, seal_statement
from swarm_node.base.disk import sync_folder, write_durably
from swarm_node.keys import delegation, identity

OF_THE_KEY = ("outbox", "claims", "receipts", "payouts", "address.json")
"""Files and folders of a key, in the folder of a round."""


NEXT = "next.key"
"""File of the new key until it replaces the old one."""


def rotate(home: Path, *, drop_unsent: bool, keep_history: bool = False, number: int = 1) -> tuple[NodeId, NodeId]:
    """Replace the key; return the old and the new node id. `number` is that of the delegation with `keep_history`."""
    key = home / identity.FILE
    identity.find_identity(home)
    with identity.only_agent(home):
        if not drop_unsent and any(home.glob("rounds/*/outbox/*.rollout")):
            raise ConfigInvalid(
                "Finished work is not sent yet, and only the old key can send it.",
                hint="Join again to send it, or discard it with --drop-unsent.",
            )
        old_key = identity.find_identity(home).key
        old = old_key.node_id
        if keep_history and _works_for_another(home, old):
            raise ConfigInvalid(
                "This node works for an owner, who keeps its history.",
                hint="Rotate without --keep-history; then the owner delegates the new key.",
            )
        new = identity.load_or_create(home / NEXT).key.node_id
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
        write_durably(aside / identity.FILE, key.read_bytes(), temp_folder=aside)
        (home / NEXT).replace(key)
        sync_folder(home)
        return old, new


def _works_for_another(home: Path, me: NodeId) -> bool:
    """Return True if the home has a delegation, other than that of its own key after an interrupted rotation."""
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
