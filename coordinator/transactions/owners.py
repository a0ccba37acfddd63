"""Owners: their nodes, revoked keys and payout addresses, by statements that are signed, numbered and in the ledger.

- A node belongs to itself until it sends a delegation; then to that owner for ever, with its earlier earnings.
- A banned owner gets no more nodes: a retraction leaves out the groups of those that they have.
- A ban stays with the banned key: a banned node that was its own owner keeps the ban under a new owner, and gets no
  work. Its work that was found right is paid to the owner, the rest is void; the owner's other nodes are not banned.
- A thief may hold a revoked key, so its leases end, and no node continues from its fragments of unfinished groups. Its
  submitted work stays the owner's, and is audited and paid as any other.
- An owner is known from the first node that works for them; before that, their statements are refused without a row.
- A new address counts after a delay. A newer statement restarts the delay, and until one delay has passed, the last
  address that counted still counts: so an owner whose key is stolen has that long to notice and to answer.
- So no address may be dated later than now, or nothing could follow it; and the last address that the limit allows
  never counts, or a thief would use up the others and set the last one.
- A statement that counts is a row with all its bytes. Keys are free, and entries are for ever: it becomes an entry of
  the ledger, by its digest, once the node that it names has earned something; for an address, any of the owner's nodes.
- The number of an owner's addresses per day is limited; it grows with the work that was found right.
- Before money is sent, an owner's address and nodes are compared with the log, which is public and signed: whoever can
  write to the tables alone cannot have another's earnings.
"""

from collections import defaultdict
from collections.abc import Collection
from datetime import UTC, datetime
from typing import Literal, NamedTuple

import sqlalchemy as sa

from coordinator.store.rows import read_rows
from coordinator.store.tables import leases, nodes, statements
from coordinator.transactions import leases as lease_table
from coordinator.transactions import naming, standings
from ledger import store
from ledger.accounts import OF_A_NODE, AccountKind
from ledger.book import BookBroken, EntryOutcome
from ledger.entry import OwnerAct
from ledger.prepared import Prepared
from ledger.tables import balances_table
from protocol import limits
from protocol.errors import (
    KeyRevoked,
    MalformedMessage,
    OwnerBanned,
    OwnerConflict,
    PayoutFailed,
    StatementStale,
    TooManyStatements,
    UnknownOwner,
    WrongAudience,
)
from protocol.ids import NodeId
from protocol.limits import DAY_MS
from protocol.people.owner import (
    Delegation,
    Earnings,
    NodeEarnings,
    PayoutAddress,
    Revocation,
    Statement,
    StatementReply,
    open_statement,
)
from protocol.people.payout_addresses import EXAMPLES
from protocol.policy import chunks

ADDRESS, DELEGATION = "address", "delegation"


class StatementRow(NamedTuple):
    """An owner's statement as it is stored."""

    owner: NodeId
    number: int
    kind: Literal["delegation", "revocation", "address"]
    address: str
    envelope: bytes
    received_ms: int
    counts_from_ms: int | None
    node_id: NodeId | None
    sequenced: bool


class OwnedNode(NamedTuple):
    """A node and its owner."""

    node_id: NodeId
    owner: str


# Built once: making a statement costs more than running it, and this one runs for every claim that is posted.
_earn_first = Prepared(
    sa.update(nodes)
    .where(nodes.c.node_id.in_(sa.bindparam("working", expanding=True)), ~nodes.c.earned)
    .values(earned=True)
    .returning(nodes.c.node_id, nodes.c.owner),
    OwnedNode,
)


def delegate(connection: sa.Connection, node: NodeId, envelope: bytes, *, now_ms: int) -> None:
    """Set a node's owner by its delegation; the same delegation again changes nothing."""
    owner, said = open_statement(envelope)
    if not isinstance(said, Delegation) or said.node_id != node:
        raise OwnerConflict("The delegation is for another node.", hint="Ask the owner for one with this node's id.")
    known = owner_of(connection, node)
    if known == owner:
        return
    if known != node:
        raise OwnerConflict(
            f"This node works for {known[-8:]}, not for {owner[-8:]}.", hint="Make a new key: `swarm-node keys rotate`."
        )
    if standings.banned_ms(connection, owner) is not None:
        raise OwnerBanned(
            f"The owner {owner[-8:]} is banned: no node can be delegated to them.",
            hint="`swarm-node appeal` asks the operator to look again; without --owner, the node works for itself.",
        )
    connection.execute(sa.update(nodes).where(nodes.c.node_id == node).values(owner=owner))
    _record(connection, owner, said, envelope, now_ms, counts_from_ms=now_ms)


def record_statement(
    connection: sa.Connection, envelope: bytes, *, round_id: str, scheme: str, delay_ms: int, now_ms: int
) -> StatementReply:
    """Record a revocation or an address; `scheme` is the prefix of addresses that this round pays to, empty for any."""
    owner, said = open_statement(envelope)
    _require_owner(connection, owner)
    which = (statements.c.owner == owner) & (statements.c.number == said.number)
    known = connection.execute(sa.select(statements).where(which)).first()
    if known is not None and known.envelope == envelope:
        return StatementReply(outcome="already_recorded", counts_from_ms=known.counts_from_ms or 0)
    counts_from_ms: int | None
    match said:
        case Revocation():
            if (revoked_ms := _revoked_ms(connection, owner, said.node_id)) is not None:
                return StatementReply(outcome="already_recorded", counts_from_ms=revoked_ms)
            connection.execute(sa.update(nodes).where(nodes.c.node_id == said.node_id).values(revoked_ms=now_ms))
            lease_table.take_away(connection, leases.c.node_id == said.node_id, KeyRevoked.code, now_ms)
            counts_from_ms = now_ms
        case PayoutAddress():
            counts_from_ms = _change_address(connection, owner, said, round_id, scheme, now_ms, delay_ms)
        case _:
            raise MalformedMessage(
                "A delegation is sent by the node that it is for.", hint="Join with --owner and the delegation's file."
            )
    _record(connection, owner, said, envelope, now_ms, counts_from_ms)
    return StatementReply(outcome="recorded", counts_from_ms=counts_from_ms or 0)


def sequence(connection: sa.Connection, working: Collection[NodeId], now_ms: int) -> None:
    """Append owners' statements to the ledger, and contest names, for nodes whose first claim was just posted."""
    first = _earn_first(connection, working=working)
    if not first:
        return
    about = statements.c.node_id.in_([row.node_id for row in first])
    _enter(connection, {row.owner for row in first}, about, now_ms)
    for row in first:
        naming.contest_name(connection, row.node_id)


def addresses_per_day(validated_groups: int) -> int:
    """Return how many addresses an owner with `validated_groups` may sign per day. Pure."""
    grown = limits.ADDRESSES_PER_DAY + validated_groups // limits.GROUPS_PER_ADDRESS
    return min(grown, limits.ADDRESSES_PER_DAY_MAX)


def has_earned(connection: sa.Connection, owner: str) -> bool:
    """Return True if a claim of any of an owner's nodes was posted."""
    stmt = sa.select(nodes.c.node_id).where(nodes.c.owner == owner, nodes.c.earned).limit(1)
    return connection.execute(stmt).first() is not None


def addresses(connection: sa.Connection, now_ms: int) -> dict[str, str]:
    """Return the address of each owner that has one that counts now."""
    counts = (statements.c.kind == ADDRESS) & (statements.c.counts_from_ms <= now_ms)
    rows = connection.execute(sa.select(statements.c.owner, statements.c.address).where(counts).order_by("number"))
    return {row.owner: row.address for row in rows}


def require_logged(connection: sa.Connection, owner: str, address: str, working: Collection[NodeId]) -> None:
    """Refuse to pay an owner unless the log has the statements that set this address and delegated these nodes."""
    delegated = (statements.c.kind == DELEGATION) & statements.c.node_id.in_(working)
    about = delegated | ((statements.c.kind == ADDRESS) & (statements.c.address == address))
    rows = read_rows(connection, sa.select(statements).where(statements.c.owner == owner, about), StatementRow)
    logged = [row for row in rows if _is_logged(connection, row)]
    if all(row.kind != ADDRESS for row in logged):
        raise PayoutFailed(f"The ledger does not have the address of owner {owner[-8:]} in the store.", hint=_ALTERED)
    if missing := {*working} - {owner} - {row.node_id for row in logged}:
        raise PayoutFailed(
            f"The ledger does not have {len(missing)} of the nodes of owner {owner[-8:]} in the store.", hint=_ALTERED
        )


_ALTERED = "Send no money: somebody may have altered the store. Compare it with a backup."


def _is_logged(connection: sa.Connection, row: StatementRow) -> bool:
    """Return True if the owner has signed what a row says, and the log has the digest of that."""
    act = store.find(connection, f"owner:{row.owner}:{row.number}")
    if act is None or not isinstance(act.entry, OwnerAct) or act.entry.statement_digest != chunks.digest(row.envelope):
        return False
    owner, said = open_statement(row.envelope)
    about = said.address == row.address if isinstance(said, PayoutAddress) else said.node_id == row.node_id
    return about and (owner, said.kind) == (row.owner, row.kind)


def owners_of(connection: sa.Connection) -> dict[str, str]:
    """Return the owner of every node."""
    return {row.node_id: row.owner for row in connection.execute(sa.select(nodes.c.node_id, nodes.c.owner))}


def earnings(connection: sa.Connection, node: NodeId, *, now_ms: int) -> Earnings:
    """Return the earnings of a node's owner by all nodes, and the owner's addresses."""
    owner = owner_of(connection, node)
    earned = _earned(connection, owner)
    rows = [
        NodeEarnings(
            node_id=row.node_id, name=row.name, revoked=row.revoked_ms is not None, **_NOTHING | earned[row.node_id]
        )
        for row in connection.execute(sa.select(nodes).where(nodes.c.owner == owner))
    ]
    rows.sort(key=lambda row: -sum(_amounts(row).values()))
    of_owner = (statements.c.owner == owner) & (statements.c.kind == ADDRESS)
    said = connection.execute(
        sa.select(statements.c.address, statements.c.counts_from_ms)
        .where(of_owner, statements.c.counts_from_ms.is_not(None))
        .order_by(statements.c.number)
    ).all()
    now = [row.address for row in said if row.counts_from_ms <= now_ms]
    later = [row for row in said if row.counts_from_ms > now_ms]
    sums = {name: sum(_amounts(row)[name] for row in rows) for name in _AMOUNTS}
    return Earnings(
        owner=owner,
        nodes=tuple(rows[: limits.EARNINGS_NODES_MAX]),
        total=NodeEarnings(node_id=owner, name="", revoked=False, **sums),
        address=now[-1] if now else "",
        next_address=later[-1].address if later else "",
        next_from_ms=later[-1].counts_from_ms if later else 0,
    )


_AMOUNTS = [f"{kind}_micros" for kind in AccountKind if kind in OF_A_NODE]
_NOTHING = dict.fromkeys(_AMOUNTS, 0)


def _amounts(row: NodeEarnings) -> dict[str, int]:
    return {name: getattr(row, name) for name in _AMOUNTS}


def _earned(connection: sa.Connection, owner: str) -> dict[str, dict[str, int]]:
    """Return the micro-units by node and account kind, for all nodes of an owner; one query per account kind."""
    earned: dict[str, dict[str, int]] = defaultdict(dict)
    for kind in OF_A_NODE:
        account = sa.literal(f"{kind}:") + nodes.c.node_id
        columns = sa.select(nodes.c.node_id, balances_table.c.micros)
        theirs = columns.join(balances_table, balances_table.c.account == account).where(nodes.c.owner == owner)
        for node, micros in connection.execute(theirs):
            earned[node][f"{kind}_micros"] = micros
    return earned


def owner_of(connection: sa.Connection, node: NodeId) -> NodeId:
    return NodeId(connection.execute(sa.select(nodes.c.owner).where(nodes.c.node_id == node)).scalar_one())


def _require_owner(connection: sa.Connection, owner: NodeId) -> None:
    mine = (nodes.c.owner == owner) & (nodes.c.node_id != owner)
    if connection.execute(sa.select(nodes.c.node_id).where(mine).limit(1)).first() is None:
        raise UnknownOwner(
            "No node works for this owner in this round.", hint="Join with a delegation first: `join --owner FILE`."
        )


def _revoked_ms(connection: sa.Connection, owner: NodeId, node: str) -> int | None:
    """Return since when a node of this owner is revoked; None if it is not."""
    mine = (nodes.c.node_id == node) & (nodes.c.owner == owner)
    row = connection.execute(sa.select(nodes.c.revoked_ms).where(mine)).first()
    if row is None:
        raise OwnerConflict("This node does not work for this owner.", hint="Its id is in `swarm-node keys show`.")
    revoked_ms: int | None = row.revoked_ms
    return revoked_ms


def _change_address(
    connection: sa.Connection,
    owner: NodeId,
    said: PayoutAddress,
    round_id: str,
    scheme: str,
    now_ms: int,
    delay_ms: int,
) -> int | None:
    """Check a new address, cancel waiting ones, and return when it counts; None for the last one of a day."""
    if said.round_id != round_id:
        raise WrongAudience("The address was signed for another round.", hint="Sign it with this round's join string.")
    if not said.address.startswith(scheme):
        raise MalformedMessage(
            f"This round pays to addresses that begin with {scheme}",
            hint=f"Sign one of these, such as {EXAMPLES[scheme.removesuffix(':')]}.",
        )
    if said.number > now_ms + 1_000 * limits.CLOCK_SKEW_MAX_S:  # no later statement of the owner could follow it
        raise StatementStale("The address was signed at a future time.", hint="Set the clock (NTP), and sign again.")
    of_owner = (statements.c.owner == owner) & (statements.c.kind == ADDRESS)
    last = connection.execute(sa.select(sa.func.max(statements.c.number)).where(of_owner)).scalar()
    if last is not None and said.number < last:
        raise StatementStale("The owner has signed a newer address.", hint="Sign it again to go back to this one.")
    is_last = _is_last_of_day(connection, owner, now_ms)
    waiting = of_owner & (statements.c.counts_from_ms > now_ms)
    connection.execute(sa.update(statements).where(waiting).values(counts_from_ms=None))
    return None if is_last else now_ms + delay_ms


def _is_last_of_day(connection: sa.Connection, owner: NodeId, now_ms: int) -> bool:
    """Return True if an owner's next address is the last that is accepted today; refuse one beyond that."""
    lately = (statements.c.owner == owner) & (statements.c.kind == ADDRESS)
    lately &= statements.c.received_ms > now_ms - DAY_MS
    count, oldest_ms = connection.execute(
        sa.select(sa.func.count(), sa.func.min(statements.c.received_ms)).where(lately)
    ).one()
    most = addresses_per_day(standings.find_standing(connection, owner).groups)
    if count >= most:
        again_ms = oldest_ms + DAY_MS
        again = datetime.fromtimestamp(again_ms / 1_000, UTC)
        raise TooManyStatements(
            f"This owner has signed {count} addresses in a day; at most {most} are accepted, more with validated work.",
            hint=f"Send it again after {again:%Y-%m-%d %H:%M} UTC.",
            retry_after_s=-(-(again_ms - now_ms) // 1_000),
        )
    return bool(count + 1 == most)


def _record(
    connection: sa.Connection, owner: NodeId, said: Statement, envelope: bytes, now_ms: int, counts_from_ms: int | None
) -> None:
    this = (statements.c.owner == owner) & (statements.c.number == said.number)
    if connection.execute(sa.select(statements.c.number).where(this)).first() is not None:
        raise StatementStale("The owner has signed another statement with this number.", hint="Sign it again.")
    about = None if isinstance(said, PayoutAddress) else NodeId(said.node_id)
    connection.execute(
        sa.insert(statements).values(
            owner=owner,
            number=said.number,
            kind=said.kind,
            address=said.address if isinstance(said, PayoutAddress) else "",
            envelope=envelope,
            received_ms=now_ms,
            counts_from_ms=counts_from_ms,
            node_id=about,
            sequenced=False,
        )
    )
    earned = sa.select(nodes.c.earned).where(nodes.c.node_id == about)
    if has_earned(connection, owner) if about is None else connection.execute(earned).scalar():
        _enter(connection, [owner], this, now_ms)


def _enter(connection: sa.Connection, of_owners: Collection[str], about: sa.ColumnElement[bool], now_ms: int) -> None:
    """Append the statements of owners that the ledger does not have: all addresses, and those that `about` selects."""
    missing = statements.c.owner.in_(of_owners) & ~statements.c.sequenced & ((statements.c.kind == ADDRESS) | about)
    waiting = sa.select(statements).where(missing).order_by(statements.c.owner, statements.c.number)
    for row in read_rows(connection, waiting, StatementRow):
        act = OwnerAct(
            owner=row.owner,
            number=row.number,
            act=row.kind,
            node_id=row.node_id,
            statement_digest=chunks.digest(row.envelope),
        )
        if store.append(connection, act, now_ms) is not EntryOutcome.APPLIED:
            raise BookBroken(f"Statement {row.number} of {row.owner} is in the log, and not as such in its table.")
        this = (statements.c.owner == row.owner) & (statements.c.number == row.number)
        connection.execute(sa.update(statements).where(this).values(sequenced=True))
