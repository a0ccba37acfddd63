"""`swarm-coordinator backup` and `restore`."""

import shlex
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from coordinator.commands.keys import RootKeys
from coordinator.commands.options import ConfigFile, Settings
from coordinator.config import Config, fixed, load
from coordinator.config.reading import on_top
from coordinator.tasks.kinds import code_files
from protocol.errors import ConfigInvalid
from protocol.text.plain import counted

if TYPE_CHECKING:
    from coordinator.service.backup.restoring import Restored

PassphraseFile = Annotated[
    Path | None,
    typer.Option(
        "--passphrase-file", exists=True, help="File with the passphrase; without it, the command asks for it."
    ),
]
PASSPHRASE_MIN_CHARS = 8

WITHOUT_CODE = "It has no copy of your own code, {}: keep that, and the files that it reads, elsewhere."
WITHOUT_KEYS = "The backup has no keys, and the round cannot continue without them: copy the folder keys/ separately."


def backup(
    config_file: ConfigFile,
    target: Annotated[
        Path, typer.Argument(metavar="TARGET", help="The folder to create, or a file whose name ends in .tar.")
    ],
    settings: Settings,
    keys: Annotated[bool, typer.Option(help="Include the keys, encrypted with a passphrase.")] = True,
    passphrase_file: PassphraseFile = None,
    follow: Annotated[
        bool, typer.Option("--follow", help="Keep TARGET, a folder on another disk, up to date within seconds.")
    ] = False,
    every: Annotated[float, typer.Option(min=0.1, max=10.0, help="Interval of --follow, in seconds.")] = 1.0,
) -> None:
    """Save the complete state of a round and verify the backup. The round may be running.

    With --follow it runs until Ctrl-C: TARGET is a standby copy from which `restore --take-over` continues the round if
    this machine is lost. While the copy is up to date, nothing is published that it does not contain.
    """
    config = load(config_file, settings)
    passphrase = _passphrase(passphrase_file, twice=True) if keys else None
    if follow:
        _follow(config, config_file, target, passphrase, every)
        return
    from coordinator.service.backup.making import make

    with _progress() as tell:
        made = make(config, config_file, target, passphrase=passphrase, tell=tell)
    size_bytes = sum(entry.size_bytes for entry in made.files)
    typer.echo(
        f"{target}: version {made.version}, {counted(made.ledger_size, 'entry', 'entries')} of the ledger, "
        f"{counted(len(made.files), 'file')}, {size_bytes / 1e6:.1f} MB, verified; keys {made.keys}"
    )
    if code := code_files(config):
        typer.echo(WITHOUT_CODE.format(" and ".join(code)))
    if made.keys != "sealed":
        typer.echo(WITHOUT_KEYS)


def _follow(config: Config, config_file: Path, target: Path, passphrase: str | None, every_s: float) -> None:
    """Keep a standby copy up to date until a signal arrives."""
    from coordinator.base import logs
    from coordinator.base.files import private_from_now_on
    from coordinator.service.backup.archive import Sealer
    from coordinator.service.backup.following import Follower, follow

    logs.to_stderr(quiet=False)
    private_from_now_on()
    stop = threading.Event()
    for name in (signal.SIGINT, signal.SIGTERM):
        signal.signal(name, lambda *_: stop.set())
    sealer = Sealer(passphrase) if passphrase is not None else None
    if code := code_files(config):
        typer.echo(WITHOUT_CODE.format(" and ".join(code)))
    if sealer is None:
        typer.echo(WITHOUT_KEYS)
    with _progress() as tell, Follower(config, config_file, target, sealer, tell) as follower:
        follow(follower, every_s, stop, typer.echo)


def restore(
    source: Annotated[
        Path,
        typer.Argument(metavar="BACKUP", help="A backup made by `backup`, or by `upgrade` in the folder backups/."),
    ],
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="The round's new folder.")],
    seen: Annotated[
        list[str],
        typer.Option(
            "--seen",
            default_factory=list,
            show_default=False,
            help="File or URL of the newest known checkpoint, or a `ledger verify --save` folder; repeatable.",
        ),
    ],
    root_keys: RootKeys,
    nothing_newer: Annotated[
        bool, typer.Option("--nothing-newer", help="Confirm that the coordinator has not run since the backup.")
    ] = False,
    store_url: Annotated[
        str,
        typer.Option(help="For a PostgreSQL round: an empty database; for a standby copy, the promoted replica."),
    ] = "",
    passphrase_file: PassphraseFile = None,
    take_over: Annotated[
        bool,
        typer.Option("--take-over", help="Continue the round from a standby copy; lists missing published entries."),
    ] = False,
    after_gap: Annotated[
        bool,
        typer.Option("--after-gap", help="With --take-over: continue without the missing entries; needs root keys."),
    ] = False,
) -> None:
    """Restore a backup into a new folder. Rejected if something newer was published after the backup.

    With --take-over, the copy of `backup --follow` becomes the round. Missing published entries are listed,
    and --after-gap prepares the root document with which nodes and witnesses accept the gap.
    """
    from coordinator.service.backup import restoring
    from coordinator.service.backup.archive import BackupInvalid

    if after_gap and not take_over:
        raise ConfigInvalid("--after-gap needs --take-over.", hint="Add --take-over.")
    sealed = restoring.describe(source).keys == "sealed"
    if passphrase_file is not None and not sealed:
        raise BackupInvalid(
            f"{source} contains no encrypted keys, so a passphrase cannot verify it.",
            hint="If you made it with --no-keys, omit --passphrase-file; otherwise use another backup.",
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
            take_over=restoring.TakeOver(after_gap, tuple(root_keys)) if take_over else None,
        )
    _report(made, folder)


def _report(made: "Restored", folder: Path) -> None:
    """Print the state of a restored round, and the next steps."""
    when = datetime.fromtimestamp(made.contents.made_ms / 1000, UTC)
    typer.echo(
        f"{folder}: the round as of {when:%Y-%m-%d %H:%M:%S} UTC, version {made.version}, "
        f"{counted(made.ledger_size, 'entry', 'entries')} of the ledger"
    )
    if made.contents.keys != "sealed" and made.contents.folder == "saved":
        typer.echo(f"Copy the round's keys to {folder / 'keys'}: the backup has none.")
    if made.gap_root:
        typer.echo(f"{made.missing}\nRoot {made.gap_root} announces publicly that the log continues without them.")
    if made.signatures_missing:
        typer.echo(
            f"{made.signatures_missing} signatures of root keys are missing. Holders must run `swarm-coordinator "
            f"keys sign` on a copy of {folder / 'pending.root.json'}. Put it back, then run:\n"
            f"swarm-coordinator keys install {settings_of(folder)}"
        )
    typer.echo(
        f"The settings file is {folder / 'operator.toml'}; use it instead of the old one, also for other commands. "
        f"Continue the round with:\nswarm-coordinator launch {settings_of(folder)}"
    )


def settings_of(folder: Path) -> str:
    """Return a restored round's settings file, with `--set` for old settings that are not in it, for a command line."""
    ran = fixed.load_resolved(folder)
    file = folder / "operator.toml"
    return " ".join([shlex.quote(str(file)), *(f"--set {shlex.quote(setting)}" for setting in on_top(file, ran))])


def _passphrase(file: Path | None, *, twice: bool) -> str:
    if file is not None:
        passphrase = file.read_text().strip("\r\n")
    elif sys.stdin.isatty():
        passphrase = str(typer.prompt("Passphrase of the keys", hide_input=True, confirmation_prompt=twice))
    elif twice:
        raise ConfigInvalid("The keys need a passphrase.", hint="Use --passphrase-file, or --no-keys to omit the keys.")
    else:
        raise ConfigInvalid("The keys of this backup are sealed.", hint="Give the passphrase with --passphrase-file.")
    if twice and len(passphrase) < PASSPHRASE_MIN_CHARS:
        raise ConfigInvalid(f"A passphrase needs at least {PASSPHRASE_MIN_CHARS} characters.")
    return passphrase


@contextmanager
def _progress() -> Iterator[Callable[[str, int, int], None]]:
    """Yield a progress callback that draws a bar on a terminal, and nothing elsewhere."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    columns = (TextColumn("{task.description:24}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("")

        def show(what: str, done: int, total: int) -> None:
            bar.update(task, description=what, completed=done, total=total)

        yield show
