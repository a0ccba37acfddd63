"""Last words: what arrived before an exchange ended counts. A lie is a lie and a chunk a chunk, however the peer
leaves.
"""

import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import trio

from protocol.errors import DiskFull
from protocol.ids import ChunkId
from protocol.policy.chunks import chunk_id
from protocol.wire.frames import Bye, Chunk, Farewell, Want, encode
from swarm_node.chunks.blobs import BlobStore
from swarm_node.p2p.fetch import (
    ChunkBegan,
    Deadlines,
    Delivered,
    IdleStreamClosed,
    LocalFault,
    Outcome,
    SentWrongBytes,
    Upstream,
    UpstreamFailed,
)
from swarm_node.p2p.link import Link
from tests.swarm_node.p2p_world import (
    PATIENT_SECONDS,
    QUICK,
    as_peer,
    as_seeder,
    fetch,
    holds_exactly,
    honest,
    make_version,
    node,
    plan_of,
    sizes_of,
    store,
)

pytestmark = pytest.mark.trio

VERSION = make_version()
CHUNKS = list(VERSION.chunks)
ASKED = 3

Leave = Callable[[Link], Awaitable[None]]


def sound(chunk: ChunkId) -> bytes:
    return VERSION.chunks[chunk]


def flipped(chunk: ChunkId) -> bytes:
    data = bytearray(sound(chunk))
    data[len(data) // 2] ^= 1
    return bytes(data)


async def wait(link: Link) -> None:
    await trio.sleep_forever()


async def reset(link: Link) -> None:
    await link.abort()


async def finish(link: Link) -> None:
    await link._stream.close()


ENDS = [
    pytest.param(encode(Bye(Farewell.DONE)), wait, id="bye"),
    pytest.param(encode(Bye(Farewell.IDLE)), wait, id="idle"),
    pytest.param(b"", reset, id="reset"),
    pytest.param(b"", finish, id="end"),
    pytest.param(b"\xff" * 5, wait, id="no frame"),
    pytest.param(encode(Want(CHUNKS[0])), wait, id="a question"),
]
"""Ends: what comes right behind the last chunk, and what the peer does then."""


def answering(bytes_of: Callable[[ChunkId], bytes], behind: bytes, leave: Leave) -> Callable[[Link], Awaitable[None]]:
    """Answer so many WANTs in one breath, and leave."""

    async def answer(link: Link) -> None:
        wanted: list[ChunkId] = []
        while len(wanted) < ASKED:
            wanted += [message.chunk for message in await link.receive() if isinstance(message, Want)]
        await link._stream.write(b"".join(encode(Chunk(name, bytes_of(name))) for name in wanted) + behind)
        await leave(link)

    return answer


async def told_by(
    handler: Callable[[Link], Awaitable[None]], blobs: BlobStore, deadlines: Deadlines = QUICK.deadlines
) -> list[Outcome]:
    """All that one upstream reports, to its last word."""
    heard_in, heard = trio.open_memory_channel[Outcome](64)
    async with node(1, handler) as peer, node(2) as me:
        upstream = Upstream(me, as_peer(peer), blobs, sizes_of(VERSION), heard_in, deadlines)
        for name in CHUNKS[:ASKED]:
            upstream.ask(name)
        with trio.fail_after(PATIENT_SECONDS):
            await upstream.run()
    heard_in.close()
    return [outcome async for outcome in heard if not isinstance(outcome, ChunkBegan)]


@pytest.mark.parametrize(("behind", "leave"), ENDS)
async def test_who_lies_and_leaves_has_lied(tmp_path: Path, behind: bytes, leave: Leave) -> None:
    told = await told_by(answering(flipped, behind, leave), store(tmp_path))
    (lie,) = told
    assert isinstance(lie, SentWrongBytes)
    assert lie.chunk in CHUNKS[:ASKED]
    assert lie.got == chunk_id(flipped(lie.chunk))
    assert holds_exactly(BlobStore(tmp_path), {})


@pytest.mark.parametrize(("behind", "leave"), ENDS)
async def test_the_chunks_of_who_leaves_are_kept(tmp_path: Path, behind: bytes, leave: Leave) -> None:
    *chunks, end = await told_by(answering(sound, behind, leave), store(tmp_path))
    assert {chunk.chunk for chunk in chunks if isinstance(chunk, Delivered)} == set(CHUNKS[:ASKED])
    assert isinstance(end, UpstreamFailed | IdleStreamClosed)
    assert holds_exactly(BlobStore(tmp_path), {name: sound(name) for name in CHUNKS[:ASKED]})


@pytest.mark.parametrize(("behind", "leave"), ENDS)
async def test_who_lies_and_leaves_is_asked_once_and_blamed(tmp_path: Path, behind: bytes, leave: Leave) -> None:
    asked: list[str] = []

    async def note(link: Link) -> None:
        asked.append(link.peer)
        await answering(flipped, behind, leave)(link)

    blobs = store(tmp_path / "me")
    async with (
        node(1, honest(store(tmp_path / "seeder", VERSION.chunks))) as seeder,
        node(2, note) as liar,
        node(3) as me,
    ):
        report = await fetch(VERSION, plan_of(as_peer(liar), as_seeder(seeder)), me, blobs)
    assert [blame.peer_id for blame in report.blames] == [liar.node_id]
    assert len(asked) == 1
    assert holds_exactly(blobs, VERSION.chunks)


class Hung(BlobStore):
    """A store on a disk that takes nothing until it is let go."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.let_go = threading.Event()
        self.waiting = threading.Semaphore(0)

    def write(self, chunk: ChunkId, data: bytes | memoryview) -> None:
        self.waiting.release()
        self.let_go.wait(PATIENT_SECONDS)
        super().write(chunk, data)


@contextmanager
def hung(folder: Path) -> Iterator[Hung]:
    store(folder)
    blobs = Hung(folder)
    try:
        yield blobs
    finally:
        blobs.let_go.set()


async def test_the_end_of_a_peer_waits_for_the_disk_but_not_for_ever(tmp_path: Path) -> None:
    with hung(tmp_path) as blobs:
        started = trio.current_time()
        told = await told_by(
            answering(sound, encode(Bye(Farewell.DONE)), wait), blobs, replace(QUICK.deadlines, store_s=0.2)
        )
        assert [type(end) for end in told] == [UpstreamFailed]
        assert trio.current_time() - started < PATIENT_SECONDS / 2


async def test_a_download_that_is_cancelled_waits_for_the_disk_but_not_for_ever(tmp_path: Path) -> None:
    rules = replace(QUICK, deadlines=replace(QUICK.deadlines, store_s=0.2))
    with hung(tmp_path / "me") as blobs:
        async with node(1, honest(store(tmp_path / "seeder", VERSION.chunks))) as seeder, node(3) as me:
            with trio.fail_after(PATIENT_SECONDS):
                async with trio.open_nursery() as nursery:

                    async def download() -> None:
                        await fetch(VERSION, plan_of(as_seeder(seeder)), me, blobs, rules=rules)

                    nursery.start_soon(download)
                    await trio.to_thread.run_sync(blobs.waiting.acquire)
                    nursery.cancel_scope.cancel()


async def test_what_this_node_cannot_store_is_told_although_the_peer_left_as_well(
    tmp_path: Path, tiny_disk: Path
) -> None:
    blobs = store(tiny_disk / "me")
    with pytest.raises(OSError, match="No space"):
        (tiny_disk / "ballast").write_bytes(bytes(2**20))
    told = await told_by(answering(sound, encode(Bye(Farewell.DONE)), wait), blobs)
    assert isinstance(told[-1], LocalFault)
    assert isinstance(told[-1].error, DiskFull)
