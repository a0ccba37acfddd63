"""A store of the first schema, with a real round in it, becomes one of today's; and nobody can forget a step."""

import difflib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
import sqlalchemy as sa
from alembic.autogenerate import produce_migrations, render_python_code
from alembic.migration import MigrationContext

from coordinator.store import schema, tables, upgrading
from coordinator.store.schema import numbered, stamp
from coordinator.store.state import Database, engine
from coordinator.transactions import api_keys, queries
from ledger import store
from ledger import tables as ledger_tables
from protocol.errors import ConfigInvalid
from tests.coordinator.old_stores import make_old, rows_of_the_round, schema_of, wipe

FORGOTTEN = """
The tables have changed, and no step brings an older store there. Stores out there would be refused or misread.

1. Write coordinator/store/migrations/versions/step_{next}_what.py, with a docstring whose first line says what is new:

revision = "{next}"
down_revision = "{last}"

def upgrade() -> None:
{code}

2. Set SCHEMA = {number} in coordinator/store/schema.py.

Look at the code: existing rows need a value where a column may not be null. A step that others have released is never
edited; one that was merged today and not released may be."""


@pytest.fixture(params=["sqlite", "postgresql"])
def where(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path | str]:
    """Return a place for a store of the first schema."""
    if request.param == "sqlite":
        yield tmp_path / "state.db"
        return
    url: str = request.getfixturevalue("postgres_url")
    yield url
    wipe(url)


@pytest.fixture
def old(where: Path | str) -> Path | str:
    return make_old(where)


def upgraded(where: Path | str) -> int:
    with closing(Database(where, any_schema=True)) as database:
        return upgrading.upgrade(database, lambda _: None)


def described(where: Path | str) -> dict[str, object]:
    opened = engine(where)
    with opened.connect() as connection:
        found = schema_of(connection)
    opened.dispose()
    return found


def lines(tables_of: dict[str, object]) -> list[str]:
    return json.dumps(tables_of, indent=1, sort_keys=True, default=str).splitlines()


def what_is_missing(where: Path | str) -> str:
    """The step that somebody forgot, as Alembic would write it."""
    opened = engine(where)
    with opened.connect() as connection:
        every = [tables.metadata, ledger_tables.metadata, stamp.metadata]
        context = MigrationContext.configure(connection, opts={"compare_type": True, "compare_server_default": True})
        script = produce_migrations(context, every)  # type: ignore[arg-type]  # takes several, too
        assert script.upgrade_ops is not None
        code = render_python_code(script.upgrade_ops)
    opened.dispose()
    return code


def test_an_upgraded_store_has_the_tables_of_a_new_one(old: Path | str, tmp_path: Path) -> None:
    """A change of a table needs a migration step, or it fails here."""
    assert upgraded(old) == schema.SCHEMA - 1
    before, code = described(old), what_is_missing(old)
    if isinstance(old, str):
        wipe(old)
    new = tmp_path / "new.db" if isinstance(old, Path) else old
    Database(new).close()
    differences = list(difflib.unified_diff(lines(before), lines(described(new)), "upgraded", "new", n=1, lineterm=""))
    if differences:
        last, after = numbered(schema.SCHEMA), numbered(schema.SCHEMA + 1)
        text = FORGOTTEN.format(next=after, last=last, number=schema.SCHEMA + 1, code="    " + code)
        pytest.fail("\n".join([text, "", *differences]), pytrace=False)


def test_the_steps_are_one_chain_that_ends_where_the_software_stands() -> None:
    chain = [step.revision for step in upgrading.steps()]
    assert chain == [numbered(number) for number in range(1, schema.SCHEMA + 1)], (
        f"Steps {chain}, and coordinator/store/schema.py says SCHEMA = {schema.SCHEMA}. Two branches may have taken "
        "the same number: give the later one the next, in its name, in `revision` and in `down_revision`."
    )
    for step in upgrading.steps():
        assert Path(step.path).name.startswith(f"step_{step.revision}_")
        assert len(upgrading.what(step)) > 10


def test_an_upgraded_store_has_every_row_and_a_sound_ledger(old: Path | str) -> None:
    upgraded(old)
    database = Database(old)

    def counted(connection: sa.Connection, name: str) -> int:
        return connection.execute(sa.select(sa.func.count()).select_from(sa.table(name))).scalar_one()

    rows = rows_of_the_round()
    assert {name: database.run_now(counted, name) for name in rows} == {name: len(rows[name]) for name in rows}
    assert database.run_now(store.rebuild) == []
    database.close()


def test_the_usage_of_a_key_is_that_of_its_queries_and_of_those_that_were_deleted(old: Path | str) -> None:
    key = "INSERT INTO api_keys VALUES ({0}, 'key {0}', '{0}', 9, 0, 0, 1, NULL, NULL, false)"
    query = "INSERT INTO queries VALUES ({0}, {1}, -{0}, '{2}', NULL, '', 1, 1, NULL, 0, {0}, 9, 9, NULL, NULL)"
    answer = "UPDATE rollouts SET group_no = -1, state = 'served', tokens = 7"
    statements = [key.format(1), key.format(2), query.format(1, 1, "answered"), query.format(2, 1, "withdrawn")]
    statements += [answer + " WHERE claim_id = (SELECT MIN(claim_id) FROM rollouts)"]
    statements += ["INSERT INTO facts VALUES ('forgotten_queries', '{\"1\": [1207, 402106]}')"]
    opened = engine(old)
    with opened.begin() as connection:
        for statement in statements:
            connection.exec_driver_sql(statement)
    opened.dispose()
    upgraded(old)
    with closing(Database(old)) as database:
        found = database.run_now(api_keys.list_keys)
    names = ("name", "answered_queries", "tokens", "used_ms")
    assert [tuple(row[name] for name in names) for row in found] == [("key 1", 1208, 402_113, 2), ("key 2", 0, 0, None)]


def days(connection: sa.Connection) -> list[tuple[int, ...]]:
    return sorted(tuple(row) for row in connection.execute(sa.select(tables.key_days)))


def test_days_of_a_key_are_counted_from_the_queries_that_are_stored(old: Path | str) -> None:
    """The first answer has a part of another node; the second was retracted, so its tokens and price do not count."""
    day_ms = 86_400_000
    query = (
        "INSERT INTO queries VALUES ({0}, {1}, -{0}, 'answered', NULL, {3}, 1, 1, NULL, 0, {2}, {2}, {2}, NULL, NULL)"
    )
    prompt = "'\\x4600000047000000'" if isinstance(old, str) else "x'4600000047000000'"
    claims = sorted(row["claim_id"] for row in rows_of_the_round()["rollouts"])[:2]
    answer = "UPDATE rollouts SET group_no = -{0}, state = '{1}', tokens = 7, credit_micros = 9 WHERE claim_id = '{2}'"
    statements = [query.format(number, 1, 5 * day_ms + number, prompt) for number in (1, 2)]
    statements += [query.format(3, 2, 6 * day_ms, prompt)]
    statements += [answer.format(1, "served", claims[0]), answer.format(2, "retracted", claims[1])]
    statements += [f"INSERT INTO parts VALUES ('part', '{claims[0]}', 'another lease', 'another node', 3, 4, 1)"]
    opened = engine(old)
    with opened.begin() as connection:
        for statement in statements:
            connection.exec_driver_sql(statement)
    opened.dispose()
    upgraded(old)
    with closing(Database(old)) as database:
        found = database.run_now(days)
        database.run_now(queries.refund, -1)
        refunded = database.run_now(days)
    assert found == [(1, 5, 2, 2, 10, 13), (2, 6, 1, 0, 0, 0)]
    assert refunded == [(1, 5, 2, 0, 0, 0), (2, 6, 1, 0, 0, 0)]


def test_an_older_store_is_refused_with_the_command_to_run(old: Path | str) -> None:
    before = described(old)
    with pytest.raises(ConfigInvalid, match=r"has schema 1.*swarm-coordinator upgrade"):
        Database(old)
    assert described(old) == before


def test_a_newer_store_is_refused_and_left_alone(where: Path | str) -> None:
    if isinstance(where, str):
        wipe(where)
    database = Database(where)
    newer = sa.update(stamp).values(version_num=numbered(schema.SCHEMA + 1))
    database.run_now(lambda connection: connection.execute(newer))
    database.close()
    before = described(where)
    with pytest.raises(ConfigInvalid, match="newer than this software"):
        Database(where)
    with pytest.raises(ConfigInvalid, match="newer than this software"):
        upgraded(where)
    assert described(where) == before


def test_tables_without_a_number_are_no_store_to_write_to(tmp_path: Path) -> None:
    path = tmp_path / "state.db"
    database = Database(path)
    database.run_now(lambda connection: stamp.drop(connection))
    database.close()
    with pytest.raises(ConfigInvalid, match="no schema number"):
        Database(path)


def test_a_dry_run_tries_every_step_and_changes_nothing(old: Path | str) -> None:
    before, told = described(old), list[str]()
    database = Database(old, any_schema=True)
    assert upgrading.dry_run(database, told.append) == schema.SCHEMA - 1
    database.close()
    assert len(told) == schema.SCHEMA - 1
    assert described(old) == before
    with pytest.raises(ConfigInvalid, match="has schema 1"):
        Database(old)


def test_an_upgrade_twice_takes_each_step_once(old: Path | str) -> None:
    assert upgraded(old) == schema.SCHEMA - 1
    assert upgraded(old) == 0


KILLED = """
import os, signal, sys
from pathlib import Path
from coordinator.store import upgrading
from coordinator.store.state import Database
where = sys.argv[1] if "://" in sys.argv[1] else Path(sys.argv[1])
database = Database(where, any_schema=True)
def half(connection):
    for step in upgrading.pending(connection):
        upgrading.apply_step(connection, step)
    os.kill(os.getpid(), signal.SIGKILL)
database.run_now(half)
"""


def test_killed_in_the_middle_of_a_step_it_has_not_happened_and_the_next_start_goes_on(old: Path | str) -> None:
    before = described(old)
    killed = subprocess.run([sys.executable, "-P", "-c", KILLED, str(old)], env=dict(os.environ), check=False)
    assert killed.returncode == -signal.SIGKILL
    assert described(old) == before
    assert upgraded(old) == schema.SCHEMA - 1
    Database(old).close()
