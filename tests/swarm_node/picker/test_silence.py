"""Silence for several times its usual answer time costs a source its turn; that this node was busy costs none."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from protocol.ids import ChunkId
from protocol.policy.chunks import chunk_id
from protocol.wire.frames import Reason
from swarm_node.picker.picker import Ask, Picker, TakeBack
from swarm_node.picker.sources import ChunkSource, PlanPace
from tests.swarm_node.picker_world import HTTP, PEER_A, PEER_C, RULES, SEEDER, asked_of, picker_for, taken_back_from

MANY = [chunk_id(number.to_bytes(2)) for number in range(300)]
STEP_S = 0.05
SOON_S = 1.0
"""Less than a second source or the word of a silent one is waited for without this rule."""


class Talk:
    """Sources that answer one chunk each `every_s`, unless they are stopped; looks that come in time, or late."""

    def __init__(self, picker: Picker, *sources: ChunkSource, every_s: float = 0.1) -> None:
        self.picker, self.now, self.every_s = picker, 0.0, every_s
        self.owed: dict[str, list[ChunkId]] = {source.name: [] for source in sources}
        self.stopped: set[str] = set()
        self.to_come: set[ChunkId] = set()
        """Nobody can send these yet."""
        self._answered_at = dict.fromkeys(self.owed, 0.0)
        self.orders: list[Ask | TakeBack] = []

    def pass_time(self, seconds: float, *, step_s: float = STEP_S, late: bool = False) -> list[Ask | TakeBack]:
        """Everything ordered meanwhile; `late`: answers are in the line behind the look that came late."""
        until, began = self.now + seconds, len(self.orders)
        while self.now < until - 1e-9:
            self.now += step_s
            acts: list[Callable[[], None]] = [self._answer, self._order]
            for act in reversed(acts) if late else acts:
                act()
        return self.orders[began:]

    def _answer(self) -> None:
        for name, chunks in self.owed.items():
            ready = [chunk for chunk in chunks if chunk not in self.to_come and name not in self.stopped]
            if ready and self.now >= self._answered_at[name] + self.every_s - 1e-9:
                self._answered_at[name] = self.now
                chunks.remove(ready[0])
                self.picker.delivered(name, ready[0], self.now)

    def _order(self) -> None:
        orders = self.picker.next(self.now)
        self.orders += orders
        for order in orders:
            if isinstance(order, Ask):
                self.owed[order.source].append(order.chunk)
            elif order.source not in self.stopped:
                self.owed[order.source].remove(order.chunk)
                self.picker.refused(order.source, order.chunk, Reason.CANCELLED, self.now)


def talk_of(*sources: ChunkSource, every_s: float = 0.1, pace: PlanPace | None = None) -> Talk:
    """Let sources talk for a while; each holds everything."""
    talk = Talk(picker_for(*sources, chunks=MANY, pace=pace), *sources, every_s=every_s)
    for source in sources:
        if source.kind == "peer":
            talk.picker.had(source.name, MANY, 0.0)
    talk.pass_time(2.0)
    return talk


def may_be_silent_s(talk: Talk, source: ChunkSource) -> float:
    """Return how long it takes until all is taken back that a source owes which stops now."""
    talk.stopped.add(source.name)
    began, taken_back = talk.now, list[ChunkId]()
    while talk.now < began + RULES.overdue_s:
        taken_back += taken_back_from(talk.pass_time(STEP_S), source)
        if taken_back and set(taken_back) == set(talk.owed[source.name]):
            break
    return talk.now - began


def test_what_a_silent_parent_owes_is_taken_back_within_a_second_and_it_is_asked_for_nothing_more() -> None:
    talk = talk_of(PEER_A, PEER_C, SEEDER)
    assert may_be_silent_s(talk, PEER_A) <= SOON_S
    assert asked_of(talk.pass_time(2.0), PEER_A) == []


def test_who_usually_takes_longer_may_be_silent_for_longer() -> None:
    quick, slow = talk_of(PEER_A, PEER_C, SEEDER), talk_of(PEER_A, PEER_C, SEEDER, every_s=0.4)
    assert may_be_silent_s(quick, PEER_A) < may_be_silent_s(slow, PEER_A) < RULES.overdue_s


def test_who_has_never_answered_may_be_silent_for_longer_than_any_other() -> None:
    talk = Talk(picker_for(PEER_A, PEER_C, SEEDER, chunks=MANY), PEER_A, PEER_C, SEEDER)
    talk.stopped.add(PEER_A.name)
    for peer in (PEER_A, PEER_C):
        talk.picker.had(peer.name, MANY, 0.0)
    assert taken_back_from(talk.pass_time(1.5 * RULES.silence_s), PEER_A) == []
    assert len(taken_back_from(talk.pass_time(RULES.silence_s), PEER_A)) == len(talk.owed[PEER_A.name])


def test_nobody_waits_for_the_word_of_a_silent_source_that_nothing_comes() -> None:
    """Four WANTs wait at a parent for chunks that are still to come there; it was two seconds for each two of them."""
    silent, helper = replace(PEER_A, stripes=(0, 1, 2)), replace(PEER_C, stripes=())
    talk = Talk(picker_for(silent, helper, chunks=MANY[:12]), silent, helper)
    talk.picker.had(silent.name, MANY[:8], 0.0)
    talk.to_come = set(MANY[8:12])
    talk.pass_time(1.5)
    assert talk.picker.missing == len(talk.owed[silent.name]) == RULES.waits
    talk.stopped.add(silent.name)
    talk.to_come.clear()
    talk.picker.had(helper.name, MANY[:12], talk.now)
    talk.pass_time(2 * SOON_S)
    assert talk.picker.missing == 0


def test_who_speaks_again_is_asked_again_and_may_finish_what_it_was_sending() -> None:
    talk = talk_of(PEER_A, PEER_C, SEEDER)
    first, *others = talk.owed[PEER_A.name]
    talk.stopped.add(PEER_A.name)
    talk.picker.began(PEER_A.name, first, talk.now)
    assert taken_back_from(talk.pass_time(SOON_S), PEER_A) == others
    talk.stopped.clear()
    talk.picker.refused(PEER_A.name, others[0], Reason.CANCELLED, talk.now)
    talk.owed[PEER_A.name].remove(others[0])
    orders = talk.pass_time(STEP_S)
    assert asked_of(orders, PEER_A)
    assert not any(order.chunk == first for order in orders)


def test_bytes_that_arrive_are_a_word() -> None:
    """A slow peer sends the first bytes of a chunk of several MiB long before the last."""
    talk = talk_of(PEER_A, PEER_C, SEEDER)
    talk.stopped.add(PEER_A.name)
    for _ in range(20):
        assert taken_back_from(talk.pass_time(2 * STEP_S), PEER_A) == []
        talk.picker.record_arrival(PEER_A.name, talk.now)
    assert taken_back_from(talk.pass_time(SOON_S), PEER_A)


def test_bytes_that_arrived_long_ago_are_no_word_now() -> None:
    talk = talk_of(PEER_A, PEER_C, SEEDER)
    talk.stopped.add(PEER_A.name)
    orders: list[Ask | TakeBack] = []
    at = talk.now
    while talk.now < at + SOON_S:
        orders += talk.pass_time(STEP_S)
        talk.picker.record_arrival(PEER_A.name, at)
    assert taken_back_from(orders, PEER_A)


def test_where_all_sources_are_silent_nobody_loses_its_turn() -> None:
    """The network was down for a while, and the first who is heard again proves nothing against the others."""
    talk = talk_of(PEER_A, PEER_C, SEEDER)
    talk.stopped |= talk.owed.keys()
    assert not any(isinstance(order, TakeBack) for order in talk.pass_time(2.0))
    talk.stopped -= {SEEDER.name}
    assert not any(isinstance(order, TakeBack) for order in talk.pass_time(RULES.silence_s - RULES.look_s - STEP_S))


@pytest.mark.parametrize("lump_s", [0.5, 1.0, 2.0])
@pytest.mark.parametrize("late", [False, True])
def test_who_was_busy_itself_takes_nobody_for_silent(lump_s: float, late: bool) -> None:
    """A look comes late by half a second to two, and all answers of that time in one lump, before it or after it."""
    talk = talk_of(PEER_A, PEER_C, SEEDER)
    for _ in range(20):
        lump = talk.pass_time(lump_s, step_s=lump_s, late=late)
        assert not any(isinstance(order, TakeBack) for order in lump)
        assert not any(isinstance(order, TakeBack) for order in talk.pass_time(2 * STEP_S))


def test_a_parent_that_sends_in_bursts_keeps_its_turn() -> None:
    """Nothing for most of a second, then all that it was asked for at once, while others send evenly."""
    talk = talk_of(PEER_A, PEER_C, SEEDER)
    for _ in range(10):
        talk.stopped.add(PEER_A.name)
        assert taken_back_from(talk.pass_time(RULES.silence_s - 2 * STEP_S), PEER_A) == []
        for chunk in talk.owed[PEER_A.name]:
            talk.picker.delivered(PEER_A.name, chunk, talk.now)
        talk.owed[PEER_A.name].clear()
        talk.pass_time(STEP_S)


def test_what_nobody_else_holds_is_left_to_the_silent_source() -> None:
    talk = Talk(picker_for(PEER_A, PEER_C, HTTP, chunks=MANY), PEER_A, PEER_C, HTTP)
    talk.picker.had(PEER_A.name, MANY, 0.0)
    talk.picker.had(PEER_C.name, MANY[1::3], 0.0)
    talk.pass_time(2.0)
    talk.stopped.add(PEER_A.name)
    assert taken_back_from(talk.pass_time(SOON_S), PEER_A) == []


def test_in_a_large_swarm_no_silence_counts_before_the_first_chunks_can_be_there() -> None:
    talk = talk_of(PEER_A, PEER_C, SEEDER, pace=PlanPace(hop_s=1.0, lag_s=5.0))
    talk.stopped.add(PEER_A.name)
    assert taken_back_from(talk.pass_time(2.5), PEER_A) == []
    assert taken_back_from(talk.pass_time(2.0), PEER_A)
