"""Values that a store keeps by name, each of a type of its own; most stand beside the only function that sets them."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import sqlalchemy as sa

from coordinator.store.tables import facts
from ledger.prepared import Prepared

T = TypeVar("T")


@dataclass(frozen=True)
class Fact(Generic[T]):
    """One such value: its name, and what it is as long as nobody has set it."""

    name: str
    unset: T

    @property
    def column(self) -> sa.Label[T]:
        """The value as a column of a larger statement, labelled with its name; NULL if unset."""
        return sa.select(facts.c.value).where(facts.c.name == self.name).scalar_subquery().label(self.name)


ROUND_ID = Fact("round_id", "")
"""The round that this store belongs to."""

FINISHED = Fact("finished", False)
"""True from the moment at which no more leases are given for training."""

PROGRESS = Fact[Mapping[str, Any]]("progress", {})
"""The learner's phase, how far it is, and its accuracies."""

_value = Prepared(sa.select(facts.c.value).where(facts.c.name == sa.bindparam("wanted")))
_change = Prepared(sa.update(facts).where(facts.c.name == sa.bindparam("wanted")).values(value=sa.bindparam("new")))
_begin = Prepared(sa.insert(facts))


def get_fact(connection: sa.Connection, fact: Fact[T]) -> T:
    """Return the value of a fact."""
    row = _value(connection, wanted=fact.name).first()
    return row[0] if row else fact.unset


def set_fact(connection: sa.Connection, fact: Fact[T], value: T) -> None:
    """Set the value of a fact."""
    if not _change(connection, wanted=fact.name, new=value).rowcount:
        _begin(connection, name=fact.name, value=value)
