"""The round that a home joined last: commands without a join string mean this round.

- `last-round.json` in the home is written when the coordinator has registered the node, whole and readable only by its
  user. A round that never accepted the node does not replace the last one.
- The name that the owner gave is stored, too, with its team. A generated nickname is not: it follows the node's key.
"""

import json
import logging
from pathlib import Path
from typing import NamedTuple

from protocol.errors import ConfigInvalid, DiskFull
from swarm_node.base.disk import write_durably
from swarm_node.coordinator_api.join_string import JoinString, parse

FILE = "last-round.json"

log = logging.getLogger(__name__)


class LastRound(NamedTuple):
    """A round and this node's name in it."""

    join: JoinString
    name: str
    """Empty if the owner gave no name."""


def record_joined(home: Path, join: JoinString, name: str) -> None:
    """Store the round that has just registered this node; a full disk is logged, since work goes on without it."""
    data = json.dumps({"join_string": str(join), "name": name}).encode()
    try:
        write_durably(home / FILE, data, temp_folder=home)
    except DiskFull as error:
        log.warning("the joined round is not remembered reason=%r", error.message)


def find_last(home: Path) -> LastRound | None:
    """Return the round that this home joined last; None if there is none."""
    path = home / FILE
    try:
        record = json.loads(path.read_bytes())
        return LastRound(parse(record["join_string"]), str(record["name"]))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError, LookupError, TypeError, AttributeError, ConfigInvalid) as error:
        raise ConfigInvalid(
            f"{path} cannot be read ({error}).", hint="Give the join string; the next `swarm-node join` writes it anew."
        ) from None


def find_by_url(home: Path, urls: list[str]) -> JoinString | None:
    """Return the last round if it is at one of these addresses; its fingerprint was confirmed when it was joined."""
    try:
        last = find_last(home)
    except ConfigInvalid:
        return None
    return last.join if last and last.join.url in urls else None


def name_of(home: Path) -> str:
    """Return the name that the owner gave last; empty if none."""
    try:
        last = find_last(home)
    except ConfigInvalid:  # the next registration writes the file anew
        return ""
    return last.name if last else ""


def chosen(text: str, home: Path) -> JoinString:
    """Return the round of a join string; without one, the round that this home joined last."""
    if text:
        return parse(text)
    last = find_last(home)
    if last is None:
        raise ConfigInvalid(
            f"The node in {home} has not joined a round yet.",
            hint="Give the round's join string, or the folder of another node with --home.",
        )
    return last.join


def with_round(first: str, second: str) -> tuple[str, str]:
    """Split `[JOIN_STRING] OTHER`: return the join string, which may be empty, and the other argument."""
    if first.startswith(("http://", "https://")):
        return first, second
    if second:
        parse(first)  # raises: two arguments were given, and the first is no join string
    return "", first
