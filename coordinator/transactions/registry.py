"""Registration, heartbeats and single-use nonces of nodes, and the addresses at which others can dial them.

- A node that listens on every address does not know which of them others see; the coordinator sees the caller's.
- A loopback address is of use to nodes on the same machine only: it counts if coordinator and node share the machine.
- An address of a private network is of use to nodes in that network: it is left out where its node calls from the
  internet, since no other node dials such an address in a round on the internet.
- An address that nobody can dial, such as one with port 0 or a multicast address, is rejected: only a faulty or hostile
  node names it.
- Behind a proxy the caller's address is unknown, and the addresses that a node names are used as they are.
"""

from collections.abc import Sequence, Set
from typing import NamedTuple

import sqlalchemy as sa

from coordinator.store.tables import LEFT, fleet, is_alive, nodes, nonces, transfers, trust
from coordinator.transactions import naming, owners, standings
from ledger.prepared import Prepared
from protocol import limits
from protocol.breach import different
from protocol.errors import KeyRevoked, MalformedMessage, NonceReplayed, NotInvited, PriceTooHigh, UnknownNode
from protocol.ids import NodeId
from protocol.people.addresses import IP, host_and_port, ip_of, is_loopback_name, why_undialable
from protocol.text.money import CREDITS, Unit
from protocol.work.messages import Heartbeat, Register, Transfer


def dialable(addresses: Sequence[str], caller: str) -> list[str]:
    """Return the addresses that others may try, as `host:port`; an empty `caller` is unknown."""
    for address in addresses:
        if why := why_undialable(address):
            raise MalformedMessage(
                f"The address {address!r} cannot be dialled: {why}.",
                hint="Advertise a host:port that other nodes can reach, or none.",
                breach=different("addresses", "addresses that can be dialled", address),
            )
    reachable = dict.fromkeys(_seen(address, caller) for address in addresses)
    return [address for address in reachable if address]


def _seen(address: str, caller: str) -> str:
    host, port = host_and_port(address)
    said, seen = _ip(host), _ip(caller)
    if said is None:
        is_local = is_loopback_name(host)
    elif said.is_unspecified:
        return _at_caller(seen, port)
    else:
        is_local = said.is_loopback
    if is_local:
        return address if seen is None or seen.is_loopback else ""
    is_elsewhere = said is not None and seen is not None and seen.is_global and not said.is_global
    return "" if is_elsewhere else address


def _at_caller(seen: IP | None, port: int) -> str:
    """Return the caller's own address with this port; empty if it is unknown, or none that can be dialled."""
    if seen is None or seen.is_unspecified:
        return ""
    address = f"[{seen}]:{port}" if seen.version == 6 else f"{seen}:{port}"
    return "" if why_undialable(address) else address


def _ip(host: str) -> IP | None:
    """Return the IP address, with a mapped IPv6 address as IPv4; None for a host name."""
    try:
        return ip_of(host)
    except ValueError:
        return None


SESSIONS_MAX = 1000
"""Starts of one agent whose traffic is counted; the limit keeps a node that names new ones from filling the disk."""


class WorkerRow(NamedTuple):
    """A node that asks for work."""

    node_id: str
    owner: str
    price_micros_per_mtok: int
    revoked_ms: int | None
    paused_ms: int | None
    registered_ms: int
    lease_allowance: int | None
    works: bool
    is_banned: bool
    validated_groups: int
    held_claims: int


# Built once: making a statement costs more than running it, and these run for every request.
_spend = Prepared(sa.insert(nonces))
_revoked = Prepared(sa.select(nodes.c.revoked_ms).where(nodes.c.node_id == sa.bindparam("node")))
_worker = Prepared(
    sa.select(
        *(nodes.c.node_id, nodes.c.owner, nodes.c.price_micros_per_mtok, nodes.c.revoked_ms),
        *(nodes.c.paused_ms, nodes.c.registered_ms, nodes.c.lease_allowance),
        fleet.c.works.is_not(sa.false()).label("works"),  # before the first decision, a node may work
        sa.exists().where(standings.ANSWERS, trust.c.banned_ms.is_not(None)).label("is_banned"),
        standings.VALIDATED.label("validated_groups"),
        standings.HELD_CLAIMS.label("held_claims"),
    )
    .outerjoin_from(nodes, fleet, fleet.c.node_id == nodes.c.node_id)
    .where(nodes.c.node_id == sa.bindparam("node")),
    WorkerRow,
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
    """Record a nonce as used; refuse one that was used before."""
    try:
        _spend(connection, node_id=node, nonce=nonce, sent_ms=sent_ms)
    except sa.exc.IntegrityError:
        raise NonceReplayed(
            "This signed request was used before.",
            hint="Sign a new one for every attempt.",
            breach=different("nonce", "one that was not used before", nonce.hex()),
        ) from None


def forget_nonces(connection: sa.Connection, now_ms: int) -> None:
    """Delete nonces that are so old that the clock check refuses them."""
    connection.execute(sa.delete(nonces).where(nonces.c.sent_ms < now_ms - 2_000 * limits.CLOCK_SKEW_MAX_S))


def register(
    connection: sa.Connection,
    node: NodeId,
    message: Register,
    *,
    max_price: int,
    unit: Unit = CREDITS,
    invited: Set[NodeId] | None = None,
    caller: str = "",
    now_ms: int,
) -> None:
    """Add a node, or update its name, price and addresses; open leases keep their locked price.

    `caller` is the address that it called from, if that is known.
    """
    if invited is not None and node not in invited:
        raise NotInvited("This round samples on its own machine only.", hint="Look for another round to join.")
    if message.price_micros_per_mtok > max_price:
        raise PriceTooHigh(
            f"This round pays at most {unit.price(max_price)}, not {unit.exact(message.price_micros_per_mtok)}.",
            hint=f"Join with --price {max_price} ({unit.price(max_price)}) or less.",
        )
    values = {
        "price_micros_per_mtok": message.price_micros_per_mtok,
        "addresses": dialable(message.addresses, caller),
        "shares": message.shares,
        "last_seen_ms": now_ms,
    }
    phase = sa.case((nodes.c.phase == LEFT, "offline"), else_=nodes.c.phase)
    if not connection.execute(sa.update(nodes).where(nodes.c.node_id == node).values(**values, phase=phase)).rowcount:
        connection.execute(sa.insert(nodes).values(node_id=node, owner=node, name="", registered_ms=now_ms, **values))
    require_node(connection, node)
    if message.delegation is not None:
        owners.delegate(connection, node, message.delegation, now_ms=now_ms)
    naming.record_name(connection, node, message.name)


def require_node(connection: sa.Connection, node: NodeId) -> None:
    """Refuse a node that has not registered, or whose key was revoked."""
    row = _revoked(connection, node=node).first()
    if row is None:
        raise _unknown(node)
    _require_current_key(row[0], node)


def require_worker(connection: sa.Connection, node: NodeId) -> WorkerRow:
    """Return the row of a node that asks for work: owner, price, and whether it works, is on standby or is paused.

    Refuse a node that has not registered, whose key was revoked, or whose owner is banned.
    """
    row = _worker(connection, node=node).first()
    if row is None:
        raise _unknown(node)
    _require_current_key(row.revoked_ms, node)
    if row.is_banned:
        standings.require_allowed(connection, node)
    return row


def _unknown(node: NodeId) -> UnknownNode:
    return UnknownNode(
        "This node has not registered in this round.",
        hint="Join again: registering is the first step.",
        breach=different("signer", "a node that has registered", node),
    )


def _require_current_key(revoked_ms: int | None, node: NodeId) -> None:
    if revoked_ms is not None:
        raise KeyRevoked(
            "The owner of this node has revoked its key.",
            hint="Make a new one with `swarm-node keys rotate`.",
            breach=different("signer", "a key that its owner has not revoked", node),
        )


def is_any_revoked(connection: sa.Connection, working: Sequence[NodeId]) -> bool:
    """Return True if the key of any of these nodes was revoked."""
    if not working:
        return False
    which = nodes.c.node_id.in_(working) & nodes.c.revoked_ms.is_not(None)
    return connection.execute(sa.select(nodes.c.node_id).where(which).limit(1)).first() is not None


def heartbeat(connection: sa.Connection, node: NodeId, message: Heartbeat, *, now_ms: int) -> None:
    """Record a node's version, phase, speed and traffic."""
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
    """Return all but the first address of the live nodes that named more than one."""
    live = connection.execute(sa.select(nodes.c.node_id, nodes.c.addresses).where(is_alive(now_ms - silent_after_ms)))
    return {NodeId(node_id): tuple(addresses[1:]) for node_id, addresses in live if len(addresses) > 1}


def live_nodes(connection: sa.Connection, *, silent_after_ms: int, now_ms: int) -> dict[NodeId, str]:
    """Return the live nodes, each with its first address; empty if it cannot be dialled."""
    live = connection.execute(sa.select(nodes.c.node_id, nodes.c.addresses).where(is_alive(now_ms - silent_after_ms)))
    return {NodeId(node_id): addresses[0] if addresses else "" for node_id, addresses in live}
