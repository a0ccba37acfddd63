"""Serving chunks: every WANT has an answer, every stranger has a bound."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path

import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from protocol import limits
from protocol.ids import ChunkId, NodeId
from protocol.policy.chunks import chunk_id
from protocol.wire.exchange import Requester
from protocol.wire.frames import Bye, Cancel, Chunk, Farewell, Have, Message, Reason, Reject, Want, encode
from swarm_node.allowance.governor import UploadCounter
from swarm_node.chunks.arrivals import Arrivals
from swarm_node.chunks.blobs import BlobStore
from swarm_node.p2p.host import Host, HostSettings
from swarm_node.p2p.link import Link, PeerStalled, PeerVanished
from swarm_node.p2p.serve import SERVED_KEPT_MAX, ChunkServer, ServeLimits, _Conversation
from tests.swarm_node.p2p.test_patience import Scripted
from tests.swarm_node.p2p_world import PATIENT_SECONDS, as_peer, make_version, node, store

VERSION = make_version(chunk_count=8)
CHUNKS = list(VERSION.chunks)
DIAL_S = STALL_S = 5.0


@asynccontextmanager
async def served(
    blobs: BlobStore, bounds: ServeLimits | None = None, arrivals: Arrivals | None = None
) -> AsyncIterator[tuple[ChunkServer, Host, Host]]:
    server = ChunkServer(blobs, arrivals, bounds or ServeLimits(grace_s=0.1))
    async with node(1, server.handle) as host, node(2) as client:
        yield server, host, client


async def answers(link: Link, count: int) -> list[Message]:
    messages: list[Message] = []
    with trio.fail_after(PATIENT_SECONDS):
        while len(messages) < count:
            messages += await link.receive()
    return messages


async def answers_until_the_end(link: Link) -> list[Message]:
    messages: list[Message] = []
    with suppress(PeerVanished), trio.fail_after(PATIENT_SECONDS):
        while True:
            messages += await link.receive()
    return messages


@pytest.mark.trio
async def test_every_want_is_answered_with_its_chunk_or_a_reason(tmp_path: Path) -> None:
    absent = chunk_id(b"absent")
    async with served(store(tmp_path, VERSION.chunks)) as (server, host, client):
        link = await client.connect(as_peer(host), dial_s=DIAL_S)
        for chunk in (CHUNKS[0], absent, CHUNKS[1]):
            await link.send(Want(chunk), stall_s=STALL_S)
        got = await answers(link, 3)
        sent = len(VERSION.chunks[CHUNKS[0]]) + len(VERSION.chunks[CHUNKS[1]])
        chunks = [one for one in got if isinstance(one, Chunk)]
        assert chunks == [Chunk(name, VERSION.chunks[name]) for name in CHUNKS[:2]]
        assert [one for one in got if one not in chunks] == [Reject(absent, Reason.ABSENT)]
        await wait_all_tasks_blocked()  # the server counts once the kernel has taken the last byte
        assert server.bytes_sent == sent


def test_identities_without_end_are_not_remembered_by_a_server_that_reports_nobody(tmp_path: Path) -> None:
    server = ChunkServer(store(tmp_path))
    for number in range(2 * SERVED_KEPT_MAX):
        server.record_delivery(NodeId(f"peer {number}"), 1)
    reported = server.report_served(2 * SERVED_KEPT_MAX)
    assert reported == [f"peer {number}" for number in range(SERVED_KEPT_MAX, 2 * SERVED_KEPT_MAX)]


@pytest.mark.trio
async def test_a_chunk_that_went_bad_on_the_disk_is_not_served(tmp_path: Path) -> None:
    blobs = store(tmp_path, VERSION.chunks)
    blobs.path(CHUNKS[0]).write_bytes(b"rotten")
    async with served(blobs) as (_, host, client):
        link = await client.connect(as_peer(host), dial_s=DIAL_S)
        await link.send(Want(CHUNKS[0]), stall_s=STALL_S)
        assert await answers(link, 1) == [Reject(CHUNKS[0], Reason.ABSENT)]


@pytest.mark.trio
@pytest.mark.parametrize(
    "frames",
    [
        b"\xff\x00\x00\x00\x00",
        b"\x02\xff\xff\xff\xff",
        encode(Chunk(CHUNKS[0], b"a gift")),
        encode(Reject(CHUNKS[0], Reason.BUSY)),
        encode(Want(CHUNKS[0])) * 2,
        encode(Cancel(CHUNKS[0])),
        b"".join(encode(Want(chunk_id(bytes([at])))) for at in range(limits.EXCHANGE_WANTS_MAX + 1)),
    ],
    ids=["unknown type", "oversize", "chunk", "reject", "want twice", "cancel without a want", "flood"],
)
async def test_a_requester_that_breaks_the_rules_is_sent_away_and_others_are_served(
    tmp_path: Path, frames: bytes
) -> None:
    async with served(store(tmp_path, VERSION.chunks), ServeLimits(grace_s=PATIENT_SECONDS)) as (_, host, client):
        link = await client.connect(as_peer(host), dial_s=DIAL_S)
        await link._stream.write(frames)
        assert (await answers_until_the_end(link))[-1] == Bye(Farewell.FAULT)
        good = await client.connect(as_peer(host), dial_s=DIAL_S)
        await good.send(Want(CHUNKS[0]), stall_s=STALL_S)
        assert await answers(good, 1) == [Chunk(CHUNKS[0], VERSION.chunks[CHUNKS[0]])]


@pytest.mark.trio
async def test_more_streams_than_a_peer_may_have_are_told_to_come_back(tmp_path: Path) -> None:
    async with served(store(tmp_path), ServeLimits(streams_per_peer=1, grace_s=0.1)) as (_, host, client):
        first = await client.connect(as_peer(host), dial_s=DIAL_S)
        await first.send(Want(CHUNKS[0]), stall_s=STALL_S)
        await answers(first, 1)
        second = await client.connect(as_peer(host), dial_s=DIAL_S)
        assert await answers(second, 1) == [Bye(Farewell.BUSY)]
        await first.close()
        with trio.fail_after(PATIENT_SECONDS):
            while True:  # the slot is free once the server has read the goodbye
                third = await client.connect(as_peer(host), dial_s=DIAL_S)
                await third.send(Want(CHUNKS[0]), stall_s=STALL_S)
                if await answers(third, 1) == [Reject(CHUNKS[0], Reason.ABSENT)]:
                    break


@pytest.mark.trio
async def test_an_idle_stream_is_ended(tmp_path: Path) -> None:
    async with served(store(tmp_path), ServeLimits(idle_s=0.1)) as (_, host, client):
        link = await client.connect(as_peer(host), dial_s=DIAL_S)
        assert await answers(link, 1) == [Bye(Farewell.IDLE)]


@pytest.mark.trio
async def test_a_frame_in_crumbs_does_not_hold_a_stream_open(tmp_path: Path) -> None:
    async with served(store(tmp_path), ServeLimits(idle_s=0.3)) as (_, host, client):
        link = await client.connect(as_peer(host), dial_s=DIAL_S)

        async def drip() -> None:
            for byte in encode(Want(CHUNKS[0])):
                await link._stream.write(bytes([byte]))
                await trio.sleep(0.05)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(drip)
            assert await answers(link, 1) == [Bye(Farewell.IDLE)]
            nursery.cancel_scope.cancel()


@pytest.mark.trio
async def test_where_all_turns_are_taken_the_answer_is_busy(tmp_path: Path) -> None:
    big = make_version(chunk_count=1, chunk_size=limits.CHUNK_MAX_BYTES)
    blobs = store(tmp_path, VERSION.chunks | big.chunks)
    async with served(blobs, ServeLimits(turns=1, turn_s=2.0)) as (_, host, client), node(3) as other:
        hog = await client.connect(as_peer(host), dial_s=DIAL_S)
        hog._stream.muxed_stream.recv_window = 0  # type: ignore[attr-defined]  # grants no more credit while unread
        for chunk in big.chunks:
            await hog.send(Want(chunk), stall_s=STALL_S)
        link = await other.connect(as_peer(host), dial_s=DIAL_S)
        with trio.fail_after(PATIENT_SECONDS):
            while True:  # until the hog has the turn
                await link.send(Want(CHUNKS[0]), stall_s=STALL_S)
                if await answers(link, 1) == [Reject(CHUNKS[0], Reason.BUSY)]:
                    break


@pytest.mark.trio
async def test_a_requester_that_reads_nothing_is_cut_off(tmp_path: Path) -> None:
    big = make_version(chunk_count=1, chunk_size=limits.CHUNK_MAX_BYTES)
    ended = trio.Event()
    server = ChunkServer(store(tmp_path, big.chunks), limits=ServeLimits(stall_s=0.2))

    async def handle(link: Link) -> None:
        try:
            await server.handle(link)
        except PeerStalled:
            ended.set()

    async with node(1, handle) as host, node(2) as client:
        link = await client.connect(as_peer(host), dial_s=DIAL_S)
        await link.send(Want(ChunkId(*big.chunks)), stall_s=STALL_S)
        with trio.fail_after(PATIENT_SECONDS):
            await ended.wait()


@pytest.mark.trio
async def test_a_requester_that_asks_and_takes_back_for_ever_without_reading_is_cut_off(tmp_path: Path) -> None:
    pair = encode(Want(CHUNKS[0])) + encode(Cancel(CHUNKS[0]))
    sent, ended = 0, False
    arrivals = Arrivals()
    async with served(store(tmp_path), ServeLimits(stall_s=0.5), arrivals) as (_, host, client):
        link = await client.connect(as_peer(host), dial_s=DIAL_S)
        with arrivals.expecting(CHUNKS, ()), trio.fail_after(PATIENT_SECONDS):
            while sent < 64 * limits.MIB and not ended:
                try:
                    await link._stream.write(pair * 1000)
                except Exception:  # whatever layer notices it
                    ended = True
                sent += 1000 * len(pair)
    assert ended


class _TakesBack(Link):
    """A requester in memory that takes every WANT back at once, and reads what it is told."""

    def __init__(self, chunks: list[ChunkId]) -> None:
        self.peer, self.neighbourhood = NodeId("requester"), ""
        self._left = chunks

    async def receive(self) -> list[Message]:
        await trio.lowlevel.checkpoint()
        if not self._left:
            return [Bye(Farewell.DONE)]
        taken, self._left = self._left[:500], self._left[500:]
        return [message for chunk in taken for message in (Want(chunk), Cancel(chunk))]

    async def send(self, message: Message, *, stall_s: float) -> None:
        await trio.lowlevel.checkpoint()


@pytest.mark.trio
@pytest.mark.parametrize(
    "chunks", [CHUNKS[:1] * 5000, [chunk_id(number.to_bytes(2)) for number in range(5000)]], ids=["held", "unknown"]
)
async def test_a_requester_that_asks_and_takes_back_for_ever_and_reads_costs_no_memory(
    tmp_path: Path, chunks: list[ChunkId]
) -> None:
    conversation = _Conversation(ChunkServer(store(tmp_path, VERSION.chunks)), _TakesBack(chunks))
    with trio.fail_after(PATIENT_SECONDS):
        await conversation.run()
    assert len(conversation._ready) + len(conversation._waiting) <= limits.EXCHANGE_WANTS_MAX


@pytest.mark.trio
async def test_a_want_for_a_chunk_on_its_way_waits_and_is_answered_the_moment_it_arrives(tmp_path: Path) -> None:
    blobs, arrivals = store(tmp_path), Arrivals()
    async with served(blobs, ServeLimits(grace_s=0.0), arrivals) as (_, host, client):
        link = await client.connect(as_peer(host), dial_s=DIAL_S)
        with arrivals.expecting(CHUNKS, ()):
            await link.send(Want(CHUNKS[0]), stall_s=STALL_S)
            await link.send(Want(chunk_id(b"unheard of")), stall_s=STALL_S)
            assert await answers(link, 1) == [Reject(chunk_id(b"unheard of"), Reason.ABSENT)]
            blobs.write(CHUNKS[0], VERSION.chunks[CHUNKS[0]])
            arrivals.arrived(CHUNKS[0], VERSION.chunks[CHUNKS[0]])
            assert await answers(link, 2) == [Have((CHUNKS[0],)), Chunk(CHUNKS[0], VERSION.chunks[CHUNKS[0]])]


@pytest.mark.trio
async def test_a_want_that_waits_in_vain_is_rejected_when_the_download_has_ended(tmp_path: Path) -> None:
    arrivals = Arrivals()
    async with served(store(tmp_path), ServeLimits(wait_s=0.1), arrivals) as (_, host, client):
        link = await client.connect(as_peer(host), dial_s=DIAL_S)
        with arrivals.expecting(CHUNKS, ()):
            await link.send(Want(CHUNKS[0]), stall_s=STALL_S)
            assert await answers(link, 1) == [Reject(CHUNKS[0], Reason.ABSENT)]


@pytest.mark.trio
async def test_a_newcomer_is_told_all_that_is_held_in_frames_of_bounded_size(tmp_path: Path) -> None:
    arrivals = Arrivals()
    many = [chunk_id(number.to_bytes(2)) for number in range(150)]
    async with served(store(tmp_path), None, arrivals) as (_, host, client):
        with arrivals.expecting(CHUNKS, many):
            link = await client.connect(as_peer(host), dial_s=DIAL_S)
            told = await answers(link, 3)
        assert [len(message.chunks) for message in told if isinstance(message, Have)] == [64, 64, 22]


@pytest.mark.trio
async def test_a_download_that_begins_again_tells_nothing_twice(tmp_path: Path, autojump_clock: MockClock) -> None:
    """A disk that is full, for one, has it begin every five seconds."""
    arrivals, link = Arrivals(), Scripted([])
    async with trio.open_nursery() as nursery:
        nursery.start_soon(_Conversation(ChunkServer(store(tmp_path), arrivals), link).run)
        for held in (4, 4, 5):
            with arrivals.expecting(CHUNKS[held:], CHUNKS[:held]):
                await trio.sleep(5.0)
        nursery.cancel_scope.cancel()
    assert [message for _, message in link.sent] == [Have(tuple(CHUNKS[:4])), Have((CHUNKS[4],))]


@pytest.mark.trio
async def test_no_stream_is_told_more_names_than_a_requester_hears_out(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    arrivals, link, requester = Arrivals(), Scripted([]), Requester()
    many = [ChunkId(f"{number:064x}") for number in range(limits.EXCHANGE_HAVE_TOTAL_MAX + 1)]
    async with trio.open_nursery() as nursery:
        nursery.start_soon(_Conversation(ChunkServer(store(tmp_path), arrivals), link).run)
        with arrivals.expecting(CHUNKS, many):
            await trio.sleep(5.0)
            arrivals.arrived(CHUNKS[0], VERSION.chunks[CHUNKS[0]])
            await trio.sleep(5.0)
        nursery.cancel_scope.cancel()
    told = [requester.receive(message) for _, message in link.sent]
    assert sum(len(message.chunks) for message in told if isinstance(message, Have)) == limits.EXCHANGE_HAVE_TOTAL_MAX


def test_what_was_lost_is_news_when_it_comes_again() -> None:
    arrivals = Arrivals()
    with arrivals.expecting(CHUNKS[3:], CHUNKS[:3]):
        news, number = arrivals.news_after(0, 2)
        assert news == CHUNKS[:2]
    with arrivals.expecting(CHUNKS[:1], CHUNKS[1:]):
        arrivals.arrived(CHUNKS[0], VERSION.chunks[CHUNKS[0]])
        assert arrivals.news_after(number, 64)[0] == [*CHUNKS[2:], CHUNKS[0]]


def test_whoever_gets_a_connection_may_have_its_streams() -> None:
    """Else those of a few addresses would be all that there are."""
    assert ServeLimits().streams >= ServeLimits().streams_per_peer * HostSettings().connections_max


@pytest.mark.trio
async def test_what_came_a_moment_ago_is_served_without_the_disk(tmp_path: Path) -> None:
    arrivals = Arrivals()
    async with served(store(tmp_path, {}), None, arrivals) as (_, host, client):
        link = await client.connect(as_peer(host), dial_s=DIAL_S)
        with arrivals.expecting(CHUNKS, ()):
            await link.send(Want(CHUNKS[0]), stall_s=STALL_S)
            await wait_all_tasks_blocked()
            arrivals.arrived(CHUNKS[0], VERSION.chunks[CHUNKS[0]])
            assert await answers(link, 2) == [Have((CHUNKS[0],)), Chunk(CHUNKS[0], VERSION.chunks[CHUNKS[0]])]
        await link.send(Want(CHUNKS[0]), stall_s=STALL_S)
        assert await answers(link, 1) == [Reject(CHUNKS[0], Reason.ABSENT)]
        await link.close()


@pytest.mark.trio
async def test_only_so_many_bytes_of_what_came_last_are_kept() -> None:
    arrivals = Arrivals(fresh_bytes_max=10)
    with arrivals.expecting(CHUNKS, ()):
        for chunk in CHUNKS[:3]:
            arrivals.arrived(chunk, b"12345")
        assert [arrivals.fresh(chunk) for chunk in CHUNKS[:3]] == [None, b"12345", b"12345"]
        arrivals.arrived(CHUNKS[3], b"more than is kept at all")
        assert arrivals.fresh(CHUNKS[3]) is None
    assert arrivals.fresh(CHUNKS[2]) is None


@pytest.mark.trio
async def test_what_arrives_in_quick_succession_is_told_together(tmp_path: Path) -> None:
    arrivals = Arrivals()
    async with served(store(tmp_path, {}), ServeLimits(news_s=1.0), arrivals) as (_, host, client):
        link = await client.connect(as_peer(host), dial_s=DIAL_S)
        await link.send(Want(CHUNKS[-1]), stall_s=STALL_S)  # the stream is open on both sides once it waits there
        with arrivals.expecting(CHUNKS, ()):
            await wait_all_tasks_blocked()
            for chunk in CHUNKS[:-1]:
                arrivals.arrived(chunk, VERSION.chunks[chunk])
                await wait_all_tasks_blocked(0.001)
            told = await answers(link, 2)
        assert told == [Have((CHUNKS[0],)), Have(tuple(CHUNKS[1:-1]))]
        await link.close()


@pytest.mark.trio
async def test_a_want_taken_back_while_it_waits_costs_no_bytes(tmp_path: Path) -> None:
    blobs, arrivals = store(tmp_path), Arrivals()
    async with served(blobs, None, arrivals) as (server, host, client):
        link = await client.connect(as_peer(host), dial_s=DIAL_S)
        with arrivals.expecting(CHUNKS, ()):
            await link.send(Want(CHUNKS[0]), stall_s=STALL_S)
            await link.send(Cancel(CHUNKS[0]), stall_s=STALL_S)
            assert await answers(link, 1) == [Reject(CHUNKS[0], Reason.CANCELLED)]
            blobs.write(CHUNKS[0], VERSION.chunks[CHUNKS[0]])
            arrivals.arrived(CHUNKS[0], VERSION.chunks[CHUNKS[0]])
            assert await answers(link, 1) == [Have((CHUNKS[0],))]
        assert server.bytes_sent == 0


@pytest.mark.trio
async def test_at_the_owners_cap_a_want_is_answered_with_busy_and_nothing_more_leaves(tmp_path: Path) -> None:
    uploads = UploadCounter(tmp_path, lambda: datetime.now(UTC))
    uploads.cap_bytes = len(VERSION.chunks[CHUNKS[0]])
    async with served(store(tmp_path, VERSION.chunks)) as (server, host, client):
        server.meter = uploads.count
        link = await client.connect(as_peer(host), dial_s=DIAL_S)
        for chunk in CHUNKS[:2]:
            await link.send(Want(chunk), stall_s=STALL_S)
        got = [message for message in await answers(link, 2) if not isinstance(message, Have)]
        assert got == [Chunk(CHUNKS[0], VERSION.chunks[CHUNKS[0]]), Reject(CHUNKS[1], Reason.BUSY)]
        assert server.bytes_sent == uploads.cap_bytes
        await link.close()
