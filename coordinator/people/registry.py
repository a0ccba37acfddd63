"""Who takes part: registration, heartbeats and single-use nonces, as effects."""

from collections.abc import Sequence, Set
from typing import Any

import sqlalchemy as sa

from coordinator.people import naming, owners, standings
from coordinator.people.dialable import dialable
from coordinator.store.tables import fleet, nodes, nonces, transfers, trust
from ledger.prepared import Prepared
from protocol import limits
from protocol.breach import different
from protocol.errors import KeyRevoked, NonceReplayed, NotInvited, PriceTooHigh, UnknownNode
from protocol.ids import NodeId
from protocol.messages import Heartbeat, Register, Transfer

SESSIONS_MAX = 1000
"""Starts of one agent whose traffic is counted; a node that names ever new ones fills no disk."""


# Built once: making a statement costs more than running it, and these run for every request.
_spend = Prepared(sa.insert(nonces))
_revoked = Prepared(sa.select(nodes.c.revoked_ms).where(nodes.c.node_id == sa.bindparam("node")))
_worker = Prepared(
    sa.select(
        *(nodes.c.node_id, nodes.c.owner, nodes.c.price_micros_per_mtok, nodes.c.revoked_ms),
        *(nodes.c.paused_ms, nodes.c.registered_ms, nodes.c.lease_allowance),
        fleet.c.works.is_not(sa.false()).label("works"),  # before anything was decided, a node may
        sa.exists().where(standings.ANSWERS, trust.c.banned_ms.is_not(None)).label("is_banned"),
        standings.VALIDATED.label("validated_groups"),
        standings.HELD_CLAIMS.label("held_claims"),
    )
    .outerjoin_from(nodes, fleet, fleet.c.node_id == nodes.c.node_id)
    .where(nodes.c.node_id == sa.bindparam("node"))
)
_beat = Prepared(
    sa.update(nodes)
    .where(nodes.c.node_id == sa.bindparam("node"), nodes.c.revoked_ms.is_(None))
    .values({name: sa.bindparam(f"new_{name}") for name in ("last_seen_ms", "version", "phase", "tokens_per_s")})
)
_moved = Prepared(
    sa.update(transfers)
    .where(transfers.c.node_id == sa.bindparam("node"), transfers.c.session == sa.bindparam("of"))
    .values({name: sa.bindparam(f"new_{name}") for name in Transfer.model_fields})
)
_sessions = Prepared(
    sa.select(sa.func.count()).select_from(transfers).where(transfers.c.node_id == sa.bindparam("node"))
)
_begin = Prepared(sa.insert(transfers))


def spend_nonce(connection: sa.Connection, node: NodeId, nonce: bytes, sent_ms: int) -> None:
    """Use a nonce up."""
    try:
        _spend(connection, node_id=node, nonce=nonce, sent_ms=sent_ms)
    except sa.exc.IntegrityError:
        raise NonceReplayed(
            "This signed request was used before.",
            hint="Sign a new one for every attempt.",
            breach=different("nonce", "one that was not used before", nonce.hex()),
        ) from None


def forget_nonces(connection: sa.Connection, now_ms: int) -> None:
    """Those that the clock check alone would refuse."""
    connection.execute(sa.delete(nonces).where(nonces.c.sent_ms < now_ms - 2_000 * limits.CLOCK_SKEW_MAX_S))


def register(
    connection: sa.Connection,
    node: NodeId,
    message: Register,
    *,
    max_price: int,
    invited: Set[NodeId] | None = None,
    caller: str = "",
    now_ms: int,
) -> None:
    """Add a node, or take over its new name, price and addresses; open leases keep the price they were given at.

    `caller` is the address that it called from, where that is known.
    """
    if invited is not None and node not in invited:
        raise NotInvited("This round samples on its own machine only.", hint="Look for another round to join.")
    if message.price_micros_per_mtok > max_price:
        raise PriceTooHigh(
            f"This round pays at most {max_price} micro-units per million tokens, not {message.price_micros_per_mtok}.",
            hint=f"Join with --price {max_price} or less.",
        )
    values = {
        "price_micros_per_mtok": message.price_micros_per_mtok,
        "addresses": dialable(message.addresses, caller),
        "shares": message.shares,
        "last_seen_ms": now_ms,
    }
    if not connection.execute(sa.update(nodes).where(nodes.c.node_id == node).values(**values)).rowcount:
        connection.execute(sa.insert(nodes).values(node_id=node, owner=node, name="", registered_ms=now_ms, **values))
    require_node(connection, node)
    if message.delegation is not None:
        owners.delegate(connection, node, message.delegation, now_ms=now_ms)
    naming.record_name(connection, node, message.name)


def require_node(connection: sa.Connection, node: NodeId) -> None:
    """Refuse a node that has not registered, or whose key was revoked."""
    _require(_revoked(connection, node=node).first(), node)


def require_worker(connection: sa.Connection, node: NodeId) -> Any:
    """The same of one that asks for work: its owner and price, whether it is wanted, stands by or is paused.

    Refused as well are the nodes of a banned owner.
    """
    row = _worker(connection, node=node).first()
    _require(row, node)
    if row.is_banned:
        standings.require_allowed(connection, node)
    return row


def _require(row: Any, node: NodeId) -> None:
    if row is None:
        raise UnknownNode(
            "This node has not registered in this round.",
            hint="Join again: registering is the first step.",
            breach=different("signer", "a node that has registered", node),
        )
    if row.revoked_ms is not None:
        raise KeyRevoked(
            "The owner of this node has revoked its key.",
            hint="Make a new one with `swarm-node keys rotate`.",
            breach=different("signer", "a key that its owner has not revoked", node),
        )


def is_any_revoked(connection: sa.Connection, working: Sequence[NodeId]) -> bool:
    """Whether the key of any of these nodes was revoked."""
    if not working:
        return False
    here = nodes.c.node_id.in_(working) & nodes.c.revoked_ms.is_not(None)
    return connection.execute(sa.select(nodes.c.node_id).where(here).limit(1)).first() is not None


def heartbeat(connection: sa.Connection, node: NodeId, message: Heartbeat, *, now_ms: int) -> None:
    """Record what a node holds, how fast it is and what it moved."""
    seen = {
        "new_last_seen_ms": now_ms,
        "new_version": message.version,
        "new_phase": message.phase,
        "new_tokens_per_s": message.tokens_per_s,
    }
    if not _beat(connection, node=node, **seen).rowcount:
        require_node(connection, node)
    moved = message.transfer.model_dump()
    counted = {f"new_{name}": count for name, count in moved.items()}
    if not _moved(connection, node=node, of=message.session, **counted).rowcount:
        _begin_session(connection, node, message.session, moved)


def _begin_session(connection: sa.Connection, node: NodeId, session: str, moved: dict[str, int]) -> None:
    if _sessions(connection, node=node).scalar() < SESSIONS_MAX:
        _begin(connection, node_id=node, session=session, **moved)


def further_addresses(connection: sa.Connection, *, silent_after_ms: int, now_ms: int) -> dict[NodeId, tuple[str, ...]]:
    """Where else nodes can be dialled, of those that were heard of lately and named more than one address."""
    live = connection.execute(
        sa.select(nodes.c.node_id, nodes.c.addresses).where(nodes.c.last_seen_ms >= now_ms - silent_after_ms)
    )
    return {NodeId(node_id): tuple(addresses[1:]) for node_id, addresses in live if len(addresses) > 1}


def live_nodes(connection: sa.Connection, *, silent_after_ms: int, now_ms: int) -> dict[NodeId, str]:
    """Where each node that was heard of lately can be dialled; an empty string if nowhere."""
    live = connection.execute(
        sa.select(nodes.c.node_id, nodes.c.addresses).where(nodes.c.last_seen_ms >= now_ms - silent_after_ms)
    )
    return {NodeId(node_id): addresses[0] if addresses else "" for node_id, addresses in live}
