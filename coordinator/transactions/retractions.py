"""Retractions in the store: the groups of owners, what earlier retractions left out, and the entry of a new one.

- The entry is made in the transaction that activates the version with the result.
- A retraction reaches the newest batch: while its order is carried out, no batch is formed (`batches.hold`).
"""

from collections.abc import Collection
from statistics import median

import sqlalchemy as sa
from pydantic import Field

from coordinator.config.section import Section
from coordinator.rules.retraction import EarlierRetraction, OwnedGroup
from coordinator.store.facts import Fact, get_fact, set_fact
from coordinator.store.tables import batches, nodes, parts, rollouts
from coordinator.transactions import batches as batch_table
from coordinator.transactions import commitments, standings
from coordinator.transactions.commitments import RETRACTIONS
from coordinator.transactions.leases import latest_batch
from ledger import store
from ledger.entry import FormedBatch, RetractionEntry
from ledger.training import retraction_problem
from protocol import limits
from protocol.errors import OutOfOrder
from protocol.ids import Hex64, NodeId

CHOSEN = Fact("chosen_version", 0)
"""The last version by which the operator replaced the policy, other than by a retraction."""

HOLD_MAX_S = 3600.0
"""The longest time for which a command can have no batch formed."""

UNTIL_SETTLED_S = 1e9
"""No batch is formed until the order is settled, however long that takes: the entry must name the newest batch."""

CLAIMS_AT_ONCE = 500
"""Claims in one statement: both kinds of stores accept so many parameters."""

LATELY = 100
"""Updates over which the time of one is measured."""


class RetractionResult(Section):
    """The updates that were made again, the groups that were left out, and the states before and after."""

    owners: tuple[NodeId, ...] = Field(min_length=1, max_length=limits.RETRACTED_OWNERS_MAX)
    first: int = Field(gt=0)
    last: int = Field(gt=0)
    before: Hex64
    after: Hex64
    left_out: int = Field(gt=0)
    left_out_root: Hex64
    named: tuple[NodeId, ...] | None = Field(None, max_length=limits.RETRACTED_OWNERS_MAX)
    """The owners that the command names, who must be banned; None: all. Of the others, only the groups that an earlier
    retraction took back are left out."""

    def entry(self, version: int) -> RetractionEntry:
        return RetractionEntry(version=version, **self.model_dump(exclude={"named"}))


def owned_groups(connection: sa.Connection, owners: Collection[str]) -> list[OwnedGroup]:
    """Return the groups in batches that nodes of these owners worked on, in the order of batches and groups."""
    is_theirs = nodes.c.owner.in_(owners) | nodes.c.node_id.in_(owners)  # a node was its own owner before it had one
    columns = (rollouts.c.batch, rollouts.c.group_no, rollouts.c.claim_id, nodes.c.owner, nodes.c.node_id)
    whole = sa.select(*columns).join_from(rollouts, nodes, nodes.c.node_id == rollouts.c.node_id)
    begun = (
        sa.select(*columns)
        .join_from(rollouts, parts, parts.c.whole == rollouts.c.claim_id)
        .join(nodes, nodes.c.node_id == parts.c.node_id)
    )
    found: dict[tuple[int, int, str], set[str]] = {}
    for query in (whole, begun):
        for batch, number, claim, owner, node in connection.execute(query.where(rollouts.c.batch > 0, is_theirs)):
            found.setdefault((batch, number, claim), set()).add(owner if owner in owners else node)
    return [OwnedGroup(batch, claim, frozenset(found[batch, number, claim])) for batch, number, claim in sorted(found)]


def earlier_retractions(connection: sa.Connection) -> list[EarlierRetraction]:
    """Return the retractions that have an entry, in order."""
    entries = [commitments.retraction_to(connection, version) for version in get_fact(connection, RETRACTIONS)]
    return [EarlierRetraction(each.version, each.last, frozenset(each.owners)) for each in entries if each]


def last_chosen(connection: sa.Connection) -> int:
    """Return the last version by which the operator replaced the policy, other than by a retraction; 0 if none."""
    return get_fact(connection, CHOSEN)


def batch_sizes(connection: sa.Connection) -> dict[int, int]:
    """Return the number of groups of each batch."""
    query = sa.select(rollouts.c.batch, sa.func.count()).where(rollouts.c.batch > 0).group_by(rollouts.c.batch)
    return dict(map(tuple, connection.execute(query).all()))


def tokens_of(connection: sa.Connection, claims: Collection[str]) -> int:
    """Return the number of tokens of groups, by the claim of each."""
    wanted = list(claims)
    counted = 0
    for begin in range(0, len(wanted), CLAIMS_AT_ONCE):
        some = wanted[begin : begin + CLAIMS_AT_ONCE]
        for column, table in ((rollouts.c.claim_id, rollouts), (parts.c.whole, parts)):
            counted += int(connection.scalar(sa.select(sa.func.sum(table.c.tokens)).where(column.in_(some))) or 0)
    return counted


def update_s(connection: sa.Connection) -> float | None:
    """Return the seconds of an update lately, publishing included; None before the first were measured."""
    query = sa.select(batches.c.busy_s).where(batches.c.busy_s > 0).order_by(batches.c.batch.desc()).limit(LATELY)
    measured = connection.execute(query).scalars().all()
    return median(measured) if measured else None


def settings_digests(connection: sa.Connection, first: int, last: int) -> dict[str, int]:
    """Return the digests of the settings of some updates, each with the first update that has it."""
    found: dict[str, int] = {}
    for update in range(first, last + 1):
        if made := commitments.last_attempt(connection, update):
            found.setdefault(made.settings_digest, update)
    return found


def require_banned(connection: sa.Connection, owners: Collection[str]) -> None:
    """Refuse a retraction that names an owner who is not banned any more."""
    free = [owner for owner in sorted(set(owners)) if standings.banned_ms(connection, owner) is None]
    if free:
        raise OutOfOrder(
            f"The ban of {', '.join(free)} was lifted during the retraction: the next batches may have their groups.",
            hint="Nothing was published. Ban them again and repeat the command, or leave them out of it.",
        )


def require_current(connection: sa.Connection, result: RetractionResult, version: int, now_ms: int) -> None:
    """Refuse a result that the log would refuse as this version, that lacks the newest batch, or whose owners are free.

    No batch is formed from here on until the order is settled: `batches.release` ends the hold. Call it in the
    transaction that stores the order.
    """
    require_banned(connection, result.owners if result.named is None else result.named)
    newest = latest_batch(connection)
    if newest != result.last:
        raise OutOfOrder(
            f"The retraction has trained on batch {result.last}, and batch {newest} was formed since then.",
            hint="Repeat the command: it continues where it stopped.",
        )
    formed = store.find(connection, f"batch:{result.last}")
    found = [commitments.retraction_to(connection, each) for each in get_fact(connection, RETRACTIONS)]
    problem = retraction_problem(
        result.entry(version),
        previous=commitments.last_attempt(connection, result.first - 1) if result.first > 1 else None,
        replaced=commitments.last_attempt(connection, result.first),
        earlier=[each for each in found if each],
        version=version,
        batch=formed.entry if formed and isinstance(formed.entry, FormedBatch) else None,
    )
    if problem:
        raise OutOfOrder(
            f"The retraction does not continue the ledger: {problem}",
            hint="Restore the learner's folder and the round from the same backup. Nothing was recorded.",
        )
    batch_table.hold(connection, UNTIL_SETTLED_S, now_ms)


def record(connection: sa.Connection, result: RetractionResult, version: int, now_ms: int) -> None:
    """Enter a retraction in the ledger; call it in the transaction that activates the version, after its entry."""
    store.append(connection, result.entry(version), now_ms)
    set_fact(connection, RETRACTIONS, (*get_fact(connection, RETRACTIONS), version))
    batch_table.release(connection)
