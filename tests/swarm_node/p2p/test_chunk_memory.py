"""Chunks of all downloads share one budget of memory while the disk is slower than the peers."""

import threading
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from protocol.ids import ChunkId
from protocol.wire.frames import Chunk, Want, encode
from swarm_node.chunks.blobs import BlobStore
from swarm_node.p2p.fetch import ChunkMemory, Deadlines, Delivered, Outcome, Upstream, UpstreamFailed
from swarm_node.p2p.link import Link
from tests.swarm_node.p2p_world import (
    PATIENT_SECONDS,
    as_peer,
    fetch,
    holds_exactly,
    honest,
    make_version,
    node,
    plan_of,
    sizes_of,
    stall,
    store,
)

pytestmark = pytest.mark.trio

VERSION = make_version()
SMALL = make_version(4, chunk_size=4096)
NAMES = [name for name, data in VERSION.chunks.items() if len(data) == max(map(len, VERSION.chunks.values()))][:4]
TWO_CHUNKS = 2 * len(VERSION.chunks[NAMES[0]])


class SlowDisk(BlobStore):
    """A store whose writes wait until they are let go."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.clean()
        self.let_go = threading.Event()
        self.begun = threading.Semaphore(0)

    def write(self, chunk: ChunkId, data: bytes | memoryview) -> None:
        self.begun.release()
        self.let_go.wait(PATIENT_SECONDS)
        super().write(chunk, data)


class AskedMemory(ChunkMemory):
    """A budget that tells when it is asked for room."""

    def __init__(self, max_bytes: int) -> None:
        super().__init__(max_bytes)
        self.asked = trio.Event()

    async def reserve(self, size_bytes: int) -> None:
        self.asked.set()
        await super().reserve(size_bytes)


async def sends_all(link: Link) -> None:
    """Answer every WANT at once."""
    left = len(NAMES)
    while left:
        for message in await link.receive():
            assert isinstance(message, Want)
            await link.send(Chunk(message.chunk, VERSION.chunks[message.chunk]), stall_s=PATIENT_SECONDS)
            left -= 1
    await stall(link)


async def test_two_peers_that_are_faster_than_the_disk_fill_one_budget_and_wait(tmp_path: Path) -> None:
    """The wait is this node's, so it costs no peer its connection."""
    disk, memory = SlowDisk(tmp_path), ChunkMemory(TWO_CHUNKS)
    outcomes_in, outcomes = trio.open_memory_channel[Outcome](64)
    async with node(1, sends_all) as one, node(2, sends_all) as other, node(3) as me, trio.open_nursery() as nursery:
        for peer in (one, other):
            upstream = Upstream(
                me, as_peer(peer), disk, sizes_of(VERSION), outcomes_in, Deadlines(patience_s=1.0), memory=memory
            )
            for name in NAMES:
                upstream.ask(name)
            nursery.start_soon(upstream.run)
        with trio.fail_after(PATIENT_SECONDS):
            for _ in range(2):
                await trio.to_thread.run_sync(disk.begun.acquire)
            await trio.sleep(1.5)  # longer than the patience with a peer, whose clock is the real one
            assert (memory.held_bytes, disk.begun.acquire(blocking=False)) == (TWO_CHUNKS, False)
            disk.let_go.set()
            came: list[ChunkId] = []
            while len(came) < 2 * len(NAMES):
                outcome = await outcomes.receive()
                came += [outcome.chunk] if isinstance(outcome, Delivered) else []
            await wait_all_tasks_blocked()
            assert memory.held_bytes == 0
        nursery.cancel_scope.cancel()
    assert sorted(came) == sorted(2 * NAMES)


async def begins_a_chunk_that_nobody_requested(link: Link) -> None:
    with trio.fail_after(PATIENT_SECONDS):
        await link._bytes.write(encode(Chunk(NAMES[0], VERSION.chunks[NAMES[0]]))[:100])
    await stall(link)


async def repeats_the_beginning_of_its_answer(link: Link) -> None:
    (want,) = await link.receive()
    assert isinstance(want, Want)
    frame = encode(Chunk(want.chunk, VERSION.chunks[want.chunk]))
    with trio.fail_after(PATIENT_SECONDS):
        await link._bytes.write(frame + frame[:100])
    await stall(link)


@pytest.mark.parametrize("hostile", [begins_a_chunk_that_nobody_requested, repeats_the_beginning_of_its_answer])
async def test_chunk_that_was_not_requested_holds_no_memory(
    tmp_path: Path, hostile: Callable[[Link], Awaitable[None]]
) -> None:
    """No request is open, so no deadline would end the wait for the rest of it."""
    memory, (outcomes_in, outcomes) = ChunkMemory(), trio.open_memory_channel[Outcome](64)
    async with node(1, hostile) as peer, node(2) as me, trio.open_nursery() as nursery:
        upstream = Upstream(
            me, as_peer(peer), store(tmp_path), sizes_of(VERSION), outcomes_in, Deadlines(), memory=memory
        )
        if hostile is repeats_the_beginning_of_its_answer:
            upstream.ask(NAMES[0])
        nursery.start_soon(upstream.run)
        with trio.fail_after(PATIENT_SECONDS):
            while not isinstance(outcome := await outcomes.receive(), UpstreamFailed):
                pass
        assert (outcome.error.code, memory.held_bytes) == ("unasked_answer", 0)
        nursery.cancel_scope.cancel()


async def test_wait_for_memory_costs_no_peer_its_connection_and_no_request_its_deadline(tmp_path: Path) -> None:
    """A request that is sent during the wait has its whole time after it, and no more."""

    async def answers_once(link: Link) -> None:
        (want,) = await link.receive()
        assert isinstance(want, Want)
        await link.send(Chunk(want.chunk, SMALL.chunks[want.chunk]), stall_s=PATIENT_SECONDS)
        await stall(link)

    memory, (outcomes_in, outcomes) = AskedMemory(1), trio.open_memory_channel[Outcome](64)
    memory.hold(1)
    first, second, *_ = SMALL.chunks
    async with node(1, answers_once) as peer, node(2) as me, trio.open_nursery() as nursery:
        upstream = Upstream(
            me, as_peer(peer), store(tmp_path), sizes_of(SMALL), outcomes_in, Deadlines(patience_s=1.0), memory=memory
        )
        upstream.ask(first)
        nursery.start_soon(upstream.run)
        with trio.fail_after(PATIENT_SECONDS):
            await memory.asked.wait()
            upstream.ask(second)
            await trio.sleep(1.5)  # longer than the patience, whose clock is the real one
            assert outcomes.statistics().current_buffer_used == 0
            memory.release(1)
            assert isinstance(await outcomes.receive(), Delivered)
            failed = await outcomes.receive()
        assert isinstance(failed, UpstreamFailed)
        assert failed.error.code == "peer_stalled"
        nursery.cancel_scope.cancel()


async def test_memory_that_slow_peers_hold_keeps_nobody_from_the_origin(tmp_path: Path) -> None:
    async def origin(chunk: ChunkId) -> bytes:
        return VERSION.chunks[chunk]

    memory, mine = ChunkMemory(TWO_CHUNKS), store(tmp_path)
    memory.hold(TWO_CHUNKS)
    async with node(1) as me:
        await fetch(VERSION, plan_of(), me, mine, memory=memory, origin=origin)
    assert holds_exactly(mine, VERSION.chunks)
    assert memory.held_bytes == TWO_CHUNKS


@pytest.mark.parametrize("has_origin", [False, True], ids=["peers", "origin"])
async def test_a_budget_of_less_than_one_chunk_is_enough_for_a_download(tmp_path: Path, has_origin: bool) -> None:
    async def origin(chunk: ChunkId) -> bytes:
        return VERSION.chunks[chunk]

    memory, mine = ChunkMemory(1), store(tmp_path / "me")
    sources = [store(tmp_path / str(number), VERSION.chunks) for number in range(2)]
    async with node(1, honest(sources[0])) as one, node(2, honest(sources[1])) as other, node(3) as me:
        plan = plan_of() if has_origin else plan_of(as_peer(one), as_peer(other))
        await fetch(VERSION, plan, me, mine, memory=memory, origin=origin if has_origin else None)
    assert holds_exactly(mine, VERSION.chunks)
    assert memory.held_bytes == 0
