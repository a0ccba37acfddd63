"""The waits of both sides of an exchange: for whoever is alive, and not for whoever is not."""

import math
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import trio
from libp2p.abc import INetStream
from trio.testing import MockClock, wait_all_tasks_blocked

from protocol.ids import ChunkId, NodeId
from protocol.wire.frames import Chunk, Farewell, Have, Message, Reason, Reject, Want
from protocol.wire.signing import NodeKey
from protocol.work.messages import Peer
from swarm_node.chunks.arrivals import Arrivals
from swarm_node.chunks.blobs import BlobStore
from swarm_node.p2p.fetch import ChunkRefused, Deadlines, Delivered, Outcome, Upstream, UpstreamFailed
from swarm_node.p2p.link import Link, PeerStalled
from swarm_node.p2p.serve import ChunkServer, ServeLimits, _Conversation
from tests.swarm_node.p2p_world import PATIENT_SECONDS, as_peer, honest, make_version, node, sizes_of, store

pytestmark = pytest.mark.trio

VERSION = make_version(chunk_count=8)
CHUNKS = list(VERSION.chunks)
PEER = Peer(peer_id=NodeKey(b"p" * 32).node_id, address="127.0.0.1:1", kind="peer")
PATIENCE_S = Deadlines().patience_s
DIAL_S = 5.0

Event = tuple[float, Message | ChunkId]
"""An event: the other side sends this after so many seconds; a bare name is the beginning of its chunk."""


class Scripted(Link):
    """A link in memory whose other side acts by a script, and then falls silent; what it is sent is kept."""

    def __init__(self, script: Sequence[Event]) -> None:
        self.peer, self.neighbourhood = NodeId(PEER.peer_id), ""
        self.sent: list[tuple[float, Message]] = []
        self._script = list(script)
        self._arriving: ChunkId | None = None

    @property
    def arriving(self) -> ChunkId | None:
        return self._arriving

    async def receive(self) -> list[Message]:
        if not self._script:
            await trio.sleep_forever()
        after_s, said = self._script.pop(0)
        await trio.sleep(after_s)
        self._arriving = said if isinstance(said, str) else None
        return [] if isinstance(said, str) else [said]

    async def send(self, message: Message, *, stall_s: float) -> None:
        await trio.lowlevel.checkpoint()
        self.sent.append((trio.current_time(), message))

    async def close(self, reason: Farewell = Farewell.DONE) -> None: ...
    async def abort(self) -> None: ...


class OneLink:
    """A host whose only peer is at the other end of this link."""

    def __init__(self, link: Link) -> None:
        self._link = link

    async def connect(self, peer: Peer, *, dial_s: float, chunk_max_bytes: int) -> Link:
        await trio.lowlevel.checkpoint()
        return self._link

    def part(self, link: Link, reason: Farewell) -> None: ...


def chunk(number: int) -> Chunk:
    return Chunk(CHUNKS[number], VERSION.chunks[CHUNKS[number]])


async def asked(folder: Path, script: Sequence[Event], wanted: int) -> list[tuple[float, Outcome]]:
    """Ask a peer of these manners for so many chunks at once; what came of each, or of the peer, and when."""
    host: Any = OneLink(Scripted(script))
    heard_in, heard = trio.open_memory_channel[Outcome](64)
    deadlines = Deadlines(store_s=math.inf)  # virtual time does not wait for the threads that write
    upstream = Upstream(host, PEER, store(folder), sizes_of(VERSION), heard_in, deadlines)
    started, found = trio.current_time(), list[tuple[float, Outcome]]()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(upstream.run)
        for name in CHUNKS[:wanted]:
            upstream.ask(name)
        while len(found) < wanted and not (found and isinstance(found[-1][1], UpstreamFailed)):
            news = await heard.receive()
            if isinstance(news, Delivered | ChunkRefused | UpstreamFailed):
                found.append((trio.current_time() - started, news))
        nursery.cancel_scope.cancel()
    return found


async def test_a_parent_that_passes_on_one_chunk_in_half_a_minute_is_not_given_up(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    """Four WANTs wait there from the beginning: chunks of 4 MiB, 16 stripes, a plan of 20 Mbit/s."""
    told = await asked(tmp_path, [(26.8, chunk(number)) for number in range(4)], wanted=4)
    assert [type(news) for _, news in told] == [Delivered] * 4


async def test_a_parent_that_says_again_and_again_that_it_still_waits_is_not_given_up(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    absent = [(30.0, Reject(name, Reason.ABSENT)) for name in CHUNKS[:3]]
    told = await asked(tmp_path, [*absent, (30.0, chunk(3))], wanted=4)
    assert [type(news) for _, news in told] == [ChunkRefused] * 3 + [Delivered]


@pytest.mark.parametrize(
    ("script", "given_up_at"),
    [
        ([], PATIENCE_S),
        ([(50.0, chunk(0))], 50.0 + PATIENCE_S),
        ([(50.0, chunk(0)), *[(9.0, Have((name,))) for name in CHUNKS]], 50.0 + PATIENCE_S),
        ([(50.0, CHUNKS[0]), *[(9.0, CHUNKS[0])] * 8], 50.0 + PATIENCE_S),
        ([(50.0, CHUNKS[5])], 50.0),
    ],
    ids=["says nothing", "falls silent", "tells what it holds", "drips a chunk", "begins what nobody wants"],
)
async def test_a_parent_that_owes_chunks_and_sends_none_is_given_up(
    tmp_path: Path, autojump_clock: MockClock, script: Sequence[Event], given_up_at: float
) -> None:
    told = await asked(tmp_path, script, wanted=4)
    at_s, last = told[-1]
    assert isinstance(last, UpstreamFailed)
    assert at_s == pytest.approx(given_up_at)


@asynccontextmanager
async def serving(blobs: BlobStore, arrivals: Arrivals, wants: Sequence[ChunkId]) -> AsyncIterator[Scripted]:
    """A conversation in which these are wanted at once."""
    link = Scripted([(0.0, Want(name)) for name in wants])
    async with trio.open_nursery() as nursery:
        nursery.start_soon(_Conversation(ChunkServer(blobs, arrivals, ServeLimits()), link).run)
        await wait_all_tasks_blocked()
        yield link
        nursery.cancel_scope.cancel()


def answers(link: Scripted) -> list[tuple[float, Message]]:
    return [(at, said) for at, said in link.sent if not isinstance(said, Have)]


async def test_a_want_waits_half_a_minute_whatever_else_arrives_meanwhile(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    arrivals, started = Arrivals(), trio.current_time()
    with arrivals.expecting(CHUNKS, ()):
        async with serving(store(tmp_path), arrivals, CHUNKS[:1]) as link:
            for name in CHUNKS[1:4]:
                await trio.sleep(12.0)
                arrivals.arrived(name, VERSION.chunks[name])
    assert answers(link) == [(started + ServeLimits().wait_s, Reject(CHUNKS[0], Reason.ABSENT))]


async def test_a_want_that_came_before_the_news_of_a_version_waits_half_a_minute_as_well(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    autojump_clock.autojump_threshold = 0.2  # the disk is asked in a thread, for which this clock does not wait
    arrivals, started = Arrivals(), trio.current_time()
    async with serving(store(tmp_path), arrivals, CHUNKS[:1]) as link:
        await trio.sleep(1.0)
        with arrivals.expecting(CHUNKS, ()):
            await trio.sleep(PATIENT_SECONDS)
    assert answers(link) == [(started + ServeLimits().wait_s, Reject(CHUNKS[0], Reason.ABSENT))]


async def test_when_a_download_ends_without_it_a_want_waits_no_longer(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    arrivals, started = Arrivals(), trio.current_time()
    with arrivals.expecting(CHUNKS, ()):
        async with serving(store(tmp_path), arrivals, CHUNKS[:1]) as link:
            await trio.sleep(5.0)
            with arrivals.expecting(CHUNKS[1:], ()):
                await trio.sleep(5.0)
    assert answers(link) == [(started + 5.0, Reject(CHUNKS[0], Reason.ABSENT))]


async def hang(stream: INetStream) -> None:
    """A peer whose uplink is full: what it says about a new stream takes longer than anybody waits."""
    await trio.sleep_forever()


async def test_a_stream_that_comes_too_late_does_not_cost_the_peer_what_it_is_fetching_here(tmp_path: Path) -> None:
    async with node(1, honest(store(tmp_path, VERSION.chunks))) as me, node(2) as peer:
        fed = await peer.connect(as_peer(me), dial_s=DIAL_S)
        peer._swarm.set_stream_handler(hang)
        with pytest.raises(PeerStalled):
            await me.connect(as_peer(peer), dial_s=0.2)
        chunk, data = next(iter(VERSION.chunks.items()))
        await fed.send(Want(chunk), stall_s=DIAL_S)
        with trio.fail_after(PATIENT_SECONDS):
            while not (messages := await fed.receive()):
                pass
        assert messages == [Chunk(chunk, data)]


async def test_a_connection_over_which_no_stream_came_in_time_is_cut() -> None:
    async with node(1) as me, node(2) as peer:
        peer._swarm.set_stream_handler(hang)
        with pytest.raises(PeerStalled):
            await me.connect(as_peer(peer), dial_s=DIAL_S)
        with trio.fail_after(PATIENT_SECONDS):
            while me.connected():
                await wait_all_tasks_blocked(0.01)
