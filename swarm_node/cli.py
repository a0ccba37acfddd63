"""The commands of `swarm-node`."""

import errno
import json
import os
import sys
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from protocol.errors import ConfigInvalid, DiskFull, SwarmError, named
from protocol.start import quick_imports
from protocol.text.commands import lesson, unusable_file, with_option_groups
from protocol.text.log_lines import VARIABLE
from swarm_node.base import disk, logs
from swarm_node.commands import agent, appeal, audit_learner, doctor, join, keys, ledger, rounds
from swarm_node.commands.options import DEFAULT_HOME, EngineChoice, Home, JoinText, NodeCommands

app = typer.Typer(
    cls=NodeCommands,
    help="Run a node in a training round: download signed model versions, generate samples, earn credit. "
    "Without a command: print the next step. To run a node at boot, run the installer with --service JOIN_STRING; to "
    "update, run the installer again; to remove it, with --uninstall.",
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # boxes leave the explanations a third of a narrow terminal
)

app.command(
    epilog=lesson(
        "swarm-node rounds --directory 'https://rounds.example.org/rounds.json#12D3Koo…'",
        "`join --best earnings` or `--best cause` chooses among them.",
        rounds.EXIT_CODES,
    )
)(rounds.rounds)
app.command(
    epilog=lesson(
        "swarm-node join swarm.example.org --hours 22:00-07:00",
        "run `status` in another terminal to see progress, or `doctor` if something fails. To join at boot, run the "
        "installer with --service JOIN_STRING; to update, run the installer again.",
        join.EXIT_CODES,
    )
)(join.join)
app.command(
    epilog=lesson(
        "swarm-node mirror --upload-gb 500",
        "the leaderboard shows how much the mirror uploaded.",
        join.EXIT_CODES,
    )
)(join.mirror)
app.command(
    epilog=lesson(
        "swarm-node doctor --bundle report.zip",
        "follow the steps shown for failed checks; then run `join`.",
        doctor.EXIT_CODES,
    )
)(doctor.doctor)
agent.add_to(app)
app.command(
    epilog=lesson(
        "swarm-node move --best earnings",
        "`status` shows the groups that are still sampled, and then the other round.",
        agent.EXIT_CODES,
    )
)(rounds.move)
app.add_typer(ledger.app, name="ledger")
app.command(
    epilog=lesson(
        "swarm-node audit-learner --random 1",
        "`ledger verify` checks the chain of all updates without a replay.",
        audit_learner.EXIT_CODES,
    )
)(audit_learner.audit_learner)
app.add_typer(rounds.app, name="directory")
app.add_typer(keys.app, name="keys")
app.command(
    epilog=lesson(
        "swarm-node earnings",
        "`keys address` sets the payout address; `why` explains single leases.",
        keys.EXIT_CODES,
    )
)(keys.earnings)
app.command(
    epilog=lesson(
        "swarm-node appeal LEASE --reason 'this card passes my own replay'",
        "run it again later to see the operator's ruling.",
        appeal.EXIT_CODES,
    )
)(appeal.appeal)


def say_version(wanted: bool) -> None:
    if wanted:
        from importlib import metadata

        typer.echo(f"echo-swarm {metadata.version('echo-swarm')}")
        raise typer.Exit


Version = Annotated[
    bool, typer.Option("--version", is_eager=True, callback=say_version, help="Print the version and exit.")
]


@app.callback(invoke_without_command=True)
def program(
    context: typer.Context,
    version: Version = False,
    log_json: Annotated[bool, typer.Option("--log-json", help="Write log lines as JSON objects.")] = False,
) -> None:
    """Options of all commands."""
    if log_json:
        os.environ[VARIABLE] = "json"  # the engine inherits it
    if context.invoked_subcommand is None:
        from swarm_node.commands.next_step import find_next_step

        step = find_next_step(DEFAULT_HOME, os.environ.get("SWARM_VLLM_PYTHON", ""))
        typer.echo("\n".join(step.lines()))


@app.command(
    epilog=lesson(
        "swarm-node bench --groups 16",
        "run `join` with the fastest --engine and --groups.",
        "Exit codes: 0 done, 1 failed, 2 wrong usage.",
    )
)
@with_option_groups
def bench(
    policy: Annotated[
        str,
        typer.Argument(
            metavar="POLICY",
            help="A policy folder, or the join string of a round that this home has joined; by default the last one.",
        ),
    ] = "",
    *,
    home: Annotated[Path, typer.Option(help="The node's folder; used with a join string.")] = DEFAULT_HOME,
    task: Annotated[str, typer.Option(help="Task whose prompts are used; with a folder.")] = "arithmetic",
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Maximum tokens per completion; with a folder.")] = 128,
    samples: Annotated[int, typer.Option(min=1, max=64, help="Completions per prompt.")] = 16,
    groups: Annotated[int, typer.Option(min=1, max=64, help="Number of prompt groups sampled at once.")] = 8,
    batches: Annotated[int, typer.Option(min=1, help="Number of measured batches, after one warm-up batch.")] = 4,
    sampling: EngineChoice,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON, without a progress bar.")] = False,
) -> None:
    """Measure the sampling speed of this machine in tokens per second, for prompts and decoding separately."""
    from collections.abc import Mapping

    import trio
    from rich.console import Console
    from rich.progress import Progress

    from protocol.policy.manifest import Sampler
    from swarm_node.base.clock import now_ms
    from swarm_node.commands import bench as benching
    from swarm_node.coordinator_api import last_round
    from swarm_node.coordinator_api.join_string import round_folder
    from swarm_node.doctor.forecast import record_speed
    from swarm_node.engine.choose import Choice, for_policy

    logs.to_stderr(quiet=True)
    join = last_round.chosen(policy, home) if not policy or "://" in policy else None
    subject = (
        benching.newest_held_version(home, join)
        if join
        else benching.Subject(Path(policy), task, Sampler(temperature=1.0, max_new_tokens=max_new_tokens))
    )

    def choose(unfit: Mapping[str, str]) -> Choice:
        choice = for_policy(sampling.engine.value, sampling.within(), unfit)
        typer.echo(choice.why, err=True)
        return choice

    console = Console(stderr=True)
    with Progress(console=console, disable=as_json or not console.is_terminal, transient=True) as bar:
        shown = bar.add_task("sampling", total=groups * (batches + 1))
        measuring = partial(benching.run, groups=groups, samples=samples, batches=batches)
        result = trio.run(partial(measuring, subject, choose, on_group=lambda: bar.advance(shown)))
    if join:  # for the estimate of `join --dry-run` and `doctor`
        record_speed(round_folder(home, join), result.tokens_per_s, now_ms())
    if as_json:
        typer.echo(json.dumps(result._asdict()))
    else:
        typer.echo(benching.speed_text(result))


@app.command(
    epilog=lesson(
        "swarm-node why LEASE --replay",
        "run `appeal` if you disagree with the evidence.",
        "Exit codes: 0 done, 1 failed or contradicted, 2 wrong usage; with --replay 0 pass, 3 soft fail, 4 hard fail.",
    )
)
def why(
    join_string: JoinText = "",
    lease: Annotated[
        str, typer.Argument(metavar="LEASE", help="A lease or claim of this node; without it, the last 20 leases.")
    ] = "",
    home: Home = DEFAULT_HOME,
    replay: Annotated[
        bool, typer.Option("--replay", help="Repeat the audit of this lease on this machine; needs torch.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print everything as JSON.")] = False,
) -> None:
    """Show the result of this node's leases with the evidence, and check the evidence on this machine.

    Without LEASE it shows the last 20 of each round that the node joined last. With LEASE it shows the rule that was
    broken, what was expected and observed, the tolerances and the command that repeats the check, and compares verdict
    and settlement with the public log. --replay needs one of the last two versions.
    """
    from swarm_node.base.clock import now_ms
    from swarm_node.commands import why as asking
    from swarm_node.coordinator_api import last_round
    from swarm_node.keys import identity

    join_string, lease = last_round.with_round(join_string, lease)
    if replay and not lease:
        raise ConfigInvalid("--replay needs a lease.", hint="Run `swarm-node why` to list the last leases.")
    joins = last_round.all_chosen(join_string, home)
    key = identity.find_identity(home).key
    if not lease and len(joins) > 1:
        raise typer.Exit(asking.report_rounds(joins, home, key, typer.echo, as_json=as_json))
    join, lease = asking.round_of_lease(joins, home, lease) if lease else (joins[0], "")
    refused, warn = asking.refused(join, home, lease), partial(typer.echo, err=True)
    place, lie, code = asking.NOT_ASKED, None, 0
    answer = asking.answer_to(join, key, lease, warn if refused and not replay else None)
    if lease and answer.explanations:
        place, lie = asking.compare(join, home, key, answer.explanations[0], warn)
    figures = {} if as_json or lease else asking.recent_figures(home, now_ms())
    holds = partial(asking.holds_version, join, home)
    for line in asking.report(answer, refused, place, about=lease, as_json=as_json, holds=holds, figures=figures):
        typer.echo(line)
    try:
        if replay:
            code = asking.replay(join, home, key.node_id, answer, typer.echo)
    except SwarmError as error:
        if lie is None:
            raise
        warn(f"not replayed: {named(error)}")
    if lie is not None:
        raise lie
    raise typer.Exit(code)


@app.command(
    epilog=lesson(
        "swarm-node seed --blobs runs/demo/blobs --key seeder.key --listen 0.0.0.0:8701",
        "none: a coordinator starts its own seeder and announces it to all nodes.",
        "Exit codes: 0 done, 1 failed, 2 wrong usage.",
    )
)
def seed(
    blobs: Annotated[Path, typer.Option(help="Folder with chunks of a coordinator or a node.")],
    key: Annotated[Path, typer.Option(help="File of the seeder's key; created if missing.")],
    listen: Annotated[str, typer.Option(help="Listen address (host:port); port 0: any free port.")] = "127.0.0.1:0",
) -> None:
    """Serve a folder of chunks over libp2p until standard input ends. The first output line is the address as JSON."""
    with quick_imports():
        import trio

        from protocol.people.addresses import host_and_port
        from swarm_node.keys import identity
        from swarm_node.seed import seed as serve

    logs.to_stderr(quiet=True)
    host, port = host_and_port(listen)
    trio.run(serve, blobs, identity.load_or_create(key).seed, host, port)


@app.command("engine", hidden=True, context_settings={"ignore_unknown_options": True, "allow_extra_args": True})
def run_engine(context: typer.Context) -> None:
    """The sampling engine's process, started by the agent."""
    with quick_imports():
        from swarm_node.engine.child import main as run_child

    logs.to_stderr(quiet=True)
    run_child(context.args)


def main() -> None:
    """Run a command; a named error becomes one line and an exit code."""
    try:
        if "--help" not in sys.argv:
            disk.require()
        app()
    except SwarmError as error:
        typer.echo(f"swarm-node: {named(error)}", err=True)
        sys.exit(2 if isinstance(error, ConfigInvalid) else 1)
    except OSError as error:
        if unusable := unusable_file(error, sys.argv[1:], str(Path.cwd())):
            typer.echo(f"swarm-node: {unusable}", err=True)
            sys.exit(1)
        if error.errno != errno.ENOSPC:
            raise
        full = DiskFull(
            "No space left on the disk for the output of this command.",
            hint="Free some space, or write to another disk.",
        )
        typer.echo(f"swarm-node: {named(full)}", err=True)
        sys.exit(1)
    except BaseExceptionGroup as group:
        errors, rest = group.split(SwarmError)
        if rest is not None or errors is None:
            raise
        for leaf in _leaves(errors):
            typer.echo(f"swarm-node: {named(leaf)}", err=True)
        sys.exit(1)


def _leaves(group: BaseExceptionGroup[BaseException]) -> list[BaseException]:
    errors: list[BaseException] = []
    for error in group.exceptions:
        errors += _leaves(error) if isinstance(error, BaseExceptionGroup) else [error]
    return errors
