"""The server and its disk, which may take long to say a word: it is asked beside the event loop, and seldom."""

import threading
from pathlib import Path

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from protocol.ids import ChunkId
from protocol.wire.frames import Chunk, Message, Reason, Reject, Want
from swarm_node.chunks.arrivals import Arrivals
from swarm_node.chunks.blobs import BlobStore
from swarm_node.p2p.host import Host
from swarm_node.p2p.serve import ChunkServer, ServeLimits
from tests.swarm_node.p2p_world import PATIENT_SECONDS, as_peer, make_version, node, store

pytestmark = pytest.mark.trio

VERSION = make_version(chunk_count=4)
HELD, EXPECTED, *_, ABSENT = VERSION.chunks
FULL = {name: data for name, data in VERSION.chunks.items() if name not in (EXPECTED, ABSENT)}


class Noting(BlobStore):
    """Notes what it was asked for, and by which thread."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.asked: list[tuple[ChunkId, threading.Thread]] = []

    def has(self, chunk: ChunkId) -> bool:
        self.asked.append((chunk, threading.current_thread()))
        return super().has(chunk)


class Slow(BlobStore):
    """Says what it holds when it is let to."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.asked, self.free = threading.Event(), threading.Event()

    def has(self, chunk: ChunkId) -> bool:
        self.asked.set()
        return self.free.wait(PATIENT_SECONDS) and super().has(chunk)


async def answer_to(chunk: ChunkId, asker: Host, server: Host) -> Message:
    link = await asker.connect(as_peer(server), dial_s=5.0)
    with trio.fail_after(PATIENT_SECONDS):
        await link.send(Want(chunk), stall_s=5.0)
        while not (answers := [said for said in await link.receive() if isinstance(said, Chunk | Reject)]):
            pass
    await link.close()
    return answers[0]


async def test_the_event_loop_does_not_wait_while_the_disk_is_asked_what_it_holds(tmp_path: Path) -> None:
    store(tmp_path, FULL)
    blobs = Noting(tmp_path)
    server = ChunkServer(blobs, limits=ServeLimits(grace_s=0.05))
    async with node(1, server.handle) as us, node(2) as asker:
        assert await answer_to(HELD, asker, us) == Chunk(HELD, FULL[HELD])
        assert await answer_to(ABSENT, asker, us) == Reject(ABSENT, Reason.ABSENT)
    assert [chunk for chunk, _ in blobs.asked] == [HELD, ABSENT]
    assert threading.current_thread() not in {thread for _, thread in blobs.asked}


async def test_what_a_slow_disk_holds_is_not_absent(tmp_path: Path) -> None:
    store(tmp_path, FULL)
    blobs = Slow(tmp_path)
    server = ChunkServer(blobs, limits=ServeLimits(grace_s=0.0))
    async with node(1, server.handle) as us, node(2) as asker, trio.open_nursery() as nursery:
        answers: list[Message] = []

        async def ask() -> None:
            answers.append(await answer_to(HELD, asker, us))

        nursery.start_soon(ask)
        await trio.to_thread.run_sync(blobs.asked.wait)
        await wait_all_tasks_blocked()
        blobs.free.set()
    assert answers == [Chunk(HELD, FULL[HELD])]


async def test_of_a_version_that_came_or_comes_the_disk_is_not_asked_what_it_holds(tmp_path: Path) -> None:
    store(tmp_path, FULL)
    blobs, arrivals = Noting(tmp_path), Arrivals()
    server = ChunkServer(blobs, arrivals, ServeLimits(wait_s=0.05))
    async with node(1, server.handle) as us, node(2) as asker:
        with arrivals.expecting([EXPECTED], FULL):
            assert await answer_to(HELD, asker, us) == Chunk(HELD, FULL[HELD])
            assert await answer_to(EXPECTED, asker, us) == Reject(EXPECTED, Reason.ABSENT)
    assert blobs.asked == []


async def test_what_a_failing_disk_may_hold_is_absent(tmp_path: Path) -> None:
    blobs = store(tmp_path, FULL)
    blobs.path(HELD).unlink()
    blobs.path(HELD).mkdir()
    arrivals = Arrivals()
    async with node(1, ChunkServer(blobs, arrivals).handle) as us, node(2) as asker:
        with arrivals.expecting((), FULL):
            assert await answer_to(HELD, asker, us) == Reject(HELD, Reason.ABSENT)
