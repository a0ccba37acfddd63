"""Standings: how often an owner is audited, what stays unpaid, and what faults cost."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coordinator.config import AuditSection
from coordinator.rules import trust
from coordinator.rules.trust import Finding, Level, OwnerStanding
from ledger.drawing import ALL_PPM

RULES = AuditSection()
FINDINGS: st.SearchStrategy[list[Finding]] = st.lists(st.sampled_from(["pass", "soft", "hard", "pardon"]), max_size=30)


@pytest.mark.parametrize(
    ("groups", "rate", "window"),
    [
        (0, 1.0, 0),
        (9, 1.0, 0),  # the last of the first ten
        (10, 1.0, 0),  # ten in ten
        (11, 10 / 11, 1),
        (20, 0.5, 2),
        (100, 0.1, 12),
        (200, 0.05, 24),  # the floor
        (999, 0.05, 24),
        (1000, 0.02, 62),  # trusted
        (10**9, 0.02, 62),
    ],
)
def test_rate_and_window_follow_the_validated_groups(groups: int, rate: float, window: int) -> None:
    standing = OwnerStanding(claims=groups, groups=groups)
    assert trust.rate_ppm(standing, RULES) / ALL_PPM == pytest.approx(rate, abs=1e-6)
    assert trust.window(standing, RULES) == window


def test_one_hard_fault_holds_everything_and_a_second_bans() -> None:
    once = trust.after_verdict(OwnerStanding(5000, 5000), "hard", RULES)
    assert (trust.level(once, RULES), trust.rate_ppm(once, RULES)) == ("held", ALL_PPM)
    assert trust.level(trust.after_verdict(once, "hard", RULES), RULES) == "banned"


def test_a_hold_ends_after_ten_validated_groups_and_the_fault_is_forgotten_after_a_thousand() -> None:
    standing = trust.after_verdict(OwnerStanding(5000, 5000), "hard", RULES)
    seen: list[tuple[Level, int]] = []
    for groups in (9, 1, 989, 1):
        standing = trust.validated(standing, RULES, groups)
        seen.append((trust.level(standing, RULES), standing.hard))
    assert seen == [("held", 1), ("known", 1), ("known", 1), ("trusted", 0)]


def test_accepted_groups_lower_the_rate_only_as_far_as_validated_ones_follow() -> None:
    rates = [
        trust.rate_ppm(OwnerStanding(claims, groups), RULES) for claims, groups in ((10**6, 9), (10**6, 10), (15, 10))
    ]
    assert rates == [ALL_PPM, ALL_PPM // 4, 666_667]


def test_a_soft_fault_raises_the_rate_of_an_old_owner_and_spares_a_new_one() -> None:
    old, new = (trust.after_verdict(OwnerStanding(groups, groups), "soft", RULES) for groups in (5000, 5))
    assert trust.rate_ppm(old, RULES) == ALL_PPM // 4
    assert (new.groups, new.soft) == (5, 1)
    assert trust.level(old, RULES) == "known"


def test_a_pardon_changes_nothing() -> None:
    assert trust.after_verdict(OwnerStanding(8, 7, 1, 1), "pardon", RULES) == OwnerStanding(8, 7, 1, 1)


def test_a_round_without_audits_keeps_no_escrow() -> None:
    none = AuditSection(first_groups=0, floor=0.0, trusted_floor=0.0)
    assert (trust.rate_ppm(OwnerStanding(), none), trust.window(OwnerStanding(), none)) == (0, 0)


@settings(max_examples=200, deadline=None)
@given(groups=st.integers(10, 3000), worth=st.integers(1, 10**12), held=st.integers(0, 10**12))
def test_whatever_a_claim_is_worth_faking_it_costs_more_than_it_earns(groups: int, worth: int, held: int) -> None:
    rate = trust.rate_ppm(OwnerStanding(groups, groups), RULES, worth_micros=worth, held_micros=held) / ALL_PPM
    assert (1 - rate) * worth <= rate * held
    assert rate >= trust.rate_ppm(OwnerStanding(groups, groups), RULES) / ALL_PPM


def test_work_that_is_worth_nothing_is_audited_at_the_floor() -> None:
    assert trust.rate_ppm(OwnerStanding(500, 500), RULES, worth_micros=0, held_micros=0) == ALL_PPM // 20


def test_who_has_nothing_to_lose_is_audited_whole() -> None:
    assert trust.rate_ppm(OwnerStanding(500, 500), RULES, worth_micros=1000, held_micros=0) == ALL_PPM


@settings(max_examples=100, deadline=None)
@given(findings=FINDINGS, groups=st.integers(0, 3000))
def test_no_history_makes_a_bad_rate_or_a_cheaper_escrow(findings: list[Finding], groups: int) -> None:
    standing = OwnerStanding(claims=4 * groups, groups=groups)
    for finding in findings:
        before = trust.rate_ppm(standing, RULES)
        standing = trust.after_verdict(standing, finding, RULES)
        rate = trust.rate_ppm(standing, RULES)
        assert RULES.trusted_floor * ALL_PPM <= rate <= ALL_PPM
        assert finding in ("pass", "pardon") or rate >= before
        # One cheat gains a payment with chance 1 - q, and loses the window with chance q.
        assert rate * trust.window(standing, RULES) >= ALL_PPM - rate
    assert (trust.level(standing, RULES) == "banned") == (standing.hard >= 2)


def test_a_rate_that_is_eased_falls_to_the_trusted_floor_and_the_window_grows_by_as_much() -> None:
    known, newcomer = OwnerStanding(50, 50), OwnerStanding(5, 5)
    assert trust.rate_ppm(known, RULES) == ALL_PPM // 5
    assert trust.rate_ppm(known, RULES, ease=0.5) == 110_000
    least = trust.rate_ppm(known, RULES, ease=1.0)
    assert least == RULES.trusted_floor * ALL_PPM
    assert least * trust.window(known, RULES, drawn_ppm=least) >= ALL_PPM - least
    assert trust.rate_ppm(newcomer, RULES, ease=1.0) == ALL_PPM
    assert trust.rate_ppm(OwnerStanding(50, 50, hard=1), RULES, ease=1.0) == least
    assert trust.rate_ppm(OwnerStanding(5, 5, hard=1), RULES, ease=1.0) == ALL_PPM, "who is held is audited whole"


@settings(max_examples=200, deadline=None)
@given(
    groups=st.integers(10, 3000), worth=st.integers(1, 10**12), held=st.integers(0, 10**12), ease=st.floats(0.0, 1.0)
)
def test_faking_costs_more_than_it_earns_however_far_rates_are_eased(
    groups: int, worth: int, held: int, ease: float
) -> None:
    standing = OwnerStanding(groups, groups)
    rate = trust.rate_ppm(standing, RULES, worth_micros=worth, held_micros=held, ease=ease) / ALL_PPM
    assert (1 - rate) * worth <= rate * held


def test_rates_of_nothing_stay_what_they_are() -> None:
    none = AuditSection(first_groups=0, floor=0.0, trusted_floor=0.0)
    assert trust.rate_ppm(OwnerStanding(), none, ease=1.0) == 0
    shrinking = AuditSection(floor=0.0, trusted_floor=0.0)
    assert trust.rate_ppm(OwnerStanding(100, 100), shrinking, ease=1.0) == trust.rate_ppm(
        OwnerStanding(100, 100), shrinking
    )


def test_exact_work_is_proven_by_a_pass_of_its_own_auditor_until_a_failure() -> None:
    """Other bits mostly fail softly, and softly failed work is paid."""
    cases: list[tuple[str, trust.Finding, str, str]] = [
        ("", "pass", "exact/fp32/cpu-a", "exact/fp32/cpu-a"),
        ("", "pass", "exact/fp32/cpu-b", ""),
        ("", "pass", "", ""),
        ("exact/fp32/cpu-a", "pass", "", "exact/fp32/cpu-a"),
        ("exact/fp32/cpu-a", "soft", "exact/fp32/cpu-a", ""),
        ("exact/fp32/cpu-a", "hard", "", ""),
        ("exact/fp32/cpu-a", "pardon", "", "exact/fp32/cpu-a"),
    ]
    for before, finding, auditors, after in cases:
        assert trust.exact_class_after(before, finding, "exact/fp32/cpu-a", auditors=auditors) == after
