"""What an owner says: this node works for me, this node's key is revoked, pay me here.

An owner's key is an Ed25519 key that no node holds: a node's key can only work. Whoever steals one earns for the owner.

- A statement is an envelope of the domain `owner`; who signed it is the owner it speaks for.
- Statements are numbered by the owner, by the milliseconds of their clock: of two about an address, the higher number
  counts. The number says when it was made, too.
- A delegation and a revocation hold in every round, and may be delivered by anybody: a node's owner is chosen once, by
  the node sending a delegation as it registers, and a revoked key never works again. An address is for one round.
- An address is `scheme:where`. `evm:` is an account of an EVM chain, whose capitals are its checksum (EIP-55);
  `text:` is whatever a person who pays by hand understands.
"""

import re
from typing import Annotated, Literal

from Crypto.Hash import keccak
from pydantic import AfterValidator, Field

from protocol import limits
from protocol.errors import MalformedMessage
from protocol.ids import Hex64, NodeId
from protocol.wire import canonical
from protocol.wire.message import Message
from protocol.wire.signing import NodeKey, open_envelope
from protocol.work.messages import PeerId

_ADDRESS = re.compile(r"text:[!-~](?:[ -~]*[!-~])?|evm:0x[0-9a-fA-F]{40}")

AMOUNT_BYTES = 32
"""Of an amount in a leaf: what an EVM computes with."""


def checked_address(address: str) -> str:
    """The address, if somebody could be paid there."""
    if len(address) > limits.ADDRESS_MAX_CHARS or not _ADDRESS.fullmatch(address):
        raise ValueError("an address is evm:0x and 40 hex digits, or text: and printable ASCII")
    if address.startswith("evm:") and address != f"evm:{checksummed(address[4:])}":
        raise ValueError("the capitals of this evm: address are not its checksum (EIP-55): it is mistyped")
    return address


def checksummed(account: str) -> str:
    """An EVM account with the capitals that EIP-55 gives it."""
    digits = account.removeprefix("0x").lower()
    digest = keccak.new(digest_bits=256, data=digits.encode()).hexdigest()
    return "0x" + "".join(
        digit.upper() if int(sign, 16) >= 8 else digit for digit, sign in zip(digits, digest, strict=False)
    )


def payee_bytes(address: str) -> bytes:
    """How a leaf of a payout names a payee: an EVM account's 20 bytes, or the text."""
    scheme, _, where = address.partition(":")
    return bytes.fromhex(where[2:]) if scheme == "evm" else where.encode()


Address = Annotated[str, AfterValidator(checked_address)]
_Number = Annotated[int, Field(gt=0, le=limits.STATEMENT_NUMBER_MAX)]
_Moment = Annotated[int, Field(ge=0, le=limits.MOMENT_MAX_MS)]


class Delegation(Message):
    """This node works for me."""

    kind: Literal["delegation"] = "delegation"
    node_id: PeerId
    number: _Number


class Revocation(Message):
    """This node's key shall never work again; what it has earned stays mine."""

    kind: Literal["revocation"] = "revocation"
    node_id: PeerId
    number: _Number


class PayoutAddress(Message):
    """Pay what my nodes earn in this round to this address."""

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
    """A statement is recorded, and from when it counts; saying it again is harmless."""

    outcome: Literal["recorded", "already_recorded"]
    counts_from_ms: _Moment


class EarningsRequest(Message):
    """A node asks what it and its owner's other nodes have earned."""


class NodeEarnings(Message):
    """What one node has earned, by where it stands."""

    node_id: PeerId
    name: str
    pending_micros: int
    payable_micros: int
    paying_micros: int
    paid_micros: int
    revoked: bool


class Earnings(Message):
    """What all nodes of an owner have earned, and where the owner is paid."""

    owner: PeerId
    nodes: tuple[NodeEarnings, ...] = Field(max_length=limits.EARNINGS_NODES_MAX)
    """The best earners, where there are more."""
    total: NodeEarnings
    """Of all of them, under the owner's own id."""
    address: str
    """Where the owner is paid now; empty if nowhere yet."""
    next_address: str
    next_from_ms: _Moment
    """What the address will be, and from when; empty and 0 if nothing changes."""


def seal_statement(key: NodeKey, statement: Statement) -> bytes:
    return key.seal("owner", statement.to_bytes())


def open_statement(data: bytes) -> tuple[NodeId, Statement]:
    """Who says what, after size, form and signature."""
    signed = open_envelope("owner", data, max_bytes=limits.STATEMENT_MAX_BYTES)
    value = canonical.decode(signed.payload, max_bytes=limits.STATEMENT_MAX_BYTES)
    kind = value.get("kind") if isinstance(value, dict) else None
    model = _KINDS.get(kind) if isinstance(kind, str) else None
    if model is None:
        raise MalformedMessage(f"{str(kind)[:40]!r} is not a kind of statement.")
    return signed.signer, model.from_bytes(signed.payload)
