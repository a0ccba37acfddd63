"""The Yamux machine under random bytes, random frames, and random talk against a model."""

from collections import Counter, defaultdict
from functools import partial
from itertools import product

from hypothesis import example, given, settings
from hypothesis import strategies as st

from swarm_node.p2p.yamux_frames import INITIAL_WINDOW_BYTES, LENGTH_MAX, Flag, FrameKind, MuxViolation, pack
from swarm_node.p2p.yamux_machine import BODY_MAX_BYTES, Arrived, Ended, Event, Left, Opened, Reset, YamuxMachine
from swarm_node.p2p.yamux_stream import MuxLimits
from tests.swarm_node.p2p.test_yamux_machine import EVERYTHING, SMALL, data, syn

FRAMES = st.builds(
    lambda kind, flags, name, length, body: pack(kind, flags, name, length) + body,
    st.sampled_from(FrameKind),
    st.integers(0, 15),
    st.integers(0, 9) | st.integers(0, LENGTH_MAX),
    st.integers(0, 20) | st.sampled_from([INITIAL_WINDOW_BYTES, INITIAL_WINDOW_BYTES + 1, 2**31, LENGTH_MAX]),
    st.binary(max_size=20),
)


@st.composite
def wires(draw: st.DrawFn) -> tuple[list[bytes], bool]:
    """Streams that a peer opens as it may, frames about them that fit, and then anything; and the machine's side."""
    initiator = draw(st.booleans())
    names = range(2, 8, 2) if initiator else range(1, 7, 2)
    return [syn(name) for name in names] + draw(st.lists(fitting(names), max_size=12)) + draw(
        st.lists(HOSTILE)
    ), initiator


def fitting(names: range) -> st.SearchStrategy[bytes]:
    """Frames whose body is as long as it was said, mostly about streams that exist."""
    name, flag = st.sampled_from(names), st.sampled_from([0, 0, 0, Flag.FIN, Flag.RST])
    return st.one_of(
        st.builds(data, name, st.binary(max_size=20), flag),
        st.builds(partial(pack, FrameKind.WINDOW_UPDATE), flag, name, st.integers(0, 2**20)),
        st.builds(partial(pack, FrameKind.PING), st.sampled_from([Flag.SYN, Flag.ACK]), st.just(0), st.integers(0, 9)),
        st.just(pack(FrameKind.GO_AWAY, 0, 0, 0)),
        st.builds(partial(pack, FrameKind.DATA, 0), name, st.just(INITIAL_WINDOW_BYTES + 1)),
    )


HOSTILE = FRAMES | st.binary(max_size=40)


def test_whatever_a_peer_sends_costs_it_the_connection_or_stays_within_bounds() -> None:
    met: Counter[str] = Counter()

    @settings(max_examples=300)
    @given(wires())
    @example(([syn(1), data(1, b"x", Flag.SYN)], False))
    @example(([data(1, b"abc", Flag.SYN | Flag.FIN | Flag.RST)], False))
    def hear(drawn: tuple[list[bytes], bool]) -> None:
        met["peers"] += 1
        met["peers with an event"] += bool(met_by(*drawn, met))

    hear()
    assert met["peers with an event"] > met["peers"] / 2, met
    for reached in (*EVENTS, "MuxViolation", "WindowExceeded"):
        assert met[reached], f"no peer came as far as {reached}: {met}"


EVENTS = [kind.__name__ for kind in (Opened, Arrived, Ended, Reset, Left)]


def met_by(wire: list[bytes], side: bool, met: Counter[str]) -> int:
    """Give a machine the bytes; count what it makes of them in `met`, and return how many events there were."""
    machine = YamuxMachine(initiator=side, limits=SMALL)
    machine.open()
    kept = events = 0
    try:
        for piece in wire:
            for event in machine.receive(piece):
                events += 1
                met[type(event).__name__] += 1
                kept += len(event.data) if isinstance(event, Arrived) else 0
                if isinstance(event, Opened) and event.stream in machine:
                    machine.accept(event.stream)
    except MuxViolation as violation:
        met[type(violation).__name__] += 1
    assert kept <= SMALL.streams * INITIAL_WINDOW_BYTES
    assert len(machine) <= SMALL.streams
    assert len(machine._control) <= SMALL.control_max_bytes + 12 * 20 * 4
    machine.end()
    assert machine.budget.left == SMALL.receive_max_bytes
    assert not machine._turns
    return events


class Model:
    """A model of what two applications said to each other on every stream, however the machines carried it."""

    def __init__(self) -> None:
        self.said: dict[tuple[int, int], bytes] = defaultdict(bytes)
        self.heard: dict[tuple[int, int], bytes] = defaultdict(bytes)
        self.unread: dict[tuple[int, int], int] = defaultdict(int)
        self.finished: set[tuple[int, int]] = set()
        self.ended: set[tuple[int, int]] = set()
        self.reset: set[int] = set()

    def take(self, side: int, machine: YamuxMachine, events: list[Event]) -> None:
        for event in events:
            match event:
                case Opened(name) if name in machine:
                    machine.accept(name)
                case Arrived(name, body):
                    assert (side, name) not in self.ended, "data after the clean end"
                    self.heard[side, name] += bytes(body)
                    self.unread[side, name] += len(body)
                case Ended(name):
                    whole = self.heard[side, name] == self.said[1 - side, name]
                    assert whole or name in self.reset, "a clean end, and something is missing"
                    self.ended.add((side, name))
                case Reset(name):
                    self.reset.add(name)


STEPS = st.tuples(
    st.sampled_from(["open", "write", "finish", "read", "reset", "close", "carry", "carry", "carry"]),
    st.integers(0, 1),
    st.integers(0, 5),
    st.integers(1, 300) | st.sampled_from([BODY_MAX_BYTES, BODY_MAX_BYTES + 1, INITIAL_WINDOW_BYTES + 1]),
)


@settings(max_examples=60)
@given(st.lists(STEPS, max_size=40))
def test_two_machines_carry_what_is_said_and_forget_what_is_over(steps: list[tuple[str, int, int, int]]) -> None:
    machines = [YamuxMachine(initiator=True), YamuxMachine(initiator=False)]
    wires = [bytearray(), bytearray()]
    model = Model()
    names: list[int] = []

    def carry(side: int, size: int) -> None:
        wires[side] += b"".join(machines[side].output(size))
        machines[side].written()
        piece = bytes(wires[side][:size])
        del wires[side][:size]
        model.take(1 - side, machines[1 - side], machines[1 - side].receive(piece))

    for do, side, pick, size in steps:
        machine, name = machines[side], names[pick % len(names)] if names else 0
        if do == "carry":
            carry(side, size)
        elif do == "open":
            names.append(machine.open())
        elif name not in machine:
            continue
        elif do == "write" and machine.may_write(name) and not machine._streams[name].unsent:
            body = bytes([size % 251]) * size
            model.said[side, name] += body
            machine.write(name, memoryview(body))
        elif do == "finish":
            machine.finish(name)
        elif do == "read":
            taken = min(size, model.unread[side, name])
            model.unread[side, name] -= taken
            machine.read(name, taken)
        elif do == "reset":
            machine.reset(name)
            model.reset.add(name)
        elif do == "close":
            machine.finish(name)
            machine.stop_reading(name)
            model.reset.add(name)  # one side does not listen any more: no promise is left
    for _ in range(10 * (1 + len(names))):
        for side in (0, 1):
            carry(side, EVERYTHING)
            for name in names:
                machines[side].read(name, model.unread.pop((side, name), 0))
    for side, name in product((0, 1), names):
        if name not in model.reset:
            assert model.heard[1 - side, name] == model.said[side, name]
    for machine in machines:
        machine.end()
        assert machine.budget.left == MuxLimits().receive_max_bytes
