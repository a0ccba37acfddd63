"""The defects that made us leave stock py-libp2p, each shown on a stock host and cured on ours.

- The stock cases are expected to fail, strictly: when upstream mends one, its test here says so.
- The receive window is in `test_yamux`, where a peer can be made to break it.
"""

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
import trio
from libp2p import new_host
from libp2p.abc import INetStream
from libp2p.crypto.ed25519 import create_new_key_pair
from libp2p.custom_types import TProtocol
from libp2p.network.exceptions import SwarmException
from libp2p.network.stream.exceptions import StreamReset
from libp2p.security.insecure.transport import PLAINTEXT_PROTOCOL_ID, InsecureTransport
from libp2p.stream_muxer.exceptions import MuxedStreamEOF, MuxedStreamError, MuxedStreamReset
from trio.testing import MockClock, wait_all_tasks_blocked

from swarm_node.p2p import workarounds
from swarm_node.p2p.yamux import TICK_S, YamuxConnection
from tests.swarm_node.muxed_world import PROTOCOL, close_all, face_to_face, host_of, info_of, stock_muxer
from tests.swarm_node.p2p_world import PATIENT_SECONDS, key

pytestmark = pytest.mark.trio


def both(defect: str, shown_by: type[BaseException]) -> pytest.MarkDecorator:
    """Run on a stock host, which must show the defect by this error, and on ours, which must not."""
    error = pytest.RaisesGroup(shown_by, flatten_subgroups=True)
    broken = pytest.mark.xfail(reason=f"stock: {defect}", strict=True, raises=error)
    return pytest.mark.parametrize("kind", [pytest.param("stock", marks=broken), "ours"])


MUXERS: dict[str, Callable[..., Any]] = {"stock": stock_muxer, "ours": YamuxConnection}


@both("plaintext is offered, in which anyone may claim any key", AssertionError)
async def test_an_impostor_without_the_key_is_not_let_in(kind: str) -> None:
    pair = create_new_key_pair(key(66))
    attacker: Any = new_host(key_pair=pair, sec_opt={PLAINTEXT_PROTOCOL_ID: InsecureTransport(pair)})
    async with host_of(kind, 1) as host, attacker.run([]):
        with trio.fail_after(PATIENT_SECONDS), suppress(SwarmException):
            await attacker.connect(info_of(host))
        let_in = bool(host.get_network().connections)
        await close_all(attacker)
        assert not let_in


@both("an exception leaves the host's nursery", ValueError)
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


@both("a slot is taken until the host ends", SwarmException)
async def test_the_fourth_connection_of_a_lifetime_is_like_the_first(kind: str) -> None:
    """Stock allows `max_connections` less `min_connections`, 250 by default, in the life of a host."""
    async with host_of(kind, 1, connections_max=3) as host:
        for number in range(10, 16):
            async with host_of("ours", number) as other:
                with trio.fail_after(PATIENT_SECONDS):
                    await other.connect(info_of(host))
                    await (await other.new_stream(host.get_id(), [TProtocol("/ipfs/id/1.0.0")])).reset()


@both("a connection that was cut reads like a clean end", MuxedStreamEOF)
async def test_a_truncated_transfer_does_not_look_complete(kind: str) -> None:
    async with face_to_face(MUXERS[kind], MUXERS[kind]) as (one, two):
        stream = await one.muxed.open_stream()
        other = await two.muxed.accept_stream()
        await stream.write(b"half of it")
        assert await other.read(10) == b"half of it"
        async with trio.open_nursery() as nursery:
            nursery.start_soon(read_and_break, other)
            await wait_all_tasks_blocked()
            await one.pipe.close()


async def read_and_break(stream: Any) -> None:
    with suppress(MuxedStreamReset):
        await stream.read(10)


@both("nothing notices that a peer is frozen", trio.TooSlowError)
async def test_a_frozen_peer_does_not_hang_its_reader(kind: str, autojump_clock: MockClock) -> None:
    async with face_to_face(MUXERS[kind], MUXERS[kind]) as (one, two):
        stream = await one.muxed.open_stream()
        one.pipe.freeze()
        two.pipe.freeze()
        with trio.fail_after(10 * TICK_S), pytest.raises(Exception, match="It did not even answer a ping"):
            await stream.read(10)


@both("a writer gives up when its reader pauses for five seconds", MuxedStreamError)
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
