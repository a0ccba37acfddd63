"""A new key for a node: the old one and what belongs to it are kept aside, chunks and versions stay.

- Not while the agent runs: it would go on signing with the old key.
- The old key is moved last: where that was interrupted, rotating again finishes it.
"""

from pathlib import Path

from protocol.errors import ConfigInvalid
from protocol.ids import NodeId
from swarm_node import delegation, identity
from swarm_node.disk import sync_folder

OF_THE_KEY = ("outbox", "claims", "receipts", "address.json")
"""In the folder of a round."""


def rotate(home: Path, *, drop_unsent: bool) -> tuple[NodeId, NodeId]:
    """The node's old id and its new one."""
    key = home / identity.FILE
    if not key.exists():
        raise ConfigInvalid(f"There is no node in {home}.", hint="`swarm-node join` makes one.")
    with identity.only_agent(home):
        if not drop_unsent and any(home.glob("rounds/*/outbox/*.rollout")):
            raise ConfigInvalid(
                "Finished work is not sent yet, and only the old key can send it.",
                hint="Join once more, or lose it with --drop-unsent.",
            )
        old = identity.load_or_create(key).key.node_id
        aside = home / f"old-{old[-8:]}"
        aside.mkdir(exist_ok=True)
        for path in (home / delegation.FILE, *_of_rounds(home)):
            if path.exists():
                target = aside / path.relative_to(home)
                target.parent.mkdir(parents=True, exist_ok=True)
                path.replace(target)
        key.replace(aside / identity.FILE)
        sync_folder(home)
        return old, identity.load_or_create(key).key.node_id


def _of_rounds(home: Path) -> list[Path]:
    return [folder / name for folder in home.glob("rounds/*") for name in OF_THE_KEY]
