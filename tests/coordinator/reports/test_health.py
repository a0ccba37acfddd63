"""Lasting figures and the alarm: each cause is told with the setting that cures it."""

import math
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import sqlalchemy as sa

from coordinator.config import parse
from coordinator.reports import health, overview, summary
from coordinator.reports.health import alarm, percentile
from coordinator.rules.capacity import VISIBLE, PoolLoad
from coordinator.store.facts import FINISHED, set_fact
from coordinator.store.tables import batches
from coordinator.transactions.fleet import kappa
from tests.coordinator.world import World, answer

CALM = PoolLoad(staleness=3, rollouts_per_update=16, train_s=100.0, broadcast_s=50.0, rollout_s=20.0)


def figures(world: World) -> dict[str, Any]:
    found: dict[str, Any] = world.run(health.figures, None, 1)
    return found


def test_a_round_in_which_all_is_well_raises_no_alarm() -> None:
    assert alarm(CALM, 2, 0.05, Counter(), 0.0) == ""
    assert alarm(None, 2, 1.0, Counter(), 0.0) == ""


def test_rollouts_longer_than_the_bound_allows_are_named_with_the_staleness_that_suffices() -> None:
    long = replace(CALM, rollout_s=310.0)
    told = alarm(long, 2, 0.4, Counter(), 0.0)
    assert "S = 3 is too small for rollouts of 3.1 steps: raise staleness.max_updates to 5" in told
    assert "sampling.max_new_tokens" in told
    assert VISIBLE.bubble(replace(long, staleness=5), 2, math.inf) == 0


def test_a_bound_that_adapts_is_not_to_be_raised_by_the_operator() -> None:
    told = alarm(replace(CALM, rollout_s=310.0), 2, 0.4, Counter(), 0.0, staleness_max=6)
    assert "S = 3 is too small for rollouts of 3.1 steps: the bound adapts, and may rise to 6" in told
    assert "staleness.max_updates" not in told


def test_slow_broadcasts_are_named() -> None:
    told = alarm(replace(CALM, broadcast_s=500.0), 1, 0.4, Counter(), 0.0)
    assert "S = 3 is too small for broadcasts of 5.0 steps: raise staleness.max_updates to 6" in told


def test_too_few_nodes_are_named_with_what_they_gave() -> None:
    told = alarm(CALM, 2, 0.5, Counter(), 0.0)
    assert "nodes gave 0.08 of 0.16 groups/s" in told


@pytest.mark.parametrize(
    ("cause", "setting"),
    [
        ("expired", "leases.timeout_s"),
        ("stale_version", "staleness.max_updates"),
        ("stale_in_buffer", "staleness.max_updates"),
        ("logprob_mismatch", "docs/protocol.md"),
    ],
)
def test_work_in_vain_is_named_with_its_main_cause(cause: str, setting: str) -> None:
    told = alarm(CALM, 2, 0.0, Counter({cause: 9, "other": 1}), 0.25)
    assert f"25% of the work is wasted, most of it as {cause}" in told
    assert setting in told


def test_what_was_trained_on_has_an_age_and_what_was_not_a_reason(world: World) -> None:
    key = world.join(1)
    for _ in range(4):
        world.earn(key)
    world.train(1)
    world.train(2)
    lease = world.lease(key)
    world.now_ms += world.terms.timeout_ms
    world.expire()
    found = figures(world)
    assert found["age"] == {"mean": 0.5, "p99": 1, "max": 1}
    assert found["in_vain"] == {"expired": 1}
    assert found["in_vain_share"] == 1 / 5
    assert found["alarms"] == [], "one lease of five tells nothing"
    assert world.submit(key, answer(key, lease)).code == "lease_closed"


def test_a_round_of_other_trainers_has_no_advice_about_work_that_it_did_not_train_on(world: World) -> None:
    lease = world.lease(world.join(1))
    world.now_ms += world.terms.timeout_ms
    world.expire()
    assert lease is not None
    assert figures(world)["in_vain_share"] == 1.0
    found = world.run(health.figures, None, 1, external=True)
    assert found["in_vain"] == {"expired": 1}
    assert (found["in_vain_share"], found["alarm"]) == (0.0, "")


def test_throwing_long_groups_away_shows_as_length_bias(world: World) -> None:
    key = world.join(1)
    for _ in range(2):
        lease = world.lease(key)
        world.now_ms += 100
        world.submit(key, answer(key, lease))
    world.train(1)
    assert figures(world)["length_bias"] is None
    world.lease(key)
    world.now_ms += 1000
    world.expire()
    assert figures(world)["length_bias"] == 10.0


def test_an_empty_round_has_figures(world: World) -> None:
    found = figures(world)
    assert (found["in_vain_share"], found["alarm"], found["age"]["max"]) == (0.0, "", 0)


def test_a_restart_forgets_nothing(world: World) -> None:
    key = world.join(1)
    world.earn(key)
    world.earn(key)
    world.train(1)
    before = figures(world)
    world.reopen()
    assert figures(world) == before


def test_the_interval_follows_what_is_measured_unless_it_is_set() -> None:
    follows = parse({"staleness": {"max_updates": 3}})
    assert kappa(None, follows) == 2
    assert kappa(CALM, follows) == 2
    assert kappa(replace(CALM, broadcast_s=150.0), follows) == 1
    fixed = parse({"staleness": {"max_updates": 3, "publish_every": 2}})
    assert kappa(replace(CALM, broadcast_s=150.0), fixed) == 2


def test_a_percentile_is_an_age_that_occurred() -> None:
    ages = Counter({0: 98, 1: 1, 5: 1})
    assert [percentile(ages, share) for share in (0.5, 0.98, 0.99, 1.0)] == [0, 0, 1, 5]
    assert percentile(Counter(), 0.99) == 0


def test_a_policy_that_is_taught_to_be_short_raises_an_alarm_of_its_own(world: World) -> None:
    """Eight short groups are trained on and one long one comes too late, while the rest of the figures are fine."""
    key = world.join(1)
    for number in range(1, 11):
        for _ in range(2):
            lease = world.lease(key, version=number)
            world.now_ms += 100
            world.submit(key, answer(key, lease))
        world.train(number)
        world.publish(number + 1, number)
    world.lease(key, version=11)
    world.now_ms += world.terms.timeout_ms
    world.expire()
    found = figures(world)
    assert found["in_vain_share"] < health.IN_VAIN_MAX
    assert "take 10.0 times as long" in found["alarm"]
    assert "leases.timeout_s" in found["alarm"]
    world.run(set_fact, FINISHED, True)
    assert figures(world) == found | {"alarm": "", "alarms": []}, "nothing can be set any more, and the figures stay"


def test_versions_kept_for_a_slow_auditor_raise_the_alarm_before_they_go(world: World) -> None:
    assert figures(world)["kept_for_audits"] == {"size_bytes": 0, "room_bytes": 0}
    for size, alarms in ((79, False), (80, True), (100, True)):
        world.run(set_fact, health.KEPT, {"size_bytes": size * 2**20, "room_bytes": 100 * 2**20})
        found = figures(world)
        assert found["kept_for_audits"]["size_bytes"] == size * 2**20
        assert ("audit.kept_gib" in found["alarm"]) == alarms
    world.run(set_fact, FINISHED, True)
    assert figures(world)["alarm"] == ""


def test_updates_that_change_nothing_raise_the_alarm(world: World) -> None:
    """The gradients were not finite: the groups are paid for, and the policy does not change."""
    key = world.join(1)
    for number in range(1, health.SKIPPED_MAX + 2):
        for _ in range(2):
            world.earn(key, version=number)
        world.train(number)
        world.publish(number + 1, number)
        skipped = {"learner/skipped": 1.0, "reward/mean": 0.5}
        change = sa.update(batches).where(batches.c.batch == number).values(metrics=skipped)
        world.run(lambda connection, change=change: connection.execute(change))
        found = figures(world)
        assert found["updates_skipped_lately"] == number
        assert ("changed nothing" in found["alarm"]) == (number > health.SKIPPED_MAX)
    alarmed, many = figures(world)["alarm"], health.SKIPPED_MAX + 1
    assert f"{many} of the last {many} updates" in alarmed
    assert "learner.learning_rate" in alarmed
    world.run(set_fact, FINISHED, True)
    assert figures(world)["alarm"] == ""


def test_the_share_for_which_the_learner_stands_still_for_versions_is_told(world: World) -> None:
    key = world.join(1)
    for _ in range(2):
        world.earn(key)
    world.train(1)
    assert figures(world)["learner_outgoing_share_lately"] == 0, "a learner that does not say"
    changed = sa.update(batches).values(idle_s=2.0, busy_s=18.0, metrics={health.OUTGOING_S: 5.0})
    world.run(lambda connection: connection.execute(changed))
    assert figures(world)["learner_outgoing_share_lately"] == 0.25
    config = parse({})
    told = world.run(summary.explained, config=config, alive_since_ms=0) | summary.public_settings(config, "a" * 64)
    assert "saving and publishing 25% of its time lately" in overview.text(told)


@pytest.mark.parametrize(("share", "alarms"), [(0.1, False), (0.11, True)])
def test_a_correction_that_drops_much_raises_the_alarm(world: World, share: float, alarms: bool) -> None:
    key = world.join(1)
    for number in range(1, health.MASKED_UPDATES + 1):
        assert figures(world)["masked_share_lately"] is None
        for _ in range(2):
            world.earn(key, version=number)
        world.train(number)
        world.publish(number + 1, number)
        change = sa.update(batches).where(batches.c.batch == number).values(metrics={health.MASKED: share})
        world.run(lambda connection, change=change: connection.execute(change))
    found = figures(world)
    assert found["masked_share_lately"] == pytest.approx(share)
    assert ("correction.sequence_low" in found["alarm"]) == alarms
    assert ("dropped 11%" in found["alarm"]) == alarms
