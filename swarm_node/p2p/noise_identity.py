"""The payload of a Noise handshake in libp2p: a node's identity key and its signature over the static key. No I/O.

    identity_key = 1    a public key of libp2p: type (1, Ed25519) and 32 bytes
    identity_sig = 2    of "noise-libp2p-static-key:" and the 32 bytes of the X25519 static key
    extensions   = 4    ignored, early data included; so is every unknown field

- Only Ed25519 is supported: a node's identity is that key, and its id is derived from it.
- Each of the two fields occurs once. A payload that repeats a field, or is cut short, is refused.
- libsodium checks the signature and refuses keys of small order, as `protocol.wire.signing` does.
"""

from collections.abc import Iterator

from nacl.exceptions import BadSignatureError
from nacl.exceptions import ValueError as WrongLength
from nacl.signing import VerifyKey

from swarm_node.p2p.noise_xx import KEY_BYTES, NoiseBroken

SIGNED_PREFIX = b"noise-libp2p-static-key:"
ED25519_PREFIX = b"\x08\x01\x12\x20"
"""Prefix of a public key as libp2p serialises it: type Ed25519, then 32 bytes."""

_IDENTITY_KEY, _IDENTITY_SIGNATURE = 1, 2
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_VARINT_MAX_BYTES = 10


def build_payload(identity: bytes, signature: bytes) -> bytes:
    """Return the payload of an Ed25519 public key and its signature over the static key."""
    key = ED25519_PREFIX + identity
    return bytes([_IDENTITY_KEY << 3 | _BYTES, len(key)]) + key + b"\x12" + bytes([len(signature)]) + signature


def verified_identity(payload: bytes, static: bytes) -> bytes:
    """Return the Ed25519 public key that signed this static key."""
    values: dict[int, bytes] = {}
    for number, value in _fields(payload):
        if number in (_IDENTITY_KEY, _IDENTITY_SIGNATURE):
            if number in values:
                raise NoiseBroken("The identity in the handshake is named twice.")
            values[number] = value
    key, signature = values.get(_IDENTITY_KEY, b""), values.get(_IDENTITY_SIGNATURE, b"")
    if len(key) != len(ED25519_PREFIX) + KEY_BYTES or not key.startswith(ED25519_PREFIX):
        raise NoiseBroken("The identity in the handshake is not an Ed25519 key.")
    identity = key.removeprefix(ED25519_PREFIX)
    try:
        VerifyKey(identity).verify(SIGNED_PREFIX + static, signature)
    except (BadSignatureError, WrongLength):
        raise NoiseBroken("The identity in the handshake has not signed the static key.") from None
    return identity


def _fields(data: bytes) -> Iterator[tuple[int, bytes]]:
    """Yield the number and the bytes of each field; the bytes are empty for fields of other types."""
    at = 0
    while at < len(data):
        tag, at = _varint(data, at)
        number, kind = tag >> 3, tag & 7
        if kind == _VARINT:
            start, (_, at) = at, _varint(data, at)
            size = 0
        elif kind == _BYTES:
            size, start = _varint(data, at)
        elif kind in (_FIXED64, _FIXED32):
            size, start = 8 if kind == _FIXED64 else 4, at
        else:
            raise NoiseBroken("The payload of the handshake is not a message of protobuf.")
        if kind != _VARINT:
            at = start + size
        if at > len(data) or not number:
            raise NoiseBroken("The payload of the handshake is cut short.")
        yield number, data[start : start + size] if kind == _BYTES else b""


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = 0
    for place in range(_VARINT_MAX_BYTES):
        if at + place >= len(data):
            break
        byte = data[at + place]
        value |= (byte & 0x7F) << 7 * place
        if byte < 0x80:
            return value, at + place + 1
    raise NoiseBroken("The payload of the handshake is cut short.")
