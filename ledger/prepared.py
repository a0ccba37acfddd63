"""Statements that run all the time: compiled once, then handed to the driver as they are.

- SQLAlchemy takes several times as long as SQLite for a statement that was built before: it looks its text up, copies
  its parameters and wraps its rows. Here its compiler is asked once for each form of a statement on each database.
- Values and columns are converted by their types, as SQLAlchemy does it; rows are named tuples, and all are there.
- What the driver refuses is raised as SQLAlchemy's error, and who listens to SQLAlchemy's statements hears of these.
- The transaction is the caller's.

>>> _price = Prepared(sa.select(nodes.c.price).where(nodes.c.node_id == sa.bindparam("node")))
>>> _price(connection, node="12D3Koo…").scalar()
"""

from collections import namedtuple
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa


class Found(list[Any]):
    """The rows of one statement, and how many it has changed."""

    rowcount = 0

    def first(self) -> Any:
        """The first row; None if there is none."""
        return self[0] if self else None

    def one(self) -> Any:
        """The only row."""
        (row,) = self
        return row

    def scalar(self) -> Any:
        """The first column of the first row; None if there is no row."""
        return self[0][0] if self else None

    def scalar_one(self) -> Any:
        """The first column of the only row."""
        return self.one()[0]

    def scalars(self) -> list[Any]:
        """The first column."""
        return [row[0] for row in self]


@dataclass(slots=True)
class _Form:
    """A statement as one driver takes it."""

    text: str
    places: Sequence[str] | None
    """The names in their order; None where the driver goes by names."""
    constants: Mapping[str, Any]
    lists: Mapping[str, Sequence[str]]
    """The names of the members of each list."""
    converted: Mapping[str, Callable[[Any], Any]]
    columns: Sequence[sa.ColumnElement[Any]]
    row: Callable[[Any], Any] | None = None
    """Known when the driver has first answered."""

    def values(self, given: Mapping[str, Any]) -> Any:
        found = {**self.constants, **given}
        if self.lists:
            for name, members in self.lists.items():
                found.update(zip(members, found.pop(name), strict=True))
        if self.converted:
            for name, convert in self.converted.items():
                found[name] = convert(found[name])
        return found if self.places is None else [found[name] for name in self.places]


class Prepared:
    """A statement whose parameters are given by name when it runs."""

    def __init__(self, statement: sa.Select[Any] | sa.CompoundSelect[Any] | sa.Insert | sa.Update | sa.Delete) -> None:
        self._statement = statement
        self._lists = _lists(statement)
        self._adds = isinstance(statement, sa.Insert)
        self._forms: dict[tuple[Any, ...], _Form] = {}
        """By the kind of database, for which it is always the same."""

    def __call__(self, connection: sa.Connection, /, **values: Any) -> Found:
        """Run it once."""
        form = self._form(connection.dialect, values)
        return _run(connection, form.text, form.values(values), form)

    def each(self, connection: sa.Connection, rows: Sequence[Mapping[str, Any]]) -> int:
        """Run it for each of these, which have the same names; how many rows it has changed."""
        if not rows:
            return 0
        form = self._form(connection.dialect, rows[0])
        return _run(connection, form.text, [form.values(row) for row in rows], form, many=True).rowcount

    def _form(self, dialect: sa.Dialect, values: Mapping[str, Any]) -> _Form:
        # The text depends on which columns a new row has, and on how many values stand in a list.
        key = (type(dialect), *(values if self._adds else [len(values[name]) for name in self._lists]))
        form = self._forms.get(key)
        if form is None:
            form = self._forms[key] = _compiled(self._statement, dialect, values)
        return form


def _lists(statement: sa.ClauseElement) -> list[str]:
    binds = [bind for bind in sa.sql.visitors.iterate(statement) if isinstance(bind, sa.BindParameter)]
    return [bind.key for bind in binds if bind.expanding and bind.value is None]


def say(connection: sa.Connection, *texts: str) -> None:
    """Statements of the database's own, which have neither parameters nor rows that matter."""
    for text in texts:
        _run(connection, text, None)


def _run(connection: sa.Connection, text: str, values: Any, form: _Form | None = None, *, many: bool = False) -> Found:
    cursor, found = connection.connection.cursor(), Found()
    try:
        for listener in connection.dispatch.before_cursor_execute:
            listener(connection, cursor, text, values, None, many)
        if values is None:
            cursor.execute(text)
        else:
            (cursor.executemany if many else cursor.execute)(text, values)
        if form is not None and cursor.description is not None:
            form.row = form.row or _row(form.columns, connection.dialect, cursor.description)
            found.extend(map(form.row, cursor.fetchall()))
        found.rowcount = cursor.rowcount
    except connection.dialect.loaded_dbapi.Error as error:
        raise sa.exc.DBAPIError.instance(text, values, error, connection.dialect.loaded_dbapi.Error) from error
    finally:
        cursor.close()
    return found


def _compiled(statement: Any, dialect: sa.Dialect, values: Mapping[str, Any]) -> _Form:
    columns, constants = None, {}
    if isinstance(statement, sa.Insert):
        statement, missing = statement.inline(), [column for column in statement.table.c if column.name not in values]
        constants = {column.name: column.default.arg for column in missing if column.default is not None}
        columns = [*values, *constants]
    made = statement.compile(dialect=dialect, column_keys=columns)
    state = made.construct_expanded_state({**constants, **values}, escape_names=False)
    lists = {name: members for name, members in state.parameter_expansion.items() if name in values}
    given = {*values, *(member for members in lists.values() for member in members)}
    return _Form(
        text=state.statement,
        places=state.positiontup,
        constants={name: state.parameters[name] for name in state.parameters.keys() - given},
        lists=lists,
        converted=dict(_converters(made, state, dialect)),
        columns=list(statement.exported_columns),
    )


def _converters(made: Any, state: Any, dialect: sa.Dialect) -> Iterator[tuple[str, Callable[[Any], Any]]]:
    """How the values of some types are handed over."""
    for name, bind in made.binds.items():
        if convert := bind.type.dialect_impl(dialect).bind_processor(dialect):
            members = state.parameter_expansion.get(name, [name])
            yield from ((member, convert) for member in members if member in state.parameters)


def _row(columns: Sequence[sa.ColumnElement[Any]], dialect: sa.Dialect, description: Any) -> Callable[[Any], Any]:
    """Makes a named tuple of what the driver gives, by its word of what that is."""
    named = namedtuple("Row", [column.key or "" for column in columns], rename=True)  # type: ignore[misc]  # no literal
    converters = [
        column.type.dialect_impl(dialect).result_processor(dialect, type_code)
        for column, (_, type_code, *_rest) in zip(columns, description, strict=True)
    ]
    if not any(converters):
        return lambda row: named(*row)
    return lambda row: named(
        *(value if convert is None else convert(value) for convert, value in zip(converters, row, strict=True))
    )
