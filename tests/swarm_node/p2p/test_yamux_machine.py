"""The Yamux machine: its rules, and what becomes of a peer that breaks them."""

from collections.abc import Callable

import pytest

from swarm_node.p2p.yamux_frames import (
    INITIAL_WINDOW_BYTES,
    LENGTH_MAX,
    Flag,
    FrameFlood,
    FrameKind,
    MuxViolation,
    PeerSilent,
    WindowExceeded,
    pack,
)
from swarm_node.p2p.yamux_machine import (
    BODY_MAX_BYTES,
    CRUMB_BYTES,
    FRAME_MAX_BYTES,
    HEAD_BYTES,
    Arrived,
    Ended,
    Event,
    Left,
    NoStream,
    Opened,
    Reset,
    YamuxMachine,
)
from swarm_node.p2p.yamux_stream import TRANSITIONS, Act, MuxLimits, ReceiveBudget, Stream, StreamState

SMALL = MuxLimits(
    window_open_bytes=INITIAL_WINDOW_BYTES,
    window_max_bytes=INITIAL_WINDOW_BYTES,
    streams=4,
    backlog=3,
    frames_per_tick=64,
    control_max_bytes=600,
)
EVERYTHING = 2**30


def syn(name: int, window: int = 0) -> bytes:
    return pack(FrameKind.WINDOW_UPDATE, Flag.SYN, name, window)


def data(name: int, body: bytes, flags: int = 0) -> bytes:
    return pack(FrameKind.DATA, flags, name, len(body)) + body


def sent(machine: YamuxMachine) -> bytes:
    return b"".join(machine.output(EVERYTHING))


def responder(limits: MuxLimits = SMALL) -> YamuxMachine:
    """A machine whose peer opens the odd streams, with stream 1 open."""
    machine = YamuxMachine(initiator=False, limits=limits)
    assert machine.receive(syn(1)) == [Opened(1)]
    machine.accept(1)
    assert sent(machine) == pack(FrameKind.WINDOW_UPDATE, Flag.ACK, 1, 0)
    return machine


@pytest.mark.parametrize("state", StreamState)
@pytest.mark.parametrize("act", Act)
def test_a_stream_follows_its_table_and_nothing_else(state: StreamState, act: Act) -> None:
    stream = Stream(1, ours=True, budget=ReceiveBudget(0))
    stream.state = state
    if (state, act) in TRANSITIONS:
        stream.act(act)
        assert stream.state is TRANSITIONS[state, act]
    else:
        with pytest.raises(MuxViolation):
            stream.act(act)


def test_a_stream_is_opened_used_and_ended_in_both_directions() -> None:
    ours, theirs = YamuxMachine(initiator=True), YamuxMachine(initiator=False)
    name = ours.open()
    ours.write(name, memoryview(b"question"))
    ours.finish(name)
    assert theirs.receive(sent(ours)) == [Opened(name), Arrived(name, memoryview(b"question")), Ended(name)]
    theirs.accept(name)
    theirs.read(name, len(b"question"))
    theirs.write(name, memoryview(b"answer"))
    theirs.finish(name)
    assert ours.receive(sent(theirs)) == [Arrived(name, memoryview(b"answer")), Ended(name)]
    assert name in ours, "what is unread is still owned by the reader"
    ours.read(name, len(b"answer"))
    assert (len(ours), len(theirs)) == (0, 0)
    assert ours.budget.left == theirs.budget.left == MuxLimits().receive_max_bytes


def test_frames_arrive_whole_however_they_are_cut() -> None:
    wire = syn(1) + data(1, b"abc") + data(1, b"", Flag.FIN) + pack(FrameKind.PING, Flag.SYN, 0, 7)
    for size in range(1, len(wire)):
        machine = YamuxMachine(initiator=False)
        events: list[Event] = []
        for at in range(0, len(wire), size):
            events += machine.receive(wire[at : at + size])
        arrived = b"".join(bytes(event.data) for event in events if isinstance(event, Arrived))
        assert arrived == b"abc"
        assert [event for event in events if not isinstance(event, Arrived)] == [Opened(1), Ended(1)]
        assert sent(machine) == pack(FrameKind.PING, Flag.ACK, 0, 7)


def test_nothing_is_sent_beyond_the_window_and_everything_within() -> None:
    machine = YamuxMachine(initiator=True)
    name = machine.open()
    sent(machine)
    machine.write(name, memoryview(bytes(INITIAL_WINDOW_BYTES + 5)))
    frames = machine.output(EVERYTHING)
    assert sum(len(frame) - 12 for frame in frames) == INITIAL_WINDOW_BYTES
    assert max(map(len, frames)) == FRAME_MAX_BYTES
    assert not machine.has_output
    assert machine.written() == []
    machine.receive(pack(FrameKind.WINDOW_UPDATE, Flag.ACK, name, 3))
    assert sent(machine) == data(name, bytes(3))
    machine.receive(pack(FrameKind.WINDOW_UPDATE, 0, name, 3))
    assert sent(machine) == data(name, bytes(2))
    assert machine.written() == [name]


def test_no_frame_is_larger_than_what_is_sent_at_once() -> None:
    machine = YamuxMachine(initiator=True)
    name = machine.open()
    sent(machine)
    machine.write(name, memoryview(bytes(20_000)))
    assert [len(frame) - 12 for frame in machine.output(8_000)] == [HEAD_BYTES, 8_000]
    assert [len(frame) - 12 for frame in machine.output(EVERYTHING)] == [12_000 - HEAD_BYTES]


def test_the_first_bytes_of_something_long_do_not_wait_for_the_rest_of_their_frame() -> None:
    machine = YamuxMachine(initiator=True)
    name = machine.open()
    sent(machine)
    machine.write(name, memoryview(bytes(60_000)))
    assert [len(frame) - 12 for frame in machine.output(EVERYTHING)] == [HEAD_BYTES, 60_000 - HEAD_BYTES]
    assert machine.written() == [name]
    machine.write(name, memoryview(bytes(4_000)))
    assert [len(frame) - 12 for frame in machine.output(EVERYTHING)] == [4_000]


def test_a_crumb_at_the_end_goes_along() -> None:
    machine = YamuxMachine(initiator=True)
    name = machine.open()
    sent(machine)
    for more, bodies in ((CRUMB_BYTES, [8_000 + CRUMB_BYTES]), (CRUMB_BYTES + 1, [8_000, CRUMB_BYTES + 1])):
        machine.write(name, memoryview(bytes(8_000 + more)))
        assert [len(machine.output(8_000)[0]) - 12 for _ in bodies] == bodies
        assert not machine.has_output


def test_streams_take_turns_and_answers_go_first() -> None:
    machine = YamuxMachine(initiator=True)
    large, small = machine.open(), machine.open()
    sent(machine)
    machine.write(large, memoryview(bytes(3 * BODY_MAX_BYTES)))
    machine.write(small, memoryview(b"!"))
    machine.receive(pack(FrameKind.PING, Flag.SYN, 0, 1))
    names = [int.from_bytes(frame[4:8]) for frame in machine.output(EVERYTHING)]
    assert names == [0, large, small, large, large, large]


def test_credit_returns_at_half_window_and_the_window_doubles_as_it_is_read() -> None:
    machine = responder(MuxLimits(window_max_bytes=4 * INITIAL_WINDOW_BYTES))
    half = INITIAL_WINDOW_BYTES // 2
    machine.receive(data(1, bytes(half)))
    machine.read(1, half - 1)
    assert sent(machine) == b""
    machine.read(1, 1)
    assert sent(machine) == pack(FrameKind.WINDOW_UPDATE, 0, 1, half + INITIAL_WINDOW_BYTES)


def test_what_is_not_read_earns_no_memory() -> None:
    host = ReceiveBudget(10 * INITIAL_WINDOW_BYTES)
    machine = YamuxMachine(initiator=False, host=host)
    machine.receive(syn(1) + data(1, bytes(INITIAL_WINDOW_BYTES)))
    assert sent(machine) == b""
    assert host.left == 9 * INITIAL_WINDOW_BYTES


def test_all_peers_in_concert_get_no_more_than_the_host_has() -> None:
    host = ReceiveBudget(3 * INITIAL_WINDOW_BYTES)
    crowd = [YamuxMachine(initiator=False, host=host) for _ in range(2)]
    opened = [event for machine in crowd for event in machine.receive(syn(1) + syn(3))]
    assert opened == [Opened(1), Opened(3), Opened(1)]
    assert sent(crowd[1]) == pack(FrameKind.WINDOW_UPDATE, Flag.RST, 3, 0)
    assert host.left == 0
    with pytest.raises(NoStream, match="all the memory"):
        YamuxMachine(initiator=True, host=host).open()
    for machine in crowd:
        machine.end()
    assert host.left == 3 * INITIAL_WINDOW_BYTES


def test_a_peer_that_ignores_flow_control_is_found_out_at_the_header() -> None:
    machine = responder()
    machine.receive(data(1, bytes(INITIAL_WINDOW_BYTES)))
    with pytest.raises(WindowExceeded, match="stream 1 by 1 bytes"):
        machine.receive(pack(FrameKind.DATA, 0, 1, 1))


def test_a_frame_of_four_gigabytes_is_refused_before_its_data() -> None:
    with pytest.raises(WindowExceeded):
        responder().receive(pack(FrameKind.DATA, 0, 1, LENGTH_MAX))


def test_a_window_that_overflows_is_refused() -> None:
    machine = responder()
    machine.receive(pack(FrameKind.WINDOW_UPDATE, 0, 1, LENGTH_MAX - INITIAL_WINDOW_BYTES))
    with pytest.raises(MuxViolation, match="overflows"):
        machine.receive(pack(FrameKind.WINDOW_UPDATE, 0, 1, 1))


def test_a_stream_that_was_reset_takes_what_was_under_way_and_no_more() -> None:
    machine = responder()
    machine.receive(data(1, bytes(1000)))
    machine.reset(1)
    assert machine.receive(data(1, bytes(INITIAL_WINDOW_BYTES - 1000))) == []
    with pytest.raises(WindowExceeded, match="after its end"):
        machine.receive(data(1, b"!"))


@pytest.mark.parametrize(
    ("attack", "named"),
    [
        pytest.param(syn(1), "twice", id="a stream opened twice"),
        pytest.param(syn(2), "never opened", id="a stream of ours opened by the peer"),
        pytest.param(syn(0), "never opened", id="stream zero"),
        pytest.param(data(3, b"x"), "never opened", id="data on a stream nobody opened"),
        pytest.param(data(2, b"x"), "never opened", id="data on a stream we did not open"),
        pytest.param(pack(FrameKind.WINDOW_UPDATE, 0, 99, 1), "never opened", id="credit for a stream nobody opened"),
        pytest.param(data(1, b"", Flag.FIN) * 2, "ends", id="a stream ended twice"),
        pytest.param(data(1, b"", Flag.FIN) + data(1, b"x"), "after its end", id="data after the end"),
        pytest.param(pack(FrameKind.PING, Flag.SYN, 1, 0), "must not name a stream", id="a ping on a stream"),
        pytest.param(pack(FrameKind.GO_AWAY, 0, 1, 0), "must not name a stream", id="a farewell on a stream"),
        pytest.param(b"\x01" + bytes(11), "version 1", id="another version"),
        pytest.param(b"\x00\x04" + bytes(10), "kind 4", id="an unknown kind"),
        pytest.param(b"\x00\x00\x00\x10" + bytes(8), "flags 0x10", id="an unknown flag"),
    ],
)
def test_a_peer_that_breaks_the_rules_is_named(attack: bytes, named: str) -> None:
    with pytest.raises(MuxViolation, match=named):
        responder().receive(attack)


@pytest.mark.parametrize(
    "attack",
    [
        pytest.param(lambda n: pack(FrameKind.PING, Flag.SYN, 0, n), id="pings"),
        pytest.param(lambda n: pack(FrameKind.PING, Flag.ACK, 0, n), id="pongs"),
        pytest.param(lambda n: pack(FrameKind.WINDOW_UPDATE, 0, 1, 1), id="crumbs of credit"),
        pytest.param(lambda n: data(1, b""), id="empty data"),
        pytest.param(
            lambda n: syn(2 * n + 3) + pack(FrameKind.WINDOW_UPDATE, Flag.RST, 2 * n + 3, 0), id="rapid reset"
        ),
        pytest.param(lambda n: b"", id="messages without a byte"),
        pytest.param(lambda n: data(1, bytes(1000))[n : n + 1], id="a message for each byte of a frame"),
    ],
)
def test_a_flood_of_frames_that_carry_nothing_ends(attack: Callable[[int], bytes]) -> None:
    machine = responder()
    frames = map(attack, range(10 * SMALL.frames_per_tick))

    def flood() -> None:
        for frame in frames:
            machine.receive(frame)
            sent(machine)

    with pytest.raises(FrameFlood, match="too many frames"):
        flood()
    assert len(list(frames)) > 8 * SMALL.frames_per_tick, "it ended late"
    assert len(machine) <= 2


def test_a_peer_that_does_not_take_its_answers_is_cut_off() -> None:
    machine = responder()
    with pytest.raises(FrameFlood, match="does not read them"):
        machine.receive(pack(FrameKind.PING, Flag.SYN, 0, 1) * SMALL.frames_per_tick)


def test_honest_talk_pays_for_its_frames() -> None:
    """Stock Yamux sends one update for every frame it gets."""
    machine = responder()
    for _ in range(100 * SMALL.frames_per_tick):
        machine.write(1, memoryview(bytes(1024)))
        sent(machine)
        machine.receive(pack(FrameKind.WINDOW_UPDATE, 0, 1, 1024))


def test_streams_beyond_the_limit_are_refused_and_leave_room_when_they_end() -> None:
    machine = responder()
    for name in (3, 5, 7):
        assert machine.receive(syn(name)) == [Opened(name)]
    assert machine.receive(syn(9)) == []
    assert sent(machine) == pack(FrameKind.WINDOW_UPDATE, Flag.RST, 9, 0)
    assert machine.receive(pack(FrameKind.WINDOW_UPDATE, Flag.RST, 3, 0)) == [Reset(3)]
    assert machine.receive(syn(11)) == [Opened(11)]


def test_no_more_streams_are_opened_than_the_peer_accepts() -> None:
    machine = YamuxMachine(initiator=True, limits=SMALL)
    names = [machine.open() for _ in range(SMALL.backlog)]
    with pytest.raises(NoStream):
        machine.open()
    machine.receive(pack(FrameKind.WINDOW_UPDATE, Flag.ACK, names[0], 0))
    machine.open()
    with pytest.raises(NoStream):
        machine.open()


def test_after_a_farewell_no_stream_is_opened_and_the_open_ones_go_on() -> None:
    machine = responder()
    assert machine.receive(pack(FrameKind.GO_AWAY, 0, 0, 0) + data(1, b"x")) == [Left(0), Arrived(1, memoryview(b"x"))]
    with pytest.raises(NoStream):
        machine.open()


def test_a_silent_peer_is_pinged_and_then_given_up() -> None:
    machine = responder()
    machine.tick()
    assert not machine.has_output
    machine.tick()
    assert sent(machine) == pack(FrameKind.PING, Flag.SYN, 0, 1)
    machine.receive(pack(FrameKind.PING, Flag.ACK, 0, 1))
    machine.tick()
    machine.tick()
    assert sent(machine) == pack(FrameKind.PING, Flag.SYN, 0, 2)
    with pytest.raises(PeerSilent):
        machine.tick()


def test_a_stream_that_we_closed_does_not_wait_for_its_peer_for_ever() -> None:
    machine = responder()
    machine.finish(1)
    machine.stop_reading(1)
    sent(machine)
    assert machine.receive(data(1, b"unwanted")) == []
    for _ in range(2):
        assert 1 in machine
        machine.receive(pack(FrameKind.PING, Flag.ACK, 0, 0))
        machine.tick()
    assert sent(machine) == pack(FrameKind.WINDOW_UPDATE, Flag.RST, 1, 0)
    assert machine.gone() == [1]


def test_a_withdrawn_write_sends_no_more() -> None:
    machine = responder()
    machine.write(1, memoryview(bytes(2 * BODY_MAX_BYTES)))
    machine.output(1)
    assert machine.withdraw(1)
    assert not machine.has_output
    assert not machine.withdraw(1)
