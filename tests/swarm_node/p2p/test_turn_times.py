"""Begins and ends of turns, on a mock clock: whoever has one takes its chunk, and whoever waits is not forgotten."""

import math
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import trio
from trio.testing import MockClock

from protocol import limits
from protocol.ids import ChunkId, NodeId
from protocol.policy.chunks import chunk_id
from protocol.wire.frames import Cancel, Chunk, Farewell, FrameReader, Message, Want
from swarm_node.chunks.arrivals import Arrivals
from swarm_node.p2p.link import Link, PeerStalled
from swarm_node.p2p.serve import ChunkServer, ServeLimits
from swarm_node.p2p.turns import FRESH_S
from tests.swarm_node.p2p_world import make_version, store

pytestmark = pytest.mark.trio

VERSION = make_version(chunk_count=8)
CHUNKS = list(VERSION.chunks)
ABSENT = chunk_id(b"absent")


class Paced(Link):
    """A link in memory: its other side says this at these times, and takes what it is sent in so many seconds."""

    def __init__(
        self, said: Sequence[tuple[float, Message]], *, place: str = "", small_s: float = 0.0, chunk_s: float = 0.0
    ) -> None:
        self.peer, self.neighbourhood, self.moved_at = NodeId(f"{id(self)}"), place, -math.inf
        self._said, self._pace_s = list(said), (small_s, chunk_s)
        self._bytes: Any = self
        self._taken = FrameReader()
        self.begun: list[tuple[float, Message]] = []
        """Messages that it was sent, and when each began."""

    async def receive(self) -> list[Message]:
        if not self._said:
            await trio.sleep_forever()
        at, message = self._said.pop(0)
        await trio.sleep_until(at)
        return [message]

    async def write(self, data: bytes) -> None:
        """A frame; those of these tests fit into a slice."""
        (message,) = self._taken.feed(data)
        self.begun.append((trio.current_time(), message))
        await trio.sleep(self._pace_s[isinstance(message, Chunk)])

    async def close(self, reason: Farewell = Farewell.DONE) -> None: ...
    async def abort(self) -> None: ...

    def chunks(self) -> list[tuple[float, ChunkId]]:
        return [(at, message.chunk) for at, message in self.begun if isinstance(message, Chunk)]


class Floods(Paced):
    """A peer that begins to ask and to take back, for ever, while its first chunk is on the way."""

    async def receive(self) -> list[Message]:
        if self._said:
            return await super().receive()
        await trio.sleep_until(self._pace_s[0] + 0.5)
        await trio.lowlevel.checkpoint()
        return [Want(ABSENT), Cancel(ABSENT)]


@asynccontextmanager
async def serving(folder: Path, turns: int, *links: Link) -> AsyncIterator[ChunkServer]:
    """All chunks came a moment ago, so no thread reads them."""
    arrivals = Arrivals()
    server = ChunkServer(store(folder, VERSION.chunks), arrivals, ServeLimits(turns=turns))

    async def handle(link: Link) -> None:
        with suppress(PeerStalled):
            await server.handle(link)

    with arrivals.expecting([ABSENT], ()):
        for chunk, data in VERSION.chunks.items():
            arrivals.arrived(chunk, data)
        async with trio.open_nursery() as nursery:
            for link in links:
                nursery.start_soon(handle, link)
            yield server
            nursery.cancel_scope.cancel()


@pytest.mark.parametrize("small_s", [0.05, 4.0], ids=["takes answers at once", "takes one in 4 s"])
async def test_a_requester_that_asks_and_takes_back_for_ever_keeps_no_turn(
    tmp_path: Path, autojump_clock: MockClock, small_s: float
) -> None:
    liar = Floods([(0.0, Want(CHUNKS[0])), (0.0, Want(CHUNKS[1]))], small_s=small_s, chunk_s=1.0)
    honest = Paced([(small_s + seconds, Want(CHUNKS[2])) for seconds in (1.5, 10.0)])
    async with serving(tmp_path, 1, liar, honest):
        await trio.sleep(30.0)
    assert honest.chunks()


async def test_a_requester_that_asks_and_takes_back_for_ever_is_told_of_that_between_its_chunks(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    liar = Floods([(0.0, Want(chunk)) for chunk in CHUNKS[:3]], small_s=0.01, chunk_s=1.0)
    async with serving(tmp_path, 1, liar):
        await trio.sleep(10.0)
    places = [place for place, (_, message) in enumerate(liar.begun) if isinstance(message, Chunk)]
    between = [after - before - 1 for before, after in pairwise(places)]
    assert between == [limits.EXCHANGE_WANTS_MAX] * 2


async def test_who_found_all_turns_taken_waits_no_longer_for_one_behind_when_one_gets_free(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    """Nothing else happens that could wake it."""
    brief = Paced([(0.0, Want(CHUNKS[0]))], chunk_s=0.5)
    in_step = Paced([(0.0, Want(CHUNKS[1]))], chunk_s=9.0)
    behind = Paced([(0.2, Want(CHUNKS[2], is_behind=True))], chunk_s=9.0)
    fourth = Paced([(0.25, Want(CHUNKS[3]))])
    async with serving(tmp_path, 3, brief, in_step, behind, fourth):
        await trio.sleep(8.0)
    assert fourth.chunks() == [(0.25 + FRESH_S, CHUNKS[3])]


async def test_one_address_gets_no_turn_before_another_that_has_fewer(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    holders = [Paced([(0.0, Want(CHUNKS[0]))], place="crowd", chunk_s=seconds) for seconds in (1.0, 4.0)]
    crowd = [Paced([(0.2, Want(CHUNKS[0]))], place="crowd", chunk_s=1.0) for _ in range(3)]
    alone = Paced([(0.5, Want(CHUNKS[0]))], place="elsewhere", chunk_s=1.0)
    async with serving(tmp_path, 2, *holders, *crowd, alone):
        await trio.sleep(3.5)
    assert alone.chunks() == [(1.0, CHUNKS[0])]
    assert sum(len(link.chunks()) for link in crowd) == 2


async def test_who_waited_for_its_turn_is_not_cut_off_for_that(tmp_path: Path, autojump_clock: MockClock) -> None:
    """A turn comes while a small answer is on the way, and somebody wants it at once."""
    asks: list[tuple[float, Message]] = [(1.0, Want(CHUNKS[0])), (10.0, Want(CHUNKS[1])), (10.1, Want(CHUNKS[2]))]
    patient = Paced([*asks, (10.5, Cancel(CHUNKS[2]))], small_s=1.0, chunk_s=1.0)
    before = Paced([(9.0, Want(CHUNKS[3]))], chunk_s=2.0)
    after = Paced([(11.2, Want(CHUNKS[4]))])
    async with serving(tmp_path, 1, patient, before, after):
        await trio.sleep(15.0)
    assert patient.chunks() == [(1.0, CHUNKS[0]), (11.5, CHUNKS[1])]
    assert after.chunks() == [(12.5, CHUNKS[4])]
