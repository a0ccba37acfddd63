"""Patience does not pay: whatever an owner waits for, faking earns no more than it costs, up to chance.

- Each plan is played by so many owners that it is seen to pay where a fault takes neither window nor pledge.
"""

import pytest

from coordinator.config import AuditSection
from tests.adversaries.patience import PLANS, Gain, gain

OWNERS = dict(zip(PLANS, (400, 100, 400, 100, 200, 250, 250, 1_000), strict=True))
"""Owners of each plan: as many as it takes to be seen to pay where it would."""


def played(name: str, *, forfeits: bool) -> Gain:
    return gain(PLANS[name], owners=OWNERS[name], groups=1_300, rules=AuditSection(), forfeits=forfeits)


@pytest.mark.parametrize("name", PLANS)
def test_who_waits_and_then_forges_gains_nothing(name: str) -> None:
    result = played(name, forfeits=True)
    assert result.mean < 3 * result.standard_error


@pytest.mark.parametrize("name", PLANS)
def test_it_would_pay_if_a_fault_took_neither_window_nor_pledge(name: str) -> None:
    result = played(name, forfeits=False)
    assert result.mean > 3 * result.standard_error


@pytest.mark.parametrize("name", PLANS)
@pytest.mark.parametrize("stays", [200, 25], ids=["for long", "for short"])
def test_auditors_that_are_behind_make_no_plan_pay(name: str, stays: int) -> None:
    """Rates are eased in full and as set again in turns: what was drawn less is held for longer."""

    def load(done: int) -> float:
        return float(done // stays % 2)

    result = gain(PLANS[name], owners=OWNERS[name], groups=1_300, rules=AuditSection(), load=load)
    assert result.mean < 3 * result.standard_error
