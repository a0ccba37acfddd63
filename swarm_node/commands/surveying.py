"""The making of a directory: rounds are verified by their logs, and listed in a file that the curator signs."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import trio

from ledger.directory import (
    DIRECTORY_MAX_BYTES,
    Directory,
    KnownRound,
    ListedRound,
    OpenDirectory,
    RefusedRound,
    Sighting,
    make_directory,
    open_directory,
    refusal,
    require_possible,
    thinned,
)
from protocol.errors import ConfigInvalid, ProofInvalid, SwarmError, named
from protocol.ids import NodeId
from protocol.limits import DAY_MS
from protocol.text.plain import counted
from protocol.wire.signing import NodeKey, read_object
from swarm_node.base import clock
from swarm_node.base.disk import write_durably
from swarm_node.commands.finding import prove
from swarm_node.coordinator_api.join_string import JoinString, is_in_own_network, parse
from swarm_node.ledger.directories import fetch_listing, require_contactable


@dataclass(frozen=True)
class CuratorSurvey:
    """The rounds as a curator has seen them."""

    entries: list[ListedRound]
    refused: dict[str, RefusedRound]
    lines: list[str]
    """A line about each round."""


@dataclass(frozen=True)
class MadeDirectory:
    """A directory that was written, and what was found out."""

    directory: Directory
    lines: list[str]


def make(
    out: Path, joins: Sequence[JoinString], key: NodeKey, *, name: str, removed: set[str], days: int, now_ms: int
) -> MadeDirectory:
    """Verify the rounds of a file and others, and write the next directory to the file."""
    last = _last_file(out, key.node_id)
    found = trio.run(_survey, joins, last, removed, now_ms)
    made = Directory(
        name=name or (last.directory.name if last else key.node_id),
        number=(last.directory.number if last else 0) + 1,
        made_ms=now_ms,
        expires_ms=now_ms + days * DAY_MS,
        rounds=tuple(found.entries),
        refused=tuple(found.refused.values()),
    )
    data = json.dumps(make_directory(made, key), ensure_ascii=False, indent=1).encode()
    open_directory(data, key.node_id, now_ms=now_ms)  # nothing is published that readers would refuse
    write_durably(out, data, temp_folder=out.parent)
    return MadeDirectory(made, found.lines)


def _last_file(out: Path, signer: NodeId) -> OpenDirectory | None:
    """Return the directory in a file that this key has made; None if there is no file."""
    if not out.exists():
        return None
    data = out.read_bytes()
    try:
        made_ms = int(read_object(data, DIRECTORY_MAX_BYTES)["signed"]["made_ms"])
        return open_directory(data, signer, now_ms=made_ms)  # one that has expired is continued, too
    except (SwarmError, LookupError, TypeError, ValueError) as error:
        raise ConfigInvalid(
            f"{out} is not a directory of your key: {error}", hint="Choose another file, or the home of its key."
        ) from None


async def _survey(
    joins: Sequence[JoinString], last: OpenDirectory | None, removed: set[str], now_ms: int
) -> CuratorSurvey:
    """Look at every round that is added or was in the last file."""
    before = {known.listing.round_id: known for known in last.rounds} if last else {}
    refused = {wrong.round_id: wrong for wrong in last.refused if wrong.round_id not in removed} if last else {}
    wanted = {join.round_id: join for join in (parse(known.listing.join_string) for known in before.values())}
    wanted |= {join.round_id: join for join in joins}
    found = CuratorSurvey([], refused, [])
    for round_id, join in wanted.items():
        if round_id in removed or round_id in refused:
            found.lines.append(f"left out: {join.url}")
        else:
            await _look_at(join, before.get(round_id), found, now_ms)
    return found


async def _look_at(join: JoinString, known: KnownRound | None, found: CuratorSurvey, now_ms: int) -> None:
    """Verify a round, and add its entry or its refusal; one that cannot be verified now keeps its last entry."""
    sightings = known.sightings if known else ()
    try:
        # A round of the internet must not lead its curator into the curator's own network.
        own_network, seen_ms = await is_in_own_network(urlsplit(join.url).hostname or ""), clock.now_ms()
        said = await fetch_listing(join, now_ms=seen_ms, own_network=own_network)  # a survey may take hours
        await require_contactable(parse(said.join_string), own_network=own_network)
        if known:
            said.require_no_older_than(known.listing)
        try:
            await prove(said, sightings, own_network=own_network)
            require_possible(KnownRound(said, sightings))
        except ProofInvalid as error:
            found.refused[said.round_id] = refusal(said.document, error, now_ms)
            found.lines.append(f"refused: {error.message}")
            return
    except SwarmError as error:
        found.lines.append(f"not verified: {join.url}: {named(error)}")
        if known and known.listing.listing.expires_ms > now_ms:
            found.entries.append(ListedRound(listing=dict(known.listing.document), sightings=sightings))
        return
    checkpoint, paid = said.checkpoint, said.listing.totals.paid_micros
    seen = Sighting(ms=seen_ms, size=checkpoint.size, root=checkpoint.root.hex(), paid_micros=paid)
    found.entries.append(ListedRound(listing=dict(said.document), sightings=thinned(sightings, seen)))
    entries = counted(checkpoint.size, "entry", "entries")
    found.lines.append(f"verified: {said.name}, {entries}, paid {said.unit.exact(paid)}")
