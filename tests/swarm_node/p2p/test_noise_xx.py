"""The Noise XX handshake: the public vectors, and every message that a stranger may send in place of the right one.

The vectors of cacophony and snow were not made by this code; `noise_xx_refused.json` is our own list of attacks.
"""

import json
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from hypothesis import given
from hypothesis import strategies as st

from protocol import limits
from swarm_node.p2p.noise import NoiseSealer, Opener
from swarm_node.p2p.noise_xx import MESSAGES, TABLE, HandshakeStep, NoiseBroken, Role, XxHandshake

FOLDER = Path(__file__).parent
VECTORS = json.loads((FOLDER / "noise_xx_vectors.json").read_text())["vectors"]
REFUSED = json.loads((FOLDER / "noise_xx_refused.json").read_text())["refused"]
LOW_ORDER = sorted({bytes.fromhex(case["bytes"])[:32] for case in REFUSED if "low order" in case["attack"]})

Sides = tuple[XxHandshake, XxHandshake]


def private(number: int) -> X25519PrivateKey:
    return X25519PrivateKey.from_private_bytes(bytes([number] * 32))


def sides_of(vector: dict[str, Any]) -> Sides:
    def side(role: Role, name: str) -> XxHandshake:
        static, ephemeral, prologue = (
            bytes.fromhex(vector[f"{name}_{what}"]) for what in ("static", "ephemeral", "prologue")
        )
        return XxHandshake(
            role,
            X25519PrivateKey.from_private_bytes(static),
            ephemeral=X25519PrivateKey.from_private_bytes(ephemeral),
            prologue=prologue,
        )

    return side(Role.INITIATOR, "init"), side(Role.RESPONDER, "resp")


def fresh(*, prologues: tuple[bytes, bytes] = (b"", b"")) -> Sides:
    """Two sides with known static keys and new ephemeral ones."""
    return (
        XxHandshake(Role.INITIATOR, private(1), prologue=prologues[0]),
        XxHandshake(Role.RESPONDER, private(2), prologue=prologues[1]),
    )


def in_turns(sides: Sides) -> list[tuple[XxHandshake, XxHandshake]]:
    """The writer and the reader of each message."""
    initiator, responder = sides
    return [(initiator, responder), (responder, initiator), (initiator, responder)]


def refuses(use: Callable[[], object]) -> bool:
    try:
        use()
    except NoiseBroken:
        return True
    return False


@pytest.mark.parametrize("vector", VECTORS, ids=lambda vector: vector["source"])
def test_the_public_vectors_come_out_byte_for_byte(vector: dict[str, Any]) -> None:
    sides = sides_of(vector)
    messages = [(bytes.fromhex(m["payload"]), bytes.fromhex(m["ciphertext"])) for m in vector["messages"]]
    for (writer, reader), (payload, expected) in zip(in_turns(sides), messages, strict=False):
        assert writer.write(payload) == expected
        assert reader.read(expected) == payload
    initiator, responder = sides
    assert initiator.is_finished
    assert responder.is_finished
    assert initiator.hash == responder.hash
    assert "handshake_hash" not in vector or initiator.hash.hex() == vector["handshake_hash"]
    sealers = [NoiseSealer(side.keys[0], 0) for side in (responder, initiator)]
    openers = [Opener(side.keys[1], 0) for side in (initiator, responder)]
    for number, (payload, expected) in enumerate(messages[MESSAGES:]):
        sealed = sealers[number % 2].seal([payload])
        assert sealed == len(expected).to_bytes(2) + expected
        assert openers[number % 2].open(sealed) == [payload]


def test_each_side_learns_the_static_key_of_the_other() -> None:
    sides = fresh()
    for writer, reader in in_turns(sides):
        reader.read(writer.write())
    initiator, responder = sides
    assert initiator.remote_static == private(2).public_key().public_bytes_raw()
    assert responder.remote_static == private(1).public_key().public_bytes_raw()
    assert initiator.keys == responder.keys[::-1]


@pytest.mark.parametrize("case", REFUSED, ids=lambda case: f"{case['message']}, {case['attack']}")
def test_a_wrong_message_ends_the_handshake_for_good(case: dict[str, Any]) -> None:
    """A point of low order in the first message shows itself when the answer is written."""
    sides = sides_of(VECTORS[0])
    payloads = [bytes.fromhex(message["payload"]) for message in VECTORS[0]["messages"]]
    turns = in_turns(sides)
    for (writer, reader), payload in zip(turns[: case["message"] - 1], payloads, strict=False):
        reader.read(writer.write(payload))
    victim = turns[case["message"] - 1][1]

    def go_on() -> None:
        victim.read(bytes.fromhex(case["bytes"]))
        if case["message"] == 1:
            victim.write(payloads[1])

    with pytest.raises(NoiseBroken) as first:
        go_on()
    assert not victim.is_finished
    for use in (victim.read, victim.write):
        with pytest.raises(NoiseBroken) as again:
            use(b"")
        assert again.value is first.value


def test_every_step_that_the_table_does_not_list_is_a_mistake_of_the_caller() -> None:
    for role, passed, event in product(Role, range(MESSAGES + 1), HandshakeStep):
        sides = fresh()
        for writer, reader in in_turns(sides)[:passed]:
            reader.read(writer.write())
        side = sides[role is Role.RESPONDER]
        if (role, passed, event) not in TABLE:
            with pytest.raises(RuntimeError, match=f"must not {event.value} after {passed} messages"):
                (side.write if event is HandshakeStep.WRITE else side.read)(b"")
    assert len(TABLE) == 2 * MESSAGES


class LowOrderStatic:
    """A static key that is a point of low order, with which every shared secret is zero."""

    def __init__(self, point: bytes) -> None:
        self._point = point

    def public_key(self) -> "LowOrderStatic":
        return self

    def public_bytes_raw(self) -> bytes:
        return self._point

    def exchange(self, public: object) -> bytes:
        return bytes(32)


@pytest.mark.parametrize("role", Role)
@pytest.mark.parametrize("point", LOW_ORDER, ids=bytes.hex)
def test_a_static_key_of_low_order_proves_nothing_and_is_refused(role: Role, point: bytes) -> None:
    static: Any = LowOrderStatic(point)
    attacker = XxHandshake(role, static)
    victim = XxHandshake(Role.RESPONDER if role is Role.INITIATOR else Role.INITIATOR, private(2))
    sides = (attacker, victim) if role is Role.INITIATOR else (victim, attacker)

    def shake() -> None:
        for writer, reader in in_turns(sides):
            reader.read(writer.write())

    with pytest.raises(NoiseBroken, match="low order"):
        shake()


@given(st.data())
def test_a_changed_cut_or_longer_message_never_completes_a_handshake(data: st.DataObject) -> None:
    """A change of the first message is found out by the second, which covers the transcript."""
    turns, changed = in_turns(fresh()), data.draw(st.integers(0, MESSAGES - 1))
    kind = data.draw(st.sampled_from(["flip", "cut", "grow"]))

    def disturbed(message: bytes) -> bytes:
        if kind == "flip":
            bit = data.draw(st.integers(0, 8 * len(message) - 1))
            damaged = bytearray(message)
            damaged[bit // 8] ^= 1 << bit % 8
            return bytes(damaged)
        if kind == "cut":
            return message[: data.draw(st.integers(0, len(message) - 1))]
        return message + data.draw(st.binary(min_size=1, max_size=limits.HANDSHAKE_MESSAGE_MAX_BYTES))

    def shake() -> None:
        for number, (writer, reader) in enumerate(turns):
            message = writer.write(b"payload")
            reader.read(disturbed(message) if number == changed else message)

    assert refuses(shake)
    assert not all(side.is_finished for side in turns[0])


@given(st.lists(st.binary(max_size=200), min_size=2, max_size=2), st.sampled_from(Role))
def test_garbage_never_completes_a_handshake(garbage: list[bytes], role: Role) -> None:
    victim = XxHandshake(role, private(2))

    def shake() -> None:
        if role is Role.INITIATOR:
            victim.write()
            victim.read(garbage[0])
        else:
            victim.read(garbage[0])
            victim.write()
            victim.read(garbage[1])

    assert refuses(shake)


@given(st.integers(0, MESSAGES - 1), st.integers(0, MESSAGES - 1))
def test_a_message_of_another_handshake_does_not_fit_this_one(number: int, of_number: int) -> None:
    """A handshake with the same static keys; only the first message says nothing that hangs on the connection."""
    other = []
    for writer, reader in in_turns(fresh()):
        other.append(writer.write(b"payload"))
        reader.read(other[-1])

    def shake() -> None:
        for at, (writer, reader) in enumerate(in_turns(fresh())):
            message = writer.write(b"payload")
            reader.read(other[of_number] if at == number else message)

    assert refuses(shake)


def test_another_prologue_is_another_handshake() -> None:
    turns = in_turns(fresh(prologues=(b"one", b"two")))
    turns[0][1].read(turns[0][0].write())
    with pytest.raises(NoiseBroken, match="damaged or forged"):
        turns[1][1].read(turns[1][0].write())


def test_a_message_above_the_bound_is_refused_before_it_costs_anything() -> None:
    victim = XxHandshake(Role.RESPONDER, private(2))
    with pytest.raises(NoiseBroken, match="too long"):
        victim.read(bytes(limits.HANDSHAKE_MESSAGE_MAX_BYTES + 1))
