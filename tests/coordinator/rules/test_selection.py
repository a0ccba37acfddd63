"""Choice of prompts: hand-computed values, and that no prompt is left out for ever."""

from math import log, sqrt

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.rules.selection import OFF, REMEMBERED, PromptCandidate, PromptOutcome, SelectionRules, choose, worth

FILTER = SelectionRules(filter_after=2, probe_every=3, window=4)
BEST = SelectionRules(window=4, share=0.5, exploration=0.5)


def after(*groups: list[float]) -> PromptOutcome:
    outcome = PromptOutcome()
    for rewards in groups:
        outcome = outcome.after(rewards)
    return outcome


RIGHT, WRONG = after([1.0, 1.0], [1.0, 1.0]), after([0.0, 0.0], [0.0, 0.0])
HALF, MOSTLY = after([0.0, 1.0]), after([1.0, 1.0, 1.0, 0.0])


def candidates(*outcomes: PromptOutcome) -> list[PromptCandidate]:
    return [PromptCandidate(number, f"prompt {number}", outcome) for number, outcome in enumerate(outcomes)]


def test_an_outcome_has_mean_variance_and_how_long_nothing_differed() -> None:
    assert (HALF.groups, HALF.mean, HALF.variance, HALF.alike) == (1, 0.5, 0.25, 0)
    assert (MOSTLY.mean, MOSTLY.variance) == (0.75, 0.1875)
    assert (RIGHT.mean, RIGHT.variance, RIGHT.alike) == (1.0, 0.0, 2)
    later = RIGHT.after([0.0, 1.0])
    assert (later.groups, later.alike, later.mean) == (3, 0, 0.5)
    assert later.variance == pytest.approx(0.25 / 3)


def test_an_outcome_follows_a_policy_that_learns() -> None:
    long = after(*[[0.0, 0.0]] * 1000).after([0.0, 1.0])
    assert long.groups == 1001
    assert long.variance == 0.25 / REMEMBERED


def test_a_prompt_that_was_hard_and_is_easy_now_is_called_easy() -> None:
    learned = after(*[[0.0, 0.0]] * 20, [1.0, 1.0], [1.0, 1.0])
    assert choose(candidates(learned, HALF), 9, FILTER)[1] == {0: "always_right"}


def test_equal_rewards_that_float32_rounds_are_alike() -> None:
    """The rewards come from a float32 column: values that are equal there are equal here, whatever their mean."""
    assert after([0.1, 0.1, 0.1]).alike == 1
    assert after([0.1, 0.1, 0.1]).variance == 0.0


@pytest.mark.parametrize("rewards", [[], [float("nan"), 1.0], [float("inf"), 1.0]])
def test_a_group_that_says_nothing_changes_nothing(rewards: list[float]) -> None:
    assert HALF.after(rewards) == HALF


def test_worth_is_deviation_and_a_bonus_for_what_was_seldom_seen() -> None:
    assert worth(HALF, 9, BEST) == pytest.approx(0.5 + 0.5 * sqrt(log(10) / 2))
    assert worth(RIGHT, 9, BEST) == pytest.approx(0.5 * sqrt(log(10) / 3))
    assert worth(PromptOutcome(), 9, BEST) == pytest.approx(0.5 * sqrt(log(10)))
    assert worth(PromptOutcome(), 0, BEST) == 0.0


def test_without_rules_all_are_taken_in_their_order() -> None:
    assert choose(candidates(RIGHT, HALF, WRONG), 9, OFF) == ([0, 1, 2], {})


def test_prompts_without_a_difference_are_left_out() -> None:
    once = after([1.0, 1.0])
    taken, left = choose(candidates(RIGHT, HALF, WRONG, once, PromptOutcome()), 9, FILTER)
    assert taken == [1, 3, 4], "once is not always"
    assert left == {0: "always_right", 2: "always_wrong"}


def test_what_was_left_out_often_enough_is_probed_again() -> None:
    due = RIGHT.left(), RIGHT.left().left()
    assert choose(candidates(due[0], HALF), 9, FILTER) == ([1], {0: "always_right"})
    assert choose(candidates(due[1], HALF), 9, FILTER) == ([0, 1], {}), "the third time that it comes up"


def test_what_was_probed_and_still_says_nothing_is_left_out_again() -> None:
    probed = RIGHT.left().left().taken().after([1.0, 1.0])
    assert choose(candidates(probed, HALF), 9, FILTER)[1] == {0: "always_right"}
    assert choose(candidates(probed.after([0.0, 1.0]), HALF), 9, FILTER)[1] == {}


def test_the_best_half_is_taken_and_the_rest_passed_over() -> None:
    taken, left = choose(candidates(RIGHT, HALF, WRONG, MOSTLY), 8, BEST)
    assert taken == [1, 3]
    assert left == {0: "passed_over", 2: "passed_over"}


def test_ties_go_to_who_comes_first() -> None:
    assert choose(candidates(HALF, HALF, HALF, HALF), 8, BEST)[0] == [0, 1]


def test_what_is_overdue_goes_before_the_best() -> None:
    overdue = RIGHT
    for _ in range(BEST.probe_every - 1):
        overdue = overdue.left()
    assert choose(candidates(HALF, HALF, MOSTLY, overdue), 8, BEST)[0] == [3, 0]


def test_a_window_of_nothing_but_solved_prompts_still_gives_one() -> None:
    """Else a round whose task is learned would look for ever, and nobody would notice a policy that forgets."""
    taken, left = choose(candidates(RIGHT, RIGHT.left(), WRONG), 9, FILTER)
    assert taken == [1], "that which was left out most often"
    assert set(left) == {0, 2}


outcomes = st.builds(
    PromptOutcome,
    groups=st.integers(0, 100),
    mean=st.floats(-10, 10),
    variance=st.floats(0, 100),
    alike=st.integers(0, 9),
    left_out=st.integers(0, 9),
)
rules = st.builds(
    SelectionRules,
    filter_after=st.integers(0, 4),
    probe_every=st.integers(2, 5),
    window=st.integers(1, 8),
    share=st.floats(0.01, 1),
    exploration=st.floats(0, 10),
)


@given(window=st.lists(outcomes, min_size=1, max_size=8), rules=rules, total=st.integers(0, 10**6))
def test_every_prompt_is_taken_or_left_for_a_reason(
    window: list[PromptOutcome], rules: SelectionRules, total: int
) -> None:
    taken, left = choose(candidates(*window), total, rules)
    assert taken
    assert sorted([*taken, *left]) == list(range(len(window)))
    assert choose(candidates(*window), total, rules) == (taken, left)


@given(rules=rules, seen=st.lists(st.lists(st.sampled_from([0.0, 1.0]), min_size=2, max_size=2), min_size=1))
def test_no_prompt_is_left_out_more_often_in_a_row_than_is_set(rules: SelectionRules, seen: list[list[float]]) -> None:
    """A data set of five prompts, over and over, whatever its rewards are."""
    known = {number: PromptOutcome() for number in range(5)}
    for around in range(40):
        window = [PromptCandidate(number, str(number), outcome) for number, outcome in known.items()]
        taken, left = choose(window, 5 * around, rules)
        for number in left:
            known[number] = known[number].left()
            assert known[number].left_out < rules.probe_every
        for number in taken:
            known[number] = known[number].taken().after(seen[(number + around) % len(seen)])
