"""Rows with names and types: what a statement that runs seldom returns, as a `NamedTuple`.

- Frequent statements name the type of their rows themselves (`ledger.prepared`).
- The fields are the statement's columns, in order: a row of other fields is our fault, and refused even if it is empty.
"""

from typing import Any, TypeVar

import sqlalchemy as sa

RowT = TypeVar("RowT", bound=tuple[Any, ...])


def read_rows(connection: sa.Connection, statement: sa.Executable, row: type[RowT]) -> list[RowT]:
    """Run a statement, and return its rows as named tuples of type `row`."""
    result: sa.CursorResult[Any] = connection.execute(statement)
    fields, columns = getattr(row, "_fields", ()), tuple(result.keys())
    if fields != columns:
        raise TypeError(f"A row of this statement is a NamedTuple with the fields {columns}, not {row.__name__}.")
    return [row(*values) for values in result]


def find_row(connection: sa.Connection, statement: sa.Executable, row: type[RowT]) -> RowT | None:
    """Run a statement that returns at most one row, and return that row, or None."""
    return next(iter(read_rows(connection, statement, row)), None)
