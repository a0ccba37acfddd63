"""Statements of an owner: a node works for the owner, a node's key is revoked, or where the owner is paid.

An owner's key is an Ed25519 key that no node holds. A node's key can only work: a thief of it earns for the owner.

- A statement is an envelope of the domain `owner`; its signer is the owner.
- The owner numbers statements by the milliseconds of their clock: of two about an address, the higher number counts.
  The number is also the time at which the statement was made.
- A delegation and a revocation are valid in every round, and anybody may deliver them. A node's owner is chosen once,
  when the node sends a delegation with its registration; a revoked key never works again. An address is for one round.
- An address is `scheme:where` (`protocol.people.payout_addresses`).
"""

from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from protocol import limits
from protocol.errors import MalformedMessage
from protocol.ids import Hex64, NodeId
from protocol.people.payout_addresses import checked_address
from protocol.wire import canonical
from protocol.wire.message import Message
from protocol.wire.signing import NodeKey, open_envelope
from protocol.work.messages import PeerId

AMOUNT_BYTES = 32
"""The width of an amount in a leaf: the word size of the EVM."""


def payee_bytes(address: str) -> bytes:
    """Return the bytes that name a payee in a payout leaf: an EVM account's 20 bytes, or the text after the scheme."""
    scheme, _, where = address.partition(":")
    return bytes.fromhex(where[2:]) if scheme == "evm" else where.encode()


Address = Annotated[str, AfterValidator(checked_address)]
_Number = Annotated[int, Field(gt=0, le=limits.STATEMENT_NUMBER_MAX)]
_Moment = Annotated[int, Field(ge=0, le=limits.MOMENT_MAX_MS)]


class Delegation(Message):
    """A statement that the node works for the owner."""

    kind: Literal["delegation"] = "delegation"
    node_id: PeerId
    number: _Number


class Revocation(Message):
    """A statement that the node's key must never work again; the owner keeps what it has earned."""

    kind: Literal["revocation"] = "revocation"
    node_id: PeerId
    number: _Number


class PayoutAddress(Message):
    """A statement that the owner's earnings of this round are paid to this address."""

    kind: Literal["address"] = "address"
    round_id: Hex64
    address: Address
    number: _Number


Statement = Delegation | Revocation | PayoutAddress

_KINDS: dict[str, type[Statement]] = {
    "delegation": Delegation,
    "revocation": Revocation,
    "address": PayoutAddress,
}


class StatementReply(Message):
    """The answer to a statement: it is recorded, and when it takes effect; sending it again is harmless."""

    outcome: Literal["recorded", "already_recorded"]
    counts_from_ms: _Moment


class EarningsRequest(Message):
    """A node's request for the earnings of itself and of its owner's other nodes."""


class NodeEarnings(Message):
    """The earnings of one node by their state."""

    node_id: PeerId
    name: str
    pending_micros: int
    payable_micros: int
    paying_micros: int
    paid_micros: int
    revoked: bool


class Earnings(Message):
    """The earnings of all nodes of an owner, and the owner's payout address."""

    owner: PeerId
    nodes: tuple[NodeEarnings, ...] = Field(max_length=limits.EARNINGS_NODES_MAX)
    """The best earners, if there are more nodes than fit."""
    total: NodeEarnings
    """The sum over all nodes, under the owner's own id."""
    address: str
    """The address in use now; empty if there is none yet."""
    next_address: str
    next_from_ms: _Moment
    """The next address and when it takes effect; empty and 0 if none is planned."""


def seal_statement(key: NodeKey, statement: Statement) -> bytes:
    return key.seal("owner", statement.to_bytes())


def open_statement(data: bytes) -> tuple[NodeId, Statement]:
    """Check the size, form and signature of a statement; return its owner and the statement."""
    signed = open_envelope("owner", data, max_bytes=limits.STATEMENT_MAX_BYTES)
    value = canonical.decode(signed.payload, max_bytes=limits.STATEMENT_MAX_BYTES)
    kind = value.get("kind") if isinstance(value, dict) else None
    model = _KINDS.get(kind) if isinstance(kind, str) else None
    if model is None:
        raise MalformedMessage(f"{str(kind)[:40]!r} is not a kind of statement.")
    return signed.signer, model.from_bytes(signed.payload)
