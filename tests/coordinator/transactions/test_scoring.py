"""Rewards that come after acceptance: nothing is lost, nothing is paid twice, and a verifier's failure is no zero."""

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from coordinator.reports import health, history
from coordinator.store import tables
from coordinator.transactions import reward_columns, scoring
from protocol.tasks import Reward
from protocol.wire.signing import NodeKey
from tests.coordinator.world import END, HONEST_TOKENS, World, answer, rest

GOOD = [Reward(1.0, "ok", {"exact": 1.0}), Reward(0.5, "invalid", {"exact": 0.5})]


@pytest.fixture
def later(world: World) -> World:
    """A round whose rewards take processes."""
    world.judge = replace(world.judge, reward=None)
    return world


def waiting(world: World) -> list[scoring.Unscored]:
    found: list[scoring.Unscored] = world.run(scoring.waiting, 100)
    return found


def score(world: World, claim_id: str) -> bool:
    return bool(world.run(scoring.scored, claim_id, GOOD, now_ms=world.now_ms))


def give_up(world: World, claim_id: str, reason: str = "It hung.") -> bool:
    return bool(world.run(scoring.give_up, claim_id, reason, audits=world.audits, now_ms=world.now_ms))


def earned(world: World, groups: int) -> tuple[NodeKey, list[str]]:
    key = world.join(1)
    for _ in range(groups):
        world.earn(key)
    return key, [one.claim_id for one in waiting(world)]


def states(world: World) -> list[str]:
    return [row["state"] for row in sorted(world.rows(tables.rollouts), key=lambda row: row["group_no"])]


def test_acceptance_and_pay_wait_for_no_reward(later: World) -> None:
    key, claims = earned(later, 2)
    assert later.owed(key.node_id) == (2 * HONEST_TOKENS, 0)
    assert states(later) == ["unscored"] * 2
    assert all(reward_columns.read(row) == [] for row in later.rows(tables.rollouts))
    assert later.batch(1) is None, "nothing is trained on without its reward"
    assert [one.completions for one in waiting(later)] == [((10, END),) * 2, ((11, END),) * 2]
    assert score(later, claims[0])
    assert later.batch(1) is None
    assert score(later, claims[1])
    batch = later.train(1)
    assert [[sample.reward for sample in group.samples] for group in batch.groups] == [[1.0, 0.5]] * 2
    assert reward_columns.read(later.rows(tables.rollouts)[0]) == GOOD
    assert later.owed(key.node_id) == (0, 2 * HONEST_TOKENS)


def test_after_a_crash_before_the_reward_it_is_computed_again(later: World) -> None:
    key, claims = earned(later, 1)
    later.reopen()
    assert [one.claim_id for one in waiting(later)] == claims
    assert score(later, claims[0])
    later.reopen()
    assert waiting(later) == []
    assert not score(later, claims[0]), "a second scorer changes nothing"
    assert later.owed(key.node_id) == (HONEST_TOKENS, 0)
    assert later.audit() == []


def test_a_group_that_cannot_be_judged_is_paid_and_never_trained_on(later: World) -> None:
    key, claims = earned(later, 3)
    assert give_up(later, claims[0])
    assert not give_up(later, claims[0])
    assert not score(later, claims[0]), "what is given up stays so"
    assert all(score(later, claim) for claim in claims[1:])
    later.train(1)
    later.release_leftovers()
    assert states(later) == ["verifier_error", "batched", "batched"]
    assert later.owed(key.node_id) == (0, 3 * HONEST_TOKENS)
    assert later.rejected() == {}, "its node is not punished"
    (row,) = (row for row in later.rows(tables.rollouts) if row["claim_id"] == claims[0])
    assert np.isnan(np.frombuffer(row["rewards"], "<f4")).all(), "and it is no reward of 0"
    assert {(one.status, one.reason) for one in reward_columns.read(row)} == {("verifier_error", "It hung.")}
    assert later.group_states()[0] == "verifier_error"
    assert later.audit() == []


def test_its_prompt_is_not_offered_again_and_its_place_is_free(later: World) -> None:
    """Else a prompt on which the verifier always hangs would be paid for ever."""
    _, claims = earned(later, 1)
    give_up(later, claims[0])
    other = later.join(2)
    offered = later.offer(other, groups=64).leases
    assert len(offered) == (later.terms.staleness + 1) * later.terms.groups_per_update
    assert later.group_states()[0] == "verifier_error"


def test_groups_that_wait_for_rewards_take_part_in_the_bound(later: World) -> None:
    """Otherwise a stopped verifier would let nodes sample for ever."""
    bound = (later.terms.staleness + 1) * later.terms.groups_per_update
    earned(later, bound)
    assert later.offer(later.join(2)).reason == "ahead"


def test_what_nobody_judged_is_paid_when_the_round_ends(later: World) -> None:
    key, _ = earned(later, 2)
    assert later.release_leftovers() == 2
    assert states(later) == ["unused"] * 2
    assert waiting(later) == []
    assert later.owed(key.node_id) == (0, 2 * HONEST_TOKENS)


def test_the_reward_of_work_that_was_handed_on_is_of_the_whole(later: World) -> None:
    first, second = later.join(1), later.join(2)
    lease = later.leave(first, {0: [10], 1: [10, END]}, heir=second)
    later.submit(second, answer(second, lease, samples=rest(lease)))
    (one,) = waiting(later)
    assert one.completions == ((10, END), (10, END))


def test_the_operator_is_told(later: World) -> None:
    _, claims = earned(later, 2)
    assert later.run(scoring.trouble) == {}
    give_up(later, claims[0], "fn gave nan.")
    (incident,) = later.run(history.incidents)
    assert (incident.what, incident.count) == ("verifier_error", 1)
    assert "fn gave nan." in incident.detail
    later.run(scoring.stand_still, "It cannot be loaded.", now_ms=5)
    told = later.run(health.figures, None, 1)
    assert told["in_vain"] == {"verifier_error": 1}
    assert "It cannot be loaded." in told["alarm"]
    score(later, claims[1])
    told = later.run(health.figures, None, 1)
    assert told["verifier"] == {"groups": 1, "reason": "It cannot be loaded.", "ms": 5, "down": False}
    assert told["alarm"] == "", "one group of two tells nothing"
    assert "fix the reward" in health.alarm(None, 1, 0.0, Counter(told["in_vain"]), 0.5)
