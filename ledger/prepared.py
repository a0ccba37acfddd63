"""Frequent statements: compiled once, then passed to the driver directly.

- SQLAlchemy takes several times as long as SQLite for a statement that was built before: it looks up its text, copies
  its parameters and wraps its rows. Here its compiler runs once for each form of a statement on each database.
- A list for `IN` is padded with its last member, so that lists of all lengths have a few forms: a form of a thousand
  members takes a hundred kilobytes, and is kept for ever.
- Values and columns are converted by their types, as in SQLAlchemy; all rows are fetched.
- A statement of several columns names the type of its rows, a `NamedTuple` with a field per column: so code that reads
  a row is checked, and no row without names leaves a module. Other fields than the columns are refused at the import.
- Errors of the driver are raised as SQLAlchemy's errors, and listeners for SQLAlchemy's statements get these, too.
- A connection may have a faster way than its driver's cursors (`STRAIGHT`).
- The transaction is the caller's.

>>> _price = Prepared(sa.select(nodes.c.price).where(nodes.c.node_id == sa.bindparam("node")))
>>> _price(connection, node="12D3Koo…").scalar()
>>> _money = Prepared(sa.select(tally.c.spent, tally.c.reserved), Money)
>>> _money(connection).single_row().reserved
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, TypeVar, overload

import sqlalchemy as sa

STRAIGHT = "straight"
"""The key in the `info` of a connection with its `Straight`, if statements need not use a cursor."""

FEW = 4
"""Rows that `Straight` writes one by one; more rows go to the driver's cursor together."""

PADDED_MAX = 1024
"""Length up to which a list is padded to a power of two; a longer list is padded to a multiple of it."""

LIST_MAX = 32_000
"""Length from which a list is not padded: SQLite accepts 32,766 parameters in all."""


Answer = tuple[Sequence[Any], int, Sequence[Any]]
"""The driver's rows, the number of rows read or changed, and the driver's type code of each column."""

Straight = Callable[[str, Any], Answer]
"""A function that runs the driver's own text with values by name or in order, or without values."""


Statement = sa.Select[Any] | sa.CompoundSelect[Any] | sa.Insert | sa.Update | sa.Delete

RowT = TypeVar("RowT", bound=tuple[Any, ...])


class QueryResult(list[RowT]):
    """The rows of a statement, and the number of rows that it changed."""

    rowcount = 0

    def first(self) -> RowT | None:
        """Return the first row; None if there is none."""
        return self[0] if self else None

    def single_row(self) -> RowT:
        """Return the only row."""
        (row,) = self
        return row

    def scalar(self) -> Any:
        """Return the first column of the first row; None if there is no row."""
        return self[0][0] if self else None

    def scalar_one(self) -> Any:
        """Return the first column of the only row."""
        return self.single_row()[0]

    def scalars(self) -> list[Any]:
        """Return the first column of all rows."""
        return [row[0] for row in self]


@dataclass(slots=True)
class _Form:
    """A statement in the form that a driver accepts."""

    text: str
    places: Sequence[str] | None
    """The names in order; None if the driver uses names."""
    constants: Mapping[str, Any]
    lists: Mapping[str, Sequence[str]]
    """The names of the members of each list."""
    converted: Mapping[str, Callable[[Any], Any]]
    columns: Sequence[sa.ColumnElement[Any]]
    row_type: type[tuple[Any, ...]]
    row: Callable[[Any], Any] | None = None
    """Set after the driver's first answer."""

    def values(self, given: Mapping[str, Any]) -> Any:
        converted: Mapping[str, Any] = given
        if self.constants or self.lists or self.converted:
            converted = self._with_ours(given)
        return converted if self.places is None else [converted[name] for name in self.places]

    def _with_ours(self, given: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the values with the statement's constants added, all in the driver's form."""
        values = {**self.constants, **given}
        if self.lists:
            for name, members in self.lists.items():
                values.update(zip(members, values.pop(name), strict=True))
        if self.converted:
            for name, convert in self.converted.items():
                values[name] = convert(values[name])
        return values


class Prepared(Generic[RowT]):
    """A statement whose parameters are given by name when it runs, and the type of its rows."""

    @overload
    def __init__(self: "Prepared[tuple[Any]]", statement: Statement) -> None: ...

    @overload
    def __init__(self, statement: Statement, row: type[RowT]) -> None: ...

    def __init__(self, statement: Statement, row: type[Any] = tuple) -> None:
        """Prepare a statement; `row` is the type of its rows, needed only for more than one column."""
        names = tuple(column.key for column in _columns(statement))
        if (len(names) > 1 or row is not tuple) and names != getattr(row, "_fields", None):
            raise TypeError(f"A row of this statement is a NamedTuple with the fields {names}, not {row.__name__}.")
        self._statement = statement
        self._row_type = row
        self._lists = _lists(statement)
        self._adds = isinstance(statement, sa.Insert)
        self._forms: dict[Any, _Form] = {}
        """Forms by the kind of database."""

    def __call__(self, connection: sa.Connection, /, **values: Any) -> QueryResult[RowT]:
        """Run the statement once."""
        for name in self._lists:
            values[name] = _padded(values[name])
        form = self._form(connection.dialect, values)
        return _run(connection, form.text, form.values(values), form)

    def each(self, connection: sa.Connection, rows: Sequence[Mapping[str, Any]]) -> int:
        """Run the statement for each of `rows`, which have the same names; return the number of rows changed."""
        if not rows:
            return 0
        form = self._form(connection.dialect, rows[0])
        return _run(connection, form.text, [form.values(row) for row in rows], form, many=True).rowcount

    def _form(self, dialect: sa.Dialect, values: Mapping[str, Any]) -> _Form:
        # The text depends on the columns of a new row, and on the number of values in a list.
        key: Any = type(dialect)
        if self._adds:
            key = (key, *values)
        elif self._lists:
            key = (key, *[len(values[name]) for name in self._lists])
        form = self._forms.get(key)
        if form is None:
            form = self._forms[key] = _compiled(self._statement, self._row_type, dialect, values)
        return form


def _columns(statement: Any) -> list[sa.ColumnElement[Any]]:
    return list(statement.exported_columns)


def _padded(members: Collection[Any]) -> list[Any]:
    """Return the members of a list, the last one repeated up to the next length that has a form."""
    few, count = list(members), len(members)
    if count <= PADDED_MAX:
        length = 1 << (count - 1).bit_length() if count else 0
    else:
        length = min(-(-count // PADDED_MAX) * PADDED_MAX, max(count, LIST_MAX))
    return few + few[-1:] * (length - count)


def _lists(statement: sa.ClauseElement) -> list[str]:
    binds = [bind for bind in sa.sql.visitors.iterate(statement) if isinstance(bind, sa.BindParameter)]
    return [bind.key for bind in binds if bind.expanding and bind.value is None]


def say(connection: sa.Connection, *texts: str, waits: bool = False) -> None:
    """Run texts of the database's own without parameters or rows; with `waits` they may wait for other transactions."""
    for text in texts:
        _run(connection, text, None, waits=waits)


def say_each(connection: sa.Connection, text: str, rows: Sequence[Sequence[Any]]) -> None:
    """Run a text for each of `rows`, whose values are in the driver's own form."""
    if not connection.in_transaction():
        connection.begin()  # as SQLAlchemy does itself, so that a commit through it includes this statement
    _run(connection, text, rows, many=True)


def _run(
    connection: sa.Connection,
    text: str,
    values: Any,
    form: _Form | None = None,
    *,
    many: bool = False,
    waits: bool = False,
) -> QueryResult[Any]:
    if connection._has_events or connection.engine._has_events:  # SQLAlchemy's own test: a walk takes ten times as long
        for listener in connection.dispatch.before_cursor_execute:
            listener(connection, None, text, values, None, many)
    lent = connection.connection
    straight: Straight | None = None if waits else lent.info.get(STRAIGHT)
    try:
        if straight is None or (many and len(values) > FEW):
            rows, changed, types = _by_cursor(lent.cursor(), text, values, form, many=many)
        elif many:
            rows, changed, types = [], sum(straight(text, each)[1] for each in values), ()
        else:
            rows, changed, types = straight(text, values)
    except connection.dialect.loaded_dbapi.Error as error:
        raise sa.exc.DBAPIError.instance(text, values, error, connection.dialect.loaded_dbapi.Error) from error
    if rows and form is not None:
        form.row = form.row or _row(form.row_type, form.columns, connection.dialect, types)
        result = QueryResult[Any](map(form.row, rows))
    else:
        result = QueryResult[Any]()
    result.rowcount = changed
    return result


def _by_cursor(cursor: Any, text: str, values: Any, form: _Form | None, *, many: bool) -> Answer:
    try:
        if many:
            cursor.executemany(text, values)
        elif values is None:
            cursor.execute(text)
        else:
            cursor.execute(text, values)
        if form is None or not form.columns:
            return [], cursor.rowcount, ()
        # The driver's column types are read once.
        types = () if form.row else [type_code for _, type_code, *_rest in cursor.description]
        return cursor.fetchall(), cursor.rowcount, types
    finally:
        cursor.close()


def _compiled(statement: Any, row: type[tuple[Any, ...]], dialect: sa.Dialect, values: Mapping[str, Any]) -> _Form:
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
        columns=_columns(statement),
        row_type=row,
    )


def _converters(made: Any, state: Any, dialect: sa.Dialect) -> Iterator[tuple[str, Callable[[Any], Any]]]:
    """Yield the converters of parameters whose types need one."""
    for name, bind in made.binds.items():
        if convert := bind.type.dialect_impl(dialect).bind_processor(dialect):
            members = state.parameter_expansion.get(name, [name])
            yield from ((member, convert) for member in members if member in state.parameters)


def _row(
    row: type[tuple[Any, ...]], columns: Sequence[sa.ColumnElement[Any]], dialect: sa.Dialect, types: Sequence[Any]
) -> Callable[[Any], Any]:
    """Return a function that converts a driver's row to one of type `row`, by the driver's type codes."""
    converters = [
        column.type.dialect_impl(dialect).result_processor(dialect, type_code)
        for column, type_code in zip(columns, types, strict=True)
    ]
    made = partial(tuple.__new__, row)  # as many values as fields: both are the statement's
    if not any(converters):
        return made
    return lambda values: made(
        value if convert is None else convert(value) for convert, value in zip(converters, values, strict=True)
    )
