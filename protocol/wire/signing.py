"""Ed25519 signatures over canonical messages, separated by domain so that one is never valid as another.

- The signed bytes: `echo-swarm/1/<domain>` + a zero byte + the payload bytes.
- The type changes when the check passes: `bytes → Envelope → Signed`; only `check_envelope` makes a `Signed`.
- A node signs with the key that its node id names; there is no other binding to look up.
- libsodium checks them: in half of OpenSSL's time, and it refuses keys of small order, under which one signature fits
  any message and so proves nothing, and second spellings of a key or a signature.

Signed JSON is for static files that people read, too, such as a listing and a directory of rounds.

    {"signed": {…}, "signature": "<128 hex digits>", …}

- The signature covers the canonical JSON of `signed`, as TUF has it: keys in order, no spaces, no fractions.
- Only `signed` is covered: other members say how to find the key, and prove themselves.
- The size is checked before anything is parsed. Of a key that stands twice in an object the last value counts, here and
  in the bytes that are checked.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from nacl.exceptions import BadSignatureError
from nacl.exceptions import ValueError as WrongLength
from nacl.signing import VerifyKey
from securesystemslib.exceptions import FormatError
from securesystemslib.formats import encode_canonical

from protocol import ids, limits
from protocol.breach import different
from protocol.errors import BadSignature, MalformedMessage, MessageTooLarge
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


def canonical_json(value: Any) -> bytes:
    """Return the canonical JSON of a value; raise `MalformedMessage` if it contains something that has none."""
    try:
        return str(encode_canonical(value)).encode()
    except (FormatError, RecursionError, UnicodeEncodeError):
        raise MalformedMessage("The document contains a fraction, half a character, or too many levels.") from None


def read_object(data: bytes, max_bytes: int) -> dict[str, Any]:
    """Parse an object of untrusted JSON of at most `max_bytes`."""
    if len(data) > max_bytes:
        raise MessageTooLarge(f"The document has {len(data)} bytes; at most {max_bytes} are read.")
    try:
        value = json.loads(data)
    except (ValueError, RecursionError):
        raise MalformedMessage("The document is not JSON.") from None
    if not isinstance(value, dict):
        raise MalformedMessage("The document is not an object.")
    return value


def check_signed(domain: Domain, document: Mapping[str, Any], signer: NodeId) -> dict[str, Any]:
    """Return the `signed` part of a document, once the signature of `signer` is checked."""
    signed, signature = document.get("signed"), document.get("signature")
    if not isinstance(signed, dict) or not isinstance(signature, str) or len(signature) != 128:
        raise MalformedMessage(f"The {domain} is not signed.")
    try:
        raw = bytes.fromhex(signature)
    except ValueError:
        raise MalformedMessage(f"The signature of the {domain} is not hexadecimal.") from None
    check_envelope(domain, Envelope(signer=signer, payload=canonical_json(signed), signature=raw))
    return signed


def sign_json(domain: Domain, signed: dict[str, Any], key: NodeKey) -> dict[str, Any]:
    """Return a signed document."""
    envelope = Envelope.from_bytes(key.seal(domain, canonical_json(signed)))
    return {"signed": signed, "signature": envelope.signature.hex()}
