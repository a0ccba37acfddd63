"""The commands of `swarm-coordinator`."""

import asyncio
import json
import logging
import os
import socket
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from coordinator import cli_audit, cli_keys, cli_payout, cli_planning
from coordinator.config import Config, load
from protocol.errors import ConfigInvalid, SwarmError, Unreachable, named

app = typer.Typer(
    help="Run a training round: learner, signed publication, leases, credits and the leaderboard, on one machine.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.add_typer(cli_keys.app, name="keys")
app.add_typer(cli_audit.app, name="audit")
app.add_typer(cli_payout.app, name="payout")
app.command()(cli_audit.calibrate)

ConfigFile = Annotated[Path, typer.Argument(help="The round's TOML file.")]
Settings = Annotated[
    list[str], typer.Option("--set", default_factory=list, help="section.key=value on top of the file; repeatable.")
]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Log only what goes wrong.")]
EXIT_CODES = "Exit codes: 0 done, 1 failed, 2 a setting is wrong."


@app.command(epilog=EXIT_CODES)
def init(config_file: ConfigFile, settings: Settings) -> None:
    """Make a round's keys, store and deposit, and print the join string for its nodes.

    Take keys/root.pem of the round's folder offline afterwards: it is needed only to change the other keys.
    """
    from coordinator.round import Round, join_string

    config = load(config_file, settings)
    round_ = Round(config)
    round_.close()
    typer.echo(join_string(config, round_.round_id))


@app.command(epilog=EXIT_CODES)
def launch(
    config_file: ConfigFile,
    settings: Settings,
    learner: Annotated[bool, typer.Option(help="Start the learner here, too.")] = True,
    auditor: Annotated[bool, typer.Option(help="Start an auditor here, too.")] = True,
    quiet: Quiet = False,
) -> None:
    """Run a round until Ctrl-C; launching again continues where it stopped.

    The first launch makes keys and store, as `init` does. Then it prints the join string for nodes and the address
    of the leaderboard.
    """
    from coordinator import app as coordinator

    _log_to_stderr(quiet)
    config = load(config_file, settings)
    asyncio.run(coordinator.run(config, with_learner=learner, with_auditor=auditor, announce=typer.echo))


@app.command(epilog=EXIT_CODES)
def api(
    folder: Annotated[Path, typer.Argument(help="The folder of a launched round on PostgreSQL.")],
    listen: Annotated[str, typer.Option(help="Address of this process's HTTP API.")] = "127.0.0.1:8702",
    quiet: Quiet = False,
) -> None:
    """Serve nodes of a launched round from one process more, until Ctrl-C.

    All its processes share the round's folder and its PostgreSQL (`store.url`). Whatever proxy stands before them sends
    /v1/plan and /v1/learner to the launched one, and anything else to any.
    """
    from coordinator import app as coordinator

    _log_to_stderr(quiet)
    asyncio.run(coordinator.serve(folder.absolute(), listen=listen, announce=typer.echo))


@app.command(epilog=EXIT_CODES)
def status(
    config_file: ConfigFile,
    settings: Settings,
    as_json: Annotated[bool, typer.Option("--json", help="Print everything, for scripts.")] = False,
) -> None:
    """Ask the running coordinator where its round stands."""
    import httpx

    config = load(config_file, settings)
    try:
        found = httpx.get(f"http://{config.round.listen}/v1/status", timeout=10).json()
    except (httpx.HTTPError, json.JSONDecodeError) as error:
        raise Unreachable(
            f"No coordinator answers at {config.round.listen} ({error}).", hint="Launch it first."
        ) from error
    if as_json:
        typer.echo(json.dumps(found, indent=2))
        return
    typer.echo(
        f"{found['phase']}: update {found['update']} of {found['max_updates']}, version {found['version']} "
        f"on {found['nodes_up_to_date']} of {found['nodes_alive']} nodes, "
        f"learner idle {found['learner_idle_share']:.0%}, rejected {sum(found['rejected'].values())}"
    )
    if last := found["broadcast"]:
        typer.echo(
            f"version {last['version']}, from publication to the first token: median {last['median_s']:.2f} s, "
            f"p90 {last['p90_s']:.2f} s, max {last['max_s']:.2f} s, on {last['reached']} of {last['nodes']} nodes"
        )
    age = found["age"]
    typer.echo(
        f"trained on groups {age['mean']:.1f} updates old (p99 {age['p99']}, max {age['max']}), "
        f"in vain {found['in_vain_share']:.1%}, a version every {found['publish_every']} updates"
    )
    for one in found["unfinished_by"]:
        typer.echo(
            f"{one['name']} skipped {one['skipped_share']:.0%} of its leases, let {one['expired_share']:.0%} expire"
        )
    audit = found["audit"]
    verdicts = ", ".join(f"{count} {finding}" for finding, count in audit["verdicts"].items()) or "no verdicts"
    typer.echo(
        f"audited {audit['share']:.1%} of the claims: {verdicts}; {audit['waiting']} wait for an auditor, "
        f"{audit['unsettled']} for their settlement"
    )
    if found["alarm"]:
        typer.echo(f"ALARM {found['alarm']}")
    for one in found["fleet"]:
        part = "works" if one["works"] else "stands by"
        typer.echo(f"{one['name']} {part}, {one['groups_per_s']:.3g} groups/s: {one['reason']}")


@app.command(epilog=EXIT_CODES)
def fsck(
    config_file: ConfigFile,
    settings: Settings,
    as_json: Annotated[bool, typer.Option("--json", help="Print every difference, for scripts.")] = False,
) -> None:
    """Rebuild balances, claims and the ledger's tree from its entries, and compare; repairs nothing.

    The coordinator must be stopped.
    """
    from coordinator.round import only_coordinator
    from coordinator.state import Database
    from ledger import store

    config = load(config_file, settings)
    folder = config.round.directory
    if not (folder / "resolved.json").exists():
        raise ConfigInvalid(f"There is no round in {folder}.", hint="Make one with `swarm-coordinator init`.")
    with only_coordinator(folder):
        database = Database(config.state)
        entries, found = database.run_now(store.size), database.run_now(store.rebuild)
        database.close()
    if as_json:
        typer.echo(json.dumps({"entries": entries, "differences": [asdict(difference) for difference in found]}))
    else:
        for difference in found:
            typer.echo(f"{difference.where}: {difference.expected} by the entries, {difference.found} in the store")
        typer.echo(f"{entries} entries, {len(found)} differences")
    raise typer.Exit(1 if found else 0)


@app.command(epilog=EXIT_CODES)
def export(
    config_file: ConfigFile,
    folder: Annotated[Path, typer.Argument(help="The folder to make.")],
    settings: Settings,
    version: Annotated[int, typer.Option(min=0, help="A published version; 0: the learner's last checkpoint.")] = 0,
) -> None:
    """Write the policy as a folder in hub format, which transformers and others load as it is."""
    from coordinator.learner.export import export as write

    update = write(load(config_file, settings), folder, version=version)
    typer.echo(f"{folder}: the policy after {update} updates")


@app.command()
def demo(
    config_file: ConfigFile,
    settings: Settings,
    seed: Annotated[int, typer.Option(help="Decides model, prompts and their order.")] = 0,
    nodes: Annotated[int, typer.Option(min=1, max=16, help="How many nodes to start.")] = 3,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the summary to this file, too.")] = None,
    stay: Annotated[bool, typer.Option("--stay", help="Keep everything up at the end, until Ctrl-C.")] = False,
    directory: Annotated[Path | None, typer.Option(help="Keep the round's files here.")] = None,
) -> None:
    """Train the embedded model on a whole swarm of real processes on this machine, then print what happened."""
    from coordinator import demo as demonstration

    options = demonstration.Options(
        config_file=config_file,
        seed=seed,
        nodes=nodes,
        settings=tuple(settings),
        json_file=json_file,
        stay=stay,
        directory=directory,
    )
    raise typer.Exit(asyncio.run(demonstration.run(options)))


app.command(epilog=EXIT_CODES)(cli_planning.plan)
app.command(epilog=EXIT_CODES)(cli_planning.simulate)


@app.command(epilog=EXIT_CODES)
def auditor(
    source: Annotated[Path, typer.Argument(help="The round's TOML file, or its folder.")],
    settings: Settings,
    child: Annotated[bool, typer.Option("--child", hidden=True, help="Leave when standard input ends.")] = False,
) -> None:
    """Replay what is drawn for an audit, until the round is settled; `launch` starts one, and more may help.

    Needs torch, and the round's folder: start it on the coordinator's machine or where that folder is mounted.
    """
    from coordinator.audit.auditor import run
    from coordinator.children import leave_with_parent

    _log_to_stderr(quiet=False)
    if child:
        leave_with_parent()
    if source.is_dir():
        config = Config.model_validate_json((source / "resolved.json").read_text())
    else:
        config = load(source, settings)
    run(config, "launched" if child else f"{socket.gethostname()[:40]}-{os.getpid()}")


@app.command(hidden=True)
def learner(folder: Annotated[Path, typer.Argument(help="The round's folder.")]) -> None:
    """The learner's process, started by `launch`."""
    from coordinator.learner.loop import run

    _log_to_stderr(quiet=False)
    run(Config.model_validate_json((folder / "resolved.json").read_text()))


def main() -> None:
    """Run a command; a named error becomes one line and an exit code."""
    try:
        app()
    except KeyboardInterrupt:  # before the program could take the signal itself
        sys.exit(130)
    except SwarmError as error:
        typer.echo(f"swarm-coordinator: {named(error)}", err=True)
        sys.exit(2 if isinstance(error, ConfigInvalid) else 1)


def _log_to_stderr(quiet: bool) -> None:
    logging.basicConfig(
        level=logging.WARNING if quiet else logging.INFO,
        format="%(asctime)s %(levelname)s %(message)s",
        datefmt="%H:%M:%S",
        stream=sys.stderr,
    )
    for noisy in ("httpx", "httpcore", "asyncio"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
