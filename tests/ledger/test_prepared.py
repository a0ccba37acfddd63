"""Prepared statements say the same as SQLAlchemy's own execution, on every database."""

from collections import namedtuple
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
import sqlalchemy as sa

from ledger.prepared import Prepared

metadata = sa.MetaData()
things = sa.Table(
    "prepared_things",
    metadata,
    sa.Column("name", sa.String, primary_key=True),
    sa.Column("sound", sa.Boolean, nullable=False, default=True),
    sa.Column("parts", sa.JSON, nullable=True),
    sa.Column("data", sa.LargeBinary, nullable=True),
    sa.Column("weight", sa.Float, nullable=True),
    sa.Column("count", sa.BigInteger, nullable=False, default=7),
)

_add = Prepared(sa.insert(things))
_all = sa.select(things).order_by(things.c.name)
_named = sa.select(things.c.name, things.c.count).where(
    things.c.name.in_(sa.bindparam("names", expanding=True)), things.c.sound == sa.bindparam("sound")
)


NamedThing: Any = namedtuple("NamedThing", ["name", "count"])  # a field of this name hides a method of tuples


class Weighed(NamedTuple):
    """The weight of a thing, and whether it is sound."""

    weight: float | None
    sound: bool


@pytest.fixture
def connection(engine: sa.Engine) -> Iterator[sa.Connection]:
    with engine.connect() as connection, connection.begin() as transaction:
        metadata.create_all(connection)
        yield connection
        transaction.rollback()


def fill(connection: sa.Connection) -> None:
    _add(connection, name="a", parts={"x": [1, None]}, data=b"\0\xff", weight=0.5)
    _add.each(connection, [{"name": name, "sound": name == "b", "count": len(name)} for name in ("b", "cc", "%s")])


def same(connection: sa.Connection, statement: Any, **values: Any) -> list[Any]:
    names = [column.key for column in statement.exported_columns]
    row: Any = namedtuple("Row", names)  # type: ignore[misc]  # the names are the statement's
    found, expected = Prepared(statement, row)(connection, **values), connection.execute(statement, values).all()
    assert [tuple(row) for row in found] == [tuple(row) for row in expected]
    assert [row._asdict() for row in found] == [row._asdict() for row in expected]
    return found


def test_rows_are_what_sqlalchemy_gives_of_every_type(connection: sa.Connection) -> None:
    fill(connection)
    first = same(connection, _all)[1]
    assert first.name == "a"
    assert first.sound is True
    assert first.parts == {"x": [1, None]}
    assert first.data == b"\0\xff"
    assert first.count == 7, "a column's default"


def test_lists_of_any_length_and_constants_in_the_text(connection: sa.Connection) -> None:
    fill(connection)
    for names in ([], ["a"], ["b", "cc"], ["a", "b", "cc", "none"], ["%s"]):
        same(connection, _named, names=names, sound=False)
    assert len(same(connection, sa.select(things.c.name).where(things.c.name.in_(("a", "b", "none"))))) == 2
    written_out = things.c.name.in_([sa.literal(name, literal_execute=True) for name in ("b", "cc")])
    assert len(same(connection, sa.select(things.c.name).where(written_out, things.c.count == 2))) == 1


def test_lists_of_all_lengths_have_few_texts(connection: sa.Connection) -> None:
    fill(connection)
    texts, statement = set[str](), Prepared(_named, NamedThing)

    def hear(_connection: object, _cursor: object, text: str, *_rest: object) -> None:
        texts.add(text)

    sa.event.listen(connection, "before_cursor_execute", hear)
    for count in (*range(65), 1025, 1100, 2048):
        names = [*map(str, range(count - 1)), "a"][:count]
        assert statement(connection, names=names, sound=True).scalars() == ["a"] * bool(count)
    assert len(texts) == 9, "none, 1, 2, 4, … 64, and 2048"
    for count in (31_745, 32_000, 32_001):  # SQLite accepts 32,766 parameters
        assert statement(connection, names=["none"] * (count - 1) + ["a"], sound=True).scalars() == ["a"]


def test_one_form_serves_other_values(connection: sa.Connection) -> None:
    fill(connection)
    by_name = Prepared(sa.select(things.c.count).where(things.c.name == sa.bindparam("wanted"), things.c.count > 0))
    assert [by_name(connection, wanted=name).scalar() for name in ("a", "b", "cc", "none")] == [7, 1, 2, None]
    assert by_name(connection, wanted="none").first() is None
    assert by_name(connection, wanted="a").scalars() == [7]
    with pytest.raises(ValueError, match="unpack"):
        by_name(connection, wanted="none").single_row()


def test_changed_rows_are_counted_and_told(connection: sa.Connection) -> None:
    fill(connection)
    here = sa.update(things).where(things.c.name == sa.bindparam("who")).values(count=things.c.count + 1)
    tell, grow = Prepared(here.returning(things.c.weight, things.c.sound), Weighed), Prepared(here)
    assert grow(connection, who="a").rowcount == 1
    assert grow(connection, who="nobody").rowcount == 0
    assert tell(connection, who="a").single_row() == Weighed(0.5, sound=True)
    assert grow.each(connection, [{"who": "a"}, {"who": "b"}, {"who": "nobody"}]) == 2
    assert grow.each(connection, []) == 0


def test_what_the_database_refuses_is_sqlalchemys_error(connection: sa.Connection) -> None:
    fill(connection)
    savepoint = connection.begin_nested()
    with pytest.raises(sa.exc.IntegrityError, match="prepared_things"):
        _add(connection, name="a")
    savepoint.rollback()
    with pytest.raises(sa.exc.InvalidRequestError, match="sound"):
        Prepared(_named, NamedThing)(connection, names=["a"])


def test_rows_of_other_fields_than_the_columns_are_refused() -> None:
    columns = sa.select(things.c.sound, things.c.weight)
    rows: list[tuple[Any, Any]] = [(columns, tuple), (columns, Weighed), (sa.select(things.c.weight), Weighed)]
    for statement, row in rows:
        with pytest.raises(TypeError, match="NamedTuple with the fields"):
            Prepared(statement, row)
    Prepared(sa.select(things.c.weight, things.c.sound), Weighed)
    Prepared(sa.select(things.c.count))


SAME = (
    test_rows_are_what_sqlalchemy_gives_of_every_type,
    test_lists_of_any_length_and_constants_in_the_text,
    test_lists_of_all_lengths_have_few_texts,
    test_one_form_serves_other_values,
    test_changed_rows_are_counted_and_told,
    test_what_the_database_refuses_is_sqlalchemys_error,
)
"""Statements for connections that know a shorter way."""
