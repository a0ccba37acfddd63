"""The upgrade of a store to the schema of this software, step by step; run by `swarm-coordinator upgrade`.

- Each step is one transaction with the number it leads to. An upgrade that is killed goes on at the next start.
- Each step compares and sets the number that it starts from: two upgrades at once run each step once.
- A dry run runs all steps in one transaction, which is rolled back.
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
    """The end of a dry run, which rolls everything back."""


def steps() -> list[Script]:
    """Return all steps, in order."""
    scripts = ScriptDirectory(str(STEPS)).walk_revisions()
    return sorted(scripts, key=lambda step: step.revision)


def require_store(connection: sa.Connection) -> int:
    """Return the schema number of a store; refuse an empty store."""
    there = schema.stored_number(connection)
    if there is None:
        raise ConfigInvalid("The store is empty: there is nothing to upgrade.", hint="`launch` makes its tables.")
    return there


def pending(connection: sa.Connection) -> list[Script]:
    """Return the steps that a store still needs."""
    there = require_store(connection)
    schema.require_known(there)
    return [step for step in steps() if there < int(step.revision) <= schema.SCHEMA]


def upgrade(database: Database, tell: Tell) -> int:
    """Run every pending step, and return how many these were."""
    waiting = database.run_now(pending)
    for place, step in enumerate(waiting, 1):
        tell(f"step {place} of {len(waiting)}: schema {int(step.revision)}: {what(step)}")
        database.run_now(apply_step, step)
    return len(waiting)


def dry_run(database: Database, tell: Tell) -> int:
    """Run every pending step, undo them all, and return how many these were."""
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
    """Run one step in the caller's transaction."""
    before = sa.update(stamp).where(stamp.c.version_num == str(step.down_revision))
    if connection.execute(before.values(version_num=step.revision)).rowcount != 1:
        raise ConfigInvalid("The store's schema changed during this upgrade.", hint="Is another upgrade running?")
    with Operations.context(MigrationContext.configure(connection)):
        step.module.upgrade()


def what(step: Script) -> str:
    """Return the description of a step, for the operator."""
    return step.doc.strip().partition("\n")[0].rstrip(".")
