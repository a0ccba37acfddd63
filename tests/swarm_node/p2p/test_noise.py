"""The Noise session: framing and ciphers, however the bytes are cut, damaged or repeated."""

import os
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarm_node.p2p.noise import (
    PLAINTEXT_MAX_BYTES,
    UNSENT_MAX_BYTES,
    UNSENT_MIN_BYTES,
    NoiseSealer,
    Opener,
    SendPace,
)
from swarm_node.p2p.noise_xx import NoiseBroken

KEY = bytes(range(32))


def sealed(*plaintexts: bytes, nonce: int = 0) -> bytes:
    return NoiseSealer(KEY, nonce).seal(plaintexts)


@given(st.lists(st.binary(max_size=50) | st.just(bytes(PLAINTEXT_MAX_BYTES)), max_size=6), st.integers(1, 200_000))
def test_messages_arrive_whole_and_in_order_however_they_are_cut(plaintexts: list[bytes], size: int) -> None:
    wire, opener = sealed(*plaintexts), Opener(KEY, 0)
    size = max(size, len(wire) // 50)
    assert [got for at in range(0, len(wire), size) for got in opener.open(wire[at : at + size])] == plaintexts


def test_garbage_never_decrypts() -> None:
    """Messages of any length, told truly or not: bytes without a length that fits them are only waited for."""
    met: Counter[str] = Counter()
    told = st.tuples(st.binary(max_size=300), st.sampled_from([-1, 0, 0, 1, 0xFFFF]))
    messages = told.map(lambda drawn: min(max(len(drawn[0]) + drawn[1], 0), 0xFFFF).to_bytes(2) + drawn[0])

    @given(st.lists(messages, max_size=4).map(b"".join), st.integers(1, 300))
    def take(garbage: bytes, size: int) -> None:
        opener = Opener(KEY, 0)
        met["peers"] += 1
        try:
            for at in range(0, len(garbage), size):
                assert opener.open(garbage[at : at + size]) == []
        except NoiseBroken:
            met["refused"] += 1
            return
        assert len(opener._buffer) == len(garbage) <= 2 + 0xFFFF

    take()
    assert met["refused"] > met["peers"] / 4, met


@given(st.data())
def test_a_changed_bit_is_found_out(data: st.DataObject) -> None:
    wire = bytearray(sealed(b"pay alice", b"pay bob"))
    bit = data.draw(st.integers(0, 8 * len(wire) - 1))
    wire[bit // 8] ^= 1 << bit % 8
    opener = Opener(KEY, 0)
    try:
        opened = opener.open(bytes(wire))
    except NoiseBroken:
        return
    assert opened in ([], [b"pay alice"]), "a longer length waits for more, and nothing forged came out"


@pytest.mark.parametrize("order", [(0, 0), (1, 0), (1,), (0, 2)])
def test_repeated_reordered_and_dropped_messages_are_found_out(order: tuple[int, ...]) -> None:
    sealer = NoiseSealer(KEY, 0)
    messages = [sealer.seal([bytes([number])]) for number in range(3)]
    with pytest.raises(NoiseBroken, match="damaged, repeated or forged"):
        Opener(KEY, 0).open(b"".join(messages[number] for number in order))


def test_a_message_without_room_for_its_tag_is_refused() -> None:
    with pytest.raises(NoiseBroken):
        Opener(KEY, 0).open(b"\x00\x0f" + os.urandom(15))


def test_a_nonce_is_never_used_twice() -> None:
    last = 2**64 - 2
    wire = sealed(b"last", nonce=last)
    sealer = NoiseSealer(KEY, last)
    sealer.seal([b"last"])
    with pytest.raises(NoiseBroken, match="used up"):
        sealer.seal([b"one more"])
    opener = Opener(KEY, last)
    assert opener.open(wire) == [b"last"]
    with pytest.raises(NoiseBroken, match="used up"):
        opener.open(wire)


def test_what_is_missing_is_known_once_the_length_is_here() -> None:
    wire, opener = sealed(bytes(1000)), Opener(KEY, 0)
    assert opener.missing == 2
    opener.open(wire[:1])
    assert opener.missing == 1
    opener.open(wire[1:10])
    assert opener.missing == len(wire) - 10
    opener.open(wire[10:])
    assert opener.missing == 2


def paced(pace: SendPace, bytes_per_s: float, *, from_s: float = 0.0) -> int:
    """Return what is given ahead after two seconds of writing to a link of that pace."""
    write_s = 65_536 / bytes_per_s
    return [pace.write(65_536, from_s + number * write_s) for number in range(2 + int(2 / write_s))][-1]


@pytest.mark.parametrize(
    ("bytes_per_s", "unsent_bytes"),
    [(1e4, UNSENT_MIN_BYTES), (3e5, 16_384), (6e5, 32_768), (12.5e6, UNSENT_MAX_BYTES), (1e8, UNSENT_MAX_BYTES)],
)
def test_a_link_is_given_ahead_what_it_takes_in_a_moment(bytes_per_s: float, unsent_bytes: int) -> None:
    assert paced(SendPace(), bytes_per_s) == unsent_bytes


def test_a_queue_that_swallows_some_writes_at_once_is_not_taken_for_a_fast_link() -> None:
    pace = SendPace()
    bursts = [pace.write(16_384, second + number / 1e6) for second in range(5) for number in range(4)]
    assert set(bursts) == {UNSENT_MIN_BYTES}


def test_a_link_that_becomes_slow_is_given_less() -> None:
    pace = SendPace()
    assert paced(pace, 1e8) == UNSENT_MAX_BYTES
    assert paced(pace, 1e5, from_s=2.0) == UNSENT_MIN_BYTES
