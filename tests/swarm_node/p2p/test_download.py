"""A version arrives whole from many sources, whatever some of them do."""

import re
import socket
import struct
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from protocol.errors import DiskFull
from protocol.ids import ChunkId
from protocol.policy.chunks import chunk_id
from protocol.wire.frames import Chunk, Reason, Reject, Want, encode
from protocol.work.messages import Peer
from swarm_node.base.disk import DiskFailed
from swarm_node.chunks.arrivals import Arrivals
from swarm_node.chunks.blobs import BlobStore
from swarm_node.p2p.download import DownloadProgress, FetchReport, NoSource
from swarm_node.p2p.fetch import ChunkBegan, Delivered, Outcome, Upstream
from swarm_node.p2p.host import Host
from swarm_node.p2p.link import Link
from swarm_node.p2p.serve import ChunkServer
from tests.swarm_node.p2p_world import (
    PATIENT_SECONDS,
    QUICK,
    as_peer,
    as_seeder,
    fetch,
    holds_exactly,
    honest,
    make_version,
    next_want,
    node,
    plan_of,
    refuse,
    server_process,
    sizes_of,
    stall,
    store,
)

VERSION = make_version()


async def beside_an_honest_seeder(
    tmp_path: Path, handler: Callable[[Link], Awaitable[None]]
) -> tuple[FetchReport, Host, BlobStore]:
    """Fetch with one peer of the given manners and an honest seeder."""
    blobs = store(tmp_path / "me")
    async with (
        node(1, honest(store(tmp_path / "seeder", VERSION.chunks))) as seeder,
        node(2, handler) as peer,
        node(3) as me,
    ):
        report = await fetch(VERSION, plan_of(as_peer(peer), as_seeder(seeder)), me, blobs)
        return report, peer, blobs


@pytest.mark.trio
async def test_three_nodes_and_a_seeder_trade_until_all_have_everything(tmp_path: Path) -> None:
    version = make_version(chunk_count=60)
    async with AsyncExitStack() as world:
        seeder = await world.enter_async_context(node(1, honest(store(tmp_path / "seeder", version.chunks))))
        stores = [store(tmp_path / str(number)) for number in range(3)]
        arrivals = [Arrivals() for _ in stores]
        servers = [ChunkServer(blobs, news) for blobs, news in zip(stores, arrivals, strict=True)]
        hosts = [await world.enter_async_context(node(10 + at, server.handle)) for at, server in enumerate(servers)]
        reports: list[FetchReport] = []

        async def one(at: int) -> None:
            # Our third comes from the seeder, the thirds of the others from them, who do not have them yet either.
            parents = [as_seeder(seeder) if host is hosts[at] else as_peer(host) for host in hosts]
            reports.append(await fetch(version, plan_of(*parents), hosts[at], stores[at], arrivals=arrivals[at]))

        async with trio.open_nursery() as nursery:
            for at in range(3):
                nursery.start_soon(one, at)
        assert all(holds_exactly(blobs, version.chunks) for blobs in stores)
        from_peers = sum(report.bytes_from["peer"] for report in reports)
        total = sum(len(data) for data in version.chunks.values())
        assert [report.bytes_from.total() for report in reports] == [total] * 3
        assert from_peers > total
        assert from_peers <= sum(server.bytes_sent for server in servers)


@pytest.mark.trio
async def test_a_peer_that_flips_one_byte_is_blamed_and_its_chunk_fetched_elsewhere(tmp_path: Path) -> None:
    lies: list[tuple[ChunkId, ChunkId]] = []

    async def flip_a_byte(link: Link) -> None:
        want = await next_want(link)
        data = bytearray(VERSION.chunks[want.chunk])
        data[len(data) // 2] ^= 1
        lies.append((want.chunk, chunk_id(bytes(data))))
        await link.send(Chunk(want.chunk, bytes(data)), stall_s=1.0)
        await stall(link)

    report, liar, blobs = await beside_an_honest_seeder(tmp_path, flip_a_byte)
    assert [(blame.peer_id, blame.chunk, blame.got) for blame in report.blames] == [(liar.node_id, *lies[0])]
    assert len(lies) == 1  # never asked again
    assert report.bytes_from["peer"] == 0
    assert holds_exactly(blobs, VERSION.chunks)


@pytest.mark.trio
async def test_a_peer_that_accepts_and_stalls_costs_a_moment(tmp_path: Path) -> None:
    report, _, blobs = await beside_an_honest_seeder(tmp_path, stall)
    assert holds_exactly(blobs, VERSION.chunks)
    assert report.blames == []


@pytest.mark.trio
async def test_nothing_but_stalling_peers_is_given_up_with_the_reason(tmp_path: Path) -> None:
    picker = replace(QUICK.picker, give_up_s=1.0)
    rules = replace(QUICK, deadlines=replace(QUICK.deadlines, patience_s=0.1), picker=picker)
    async with node(2, stall) as peer, node(3) as me:
        with pytest.raises(NoSource, match=r"left \d chunks unanswered\. \[peer_stalled\]"):
            await fetch(VERSION, plan_of(as_peer(peer)), me, store(tmp_path), rules=rules)


@pytest.mark.trio
async def test_a_parent_that_is_away_for_a_while_is_asked_again(tmp_path: Path) -> None:
    """A parent is away as in an upgrade: nobody listens, for many more tries than make it one that nobody counts on."""
    blobs, full = store(tmp_path / "me"), honest(store(tmp_path / "parent", VERSION.chunks))
    async with node(2, full) as parent:
        plan = plan_of(as_peer(parent))
    port = int(plan.peers[0].address.rpartition(":")[2])
    rules = replace(QUICK, picker=replace(QUICK.picker, failure_pause_max_s=0.1))
    async with node(3) as me, trio.open_nursery() as nursery:
        nursery.start_soon(partial(fetch, VERSION, plan, me, blobs, rules=rules))
        await refuse(port, 3 * QUICK.picker.strikes_max)
        async with node(2, full, port=port):
            with trio.fail_after(PATIENT_SECONDS):
                while not holds_exactly(blobs, VERSION.chunks):
                    await wait_all_tasks_blocked(0.01)


@pytest.mark.trio
async def test_a_peer_that_drips_bytes_does_not_hold_us(tmp_path: Path) -> None:
    async def drip(link: Link) -> None:
        want = await next_want(link)
        frame = struct.pack(">BI", 3, 32 + len(VERSION.chunks[want.chunk])) + bytes.fromhex(want.chunk)
        while True:
            await link._stream.write(frame[:1])
            frame = frame[1:] or b"\0"
            await trio.sleep(0.05)

    report, _, blobs = await beside_an_honest_seeder(tmp_path, drip)
    assert holds_exactly(blobs, VERSION.chunks)
    assert report.bytes_from["peer"] == 0


@pytest.mark.trio
async def test_the_first_bytes_of_a_chunk_are_reported_before_the_last_are_sent(tmp_path: Path) -> None:
    finish = trio.Event()

    async def in_two_halves(link: Link) -> None:
        want = await next_want(link)
        frame = encode(Chunk(want.chunk, VERSION.chunks[want.chunk]))
        await link._stream.write(frame[:100])
        await finish.wait()
        await link._stream.write(frame[100:])
        await stall(link)

    outcomes_in, outcomes = trio.open_memory_channel[Outcome](10)
    async with node(1, in_two_halves) as peer, node(2) as me, trio.open_nursery() as nursery:
        upstream = Upstream(me, as_peer(peer), store(tmp_path), sizes_of(VERSION), outcomes_in, QUICK.deadlines)
        nursery.start_soon(upstream.run)
        upstream.ask(next(iter(VERSION.chunks)))
        assert isinstance(await outcomes.receive(), ChunkBegan)
        finish.set()
        assert isinstance(await outcomes.receive(), Delivered)
        nursery.cancel_scope.cancel()


@pytest.mark.trio
async def test_an_oversize_frame_ends_that_peer_only(tmp_path: Path) -> None:
    async def oversize(link: Link) -> None:
        await next_want(link)
        await link._stream.write(struct.pack(">BI", 3, 2**32 - 1))
        await stall(link)

    report, _, blobs = await beside_an_honest_seeder(tmp_path, oversize)
    assert any(re.search(r"announces 4294967295 bytes.*\[frame_too_large\]", said) for said in report.failures)
    assert holds_exactly(blobs, VERSION.chunks)


@pytest.mark.trio
async def test_an_unasked_chunk_ends_that_peer_only(tmp_path: Path) -> None:
    async def push(link: Link) -> None:
        await next_want(link)
        await link.send(Chunk(chunk_id(b"surprise"), b"surprise"), stall_s=1.0)
        await stall(link)

    report, _, blobs = await beside_an_honest_seeder(tmp_path, push)
    assert any("was not requested" in failure for failure in report.failures)
    assert holds_exactly(blobs, VERSION.chunks)


@pytest.mark.trio
async def test_a_stream_that_ends_in_mid_chunk_is_no_success(tmp_path: Path) -> None:
    async def truncate(link: Link) -> None:
        want = await next_want(link)
        body = bytes.fromhex(want.chunk) + VERSION.chunks[want.chunk]
        await link._stream.write(struct.pack(">BI", 3, len(body)) + body[:-1])
        await link._stream.close()

    report, _, blobs = await beside_an_honest_seeder(tmp_path, truncate)
    assert report.failures
    assert holds_exactly(blobs, VERSION.chunks)


@pytest.mark.trio
@pytest.mark.processes
async def test_a_peer_killed_in_mid_transfer_costs_a_moment(tmp_path: Path) -> None:
    version, blobs = make_version(chunk_count=60), store(tmp_path / "me")
    served = store(tmp_path / "served", version.chunks)
    with server_process(served, 2) as (process, doomed):
        async with node(1, honest(served)) as seeder, node(3) as me:

            def kill_in_the_middle(progress: DownloadProgress) -> None:
                if progress.chunks_done == 10:
                    process.kill()

            sources = [doomed, as_seeder(seeder)]
            report = await fetch(version, plan_of(*sources), me, blobs, on_progress=kill_in_the_middle)
    assert holds_exactly(blobs, version.chunks)
    assert report.bytes_from["seeder"] > 0
    assert report.blames == []


@pytest.mark.trio
async def test_a_chunk_the_peer_does_not_hold_yet_is_asked_again_a_bit_later(tmp_path: Path) -> None:
    refusals = 0

    async def empty_at_first(link: Link) -> None:
        nonlocal refusals
        while refusals < 6:
            for message in await link.receive():
                assert isinstance(message, Want)
                await link.send(Reject(message.chunk, Reason.ABSENT), stall_s=1.0)
                refusals += 1
        await ChunkServer(full).handle(link)

    full, blobs = store(tmp_path / "peer", VERSION.chunks), store(tmp_path / "me")
    async with node(2, empty_at_first) as peer, node(3) as me:
        report = await fetch(VERSION, plan_of(as_peer(peer)), me, blobs)
    assert holds_exactly(blobs, VERSION.chunks)
    assert report.bytes_from["peer"] == sum(map(len, VERSION.chunks.values()))


@pytest.mark.trio
async def test_somebody_else_at_a_peers_address_gets_nothing(tmp_path: Path) -> None:
    asked: list[Link] = []

    async def note(link: Link) -> None:
        asked.append(link)

    blobs = store(tmp_path / "me")
    async with (
        node(1, honest(store(tmp_path / "seeder", VERSION.chunks))) as seeder,
        node(2, note) as impostor,
        node(3) as me,
        node(4) as victim,
    ):
        false_entry = Peer(peer_id=victim.node_id, address=impostor.addresses[0], kind="peer")
        report = await fetch(VERSION, plan_of(false_entry, as_seeder(seeder)), me, blobs)
    assert any(re.search(r"different peer.*\[wrong_peer\]", said) for said in report.failures)
    assert asked == []
    assert holds_exactly(blobs, VERSION.chunks)


@pytest.mark.trio
async def test_an_interrupted_download_resumes_from_what_is_stored(tmp_path: Path) -> None:
    first = dict(list(VERSION.chunks.items())[:10])
    blobs, progress = store(tmp_path / "me", first), list[DownloadProgress]()
    async with node(1, honest(store(tmp_path / "seeder", VERSION.chunks))) as seeder, node(3) as me:
        report = await fetch(VERSION, plan_of(as_seeder(seeder)), me, blobs, on_progress=progress.append)
    assert report.bytes_on_disk == sum(map(len, first.values()))
    assert report.bytes_from.total() == sum(map(len, VERSION.chunks.values())) - report.bytes_on_disk
    assert [step.chunks_done for step in progress] == list(range(10, len(VERSION.chunks) + 1))
    assert progress[-1].bytes_done == progress[-1].bytes


@pytest.mark.trio
async def test_nothing_missing_asks_nobody(tmp_path: Path) -> None:
    async with node(3) as me:
        report = await fetch(VERSION, plan_of(), me, store(tmp_path / "me", VERSION.chunks))
    assert report.bytes_from.total() == 0


@pytest.mark.trio
async def test_a_full_disk_stops_the_download_with_its_name_and_blames_nobody(tmp_path: Path, tiny_disk: Path) -> None:
    blobs = store(tiny_disk / "me")
    version = make_version(chunk_count=40)
    async with node(1, honest(store(tmp_path / "seeder", version.chunks))) as seeder, node(3) as me:
        with pytest.raises(DiskFull, match="Free some space"):
            await fetch(version, plan_of(as_seeder(seeder)), me, blobs)
    files = [path for path in blobs.root.rglob("*") if path.is_file()]
    assert all(path.read_bytes() == version.chunks[ChunkId(path.name)] for path in files)


@pytest.mark.trio
@pytest.mark.parametrize("from_origin", [False, True])
async def test_a_disk_that_fails_stops_the_download_with_its_name_and_blames_nobody(
    tmp_path: Path, from_origin: bool
) -> None:
    async def origin(chunk: ChunkId) -> bytes:
        return VERSION.chunks[chunk]

    blobs = store(tmp_path / "me")
    for chunk in VERSION.chunks:
        blobs.path(chunk).parent.write_text("no folder")
    async with node(1, honest(store(tmp_path / "seeder", VERSION.chunks))) as seeder, node(3) as me:
        plan, last = (plan_of(), origin) if from_origin else (plan_of(as_seeder(seeder)), None)
        with pytest.raises(DiskFailed, match="Not a directory"):
            await fetch(VERSION, plan, me, blobs, origin=last)


@pytest.mark.trio
async def test_a_cancelled_download_leaves_only_whole_chunks_and_resumes(tmp_path: Path) -> None:
    blobs = store(tmp_path / "me")
    async with node(1, honest(store(tmp_path / "seeder", VERSION.chunks))) as seeder, node(3) as me:
        with trio.CancelScope() as scope:

            def cancel_in_the_middle(progress: DownloadProgress) -> None:
                if progress.chunks_done == 8:
                    scope.cancel()

            await fetch(VERSION, plan_of(as_seeder(seeder)), me, blobs, on_progress=cancel_in_the_middle)
        assert scope.cancelled_caught
        stored = {chunk: data for chunk, data in VERSION.chunks.items() if blobs.has(chunk)}
        assert 8 <= len(stored) < len(VERSION.chunks)
        assert holds_exactly(blobs, stored)
        await fetch(VERSION, plan_of(as_seeder(seeder)), me, blobs)
    assert holds_exactly(blobs, VERSION.chunks)


@pytest.mark.trio
async def test_the_end_does_not_wait_for_a_peer_that_is_still_being_dialled(tmp_path: Path) -> None:
    with socket.socket() as black_hole:
        black_hole.bind(("127.0.0.1", 0))
        black_hole.listen(0)
        address = "127.0.0.1:" + str(black_hole.getsockname()[1])
        async with (
            node(1, honest(store(tmp_path / "seeder", VERSION.chunks))) as seeder,
            node(2) as absent,
            node(3) as me,
        ):
            silent = Peer(peer_id=absent.node_id, address=address, kind="peer")
            rules = replace(QUICK, deadlines=replace(QUICK.deadlines, dial_s=PATIENT_SECONDS))
            with trio.fail_after(PATIENT_SECONDS / 2):
                blobs = store(tmp_path / "me")
                await fetch(VERSION, plan_of(silent, as_seeder(seeder)), me, blobs, rules=rules)
    assert holds_exactly(blobs, VERSION.chunks)
