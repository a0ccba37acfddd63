"""Signed JSON: documents for static files that people read, too, such as a listing and a directory of rounds.

    {"signed": {…}, "signature": "<128 hex digits>", …}

- The signature covers the canonical JSON of `signed`, as TUF has it: keys in order, no spaces, no fractions. The
  domain separates it from all other signatures of the key (`protocol.wire.signing`).
- Only `signed` is covered: other members say how to find the key, and prove themselves.
- The size is checked before anything is parsed. Of a key that stands twice in an object the last value counts, here and
  in the bytes that are checked.
"""

import json
from collections.abc import Mapping
from typing import Any

from securesystemslib.exceptions import FormatError
from securesystemslib.formats import encode_canonical

from protocol.errors import MalformedMessage, MessageTooLarge
from protocol.ids import NodeId
from protocol.wire.signing import Domain, Envelope, NodeKey, check_envelope


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
