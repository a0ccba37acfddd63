"""Account names as typed values.

- `outside` and `budget` exist once; the others exist once per node.
- `str(account)` and `Account.parse` are inverses; the written form is what the store and the pages show.
- Only `outside` may be below zero: its balance is minus everything that was ever deposited and not yet taken out.
"""

from enum import StrEnum
from functools import lru_cache
from typing import NamedTuple, Self

from protocol import ids
from protocol.errors import MalformedMessage
from protocol.ids import NodeId

NAMED_MAX = 16_384
"""Cached accounts of each kind: building one costs more than all that a batch does with it."""


class AccountKind(StrEnum):
    """Kinds of accounts; the kind defines the meaning of a balance."""

    OUTSIDE = "outside"
    BUDGET = "budget"
    PENDING = "pending"
    PAYABLE = "payable"
    PAYING = "paying"
    PAID = "paid"

    __hash__ = str.__hash__  # an enum's own hash costs more than all that a batch does with it


OF_A_NODE = frozenset({AccountKind.PENDING, AccountKind.PAYABLE, AccountKind.PAYING, AccountKind.PAID})
"""The kinds that exist once per node."""


class _Parts(NamedTuple):
    """The parts of an account; a tuple, so that a lookup runs no Python code of ours."""

    kind: AccountKind
    node_id: NodeId | None


class Account(_Parts):
    """An account of the book."""

    __slots__ = ()

    def __new__(cls, kind: AccountKind, node_id: NodeId | None = None) -> Self:
        if (kind in OF_A_NODE) != (node_id is not None):
            raise MalformedMessage(f"Account {kind}: only {' and '.join(sorted(OF_A_NODE))} belong to a node.")
        return super().__new__(cls, kind, node_id)

    def __str__(self) -> str:
        return self.kind.value if self.node_id is None else f"{self.kind}:{self.node_id}"

    @property
    def may_be_negative(self) -> bool:
        return self.kind is AccountKind.OUTSIDE

    @classmethod
    def parse(cls, name: str) -> Self:
        """Return the account of a written name."""
        kind, colon, node = name.partition(":")
        if kind not in set(AccountKind):
            raise MalformedMessage(
                f"{name[:80]!r} is not an account.",
                hint=f"Accounts are outside, budget, and {', '.join(sorted(OF_A_NODE))} with :<node>.",
            )
        if colon:
            ids.public_key(NodeId(node))
        return cls(AccountKind(kind), NodeId(node) if colon else None)


OUTSIDE = Account(AccountKind.OUTSIDE)
BUDGET = Account(AccountKind.BUDGET)


@lru_cache(maxsize=NAMED_MAX)
def pending(node: NodeId) -> Account:
    """Return the account of a node's credit that is not settled yet."""
    return Account(AccountKind.PENDING, node)


@lru_cache(maxsize=NAMED_MAX)
def payable(node: NodeId) -> Account:
    """Return the account of a node's final credit that is not in a payout batch yet."""
    return Account(AccountKind.PAYABLE, node)


@lru_cache(maxsize=NAMED_MAX)
def paying(node: NodeId) -> Account:
    """Return the account of a node's credit in payout batches that are not settled yet."""
    return Account(AccountKind.PAYING, node)


@lru_cache(maxsize=NAMED_MAX)
def paid(node: NodeId) -> Account:
    """Return the account of a node's credit that was paid out; the money itself has left the round."""
    return Account(AccountKind.PAID, node)
