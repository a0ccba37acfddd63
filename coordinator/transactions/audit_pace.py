"""The pace of auditors: what they check per second, what comes in to be checked, and the effect of a backlog.

    backlog:   0 ──── a quarter of backlog_max ──── a half ──── three quarters ──── backlog_max
    rate:      as set │ a third eased              │ two thirds │ as little as the escrow covers │ no work is offered

- Rates fall in three steps, and are as set again when the backlog is small: owners that are audited less wait longer
  for their money (`coordinator.rules.trust`). They fall in steps, because whoever knew the
  exact backlog would know which claims were drawn.
- Speeds are those of the last `RECENT` batches that auditors judged. The tokens that came in meanwhile are those that
  were judged plus the growth of the backlog.
- Only the operator sees these figures.
"""

import math
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import sqlalchemy as sa

from coordinator.store.facts import Fact, get_fact, set_fact
from coordinator.store.tables import WAITS, audits
from ledger.tables import claims_table
from protocol.text.plain import counted

RECENT = 32

STEPS = 3
"""Steps in which rates fall, from a quarter of the largest backlog to three quarters of it."""


class JudgedBatch(NamedTuple):
    """The claims that an auditor judged together."""

    judged_ms: int
    tokens: int
    seconds: float
    threads: int
    waiting_tokens: int
    """The tokens that waited for an auditor after it."""


BATCHES = Fact[list[Any]]("audit_pace", [])
"""The fact of the last `RECENT` judged batches."""


@dataclass(frozen=True)
class AuditPace:
    """The pace of auditors and of nodes."""

    waiting: int
    waiting_tokens: int
    auditor_tokens_per_s: float
    """Tokens of an auditor while it is at work; 0 while none has judged anything."""
    incoming_tokens_per_s: float
    """Tokens that are drawn for an audit."""
    threads: int
    """Threads of that auditor."""
    auditors_needed: int
    """Auditors of the same kind that would suffice, at work all the time; 0 while that is unknown."""


def rate_factor(backlog: int, backlog_max: int) -> float:
    """Return how far rates fall while `backlog` claims wait: 0 as set, 1 to what the escrow covers."""
    quarters = 4 * backlog // backlog_max
    return min(STEPS, quarters) / STEPS


def record(connection: sa.Connection, claims: list[str], seconds: float, threads: int, now_ms: int) -> None:
    """Record that an auditor judged these claims, and how long that took."""
    query = sa.select(sa.func.coalesce(sa.func.sum(claims_table.c.tokens), 0))
    tokens = connection.execute(query.where(claims_table.c.claim_id.in_(claims))).scalar_one()
    _, waiting_tokens = _waiting(connection)
    judged = JudgedBatch(now_ms, int(tokens), seconds, threads, waiting_tokens)
    set_fact(connection, BATCHES, [*get_fact(connection, BATCHES), judged][-RECENT:])


def measure(connection: sa.Connection, now_ms: int) -> AuditPace:
    """Compare what auditors can check with what comes in."""
    batches = [JudgedBatch(*row) for row in get_fact(connection, BATCHES)]
    waiting, waiting_tokens = _waiting(connection)
    busy_s = sum(batch.seconds for batch in batches)
    speed = sum(batch.tokens for batch in batches) / busy_s if busy_s else 0.0
    incoming = 0.0
    if batches and now_ms > batches[0].judged_ms:
        judged = sum(batch.tokens for batch in batches[1:])
        grown = waiting_tokens - batches[0].waiting_tokens
        incoming = max(0, judged + grown) / ((now_ms - batches[0].judged_ms) / 1000)
    return AuditPace(
        waiting=waiting,
        waiting_tokens=waiting_tokens,
        auditor_tokens_per_s=speed,
        incoming_tokens_per_s=incoming,
        threads=batches[-1].threads if batches else 0,
        auditors_needed=math.ceil(incoming / speed) if speed else 0,
    )


def figures(connection: sa.Connection, backlog_max: int, now_ms: int) -> dict[str, Any]:
    """Return the pace, and an alarm as soon as rates fall; the alarm is empty if auditors keep up."""
    pace = measure(connection, now_ms)
    return asdict(pace) | {"alarm": alarm(pace, backlog_max)}


def alarm(pace: AuditPace, backlog_max: int) -> str:
    """Return how far auditors are behind and how many would suffice; nothing while they keep up."""
    eased = rate_factor(pace.waiting, backlog_max)
    if not eased:
        return ""
    behind = (
        f"Auditors do not keep up: {pace.waiting:,} claims of {pace.waiting_tokens:,} tokens wait. "
        f"At {backlog_max:,} waiting claims (audit.backlog_max) nodes get no more work. "
    )
    rates = "Owners whose work was found right are audited less meanwhile, and paid later. "
    if not pace.auditor_tokens_per_s:
        return behind + rates + "No auditor has judged anything yet: see logs/auditor.log."
    wanted = max(pace.auditors_needed, 1)
    threads = f"{pace.threads} thread{'' if pace.threads == 1 else 's'} each"
    return (
        f"{behind}{rates}One auditor checks {pace.auditor_tokens_per_s:,.0f} tokens/s; claims of "
        f"{pace.incoming_tokens_per_s:,.0f} tokens/s arrive. {counted(wanted, 'auditor')} with {threads} would keep "
        "up: start another `swarm-coordinator auditor`, or raise audit.threads."
    )


def _waiting(connection: sa.Connection) -> tuple[int, int]:
    """Return the number of claims that wait for an auditor, and of their tokens."""
    query = sa.select(sa.func.count(), sa.func.coalesce(sa.func.sum(claims_table.c.tokens), 0))
    waiting = query.select_from(audits.join(claims_table, claims_table.c.claim_id == audits.c.claim_id)).where(WAITS)
    claims, tokens = connection.execute(waiting).one()
    return int(claims), int(tokens)
