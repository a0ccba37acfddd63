"""What auditors take and bring back, as effects.

- A case is taken for a while; who does not come back in time, killed or slow, loses it to the next who asks.
- Asking again gives an auditor what it had taken: a restart loses nothing.
- All cases of one answer are of one version, the oldest that anything waits for: it is deleted first.
- What fails on so many tries is pardoned: one case that kills auditors must not hold up the others.
"""

import json
import logging
from typing import Any

import sqlalchemy as sa

from coordinator.audit.lottery import AuditTerms
from coordinator.money import escrow
from coordinator.store.state import get_fact
from coordinator.store.tables import IS_OPEN, WAITS, audits, leases
from coordinator.work import continuation
from ledger.entry import Validator
from protocol.auditing import AuditCase, Cases, Judged

log = logging.getLogger(__name__)

TRIES_MAX = 3
"""An auditor may be killed twice by something else; the third time it is the case."""

GAVE_UP: Validator = "none/0"
"""No validator came to a verdict."""

CASES_MAX_BYTES = 16 * 2**20
"""Claims in one answer; a single larger one still goes alone."""


def take(connection: sa.Connection, auditor: str, at_most: int, *, terms: AuditTerms, now_ms: int) -> Cases:
    """Cases for an auditor, its until the time is over."""
    _pardon_hopeless(connection, terms, now_ms)
    mine = (audits.c.taken_by == auditor) | (audits.c.taken_until_ms <= now_ms)
    version = connection.execute(sa.select(sa.func.min(audits.c.version)).where(WAITS, mine)).scalar()
    cases: list[AuditCase] = []
    if version is not None:
        here = (audits.c.version == version) & WAITS & mine
        cases = _within(_cases(connection, here, at_most))
        values = {"taken_by": auditor, "taken_until_ms": now_ms + terms.timeout_ms, "tries": audits.c.tries + 1}
        names = [case.claim_id for case in cases]
        connection.execute(sa.update(audits).where(audits.c.claim_id.in_(names)).values(**values))
    return Cases(version=version or 0, cases=tuple(cases), done=_is_done(connection))


def bring(connection: sa.Connection, verdicts: tuple[Judged, ...], *, terms: AuditTerms, now_ms: int) -> int:
    """Take verdicts; how many were waited for."""
    counted = 0
    for verdict in verdicts:
        said = (verdict.claim_id, verdict.finding, verdict.report, verdict.validator)
        if escrow.judge(connection, *said, terms=terms, now_ms=now_ms):
            counted += 1
            level = logging.WARNING if verdict.finding in ("hard", "pardon") else logging.DEBUG
            log.log(level, "audit claim=%s finding=%s", verdict.claim_id, verdict.finding)
    return counted


def _cases(connection: sa.Connection, here: sa.ColumnElement[bool], at_most: int) -> list[AuditCase]:
    query = (
        sa.select(audits.c.claim_id, audits.c.lease_id, leases.c.offer)
        .join_from(audits, leases, leases.c.lease_id == audits.c.lease_id)
        .where(here)
        .order_by(leases.c.ended_ms, audits.c.owner, audits.c.place)
        .limit(at_most)
    )
    return [_case(connection, *row) for row in connection.execute(query).all()]


def _case(connection: sa.Connection, claim_id: str, lease_id: str, offer: bytes) -> AuditCase:
    rollout, told = continuation.signed(connection, lease_id)
    return AuditCase(claim_id=claim_id, lease=offer, rollout=rollout, fragments=told)


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
    lost = WAITS & (audits.c.tries >= TRIES_MAX) & (audits.c.taken_until_ms <= now_ms)
    report = json.dumps({"outcome": "pardon", "error": f"no auditor came back from {TRIES_MAX} tries"}).encode()
    hopeless: list[Any] = list(connection.execute(sa.select(audits.c.claim_id).where(lost)).scalars())
    pardons = tuple(Judged(claim_id=name, finding="pardon", validator=GAVE_UP, report=report) for name in hopeless)
    bring(connection, pardons, terms=terms, now_ms=now_ms)


def _is_done(connection: sa.Connection) -> bool:
    """Whether nothing will ever wait again: the round is finished, and nobody is left who may answer."""
    if not get_fact(connection, "finished", False):
        return False
    waiting = sa.select(audits.c.claim_id).where(WAITS).limit(1)
    still_open = sa.select(leases.c.lease_id).where(IS_OPEN).limit(1)
    return not any(connection.execute(query).first() for query in (waiting, still_open))
