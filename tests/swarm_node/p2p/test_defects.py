"""The defects that made us leave stock py-libp2p, each shown on a stock host and cured on ours.

- The stock cases are expected to fail, strictly, and by the very words of their defect: when upstream mends one, its
  test here says so, and a test that breaks for any other reason is no proof.
"""

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
import trio
from libp2p import new_host
from libp2p.abc import INetStream
from libp2p.crypto.ed25519 import Ed25519PrivateKey, create_new_key_pair
from libp2p.crypto.keys import KeyPair, PublicKey
from libp2p.custom_types import TProtocol
from libp2p.network.exceptions import SwarmException
from libp2p.network.stream.exceptions import StreamReset
from libp2p.peer.id import ID
from libp2p.security.insecure.transport import PLAINTEXT_PROTOCOL_ID, InsecureTransport
from libp2p.stream_muxer.exceptions import MuxedStreamEOF, MuxedStreamError, MuxedStreamReset
from trio.testing import MockClock, wait_all_tasks_blocked

from swarm_node.p2p import workarounds
from swarm_node.p2p.yamux import TICK_S, YamuxConnection
from swarm_node.p2p.yamux_frames import INITIAL_WINDOW_BYTES, FrameKind, PeerSilent, pack
from swarm_node.p2p.yamux_machine import BODY_MAX_BYTES
from tests.swarm_node.muxed_world import PROTOCOL, close_all, face_to_face, host_of, info_of, stock_muxer
from tests.swarm_node.p2p_world import PATIENT_SECONDS, key

pytestmark = pytest.mark.trio


def both(defect: str, shown_by: type[BaseException], match: str) -> pytest.MarkDecorator:
    """Run on a stock host, which must show the defect by this error, and on ours, which must not."""
    error = pytest.RaisesGroup(pytest.RaisesExc(shown_by, match=match), flatten_subgroups=True)
    broken = pytest.mark.xfail(reason=f"stock: {defect}", strict=True, raises=error)
    return pytest.mark.parametrize("kind", [pytest.param("stock", marks=broken), "ours"])


MUXERS: dict[str, Callable[..., Any]] = {"stock": stock_muxer, "ours": YamuxConnection}


class ClaimedKey(Ed25519PrivateKey):
    """The key of one who says the public key of somebody else."""

    def __init__(self, own: Ed25519PrivateKey, claimed: PublicKey) -> None:
        super().__init__(own.impl)
        self._claimed = claimed

    def get_public_key(self) -> PublicKey:
        return self._claimed


@both("plaintext is offered, in which anyone may claim any key", AssertionError, "taken for the victim")
async def test_an_impostor_without_the_key_is_not_let_in(kind: str) -> None:
    victim = create_new_key_pair(key(65)).public_key
    own = create_new_key_pair(key(66)).private_key
    assert isinstance(own, Ed25519PrivateKey)
    pair = KeyPair(ClaimedKey(own, victim), victim)
    attacker: Any = new_host(key_pair=pair, sec_opt={PLAINTEXT_PROTOCOL_ID: InsecureTransport(pair)})
    async with host_of(kind, 1) as host, attacker.run([]):
        with trio.fail_after(PATIENT_SECONDS), suppress(SwarmException):
            await attacker.connect(info_of(host))
        taken_for = list(host.get_network().connections)
        await close_all(attacker)
        assert ID.from_pubkey(victim) not in taken_for, "taken for the victim"
        assert not taken_for


@both("an exception leaves the host's nursery", ValueError, "a bug in a handler")
async def test_a_handler_that_raises_does_not_end_the_host(kind: str) -> None:
    async def fail(stream: INetStream) -> None:
        await stream.read(1)  # else the reset may overtake the answer of the negotiation
        raise ValueError("a bug in a handler")

    async with host_of(kind, 1) as one, host_of("ours", 2) as two:
        guarded = workarounds.guard(fail) if kind == "ours" else fail  # as Host.serve does
        one.set_stream_handler(TProtocol(PROTOCOL), guarded)
        await two.connect(info_of(one))
        for _ in range(3):
            with trio.fail_after(PATIENT_SECONDS):
                stream = await two.new_stream(one.get_id(), [TProtocol(PROTOCOL)])
                await stream.write(b"!")
                with pytest.raises(StreamReset):
                    await stream.read()


@both("a slot is taken until the host ends", AssertionError, "^the host let 3 in and then nobody")
async def test_the_fourth_connection_of_a_lifetime_is_like_the_first(kind: str) -> None:
    """Stock allows `max_connections` less `min_connections`, 250 by default, in the life of a host."""
    let_in = 0
    async with host_of(kind, 1, connections_max=3) as host:
        for number in range(10, 16):
            async with host_of("ours", number) as other:
                with trio.fail_after(PATIENT_SECONDS), suppress(SwarmException):
                    await other.connect(info_of(host))
                    await (await other.new_stream(host.get_id(), [TProtocol("/ipfs/id/1.0.0")])).reset()
                    let_in += 1
        assert let_in == 6, f"the host let {let_in} in and then nobody"


@both("a connection that was cut reads like a clean end", AssertionError, "like a clean end")
async def test_a_truncated_transfer_does_not_look_complete(kind: str) -> None:
    async with face_to_face(MUXERS[kind], MUXERS[kind]) as (one, two):
        stream = await one.muxed.open_stream()
        other = await two.muxed.accept_stream()
        await stream.write(b"half of it")
        assert await other.read(10) == b"half of it"
        ends: list[Exception] = []

        async def read() -> None:
            try:
                await other.read(10)
            except (MuxedStreamReset, MuxedStreamEOF) as end:
                ends.append(end)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(read)
            await wait_all_tasks_blocked()
            await one.pipe.close()
        assert [type(end) for end in ends] != [MuxedStreamEOF], "like a clean end"
        assert [type(end) for end in ends] == [MuxedStreamReset]


@both("nothing notices that a peer is frozen", AssertionError, "hung for ever")
@pytest.mark.parametrize("use", ["read", "write"])
async def test_a_frozen_peer_hangs_neither_reader_nor_writer(kind: str, use: str, autojump_clock: MockClock) -> None:
    async with face_to_face(MUXERS[kind], MUXERS[kind]) as (one, two):
        stream = await one.muxed.open_stream()
        one.pipe.freeze()
        two.pipe.freeze()
        error: Exception | None = None
        with trio.move_on_after(24 * 3600):
            try:
                await (stream.read(10) if use == "read" else stream.write(bytes(2**21)))
            except Exception as raised:  # stock has several for a lost connection
                error = raised
        assert error, "hung for ever"
        assert trio.current_time() <= 3 * TICK_S + 1
        assert isinstance(error.__cause__, PeerSilent)


@both("a writer gives up when its reader pauses for five seconds", MuxedStreamError, "Timed out waiting")
async def test_a_reader_may_pause(kind: str, autojump_clock: MockClock) -> None:
    body = bytes(2**21)
    async with face_to_face(MUXERS[kind], MUXERS[kind]) as (one, two), trio.open_nursery() as nursery:
        stream = await one.muxed.open_stream()
        other = await two.muxed.accept_stream()
        nursery.start_soon(stream.write, body)
        await trio.sleep(8)
        got = 0
        while got < len(body):
            got += len(await other.read(2**20))


@both("what exceeds the receive window is kept", AssertionError, "beyond the window")
async def test_a_peer_that_ignores_flow_control_fills_no_memory(kind: str, autojump_clock: MockClock) -> None:
    """The sender is ours underneath and breaks its own rules; nobody reads, so the first window is never widened."""
    async with face_to_face(YamuxConnection, MUXERS[kind]) as (one, two):
        stream = await one.muxed.open_stream()
        other = await two.muxed.accept_stream()
        frame = pack(FrameKind.DATA, 0, stream.stream_id, BODY_MAX_BYTES) + bytes(BODY_MAX_BYTES)
        with suppress(trio.BrokenResourceError, trio.ClosedResourceError):
            for _ in range(2**23 // len(frame)):
                await one.muxed.secured_conn.send([frame])
                await wait_all_tasks_blocked()
        kept = 0
        with trio.move_on_after(1), suppress(MuxedStreamReset):
            while True:
                kept += len(await other.read(2**20))
        assert kept <= INITIAL_WINDOW_BYTES, f"{kept - INITIAL_WINDOW_BYTES} bytes beyond the window were kept"
        assert kept == INITIAL_WINDOW_BYTES // BODY_MAX_BYTES * BODY_MAX_BYTES
