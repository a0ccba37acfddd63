"""Work that an auditor repeats to the bit: the classes of the auditors, and the nodes whose work was found equal.

- A class counts while its auditor names it: for a day after the last request for cases that named it, since one replay
  can take hours; only for minutes once the auditor judged a claim of an exact class and did not name its own after it.
- A class is public, so naming it proves nothing. A node's work counts as exact from the first claim that an auditor of
  its class passed, until a claim fails.
"""

from collections.abc import Mapping
from typing import Any

import sqlalchemy as sa

from coordinator.rules import trust
from coordinator.store.facts import Fact, get_fact, set_fact
from coordinator.store.tables import audits, leases
from protocol import limits
from protocol.work.lease import Lease, is_exact

NAMED_MS = 86_400_000
"""The time for which a class counts after its auditor named it."""

RENEWED_MS = 3_600_000
"""An auditor that asks every second changes the store once in this time."""

SILENT_MS = 600_000
"""The time for which a class counts after a verdict on an exact claim: the auditor names it with its next request."""

AUDITORS = Fact[Mapping[str, tuple[str, int]]]("exact_auditors", {})
"""The exact class of each auditor by the auditor's name, and the time until which it counts."""


def current_classes(connection: sa.Connection, now_ms: int) -> set[str]:
    """Return the classes that an auditor of the round repeats to the bit."""
    return {name for name, until_ms in get_fact(connection, AUDITORS).values() if until_ms > now_ms}


def record_class(connection: sa.Connection, auditor: str, name: str, now_ms: int) -> None:
    """Record that an auditor names an exact class as its own."""
    known = get_fact(connection, AUDITORS)
    class_before, until_ms = known.get(auditor, ("", 0))
    if class_before != name or until_ms < now_ms + NAMED_MS - RENEWED_MS:
        others = [(other, of) for other, of in known.items() if other != auditor and of[1] > now_ms]
        set_fact(connection, AUDITORS, {**dict(others[1 - limits.CLASSES_MAX :]), auditor: (name, now_ms + NAMED_MS)})


def record_verdict(connection: sa.Connection, claim_id: str, finding: trust.Finding, now_ms: int) -> None:
    """Record what a verdict on a claim of an exact class says about its node; do nothing for other classes."""
    query = (
        sa.select(audits.c.node_id, audits.c.taken_by, leases.c.offer)
        .join_from(audits, leases, leases.c.lease_id == audits.c.lease_id)
        .where(audits.c.claim_id == claim_id)
    )
    row = connection.execute(query).one()  # of the case that was judged just now
    claimed = Lease.from_bytes(row.offer).judged_as
    if not is_exact(claimed):
        return
    known = get_fact(connection, AUDITORS)
    auditors, until_ms = known.get(row.taken_by, ("", 0))
    proven = _proven(row.node_id)
    before = get_fact(connection, proven)
    after = trust.exact_class_after(before, finding, claimed, auditors=auditors if until_ms > now_ms else "")
    if after != before:
        set_fact(connection, proven, after)
    if until_ms > now_ms + SILENT_MS:
        set_fact(connection, AUDITORS, {**known, row.taken_by: (auditors, now_ms + SILENT_MS)})


def is_proven(connection: sa.Connection, node: str, name: str, now_ms: int) -> bool:
    """Return True if the last judged work of a node had the bits of this class, and an auditor repeats it still."""
    return get_fact(connection, _proven(node)) == name and name in current_classes(connection, now_ms)


def _proven(node: str) -> Fact[Any]:
    return Fact(f"exact_class:{node}", "")
