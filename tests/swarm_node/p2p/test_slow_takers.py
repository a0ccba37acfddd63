"""Slow takers of their chunks: they keep their turn only while nobody waits for one."""

from contextlib import suppress
from pathlib import Path

import pytest
import trio

from protocol import limits
from protocol.wire.frames import Cancel, Chunk, Message, Want
from swarm_node.p2p.host import Host
from swarm_node.p2p.link import Link
from swarm_node.p2p.serve import ChunkServer, ServeLimits
from tests.swarm_node.p2p.test_serve import CHUNKS, DIAL_S, STALL_S, VERSION, answers, served
from tests.swarm_node.p2p_world import PATIENT_SECONDS, as_peer, make_version, node, store


async def sip(link: Link, got: list[Message], begun: trio.Event | None = None) -> None:
    """Take so little at a time that no chunk ends in a test, and so often that nothing stalls."""
    with suppress(Exception):  # whatever layer tells that it is cut off
        while True:
            got += link._frames.feed(await link._bytes.read(2_048))
            if begun is not None:
                begun.set()
            await trio.sleep(0.05)


async def be_served(client: Host, host: Host) -> None:
    """An honest requester asks until it has its chunk."""
    link = await client.connect(as_peer(host), dial_s=DIAL_S)
    told: list[Message] = []
    while not any(isinstance(message, Chunk) for message in told):
        assert len(told) < 12, "it was told again and again that all turns are taken"
        await link.send(Want(CHUNKS[0]), stall_s=STALL_S)
        told += await answers(link, 1)


@pytest.mark.trio
async def test_identities_that_take_their_bytes_drop_by_drop_do_not_keep_others_from_the_turns(tmp_path: Path) -> None:
    """Streams, as many as there are turns, each just fast enough not to stall, for as long as they like."""
    big = make_version(chunk_count=1, chunk_size=limits.CHUNK_MAX_BYTES)
    blobs = store(tmp_path, VERSION.chunks | big.chunks)
    bounds = ServeLimits(turns=4, turn_s=0.5, stall_s=PATIENT_SECONDS)
    taken: list[Message] = []
    begun = [trio.Event() for _ in range(bounds.turns)]
    async with (
        served(blobs, bounds) as (_, host, client),
        node(3) as first,
        node(4) as second,
        trio.open_nursery() as nursery,
    ):
        for hostile, event in zip((first, first, second, second), begun, strict=True):
            link = await hostile.connect(as_peer(host), dial_s=DIAL_S)
            await link.send(Want(next(iter(big.chunks))), stall_s=STALL_S)
            nursery.start_soon(sip, link, taken, event)
        with trio.fail_after(PATIENT_SECONDS):
            for event in begun:
                await event.wait()
        await be_served(client, host)
        assert not any(isinstance(message, Chunk) for message in taken), "they have ended by themselves"
        nursery.cancel_scope.cancel()


@pytest.mark.trio
async def test_a_slow_requester_keeps_its_turn_as_long_as_nobody_waits_for_one(tmp_path: Path) -> None:
    big = make_version(chunk_count=1, chunk_size=limits.CHUNK_MAX_BYTES)
    bounds = ServeLimits(turns=1, turn_s=0.1, stall_s=PATIENT_SECONDS)
    async with served(store(tmp_path, big.chunks), bounds) as (_, host, client):
        link = await client.connect(as_peer(host), dial_s=DIAL_S)
        await link.send(Want(next(iter(big.chunks))), stall_s=STALL_S)
        got: list[Message] = []
        with trio.move_on_after(1.0):
            await sip(link, got)
        ((name, data),) = big.chunks.items()
        assert await answers(link, 1) == [Chunk(name, data)]


@pytest.mark.trio
async def test_waiting_streams_take_turns_from_slow_ones_one_at_a_time(tmp_path: Path) -> None:
    """Else a crowd of identities could have all that is under way on slow links cut off."""
    big = make_version(chunk_count=1, chunk_size=limits.CHUNK_MAX_BYTES)
    bounds = ServeLimits(turns=2, turn_s=PATIENT_SECONDS)
    server = ChunkServer(store(tmp_path, big.chunks), limits=bounds)
    links = [_Takes(place) for place in range(2)]
    scopes: dict[Link, trio.CancelScope] = {link: trio.CancelScope() for link in links}
    server.takers.update(scopes)
    for link in links:
        server.turns.wait(link, 0.0, is_behind=False)
    assert server.turns.admit(0.0) == links
    for link in links:
        link.moved_at = trio.current_time() - 2 * bounds.turn_s - link.place
    server.hurry()
    server.hurry()
    assert [scopes[link].cancel_called for link in links] == [False, True]


class _Takes(Link):
    """A requester that a slice is on its way to."""

    def __init__(self, place: int) -> None:
        self.place = place


@pytest.mark.trio
async def test_a_turn_that_came_while_an_answer_without_a_chunk_was_stuck_goes_to_others(tmp_path: Path) -> None:
    """A chunk fills the window of one who reads nothing; it waits in line, and a REJECT does not fit any more."""
    big = make_version(chunk_count=1, chunk_size=limits.CHUNK_MAX_BYTES)
    filling = make_version(chunk_count=1, chunk_size=limits.MIB - 120, seed=5)
    (big_chunk,), (filling_chunk,) = big.chunks, filling.chunks
    bounds = ServeLimits(turns=1, turn_s=0.3, stall_s=PATIENT_SECONDS)
    blobs = store(tmp_path, VERSION.chunks | big.chunks | filling.chunks)
    async with served(blobs, bounds) as (server, host, client), node(3) as hostile, node(4) as third:
        with trio.fail_after(PATIENT_SECONDS):
            stuck = await hostile.connect(as_peer(host), dial_s=DIAL_S)
            await stuck.send(Want(filling_chunk), stall_s=STALL_S)
            while not server.bytes_sent:  # noqa: ASYNC110  # the server tells nobody what it sends
                await trio.sleep(0.01)
            holder = await third.connect(as_peer(host), dial_s=DIAL_S)
            await holder.send(Want(big_chunk), stall_s=STALL_S)
            while not server.turns.full:  # noqa: ASYNC110  # nor when it begins
                await trio.sleep(0.01)
            await stuck.send(Want(CHUNKS[0]), stall_s=STALL_S)
            while len(server.takers) < 2:
                await stuck.send(Want(CHUNKS[1]), stall_s=STALL_S)
                await stuck.send(Cancel(CHUNKS[1]), stall_s=STALL_S)
                await trio.sleep(0.02)  # until an answer does not fit
            await holder.abort()
            await be_served(client, host)
