"""Turns over real connections: some wait while somebody behind is served, for a while, and hear what they must."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from protocol import limits
from protocol.ids import ChunkId
from protocol.wire.frames import Cancel, Chunk, Reason, Reject, Want
from swarm_node.p2p.host import Host
from swarm_node.p2p.link import Link
from swarm_node.p2p.serve import ChunkServer, ServeLimits
from tests.swarm_node.p2p.test_serve import CHUNKS, DIAL_S, STALL_S, VERSION, answers
from tests.swarm_node.p2p_world import PATIENT_SECONDS, as_peer, make_version, node, store

pytestmark = pytest.mark.trio

BIG = make_version(chunk_count=1, chunk_size=limits.CHUNK_MAX_BYTES)
(BIG_CHUNK,) = BIG.chunks
"""More than a connection takes from the server unless its requester reads."""


class World:
    """A server that is sending large chunks to two nodes, one of which says that it is behind; neither reads yet."""

    def __init__(self, server: ChunkServer, host: Host, third: Host) -> None:
        self.server, self._host, self._third = server, host, third
        self.behind: Link
        self.in_step: Link
        self.waits: Link

    async def connect(self, me: Host) -> Link:
        return await me.connect(as_peer(self._host), dial_s=DIAL_S)

    async def fill(self, first: Host, second: Host) -> None:
        self.behind, self.in_step = await self.connect(first), await self.connect(second)
        for link, is_behind in ((self.behind, True), (self.in_step, False)):
            await link.send(Want(BIG_CHUNK, is_behind), stall_s=STALL_S)
        while len(self.server.takers) < 2:  # noqa: ASYNC110  # the server tells nobody when it begins to send
            await trio.sleep(0.01)
        self.waits = await self.connect(self._third)

    async def ask(self, *names: ChunkId) -> None:
        """The third node asks, and its WANTs have come to rest at the server."""
        for name in names:
            await self.waits.send(Want(name), stall_s=STALL_S)
        await settled()


async def settled() -> None:
    """Wait until what is on the way over loopback has arrived, and everybody waits."""
    for _ in range(20):
        await trio.sleep(0.01)  # the kernel's part is nothing that trio can wait for
        await wait_all_tasks_blocked()


@asynccontextmanager
async def crowded(folder: Path) -> AsyncIterator[World]:
    bounds = ServeLimits(turn_s=PATIENT_SECONDS, stall_s=PATIENT_SECONDS, news_s=PATIENT_SECONDS)
    server = ChunkServer(store(folder, VERSION.chunks | BIG.chunks), limits=bounds)
    async with node(1, server.handle) as host, node(2) as first, node(3) as second, node(4) as third:
        world = World(server, host, third)
        with trio.fail_after(PATIENT_SECONDS):
            await world.fill(first, second)
        yield world


def chunk(name: ChunkId) -> Chunk:
    return Chunk(name, VERSION.chunks[name])


async def test_half_of_the_others_wait_while_somebody_behind_is_served(tmp_path: Path) -> None:
    async with crowded(tmp_path) as world:
        await world.ask(CHUNKS[0])
        assert (len(world.server.takers), world.server.bytes_sent) == (2, 0)  # nobody else was begun
        assert await answers(world.behind, 1) == [Chunk(BIG_CHUNK, BIG.chunks[BIG_CHUNK])]
        assert await answers(world.waits, 1) == [chunk(CHUNKS[0])]


async def test_the_half_that_waits_follows_when_one_of_its_own_is_done(tmp_path: Path) -> None:
    async with crowded(tmp_path) as world:
        await world.ask(CHUNKS[0])
        assert await answers(world.in_step, 1) == [Chunk(BIG_CHUNK, BIG.chunks[BIG_CHUNK])]
        assert await answers(world.waits, 1) == [chunk(CHUNKS[0])]


async def test_nobody_waits_for_long_for_one_behind(tmp_path: Path) -> None:
    """A peer that is behind may be as slow as it likes."""
    async with crowded(tmp_path) as world:
        await world.ask(CHUNKS[0])
        assert await answers(world.waits, 1) == [chunk(CHUNKS[0])]


async def test_who_waits_for_its_turn_hears_at_once_that_a_want_is_taken_back_and_keeps_its_place(
    tmp_path: Path,
) -> None:
    async with crowded(tmp_path) as world:
        await world.ask(CHUNKS[0], CHUNKS[1])
        await world.waits.send(Cancel(CHUNKS[0]), stall_s=STALL_S)
        assert await answers(world.waits, 1) == [Reject(CHUNKS[0], Reason.CANCELLED)]
        assert await answers(world.behind, 1) == [Chunk(BIG_CHUNK, BIG.chunks[BIG_CHUNK])]
        assert await answers(world.waits, 1) == [chunk(CHUNKS[1])]


async def test_a_turn_dies_with_its_stream(tmp_path: Path) -> None:
    """The peer that is behind vanishes in the middle of its chunk, and who waits has taken everything back."""
    async with crowded(tmp_path) as world:
        await world.ask(CHUNKS[0])
        await world.waits.send(Cancel(CHUNKS[0]), stall_s=STALL_S)
        assert await answers(world.waits, 1) == [Reject(CHUNKS[0], Reason.CANCELLED)]
        await world.behind.abort()
        await world.in_step.abort()
        with trio.fail_after(PATIENT_SECONDS):
            while world.server.takers:  # noqa: ASYNC110  # the server tells nobody when it notices
                await trio.sleep(0.01)
        await settled()
        assert len(world.server.turns) == 0
