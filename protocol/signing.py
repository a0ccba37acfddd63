"""Ed25519 signatures over canonical messages, separated by domain so that one can never pass for another.

- What is signed: `echo-swarm/1/<domain>` + a zero byte + the payload bytes.
- The type changes when the check passes: `bytes → Envelope → Signed`; only `open_envelope` makes a `Signed`.
- A node signs with the key that its node id names; there is no other binding to look up.
- A key of small order is refused: one signature under it fits any message, so it would prove nothing.
"""

from dataclasses import dataclass
from typing import Literal

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from protocol import ids, limits
from protocol.errors import BadSignature
from protocol.ids import NodeId
from protocol.message import Message

Domain = Literal["request", "rollout", "fragment", "receipt", "owner", "appeal"]

_SMALL_ORDER = frozenset(
    bytes.fromhex(text)
    for text in (
        "00" * 32,
        "01" + "00" * 31,
        "26e8958fc2b227b045c3f489f2ef98f0d5dfac05d3c63339b13802886d53fc05",
        "c7176a703d4dd84fba3c0b760d10670f2a2053fa2c39ccc64ec7fd7792ac037a",
        "ec" + "ff" * 30 + "7f",
        "ed" + "ff" * 30 + "7f",
        "ee" + "ff" * 30 + "7f",
    )
)
"""Every encoding of a point of order 1, 2, 4 or 8, without the sign bit: the list that libsodium refuses, too."""


class Envelope(Message):
    """A payload, who signs it, and the signature: not yet checked."""

    signer: str
    payload: bytes
    signature: bytes


@dataclass(frozen=True)
class Signed:
    """A payload whose signature was checked."""

    signer: NodeId
    payload: bytes


class NodeKey:
    """The private key of a node or an owner; it signs, and never shows itself in a repr or log."""

    def __init__(self, seed: bytes) -> None:
        self._key = Ed25519PrivateKey.from_private_bytes(seed)
        self.node_id = ids.node_id(self._key.public_key().public_bytes_raw())

    def __repr__(self) -> str:
        return f"NodeKey({self.node_id})"

    def seal(self, domain: Domain, payload: bytes) -> bytes:
        """The envelope bytes of a payload signed for one purpose."""
        signature = self._key.sign(_to_sign(domain, payload))
        return Envelope(signer=self.node_id, payload=payload, signature=signature).to_bytes()


def open_envelope(domain: Domain, data: bytes, *, max_bytes: int = limits.REQUEST_MAX_BYTES) -> Signed:
    """Check an envelope's form and signature."""
    envelope = Envelope.from_bytes(data, max_bytes=max_bytes)
    signer = NodeId(envelope.signer)
    point = ids.public_key(signer)
    if point[:31] + bytes([point[31] & 0x7F]) in _SMALL_ORDER:
        raise BadSignature(f"Anybody can sign for {signer[:16]}…: it is a key of small order.", hint="Make a new key.")
    key = Ed25519PublicKey.from_public_bytes(point)
    try:
        key.verify(envelope.signature, _to_sign(domain, envelope.payload))
    except InvalidSignature:
        raise BadSignature(f"The signature of this {domain} is not {signer[:16]}…'s.") from None
    return Signed(signer, envelope.payload)


def _to_sign(domain: Domain, payload: bytes) -> bytes:
    return b"echo-swarm/1/" + domain.encode() + b"\0" + payload
