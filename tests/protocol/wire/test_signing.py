"""Signed envelopes: only the signer's own bytes, for the purpose they were signed for, come out."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protocol import ids, limits
from protocol.errors import BadSignature, MalformedMessage, MessageTooLarge, SwarmError
from protocol.ids import NodeId
from protocol.wire.signing import Envelope, NodeKey, Signed, open_envelope

KEY, OTHER = NodeKey(b"a" * 32), NodeKey(b"b" * 32)

GROUP_ORDER = 2**252 + 27742317777372353535851937790883648493
FIELD_PRIME = 2**255 - 19
CURVE_D = -121665 * pow(121666, -1, FIELD_PRIME) % FIELD_PRIME

Point = tuple[int, int]


def add(left: Point, right: Point) -> Point:
    """The group law of the curve of Ed25519."""
    (x1, y1), (x2, y2) = left, right
    product = CURVE_D * x1 * x2 * y1 * y2
    x = (x1 * y2 + x2 * y1) * pow(1 + product, -1, FIELD_PRIME)
    y = (y1 * y2 + x1 * x2) * pow(1 - product, -1, FIELD_PRIME)
    return x % FIELD_PRIME, y % FIELD_PRIME


def recover(y: int) -> Point | None:
    """A point of the curve at this y, if there is one."""
    square = (y * y - 1) * pow(CURVE_D * y * y + 1, -1, FIELD_PRIME) % FIELD_PRIME
    x = pow(square, (FIELD_PRIME + 3) // 8, FIELD_PRIME)
    if (x * x - square) % FIELD_PRIME:
        x = x * pow(2, (FIELD_PRIME - 1) // 4, FIELD_PRIME) % FIELD_PRIME
    return None if (x * x - square) % FIELD_PRIME else (x, y)


def small_order_encodings() -> list[bytes]:
    """All 32-byte strings that decode to a point of order 1, 2, 4 or 8, found by arithmetic."""
    y = 2
    while (point := recover(y)) is None or len(torsion := multiples(times(GROUP_ORDER, point))) != 8:
        y += 1
    heights = {height for _, height in torsion}
    heights |= {height + FIELD_PRIME for height in heights if height + FIELD_PRIME < 2**255}
    return sorted((height | sign << 255).to_bytes(32, "little") for height in heights for sign in (0, 1))


def times(count: int, point: Point) -> Point:
    total: Point = (0, 1)
    while count:
        if count & 1:
            total = add(total, point)
        point = add(point, point)
        count >>= 1
    return total


def multiples(point: Point) -> set[Point]:
    return {times(count, point) for count in range(8)}


def sealed(signer: str, payload: bytes, signature: bytes) -> bytes:
    return Envelope(signer=signer, payload=payload, signature=signature).to_bytes()


@given(st.binary(min_size=32, max_size=32), st.binary(max_size=1000))
def test_an_envelope_gives_back_its_payload_and_signer(seed: bytes, payload: bytes) -> None:
    key = NodeKey(seed)
    assert open_envelope("rollout", key.seal("rollout", payload)) == Signed(key.node_id, payload)


def test_a_signed_rollout_is_no_signed_request() -> None:
    with pytest.raises(BadSignature):
        open_envelope("request", KEY.seal("rollout", b"payload"))
    with pytest.raises(BadSignature):
        open_envelope("rollout", KEY.seal("request", b"payload"))


def test_the_domain_cannot_be_shifted_into_the_payload() -> None:
    """The zero byte ends the domain: no other split of the signed bytes is a domain of ours."""
    envelope = Envelope.from_bytes(KEY.seal("rollout", b"x"))
    moved = sealed(KEY.node_id, b"rollout\0x", envelope.signature)
    for domain in ("request", "rollout"):
        with pytest.raises(BadSignature):
            open_envelope(domain, moved)


@settings(max_examples=200)
@given(st.data())
def test_a_flipped_bit_anywhere_is_noticed(data: st.DataObject) -> None:
    original = KEY.seal("rollout", b"some payload")
    bit = data.draw(st.integers(0, 8 * len(original) - 1))
    damaged = bytearray(original)
    damaged[bit // 8] ^= 1 << bit % 8
    with pytest.raises(SwarmError):
        open_envelope("rollout", bytes(damaged))


def test_a_rollout_under_anothers_name_is_refused() -> None:
    envelope = Envelope.from_bytes(KEY.seal("rollout", b"payload"))
    with pytest.raises(BadSignature):
        open_envelope("rollout", sealed(OTHER.node_id, envelope.payload, envelope.signature))


@pytest.mark.parametrize("length", [0, 1, 63, 65, 128, 100_000])
def test_a_signature_of_another_length_is_refused(length: int) -> None:
    with pytest.raises(BadSignature):
        open_envelope("rollout", sealed(KEY.node_id, b"payload", bytes(length)))


@pytest.mark.parametrize("signer", ["", "12D3KooW", "Qm" + "a" * 44, "é" * 52, KEY.node_id + "1", "\0" * 52])
def test_a_signer_that_is_no_key_is_refused(signer: str) -> None:
    with pytest.raises(MalformedMessage):
        open_envelope("rollout", sealed(signer, b"payload", bytes(64)))


def test_a_signature_cannot_be_bent_into_a_second_one() -> None:
    """S + L passes a careless check: then one rollout would have two envelopes."""
    envelope = Envelope.from_bytes(KEY.seal("rollout", b"payload"))
    bent = int.from_bytes(envelope.signature[32:], "little") + GROUP_ORDER
    with pytest.raises(BadSignature):
        open_envelope(
            "rollout", sealed(KEY.node_id, envelope.payload, envelope.signature[:32] + bent.to_bytes(32, "little"))
        )


def test_a_key_of_small_order_cannot_sign_for_everybody() -> None:
    """A message of any content fits such a key with R = identity, S = 0, so a node could deny whatever it signed."""
    identity = b"\x01" + bytes(31)
    points = small_order_encodings()
    assert len(points) == 14
    for point in points:
        with pytest.raises(BadSignature):
            open_envelope("rollout", sealed(ids.node_id(point), b"anything", identity + bytes(32)))


def test_a_huge_envelope_is_refused_by_its_size() -> None:
    with pytest.raises(MessageTooLarge):
        open_envelope("rollout", bytes(limits.REQUEST_MAX_BYTES + 1))


@given(st.binary(max_size=300))
def test_garbage_is_refused_by_name(data: bytes) -> None:
    with pytest.raises(SwarmError):
        open_envelope("rollout", data)


def test_a_private_key_does_not_show_itself() -> None:
    seed = b"a secret of thirty-two bytes !!!"
    shown = repr(NodeKey(seed)) + str(NodeKey(seed))
    assert "secret" not in shown
    assert seed.hex() not in shown
    assert NodeId(NodeKey(seed).node_id) in shown
