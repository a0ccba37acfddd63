"""Rounds of one agent: the end of one is no end of the others, and is named to the owner."""

import logging
import os
import signal
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import trio
import trio.testing
from trio.testing import MockClock
from typer.testing import CliRunner

from protocol.errors import OwnerBanned, SwarmError
from protocol.text.money import CREDITS
from swarm_node.allowance.governor import Governor, UploadCounter
from swarm_node.allowance.settings import Limits
from swarm_node.app import (
    ORDER_EVERY_S,
    SIGNAL_AGAIN_S,
    AgentParts,
    AgentRound,
    AgentRounds,
    RoundChoice,
    describe_end,
    keep_order,
    leave_on_signal,
)
from swarm_node.cli import app
from swarm_node.coordinator_api import last_round
from swarm_node.coordinator_api.join_string import parse
from swarm_node.member import MemberSettings, open_home
from swarm_node.work.engine_turn import EngineTurns

OWN_PRICE = 3_000_000
A, B = (parse(f"http://127.0.0.1:{port}#{letter * 64}") for port, letter in ((7, "a"), (9, "b")))


class Engine:
    """An engine that counts how often its memory is freed."""

    def __init__(self) -> None:
        self.rests = 0

    async def rest(self) -> None:
        await trio.lowlevel.checkpoint()
        self.rests += 1


class Played(AgentRound):
    """A round whose parts are one act."""

    def __init__(
        self, turns: EngineTurns, number: int, home: Path, act: Callable[[], Awaitable[object]], engine: Engine
    ) -> None:
        member = MemberSettings(join=(A, B)[number], home=home, name="n", price_micros_per_mtok=OWN_PRICE)
        governor = Governor(home, UploadCounter(home, lambda: datetime.now(UTC)))
        parts = AgentParts(cast(Any, None), cast(Any, None), governor, cast(Any, engine))
        super().__init__(parts, turns.turn_of(number), RoundChoice(member, cast(Any, None)))
        self._act = act

    async def _run(self, rounds: AgentRounds) -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._act)


async def both(
    home: Path, *acts: Callable[[], Awaitable[object]], engine: Engine | None = None
) -> list[SwarmError | None]:
    turns, engine = EngineTurns(), engine or Engine()
    async with trio.open_nursery() as background:
        rounds = AgentRounds([Played(turns, n, home, act, engine) for n, act in enumerate(acts)], background)
        async with trio.open_nursery() as nursery:
            for one in rounds.all:
                nursery.start_soon(one.run, rounds)
    return [one.error for one in rounds.all]


async def bug() -> None:
    raise ZeroDivisionError("in the parts of one round")


async def ban() -> None:
    raise OwnerBanned("The owner is banned.")


@pytest.mark.trio
@pytest.mark.parametrize(("ends", "said"), [(bug, "ZeroDivisionError"), (ban, "The owner is banned.")])
async def test_a_round_that_fails_ends_alone_and_is_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, ends: Callable[[], Awaitable[object]], said: str
) -> None:
    goes_on = []

    async def work() -> None:
        await trio.testing.wait_all_tasks_blocked()
        goes_on.append(True)

    caplog.set_level(logging.INFO)
    first, second = await both(tmp_path, ends, work)
    assert first is not None
    assert said in str(first)
    assert (second, goes_on) == (None, [True])
    assert A.url in caplog.text
    assert said in caplog.text, "with the traceback"


@pytest.mark.trio
async def test_the_fault_of_an_agent_with_one_round_ends_it(tmp_path: Path) -> None:
    with pytest.raises(ExceptionGroup) as raised:
        await both(tmp_path, bug)
    assert raised.group_contains(ZeroDivisionError)


def test_the_same_round_twice_is_refused_before_anything_starts(tmp_path: Path) -> None:
    again = str(A).replace("127.0.0.1", "localhost")
    result = CliRunner().invoke(app, ["join", str(A), str(B), again, "--home", str(tmp_path), "--quiet"])
    assert result.exit_code != 0
    said = f"{result.output} {result.exception}"
    assert "The round at http://127.0.0.1:7 is named twice." in said
    assert last_round.find_last(tmp_path) is None


def test_the_values_of_all_limits_stand_in_one_column(tmp_path: Path) -> None:
    lines = CliRunner().invoke(app, ["limits", "--home", str(tmp_path)]).output.splitlines()
    values = Limits.model_fields.keys() - {"cards"}
    shown = [line for line in lines if line.partition(" ")[0] in values]
    assert len(shown) == len(values)
    assert len({len(line) - len(line.partition(" ")[2].lstrip()) for line in shown}) == 1


@pytest.mark.trio
async def test_a_round_that_ends_while_others_go_on_frees_the_memory_if_it_has_the_engine(tmp_path: Path) -> None:
    async def end() -> None:
        pass

    for ending, rests in ((0, 1), (1, 0)):  # the first round has the engine
        engine, seen = Engine(), list[int]()

        async def go_on(engine: Engine = engine, seen: list[int] = seen) -> None:
            await trio.testing.wait_all_tasks_blocked()
            seen.append(engine.rests)

        await both(tmp_path, *((end, go_on) if ending == 0 else (go_on, end)), engine=engine)
        assert seen == [rests]
        assert engine.rests == rests, "with the last round the engine ends anyway"


@pytest.mark.trio
async def test_a_round_that_works_is_shown_before_one_that_rests_or_has_ended(tmp_path: Path) -> None:
    turns = EngineTurns()
    first, second = (Played(turns, number, tmp_path, bug, Engine()) for number in (0, 1))
    for one in (first, second):
        one.agent = cast(Any, one)
    async with trio.open_nursery() as nursery:
        rounds = AgentRounds([first, second], nursery)
        assert rounds.shown() is first, "it has the engine"
        first.gate.pause.paused = True
        assert rounds.shown() is second
        second.ended.set()
        assert rounds.shown() is first, "the other has ended"


def working(
    turns: EngineTurns, number: int, home: Path, *, price: int | None, tokens_per_s: float, is_new: bool
) -> Played:
    """A round whose last accepted lease had a price, and in which this machine has a speed."""
    one = Played(turns, number, home, bug, Engine())
    worker = SimpleNamespace(
        tokens_per_s=tokens_per_s,
        engine=SimpleNamespace(is_new=is_new),
        offers=SimpleNamespace(last_price_micros_per_mtok=price),
    )
    member = SimpleNamespace(policies=SimpleNamespace(unit=CREDITS))
    one.agent = cast(Any, SimpleNamespace(worker=worker, member=member, round_row=lambda: {"phase": "idle"}))
    return one


@pytest.mark.trio
async def test_the_best_paid_round_is_first_only_if_the_owner_wants_it(tmp_path: Path) -> None:
    turns = EngineTurns()
    slow = working(turns, 0, tmp_path, price=2_000_000, tokens_per_s=10.0, is_new=False)
    fast = working(turns, 1, tmp_path, price=1_000_000, tokens_per_s=50.0, is_new=False)
    async with trio.open_nursery() as nursery:
        rounds = AgentRounds([slow, fast], nursery)
        assert rounds.order(best_paid_first=False) == (0, 1)
        assert rounds.order(best_paid_first=True) == (1, 0)
        cast(Any, slow.agent).worker.tokens_per_s = 1000.0
        assert rounds.order(best_paid_first=True) == (1, 0), "a speed that wavers changes no order"
        assert slow.pay().tokens_per_s == 1000.0, "but is shown"
        cast(Any, slow.agent).worker.offers.last_price_micros_per_mtok = 6_000_000
        assert rounds.order(best_paid_first=True) == (0, 1), "a price that rises does"
        slow.ended.set()
        assert rounds.order(best_paid_first=True) == (1, 0), "it is of no more use"


@pytest.mark.trio
async def test_a_lease_with_an_absurd_price_does_not_put_its_round_first(tmp_path: Path) -> None:
    """No round pays a node more than its own price with the largest bonus, and a claim comes long after the lease."""
    turns = EngineTurns()
    absurd = working(turns, 0, tmp_path, price=10**12, tokens_per_s=10.0, is_new=False)
    honest = working(turns, 1, tmp_path, price=OWN_PRICE, tokens_per_s=21.0, is_new=False)
    async with trio.open_nursery() as nursery:
        rounds = AgentRounds([absurd, honest], nursery)
        assert rounds.order(best_paid_first=True) == (1, 0)


@pytest.mark.trio
async def test_the_speed_that_orders_a_round_is_that_of_its_whole_first_load(tmp_path: Path) -> None:
    turns = EngineTurns()
    new = working(turns, 0, tmp_path, price=OWN_PRICE, tokens_per_s=1.0, is_new=True)
    other = working(turns, 1, tmp_path, price=OWN_PRICE, tokens_per_s=10.0, is_new=False)
    async with trio.open_nursery() as nursery:
        rounds = AgentRounds([new, other], nursery)
        assert rounds.order(best_paid_first=True) == (0, 1)
        worker = cast(Any, new.agent).worker
        worker.tokens_per_s, worker.engine.is_new = 40.0, False
        assert rounds.order(best_paid_first=True) == (0, 1), "the first card alone was slower"


@pytest.mark.trio
async def test_the_owner_sees_what_each_round_pays(tmp_path: Path) -> None:
    turns = EngineTurns()
    known = working(turns, 0, tmp_path, price=2_000_000, tokens_per_s=10.0, is_new=False)
    unknown = working(turns, 1, tmp_path, price=None, tokens_per_s=0.0, is_new=True)
    assert known.pay().to_json() == {"price_micros_per_mtok": 2_000_000, "hour_micros": 72_000}
    assert unknown.pay().to_json() == {"price_micros_per_mtok": OWN_PRICE, "hour_micros": None}, "the node's own price"


@pytest.mark.trio
async def test_a_change_of_the_owners_limits_changes_the_order_of_a_running_agent(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    turns = EngineTurns()
    governor = Governor(tmp_path, UploadCounter(tmp_path, lambda: datetime.now(UTC)))
    slow = working(turns, 0, tmp_path, price=1, tokens_per_s=10.0, is_new=False)
    fast = working(turns, 1, tmp_path, price=1_000_000, tokens_per_s=50.0, is_new=False)
    first, second = turns.turn_of(0), turns.turn_of(1)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(keep_order, governor, AgentRounds([slow, fast], nursery), turns)
        assert first.try_acquire()
        assert second.is_used_before
        governor.limits = Limits(best_paid_first=True)
        with trio.fail_after(ORDER_EVERY_S + 1):
            await second.unused_before()
        governor.limits = Limits()
        with trio.fail_after(ORDER_EVERY_S + 1):
            await turns.until_used_before(1, used=True)
        nursery.cancel_scope.cancel()


def test_an_agent_whose_rounds_its_owner_ended_has_finished_as_requested(tmp_path: Path) -> None:
    governor = Governor(tmp_path, UploadCounter(tmp_path, lambda: datetime.now(UTC)))
    gates = [governor.open_round(A), governor.open_round(B)]
    governor.finish(round_name=gates[0].name)
    assert describe_end(governor, gates) == ("all rounds are finished", "")
    governor.leave(round_name=gates[1].name)
    assert describe_end(governor, gates) == ("finished, as you requested", "")
    assert describe_end(governor, gates[:1]) == ("finished, as you requested", "")


@pytest.mark.trio
@pytest.mark.parametrize(
    ("number", "said"),
    [
        (signal.SIGINT, "Ctrl-C, or the signal SIGINT"),
        (signal.SIGTERM, "the signal SIGTERM"),
        (signal.SIGHUP, "a closed terminal, or the signal SIGHUP"),
    ],
)
async def test_a_signal_leaves_as_the_command_does_and_the_next_one_stops_at_once(
    tmp_path: Path, autojump_clock: MockClock, number: int, said: str
) -> None:
    governor = Governor(tmp_path, UploadCounter(tmp_path, lambda: datetime.now(UTC)))
    send, signals = trio.open_memory_channel[int](1)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(leave_on_signal, signals, governor, nursery.cancel_scope)
        await send.send(number)
        await send.send(number)  # a program that signals the process and its group
        await trio.sleep(SIGNAL_AGAIN_S)
        assert governor.leaving.is_set()
        assert describe_end(governor, [governor.open_round(A)]) == (said, "")
        assert not nursery.cancel_scope.cancel_called
        await send.send(number)
        await trio.sleep_forever()


@pytest.mark.trio
async def test_ctrl_c_after_the_command_to_leave_stops_at_once_and_the_reason_stays(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    governor = Governor(tmp_path, UploadCounter(tmp_path, lambda: datetime.now(UTC)))
    governor.leave()
    send, signals = trio.open_memory_channel[int](1)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(leave_on_signal, signals, governor, nursery.cancel_scope)
        await send.send(signal.SIGINT)
        with trio.fail_after(1):
            await trio.sleep_forever()
    assert describe_end(governor, []) == ("stopped by `swarm-node leave`", "")


@pytest.mark.trio
async def test_a_closed_terminal_is_a_signal_to_leave_except_for_an_agent_under_nohup(tmp_path: Path) -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)  # these tests may run under nohup, too
    try:
        async with open_home(tmp_path / "terminal", {}) as node:
            os.kill(os.getpid(), signal.SIGHUP)
            assert await anext(node.signals) == signal.SIGHUP
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        async with open_home(tmp_path / "nohup", {}) as node:
            assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)
