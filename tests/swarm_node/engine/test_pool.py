"""Several engine children behind one interface: real children on the CPU, cards that exist only in their names."""

import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import psutil
import pytest
import trio

from protocol.errors import EngineFailed
from protocol.work.rollout import pack_tokens
from swarm_node.engine.cards import EngineCard
from swarm_node.engine.choose import ENGINES, EngineOptions
from swarm_node.engine.messages import GroupDone, GroupFailed, GroupGrown, SampleRequest
from swarm_node.engine.pool import DEATHS_MAX, EnginePool, open_pool
from swarm_node.engine.throughput import SampleWork

pytestmark = pytest.mark.trio

DEADLINE_S = 240.0
COMMAND = ENGINES["llama"].command(EngineOptions(threads=1, device="cpu"))
FAKE = [sys.executable, str(Path(__file__).with_name("fake_child.py"))]
CARDS = tuple(EngineCard(number, f"Fake {number}", {"CUDA_VISIBLE_DEVICES": str(number)}) for number in range(4))
WORK = SampleWork("arithmetic", groups=2, samples=2, max_new_tokens=4, temperature=1.0)


class Permit(NamedTuple):
    """An owner's permission for a card."""

    may_work: bool
    at_once: bool = False
    keep_engine: bool = False


PAUSED, HOT, LATE = Permit(False, at_once=True), Permit(False, at_once=True, keep_engine=True), Permit(False)


def request(
    name: str, *, max_new_tokens: int = 4, samples: int = 2, seed: int = 1, report_every_s: float = 0
) -> SampleRequest:
    return SampleRequest(
        request_id=name,
        version=1,
        prompt=pack_tokens([19, 20, 31]),
        seed=seed,
        samples=samples,
        max_new_tokens=max_new_tokens,
        temperature=1.0,
        report_every_s=report_every_s,
    )


def long(count: int) -> list[SampleRequest]:
    """Groups that no card ends before a test has looked at it."""
    return [request(f"long {number}", max_new_tokens=200, samples=8, seed=number) for number in range(count)]


async def rest_of(pool: EnginePool) -> dict[str, GroupDone | GroupFailed]:
    """The groups that still end, by name."""
    ended: dict[str, GroupDone | GroupFailed] = {}
    while (answer := await pool.finished()) is not None:
        if not isinstance(answer, GroupGrown):
            assert answer.request_id not in ended, "a group ends once"
            ended[answer.request_id] = answer
    return ended


def groups_of(pool: EnginePool) -> list[int]:
    return [card["groups"] for card in pool.states()]


def states_of(pool: EnginePool) -> list[str]:
    return [card["state"] for card in pool.states()]


def pids_of(pool: EnginePool) -> list[int | None]:
    return [card["pid"] for card in pool.states()]


async def until(pool: EnginePool, states: Sequence[str]) -> None:
    """Wait until the cards are in these states."""
    while states_of(pool) != list(states):
        await pool.changes()


async def test_four_cards_sample_at_once_each_in_a_child_that_sees_only_its_card(policy: Path) -> None:
    with trio.fail_after(DEADLINE_S):
        async with open_pool(COMMAND, CARDS) as pool:
            assert (pool.speed_with(), pool.cards_ready) == (0.0, 1)
            await pool.load(policy, 1, WORK)
            pids = [pid for pid in pids_of(pool) if pid is not None]
            assert len(set(pids)) == 4
            assert [psutil.Process(pid).environ()["CUDA_VISIBLE_DEVICES"] for pid in pids] == ["0", "1", "2", "3"]
            assert pool.cards_ready == 4
            speeds = [card["tokens_per_s"] for card in pool.states()]
            assert all(speeds), "each card is measured before its first group"
            assert pool.speed_with() == pytest.approx(sum(speeds))
            await pool.submit([request(f"group {number}", seed=number) for number in range(12)])
            assert sum(groups_of(pool)) == 12, "by the speeds of the cards, which a busy machine makes unequal"
            ended = await rest_of(pool)
            assert len(ended) == 12
            assert pool.starts == 4
            await pool.load(policy, 2)
            assert pids_of(pool) == pids, "a swap keeps the children"
            await pool.rest()
            assert pids_of(pool) == [None] * 4
        assert not any(psutil.pid_exists(pid) for pid in pids)


async def test_any_number_of_cards_draws_the_same_tokens(policy: Path) -> None:
    drawn = []
    with trio.fail_after(DEADLINE_S):
        for cards in (CARDS[:1], CARDS[:3]):
            async with open_pool(COMMAND, cards) as pool:
                await pool.load(policy, 1)
                await pool.submit([request(f"group {number}", max_new_tokens=20, seed=number) for number in range(6)])
                ended = await rest_of(pool)
            drawn.append({name: answer.samples for name, answer in ended.items() if isinstance(answer, GroupDone)})
    assert len(drawn[0]) == 6
    assert drawn[0] == drawn[1]


async def test_kill_9_of_one_card_costs_only_its_groups_which_others_sample_again(policy: Path) -> None:
    with trio.fail_after(DEADLINE_S):
        async with open_pool(COMMAND, CARDS) as pool:
            await pool.load(policy, 1)
            await pool.submit(long(4))
            assert groups_of(pool) == [1, 1, 1, 1]
            killed = pids_of(pool)[2]
            assert killed is not None
            os.kill(killed, signal.SIGKILL)
            ended = await rest_of(pool)
            assert {name: type(answer) for name, answer in ended.items()} == {f"long {n}": GroupDone for n in range(4)}
            await until(pool, ["idle"] * 4)
            assert pool.starts == 5, "the card is back, with a new child"
            assert pids_of(pool)[2] != killed


async def test_a_paused_card_hands_its_groups_to_the_others_and_frees_its_memory(policy: Path) -> None:
    with trio.fail_after(DEADLINE_S):
        async with open_pool(COMMAND, CARDS) as pool:
            await pool.load(policy, 1)
            ended: dict[str, GroupDone | GroupFailed] = {}

            async def collect() -> None:
                ended.update(await rest_of(pool))

            async with trio.open_nursery() as nursery:
                await pool.submit(long(4))
                pool.steer({1: PAUSED, 3: HOT})
                assert pool.cards_ready == 2
                nursery.start_soon(collect)
                while pids_of(pool)[1] is not None:
                    await pool.changes()
                assert states_of(pool)[1::2] == ["resting", "resting"]
                assert groups_of(pool)[1::2] == [0, 0]
                assert pids_of(pool)[3] is not None, "a break keeps the engine"
            assert all(isinstance(answer, GroupDone) for answer in ended.values())
            assert len(ended) == 4
            pool.steer({})
            await until(pool, ["idle"] * 4)
            assert pool.starts == 5


async def test_a_card_whose_hours_end_finishes_what_it_has(policy: Path) -> None:
    with trio.fail_after(DEADLINE_S):
        async with open_pool(COMMAND, CARDS[:2]) as pool:
            await pool.load(policy, 1)
            await pool.submit([request("a", max_new_tokens=60, seed=1), request("b", max_new_tokens=60, seed=2)])
            pool.steer({0: LATE})
            await pool.submit([request("c", seed=3)])
            assert groups_of(pool) == [1, 2]
            assert set(await rest_of(pool)) == {"a", "b", "c"}
            await until(pool, ["resting", "idle"])
            assert pool.starts == 2


async def test_a_moved_group_continues_after_what_it_has_reported(policy: Path) -> None:
    """So the coordinator, which has the reports, gets a claim that agrees with them."""
    wanted = request("told", max_new_tokens=300, samples=8, report_every_s=0.05)
    with trio.fail_after(DEADLINE_S):
        async with open_pool(COMMAND, CARDS[:1]) as pool:
            await pool.load(policy, 1)
            await pool.submit([wanted])
            whole = (await rest_of(pool))["told"]
        async with open_pool(COMMAND, CARDS[:2]) as pool:
            await pool.load(policy, 1)
            await pool.submit([wanted])
            told: dict[int, bytes] = {}
            moved = False
            while not isinstance(answer := await pool.finished(), GroupDone):
                assert isinstance(answer, GroupGrown)
                for part in answer.parts:
                    before = told.get(part.sample, b"")
                    assert part.start == len(before) // 4, "reports follow each other over the move"
                    told[part.sample] = before + part.tokens
                if not moved:
                    moved = True
                    pool.steer({groups_of(pool).index(1): PAUSED})
    assert moved
    assert isinstance(whole, GroupDone)
    assert [sample.tokens for sample in answer.samples] == [sample.tokens for sample in whole.samples]
    assert [len(sample.logprobs) for sample in answer.samples] == [len(sample.tokens) for sample in answer.samples]
    assert all(answer.samples[number].tokens.startswith(tokens) for number, tokens in told.items())


async def test_the_failure_of_the_last_card_is_the_callers_and_the_next_groups_find_a_new_child(policy: Path) -> None:
    with trio.fail_after(DEADLINE_S):
        async with open_pool(COMMAND, CARDS[:2]) as pool:
            await pool.load(policy, 1)
            await pool.submit(long(2))
            for pid in pids_of(pool):
                assert pid is not None
                os.kill(pid, signal.SIGKILL)
            with pytest.raises(EngineFailed, match="SIGKILL"):
                await rest_of(pool)
            await pool.cancel(["long 0", "long 1"])
            assert await pool.finished() is None
            await pool.submit([request("again")])
            assert set(await rest_of(pool)) == {"again"}


async def test_a_group_under_which_every_card_fails_is_given_up(policy: Path) -> None:
    with trio.fail_after(DEADLINE_S):
        async with open_pool([*FAKE, "dies"], CARDS) as pool:
            await pool.load(policy, 1)
            await pool.submit([request("poison")])
            answer = (await rest_of(pool))["poison"]
            assert isinstance(answer, GroupFailed)
            assert f"failed {DEATHS_MAX + 1} times with this group" in answer.message


async def test_cancelled_groups_are_forgotten_on_every_card(policy: Path) -> None:
    with trio.fail_after(DEADLINE_S):
        async with open_pool(COMMAND, CARDS[:2]) as pool:
            await pool.load(policy, 1)
            await pool.submit([*long(2), request("short")])
            await pool.cancel(["long 0", "long 1", "unknown"])
            assert set(await rest_of(pool)) == {"short"}
            assert pool.starts == 2


async def test_a_card_that_is_left_out_starts_no_child(policy: Path) -> None:
    small = CARDS[1]._replace(left_out="too small")
    with trio.fail_after(DEADLINE_S):
        async with open_pool(COMMAND, (CARDS[0], small)) as pool:
            await pool.load(policy, 1)
            assert pool.cards_ready == 1
            assert [(card["state"], card["reason"]) for card in pool.states()] == [
                ("idle", ""),
                ("left out", "too small"),
            ]
            assert pool.starts == 1


async def test_joined_cards_are_one_engine_and_rest_together(policy: Path) -> None:
    pair = EngineCard(0, "Fake", {"CUDA_VISIBLE_DEVICES": "0,1"}, others=(1,), why_joined="2 cards per engine: large")
    with trio.fail_after(DEADLINE_S):
        async with open_pool(COMMAND, (pair, CARDS[2])) as pool:
            await pool.load(policy, 1)
            first, second, third = pool.states()
            assert (first["number"], second["number"], third["number"]) == (0, 1, 2)
            assert first["pid"] == second["pid"] != third["pid"]
            assert first["reason"] == "2 cards per engine: large"
            assert second["reason"] == "joined to card 0, whose line has their figures"
            assert pool.cards_ready == 2
            pool.steer({0: Permit(may_work=True), 1: PAUSED, 2: Permit(may_work=True)})
            await until(pool, ["resting", "resting", "idle"])
            while pids_of(pool)[0] is not None:
                await pool.changes()
            pool.steer({0: HOT, 1: LATE})
            assert states_of(pool)[:2] == ["resting", "resting"]
            pool.steer({})
            await until(pool, ["idle", "idle", "idle"])


async def test_a_turn_goes_to_the_card_of_the_turn_before(policy: Path) -> None:
    with trio.fail_after(DEADLINE_S):
        async with open_pool(COMMAND, CARDS[:3]) as pool:
            await pool.load(policy, 1)
            placed: dict[int, set[int]] = {}
            for turn in range(3):
                for seed in (1, 2, 3, 4):
                    lease = request(f"turn {turn} of {seed}", max_new_tokens=64, seed=seed)
                    await pool.submit([lease.model_copy(update={"turn_tokens_max": 2})])
                    placed.setdefault(seed, set()).add(groups_of(pool).index(1))
                    await rest_of(pool)
            assert all(len(cards) == 1 for cards in placed.values())
