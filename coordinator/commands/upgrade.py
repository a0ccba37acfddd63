"""`swarm-coordinator upgrade`: upgrade the store of a stopped round to the schema of the installed software."""

import time
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from coordinator.commands.options import ConfigFile, Settings
from coordinator.config import Config, fixed, load
from protocol.errors import ConfigInvalid

if TYPE_CHECKING:
    from coordinator.store.state import Database


OTHERS = (
    "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid() "
    "AND backend_type = 'client backend'"
)


def upgrade(
    config_file: ConfigFile,
    settings: Settings,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Try every step, then undo it.")] = False,
    backup: Annotated[bool, typer.Option(help="First copy the database to the round's folder.")] = True,
) -> None:
    """Upgrade the database of a stopped round to the schema of this software, if it is older.

    The database is copied first. After an interruption, run the command again: each step is atomic.
    """
    from coordinator.service.opening import only_coordinator
    from coordinator.store import upgrading
    from coordinator.store.state import Database

    config = load(config_file, settings)
    folder = config.round.directory
    fixed.require_round(folder)
    with only_coordinator(folder), closing(Database(config.state, any_schema=True)) as database:
        schema = database.run_now(upgrading.require_store)
        waiting = database.run_now(upgrading.pending)
        if not waiting:
            typer.echo(f"The database has schema {schema}, which is current.")
            return
        if dry_run:
            count = upgrading.dry_run(database, typer.echo)
            typer.echo(f"{count} steps are needed; nothing was changed.")
            return
        _refuse_company(config, database)
        if backup:
            copy = _copy(config, config_file, schema)
            typer.echo(
                f"backup: {copy}\nTo undo the upgrade before the next launch: swarm-coordinator restore {copy} …"
            )
        upgrading.upgrade(database, typer.echo)
        typer.echo(f"The database has schema {database.run_now(upgrading.require_store)} now.")


def _refuse_company(config: Config, database: "Database") -> None:
    """Raise an error if other connections are open: API processes hold no lock, but a connection."""
    if config.store.url and (
        others := database.run_now(lambda connection: connection.exec_driver_sql(OTHERS).scalar())
    ):
        raise ConfigInvalid(
            f"{others} other connections to the database are open.",
            hint="Stop every `swarm-coordinator api` of this round, and close all other connections.",
        )


def _copy(config: Config, config_file: Path, schema: int) -> Path:
    """Copy the store to a folder whose name has its schema and the time; return the folder."""
    from coordinator.base.files import make_folder
    from coordinator.service.backup import making

    folder = make_folder(config.round.directory / "backups")
    target = folder / f"schema-{schema}-{time.strftime('%Y%m%dT%H%M%S', time.gmtime())}"
    making.save_store(config, config_file, target, lambda _what, _done, _total: None)
    return target
