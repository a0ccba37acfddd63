"""Ed25519 signatures over canonical messages, separated by domain so that one is never valid as another.

- The signed bytes: `echo-swarm/1/<domain>` + a zero byte + the payload bytes.
- The type changes when the check passes: `bytes → Envelope → Signed`; only `check_envelope` makes a `Signed`.
- A node signs with the key that its node id names; there is no other binding to look up.
- libsodium checks them: in half of OpenSSL's time, and it refuses keys of small order, under which one signature fits
  any message and so proves nothing, and second spellings of a key or a signature.
"""

from dataclasses import dataclass
from typing import Literal

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from nacl.exceptions import BadSignatureError
from nacl.exceptions import ValueError as WrongLength
from nacl.signing import VerifyKey

from protocol import ids, limits
from protocol.breach import different
from protocol.errors import BadSignature
from protocol.ids import NodeId
from protocol.wire.message import Message

Domain = Literal["request", "rollout", "fragment", "receipt", "owner", "appeal", "listing", "directory", "witnessed"]


class Envelope(Message):
    """A payload, its signer and the signature: not yet checked."""

    signer: str
    payload: bytes
    signature: bytes


@dataclass(frozen=True)
class Signed:
    """A payload whose signature was checked."""

    signer: NodeId
    payload: bytes


class NodeKey:
    """The private key of a node or an owner; it signs, and never appears in a repr or log."""

    def __init__(self, seed: bytes) -> None:
        self._key = Ed25519PrivateKey.from_private_bytes(seed)
        self.node_id = ids.node_id(self._key.public_key().public_bytes_raw())

    def __repr__(self) -> str:
        return f"NodeKey({self.node_id})"

    def seal(self, domain: Domain, payload: bytes) -> bytes:
        """Return the envelope bytes of a payload that is signed for one domain."""
        signature = self._key.sign(to_sign(domain, payload))
        return Envelope(signer=self.node_id, payload=payload, signature=signature).to_bytes()


def open_envelope(domain: Domain, data: bytes, *, max_bytes: int = limits.REQUEST_MAX_BYTES) -> Signed:
    """Check an envelope's form and signature."""
    return check_envelope(domain, Envelope.from_bytes(data, max_bytes=max_bytes))


def check_envelope(domain: Domain, envelope: Envelope) -> Signed:
    """Check the signature of a decoded envelope."""
    signer = NodeId(envelope.signer)
    try:
        VerifyKey(ids.public_key(signer)).verify(to_sign(domain, envelope.payload), envelope.signature)
    except (BadSignatureError, WrongLength):
        raise BadSignature(
            f"The signature of this {domain} is not {signer[:16]}…'s.",
            breach=different(
                "signature", f"{signer}'s, of this {domain}", f"{envelope.signature.hex()[:32]}…, which is not"
            ),
        ) from None
    return Signed(signer, envelope.payload)


def to_sign(domain: Domain, payload: bytes) -> bytes:
    """Return the bytes that a signature of a payload covers; for keys that are not a `NodeKey`."""
    return b"echo-swarm/1/" + domain.encode() + b"\0" + payload
