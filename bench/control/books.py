"""Invariants of a round's store after any load from any number of processes: one check for each promise.

- What nodes and the learner heard is compared with the rows, and these with each other and with the ledger's entries.
- A lease may be there that nobody heard of, since its answer was lost; nothing may be heard of that is not there.
- No group goes to a second node while the first works on it: the load is one without `leases.over_issue`.
- A check yields what it finds wrong, in words; nothing is changed by looking.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

import sqlalchemy as sa

from coordinator.rules.lifecycle import WAITING
from coordinator.store.tables import audits, leases, rollouts, tally
from coordinator.transactions.tally import counted
from ledger import store
from ledger.entry import Pending, parse
from ledger.tables import entries_table
from protocol.work.lease import OPEN, LeaseState
from protocol.work.messages import Verdict


@dataclass
class Heard:
    """All that was said to whoever asked."""

    leases: list[tuple[str, str]] = field(default_factory=list)
    """Node and lease."""
    verdicts: list[Verdict] = field(default_factory=list)
    trained: list[str] = field(default_factory=list)
    """The claims of all batches that the learner got, one after the other."""
    groups_per_update: int = 1


def _leases_of_one(connection: sa.Connection, heard: Heard) -> Iterator[str]:
    owners = dict(map(tuple, connection.execute(sa.select(leases.c.lease_id, leases.c.node_id))))
    yield from (f"lease {lease} was given out {n} times" for lease, n in _repeated(lease for _, lease in heard.leases))
    yield from (f"lease {lease} is not {node}'s" for node, lease in heard.leases if owners.get(lease) != node)
    at_work = leases.c.state.in_([*OPEN, LeaseState.ACCEPTED])
    groups = connection.execute(sa.select(leases.c.group_no).where(at_work)).scalars()
    yield from (f"group {group} went to {count} nodes" for group, count in _repeated(groups))


def _credited_once(connection: sa.Connection, heard: Heard) -> Iterator[str]:
    bodies = connection.execute(sa.select(entries_table.c.body).where(entries_table.c.kind == "pending")).scalars()
    entries = [entry for entry in map(parse, bodies) if isinstance(entry, Pending)]
    credited = Counter(
        (item.claim_id, item.lease_id, item.node_id, item.tokens, item.amount_micros) for item in entries
    )
    yield from (f"lease {lease} was credited {n} times" for lease, n in _repeated(item.lease_id for item in entries))
    columns = ("claim_id", "lease_id", "node_id", "tokens", "credit_micros")
    rows = [tuple(row) for row in connection.execute(sa.select(*(rollouts.c[name] for name in columns)))]
    accepted = Counter(rows)
    yield from (f"{row} was accepted and not credited" for row in accepted - credited)
    yield from (f"{row} was credited and not accepted" for row in credited - accepted)
    escrow = set(connection.execute(sa.select(audits.c.claim_id)).scalars())
    yield from (f"claim {claim} was accepted or is in escrow, not both" for claim in escrow ^ {row[0] for row in rows})
    worth = {row[1]: row[4] for row in rows}
    said = [item for item in heard.verdicts if item.outcome != "rejected"]
    yield from (f"{item} was not booked so" for item in said if worth.get(item.lease_id) != item.credit_micros)
    first = (item.lease_id for item in said if item.outcome == "accepted")
    yield from (f"lease {lease} was accepted {count} times" for lease, count in _repeated(first))


def _one_state(connection: sa.Connection, heard: Heard) -> Iterator[str]:
    answered = set(connection.execute(sa.select(rollouts.c.lease_id)).scalars())
    for row in connection.execute(sa.select(leases.c.lease_id, leases.c.state, leases.c.ended_ms)):
        said = f"lease {row.lease_id} is {row.state}"
        if row.state not in set(LeaseState):
            yield f"{said}, which is no state"
        if (row.ended_ms is None) != (row.state in OPEN):
            yield f"{said} and ended at {row.ended_ms}"
        if (row.lease_id in answered) != (row.state == LeaseState.ACCEPTED):
            yield f"{said}, and has {'a' if row.lease_id in answered else 'no'} rollout"


def _kept_counts(connection: sa.Connection, heard: Heard) -> Iterator[str]:
    kept = list(map(tuple, connection.execute(sa.select(tally.c.unfinished, tally.c.reserved_micros))))
    if kept != [(actual := counted(connection))]:
        yield f"kept are {kept}, counted {actual}"


def _conserved(connection: sa.Connection, heard: Heard) -> Iterator[str]:
    yield from map(str, store.rebuild(connection))
    if total := sum(store.balances(connection).values()):
        yield f"all accounts together are at {total} micros"


def _trained_once(connection: sa.Connection, heard: Heard) -> Iterator[str]:
    states = dict(map(tuple, connection.execute(sa.select(rollouts.c.claim_id, rollouts.c.state))))
    yield from (f"claim {claim} was trained on {count} times" for claim, count in _repeated(heard.trained))
    batched = {claim for claim, state in states.items() if state == "batched"}
    yield from (f"claim {claim} is in a batch or came in one, not both" for claim in batched ^ {*heard.trained})
    left = [claim for claim in states if claim not in batched]
    yield from (f"claim {claim} is {states[claim]}" for claim in left if states[claim] not in WAITING)
    if len(left) >= heard.groups_per_update:
        yield f"{len(left)} groups wait, enough for a batch"


CHECKS: dict[str, Callable[[sa.Connection, Heard], Iterator[str]]] = {
    "no lease went to two nodes": _leases_of_one,
    "no claim was credited twice, and each that was accepted once": _credited_once,
    "every lease is in exactly one state": _one_state,
    "the kept counts are those of the rows": _kept_counts,
    "balances are what the entries make, and conserved": _conserved,
    "the learner got every group once": _trained_once,
}


def examine(connection: sa.Connection, heard: Heard) -> dict[str, list[str]]:
    """Check → what it found wrong: nothing, if all is well."""
    return {name: list(check(connection, heard)) for name, check in CHECKS.items()}


def _repeated(names: Iterable[str] | Iterable[int]) -> list[tuple[str | int, int]]:
    return [(name, count) for name, count in Counter[str | int](names).items() if count > 1]
