"""Escrow: the way of a claim from acceptance to settlement, and the consequences of faults, as effects.

    accepted ─▶ drawn ──verdict──▶ pass, soft ─┐
            └▶ not drawn ──window closed──────┴─ used by the learner ─▶ Post
               hard fault, or the owner is banned ────────────────────▶ Void

- A claim is used when it was trained on, or when it is not needed any more.
- The window: the owner's last claims that were not drawn stay unpaid, as many as the trust rules say, and so does every
  claim behind one whose audit is still to come. At the end of the round, a claim waits only for the audits before it.
- The pledge: the dearest of an owner's groups that audits found right stays unpaid, too, until no fault can come any
  more. So an owner has something to lose from the first group on, and a second identity has to earn its own pledge.
- A hard fault voids its claim, the pledge and the window before it: as many of the owner's unaudited groups as stay
  unpaid at its rate. All other claims in the owner's escrow are audited, and those that the learner has not used leave
  the buffer; the prompts are offered again. A second fault, on another group, bans the owner: claims that no audit
  found right are void, and its leases end. Other claims that were found right are paid, even to a banned owner.
- A claim to a part of a group that another node finished goes the same way, and is used when its group is. Windows
  count whole groups: a part worth one token must not close a window.
- A group with a fault in it leaves the buffer. The others who worked on it in good faith are paid as if it was used.
- A claim that cannot be audited by no fault of the node's (its version is gone, the auditor fails on it) counts as not
  drawn.
- A claim is *held* if the tolerances that it fails by were measured on another policy: no verdict, no fault and no
  entry. Its group leaves the buffer, and it stays unpaid until its class is calibrated and an auditor judges it.
- A verdict counts once, whoever returns it.
"""

import logging
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import sqlalchemy as sa

from coordinator.rules import trust
from coordinator.rules.lifecycle import WAITING, RolloutState, is_for_learner
from coordinator.rules.trust import Finding
from coordinator.store.facts import FINISHED, get_fact
from coordinator.store.tables import HELD, IS_OPEN, LOST, WAITS, audits, leases, nodes, rollouts
from coordinator.store.tables import trust as trust_table
from coordinator.transactions import (
    audit_pace,
    evaluations,
    lottery,
    owners,
    partial_rollouts,
    queries,
    standings,
    turns,
)
from coordinator.transactions import leases as lease_table
from coordinator.transactions.lottery import AuditTerms
from coordinator.transactions.rollouts import move
from ledger import store
from ledger.book import BookBroken, EntryOutcome
from ledger.drawing import ALL_PPM
from ledger.entry import Post, VerdictEntry, Void
from ledger.prepared import Prepared
from ledger.tables import claims_table
from protocol.errors import OwnerBanned
from protocol.ids import NodeId
from protocol.policy import chunks
from protocol.work.lease import Lease

log = logging.getLogger(__name__)

WRONG = "replay_mismatch"
"""The reason why the claim of a hard fault is void."""

FORFEITED = "escrow_forfeited"
"""The reason why the window before it is void."""

PROVEN: tuple[Finding, ...] = ("pass", "soft")
"""Findings after which a claim is paid."""

GOOD = audits.c.finding.in_(PROVEN) & ~audits.c.settled & (audits.c.groups > 0)
"""Claims that may be the pledge, which is the dearest of them; a part of a group cannot be."""

UNSEEN = ((audits.c.why == "") | (audits.c.finding == "pardon")) & ~audits.c.settled
"""Claims that wait for their window to close."""

_admit = Prepared(sa.insert(audits))
_least_rate = Prepared(
    sa.select(sa.func.min(audits.c.rate_ppm)).where(
        audits.c.owner == sa.bindparam("of"), ~audits.c.settled, audits.c.rate_ppm > 0
    )
)

_NO_PLACE = 2**62
"""A place behind every claim."""


class UnpaidClaim(NamedTuple):
    """A claim in escrow, the groups that it counts for, and its worth."""

    claim_id: str
    groups: int
    amount_micros: int


class WaitingClaim(NamedTuple):
    """A claim that is not settled yet."""

    claim_id: str
    node_id: NodeId
    groups: int
    why: str
    finding: str | None
    used: bool


_unseen = Prepared(
    sa.select(audits.c.claim_id, audits.c.groups, claims_table.c.amount_micros)
    .join_from(audits, claims_table, claims_table.c.claim_id == audits.c.claim_id)
    .where(audits.c.owner == sa.bindparam("of"), audits.c.place < sa.bindparam("before"), UNSEEN)
    .order_by(audits.c.place.desc()),
    UnpaidClaim,
)
_pledge = Prepared(
    sa.select(audits.c.claim_id, audits.c.groups, claims_table.c.amount_micros)
    .join_from(audits, claims_table, claims_table.c.claim_id == audits.c.claim_id)
    .where(audits.c.owner == sa.bindparam("of"), GOOD)
    .order_by(claims_table.c.amount_micros.desc(), audits.c.place)
    .limit(1),
    UnpaidClaim,
)
_unsettled = Prepared(
    sa.select(audits.c.claim_id, audits.c.node_id, audits.c.groups, audits.c.why, audits.c.finding, audits.c.used)
    .where(audits.c.owner == sa.bindparam("of"), ~audits.c.settled, audits.c.held_as != LOST)
    .order_by(audits.c.place),
    WaitingClaim,
)
_mark_used = Prepared(
    sa.update(audits)
    .where(audits.c.claim_id.in_(sa.bindparam("claims", expanding=True)))
    .values(used=sa.true())
    .returning(audits.c.owner)
)
_mark_settled = Prepared(
    sa.update(audits).where(audits.c.claim_id.in_(sa.bindparam("claims", expanding=True))).values(settled=sa.true())
)


def admit(
    connection: sa.Connection,
    node: NodeId,
    claim_id: str,
    lease: Lease,
    *,
    worth_micros: int,
    groups: int = 1,
    terms: AuditTerms,
    now_ms: int,
) -> None:
    """Put an accepted claim into escrow and draw whether it is audited; `groups` is 0 for a part of a group."""
    owner, place, before, backlog = standings.count_claim(connection, node, groups)
    rate = _rate_ppm(connection, owner, before, worth_micros, backlog, terms)
    epoch, drawn, is_last = lottery.draw(connection, claim_id, rate, terms)
    claimed = {
        "claim_id": claim_id,
        "lease_id": lease.lease_id,
        "node_id": node,
        "owner": owner,
        "groups": groups,
        "place": place,
        "version": lease.version,
        "epoch": epoch,
        "rate_ppm": rate,
        "why": "drawn" if drawn else "",
    }
    _admit(connection, **claimed)
    if is_last:
        lottery.end(connection, terms, now_ms)


def _rate_ppm(
    connection: sa.Connection,
    owner: str,
    standing: trust.OwnerStanding,
    worth_micros: int,
    backlog: int,
    terms: AuditTerms,
) -> int:
    """Return the audit rate of the owner's next claim, which is worth `worth_micros`, in claims per million."""
    if (rate := trust.rate_ppm(standing, terms.settings)) in (0, ALL_PPM):
        return rate  # it does not depend on the escrow
    ease = audit_pace.rate_factor(backlog, terms.settings.backlog_max)
    eased = trust.rate_ppm(standing, terms.settings, ease=ease)
    window = _window(connection, owner, _NO_PLACE, trust.window(standing, terms.settings, drawn_ppm=eased))
    held_micros = sum(row.amount_micros for row in (*window, *_pledge(connection, of=owner)))
    return trust.rate_ppm(standing, terms.settings, worth_micros=worth_micros, held_micros=held_micros, ease=ease)


def _window_size(connection: sa.Connection, owner: str, standing: trust.OwnerStanding, terms: AuditTerms) -> int:
    """Return how many unaudited groups of the owner stay unpaid: as many as at the lowest rate that one of them had."""
    drawn_ppm = _least_rate(connection, of=owner).scalar() or ALL_PPM
    return trust.window(standing, terms.settings, drawn_ppm=drawn_ppm)


def _window(connection: sa.Connection, owner: str, before: int, groups: int) -> list[UnpaidClaim]:
    """Return the owner's last `groups` unpaid, unaudited groups before a place, the latest first."""
    window: list[UnpaidClaim] = []
    if groups:
        for row in _unseen(connection, of=owner, before=before):
            window.append(row)
            groups -= row.groups
            if groups <= 0:
                break
    return window


def void_claims_of_banned_owners(
    connection: sa.Connection, working: Sequence[NodeId], *, terms: AuditTerms, now_ms: int
) -> None:
    """Void the claims of nodes whose owners were banned before others finished their work."""
    for owner in standings.banned_among(connection, working):
        for touched in sorted(_forfeit(connection, owner, now_ms)):
            settle(connection, touched, terms, now_ms)


def used(
    connection: sa.Connection, wholes: list[str], *, suspects: Iterable[str] = (), terms: AuditTerms, now_ms: int
) -> None:
    """Record that the learner does not need these rollouts any more; `suspects` are audited before they are settled."""
    worked = [*wholes, *partial_rollouts.parts_of(connection, wholes)]
    if suspected := set(worked).intersection(suspects):
        which = audits.c.claim_id.in_(suspected) & (audits.c.why == "") & ~audits.c.settled
        connection.execute(sa.update(audits).where(which).values(why="learner"))
    for owner in sorted(set(_mark_used(connection, claims=worked).scalars())):
        settle(connection, owner, terms, now_ms)


def settle_all(connection: sa.Connection, terms: AuditTerms, now_ms: int) -> None:
    """Post all claims that can be posted, of all owners."""
    for owner in connection.execute(sa.select(trust_table.c.owner)).scalars().all():
        settle(connection, owner, terms, now_ms)


def settle(connection: sa.Connection, owner: str, terms: AuditTerms, now_ms: int) -> None:
    """Post the claims that an owner's escrow need not hold any more."""
    standing = standings.find_standing(connection, owner)
    waiting = _unsettled(connection, of=owner)
    first = next((at for at, row in enumerate(waiting) if row.why and row.finding is None), len(waiting))
    unproven = [row for row in waiting[:first] if row.finding not in PROVEN]
    kept = set[str]()
    if first < len(waiting) or not get_fact(connection, FINISHED):
        if standings.banned_ms(connection, owner) is None:  # a banned owner needs no pledge
            kept = _pledged(connection, owner, standing, terms)
        held = trust.level(standing, terms.settings) == "held"
        unproven = [] if held else _closed(unproven, _window_size(connection, owner, standing, terms))
    posted = [row for row in unproven if row.used]
    proven = [row for row in waiting if row.finding in PROVEN and row.used and row.claim_id not in kept]
    _end(connection, [Post(claim_id=row.claim_id) for row in (*proven, *posted)], now_ms)
    if paid := {row.node_id for row in (*proven, *posted)}:
        owners.sequence(connection, paid, now_ms)
    # A pardon proves nothing where everything is audited: a newcomer whose versions are gone stays a newcomer.
    if groups := sum(row.groups for row in posted if row.finding is None):
        standings.put(connection, owner, trust.validated(standing, terms.settings, groups))


def _pledged(connection: sa.Connection, owner: str, standing: trust.OwnerStanding, terms: AuditTerms) -> set[str]:
    """Return the claim that is the pledge; empty where nothing is ever audited."""
    rate = trust.rate_ppm(standing, terms.settings)
    return {row.claim_id for row in _pledge(connection, of=owner)} if rate else set()


def _closed(unproven: list[WaitingClaim], window: int) -> list[WaitingClaim]:
    """Return the claims with at least `window` groups behind them."""
    behind = 0
    for place in reversed(range(len(unproven))):
        if behind >= window:
            return unproven[: place + 1]
        behind += unproven[place].groups
    return []


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
    """Record a verdict and its consequences; return False if the claim does not wait for one."""
    waits = (audits.c.claim_id == claim_id) & WAITS
    values = {"finding": finding, "report": report, "judged_ms": now_ms}
    columns = (audits.c.owner, audits.c.groups, audits.c.place)
    row = connection.execute(sa.update(audits).where(waits).values(**values).returning(*columns)).first()
    if row is None:
        return False
    owner, touched = row.owner, {row.owner}
    verdict = VerdictEntry(
        claim_id=claim_id, outcome=finding, validator=validator, evidence_digest=chunks.digest(report)
    )
    store.append(connection, verdict, now_ms)
    before = standings.find_standing(connection, owner)
    again = standings.is_again(connection, owner, claim_id)
    standing = trust.after_verdict(before, finding, terms.settings, row.groups, again=again)
    standings.put(connection, owner, standing)
    if finding == "hard":
        standings.note_fault(connection, owner, claim_id, before, now_ms)
        window = _window(connection, owner, row.place, _window_size(connection, owner, before, terms))
        pledge = sorted(_pledged(connection, owner, before, terms))
        touched |= _blame(connection, owner, claim_id, [unseen.claim_id for unseen in window], pledge, now_ms)
        if trust.level(standing, terms.settings) == "banned":
            touched |= _ban(connection, owner, now_ms)
    for each in sorted(touched):
        settle(connection, each, terms, now_ms)
    return True


def hold_claim(
    connection: sa.Connection, claim_id: str, held_as: str, report: bytes, *, terms: AuditTerms, now_ms: int
) -> bool:
    """Hold a claim until class `held_as` is calibrated, and retract its group; return False if it does not wait."""
    values = {"held_as": held_as, "report": report, "taken_by": "", "tries": 0}
    stmt = sa.update(audits).where((audits.c.claim_id == claim_id) & WAITS).values(**values)
    if not connection.execute(stmt).rowcount:
        return False
    for touched in sorted(_retract(connection, [claim_id], now_ms)):
        settle(connection, touched, terms, now_ms)
    return True


def release(connection: sa.Connection, classes: Iterable[str]) -> int:
    """Let claims that were held for one of these classes wait for an auditor; return how many they are."""
    which = HELD & audits.c.held_as.in_(list(classes))
    return connection.execute(sa.update(audits).where(which).values(held_as="", why="held")).rowcount


def was_held(connection: sa.Connection, claim_id: str) -> bool:
    """Return True if a claim was held before it waited for an auditor again."""
    which = (audits.c.claim_id == claim_id) & (audits.c.why == "held")
    return connection.execute(sa.select(audits.c.claim_id).where(which)).first() is not None


def _blame(
    connection: sa.Connection, owner: str, claim_id: str, window: list[str], pledge: list[str], now_ms: int
) -> set[str]:
    """Void a claim, its owner's pledge and window; have all other open claims audited; return the owners touched.

    The pledge was found right, and stays in the buffer.
    """
    suspect = (audits.c.owner == owner) & ~audits.c.settled & audits.c.finding.is_(None)
    open_claims = connection.execute(sa.select(audits.c.claim_id).where(suspect)).scalars().all()
    touched = _retract(connection, [claim_id, *window, *open_claims], now_ms)
    _end(connection, [Void(claim_id=claim_id, reason_code=WRONG)], now_ms)
    lost = [*reversed(window), *pledge]
    _end(connection, [Void(claim_id=lost_id, reason_code=FORFEITED) for lost_id in lost], now_ms)
    connection.execute(sa.update(audits).where(audits.c.claim_id.in_(lost)).values(fault=claim_id))
    connection.execute(sa.update(audits).where(suspect & (audits.c.why == "")).values(why="fault"))
    return touched


def ban(connection: sa.Connection, owner: str, *, terms: AuditTerms, now_ms: int) -> bool:
    """Ban an owner by the operator's order; return False if the owner was banned before."""
    if not standings.ban(connection, owner, now_ms):
        return False
    for touched in sorted(_ban(connection, owner, now_ms)):
        settle(connection, touched, terms, now_ms)
    return True


def would_ban(connection: sa.Connection, owner: str) -> dict[str, int]:
    """Return what a ban of an owner would change now: claims voided and kept, their worth, leases and groups."""
    theirs = _of_banned(connection, owner) & ~audits.c.settled
    proven = audits.c.finding.in_(PROVEN)
    columns = (sa.func.count(), sa.func.coalesce(sa.func.sum(claims_table.c.amount_micros), 0))
    worth = sa.select(*columns).join_from(audits, claims_table, claims_table.c.claim_id == audits.c.claim_id)
    void, void_micros = connection.execute(worth.where(theirs, audits.c.finding.is_(None) | ~proven)).one()
    kept, kept_micros = connection.execute(worth.where(theirs, proven)).one()
    names = connection.scalars(sa.select(audits.c.claim_id).where(theirs)).all()
    wholes = {partial_rollouts.whole_of(connection, claim_id) for claim_id in names}
    waiting = rollouts.c.claim_id.in_(wholes) & rollouts.c.state.in_(WAITING)
    held = leases.c.node_id.in_(_nodes_of(owner)) & IS_OPEN
    return {
        "nodes": connection.scalar(sa.select(sa.func.count()).select_from(_nodes_of(owner).subquery())) or 0,
        "void_claims": int(void),
        "void_micros": int(void_micros),
        "kept_claims": int(kept),
        "kept_micros": int(kept_micros),
        "leases": connection.scalar(sa.select(sa.func.count()).where(held)) or 0,
        "groups": connection.scalar(sa.select(sa.func.count()).where(waiting)) or 0,
    }


def _nodes_of(owner: str) -> sa.Select[tuple[str]]:
    return sa.select(nodes.c.node_id).where((nodes.c.owner == owner) | (nodes.c.node_id == owner))


def _of_banned(connection: sa.Connection, owner: str) -> sa.ColumnElement[bool]:
    """Return which claims a ban of an owner concerns."""
    answers = [owner, *connection.scalars(sa.select(nodes.c.owner).where(nodes.c.node_id == owner))]
    return audits.c.owner.in_(answers) & ((audits.c.owner == owner) | (audits.c.node_id == owner))


def _ban(connection: sa.Connection, owner: str, now_ms: int) -> set[str]:
    """Ban an owner, and end its claims and leases; return the owners whose claims that touches."""
    standings.ban(connection, owner, now_ms)
    log.warning("owner=%s banned", owner)
    touched = _forfeit(connection, owner, now_ms)
    lease_table.take_away(connection, leases.c.node_id.in_(_nodes_of(owner)), OwnerBanned.code, now_ms)
    return touched


def _forfeit(connection: sa.Connection, owner: str, now_ms: int) -> set[str]:
    """Retract a banned owner's open claims, void those not found right, and return the owners concerned.

    If the banned key was its own owner and works for another now, its claims since then, and parts that others
    finished, are voided, too. These belong to that key from now on, as its faults do: an appeal finds them there.
    """
    open_claims = _of_banned(connection, owner) & ~audits.c.settled
    names = connection.execute(sa.select(audits.c.claim_id).where(open_claims)).scalars().all()
    touched = _retract(connection, names, now_ms)
    proven = audits.c.finding.in_(PROVEN)
    connection.execute(sa.update(audits).where(open_claims & proven).values(used=True))
    columns = sa.select(audits.c.claim_id, audits.c.owner, audits.c.place).order_by(audits.c.place)
    void = connection.execute(columns.where(open_claims & (audits.c.finding.is_(None) | ~proven))).all()
    _end(connection, [Void(claim_id=row.claim_id, reason_code=OwnerBanned.code) for row in void], now_ms)
    by = standings.banned_ms(connection, owner)
    for row in void:
        place = row.place if row.owner == owner else standings.count(connection, owner, 0)
        stmt = sa.update(audits).where(audits.c.claim_id == row.claim_id)
        connection.execute(stmt.values(ban_ms=by, owner=owner, place=place))
    return touched.union(row.owner for row in void)


def _retract(connection: sa.Connection, claims: Iterable[str], now_ms: int) -> set[str]:
    """Retract the groups of claims, offer their prompts again, and return the owners who worked on them.

    Groups that were trained on keep their state.
    """
    wholes = {partial_rollouts.whole_of(connection, claim_id) for claim_id in claims}
    taken = move(connection, rollouts.c.claim_id.in_(wholes), RolloutState.RETRACTED)
    for row in taken:
        turns.abandon(connection, row.group_no)
        lease_table.reopen(connection, row.group_no)
        if not is_for_learner(row.group_no):
            evaluations.record_group(connection, row.group_no, now_ms)
            queries.refund(connection, row.group_no)
    return _use(connection, [row.claim_id for row in taken])


def _use(connection: sa.Connection, wholes: list[str]) -> set[str]:
    """Mark these rollouts, and the parts that they continued, as used; return their owners."""
    claims = [*wholes, *partial_rollouts.parts_of(connection, wholes)]
    return set(_mark_used(connection, claims=claims).scalars())


def _end(connection: sa.Connection, entries: list[Post] | list[Void], now_ms: int) -> None:
    """Append the entries that settle these claims; each claim is settled once."""
    if not entries:
        return
    outcomes = store.append_all(connection, entries, now_ms)
    if set(outcomes) != {EntryOutcome.APPLIED}:
        raise BookBroken(f"A claim in escrow was settled before: {outcomes}.")
    _mark_settled(connection, claims=[entry.claim_id for entry in entries])
    if void := [entry.claim_id for entry in entries if isinstance(entry, Void)]:
        queries.refund_void(connection, void)
