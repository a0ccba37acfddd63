"""Days of coming and going, compressed: whatever peers do, what they cost is given back when they are gone.

- One host serves; others connect, use streams in every way there is, well and badly, and leave, well and badly.
- After the first rounds, which fill caches, nothing may grow: tasks, sockets, tables, budgets, objects, memory.
- `SOAK_ROUNDS` makes it longer: a round is about what a node of a small swarm sees in an hour.
"""

import gc
import os
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack, suppress
from functools import partial
from random import Random

import psutil
import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from protocol.errors import PeerFault
from protocol.policy.chunks import chunk_id
from protocol.wire.frames import Chunk, Want
from swarm_node.p2p.host import Host
from swarm_node.p2p.link import Link
from swarm_node.p2p.noise import NoiseSession
from swarm_node.p2p.yamux import YamuxConnection, YamuxStream
from swarm_node.p2p.yamux_stream import MuxLimits
from tests.swarm_node.muxed_world import face_to_face
from tests.swarm_node.p2p_world import PATIENT_SECONDS, as_peer, node

ROUNDS = int(os.environ.get("SOAK_ROUNDS", "12"))
WARM_UP_ROUNDS = 4
CLIENTS = 4
STREAMS = 2000
DATA = Random(1).randbytes(2**18)
NAME = chunk_id(DATA)
GROWTH_MAX_BYTES = 24 * 2**20
"""Leaking one chunk per stream would be eight times this."""


async def serve(link: Link) -> None:
    with suppress(PeerFault):
        while True:
            for _ in await link.receive():
                await link.send(Chunk(NAME, DATA), stall_s=PATIENT_SECONDS)


async def cleanly(link: Link) -> None:
    await link.send(Want(NAME), stall_s=PATIENT_SECONDS)
    while not await link.receive():
        pass
    await link.close()


async def resetting(link: Link) -> None:
    await link.send(Want(NAME), stall_s=PATIENT_SECONDS)
    await link.receive()
    await link.abort()


async def silently(link: Link) -> None:
    """Say nothing, and leave it open."""


async def without_reading(link: Link) -> None:
    for _ in range(3):
        await link.send(Want(NAME), stall_s=PATIENT_SECONDS)


async def cancelled(link: Link) -> None:
    with trio.CancelScope() as scope:
        scope.cancel()
        await link.send(Want(NAME), stall_s=PATIENT_SECONDS)


WAYS: tuple[Callable[[Link], Awaitable[None]], ...] = (cleanly, resetting, silently, without_reading, cancelled)


async def visit(client: Host, server: Host, rudely: bool) -> None:
    """One connection, streams of all kinds, and an end."""
    async with trio.open_nursery() as nursery:
        for way in 2 * WAYS:
            link = await client.connect(as_peer(server), dial_s=PATIENT_SECONDS)
            nursery.start_soon(use, way, link)
        if rudely:
            await server.disconnect(client.node_id)
    await client.disconnect(server.node_id)


async def use(way: Callable[[Link], Awaitable[None]], link: Link) -> None:
    with suppress(PeerFault):
        await way(link)


def footprint(server: Host) -> Counter[str]:
    """Return what must not grow."""
    gc.collect()
    alive = Counter(type(found).__name__ for found in gc.get_objects() if type(found) in _OURS)
    return alive + Counter(
        tasks=trio.lowlevel.current_statistics().tasks_living,
        descriptors=psutil.Process().num_fds(),
        connected=len(server.connected()),
        receive_budget=server.budget.left,
    )


_OURS = (NoiseSession, YamuxConnection, YamuxStream)


@pytest.mark.trio
async def test_visitors_leave_nothing_behind() -> None:
    async with AsyncExitStack() as stack:
        server = await stack.enter_async_context(node(1, serve))
        clients = [await stack.enter_async_context(node(10 + number)) for number in range(CLIENTS)]
        footprints: list[Counter[str]] = []
        memory: list[int] = []
        for number in range(ROUNDS):
            async with trio.open_nursery() as nursery:
                for client in clients:
                    nursery.start_soon(
                        lambda client, rudely: visit(client, server, rudely=rudely), client, number % 2 == 1
                    )
            with trio.fail_after(PATIENT_SECONDS):
                while server.connected():
                    await wait_all_tasks_blocked(0.01)
                await wait_all_tasks_blocked(0.15)  # libp2p lets a closed connection linger for 0.1 s
            if number in (WARM_UP_ROUNDS, ROUNDS - 1):
                footprints.append(footprint(server))
                memory.append(psutil.Process().memory_info().rss)
        assert footprints[0] == footprints[-1]
        assert memory[-1] - memory[0] < GROWTH_MAX_BYTES


@pytest.mark.trio
async def test_thousands_of_streams_on_one_connection_leave_nothing_behind() -> None:
    roomy = partial(YamuxConnection, mux_limits=MuxLimits(frames_per_tick=10**6))
    rng = Random(3)
    async with face_to_face(roomy, roomy) as ends:
        for _ in range(STREAMS):
            one, two = rng.sample(ends, 2)
            stream = await one.muxed.open_stream()
            other = await two.muxed.accept_stream()
            await stream.write(bytes(rng.randrange(1, 1000)))
            await other.read(rng.randrange(1, 1000))
            for end in rng.sample([stream, other], 2):
                await rng.choice([end.close, end.reset])()
        await wait_all_tasks_blocked()
        for end in ends:
            assert len(end.muxed.machine) == len(end.muxed.streams) == 0
            assert end.muxed.machine.budget.left == MuxLimits().receive_max_bytes
            assert end.muxed.broken is None
