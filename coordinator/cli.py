"""The commands of `swarm-coordinator`."""

import errno
import json
import os
import shlex
import socket
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from coordinator.commands.options import EXIT_CODES, CommandEntry, ConfigFile, SectionedGroup, Settings
from protocol.errors import ConfigInvalid, DiskFull, SwarmError, named
from protocol.start import quick_imports
from protocol.text.commands import lesson, unusable_file
from protocol.text.log_lines import VARIABLE
from protocol.text.plain import counted

if TYPE_CHECKING:
    from coordinator.config import Config

LAZY: dict[str, CommandEntry] = {
    "init": CommandEntry(
        "init:init",
        lesson(
            "swarm-coordinator init round.toml",
            "`plan` shows what the round needs and costs; `launch` starts it.",
            EXIT_CODES,
        ),
    ),
    "status": CommandEntry(
        "status:status",
        lesson(
            "swarm-coordinator status round.toml",
            "change the setting named in its first line; `nodes list` and `samples show` give details.",
            EXIT_CODES,
        ),
    ),
    "finish": CommandEntry(
        "finish:finish",
        lesson(
            "swarm-coordinator finish round.toml", "`status` shows what waits for an audit; then `payout`.", EXIT_CODES
        ),
    ),
    "export": CommandEntry(
        "export:export",
        lesson(
            "swarm-coordinator export round.toml policy --best",
            'transformers loads the folder: AutoModelForCausalLM.from_pretrained("policy").',
            EXIT_CODES,
        ),
    ),
    "retract": CommandEntry(
        "retract:retract",
        lesson(
            "swarm-coordinator retract round.toml calm-heron-417 --dry-run",
            "the same with --reason 'TEXT' instead of --dry-run; `status` then shows the new version spread.",
            EXIT_CODES,
        ),
    ),
    "upgrade": CommandEntry(
        "upgrade:upgrade",
        lesson(
            "swarm-coordinator upgrade round.toml --dry-run", "the same without --dry-run, then `launch`.", EXIT_CODES
        ),
    ),
    "backup": CommandEntry(
        "backup:backup",
        lesson(
            "swarm-coordinator backup round.toml /media/disk/round.tar",
            "test the backup: `restore` it into an empty folder.",
            EXIT_CODES,
        ),
    ),
    "restore": CommandEntry(
        "backup:restore",
        lesson(
            "swarm-coordinator restore /media/disk/round.tar runs/again --nothing-newer",
            "run the printed `launch` command.",
            EXIT_CODES,
        ),
    ),
    "plan": CommandEntry(
        "planning:plan",
        lesson(
            "swarm-coordinator plan round.toml --train-s 60 --group-s 55 --broadcast-s 20",
            "`simulate` simulates the round with the same figures; `plan --live` later uses measurements.",
            EXIT_CODES,
        ),
    ),
    "simulate": CommandEntry(
        "planning:simulate",
        lesson(
            "swarm-coordinator simulate round.toml --nodes 20 --train-s 60 --group-s 55",
            "try another setting with --set; then `launch`.",
            EXIT_CODES,
        ),
    ),
    "calibrate": CommandEntry(
        "audit:calibrate",
        lesson(
            "swarm-coordinator calibrate round.toml --node NODE_ID --class vllm/bf16/cuda",
            "auditors use it at once, also for held claims; `status` names classes without calibration.",
            EXIT_CODES,
        ),
    ),
    "config": CommandEntry("config:app"),
    "task": CommandEntry("task:app"),
    "nodes": CommandEntry("nodes:app"),
    "audit": CommandEntry("audit:app"),
    "appeals": CommandEntry("appeals:app"),
    "payout": CommandEntry("payout:app"),
    "gifts": CommandEntry("gifts:app"),
    "api-keys": CommandEntry("api_keys:app"),
    "eval": CommandEntry("evaluate:app"),
    "samples": CommandEntry("samples:app"),
    "policy": CommandEntry("policy:app"),
    "keys": CommandEntry("keys:app"),
}
"""Commands whose modules are imported when they run, and not for another command or the list of commands."""

SECTIONS = {
    "Prepare a round": {
        "init": "Create a round: keys, database and deposit.",
        "config": "Check and explain a round's settings.",
        "task": "List tasks, check one, and add to a judge's budget.",
        "plan": "Compute the nodes and the cost that a round needs, before it runs.",
        "simulate": "Simulate a round under a virtual clock.",
        "demo": "Run a complete swarm of real processes on this machine.",
    },
    "Run it": {
        "launch": "Run a round until Ctrl-C; a later launch continues where it stopped.",
        "status": "Show the state of the round, and why the learner waits.",
        "finish": "End a round without a learner of its own.",
        "learner": "Train the round's policy, on another machine.",
        "auditor": "Replay the claims drawn for an audit, beside that of `launch`.",
        "api": "Start one more API process, with the store on PostgreSQL.",
    },
    "Nodes, audits and money": {
        "nodes": "List and show nodes, pause them, ban their owners.",
        "audit": "Show and replay audits, and export the evidence.",
        "calibrate": "Measure the tolerances of a compute class with an honest node.",
        "appeals": "Show appeals of nodes, and rule on them.",
        "payout": "Pay owners what the ledger owes them.",
        "gifts": "Record money that others give to the budget.",
        "api-keys": "Let others query the swarm over HTTP.",
    },
    "Model and results": {
        "policy": "List, verify and replace published versions.",
        "retract": "Train again without the groups of banned owners.",
        "eval": "Measure versions on held-out problems.",
        "samples": "Read the samples of the nodes.",
        "export": "Export the policy as a folder in hub format, or as GGUF.",
    },
    "Keep it safe": {
        "keys": "Show and replace the keys that sign the trust metadata.",
        "backup": "Save the complete state of a round and verify the backup.",
        "restore": "Restore a backup into a new folder.",
        "upgrade": "Upgrade the database of a stopped round.",
        "fsck": "Check the ledger's entries, tree and balances. Repairs nothing.",
    },
}
"""The commands by the task that they are for, as `--help` lists them."""


class CoordinatorCommands(SectionedGroup):
    """The commands of this program."""

    sections, lazy = SECTIONS, LAZY


app = typer.Typer(
    cls=CoordinatorCommands,
    help="Run a training round: learner, signed publication, leases, credits and the leaderboard, on one machine.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # boxes would leave a third of a narrow terminal for the text
)


def say_version(wanted: bool) -> None:
    if wanted:
        from importlib import metadata

        typer.echo(f"echo-swarm {metadata.version('echo-swarm')}")
        raise typer.Exit


Source = Annotated[Path, typer.Argument(metavar="ROUND", help="The round's TOML file, or its folder.")]
Coordinator = Annotated[str, typer.Option(help="URL of the coordinator; default: http:// and round.listen.")]
Token = Annotated[
    Path | None, typer.Option(help="File with the operator's token; default: operator.token in the round's folder.")
]
Version = Annotated[
    bool, typer.Option("--version", is_eager=True, callback=say_version, help="Print the version and exit.")
]


@app.callback()
def program(
    version: Version = False,
    log_json: Annotated[bool, typer.Option("--log-json", help="Log as JSON, one object per line.")] = False,
) -> None:
    """Options of all commands."""
    if log_json:
        os.environ[VARIABLE] = "json"  # learner and auditor inherit it


Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Log only warnings and errors.")]


@app.command(
    epilog=lesson(
        "swarm-coordinator launch round.toml",
        "send the printed join command to participants; `status` shows whether the learner waits, and why.",
        EXIT_CODES,
    )
)
def launch(
    config_file: ConfigFile,
    settings: Settings,
    learner: Annotated[bool, typer.Option(help="Also start the learner on this machine.")] = True,
    auditor: Annotated[bool, typer.Option(help="Also start an auditor on this machine.")] = True,
    quiet: Quiet = False,
    plain: Annotated[bool, typer.Option("--plain", help="Print only log lines, also on a terminal.")] = False,
    preflight: Annotated[
        bool,
        typer.Option(
            help="Reject a new round if its learner does not fit on this machine, and any round if torch cannot use "
            "the GPU of its learner or auditor."
        ),
    ] = True,
) -> None:
    """Run a round until Ctrl-C; a later launch continues where it stopped.

    The first launch makes keys and store, as `init` does. `launch` prints the join string for nodes and the URL
    of the leaderboard. On a terminal, a live status is shown below the log; a large one also shows the join string's
    QR code, unless the address is of this machine alone.
    """
    import asyncio

    with quick_imports():
        from coordinator import app as coordinator
        from coordinator.base import logs
        from coordinator.base.files import private_from_now_on
        from coordinator.commands.checks import require_code, require_free_ports
        from coordinator.config import fixed, load, manual
        from coordinator.learner import start
        from coordinator.learner.boards import require_installed
        from coordinator.learner.preflight import require_cards, require_fits
        from coordinator.pages.qr import qr_terminal
        from coordinator.reports import screen

    logs.to_stderr(quiet)
    private_from_now_on()
    config = load(config_file, settings)
    for line in [*manual.warnings(config), *start.warnings(config.model)]:
        typer.echo(f"warning: {line}", err=True)
    if learner:
        require_installed(config)
    require_code(config)
    require_free_ports(config)
    if preflight:
        require_cards(config, learner=learner, auditor=auditor)
    if learner and not fixed.was_launched(config.round.directory):
        start.require_trained(config)
        if preflight and not config.learner.external:
            require_fits(config, auditor=auditor)
        start.require_here(config.model)
    show = None if plain or quiet or logs.are_objects() else screen.for_launch()
    round_ = coordinator.run(
        config,
        with_learner=learner,
        with_auditor=auditor,
        announce=typer.echo,
        show=show,
        code_of=screen.code_drawer(qr_terminal) if show else None,
    )
    asyncio.run(round_)


@app.command(
    epilog=lesson(
        "swarm-coordinator api round.toml --listen 127.0.0.1:8702",
        "add its address to the proxy in front of the coordinator.",
        EXIT_CODES,
    )
)
def api(
    source: Source,
    settings: Settings,
    listen: Annotated[str, typer.Option(help="Address of this process's HTTP API.")] = "127.0.0.1:8702",
    quiet: Quiet = False,
) -> None:
    """Start one more API process for a launched round on PostgreSQL, until Ctrl-C.

    All API processes share the round's folder and its PostgreSQL database (`store.url`). The proxy in front must send
    /v1/plan and /v1/learner to the process of `launch`; every other path may go to any process.
    """
    import asyncio

    from coordinator import app as coordinator
    from coordinator.base import logs
    from coordinator.base.files import private_from_now_on
    from coordinator.config import load

    logs.to_stderr(quiet)
    private_from_now_on()
    folder = source.absolute() if source.is_dir() else load(source, settings).round.directory
    asyncio.run(coordinator.serve(folder, address=listen, announce=typer.echo))


@app.command(
    epilog=lesson(
        "swarm-coordinator fsck round.toml",
        "if anything differs, `restore` the last backup into a new folder.",
        EXIT_CODES,
    )
)
def fsck(
    config_file: ConfigFile,
    settings: Settings,
    as_json: Annotated[bool, typer.Option("--json", help="Print every difference as JSON.")] = False,
) -> None:
    """Check balances, claims, the ledger's tree and its signed roots against the ledger's entries. Repairs nothing.

    The coordinator must be stopped.
    """
    from coordinator.config import fixed, load
    from coordinator.service import opening
    from coordinator.store.state import Database
    from ledger import store

    config = load(config_file, settings)
    folder = config.round.directory
    fixed.require_round(folder)
    with opening.only_coordinator(folder):
        database = Database(config.state)
        entries, differences = database.run_now(store.size), database.run_now(store.rebuild)
        differences += database.run_now(opening.root_differences, opening.open_metadata(config, folder, leads=False))
        database.close()
    if as_json:
        typer.echo(json.dumps({"entries": entries, "differences": [asdict(difference) for difference in differences]}))
    else:
        for difference in differences:
            typer.echo(f"{difference.where}: {difference.expected} by the entries, {difference.found} in the store")
        typer.echo(f"{counted(entries, 'entry', 'entries')}, {counted(len(differences), 'difference')}")
    raise typer.Exit(1 if differences else 0)


@app.command(
    epilog=lesson(
        "swarm-coordinator demo examples/demo.toml --seed 1 --stay",
        "`launch` and `swarm-node join` start the same processes one by one.",
        EXIT_CODES,
    )
)
def demo(
    config_file: ConfigFile,
    settings: Settings,
    seed: Annotated[int, typer.Option(help="Random seed for the model, the prompts and their order.")] = 0,
    nodes: Annotated[int, typer.Option(min=1, max=16, help="Number of nodes to start.")] = 3,
    node: Annotated[
        list[str] | None,
        typer.Option("--node", metavar="OPTIONS", help="Start one node with these `join` options; repeatable."),
    ] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="Also write the summary to this JSON file.")] = None,
    stay: Annotated[bool, typer.Option("--stay", help="Keep all processes running at the end, until Ctrl-C.")] = False,
    directory: Annotated[
        Path | None, typer.Option(help="Folder for the round's files; default: a temporary one.")
    ] = None,
) -> None:
    """Run a complete swarm of real processes on this machine, then print a summary."""
    import asyncio

    from coordinator import demo as demonstration

    options = demonstration.DemoOptions(
        config_file=config_file,
        seed=seed,
        nodes=tuple(_words(options) for options in node or ()) or ((),) * nodes,
        settings=tuple(settings),
        json_file=json_file,
        stay=stay,
        directory=directory,
    )
    raise typer.Exit(asyncio.run(demonstration.run(options)))


def _words(options: str) -> tuple[str, ...]:
    """Split a node's options as a shell does."""
    try:
        return tuple(shlex.split(options))
    except ValueError as error:
        raise ConfigInvalid(f"--node {options!r}: {error}.", hint='Write --node "--engine llama".') from error


def _config_of(source: Path, settings: list[str]) -> "Config":
    """Return the configuration of a file with settings on top, or that of the round in a folder."""
    from coordinator.config import fixed, load

    if source.is_dir():
        return fixed.load_resolved(source)
    return load(source, settings)


@app.command(
    epilog=lesson(
        "swarm-coordinator auditor round.toml --coordinator http://10.0.0.2:8700",
        "`status` shows how many claims wait for an audit.",
        EXIT_CODES,
    )
)
def auditor(
    source: Source,
    settings: Settings,
    coordinator: Coordinator = "",
    token: Token = None,
    child: Annotated[bool, typer.Option("--child", hidden=True, help="Exit when standard input ends.")] = False,
) -> None:
    """Replay the claims drawn for an audit until the round is settled; `launch` starts one; you can add more.

    Needs torch and the round's folder: start it on the coordinator's machine, or on one where that folder is mounted,
    with --coordinator.
    """
    with quick_imports():
        from coordinator.audit.auditor import run
        from coordinator.base import logs
        from coordinator.base.children import leave_with_parent
        from coordinator.base.files import private_from_now_on
        from coordinator.learner.preflight import require_cards

    logs.to_stderr(quiet=False)
    private_from_now_on()
    if child:
        leave_with_parent()
    config = _config_of(source, settings)
    if not child:  # `launch` has checked it
        require_cards(config, learner=False, auditor=True)
    name = "launched" if child else f"{socket.gethostname()[:40]}-{os.getpid()}"
    url = coordinator or f"http://{config.round.listen}"
    run(config, name, url, token or config.round.directory / "operator.token")


@app.command(
    epilog=lesson(
        "swarm-coordinator learner round.toml --coordinator http://10.0.0.2:8700 --token operator.token",
        "`status` shows the current update.",
        EXIT_CODES,
    )
)
def learner(
    source: Source,
    settings: Settings,
    coordinator: Coordinator = "",
    token: Token = None,
    child: Annotated[bool, typer.Option("--child", hidden=True, help="Exit when standard input ends.")] = False,
) -> None:
    """Train the round's policy as a client of the coordinator; `launch` starts it, except with `--no-learner`.

    On another machine it needs a copy of the TOML file and of `operator.token`, and a round.directory
    for its checkpoints that all training machines share. torchrun can start it as several ranks.
    """
    from coordinator.base import logs
    from coordinator.base.children import leave_with_parent, script
    from coordinator.base.files import private_from_now_on
    from coordinator.learner import launch
    from coordinator.learner.preflight import require_cards

    logs.to_stderr(quiet=False)
    private_from_now_on()
    if child:
        leave_with_parent()
    config = _config_of(source, settings)
    if coordinator and config.learner.kept_one_in:
        raise ConfigInvalid(
            "learner.kept_one_in needs the learner on the coordinator's machine, whose folder has what is published.",
            hint="Set learner.kept_one_in = 0, or start the learner with the coordinator.",
        )
    if not (child or launch.is_rank()):  # `launch` has checked it, and a machine of several has a part of the cards
        require_cards(config, learner=True, auditor=False)
    if config.learner.processes > 1 and not launch.is_rank():
        words = [word for word in sys.argv[1:] if word != "--child"]
        command = [script("swarm-coordinator"), *words, "--child"]
        sys.exit(launch.launch(command, config.learner.processes, config.round.directory / "learner" / "ranks"))
    with quick_imports():
        from coordinator.learner import external, loop

    url, secret = coordinator or f"http://{config.round.listen}", token or config.round.directory / "operator.token"
    (external if config.learner.external else loop).run(config, url, secret)


def main() -> None:
    """Run a command; turn a named error into one line and an exit code."""
    try:
        app()
    except SwarmError as error:
        typer.echo(f"swarm-coordinator: {named(error)}", err=True)
        sys.exit(2 if isinstance(error, ConfigInvalid) else 1)
    except OSError as error:
        # The folder in a child's command line is the round's: a file that fails there is no typing error of a person.
        if "--child" not in sys.argv and (unusable := unusable_file(error, sys.argv[1:], str(Path.cwd()))):
            typer.echo(f"swarm-coordinator: {unusable}", err=True)
            sys.exit(1)
        if error.errno != errno.ENOSPC:
            raise
        full = DiskFull(
            "No space left on the disk for the output of this command.", hint="Free some space, or write elsewhere."
        )
        typer.echo(f"swarm-coordinator: {named(full)}", err=True)
        sys.exit(1)
