"""A store brought to the schema of this software, step by step; run by `swarm-coordinator upgrade`.

- Each step is one transaction with the number it leads to. Killed at any moment, it goes on at the next start.
- A step is taken from the number that it starts from by compare-and-set: two who upgrade at once take each step once.
- A dry run does every step for real, in one transaction that is rolled back.
"""

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import sqlalchemy as sa
from alembic.migration import MigrationContext
from alembic.operations import Operations
from alembic.script import Script, ScriptDirectory

from coordinator.store import schema
from coordinator.store.schema import stamp
from coordinator.store.state import Database
from protocol.errors import ConfigInvalid

STEPS = Path(__file__).parent / "migrations"

Tell = Callable[[str], None]


class _DryRun(Exception):
    """Rolls everything back."""


def steps() -> list[Script]:
    """All steps, the first one first."""
    found = ScriptDirectory(str(STEPS)).walk_revisions()
    return sorted(found, key=lambda step: step.revision)


def require_store(connection: sa.Connection) -> int:
    """The schema of a store that has one."""
    there = schema.stored_number(connection)
    if there is None:
        raise ConfigInvalid("The store is empty: there is nothing to upgrade.", hint="`launch` makes its tables.")
    return there


def pending(connection: sa.Connection) -> list[Script]:
    """The steps that a store still has to take."""
    there = require_store(connection)
    schema.require_known(there)
    return [step for step in steps() if there < int(step.revision) <= schema.SCHEMA]


def upgrade(database: Database, tell: Tell) -> int:
    """Take every pending step; how many these were."""
    waiting = database.run_now(pending)
    for place, step in enumerate(waiting, 1):
        tell(f"step {place} of {len(waiting)}: schema {int(step.revision)}: {what(step)}")
        database.run_now(apply_step, step)
    return len(waiting)


def dry_run(database: Database, tell: Tell) -> int:
    """The same, and then undone."""
    waiting = database.run_now(pending)

    def try_all(connection: sa.Connection) -> None:
        for place, step in enumerate(waiting, 1):
            tell(f"step {place} of {len(waiting)}: schema {int(step.revision)}: {what(step)}")
            apply_step(connection, step)
        raise _DryRun

    with suppress(_DryRun):
        database.run_now(try_all)
    return len(waiting)


def apply_step(connection: sa.Connection, step: Script) -> None:
    """One step, in the caller's transaction."""
    before = sa.update(stamp).where(stamp.c.version_num == str(step.down_revision))
    if connection.execute(before.values(version_num=step.revision)).rowcount != 1:
        raise ConfigInvalid("The store's schema changed under this upgrade.", hint="Is another one running?")
    with Operations.context(MigrationContext.configure(connection)):
        step.module.upgrade()


def what(step: Script) -> str:
    """A step in words, for the operator."""
    return step.doc.strip().partition("\n")[0].rstrip(".")
