"""The fleet: cheap, enough, and calm; by hand, and for any pool."""

import math
from dataclasses import dataclass, field, replace
from itertools import combinations
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.rules.fleet_choice import (
    PROOF_S,
    TRUST,
    Change,
    Fleet,
    FleetCandidate,
    FleetRules,
    GroupRecord,
    Need,
    cheapest_cover,
    decide,
    measured_rate,
)

CALM = FleetRules(window_s=60, margin=0.1, dwell_s=300)
NEED = Need(floor=2.0, target=2.2)

pools = st.lists(st.tuples(st.floats(0.01, 10), st.floats(0.0, 10)), max_size=9).map(
    lambda rows: [FleetCandidate(f"n{number}", rate, cost) for number, (rate, cost) in enumerate(rows)]
)


def node(name: str, cost: float, rate: float = 1.0) -> FleetCandidate:
    return FleetCandidate(name, rate, cost)


@dataclass
class Clock:
    """A fleet over time; remembers every change."""

    rules: FleetRules = CALM
    now_s: float = 0.0
    fleet: Fleet = field(default_factory=Fleet)
    changes: list[Change] = field(default_factory=list)

    def pass_(self, seconds: float, pool: list[FleetCandidate], need: Need = NEED, step_s: float = 10.0) -> set[str]:
        """Decide every few seconds; who works then."""
        end_s = self.now_s + seconds
        while self.now_s < end_s:
            self.now_s += step_s
            self.fleet, changes = decide(self.fleet, pool, need, self.rules, now_s=self.now_s)
            self.changes += changes
        return set(self.fleet.working)


POOL = [node("a", 1.0), node("b", 2.0), node("c", 3.0), node("d", 4.0), node("e", 5.0)]


def test_the_cheapest_that_suffice_work_from_the_beginning() -> None:
    assert Clock().pass_(10, POOL) == {"a", "b", "c"}


def test_a_node_that_dies_is_replaced_at_once_and_the_reasons_say_so() -> None:
    clock = Clock()
    clock.pass_(100, POOL)
    assert clock.pass_(10, [one for one in POOL if one.name != "b"]) == {"a", "c", "d"}
    lost, came = clock.changes[-2:]
    assert (lost.name, lost.works, lost.reason) == ("b", False, "it went offline")
    assert (came.name, came.works) == ("d", True)
    assert "2 of 2.2 groups/s" in came.reason


def test_a_small_shortfall_waits_for_the_window_and_a_large_one_does_not() -> None:
    clock = Clock()
    clock.pass_(10, POOL)
    assert clock.pass_(60, POOL, Need(2.9, 3.1)) == {"a", "b", "c"}
    assert clock.pass_(10, POOL, Need(2.9, 3.1)) == {"a", "b", "c", "d"}
    assert clock.pass_(10, POOL, Need(4.5, 5.0)) == {"a", "b", "c", "d", "e"}


def test_excess_releases_the_dearest_but_only_after_window_and_dwell() -> None:
    clock = Clock()
    clock.pass_(10, POOL, Need(4.0, 5.0))
    assert len(clock.pass_(290, POOL)) == 5
    assert clock.pass_(20, POOL) == {"a", "b", "c"}
    assert [change.name for change in clock.changes[-2:]] == ["e", "d"]


def test_a_need_that_swings_faster_than_the_window_moves_nobody() -> None:
    clock = Clock()
    clock.pass_(400, POOL, Need(2.5, 3.0))
    before = len(clock.changes)
    for _ in range(40):
        clock.pass_(30, POOL, Need(2.5, 3.0))
        clock.pass_(30, POOL, Need(2.9, 3.2))
    assert len(clock.changes) == before


def test_prices_that_cross_each_other_all_the_time_move_nobody_more_than_once_per_dwell() -> None:
    clock, chance = Clock(), Random(7)
    for _ in range(300):
        clock.pass_(10, [node(name, chance.uniform(1, 5)) for name in "abcde"])
    for name in "abcde":
        assert sum(change.name == name for change in clock.changes) <= 1 + clock.now_s / CALM.dwell_s


def test_who_raises_its_price_is_replaced_by_who_is_cheaper_now() -> None:
    clock = Clock()
    clock.pass_(400, POOL)
    dear = [replace(one, cost=9.0) if one.name == "a" else one for one in POOL]
    assert clock.pass_(50, dear) == {"a", "b", "c"}
    assert clock.pass_(20, dear) == {"b", "c", "d"}


def test_a_price_within_the_margin_moves_nobody() -> None:
    clock = Clock()
    clock.pass_(400, POOL)
    assert clock.pass_(900, [replace(one, cost=4.3) if one.name == "c" else one for one in POOL]) == {"a", "b", "c"}


def test_at_the_cap_the_round_is_slower_and_not_dearer() -> None:
    clock = Clock(rules=replace(CALM, cost_cap=3.5))
    assert clock.pass_(400, POOL) == {"a", "b"}
    dearer = [replace(one, cost=one.cost + 1) for one in POOL]
    assert clock.pass_(10, dearer) == {"a"}
    assert "hourly budget" in clock.changes[-1].reason


def test_estimates_that_tremble_at_the_cap_move_nobody_in_and_out() -> None:
    clock, chance = Clock(rules=replace(CALM, cost_cap=6.0)), Random(7)
    for _ in range(300):
        clock.pass_(10, [replace(one, cost=one.cost * chance.uniform(0.97, 1.03)) for one in POOL], Need(9.0, 10.0))
    assert clock.fleet.working >= {"a", "b"}
    assert len(clock.changes) <= 5, clock.changes


def test_a_clock_that_was_set_back_holds_nothing_up() -> None:
    clock = Clock(now_s=1e6)
    clock.pass_(10, POOL)
    clock.pass_(10, POOL, Need(2.9, 3.1))  # a small shortfall, just noticed
    clock.now_s = 0.0
    assert clock.pass_(70, POOL, Need(2.9, 3.1)) == {"a", "b", "c", "d"}
    clock.pass_(10, POOL, Need(4.5, 5.0))
    clock.now_s = -1e6
    assert clock.pass_(400, POOL) == {"a", "b", "c"}


def test_the_reason_names_no_budget_that_nobody_set() -> None:
    clock = Clock()
    clock.pass_(10, POOL, Need(math.inf, math.inf))
    assert len(clock.changes) == 5
    assert not any("budget" in change.reason for change in clock.changes)


def test_everybody_works_if_all_together_are_too_few() -> None:
    assert Clock().pass_(10, POOL, Need(100, 110)) == set("abcde")


def test_a_node_that_gives_nothing_is_never_paid_to_stand_there() -> None:
    assert Clock().pass_(400, [node("idle", 0.0, rate=0.0), node("a", 1.0)]) == {"a"}


def test_the_last_pick_is_the_one_that_closes_the_gap_at_the_least_cost() -> None:
    big = FleetCandidate("big", rate=10, cost=9)
    small = FleetCandidate("small", rate=1, cost=1)
    first = FleetCandidate("first", rate=2, cost=1)
    assert [one.name for one in cheapest_cover([big, small, first], 3)] == ["first", "small"]


def test_whom_the_last_pick_makes_superfluous_stays_out() -> None:
    names = [one.name for one in cheapest_cover([FleetCandidate("a", 1, 1), FleetCandidate("b", 4, 5)], 4)]
    assert names == ["b"]


@given(pools, st.floats(0, 40))
def test_a_cover_is_enough_without_waste_and_no_dearer_than_the_cheapest_prefix(
    pool: list[FleetCandidate], target: float
) -> None:
    chosen = cheapest_cover(pool, target)
    rate = sum(one.rate for one in chosen)
    if sum(one.rate for one in pool) < target * (1 - 1e-9):
        assert set(chosen) == set(pool)
        return
    assert rate >= target * (1 - 1e-9)
    assert all(rate - one.rate < target * (1 + 1e-9) for one in chosen)
    prefix, covered = 0.0, 0.0
    for one in sorted(pool, key=lambda one: (one.cost_per_group, one.name)):
        if covered < target:
            prefix, covered = prefix + one.cost, covered + one.rate
    assert sum(one.cost for one in chosen) <= prefix + 1e-9


@given(pools, st.floats(0.1, 20))
def test_a_cover_costs_at_most_one_last_pick_more_than_the_best_there_is(
    pool: list[FleetCandidate], target: float
) -> None:
    covers = [
        sum(one.cost for one in some)
        for count in range(len(pool) + 1)
        for some in combinations(pool, count)
        if sum(one.rate for one in some) >= target
    ]
    if covers:
        chosen = cheapest_cover(pool, target)
        assert sum(one.cost for one in chosen) <= min(covers) + max((one.cost for one in chosen), default=0.0) + 1e-6


@given(
    st.lists(st.tuples(pools, st.floats(0.1, 20), st.floats(0.1, 200)), min_size=1, max_size=12),
    st.floats(0.5, 30),
)
def test_whatever_happens_the_cap_holds_and_only_living_nodes_work(
    story: list[tuple[list[FleetCandidate], float, float]], cap: float
) -> None:
    fleet, now_s, rules = Fleet(), 0.0, replace(CALM, cost_cap=cap)
    for pool, target, passed_s in story:
        now_s += passed_s
        fleet, changes = decide(fleet, pool, Need(target / 1.1, target), rules, now_s=now_s)
        known = {one.name: one for one in pool}
        assert fleet.working <= set(known)
        assert sum(known[name].cost for name in fleet.working) <= cap * (1 + 1e-9)
        assert all(change.reason for change in changes)


@given(pools, st.floats(0.1, 20))
def test_with_nothing_changing_the_fleet_comes_to_rest_and_covers_the_need(
    pool: list[FleetCandidate], target: float
) -> None:
    clock = Clock()
    need = Need(target / 1.1, target)
    clock.pass_(1200, pool, need, step_s=50)
    before = len(clock.changes)
    working = clock.pass_(1200, pool, need, step_s=50)
    assert len(clock.changes) == before
    rates = {one.name: one.rate for one in pool}
    assert sum(rates[name] for name in working) >= min(target, sum(rates.values())) * (1 - 1e-9)


def test_a_claim_counts_for_half_until_there_is_proof() -> None:
    assert measured_rate(10.0, [], now_s=0, half_life_s=600) == TRUST * 10.0


def test_an_absurd_claim_is_outweighed_by_work() -> None:
    done = [GroupRecord(second, second + 1, accepted=True) for second in range(6000)]
    assert measured_rate(100.0, done, now_s=6000, half_life_s=1e9) == pytest.approx(1.0, rel=0.5)


def test_what_was_refused_or_expired_took_time_and_gave_nothing() -> None:
    done = [GroupRecord(second, second + 1, accepted=second % 2 == 0) for second in range(6000)]
    assert measured_rate(0.5, done, now_s=6000, half_life_s=1e9) == pytest.approx(0.5, rel=0.02)


def test_groups_that_were_sampled_together_share_their_time() -> None:
    together = [GroupRecord(0, 100, accepted=True)] * 8
    assert measured_rate(0.0, together, now_s=100, half_life_s=1e9) == 8 / (100 + PROOF_S)


def test_a_node_that_became_slow_is_seen_to_be_slow_within_a_few_half_lives() -> None:
    fast = [GroupRecord(second, second + 1, accepted=True) for second in range(1000)]
    slow = [GroupRecord(1000 + 10 * number, 1010 + 10 * number, accepted=True) for number in range(100)]
    assert measured_rate(1.0, fast + slow, now_s=2000, half_life_s=200) < 0.2
    assert measured_rate(1.0, fast + slow, now_s=2000, half_life_s=1e9) > 0.4


@given(st.lists(st.tuples(st.floats(0, 1e4), st.floats(0, 1e3), st.booleans()), max_size=20), st.floats(0, 1e6))
def test_a_rate_is_always_a_finite_number(rows: list[tuple[float, float, bool]], claimed: float) -> None:
    done = [GroupRecord(begun, begun + took, accepted) for begun, took, accepted in rows]
    assert 0 <= measured_rate(claimed, done, now_s=1e4, half_life_s=60) < math.inf
