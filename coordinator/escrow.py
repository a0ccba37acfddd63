"""From acceptance to settlement: what a claim waits for, and what faults do, as effects.

    accepted ─▶ drawn ──verdict──▶ pass, soft ─┐
            └▶ not drawn ──window closed──────┴─ used by the learner ─▶ Post
               hard fault, or the owner is banned ────────────────────▶ Void

- A claim is used when it was trained on, or is not needed any more.
- The window: the owner's last so many claims that were not drawn stay unpaid, and so does every one behind a claim
  whose audit is still to come. At the end of the round, a claim waits only for the audits before it.
- A hard fault voids its claim and has all that is in the owner's escrow audited. A second one bans the owner: what no
  audit found right is void, their groups leave the buffer, their leases end, and the prompts are offered again.
- What cannot be audited by no fault of the node's (its version is gone, the auditor fails on it) is as if never drawn.
- A verdict counts once, whoever brings it.
"""

import logging
from collections.abc import Iterable

import sqlalchemy as sa

from coordinator import continuation, lottery, standings
from coordinator import leases as lease_table
from coordinator.audit import trust
from coordinator.audit.trust import Finding
from coordinator.lottery import AuditTerms
from coordinator.state import get_fact
from coordinator.tables import WAITS, audits, leases, nodes, rollouts
from coordinator.tables import trust as trust_table
from ledger import store
from ledger.book import BookBroken, Outcome
from ledger.entry import Post, Verdict, Void
from protocol import chunks
from protocol.errors import OwnerBanned
from protocol.ids import NodeId
from protocol.lease import Event

log = logging.getLogger(__name__)

WRONG = "replay_mismatch"
"""Why the claim of a hard fault is void."""

PROVEN: tuple[Finding, ...] = ("pass", "soft")
"""What leaves a claim worth its money."""


def admit(
    connection: sa.Connection, node: NodeId, claim_id: str, version: int, *, terms: AuditTerms, now_ms: int
) -> None:
    """Enter an accepted claim, and draw whether it is audited."""
    owner = standings.owner_of(connection, node)
    rate = trust.rate_ppm(standings.of(connection, owner), terms.rules)
    epoch, drawn = lottery.draw(connection, claim_id, rate, terms)
    connection.execute(
        sa.insert(audits).values(
            claim_id=claim_id,
            node_id=node,
            owner=owner,
            place=standings.count(connection, owner),
            version=version,
            epoch=epoch,
            rate_ppm=rate,
            why="drawn" if drawn else "",
        )
    )
    lottery.turn(connection, terms, now_ms)


def used(
    connection: sa.Connection, claims: list[str], *, suspects: Iterable[str] = (), terms: AuditTerms, now_ms: int
) -> None:
    """The learner needs these claims no more; those that it calls suspect are audited before they are settled."""
    here = audits.c.claim_id.in_(claims)
    suspected = audits.c.claim_id.in_(set(claims).intersection(suspects)) & (audits.c.why == "") & ~audits.c.settled
    connection.execute(sa.update(audits).where(suspected).values(why="learner"))
    connection.execute(sa.update(audits).where(here).values(used=True))
    for owner in connection.execute(sa.select(audits.c.owner).where(here).distinct()).scalars().all():
        settle(connection, owner, terms, now_ms)


def settle_all(connection: sa.Connection, terms: AuditTerms, now_ms: int) -> None:
    """Post what can be posted, of everybody."""
    for owner in connection.execute(sa.select(trust_table.c.owner)).scalars().all():
        settle(connection, owner, terms, now_ms)


def settle(connection: sa.Connection, owner: str, terms: AuditTerms, now_ms: int) -> None:
    """Post what an owner's escrow has to hold no longer."""
    standing = standings.of(connection, owner)
    columns = (audits.c.claim_id, audits.c.why, audits.c.finding, audits.c.used)
    waiting = list(
        connection.execute(
            sa.select(*columns).where(audits.c.owner == owner, ~audits.c.settled).order_by(audits.c.place)
        )
    )
    proven = [row for row in waiting if row.finding in PROVEN]
    first = next((at for at, row in enumerate(waiting) if row.why and row.finding is None), len(waiting))
    unproven = [row for row in waiting[:first] if row.finding not in PROVEN]
    if not get_fact(connection, "finished", False):
        held = trust.level(standing, terms.rules) == "held"
        closed = 0 if held else max(0, len(unproven) - trust.window(standing, terms.rules))
        unproven = unproven[:closed]
    posted = [row.claim_id for row in unproven if row.used]
    _end(connection, [Post(claim_id=row.claim_id) for row in proven if row.used], now_ms)
    _end(connection, [Post(claim_id=claim_id) for claim_id in posted], now_ms)
    if posted:
        standings.put(connection, owner, trust.validated(standing, terms.rules, len(posted)))


def judge(
    connection: sa.Connection,
    claim_id: str,
    finding: Finding,
    report: bytes,
    validator: str,
    *,
    terms: AuditTerms,
    now_ms: int,
) -> bool:
    """Take a verdict; False if the claim does not wait for one."""
    waits = (audits.c.claim_id == claim_id) & WAITS
    values = {"finding": finding, "report": report, "judged_ms": now_ms}
    owner = connection.execute(sa.update(audits).where(waits).values(**values).returning(audits.c.owner)).scalar()
    if owner is None:
        return False
    verdict = Verdict(claim_id=claim_id, outcome=finding, validator=validator, evidence_digest=chunks.digest(report))
    store.append(connection, verdict, now_ms)
    standing = trust.found(standings.of(connection, owner), finding, terms.rules)
    standings.put(connection, owner, standing)
    if finding == "hard":
        _retract(connection, rollouts.c.claim_id == claim_id, now_ms)
        _end(connection, [Void(claim_id=claim_id, reason_code=WRONG)], now_ms)
        escrowed = (audits.c.owner == owner) & (audits.c.why == "") & ~audits.c.settled
        connection.execute(sa.update(audits).where(escrowed).values(why="fault"))
        if trust.level(standing, terms.rules) == "banned":
            _ban(connection, owner, now_ms)
    settle(connection, owner, terms, now_ms)
    return True


def _ban(connection: sa.Connection, owner: str, now_ms: int) -> None:
    """End all that an owner has under way."""
    here = trust_table.c.owner == owner
    connection.execute(sa.update(trust_table).where(here).values(banned_ms=now_ms))
    log.warning("owner=%s banned after %d hard faults", owner, trust.FAULTS_TO_BAN)
    open_claims = (audits.c.owner == owner) & ~audits.c.settled
    proven = audits.c.finding.in_(PROVEN)
    _retract(connection, rollouts.c.claim_id.in_(sa.select(audits.c.claim_id).where(open_claims)), now_ms)
    connection.execute(sa.update(audits).where(open_claims & proven).values(used=True))
    unproven = sa.select(audits.c.claim_id).where(open_claims & (audits.c.finding.is_(None) | ~proven))
    void = connection.execute(unproven.order_by(audits.c.place)).scalars().all()
    _end(connection, [Void(claim_id=claim_id, reason_code=OwnerBanned.code) for claim_id in void], now_ms)
    theirs = sa.select(nodes.c.node_id).where(nodes.c.owner == owner)
    held = lease_table.IS_OPEN & leases.c.node_id.in_(theirs)
    columns = (leases.c.lease_id, leases.c.group_no, leases.c.surplus)
    for row in connection.execute(sa.select(*columns).where(held)).all():
        if lease_table.end_unanswered(connection, row, Event.REJECT, None, now_ms):
            connection.execute(sa.update(leases).where(leases.c.lease_id == row.lease_id).values(code=OwnerBanned.code))


def _retract(connection: sa.Connection, which: sa.ColumnElement[bool], now_ms: int) -> None:
    """Take groups out of the buffer and offer their prompts again; those that were trained on stay where they are."""
    buffered = which & (rollouts.c.state == "buffered")
    columns = (rollouts.c.claim_id, rollouts.c.group_no)
    taken = connection.execute(sa.update(rollouts).where(buffered).values(state="retracted").returning(*columns)).all()
    for row in taken:
        lease_table.reopen(connection, row.group_no)
    continuation.settle(connection, [row.claim_id for row in taken], now_ms=now_ms)


def _end(connection: sa.Connection, entries: list[Post] | list[Void], now_ms: int) -> None:
    """Settle claims, each for the first time."""
    if not entries:
        return
    outcomes = store.append_all(connection, entries, now_ms)
    if set(outcomes) != {Outcome.APPLIED}:
        raise BookBroken(f"A claim in escrow was settled before: {outcomes}.")
    here = audits.c.claim_id.in_([entry.claim_id for entry in entries])
    connection.execute(sa.update(audits).where(here).values(settled=True))
