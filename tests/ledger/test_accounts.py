"""Account names: written and read back, and nothing else is one."""

import pytest

from ledger.accounts import BUDGET, OUTSIDE, Account, AccountKind, paid, payable, paying, pending
from protocol.errors import MalformedMessage
from tests.ledger.values import node

ALL = [OUTSIDE, BUDGET, pending(node(1)), payable(node(1)), paying(node(1)), paid(node(1))]


@pytest.mark.parametrize("account", ALL, ids=str)
def test_name_reads_back(account: Account) -> None:
    assert Account.parse(str(account)) == account


def test_names_are_the_documented_ones() -> None:
    of_a_node = [f"{kind}:{node(1)}" for kind in ("pending", "payable", "paying", "paid")]
    assert [str(account) for account in ALL] == ["outside", "budget", *of_a_node]


@pytest.mark.parametrize(
    "name",
    ["", "Budget", "budget:", f"budget:{node(1)}", "pending", "pending:", "pending:somebody", f" pending:{node(1)}"],
)
def test_other_names_are_refused(name: str) -> None:
    with pytest.raises(MalformedMessage):
        Account.parse(name)


def test_only_outside_may_be_below_zero() -> None:
    assert [account for account in ALL if account.may_be_negative] == [OUTSIDE]


def test_a_kind_and_its_node_belong_together() -> None:
    with pytest.raises(MalformedMessage):
        Account(AccountKind.PAYABLE)
    with pytest.raises(MalformedMessage):
        Account(AccountKind.BUDGET, node(1))
