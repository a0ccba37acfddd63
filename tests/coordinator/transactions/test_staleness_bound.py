"""The bound that adapts: its transitions, and that it decides over new leases alone."""

import math
from collections.abc import Iterable
from dataclasses import asdict, replace
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.config import parse
from coordinator.reports import summary
from coordinator.store import tables
from coordinator.store.facts import get_fact, set_fact
from coordinator.transactions import batches, staleness_bound
from coordinator.transactions.fleet import kappa
from coordinator.transactions.leases import terms_of
from coordinator.transactions.staleness_bound import (
    CALM_UPDATES,
    LOUD_UPDATES,
    PATIENCE_MAX,
    BoundState,
    StalenessRules,
    UpdateFigures,
    after,
)
from protocol.errors import ConfigInvalid
from protocol.wire.signing import NodeKey
from protocol.work.learning import UpdateReport
from tests.coordinator.world import World, answer

CALM, LOUD, BETWEEN = UpdateFigures(0.0, 1.0), UpdateFigures(0.3, 0.9), UpdateFigures(0.04, 0.95)
UNEQUAL = UpdateFigures(0.0, 0.5)
RULES = StalenessRules(1, 4)


def run(
    state: BoundState, updates: Iterable[UpdateFigures], rules: StalenessRules = RULES, first: int = 1
) -> list[BoundState]:
    """The states after each update."""
    states = list[BoundState]()
    for number, seen in enumerate(updates, first):
        state = after(state, number, seen, rules)
        states.append(state)
    return states


def settled(bound: int, **given: Any) -> BoundState:
    """A state under which every update is judged."""
    return BoundState(bound, judged_from=0, **given)


class TestTransitions:
    def test_it_rises_by_one_after_calm_updates(self) -> None:
        states = run(BoundState(1), [CALM] * CALM_UPDATES)
        assert [state.bound for state in states] == [1] * (CALM_UPDATES - 1) + [2]

    def test_it_falls_by_one_after_few_loud_updates_and_is_more_patient_then(self) -> None:
        states = run(settled(4), [LOUD] * LOUD_UPDATES)
        assert [state.bound for state in states] == [4] * (LOUD_UPDATES - 1) + [3]
        assert states[-1].patience == 2 * CALM_UPDATES

    def test_tokens_of_unequal_weight_make_it_fall_too(self) -> None:
        assert run(settled(4), [UNEQUAL] * LOUD_UPDATES)[-1].bound == 3

    def test_between_the_two_it_stays(self) -> None:
        assert {state.bound for state in run(settled(2), [BETWEEN] * 500)} == {2}

    def test_one_bad_update_among_good_ones_changes_nothing(self) -> None:
        few = [UpdateFigures(0.15, 0.95), *[CALM] * (CALM_UPDATES - 2)]
        assert {state.bound for state in run(settled(3), few)} == {3}

    def test_nothing_is_judged_that_was_leased_under_the_bound_before(self) -> None:
        """A fall at update n from S: the last group of S enters batch n + S + 1 at the latest."""
        fallen = run(settled(4), [LOUD] * LOUD_UPDATES, first=7)[-1]
        assert fallen.judged_from == 10 + 4 + 2
        old = run(fallen, [LOUD] * 5, first=11)
        assert (old[-1].bound, old[-1].seen, old[-1].calm) == (3, (), 0)
        assert run(old[-1], [LOUD] * LOUD_UPDATES, first=16)[-1].bound == 2

    def test_a_bound_that_was_too_large_is_tried_ever_more_rarely(self) -> None:
        """All bounds above 2 are noisy: the share of updates that try them falls with time, but never to zero."""
        state, loud, tries = BoundState(1), list[bool](), 0
        for number in range(1, 1001):
            before = state.bound
            loud.append(before > 2)
            state = after(state, number, LOUD if before > 2 else CALM, RULES)
            tries += state.bound > max(before, 2)
        assert state.patience == PATIENCE_MAX
        assert tries > 5
        assert sum(loud[500:]) / 500 < 0.15

    @pytest.mark.parametrize(
        ("rules", "bound"), [(StalenessRules(1, 4), 4), (StalenessRules(2, 2), 2), (StalenessRules(0, 1), 1)]
    )
    def test_calm_updates_lead_to_the_operators_maximum_and_no_further(self, rules: StalenessRules, bound: int) -> None:
        assert run(BoundState(rules.min_updates), [CALM] * 300, rules)[-1].bound == bound

    def test_it_never_falls_below_its_least(self) -> None:
        assert run(settled(4), [LOUD] * 300)[-1].bound == 1

    @pytest.mark.parametrize(("stored", "bound"), [(9, 4), (0, 1)])
    def test_new_bounds_of_the_operator_count_at_once(self, stored: int, bound: int) -> None:
        assert after(settled(stored), 1, BETWEEN, RULES).bound == bound

    @given(
        st.lists(st.builds(UpdateFigures, st.floats(0, 1), st.floats(0, 1)), max_size=60),
        st.integers(0, 3),
        st.integers(0, 5),
        st.integers(0, 9),
    )
    def test_whatever_is_measured_it_moves_by_one_within_its_bounds(
        self, updates: list[UpdateFigures], least: int, above: int, start: int
    ) -> None:
        rules = StalenessRules(least, least + above)
        bounds = [state.bound for state in run(settled(start), updates, rules)]
        assert all(rules.min_updates <= one <= rules.max_updates for one in bounds)
        assert all(abs(one - other) <= 1 for one, other in pairwise(bounds))


def adapting(world: World, least: int = 0, most: int = 2) -> World:
    world.terms = replace(world.terms, staleness=most, adapts=StalenessRules(least, most))
    world.judge = replace(world.judge, terms=world.terms)
    return world


def report(world: World, number: int, **metrics: float) -> None:
    message = UpdateReport(number=number, mismatched=(), metrics=metrics, idle_s=1.0, busy_s=3.0)
    world.run(batches.report, message, audits=world.audits, adapts=world.terms.adapts, now_ms=world.now_ms)


def stand_at(world: World, state: BoundState) -> None:
    world.run(set_fact, staleness_bound.BOUND, asdict(state))


def stored(world: World) -> Any:
    return world.run(get_fact, staleness_bound.BOUND)


def take(world: World, key: NodeKey, groups: int = 8) -> int:
    return len(world.offer(key, groups=groups).leases)


class TestInForce:
    def test_leases_are_offered_by_the_bound_in_force_and_not_by_the_operators(self, world: World) -> None:
        adapting(world)
        key = world.join(1)
        assert take(world, key) == 2, "(0 + 0 + 1) · 2 groups"
        stand_at(world, BoundState(2))
        assert take(world, key) == 4

    def test_a_version_older_than_the_bound_in_force_gets_no_lease(self, world: World) -> None:
        adapting(world)
        key = world.join(1)
        world.earn(key)
        world.earn(key)
        world.train(1)
        assert world.offer(key).reason == "old_version"
        stand_at(world, BoundState(1))
        assert world.offer(key).leases

    def test_work_of_a_larger_bound_is_taken_and_trained_on_when_the_bound_has_fallen(self, world: World) -> None:
        adapting(world)
        stand_at(world, BoundState(2))
        key = world.join(1)
        given = world.offer(key, groups=6).leases
        assert len(given) == 6
        for lease in given[:2]:
            world.submit(key, answer(key, lease))
        world.train(1)
        stand_at(world, BoundState(0))
        for lease in given[2:]:
            assert world.submit(key, answer(key, lease)).outcome == "accepted"
        world.train(2)
        world.train(3)
        assert [row["max_staleness"] for row in world.rows(tables.batches)] == [0, 1, 2]
        assert {row["state"] for row in world.rows(tables.rollouts)} == {"batched"}

    def test_a_report_moves_the_bound_once_and_a_restart_forgets_nothing(self, world: World) -> None:
        adapting(world)
        stand_at(world, settled(0, seen=(CALM,) * 7, calm=7))
        key = world.join(1)
        world.earn(key)
        world.earn(key)
        world.batch(1)
        for _ in range(2):
            report(world, 1, **{staleness_bound.MASKED: 0.0, staleness_bound.EFFECTIVE: 1.0})
        assert stored(world)["bound"] == 1
        assert stored(world)["judged_from"] == 1 + 1 + 2
        assert world.rows(tables.batches)[0]["metrics"][staleness_bound.IN_FORCE] == 1
        before = stored(world)
        world.reopen()
        assert stored(world) == before
        assert take(world, key) == 2, "(1 + 0 + 1) · 2 groups, of which two are trained"

    @pytest.mark.parametrize(
        "metrics",
        [{}, {staleness_bound.MASKED: 0.9}, {staleness_bound.MASKED: math.inf, staleness_bound.EFFECTIVE: 1.0}],
    )
    def test_an_update_that_measured_nothing_says_nothing(self, world: World, metrics: dict[str, float]) -> None:
        adapting(world)
        before = asdict(settled(2, seen=(LOUD,) * 3, calm=3))
        world.run(set_fact, staleness_bound.BOUND, before)
        assert world.run(staleness_bound.follow, 9, metrics, world.terms.adapts) == 2
        assert stored(world)["calm"] == 3

    def test_where_it_does_not_adapt_nothing_is_remembered(self, world: World) -> None:
        key = world.join(1)
        world.earn(key)
        world.earn(key)
        world.batch(1)
        report(world, 1, **{staleness_bound.MASKED: 0.9, staleness_bound.EFFECTIVE: 0.1})
        assert stored(world) is None
        assert staleness_bound.IN_FORCE not in world.rows(tables.batches)[0]["metrics"]

    def test_status_says_which_is_in_force(self, world: World) -> None:
        config = parse({"staleness": {"adaptive": True}})
        assert world.run(summary.status, config=config, alive_since_ms=0)["staleness_bound"] == 1
        stand_at(world, BoundState(3))
        assert world.run(summary.status, config=config, alive_since_ms=0)["staleness_bound"] == 3
        assert world.run(summary.status, config=parse({}), alive_since_ms=0)["staleness_bound"] == 4


class TestSettings:
    def test_it_is_off_unless_set(self) -> None:
        assert terms_of(parse({})).adapts is None
        terms = terms_of(parse({"staleness": {"adaptive": True, "max_updates": 6}}))
        assert (terms.staleness, terms.adapts) == (6, StalenessRules(1, 6))

    def test_versions_come_often_enough_for_every_bound(self) -> None:
        assert kappa(None, parse({"staleness": {"adaptive": True, "max_updates": 9}})) == 1
        assert staleness_bound.rules_of(
            parse({"staleness": {"adaptive": True, "publish_every": 4}}).staleness
        ) == StalenessRules(3, 4)

    @pytest.mark.parametrize(
        ("settings", "why"),
        [
            ({"staleness": {"adaptive": True, "min_updates": 5}}, "min_updates = 5 is more than max_updates = 4"),
            ({"staleness": {"adaptive": True, "admission": "buffer"}}, "needs admission = visible"),
            ({"staleness": {"adaptive": True}, "correction": {"mode": "none"}}, "correction.mode is none"),
        ],
    )
    def test_what_it_could_not_follow_is_refused(self, settings: dict[str, Any], why: str) -> None:
        with pytest.raises(ConfigInvalid, match=why):
            parse(settings)
