"""Appeals against faults and bans, and the operator's rulings, as effects.

    a claim is void ─▶ appeal (node or owner, signed) ─▶ open ─▶ ruling ─▶ denied
                                                                  └──────▶ granted ─▶ Reinstate for every claim taken

- One appeal covers every claim that one fault took, whichever of them it names: the claim at fault, the pledge, the
  window before it, and the claims voided by the ban that followed. If the operator's order banned the owner, the first
  claim that the ban took stands for the ban.
- A thief who holds a node's key may forge claims and then appeal badly. So until the ruling, the owner's appeal
  replaces the node's, and a revoked key cannot appeal. The log keeps the digest of the appeal that came first.
- Keys are free, and entries are for ever: the appeal of an owner who was never paid anything becomes an entry only with
  its ruling.
- A granted appeal pays each of these claims the voided amount out of the budget; the book allows that once, and only
  after a ruling that grants it. If the budget does not cover all of it, no ruling is recorded.
- The fault is lifted from its owner's standing. If too few faults are left for a ban, and no order of the operator's
  stands, the ban ends, and the claims that it took are paid, too.
- A rejection at intake took no money, and cannot be appealed: `swarm-node why` says what to correct.
- A ruling is final; the same one again changes nothing.
"""

from typing import Any, Literal, NamedTuple

import sqlalchemy as sa

from coordinator.config import AuditSection
from coordinator.rules import trust
from coordinator.store.rows import find_row, read_rows
from coordinator.store.tables import appeals, audits, faults, nodes
from coordinator.transactions import orders, owners, standings, tally
from coordinator.transactions.escrow import PROVEN
from ledger import entry, store
from ledger.accounts import BUDGET
from ledger.book import BookBroken, ClaimState, EntryOutcome
from ledger.tables import claims_table
from protocol import limits
from protocol.errors import BudgetExhausted, KeyRevoked, LeaseOfAnother, MessageTooLarge, NotFound
from protocol.ids import NodeId
from protocol.policy import chunks
from protocol.wire.signing import Envelope
from protocol.work.appeal import Appeal, AppealReply, Standing, open_appeal

Ruled = Literal["granted", "denied"]

SAID_MAX_CHARS = 300
"""The longest explanation of a ruling by the operator."""


class AppealRow(NamedTuple):
    """An appeal as it is stored."""

    number: int
    claim_id: str
    owner: str
    envelope: bytes
    made_ms: int
    state: Literal["open", "granted", "denied"]
    reason_code: str
    said: str
    ruled_by: str
    ruled_ms: int | None
    sequenced: bool


class AppealableClaim(NamedTuple):
    """A claim that was audited, with its state and worth in the ledger."""

    claim_id: str
    node_id: NodeId
    owner: str
    finding: str | None
    fault: str | None
    ban_ms: int | None
    groups: int
    place: int
    money: str
    amount_micros: int

    @property
    def was_taken(self) -> bool:
        """Return True if a fault or a ban took this claim, even if it was given back since."""
        return bool(self.finding == "hard" or self.fault or self.ban_ms is not None)


class AppealableBy(NamedTuple):
    """A claim that may be appealed about, and the owner who may do so."""

    claim: AppealableClaim
    owner_now: str


class GrantedAppeal(NamedTuple):
    """The void claims that a granted appeal pays, in order, and the ban that ends with it."""

    claims: list[AppealableClaim]
    ban_ms: int | None


class AppealStanding(NamedTuple):
    """The state of the appeal against the loss of a claim, and the ruling."""

    standing: Standing
    ruling: str


class SignedAppeal(NamedTuple):
    """The signer of an appeal, and what it says."""

    signer: str
    appeal: Appeal


_claims = sa.select(
    audits.c.claim_id, audits.c.node_id, audits.c.owner, audits.c.finding, audits.c.fault, audits.c.ban_ms,
    audits.c.groups, audits.c.place, claims_table.c.state.label("money"), claims_table.c.amount_micros,
).join_from(audits, claims_table, claims_table.c.claim_id == audits.c.claim_id)  # fmt: skip


def record_appeal(connection: sa.Connection, envelope: bytes, *, round_id: str, now_ms: int) -> AppealReply:
    """Record an appeal by the node concerned or its owner; a fault or ban has one appeal, for ever."""
    signer, said = open_appeal(envelope, round_id)
    row, owner_now = _appealable(connection, said.about, signer)
    claim_id = subject(connection, row)
    known = _about(connection, claim_id)
    if known is not None:
        if known.state != "open" or signer != owner_now or signer == _read(known.envelope).signer:
            return _reply("already_recorded", known)
        stmt = sa.update(appeals).where(appeals.c.number == known.number)
        connection.execute(stmt.values(envelope=envelope, made_ms=now_ms))
        return _reply("recorded", known)
    _require_room(connection, row.owner)
    earned = owners.has_earned(connection, owner_now)
    values = {"claim_id": claim_id, "owner": row.owner, "envelope": envelope, "made_ms": now_ms, "state": "open"}
    values["sequenced"] = earned
    if earned:
        _enter(connection, claim_id, envelope, now_ms)
    connection.execute(sa.insert(appeals).values(**values))
    recorded = _about(connection, claim_id)
    assert recorded is not None, "it was inserted here"
    return _reply("recorded", recorded)


def standing_of(connection: sa.Connection, claim_id: str) -> AppealStanding:
    """Return whether the loss of a claim may be appealed against, or how its appeal stands and why."""
    claim = find_row(connection, _claims.where(audits.c.claim_id == claim_id), AppealableClaim)
    if claim is None or not claim.was_taken:
        return AppealStanding("", "")
    known = _about(connection, subject(connection, claim))
    return AppealStanding(known.state, _ruling(known)) if known else AppealStanding("possible", "")


def _about(connection: sa.Connection, claim_id: str) -> AppealRow | None:
    """Return the appeal that is filed under a claim."""
    return find_row(connection, sa.select(appeals).where(appeals.c.claim_id == claim_id), AppealRow)


def subject(connection: sa.Connection, row: AppealableClaim) -> str:
    """Return the claim that an appeal is filed under: the one at fault, or the first that an ordered ban took."""
    if row.finding == "hard" or row.fault:
        return str(row.fault or row.claim_id)
    by = (faults.c.owner == row.owner) & (faults.c.judged_ms == row.ban_ms)
    fault = (
        connection.execute(sa.select(faults.c.claim_id).where(by).order_by(faults.c.number.desc())).scalars().first()
    )
    same = (audits.c.owner == row.owner) & (audits.c.ban_ms == row.ban_ms)
    first = sa.select(audits.c.claim_id).where(same).order_by(audits.c.place)
    return str(fault or connection.execute(first).scalars().first())


def listed(connection: sa.Connection) -> list[dict[str, Any]]:
    """Return all appeals: those that wait for a ruling first, the oldest of them first."""
    query = sa.select(appeals).order_by(appeals.c.state != "open", appeals.c.number)
    return [_document(row) for row in read_rows(connection, query, AppealRow)]


def appeal_report(connection: sa.Connection, number: int, audit: AuditSection) -> dict[str, Any]:
    """Return one appeal: its reason, the evidence, and what would be paid if it was granted."""
    row = _numbered(connection, number)
    report = sa.select(audits.c.report, audits.c.finding, audits.c.version).where(audits.c.claim_id == row.claim_id)
    audited = connection.execute(report).one()
    taken, ban = _taken(connection, row.claim_id, audit)
    return _document(row) | {
        "finding": audited.finding,
        "version": audited.version,
        "report": (audited.report or b"{}").decode(),
        "claims": [{"claim_id": claim.claim_id, "amount_micros": claim.amount_micros} for claim in taken],
        "amount_micros": sum(claim.amount_micros for claim in taken),
        "free_micros": _free_micros(connection),
        "ends_ban": ban is not None and ban == standings.banned_ms(connection, row.owner),
    }


def rule(
    connection: sa.Connection,
    number: int,
    outcome: Ruled,
    reason_code: str,
    said: str,
    *,
    given_by: str,
    audit: AuditSection,
    now_ms: int,
) -> dict[str, Any]:
    """Rule on an appeal, and return the appeal with what the ruling changed."""
    row = _numbered(connection, number)
    if row.state != "open":
        return _document(row) | {"changed": False, "reinstated_claims": 0, "reinstated_micros": 0}
    if not row.sequenced:
        _enter(connection, row.claim_id, row.envelope, now_ms)
    ruling = entry.RulingEntry(claim_id=row.claim_id, outcome=outcome, reason_code=reason_code)
    if store.append(connection, ruling, now_ms) is not EntryOutcome.APPLIED:
        raise BookBroken(f"Appeal {number} was ruled on in the log, and not in its table.")
    paid = _grant(connection, row, ruling, given_by, audit, now_ms) if outcome == "granted" else []
    values = {"state": outcome, "reason_code": reason_code, "said": said, "ruled_by": given_by, "ruled_ms": now_ms}
    values["sequenced"] = True
    connection.execute(sa.update(appeals).where(appeals.c.number == number).values(**values))
    sums = {"reinstated_claims": len(paid), "reinstated_micros": sum(claim.amount_micros for claim in paid)}
    return _document(_numbered(connection, number)) | {"changed": True} | sums


def _enter(connection: sa.Connection, claim_id: str, envelope: bytes, now_ms: int) -> None:
    """Append an appeal to the ledger."""
    made = entry.AppealEntry(claim_id=claim_id, statement_digest=chunks.digest(envelope))
    if store.append(connection, made, now_ms) is not EntryOutcome.APPLIED:
        raise BookBroken(f"An appeal about claim {claim_id} is in the log, and not as such in its table.")


def _grant(
    connection: sa.Connection,
    row: AppealRow,
    ruling: entry.RulingEntry,
    given_by: str,
    audit: AuditSection,
    now_ms: int,
) -> list[AppealableClaim]:
    """Lift the fault or ban that was appealed against, pay the claims that it took, and return them."""
    owner = row.owner
    paid, ban = _taken(connection, row.claim_id, audit)
    if _is_fault(connection, row.claim_id):
        standings.lift_fault(connection, row.claim_id)
    if ban is not None and ban == standings.banned_ms(connection, owner):
        standings.unban(connection, owner)
        reason = f"appeal {row.number} granted: {ruling.reason_code}"
        orders.record(connection, "unban", owner, reason, given_by=given_by, now_ms=now_ms)
    given = [
        entry.Reinstate(claim_id=claim.claim_id, appealed_claim_id=row.claim_id, reason_code=ruling.reason_code)
        for claim in paid
    ]
    if given:
        _pay(connection, given, sum(claim.amount_micros for claim in paid), now_ms)
        owners.sequence(connection, {claim.node_id for claim in paid}, now_ms)
        groups = sum(claim.groups for claim in paid if claim.finding not in PROVEN)  # a pledge's counted before
        standings.put(connection, owner, trust.validated(standings.find_standing(connection, owner), audit, groups))
    return paid


def _pay(connection: sa.Connection, given: list[entry.Reinstate], amount_micros: int, now_ms: int) -> None:
    if _free_micros(connection) < amount_micros:
        raise BudgetExhausted(
            "The appeal gives back more than the free part of the budget: nothing was ruled.",
            hint="`appeals show` has both amounts. Wait until leases end: what they do not use is free again.",
        )
    if set(store.append_all(connection, given, now_ms)) != {EntryOutcome.APPLIED}:
        raise BookBroken(f"A claim of the appeal about {given[0].appealed_claim_id} was paid before.")


def _free_micros(connection: sa.Connection) -> int:
    """Return the part of the budget that is not reserved for open leases."""
    return store.balance(connection, BUDGET) - tally.read(connection).reserved_micros


def _taken(connection: sa.Connection, claim_id: str, audit: AuditSection) -> GrantedAppeal:
    """Return what a granted appeal about `claim_id` would pay and end."""
    (row,) = read_rows(connection, _claims.where(audits.c.claim_id == claim_id), AppealableClaim)
    which = (audits.c.claim_id == claim_id) | (audits.c.fault == claim_id)
    if (ban := _ban_to_end(connection, row, audit)) is not None:
        which |= audits.c.ban_ms == ban
    mine = (audits.c.owner == row.owner) & (claims_table.c.state == ClaimState.VOIDED.value)
    return GrantedAppeal(
        read_rows(connection, _claims.where(which, mine).order_by(audits.c.place), AppealableClaim), ban
    )


def _ban_to_end(connection: sa.Connection, row: AppealableClaim, audit: AuditSection) -> int | None:
    """Return the ban that ends if the appeal is granted: one that rests on this fault, or one that is over by now."""
    if not _is_fault(connection, row.claim_id):
        return row.ban_ms
    stands = standings.banned_ms(connection, row.owner)
    ordered = orders.standing_ban(connection, row.owner) is not None
    left = standings.without_fault(connection, row.claim_id)
    if stands is not None and not ordered and trust.level(left, audit) != "banned":
        return stands
    brought = connection.execute(sa.select(faults.c.judged_ms).where(faults.c.claim_id == row.claim_id)).scalar()
    return None if brought == stands else brought


def _is_fault(connection: sa.Connection, claim_id: str) -> bool:
    return connection.execute(sa.select(faults.c.number).where(faults.c.claim_id == claim_id)).first() is not None


def _appealable(connection: sa.Connection, about: str, signer: NodeId) -> AppealableBy:
    """Return the claim that `about` names, if it is the signer's and a fault or ban took it, and its owner now."""
    which = (audits.c.lease_id == about) | (audits.c.claim_id == about)
    claim = find_row(connection, _claims.where(which), AppealableClaim)
    if claim is None:
        raise NotFound(
            "Nothing was credited for this lease or claim, so nothing was taken.",
            hint="`swarm-node why` says why an answer was refused; correct that, and the next one counts.",
        )
    columns = sa.select(nodes.c.owner, nodes.c.revoked_ms).where(nodes.c.node_id == claim.node_id)
    owner_now, revoked_ms = connection.execute(columns).one()
    if signer not in (claim.node_id, claim.owner, owner_now):
        raise LeaseOfAnother("The claim is another node's.", hint="Its own key appeals, or its owner's.")
    if signer == claim.node_id and revoked_ms is not None:
        raise KeyRevoked("The owner of this node has revoked its key.", hint="The owner appeals: `--owner-key`.")
    if not claim.was_taken:
        raise NotFound(f"This claim was not taken: it is {claim.money}.", hint="There is nothing to appeal.")
    return AppealableBy(claim, owner_now)


def _require_room(connection: sa.Connection, owner: str) -> None:
    count = sa.select(sa.func.count()).select_from(appeals).where(appeals.c.owner == owner)
    waiting = connection.execute(count.where(appeals.c.state == "open")).scalar_one()
    if waiting >= limits.APPEALS_OPEN_MAX:
        raise MessageTooLarge(
            f"{waiting} appeals of this owner wait for a ruling.", hint="Appeal again when they are ruled on."
        )
    if connection.execute(count).scalar_one() >= limits.APPEALS_MAX:
        raise MessageTooLarge(f"This owner has appealed {limits.APPEALS_MAX} times in this round.")


def _numbered(connection: sa.Connection, number: int) -> AppealRow:
    row = find_row(connection, sa.select(appeals).where(appeals.c.number == number), AppealRow)
    if row is None:
        raise NotFound(f"There is no appeal {number}.", hint="`swarm-coordinator appeals list` shows them.")
    return row


def _document(row: AppealRow) -> dict[str, Any]:
    signer, said = _read(row.envelope)
    return {
        "number": row.number,
        "claim_id": row.claim_id,
        "owner": row.owner,
        "signer": signer,
        "about": said.about,
        "reason": said.reason,
        "state": row.state,
        "made_ms": row.made_ms,
        "reason_code": row.reason_code,
        "said": row.said,
        "ruled_by": row.ruled_by,
        "ruled_ms": row.ruled_ms,
    }


def _read(envelope: bytes) -> SignedAppeal:
    kept = Envelope.from_bytes(envelope)
    return SignedAppeal(kept.signer, Appeal.from_bytes(kept.payload))


def _ruling(row: AppealRow) -> str:
    return f"{row.reason_code}: {row.said}" if row.said else str(row.reason_code)


def _reply(outcome: Literal["recorded", "already_recorded"], row: AppealRow) -> AppealReply:
    return AppealReply(
        outcome=outcome, number=row.number, claim_id=row.claim_id, standing=row.state, ruling=_ruling(row)
    )
