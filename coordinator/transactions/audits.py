"""What auditors take and bring back, as effects.

- A case is taken for a while, which its auditor extends as long as it is at work on it, however slow it is. Who is
  killed, stopped or cut off loses it to the next who asks; so does who asks again with cases in hand, after a restart.
- That is counted: a case that was lost is given out alone from then on, after the others of its version, so that what
  it was taken with is judged. What was lost so many times is pardoned: it kills auditors.
- A held claim is no case until its class is calibrated; then it is one as any other. If it cannot be judged then, it is
  lost: neither paid nor blamed on anybody, since waiting must not get a forgery paid.
- All cases of one answer are of one version, the oldest that anything waits for: it is deleted first.
"""

import json
import logging
from collections.abc import Sequence
from typing import Any

import sqlalchemy as sa

from coordinator.rules.calibration import UNNAMED
from coordinator.store.state import get_fact
from coordinator.store.tables import IS_OPEN, LOST, WAITS, audits, leases
from coordinator.transactions import audit_pace, escrow, partial_rollouts
from coordinator.transactions.lottery import AuditTerms
from ledger.entry import Validator
from protocol.work.auditing import AuditCase, Cases, Judged

log = logging.getLogger(__name__)

TRIES_MAX = 3
"""An auditor may be killed twice by something else; the third time it is the case."""

GAVE_UP: Validator = "none/0"
"""No validator came to a verdict."""

CASES_MAX_BYTES = 16 * 2**20
"""Claims in one answer; a single larger one still goes alone."""

FREE = ""
"""Who has a case that nobody has."""


def assign_cases(
    connection: sa.Connection,
    auditor: str,
    at_most: int,
    classes: Sequence[str] = (),
    *,
    terms: AuditTerms,
    now_ms: int,
) -> Cases:
    """Cases for an auditor, its until the time is over; what it had before it has lost.

    Claims that were held for one of `classes` wait again: it has tolerances of this policy now.
    """
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
    """An auditor is still at work on what it has: the whole time anew; on how many cases."""
    mine = WAITS & (audits.c.taken_by == auditor)
    return connection.execute(sa.update(audits).where(mine).values(taken_until_ms=now_ms + terms.timeout_ms)).rowcount


def resume(connection: sa.Connection, *, terms: AuditTerms, now_ms: int) -> int:
    """After nobody was here: auditors could not be heard, and none has lost its cases by that; how many are in hand."""
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
    """Record verdicts, and how long they took an auditor, if it says so; return how many were waited for."""
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
    """Enter what an auditor found; False if the claim does not wait for it."""
    claim_id, report = verdict.claim_id, verdict.report
    if verdict.finding == "held":
        return escrow.hold_claim(connection, claim_id, verdict.waits_for or UNNAMED, report, terms=terms, now_ms=now_ms)
    if verdict.finding == "pardon" and escrow.was_held(connection, claim_id):  # else waiting would get it paid unseen
        return escrow.hold_claim(connection, claim_id, LOST, report, terms=terms, now_ms=now_ms)
    said = (claim_id, verdict.finding, report, verdict.validator)
    return escrow.judge(connection, *said, terms=terms, now_ms=now_ms)


def _release(connection: sa.Connection, lost: sa.ColumnElement[bool]) -> None:
    """Their auditor will not come back with these."""
    here = WAITS & (audits.c.taken_by != FREE) & lost
    connection.execute(sa.update(audits).where(here).values(taken_by=FREE, tries=audits.c.tries + 1))


def _cases(
    connection: sa.Connection, here: sa.ColumnElement[bool], at_most: int, probes: frozenset[str]
) -> list[AuditCase]:
    """The next cases that nobody was lost with, or else one of the others."""
    query = (
        sa.select(audits.c.claim_id, audits.c.lease_id, audits.c.node_id, leases.c.offer, audits.c.tries)
        .join_from(audits, leases, leases.c.lease_id == audits.c.lease_id)
        .where(here)
        .order_by(audits.c.tries, leases.c.ended_ms, audits.c.owner, audits.c.place)
        .limit(at_most)
    )
    rows = connection.execute(query).all()
    together = [row for row in rows if not row.tries] or rows[:1]
    return [_case(connection, row, row.node_id in probes) for row in together]


def _case(connection: sa.Connection, row: Any, is_probe: bool) -> AuditCase:
    rollout, told = partial_rollouts.signed(connection, row.lease_id)
    return AuditCase(claim_id=row.claim_id, lease=row.offer, rollout=rollout, fragments=told, is_probe=is_probe)


def _within(cases: list[AuditCase]) -> list[AuditCase]:
    """The first cases, as many as fit into an answer."""
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
    """Whether nothing will ever wait again: the round is finished, and nobody is left who may answer."""
    if not get_fact(connection, "finished", False):
        return False
    waiting = sa.select(audits.c.claim_id).where(WAITS).limit(1)
    still_open = sa.select(leases.c.lease_id).where(IS_OPEN).limit(1)
    return not any(connection.execute(query).first() for query in (waiting, still_open))
