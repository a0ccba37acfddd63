"""Audit cases that are given to auditors, and the verdicts that they return, as effects.

- A case is assigned for a limited time, which its auditor extends as long as it works on it, however slow it is. An
  auditor that is killed, stopped or cut off loses it to the next one that asks. So does an auditor that asks again
  while it holds cases, after a restart.
- Each loss is counted. A case that was lost is given out alone from then on, after the others of its version, so that
  the cases assigned with it are judged. A case that was lost `TRIES_MAX` times is pardoned: it kills auditors.
- A held claim becomes a case once its class is calibrated. If it cannot be judged then, it is lost: it is not paid, and
  it is no fault of anybody, since waiting must not get a forgery paid.
- All cases of one answer are of one version, the oldest that a case waits for: its files are deleted first.
"""

import json
import logging
from collections.abc import Sequence

import sqlalchemy as sa

from coordinator.rules.calibration import UNNAMED
from coordinator.store.facts import FINISHED, get_fact
from coordinator.store.tables import IS_OPEN, LOST, WAITS, audits, leases
from coordinator.transactions import audit_pace, escrow, exact_work, partial_rollouts
from coordinator.transactions.lottery import AuditTerms
from ledger.entry import Validator
from protocol.work.auditing import AuditCase, Cases, Judged
from protocol.work.lease import is_exact

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
        exact_work.record_class(connection, auditor, name, now_ms)
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
    exact_work.record_verdict(connection, claim_id, verdict.finding, now_ms)
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
