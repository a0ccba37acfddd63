"""The Noise handshake on a connection: a stranger who breaks it costs one message, and loses the connection."""

import sys
from collections.abc import Callable
from importlib.metadata import distribution
from types import FrameType
from typing import Any

import pytest
import trio
from libp2p.abc import ISecureTransport
from libp2p.connection_types import ConnectionType
from libp2p.crypto.ed25519 import create_new_key_pair
from libp2p.crypto.x25519 import create_new_key_pair as create_new_x25519_key_pair
from libp2p.network.connection.raw_connection import RawConnection
from libp2p.peer.id import ID
from libp2p.security.exceptions import HandshakeFailure
from libp2p.security.noise.transport import Transport
from trio.testing import memory_stream_pair

from protocol import limits
from swarm_node.p2p.noise import Noise, NoiseSession, WrongPeer
from swarm_node.p2p.noise_xx import NoiseBroken
from tests.swarm_node.muxed_world import Pipe
from tests.swarm_node.p2p_world import key

pytestmark = pytest.mark.trio

PAIRS = [create_new_key_pair(key(number)) for number in (1, 2)]
IDS = [ID.from_pubkey(pair.public_key) for pair in PAIRS]


def ours(side: int) -> ISecureTransport:
    return Noise(PAIRS[side])


def stock(side: int) -> ISecureTransport:
    return Transport(PAIRS[side], noise_privkey=create_new_x25519_key_pair().private_key)


def wire() -> tuple[list[Pipe], list[RawConnection]]:
    pipes = [Pipe(stream) for stream in memory_stream_pair()]
    return pipes, [RawConnection(pipe, side == 0, ConnectionType.DIRECT) for side, pipe in enumerate(pipes)]


async def shake_hands(dialer: ISecureTransport, listener: ISecureTransport, expected: ID = IDS[1]) -> list[Any]:
    _, raws = wire()
    sessions: list[Any] = [None, None]

    async def dial() -> None:
        sessions[0] = await dialer.secure_outbound(raws[0], expected)
        await sessions[0].write(b"sent with the last message")

    async def listen() -> None:
        sessions[1] = await listener.secure_inbound(raws[1])

    async with trio.open_nursery() as nursery:
        nursery.start_soon(dial)
        nursery.start_soon(listen)
    return sessions


@pytest.mark.parametrize(("dialer", "listener"), [(ours, ours), (ours, stock), (stock, ours)])
async def test_both_sides_know_each_other_and_lose_no_byte(
    dialer: Callable[[int], ISecureTransport], listener: Callable[[int], ISecureTransport]
) -> None:
    one, two = await shake_hands(dialer(0), listener(1))
    assert (one.get_remote_peer(), two.get_remote_peer()) == (IDS[1], IDS[0])
    assert await two.read(26) == b"sent with the last message"
    await two.write(b"answer")
    assert await one.read(6) == b"answer"


async def test_half_a_word_is_waited_for_and_not_looked_at_again_and_again() -> None:
    """A loop that never waits would stop the whole node, for any stranger who sends one byte of a word."""
    one, two = await shake_hands(ours(0), ours(1))
    await two.read(26)
    await one.write(b"half ")
    calls = 0

    def on_call(_frame: FrameType, event: str, _: Any) -> None:
        nonlocal calls
        calls += event == "call"
        if calls > 10_000:
            raise RecursionError("read() asks again and again for what is not there")

    sys.setprofile(on_call)
    try:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(one.write, b"word")
            assert await two.read(9) == b"half word"
    finally:
        sys.setprofile(None)


@pytest.mark.parametrize(("make", "runs_it"), [(ours, False), (stock, True)])
async def test_noiseprotocol_is_not_run(make: Callable[[int], ISecureTransport], runs_it: bool) -> None:
    folder, called = str(distribution("noiseprotocol").locate_file("noise")), set[str]()

    def on_call(frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(folder):
            called.add(frame.f_code.co_qualname)

    transports = make(0), make(1)
    sys.setprofile(on_call)
    try:
        one, two = await shake_hands(*transports)
        await two.read(26)
        await two.write(b"answer")
        await one.read(6)
    finally:
        sys.setprofile(None)
    assert bool(called) is runs_it, called


async def test_somebody_else_than_the_dialled_peer_is_refused_before_we_name_ourselves() -> None:
    pipes, raws = wire()
    failures: list[BaseException | None] = []

    async def dial() -> None:
        with pytest.raises(HandshakeFailure) as failure:
            await ours(0).secure_outbound(raws[0], IDS[0])
        failures.append(failure.value.__cause__)
        await pipes[0].close()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(dial)
        with pytest.raises(HandshakeFailure):
            await ours(1).secure_inbound(raws[1])
    assert [type(failure) for failure in failures] == [WrongPeer]


@pytest.mark.parametrize("size", [0, limits.HANDSHAKE_MESSAGE_MAX_BYTES + 1, 0xFFFF])
@pytest.mark.parametrize("role", ["inbound", "outbound"])
async def test_a_message_above_the_bound_is_refused_at_its_length(role: str, size: int) -> None:
    """Nothing behind the length is read, so nothing of it is held."""
    pipes, raws = wire()
    await pipes[1].write(size.to_bytes(2) + b"more")
    transport = ours(0)
    waiting = transport.secure_inbound(raws[0]) if role == "inbound" else transport.secure_outbound(raws[0], IDS[1])
    with pytest.raises(HandshakeFailure) as failure:
        await waiting
    assert isinstance(failure.value.__cause__, NoiseBroken)
    assert await pipes[0].read(100) == b"more"


@pytest.mark.parametrize("sent", [b"", b"\0", b"\0\x20" + bytes(31)])
async def test_who_hangs_up_in_the_handshake_is_a_failed_handshake(sent: bytes) -> None:
    pipes, raws = wire()
    await pipes[1].write(sent)
    await pipes[1].close()
    with pytest.raises(HandshakeFailure):
        await ours(0).secure_inbound(raws[0])


async def test_a_first_message_of_low_order_is_answered_by_nothing() -> None:
    pipes, raws = wire()
    await pipes[1].write(b"\0\x20" + bytes(32))
    with pytest.raises(HandshakeFailure) as failure:
        await ours(0).secure_inbound(raws[0])
    assert isinstance(failure.value.__cause__, NoiseBroken)
    await pipes[0].close()
    assert await pipes[1].read(100) == b""


async def test_the_keys_of_two_connections_have_nothing_in_common() -> None:
    dialer, listener = ours(0), ours(1)
    sealed = []
    for _ in range(2):
        one, _two = await shake_hands(dialer, listener)
        assert isinstance(one, NoiseSession)
        sealed.append(one._sealer.seal([bytes(32)]))
    assert sealed[0] != sealed[1]
