"""Claims are compared with the nearest version, and with those farther back only where that leaves a doubt."""

from collections.abc import Sequence
from dataclasses import replace

import pytest

from coordinator.audit.case import earlier
from coordinator.audit.check import look_closer
from coordinator.rules.verdict import AuditFinding, AuditOutcome, AuditReport


def report(*outcomes: AuditOutcome) -> AuditReport:
    return AuditReport("a class", 1, findings=tuple(AuditFinding("version", outcome, "", "") for outcome in outcomes))


PASSED, SOFT, HARD = report(), report(AuditOutcome.SOFT), report(AuditOutcome.HARD)


@pytest.mark.parametrize(
    ("version", "count", "others"),
    [
        (9, 0, []),
        (9, 1, [8]),
        (9, 3, [8, 7, 5]),
        (9, 16, [8, 7, 5, 1]),  # there is no version 0
        (5, 3, [4, 3, 1]),
        (4, 3, [3, 2]),
        (1, 3, []),
    ],
)
def test_earlier_versions_lie_twice_as_far_back_each(version: int, count: int, others: list[int]) -> None:
    assert earlier(version, count) == others


def test_a_provisional_report_that_is_no_pass_is_held() -> None:
    outcomes = [replace(one, provisional=True).outcome for one in (PASSED, SOFT, HARD)]
    assert outcomes == [AuditOutcome.PASS, AuditOutcome.HELD, AuditOutcome.HELD]


def test_only_what_fails_softly_is_compared_with_versions_farther_back() -> None:
    asked = []

    def compare(places: Sequence[int], others: Sequence[int]) -> list[AuditReport]:
        asked.append((list(places), list(others)))
        first = [PASSED, SOFT, HARD, SOFT]
        return [first[place] for place in places] if len(others) == 1 else [HARD, PASSED]

    assert look_closer(4, [8, 7, 5], compare) == [PASSED, HARD, HARD, PASSED]
    assert asked == [([0, 1, 2, 3], [8]), ([1, 3], [8, 7, 5])]


def test_equal_bits_need_no_other_version_and_other_bits_are_compared_with_all() -> None:
    asked = []

    def compare(places: Sequence[int], others: Sequence[int]) -> list[AuditReport]:
        asked.append((list(places), list(others)))
        first = [PASSED, PASSED, HARD, SOFT]
        return [first[place] for place in places] if len(others) < 2 else [HARD]

    assert look_closer(4, [8, 7], compare, exact={1, 2, 3}) == [PASSED, PASSED, HARD, HARD]
    assert asked == [([0], [8]), ([1, 2, 3], []), ([3], [8, 7])]


@pytest.mark.parametrize("others", [[], [8]])
def test_without_versions_farther_back_a_soft_fail_stays_one(others: list[int]) -> None:
    asked = []

    def compare(places: Sequence[int], versions: Sequence[int]) -> list[AuditReport]:
        asked.append(list(versions))
        return [SOFT for _ in places]

    assert look_closer(2, others, compare) == [SOFT, SOFT]
    assert asked == [others]
