"""Patience does not pay: whatever an owner waits for, faking earns no more than it costs, up to chance."""

import pytest

from coordinator.audit.trust import Rules
from tests.adversaries.patience import PLANS, gain, one_in


@pytest.mark.parametrize("name", PLANS)
def test_who_waits_and_then_forges_gains_nothing(name: str) -> None:
    owners = 1_000 if "no window" in name or "the same" in name else 40  # these are soon banned
    found = gain(PLANS[name], owners=owners, groups=1_300, rules=Rules())
    assert found.mean < 3 * found.standard_error


def test_it_would_pay_if_a_fault_took_no_window() -> None:
    found = gain(one_in(20, 200), owners=40, groups=1_000, rules=Rules(), forfeits=False)
    assert found.mean > 3 * found.standard_error
