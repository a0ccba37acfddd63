"""The muxer with its tasks, in memory and in virtual time: what a frozen, paused, vanished or rude peer does to it."""

from contextlib import suppress
from typing import Any

import pytest
import trio
from libp2p.stream_muxer.exceptions import MuxedConnUnavailable, MuxedStreamEOF, MuxedStreamReset
from trio.testing import MockClock, wait_all_tasks_blocked

from swarm_node.p2p.yamux import TICK_S
from swarm_node.p2p.yamux_frames import Flag, FrameKind, PeerSilent, WindowExceeded, pack
from swarm_node.p2p.yamux_machine import BODY_MAX_BYTES
from tests.swarm_node.muxed_world import face_to_face

pytestmark = pytest.mark.trio

FOUND_OUT_S = 3 * TICK_S + 1


async def read_to_the_end(stream: Any) -> bytes:
    """All of it, if it ends cleanly."""
    got = b""
    while True:
        try:
            got += await stream.read()
        except MuxedStreamEOF:
            return got


async def test_a_reader_of_a_frozen_peer_wakes_with_its_name(autojump_clock: MockClock) -> None:
    async with face_to_face() as (one, two):
        stream = await one.muxed.open_stream()
        two.pipe.freeze()
        one.pipe.freeze()
        with pytest.raises(MuxedStreamReset) as error, trio.fail_after(FOUND_OUT_S):
            await stream.read()
        assert isinstance(error.value.__cause__, PeerSilent)


async def test_a_writer_to_a_frozen_peer_wakes_with_its_name(autojump_clock: MockClock) -> None:
    async with face_to_face() as (one, two):
        stream = await one.muxed.open_stream()
        one.pipe.freeze()
        with pytest.raises(MuxedStreamReset) as error, trio.fail_after(FOUND_OUT_S):
            await stream.write(bytes(4 * BODY_MAX_BYTES))
        assert isinstance(error.value.__cause__, PeerSilent)
        with pytest.raises(MuxedConnUnavailable):
            await one.muxed.open_stream()
        await two.muxed.event_closed.wait()


async def test_an_idle_connection_lives_for_hours(autojump_clock: MockClock) -> None:
    async with face_to_face() as (one, two):
        stream = await one.muxed.open_stream()
        other = await two.muxed.accept_stream()
        await trio.sleep(6 * 3600)
        await stream.write(b"still here")
        assert await other.read() == b"still here"


async def test_a_writer_waits_for_a_paused_reader_as_long_as_its_caller_does(autojump_clock: MockClock) -> None:
    body = bytes(3 * 2**20)
    async with face_to_face() as (one, two), trio.open_nursery() as nursery:
        stream = await one.muxed.open_stream()
        nursery.start_soon(stream.write, body)
        other = await two.muxed.accept_stream()
        await trio.sleep(3600)
        got = 0
        while got < len(body):
            got += len(await other.read())


async def test_a_cancelled_write_ends_its_stream_and_not_its_neighbours() -> None:
    async with face_to_face() as (one, two):
        stream, neighbour = [await one.muxed.open_stream() for _ in range(2)]
        other, other_neighbour = [await two.muxed.accept_stream() for _ in range(2)]
        with trio.CancelScope() as scope:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(stream.write, bytes(2**20))
                await wait_all_tasks_blocked()
                scope.cancel()
        with pytest.raises(MuxedStreamReset, match="The peer reset"):
            await read_to_the_end(other)
        await neighbour.write(b"alive")
        assert await other_neighbour.read() == b"alive"


async def test_what_arrived_before_a_reset_is_read_by_whoever_asked_for_it_and_kept_for_nobody_else() -> None:
    """The opener of a stream reads what came of it; of others' streams, made and reset without end, nothing is kept."""
    async with face_to_face() as (one, two):
        asked, unread = await one.muxed.open_stream(), await two.muxed.open_stream()
        await asked.write(b"?")
        await unread.write(b"flood")
        answering, flooded = await two.muxed.accept_stream(), await one.muxed.accept_stream()
        await answering.write(b"answer")
        for stream in (answering, unread):
            await stream.reset()
        await wait_all_tasks_blocked()
        assert await asked.read() == b"answer"
        for stream in (asked, flooded):
            assert len(stream.inbox) == 0
            with pytest.raises(MuxedStreamReset, match="The peer reset"):
                await stream.read()


async def test_only_fin_is_a_clean_end() -> None:
    async with face_to_face() as (one, two):
        clean, cut = [await one.muxed.open_stream() for _ in range(2)]
        clean_end, cut_end = [await two.muxed.accept_stream() for _ in range(2)]
        await clean.write(b"whole")
        await clean.close_write()
        await cut.write(b"half")
        assert await clean_end.read() == b"whole"
        with pytest.raises(MuxedStreamEOF):
            await clean_end.read()
        await wait_all_tasks_blocked()
        await one.muxed.cut()
        assert await cut_end.read() == b"half"
        with pytest.raises(MuxedStreamReset):
            await cut_end.read()


async def test_a_reader_that_waits_for_much_is_not_woken_for_little_but_for_the_end() -> None:
    async with face_to_face() as (one, two):
        stream = await one.muxed.open_stream()
        other = await two.muxed.accept_stream()
        other.enough = 10
        got: list[bytes] = []

        async def read() -> None:
            got.append(await other.read())

        async with trio.open_nursery() as nursery:
            nursery.start_soon(read)
            await stream.write(b"12345")
            await wait_all_tasks_blocked()
            assert not got
            await stream.write(b"67890ab")
        assert got == [b"1234567890ab"]
        await stream.write(b"rest")
        await stream.close_write()
        await wait_all_tasks_blocked()
        assert await other.read() == b"rest"
        with pytest.raises(MuxedStreamEOF):
            await other.read()


async def test_closing_a_connection_first_sends_what_was_written() -> None:
    async with face_to_face() as (one, two):
        stream = await one.muxed.open_stream()
        other = await two.muxed.accept_stream()
        await stream.write(b"last words")
        await stream.close_write()
        await one.muxed.close()
        assert await other.read() == b"last words"
        with pytest.raises(MuxedStreamEOF):
            await other.read()


async def test_closing_a_connection_to_a_frozen_peer_takes_a_second(autojump_clock: MockClock) -> None:
    async with face_to_face() as (one, _):
        stream = await one.muxed.open_stream()
        await wait_all_tasks_blocked()
        one.pipe.freeze()
        await stream.reset()
        with trio.fail_after(2.5):
            await one.muxed.close()


async def test_a_half_closed_stream_carries_the_answer() -> None:
    async with face_to_face() as (one, two):
        stream = await one.muxed.open_stream()
        other = await two.muxed.accept_stream()
        await stream.write(b"question")
        await stream.close_write()
        assert await other.read() == b"question"
        with pytest.raises(MuxedStreamEOF):
            await other.read()
        await other.write(b"answer")
        await other.close()
        assert await stream.read() == b"answer"


async def test_a_peer_that_ignores_flow_control_is_cut_off() -> None:
    async with face_to_face() as (one, two):
        stream = await one.muxed.open_stream()
        await two.muxed.accept_stream()
        frame = pack(FrameKind.DATA, 0, stream.stream_id, BODY_MAX_BYTES) + bytes(BODY_MAX_BYTES)
        with suppress(trio.BrokenResourceError, trio.ClosedResourceError):
            while True:
                await one.muxed.secured_conn.send([frame])
                await wait_all_tasks_blocked()
        assert isinstance(two.muxed.broken, WindowExceeded)


async def test_a_name_that_a_peer_opens_again_in_the_same_message_is_another_stream(autojump_clock: MockClock) -> None:
    async with face_to_face() as (one, two):
        opened, over = (pack(FrameKind.WINDOW_UPDATE, flag, 1, 0) for flag in (Flag.SYN, Flag.RST))
        await one.muxed.secured_conn.send([opened + over + opened])
        stream = await two.muxed.accept_stream()
        await one.muxed.secured_conn.send([pack(FrameKind.DATA, 0, 1, 1) + b"x"])
        with trio.fail_after(FOUND_OUT_S):
            assert await stream.read() == b"x"


async def test_a_reset_in_the_message_that_opens_another_stream_ends_one_stream_and_not_the_connection(
    autojump_clock: MockClock,
) -> None:
    async with face_to_face() as (one, two):
        old = await one.muxed.open_stream()
        its_other_end = await two.muxed.accept_stream()
        await wait_all_tasks_blocked()
        new = await one.muxed.open_stream()
        await old.reset()  # nothing was sent in between
        other_end = await two.muxed.accept_stream()
        await new.write(b"x")
        with trio.fail_after(FOUND_OUT_S):
            assert await other_end.read() == b"x"
            with pytest.raises(MuxedStreamReset, match="The peer reset the stream"):
                await its_other_end.read()


async def test_the_end_of_a_stream_in_the_message_that_opens_another_is_seen(autojump_clock: MockClock) -> None:
    async with face_to_face() as (one, two):
        old = await one.muxed.open_stream()
        its_other_end = await two.muxed.accept_stream()
        await its_other_end.close_write()
        await wait_all_tasks_blocked()
        machine = one.muxed.machine
        machine.open()
        machine.finish(old.stream_id)
        await one.muxed.secured_conn.send([b"".join(machine.output(BODY_MAX_BYTES))])
        await two.muxed.accept_stream()
        with trio.fail_after(FOUND_OUT_S):
            assert await read_to_the_end(its_other_end) == b""
