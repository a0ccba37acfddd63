"""Blames: a node's reports of peers that sent bytes which do not match the chunk they were asked for.

- A blame is one node's word without evidence: the bytes are gone, and the peer signed nothing. So it has no consequence
  but the incident list and a count on the leaderboard.
- A blame is recorded only for a chunk of a version that nodes still fetch, and for a connection that the plan or both
  sides know. Everything else could be invented.
- A blame counts if the accuser's owner has a validated group. Blames of others are kept, since the owner may be
  validated later, but all of them share `UNPROVEN_MAX` rows, and the incident list shows them as one sum.
- One accuser counts once per accused and chunk, and has at most `PER_ACCUSER_MAX` rows in a round.
"""

from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass

import sqlalchemy as sa

from coordinator.store.tables import blames, dials, nodes, uploads
from coordinator.transactions.standings import IS_KNOWN
from protocol.ids import NodeId
from protocol.text.plain import counted
from protocol.work.messages import Blame

PER_ACCUSER_MAX = 100
"""Rows of one accuser in a round: a healthy node meets a handful of lying peers at most."""

UNPROVEN_MAX = 1_000
"""Rows of all accusers without validated work together: keys are free, disk space is not."""

NAMES_SHOWN = 3
"""Accusers that an incident names; the others are a number."""


@dataclass(frozen=True)
class BlameEvidence:
    """Facts about versions and connections that the coordinator knows without the nodes."""

    chunks: Set[str]
    """Every chunk that leads to a version that nodes still fetch."""
    is_planned: Callable[[str, str], bool]
    """Return True if the plan connects the first node to the second as its upstream."""


@dataclass(frozen=True)
class Accusation:
    """All blames that count against one node."""

    accused: str
    accused_name: str
    chunks: int
    accusers: tuple[str, ...]
    """Names of the accusers, or the ends of their ids."""
    newest_ms: int

    @property
    def detail(self) -> str:
        names = ", ".join(self.accusers[:NAMES_SHOWN])
        more = len(self.accusers) - NAMES_SHOWN
        by = f"{names} and {more} more" if more > 0 else names
        return f"Wrong bytes for {counted(self.chunks, 'chunk')}, reported by {by}."


@dataclass(frozen=True)
class Unproven:
    """All blames by accusers without validated work, which do not count."""

    accusers: int
    accused: int
    rows: int
    newest_ms: int


def record(
    connection: sa.Connection, accuser: NodeId, reported: Sequence[Blame], evidence: BlameEvidence, *, now_ms: int
) -> None:
    """Record a heartbeat's blames that could be true; an invented one is dropped without an error."""
    free = PER_ACCUSER_MAX - _rows_of(connection, accuser)
    if not _is_proven(connection, accuser):
        free = min(free, UNPROVEN_MAX - _unproven_rows(connection))
    for blame in reported:
        if free > 0 and _is_credible(connection, accuser, blame, evidence):
            free -= _insert(connection, accuser, blame, now_ms)


def _is_credible(connection: sa.Connection, accuser: NodeId, blame: Blame, evidence: BlameEvidence) -> bool:
    if blame.chunk not in evidence.chunks or blame.got == blame.chunk:
        return False
    return evidence.is_planned(accuser, blame.peer_id) or _both_sides_know(connection, accuser, blame.peer_id)


def _both_sides_know(connection: sa.Connection, node: str, other: str) -> bool:
    """Return True if a receipt of each names the other: as a sender, or as a peer that it dialled."""
    return _names(connection, node, other) and _names(connection, other, node)


def _names(connection: sa.Connection, receiver: str, peer: str) -> bool:
    sent = sa.exists().where(uploads.c.receiver == receiver, uploads.c.sender == peer)
    dialled = sa.exists().where(dials.c.receiver == receiver, dials.c.node == peer, dials.c.answered)
    return bool(connection.execute(sa.select(sent | dialled)).scalar_one())


def _insert(connection: sa.Connection, accuser: NodeId, blame: Blame, now_ms: int) -> int:
    """Insert a row and return 1, or 0 if the same blame is recorded already."""
    same = (blames.c.accuser == accuser) & (blames.c.accused == blame.peer_id) & (blames.c.chunk == blame.chunk)
    if connection.execute(sa.select(blames.c.number).where(same)).first():
        return 0
    row = {"accuser": accuser, "accused": blame.peer_id, "chunk": blame.chunk, "got": blame.got}
    connection.execute(sa.insert(blames).values(**row, recorded_ms=now_ms))
    return 1


def _is_proven(connection: sa.Connection, accuser: NodeId) -> bool:
    return bool(connection.execute(sa.select(IS_KNOWN).where(nodes.c.node_id == accuser)).scalar())


def _rows_of(connection: sa.Connection, accuser: NodeId) -> int:
    count = sa.select(sa.func.count()).select_from(blames).where(blames.c.accuser == accuser)
    return int(connection.execute(count).scalar_one())


_with_standing = (
    sa.select(blames, nodes.c.name.label("accuser_name"), IS_KNOWN.label("counts"))
    .join(nodes, nodes.c.node_id == blames.c.accuser)
    .subquery()
)


def _unproven_rows(connection: sa.Connection) -> int:
    count = sa.select(sa.func.count()).select_from(_with_standing).where(~_with_standing.c.counts)
    return int(connection.execute(count).scalar_one())


def counts(connection: sa.Connection) -> dict[str, int]:
    """Return the blames that count, by accused node."""
    query = (
        sa.select(_with_standing.c.accused, sa.func.count())
        .where(_with_standing.c.counts)
        .group_by(_with_standing.c.accused)
    )
    return {accused: int(count) for accused, count in connection.execute(query)}


def accusations(connection: sa.Connection, *, accused_max: int) -> list[Accusation]:
    """Return the accused of the newest blames that count, one row for each, the newest first."""
    columns = _with_standing.c
    newest = sa.func.max(columns.recorded_ms)
    query = (
        sa.select(columns.accused, nodes.c.name, newest.label("newest_ms"))
        .select_from(_with_standing)
        .outerjoin(nodes, nodes.c.node_id == columns.accused)
        .where(columns.counts)
        .group_by(columns.accused, nodes.c.name)
        .order_by(newest.desc())
        .limit(accused_max)
    )
    return [
        Accusation(row.accused, row.name or "", *_accusers(connection, row.accused), row.newest_ms)
        for row in connection.execute(query).all()
    ]


def _accusers(connection: sa.Connection, accused: str) -> tuple[int, tuple[str, ...]]:
    """Return how many chunks an accused node is blamed for, and by whom."""
    columns = _with_standing.c
    rows = connection.execute(
        sa.select(columns.accuser, columns.accuser_name, columns.chunk)
        .where(columns.counts, columns.accused == accused)
        .order_by(columns.number)
    ).all()
    names = {row.accuser: row.accuser_name or row.accuser[-8:] for row in rows}
    return len({row.chunk for row in rows}), tuple(names.values())


def unproven(connection: sa.Connection) -> Unproven | None:
    """Return the sum of the blames that do not count; None if there are none."""
    columns = _with_standing.c
    row = connection.execute(
        sa.select(
            sa.func.count(columns.accuser.distinct()).label("accusers"),
            sa.func.count(columns.accused.distinct()).label("accused"),
            sa.func.count().label("rows"),
            sa.func.max(columns.recorded_ms).label("newest_ms"),
        ).where(~columns.counts)
    ).one()
    return Unproven(row.accusers, row.accused, row.rows, row.newest_ms) if row.rows else None
