"""`swarm-coordinator backup` and `restore`."""

import shlex
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import typer

from coordinator.commands.options import ConfigFile, Settings
from coordinator.config import Config, load
from coordinator.config.reading import on_top
from protocol.errors import ConfigInvalid
from protocol.plain import counted

PassphraseFile = Annotated[
    Path | None, typer.Option("--passphrase-file", exists=True, help="File with the passphrase; else it is asked for.")
]
PASSPHRASE_MIN_CHARS = 8


def backup(
    config_file: ConfigFile,
    target: Annotated[
        Path, typer.Argument(metavar="TARGET", help="The folder to make, or a file whose name ends in .tar.")
    ],
    settings: Settings,
    keys: Annotated[bool, typer.Option(help="Save the keys, too, sealed with a passphrase.")] = True,
    passphrase_file: PassphraseFile = None,
) -> None:
    """Save the whole state of a round, which may be running, and read the result again."""
    from coordinator.backup.making import make

    config = load(config_file, settings)
    passphrase = _passphrase(passphrase_file, twice=True) if keys else None
    with _progress() as tell:
        made = make(config, config_file, target, passphrase=passphrase, tell=tell)
    size_bytes = sum(entry.size_bytes for entry in made.files)
    typer.echo(
        f"{target}: version {made.version}, {counted(made.ledger_size, 'entry', 'entries')} of the ledger, "
        f"{counted(len(made.files), 'file')}, {size_bytes / 1e6:.1f} MB, read again; keys {made.keys}"
    )
    if made.keys != "sealed":
        typer.echo("Without its keys nobody can go on with this round: keep the folder keys/ elsewhere.")


def restore(
    source: Annotated[
        Path, typer.Argument(metavar="BACKUP", help="What `backup` made, or `upgrade` in the folder backups/.")
    ],
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="The round's new folder.")],
    seen: Annotated[
        list[str],
        typer.Option(
            "--seen",
            default_factory=list,
            show_default=False,
            help="File or URL with the newest checkpoint known; repeatable.",
        ),
    ],
    nothing_newer: Annotated[
        bool, typer.Option("--nothing-newer", help="Your word that the coordinator has not run since the backup.")
    ] = False,
    store_url: Annotated[str, typer.Option(help="An empty PostgreSQL, for a round that was on one.")] = "",
    passphrase_file: PassphraseFile = None,
) -> None:
    """Make a round of a backup, in a new folder; refused where anything newer was published after it."""
    from coordinator.backup import restoring
    from coordinator.backup.archive import BackupInvalid

    sealed = restoring.describe(source).keys == "sealed"
    if passphrase_file is not None and not sealed:
        raise BackupInvalid(
            f"{source} has no keys for a passphrase to open, and nothing in it proves that it is as it was made.",
            hint="If you made it with --no-keys, leave --passphrase-file away; else take another one.",
        )
    passphrase = _passphrase(passphrase_file, twice=False) if sealed else None
    with _progress() as tell:
        made = restoring.restore(
            source,
            folder.absolute(),
            store_url=store_url,
            passphrase=passphrase,
            seen=seen,
            nothing_newer=nothing_newer,
            tell=tell,
        )
    when = datetime.fromtimestamp(made.made_ms / 1000, UTC)
    typer.echo(f"{folder}: the round as of {when:%Y-%m-%d %H:%M:%S} UTC, version {made.version}")
    if not sealed and made.folder == "saved":
        typer.echo(f"Put the round's keys into {folder / 'keys'}: the backup has none.")
    typer.echo(f"Its settings file is {folder / 'operator.toml'}. Go on with:\n{launch_line(folder, store_url)}")


def launch_line(folder: Path, store_url: str) -> str:
    """The line that goes on with a restored round, as it ran: with all that stood on top of its file."""
    ran = Config.model_validate_json((folder / "resolved.json").read_bytes())
    placed = [f"round.directory={folder.absolute()}", *([f"store.url={store_url}"] if store_url else [])]
    rest = [
        one for one in on_top(folder / "operator.toml", ran) if not one.startswith(("round.directory=", "store.url="))
    ]
    settings = " ".join(f"--set {shlex.quote(one)}" for one in [*placed, *rest])
    return f"swarm-coordinator launch {shlex.quote(str(folder / 'operator.toml'))} {settings}"


def _passphrase(file: Path | None, *, twice: bool) -> str:
    if file is not None:
        found = file.read_text().strip("\r\n")
    elif sys.stdin.isatty():
        found = str(typer.prompt("Passphrase of the keys", hide_input=True, confirmation_prompt=twice))
    else:
        raise ConfigInvalid("The keys need a passphrase.", hint="Give --passphrase-file, or leave them out: --no-keys.")
    if twice and len(found) < PASSPHRASE_MIN_CHARS:
        raise ConfigInvalid(f"A passphrase has at least {PASSPHRASE_MIN_CHARS} characters.")
    return found


@contextmanager
def _progress() -> Iterator[Callable[[str, int, int], None]]:
    """A bar on a terminal; elsewhere nothing, since the last line says it all."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    columns = (TextColumn("{task.description:24}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("")

        def tell(what: str, done: int, total: int) -> None:
            bar.update(task, description=what, completed=done, total=total)

        yield tell
