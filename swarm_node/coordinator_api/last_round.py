"""The rounds that a home joined last: commands without a join string mean these rounds.

- `last-round.json` in the home is written when a coordinator has registered the node, whole and readable only by its
  user. A round that never accepted the node does not replace the last one; beside others it is remembered unless it
  refused the node.
- Commands about the ledger, `earnings` and `why` mean all of them; `bench` and a mirror mean the first.
- The name that the owner gave is stored, too, with its team. A generated nickname is not: it follows the node's key.
- So is whether the owner wants the agent's page.
"""

import json
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from protocol.errors import ConfigInvalid, DiskFull
from swarm_node.base.disk import write_durably
from swarm_node.coordinator_api.join_string import JoinString, parse

FILE = "last-round.json"

log = logging.getLogger(__name__)


class LastRound(NamedTuple):
    """The rounds that a node works in, and its name in them."""

    join: JoinString
    name: str
    """Empty if the owner gave no name."""
    page: bool = True
    """True if the agent serves the owner's page."""
    others: tuple[JoinString, ...] = ()
    """The rounds after the first, in the owner's order."""


def record_joined(home: Path, joins: Sequence[JoinString], name: str, *, page: bool = True) -> None:
    """Store the rounds that this node works in; a full disk is logged, since work goes on without it."""
    record: dict[str, object] = {"join_string": str(joins[0]), "name": name, "page": page}
    if len(joins) > 1:
        record["others"] = [str(join) for join in joins[1:]]
    data = json.dumps(record).encode()
    try:
        write_durably(home / FILE, data, temp_folder=home)
    except DiskFull as error:
        log.warning("the joined round is not remembered reason=%r", error.message)


def find_last(home: Path) -> LastRound | None:
    """Return the round that this home joined last; None if there is none."""
    path = home / FILE
    try:
        record = json.loads(path.read_bytes())
        others = tuple(parse(text) for text in record.get("others", ()))
        page = record.get("page", True) is not False
        return LastRound(parse(record["join_string"]), str(record["name"]), page, others)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise ConfigInvalid(
            f"{path} cannot be read: {error.strerror}.", hint="Run the command as the user who owns this file."
        ) from None
    except (ValueError, LookupError, TypeError, AttributeError, ConfigInvalid) as error:
        raise ConfigInvalid(
            f"{path} cannot be read ({error}).", hint="Give the join string; the next `swarm-node join` writes it anew."
        ) from None


def find_by_url(home: Path, urls: list[str]) -> JoinString | None:
    """Return the last round if it is at one of these addresses; its fingerprint was confirmed when it was joined."""
    try:
        last = find_last(home)
    except ConfigInvalid:
        return None
    return next((join for join in (last.join, *last.others) if join.url in urls), None) if last else None


def name_of(home: Path) -> str:
    """Return the name that the owner gave last; empty if none."""
    try:
        last = find_last(home)
    except ConfigInvalid:  # the next registration writes the file anew
        return ""
    return last.name if last else ""


def wants_page(home: Path) -> bool:
    """Return False if the owner has turned the page off."""
    try:
        last = find_last(home)
    except ConfigInvalid:
        return True
    return last is None or last.page


def chosen(text: str, home: Path) -> JoinString:
    """Return the round of a join string; without one, the first round that this home joined last."""
    return all_chosen(text, home)[0]


def all_chosen(text: str, home: Path) -> list[JoinString]:
    """Return the round of a join string, or of a joined round's address; without, all rounds that were joined last."""
    if text:
        return [parse(text) if "#" in text else _known(text, home)]
    last = find_last(home)
    if last is None:
        raise ConfigInvalid(
            f"The node in {home} has not joined a round yet.",
            hint="Give the address or the join string of a round, or the folder of another node with --home. "
            "`swarm-node rounds` lists rounds.",
        )
    return [last.join, *last.others]


def _known(text: str, home: Path) -> JoinString:
    """Return the round at an address, if this home has joined it last."""
    from swarm_node.coordinator_api import short_join  # with its list of words, which a join string needs not

    urls = short_join.urls_of(text)  # raises if the text is no address
    if known := find_by_url(home, urls):
        return known
    raise ConfigInvalid(
        f"{text!r} is not a join string, and this node has joined no round at that address.",
        hint=f"Add the fingerprint of 64 digits that its operator publishes: {urls[-1]}#FINGERPRINT.",
    )


def with_round(first: str, second: str) -> tuple[str, str]:
    """Split `[JOIN_STRING] OTHER`: return the join string or address, which may be empty, and the other argument."""
    return (first, second) if second or first.startswith(("http://", "https://")) else ("", first)
