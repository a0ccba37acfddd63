"""The identity in a Noise handshake: who signed the static key, and everything that must not pass for that."""

from collections.abc import Callable

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from hypothesis import given
from hypothesis import strategies as st
from libp2p.crypto.ed25519 import create_new_key_pair
from libp2p.crypto.secp256k1 import create_new_key_pair as create_new_secp256k1_key_pair
from libp2p.crypto.x25519 import X25519PublicKey
from libp2p.security.noise.messages import (
    NoiseExtensions,
    NoiseHandshakePayload,
    make_handshake_payload_sig,
    verify_handshake_payload_sig,
)

from swarm_node.p2p.noise import ED25519_PREFIX, SIGNED_PREFIX, build_payload, verified_identity
from swarm_node.p2p.noise_xx import NoiseBroken

STATIC = bytes(range(32))
KEY = Ed25519PrivateKey.from_private_bytes(bytes([7] * 32))
IDENTITY = KEY.public_key().public_bytes_raw()
SIGNATURE = KEY.sign(SIGNED_PREFIX + STATIC)
PAYLOAD = build_payload(IDENTITY, SIGNATURE)


def field(number: int, value: bytes) -> bytes:
    assert len(value) < 0x80
    return bytes([number << 3 | 2, len(value)]) + value


def test_who_signed_the_static_key_is_known() -> None:
    assert verified_identity(PAYLOAD, STATIC) == IDENTITY


def test_stock_libp2p_accepts_ours_and_we_accept_stock_with_its_extensions() -> None:
    ours = NoiseHandshakePayload.deserialize(PAYLOAD)
    assert verify_handshake_payload_sig(ours, X25519PublicKey.from_bytes(STATIC))
    pair = create_new_key_pair(bytes([7] * 32))
    signature = make_handshake_payload_sig(pair.private_key, X25519PublicKey.from_bytes(STATIC))
    extensions = NoiseExtensions(
        webtransport_certhashes=[bytes(34)], stream_muxers=["/yamux/1.0.0"], early_data=b"early"
    )
    stock = NoiseHandshakePayload(pair.public_key, signature, extensions=extensions).serialize()
    assert len(stock) > len(PAYLOAD)
    assert verified_identity(stock, STATIC) == IDENTITY


@pytest.mark.parametrize(
    "more",
    [field(4, b"\x12\x05early"), field(9, b"x"), b"\x48\x96\x01", b"\x49" + bytes(8), b"\x4d" + bytes(4)],
    ids=["extensions", "bytes", "varint", "64 bits", "32 bits"],
)
def test_early_data_and_unknown_fields_are_ignored(more: bytes) -> None:
    assert verified_identity(more + PAYLOAD, STATIC) == verified_identity(PAYLOAD + more, STATIC) == IDENTITY


def other_key() -> bytes:
    return create_new_secp256k1_key_pair(bytes([7] * 32)).public_key.serialize()


ATTACKS: dict[str, Callable[[], bytes]] = {
    "nothing": lambda: b"",
    "no signature": lambda: field(1, ED25519_PREFIX + IDENTITY),
    "no key": lambda: field(2, SIGNATURE),
    "an empty signature": lambda: build_payload(IDENTITY, b""),
    "the signature over another static key": lambda: build_payload(IDENTITY, KEY.sign(SIGNED_PREFIX + bytes(32))),
    "the signature without its prefix": lambda: build_payload(IDENTITY, KEY.sign(STATIC)),
    "another's key": lambda: build_payload(bytes([9] * 32), SIGNATURE),
    "a key of small order, under which one signature fits all": lambda: build_payload(
        b"\1" + bytes(31), b"\1" + bytes(63)
    ),
    "two keys": lambda: field(1, ED25519_PREFIX + IDENTITY) + PAYLOAD,
    "two signatures": lambda: PAYLOAD + field(2, SIGNATURE),
    "another kind of key": lambda: field(1, other_key()) + field(2, SIGNATURE),
    "a key with a byte behind it": lambda: field(1, ED25519_PREFIX + IDENTITY + b"\0") + field(2, SIGNATURE),
    "the second spelling of the key": lambda: field(1, b"\x12\x20" + IDENTITY + b"\x08\x01") + field(2, SIGNATURE),
    "a length beyond the end": lambda: PAYLOAD[:-1],
    "a length of 2**63": lambda: PAYLOAD + b"\x4a" + b"\x80" * 9 + b"\1",
    "a length without an end": lambda: PAYLOAD + b"\x4a" + b"\xff" * 20,
    "field 0": lambda: PAYLOAD + b"\x02\x00",
    "a group": lambda: PAYLOAD + b"\x4b",
}


@pytest.mark.parametrize("attack", ATTACKS)
def test_an_identity_that_is_not_proved_is_refused(attack: str) -> None:
    with pytest.raises(NoiseBroken):
        verified_identity(ATTACKS[attack](), STATIC)


@given(st.binary(max_size=300))
def test_garbage_is_refused_and_nothing_else_goes_wrong(garbage: bytes) -> None:
    with pytest.raises(NoiseBroken):
        verified_identity(garbage, STATIC)


@given(st.integers(0, 8 * len(PAYLOAD) - 1))
def test_a_changed_bit_names_nobody(bit: int) -> None:
    changed = bytearray(PAYLOAD)
    changed[bit // 8] ^= 1 << bit % 8
    with pytest.raises(NoiseBroken):
        verified_identity(bytes(changed), STATIC)


@given(st.integers(0, len(PAYLOAD) - 1))
def test_a_payload_that_is_cut_names_nobody(size: int) -> None:
    with pytest.raises(NoiseBroken):
        verified_identity(PAYLOAD[:size], STATIC)
