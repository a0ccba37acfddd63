"""Audit cases that are given to auditors, and the verdicts that they return, as effects.

- A case is assigned for a limited time, which its auditor extends as long as it works on it, however slow it is. An
  auditor that is killed, stopped or cut off loses it to the next one that asks. So does an auditor that asks again
  while it holds cases, after a restart.
- Each loss is counted. A case that was lost is given out alone from then on, after the others of its version, so that
  the cases assigned with it are judged. A case that was lost `TRIES_MAX` times is pardoned: it kills auditors.
- A held claim becomes a case once its class is calibrated. If it cannot be judged then, it is lost: it is not paid, and
  it is no fault of anybody, since waiting must not get a forgery paid.
- All cases of one answer are of one version, the oldest that a case waits for: its files are deleted first.

An auditor repeats the work of its own exact class to the bit.

- A class counts while its auditor names it: for a day after the last request for cases that named it, since one replay
  can take hours; only for minutes once the auditor judged a claim of an exact class and did not name its own after it.
- A class is public, so naming it proves nothing. A node's work counts as exact from the first claim that an auditor of
  its class passed, until a claim fails.
"""

import json
import logging
from collections.abc import Mapping, Sequence
from typing import Any

import sqlalchemy as sa

from coordinator.rules import trust
from coordinator.rules.calibration import UNNAMED
from coordinator.store.facts import FINISHED, Fact, get_fact, set_fact
from coordinator.store.tables import IS_OPEN, LOST, WAITS, audits, leases
from coordinator.transactions import audit_pace, escrow, partial_rollouts
from coordinator.transactions.lottery import AuditTerms
from ledger.entry import Validator
from protocol import limits
from protocol.work.auditing import AuditCase, Cases, Judged
from protocol.work.lease import Lease, is_exact

log = logging.getLogger(__name__)

TRIES_MAX = 3
"""An auditor may be killed twice by something else; the third time it is the case."""

GAVE_UP: Validator = "none/0"
"""No validator came to a verdict."""

CASES_MAX_BYTES = 16 * 2**20
"""Claims in one answer; a single larger one still goes alone."""

FREE = ""
"""The auditor of a case that is not assigned."""


def assign_cases(
    connection: sa.Connection,
    auditor: str,
    at_most: int,
    classes: Sequence[str] = (),
    *,
    terms: AuditTerms,
    now_ms: int,
) -> Cases:
    """Assign cases to an auditor for `terms.timeout_ms`; the cases that it held before are lost to it.

    Claims that were held for one of `classes` wait again: the auditor has tolerances of this policy now.
    """
    for name in filter(is_exact, classes):  # one that has not met an exact claim since its start names none
        _record_class(connection, auditor, name, now_ms)
    escrow.release(connection, classes)
    _release(connection, (audits.c.taken_by == auditor) | (audits.c.taken_until_ms <= now_ms))
    _pardon_hopeless(connection, terms, now_ms)
    free = WAITS & (audits.c.taken_by == FREE)
    version = connection.execute(sa.select(sa.func.min(audits.c.version)).where(free)).scalar()
    cases: list[AuditCase] = []
    if version is not None:
        cases = _within(_cases(connection, (audits.c.version == version) & free, at_most, terms.probes))
        names = [case.claim_id for case in cases]
        values = {"taken_by": auditor, "taken_until_ms": now_ms + terms.timeout_ms}
        connection.execute(sa.update(audits).where(audits.c.claim_id.in_(names)).values(**values))
    return Cases(version=version or 0, cases=tuple(cases), done=_is_done(connection))


def extend_cases(connection: sa.Connection, auditor: str, *, terms: AuditTerms, now_ms: int) -> int:
    """Give an auditor the full time again for each of its cases, and return how many it has."""
    mine = WAITS & (audits.c.taken_by == auditor)
    return connection.execute(sa.update(audits).where(mine).values(taken_until_ms=now_ms + terms.timeout_ms)).rowcount


def resume(connection: sa.Connection, *, terms: AuditTerms, now_ms: int) -> int:
    """Give every assigned case the full time again after a downtime of the coordinator; return how many there are."""
    taken = WAITS & (audits.c.taken_by != FREE)
    return connection.execute(sa.update(audits).where(taken).values(taken_until_ms=now_ms + terms.timeout_ms)).rowcount


def record_verdicts(
    connection: sa.Connection,
    verdicts: tuple[Judged, ...],
    *,
    seconds: float = 0.0,
    threads: int = 0,
    terms: AuditTerms,
    now_ms: int,
) -> int:
    """Record verdicts, and the `seconds` that they took, if reported; return how many were waited for."""
    counted = 0
    for verdict in verdicts:
        if _enter(connection, verdict, terms, now_ms):
            counted += 1
            level = logging.WARNING if verdict.finding in ("hard", "pardon", "held") else logging.DEBUG
            log.log(level, "audit claim=%s finding=%s%s", verdict.claim_id, verdict.finding, _waits_for(verdict))
    if seconds:
        audit_pace.record(connection, [verdict.claim_id for verdict in verdicts], seconds, threads, now_ms)
    return counted


def _waits_for(verdict: Judged) -> str:
    return f" until calibrated: {verdict.waits_for}" if verdict.finding == "held" else ""


def _enter(connection: sa.Connection, verdict: Judged, terms: AuditTerms, now_ms: int) -> bool:
    """Record what an auditor found; return False if the claim does not wait for it."""
    claim_id, report = verdict.claim_id, verdict.report
    if verdict.finding == "held":
        return escrow.hold_claim(connection, claim_id, verdict.waits_for or UNNAMED, report, terms=terms, now_ms=now_ms)
    if verdict.finding == "pardon" and escrow.was_held(connection, claim_id):  # else it is paid unseen
        return escrow.hold_claim(connection, claim_id, LOST, report, terms=terms, now_ms=now_ms)
    said = (claim_id, verdict.finding, report, verdict.validator)
    if not escrow.judge(connection, *said, terms=terms, now_ms=now_ms):
        return False
    _record_exact_verdict(connection, claim_id, verdict.finding, now_ms)
    return True


def _release(connection: sa.Connection, lost: sa.ColumnElement[bool]) -> None:
    """Unassign cases whose auditor will not return a verdict."""
    which = WAITS & (audits.c.taken_by != FREE) & lost
    connection.execute(sa.update(audits).where(which).values(taken_by=FREE, tries=audits.c.tries + 1))


def _cases(
    connection: sa.Connection, which: sa.ColumnElement[bool], at_most: int, probes: frozenset[str]
) -> list[AuditCase]:
    """Return the next cases that no auditor has lost, or else one of the others."""
    query = (
        sa.select(audits.c.claim_id, audits.c.lease_id, audits.c.node_id, leases.c.offer, audits.c.tries)
        .join_from(audits, leases, leases.c.lease_id == audits.c.lease_id)
        .where(which)
        .order_by(audits.c.tries, leases.c.ended_ms, audits.c.owner, audits.c.place)
        .limit(at_most)
    )
    rows = connection.execute(query).all()
    together = [row for row in rows if not row.tries] or rows[:1]
    return [_case(connection, row.claim_id, row.lease_id, row.offer, row.node_id in probes) for row in together]


def _case(connection: sa.Connection, claim_id: str, lease_id: str, offer: bytes, is_probe: bool) -> AuditCase:
    rollout, left = partial_rollouts.signed(connection, lease_id)
    return AuditCase(claim_id=claim_id, lease=offer, rollout=rollout, fragments=left, is_probe=is_probe)


def _within(cases: list[AuditCase]) -> list[AuditCase]:
    """Return the first cases, as many as fit into an answer."""
    room = CASES_MAX_BYTES
    fitting: list[AuditCase] = []
    for case in cases:
        room -= len(case.lease) + len(case.rollout) + sum(map(len, case.fragments))
        if fitting and room < 0:
            break
        fitting.append(case)
    return fitting


def _pardon_hopeless(connection: sa.Connection, terms: AuditTerms, now_ms: int) -> None:
    hopeless = WAITS & (audits.c.taken_by == FREE) & (audits.c.tries >= TRIES_MAX)
    report = json.dumps({"outcome": "pardon", "error": f"no auditor came back from {TRIES_MAX} tries"}).encode()
    names = connection.execute(sa.select(audits.c.claim_id).where(hopeless)).scalars().all()
    pardons = tuple(Judged(claim_id=name, finding="pardon", validator=GAVE_UP, report=report) for name in names)
    record_verdicts(connection, pardons, terms=terms, now_ms=now_ms)


def _is_done(connection: sa.Connection) -> bool:
    """Return True if no claim will ever wait again: the round is finished, and no lease is open."""
    if not get_fact(connection, FINISHED):
        return False
    waiting = sa.select(audits.c.claim_id).where(WAITS).limit(1)
    still_open = sa.select(leases.c.lease_id).where(IS_OPEN).limit(1)
    return not any(connection.execute(query).first() for query in (waiting, still_open))


NAMED_MS = 86_400_000
"""The time for which a class counts after its auditor named it."""

RENEWED_MS = 3_600_000
"""An auditor that asks every second changes the store once in this time."""

SILENT_MS = 600_000
"""The time for which a class counts after a verdict on an exact claim: the auditor names it with its next request."""

AUDITORS = Fact[Mapping[str, tuple[str, int]]]("exact_auditors", {})
"""The exact class of each auditor by the auditor's name, and the time until which it counts."""


def exact_classes(connection: sa.Connection, now_ms: int) -> set[str]:
    """Return the classes that an auditor of the round repeats to the bit."""
    return {name for name, until_ms in get_fact(connection, AUDITORS).values() if until_ms > now_ms}


def _record_class(connection: sa.Connection, auditor: str, name: str, now_ms: int) -> None:
    """Record that an auditor names an exact class as its own."""
    known = get_fact(connection, AUDITORS)
    class_before, until_ms = known.get(auditor, ("", 0))
    if class_before != name or until_ms < now_ms + NAMED_MS - RENEWED_MS:
        others = [(other, of) for other, of in known.items() if other != auditor and of[1] > now_ms]
        set_fact(connection, AUDITORS, {**dict(others[1 - limits.CLASSES_MAX :]), auditor: (name, now_ms + NAMED_MS)})


def _record_exact_verdict(connection: sa.Connection, claim_id: str, finding: trust.Finding, now_ms: int) -> None:
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
    proven = _proven_class(row.node_id)
    before = get_fact(connection, proven)
    after = trust.exact_class_after(before, finding, claimed, auditors=auditors if until_ms > now_ms else "")
    if after != before:
        set_fact(connection, proven, after)
    if until_ms > now_ms + SILENT_MS:
        set_fact(connection, AUDITORS, {**known, row.taken_by: (auditors, now_ms + SILENT_MS)})


def is_proven_exact(connection: sa.Connection, node: str, name: str, now_ms: int) -> bool:
    """Return True if the last judged work of a node had the bits of this class, and an auditor repeats it still."""
    return get_fact(connection, _proven_class(node)) == name and name in exact_classes(connection, now_ms)


def _proven_class(node: str) -> Fact[Any]:
    return Fact(f"exact_class:{node}", "")
