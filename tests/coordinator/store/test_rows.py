"""Rows of statements that run seldom are named tuples of exactly the statement's columns."""

from typing import NamedTuple

import pytest
import sqlalchemy as sa

from coordinator.store.rows import find_row, read_rows

PAIR = sa.select(sa.literal(3).label("number"), sa.literal("a").label("name"))


class NumberedName(NamedTuple):
    """A name with a number."""

    number: int
    name: str


class NameFirst(NamedTuple):
    """Fields in another order than the columns."""

    name: str
    number: int


def test_rows_have_the_names_of_their_columns() -> None:
    with sa.create_engine("sqlite://").connect() as connection:
        assert read_rows(connection, PAIR, NumberedName) == [NumberedName(3, "a")]
        assert find_row(connection, PAIR, NumberedName) == NumberedName(number=3, name="a")
        assert find_row(connection, PAIR.where(sa.false()), NumberedName) is None


def test_other_columns_or_another_order_are_refused_even_without_rows() -> None:
    with sa.create_engine("sqlite://").connect() as connection:
        for statement in (PAIR, PAIR.where(sa.false())):
            with pytest.raises(TypeError, match="NamedTuple with the fields"):
                read_rows(connection, statement, NameFirst)
