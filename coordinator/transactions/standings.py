"""Standings: the stored record of each owner: trust, bans, faults, escrow, and the updates of the owner's groups."""

from collections.abc import Sequence
from dataclasses import asdict, fields
from math import ceil
from typing import Any, NamedTuple

import sqlalchemy as sa

from coordinator.config import AuditSection
from coordinator.rules import trust as rules_of_trust
from coordinator.rules.lifecycle import WAITING, GroupState, RolloutState
from coordinator.rules.trust import Level, OwnerStanding
from coordinator.store.rows import read_rows
from coordinator.store.tables import (
    HELD,
    IS_OPEN,
    WAITS,
    audits,
    epochs,
    faults,
    groups,
    is_for_training,
    leases,
    nodes,
    parts,
    rollouts,
    trust,
    versions,
)
from coordinator.transactions import orders, partial_rollouts
from ledger.prepared import Prepared
from ledger.tables import claims_table
from protocol.errors import OwnerBanned
from protocol.ids import NodeId

SMALL_ROUND = 2
"""The factor on the owners that could fill a batch at their largest share: with fewer at work, shares do not apply."""


class TrustRow(NamedTuple):
    """An owner's claims in all, its standing, and since when it is banned."""

    owner: str
    accepted: int
    claims: int
    groups: int
    soft: int
    hard: int
    banned_ms: int | None

    @property
    def standing(self) -> OwnerStanding:
        return OwnerStanding(self.claims, self.groups, self.soft, self.hard)


class CountedTrust(NamedTuple):
    """The row of an owner whose claim was counted, and the claims that wait for an auditor."""

    owner: str
    accepted: int
    claims: int
    groups: int
    soft: int
    hard: int
    banned_ms: int | None
    backlog: int


class CountedClaim(NamedTuple):
    """A claim that was counted: its owner, its place, the owner's standing before it, and the audits' backlog."""

    owner: str
    place: int
    before: OwnerStanding
    backlog: int


class BannedOwner(NamedTuple):
    """A banned owner, and its hard faults."""

    owner: str
    hard: int


class GroupsAtWork(NamedTuple):
    """An owner's groups by the place where they wait or are worked on."""

    leased: int
    buffered: int
    finished_by_others: int
    at_turn: int


class FaultRow(NamedTuple):
    """A hard fault, with its owner's counts before it."""

    number: int
    claim_id: str
    owner: str
    claims: int
    groups: int
    judged_ms: int
    lifted: bool


class EscrowSum(NamedTuple):
    """An owner's groups in escrow, and their worth."""

    groups: int = 0
    micros: int = 0


# Built once: making a statement costs more than running it, and these run for every lease or rollout.
_owner = Prepared(sa.select(nodes.c.owner).where(nodes.c.node_id == sa.bindparam("node")))
_trust = Prepared(sa.select(trust).where(trust.c.owner == sa.bindparam("of")), TrustRow)
_count = Prepared(
    sa.update(trust)
    .where(trust.c.owner == sa.bindparam("of"))
    .values(accepted=trust.c.accepted + 1, claims=trust.c.claims + sa.bindparam("more"))
    .returning(trust.c.accepted)
)
_put = Prepared(
    sa.update(trust)
    .where(trust.c.owner == sa.bindparam("of"))
    .values({field.name: sa.bindparam(f"new_{field.name}") for field in fields(OwnerStanding)})
)
BACKLOG = sa.select(sa.func.count()).select_from(audits).where(WAITS)
"""Claims that wait for an auditor."""
_enter = Prepared(
    sa.update(trust)
    .where(trust.c.owner == sa.select(nodes.c.owner).where(nodes.c.node_id == sa.bindparam("node")).scalar_subquery())
    .values(accepted=trust.c.accepted + 1, claims=trust.c.claims + sa.bindparam("more"))
    .returning(trust, BACKLOG.scalar_subquery().label("backlog")),
    CountedTrust,
)
_begin = Prepared(sa.insert(trust))
ANSWERS = trust.c.owner.in_([nodes.c.owner, nodes.c.node_id])
"""The owners that answer for a node: its owner, and itself for its work as its own owner."""
VALIDATED = sa.func.coalesce(sa.select(trust.c.groups).where(trust.c.owner == nodes.c.owner).scalar_subquery(), 0)
"""The number of groups of a node's owner that were found right since the last hard fault."""
HELD_CLAIMS = sa.select(sa.func.count()).where(audits.c.owner == nodes.c.owner, HELD).scalar_subquery()
"""The number of claims of a node's owner that are held until their class is calibrated."""
IS_KNOWN = sa.exists().where(trust.c.owner == nodes.c.owner, trust.c.groups > 0)
"""True if a group of a node's owner was found right since the last hard fault."""
_barred = sa.select(trust.c.owner, trust.c.hard).join_from(nodes, trust, ANSWERS).where(trust.c.banned_ms.is_not(None))
_barred_one = _barred.where(nodes.c.node_id == sa.bindparam("node")).order_by(trust.c.owner).limit(1)
_banned = Prepared(_barred_one, BannedOwner)
_leased = IS_OPEN & is_for_training(leases.c.group_no)
_buffered = rollouts.c.state.in_(WAITING) & is_for_training(rollouts.c.group_no)
LAST_TURNS = (
    sa.select(rollouts.c.node_id, rollouts.c.group_no)
    .join_from(groups, rollouts, rollouts.c.lease_id == groups.c.begun)
    .where(groups.c.state == GroupState.TURN.value)
)
"""The last turns of the groups whose next turn nobody has leased yet."""
UNSCORED = sa.select(rollouts.c.node_id, rollouts.c.group_no).where(rollouts.c.state == RolloutState.UNSCORED.value)
"""The rollouts that wait for their rewards; in a round of episodes, the turns that wait for their environments."""
_turns = LAST_TURNS.where(is_for_training(groups.c.group_no))
_theirs = sa.select(nodes.c.node_id).where(nodes.c.owner == sa.bindparam("of"))
# A part is in escrow until its group is trained on: so the query reads no history.
_begun = (audits.c.owner == sa.bindparam("of")) & ~audits.c.settled & (audits.c.groups == 0)
_finished_by_others = (
    sa.select(sa.func.count(rollouts.c.claim_id.distinct()))
    .join_from(audits, parts, parts.c.claim_id == audits.c.claim_id)
    .join(rollouts, rollouts.c.claim_id == parts.c.whole)
    .where(_begun, _buffered, rollouts.c.node_id.not_in(_theirs))
)
_at_work = Prepared(
    sa.select(
        sa.select(sa.func.count()).where(_leased, leases.c.node_id.in_(_theirs)).scalar_subquery().label("leased"),
        sa.select(sa.func.count())
        .where(_buffered, rollouts.c.node_id.in_(_theirs))
        .scalar_subquery()
        .label("buffered"),
        _finished_by_others.scalar_subquery().label("finished_by_others"),
        _turns.with_only_columns(sa.func.count())
        .where(rollouts.c.node_id.in_(_theirs))
        .scalar_subquery()
        .label("at_turn"),
    ),
    GroupsAtWork,
)
_newest = sa.select(versions.c.policy_update).order_by(versions.c.version.desc()).limit(1).scalar_subquery()
# An owner whose groups were dropped for others is at work, too.
_in_vain = (
    (rollouts.c.state == RolloutState.SURPLUS.value)
    & (rollouts.c.policy_update >= _newest)
    & is_for_training(rollouts.c.group_no)
)
_under_way = sa.union_all(
    sa.select(nodes.c.owner).join_from(leases, nodes, nodes.c.node_id == leases.c.node_id).where(_leased),
    sa.select(nodes.c.owner).join_from(rollouts, nodes, nodes.c.node_id == rollouts.c.node_id).where(_buffered),
    sa.select(nodes.c.owner).join_from(rollouts, nodes, nodes.c.node_id == rollouts.c.node_id).where(_in_vain),
    _turns.with_only_columns(nodes.c.owner).join(nodes, nodes.c.node_id == rollouts.c.node_id),
).subquery()
_each_at_work = sa.select(_under_way.c.owner).distinct().limit(sa.bindparam("enough", type_=sa.Integer))
_is_proven = sa.exists().where(trust.c.owner == _under_way.c.owner, trust.c.groups > 0)
# No more owners are counted than are asked for: there may be thousands.
_owners_at_work = Prepared(sa.select(sa.func.count()).select_from(_each_at_work.subquery()))
_proven_at_work = Prepared(sa.select(sa.func.count()).select_from(_each_at_work.where(_is_proven).subquery()))
_backlog = Prepared(BACKLOG)


def owner_of(connection: sa.Connection, node: NodeId) -> str:
    return str(_owner(connection, node=node).scalar_one())


def find_standing(connection: sa.Connection, owner: str) -> OwnerStanding:
    """Return an owner's standing; that of a new owner before the first claim."""
    row = _trust(connection, of=owner).first()
    return row.standing if row else OwnerStanding()


def put(connection: sa.Connection, owner: str, standing: OwnerStanding) -> None:
    _put(connection, of=owner, **{f"new_{name}": count for name, count in asdict(standing).items()})


def count(connection: sa.Connection, owner: str, groups: int) -> int:
    """Count an owner's next claim, for `groups` groups, and return its place."""
    place = _count(connection, of=owner, more=groups).scalar()
    if place is None:
        _begin(connection, owner=owner, accepted=1, **asdict(OwnerStanding(claims=groups)))
    return int(place or 1)


def count_claim(connection: sa.Connection, node: NodeId, groups: int) -> CountedClaim:
    """Count a node's next claim."""
    row = _enter(connection, node=node, more=groups).first()
    if row is None:
        owner = owner_of(connection, node)
        return CountedClaim(owner, count(connection, owner, groups), OwnerStanding(), backlog(connection))
    before = OwnerStanding(row.claims - groups, row.groups, row.soft, row.hard)
    return CountedClaim(row.owner, row.accepted, before, row.backlog)


def require_allowed(connection: sa.Connection, node: NodeId) -> None:
    """Refuse the nodes of a banned owner, and one that was banned before it had another."""
    row = _banned(connection, node=node).first()
    if row is None:
        return
    given = orders.standing_ban(connection, row.owner)
    why = (
        f"The operator has banned this node's owner: {given['reason']}."
        if given
        else f"Audits found {row.hard} rollouts that the claimed version and seed do not make: no more leases."
        if row.hard
        else "This node's owner is banned."
    )
    hint = "`swarm-node why` shows what it took and why, and `swarm-node appeal` asks the operator to look again."
    raise OwnerBanned(why, hint=hint)


def ban(connection: sa.Connection, owner: str, now_ms: int) -> bool:
    """Record that an owner is banned from now on; return False if the owner was banned before."""
    if not connection.execute(sa.select(trust.c.owner).where(trust.c.owner == owner)).first():
        connection.execute(sa.insert(trust).values(owner=owner, accepted=0, **asdict(OwnerStanding())))
    stmt = sa.update(trust).where(trust.c.owner == owner, trust.c.banned_ms.is_(None))
    return bool(connection.execute(stmt.values(banned_ms=now_ms)).rowcount)


def note_fault(connection: sa.Connection, owner: str, claim_id: str, before: OwnerStanding, now_ms: int) -> None:
    """Record a hard fault, with the counts that it takes from its owner's standing."""
    taken = {"claims": before.claims, "groups": before.groups}
    row = {"claim_id": claim_id, "owner": owner, "judged_ms": now_ms, "lifted": False, **taken}
    connection.execute(sa.insert(faults).values(**row))


def is_again(connection: sa.Connection, owner: str, claim_id: str) -> bool:
    """Return True if another hard fault of this owner stands on the same group, on a part of it or on the whole."""
    whole = partial_rollouts.whole_of(connection, claim_id)
    others = {whole, *partial_rollouts.parts_of(connection, [whole])} - {claim_id}
    which = (faults.c.owner == owner) & faults.c.claim_id.in_(others) & ~faults.c.lifted
    return connection.execute(sa.select(faults.c.number).where(which).limit(1)).first() is not None


def without_fault(connection: sa.Connection, claim_id: str) -> OwnerStanding:
    """Return an owner's standing as it would be without this hard fault."""
    row = _fault(connection, claim_id)
    later = _faults_after(connection, row)
    # The next fault took these counts, too. Faults expire all at once, so those that count are the last ones.
    before = OwnerStanding() if later else OwnerStanding(claims=row.claims, groups=row.groups)
    standing = find_standing(connection, row.owner)
    after = {partial_rollouts.whole_of(connection, fault.claim_id) for fault in later}
    counts = len(after) < standing.hard and not is_again(connection, row.owner, claim_id)
    return rules_of_trust.lifted(standing, before, counts=counts)


def lift_fault(connection: sa.Connection, claim_id: str) -> None:
    """Undo what a hard fault did to its owner's standing."""
    standing = without_fault(connection, claim_id)
    row = _fault(connection, claim_id)
    later = _faults_after(connection, row)
    put(connection, row.owner, standing)
    connection.execute(sa.update(faults).where(faults.c.number == row.number).values(lifted=True))
    if later:
        more = {"claims": faults.c.claims + row.claims, "groups": faults.c.groups + row.groups}
        connection.execute(sa.update(faults).where(faults.c.number == later[0].number).values(**more))


def _fault(connection: sa.Connection, claim_id: str) -> FaultRow:
    (row,) = read_rows(connection, sa.select(faults).where(faults.c.claim_id == claim_id), FaultRow)
    return row


def _faults_after(connection: sa.Connection, fault: FaultRow) -> list[FaultRow]:
    """Return the later faults of a fault's owner."""
    after = (faults.c.owner == fault.owner) & (faults.c.number > fault.number) & ~faults.c.lifted
    return read_rows(connection, sa.select(faults).where(after).order_by(faults.c.number), FaultRow)


def banned_ms(connection: sa.Connection, owner: str) -> int | None:
    """Return since when an owner is banned; None if the owner is not."""
    row = _trust(connection, of=owner).first()
    return None if row is None else row.banned_ms


def unban(connection: sa.Connection, owner: str) -> None:
    """End a ban that was wrong; the owner's standing stays as before it."""
    connection.execute(sa.update(trust).where(trust.c.owner == owner).values(banned_ms=None))


def forgive(connection: sa.Connection, owner: str) -> bool:
    """Lift a ban; the owner's counts begin at 0, but hard faults stay, at most `FAULTS_TO_BAN - 1`."""
    stmt = sa.update(trust).where(trust.c.owner == owner, trust.c.banned_ms.is_not(None))
    most = rules_of_trust.FAULTS_TO_BAN - 1
    hard = sa.case((trust.c.hard > most, most), else_=trust.c.hard)
    return bool(connection.execute(stmt.values(banned_ms=None, claims=0, groups=0, hard=hard)).rowcount)


def banned_among(connection: sa.Connection, working: Sequence[NodeId]) -> list[str]:
    """Return the banned owners that answer for these nodes."""
    if not working:
        return []
    banned = _barred.where(nodes.c.node_id.in_(working))
    return sorted(set(connection.execute(banned).scalars()))


def backlog(connection: sa.Connection) -> int:
    """Return how many claims wait for an auditor: only the operator may see it until their epochs are revealed."""
    return int(_backlog(connection).scalar_one())


def oldest_waiting(connection: sa.Connection) -> int | None:
    """Return the oldest version under which a claim waits to be replayed, or is held until it can be judged."""
    return connection.execute(sa.select(sa.func.min(audits.c.version)).where(WAITS | HELD)).scalar()


def count_held_claims(connection: sa.Connection) -> dict[str, int]:
    """Count the claims that are held until a class is calibrated, by class."""
    rows = sa.select(audits.c.held_as, sa.func.count()).where(HELD).group_by(audits.c.held_as)
    return {name: int(count) for name, count in connection.execute(rows.order_by(audits.c.held_as))}


def at_work(connection: sa.Connection, owner: str) -> int:
    """Return how many groups of an owner are leased, wait for their next turn, or are accepted and not yet trained on.

    Groups that others finished count, too.
    """
    return sum(_at_work(connection, of=owner).single_row())


def share_of(connection: sa.Connection, groups: int, share: float, *, proven_only: bool) -> int:
    """Return how many of `groups` groups may be one owner's; all of them in a round of few owners, who would else wait.

    With `proven_only`, owners without a group that was found right are not counted: keys are free.
    """
    if share >= 1:
        return groups
    enough = ceil(SMALL_ROUND / share)
    at_work = _proven_at_work if proven_only else _owners_at_work
    few = at_work(connection, enough=enough).scalar_one() < enough
    return groups if few else max(1, int(share * groups))


def provenance(connection: sa.Connection, owner: str) -> list[dict[str, int]]:
    """Return the updates that an owner's groups, or parts of groups, went into, and the first version with each."""
    first = sa.select(sa.func.min(versions.c.version)).where(versions.c.policy_update >= rollouts.c.batch)
    query = (
        sa.select(
            rollouts.c.batch.label("update"),
            sa.func.count(rollouts.c.claim_id.distinct()).label("groups"),
            first.scalar_subquery().label("version"),
        )
        .outerjoin_from(audits, parts, parts.c.claim_id == audits.c.claim_id)
        .join(rollouts, rollouts.c.claim_id == sa.func.coalesce(parts.c.whole, audits.c.claim_id))
        .where(audits.c.owner == owner, rollouts.c.batch.is_not(None))
        .group_by(rollouts.c.batch)
        .order_by(rollouts.c.batch)
    )
    return [dict(row) for row in connection.execute(query).mappings()]


def list_standings(connection: sa.Connection, audit: AuditSection) -> list[dict[str, Any]]:
    """Return one row per owner: level, rate, faults and escrow."""
    escrow = {
        owner: EscrowSum(int(groups), int(micros))
        for owner, groups, micros in connection.execute(
            sa.select(audits.c.owner, sa.func.sum(audits.c.groups), sa.func.sum(claims_table.c.amount_micros))
            .join_from(audits, claims_table, claims_table.c.claim_id == audits.c.claim_id)
            .where(~audits.c.settled)
            .group_by(audits.c.owner)
        )
    }
    return [_shown(row, audit, escrow.get(row.owner, EscrowSum())) for row in _every(connection)]


def levels(connection: sa.Connection, audit: AuditSection) -> dict[str, Level]:
    """Return the trust level of each owner; owners without any claim are left out."""
    return {row.owner: rules_of_trust.level(row.standing, audit) for row in _every(connection)}


def _every(connection: sa.Connection) -> list[TrustRow]:
    return read_rows(connection, sa.select(trust).order_by(trust.c.owner), TrustRow)


def _shown(row: TrustRow, audit: AuditSection, escrow: EscrowSum) -> dict[str, Any]:
    standing = row.standing
    return {
        "owner": row.owner,
        "level": rules_of_trust.level(standing, audit),
        "rate": rules_of_trust.rate_ppm(standing, audit) / 1e6,
        "accepted_groups": row.accepted,
        "validated_groups": row.groups,
        "soft_faults": row.soft,
        "hard_faults": row.hard,
        "escrow_groups": escrow.groups,
        "escrow_micros": escrow.micros,
    }


def audited(connection: sa.Connection) -> dict[str, Any]:
    """Return the public figures of audits: the share of claims that were audited, the findings, and those that wait.

    Only claims of revealed epochs count as waiting: the count of all would show a node that reads it after each of its
    claims which of them were drawn.
    """
    findings = sa.select(audits.c.finding, sa.func.count()).group_by(audits.c.finding)
    by_finding = {finding: int(count) for finding, count in connection.execute(findings)}
    total = sum(by_finding.values())
    by_finding.pop(None, None)
    judged = sum(count for finding, count in by_finding.items() if finding != "pardon")
    revealed = WAITS & (audits.c.epoch == epochs.c.epoch) & (epochs.c.state == "over")
    waiting = sa.select(sa.func.count()).select_from(audits).join(epochs, revealed)
    unsettled = sa.select(sa.func.count()).select_from(audits).where(~audits.c.settled)
    return {
        "share": judged / total if total else 0.0,
        "waiting": connection.execute(waiting).scalar_one(),
        "verdicts": by_finding,
        "held": count_held_claims(connection),
        "unsettled": connection.execute(unsettled).scalar_one(),
    }
