"""The commands of `swarm-node`."""

import json
import logging
import sys
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from protocol.errors import ConfigInvalid, MalformedMessage, SwarmError, named
from protocol.nicknames import nickname
from swarm_node import cli_keys, cli_ledger
from swarm_node.cli_ledger import DEFAULT_HOME

app = typer.Typer(
    help="Lend this machine to a training round: fetch signed policy versions, sample rollouts, be credited for them.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

app.add_typer(cli_ledger.app, name="ledger")
app.add_typer(cli_keys.app, name="keys")
app.command(epilog=cli_keys.EXIT_CODES)(cli_keys.earnings)


class Device(StrEnum):
    """Where the engine may run."""

    AUTO = "auto"
    CPU = "cpu"
    CUDA = "cuda"


class Dtype(StrEnum):
    """What an engine may compute in."""

    AUTO = "auto"
    FLOAT32 = "float32"
    FLOAT16 = "float16"
    BFLOAT16 = "bfloat16"
    Q8_0 = "q8_0"


class Engine(StrEnum):
    """What may sample."""

    AUTO = "auto"
    LLAMA = "llama"
    TORCH = "torch"
    VLLM = "vllm"


EngineOption = Annotated[Engine, typer.Option(help="What samples; auto: the best that is installed and fits.")]
ThreadsOption = Annotated[int, typer.Option(min=1, help="CPU threads of the engine.")]
DeviceOption = Annotated[Device, typer.Option(help="Where to sample.")]
DtypeOption = Annotated[Dtype, typer.Option(help="Precision of the weights; auto: float32 on a CPU and in llama.")]
GpuLayersOption = Annotated[int, typer.Option(min=-1, help="llama: layers on the GPU; -1: all, if it has one.")]
VllmPythonOption = Annotated[
    str, typer.Option(envvar="SWARM_VLLM_PYTHON", help="vllm: the Python of the environment that holds it.")
]


EXIT_CODES = "Exit codes: 0 the round is finished or Ctrl-C was pressed, 1 this node cannot go on, 2 wrong usage."


@app.command(epilog=EXIT_CODES)
def join(
    join_string: Annotated[str, typer.Argument(help="What the operator gave you: http://host:port#fingerprint.")],
    price: Annotated[
        int, typer.Option(help="Your price: millionths of a unit per million validated tokens.")
    ] = 1_000_000,
    name: Annotated[str, typer.Option(help="How the leaderboard calls this node; by default a nickname.")] = "",
    home: Annotated[Path, typer.Option(help="Folder of the key, the outbox and the policy files.")] = DEFAULT_HOME,
    listen: Annotated[str, typer.Option(help="Where other nodes may fetch chunks; port 0 takes any.")] = "127.0.0.1:0",
    advertise: Annotated[str, typer.Option(help="The host:port others should dial, if not the listen address.")] = "",
    groups: Annotated[int, typer.Option(min=1, max=64, help="Prompts sampled together.")] = 8,
    owner: Annotated[Path | None, typer.Option(help="Its owner's delegation to this node; kept from then on.")] = None,
    engine: EngineOption = Engine.AUTO,
    threads: ThreadsOption = 1,
    device: DeviceOption = Device.AUTO,
    dtype: DtypeOption = Dtype.AUTO,
    gpu_layers: GpuLayersOption = -1,
    vllm_python: VllmPythonOption = "",
    as_json: Annotated[bool, typer.Option("--json", help="Print the final earnings as JSON.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Log only what goes wrong.")] = False,
) -> None:
    """Take part in a round until it is finished; Ctrl-C leaves cleanly, and joining again continues."""
    import trio

    from swarm_node import app as agent
    from swarm_node import delegation, identity, member
    from swarm_node import join_string as joining
    from swarm_node.engine.choose import Options, choose, for_folder, this_machine

    _log_to_stderr(quiet)
    _check_settings(name or "-", price, listen, advertise)
    options = Options(threads, device.value, dtype.value, gpu_layers, vllm_python)
    choose(engine.value, options, this_machine())  # refused at once, not when the first version has been fetched
    me = identity.load_or_create(home / "node.key").key.node_id
    settings = agent.Settings(
        member=member.Settings(
            join=joining.parse(join_string),
            home=home,
            name=name or nickname(me),
            price_micros_per_mtok=price,
            listen=listen,
            advertise=advertise,
            delegation=delegation.kept(home, me, owner),
        ),
        groups_per_request=groups,
        engine_command=partial(for_folder, engine.value, options),
    )
    earnings = trio.run(agent.run, settings)
    if as_json:
        typer.echo(json.dumps(vars(earnings)))
        return
    rejected = ", ".join(f"{count} {code}" for code, count in earnings.rejected.items())
    typer.echo(
        f"Accepted {earnings.accepted} rollouts of {earnings.tokens} tokens, worth {earnings.credit_micros} micro-units"
        + (f"; rejected: {rejected}." if rejected else ".")
    )


@app.command(epilog=EXIT_CODES)
def mirror(
    join_string: Annotated[str, typer.Argument(help="What the operator gave you: http://host:port#fingerprint.")],
    name: Annotated[str, typer.Option(help="How the leaderboard calls it; by default a nickname.")] = "",
    home: Annotated[Path, typer.Option(help="Folder of the key and the policy files.")] = DEFAULT_HOME,
    listen: Annotated[str, typer.Option(help="Where others may fetch chunks; port 0 takes any.")] = "127.0.0.1:0",
    advertise: Annotated[str, typer.Option(help="The host:port others should dial, if not the listen address.")] = "",
    share: Annotated[bool, typer.Option(help="Pass chunks on; without it, nobody is told of this mirror.")] = True,
    as_json: Annotated[bool, typer.Option("--json", help="Print a line of JSON for every version held.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Log only what goes wrong.")] = False,
) -> None:
    """Fetch every version and pass it on, without sampling, until the round is finished or Ctrl-C."""
    import trio

    from swarm_node import identity, member
    from swarm_node import join_string as joining
    from swarm_node import mirror as mirroring

    _log_to_stderr(quiet)
    _check_settings(name or "-", 0, listen, advertise)
    me = identity.load_or_create(home / "node.key").key.node_id
    settings = member.Settings(
        join=joining.parse(join_string),
        home=home,
        name=name or nickname(me),
        price_micros_per_mtok=0,
        listen=listen,
        advertise=advertise,
        share=share,
    )

    def tell(held: mirroring.Held) -> None:
        said = json.dumps(held.to_json()) if as_json else f"Version {held.version} is here: {held.bytes} bytes."
        print(said, flush=True)

    trio.run(partial(mirroring.run, settings, tell=tell))


@app.command()
def bench(
    policy: Annotated[str, typer.Argument(help="A policy folder, or the join string of a round that this home knows.")],
    home: Annotated[Path, typer.Option(help="Where the round's versions are, given a join string.")] = DEFAULT_HOME,
    task: Annotated[str, typer.Option(help="Whose prompts to use, given a folder.")] = "arithmetic",
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Longest completion, given a folder.")] = 128,
    samples: Annotated[int, typer.Option(min=1, max=64, help="Completions of each prompt.")] = 16,
    groups: Annotated[int, typer.Option(min=1, max=64, help="Prompts sampled together.")] = 8,
    batches: Annotated[int, typer.Option(min=1, help="How often; one more goes before and does not count.")] = 4,
    engine: EngineOption = Engine.AUTO,
    threads: ThreadsOption = 1,
    device: DeviceOption = Device.AUTO,
    dtype: DtypeOption = Dtype.AUTO,
    gpu_layers: GpuLayersOption = -1,
    vllm_python: VllmPythonOption = "",
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON, and no progress.")] = False,
) -> None:
    """Measure how fast this machine samples a policy: tokens that would be paid, prompts and decoding apart."""
    import trio
    from rich.console import Console
    from rich.progress import Progress

    from protocol.manifest import Sampler
    from swarm_node import bench as benching
    from swarm_node import join_string as joining
    from swarm_node.engine.choose import Options, for_folder

    _log_to_stderr(quiet=True)
    subject = (
        benching.held(home, joining.parse(policy))
        if "://" in policy
        else benching.Subject(Path(policy), task, Sampler(temperature=1.0, max_new_tokens=max_new_tokens))
    )
    options = Options(threads, device.value, dtype.value, gpu_layers, vllm_python)
    choice = for_folder(engine.value, options, subject.folder)
    typer.echo(choice.why, err=True)
    with Progress(console=Console(stderr=True), disable=as_json, transient=True) as bar:
        shown = bar.add_task("sampling", total=groups * (batches + 1))
        measuring = partial(benching.run, groups=groups, samples=samples, batches=batches)
        result = trio.run(partial(measuring, subject, choice.command, on_group=lambda: bar.advance(shown)))
    if as_json:
        typer.echo(json.dumps(result._asdict()))
    else:
        typer.echo(
            f"{result.tokens_per_s:,.0f} tokens per second over {result.tokens:,} tokens: prompts at "
            f"{result.prompt_tokens_per_s:,.0f}, decoding at {result.decoded_tokens_per_s:,.0f}."
        )


@app.command(epilog="Exit codes: 0 told, 1 failed, 2 wrong usage; with --replay 0 pass, 3 soft fail, 4 hard fail.")
def why(
    join_string: Annotated[str, typer.Argument(help="The round's join string: http://host:port#fingerprint.")],
    lease: Annotated[str, typer.Argument(help="A lease or claim of this node; without, its last ones.")] = "",
    home: Annotated[Path, typer.Option(help="The node's folder.")] = DEFAULT_HOME,
    replay: Annotated[bool, typer.Option("--replay", help="Repeat the audit of this lease here; needs torch.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print everything as JSON.")] = False,
) -> None:
    """Tell what became of this node's leases, and by what evidence; and check the evidence on this machine."""
    import trio

    from swarm_node import identity
    from swarm_node import join_string as joining
    from swarm_node import why as asking

    if replay and not lease:
        raise ConfigInvalid("--replay needs a lease.", hint="`swarm-node why JOIN_STRING` lists the last ones.")
    join = joining.parse(join_string)
    found = trio.run(asking.ask, join, identity.load_or_create(home / "node.key").key, lease)
    for explanation in found.explanations:
        if as_json:
            told = explanation.model_dump(exclude={"lease", "rollout", "report"})
            typer.echo(json.dumps(told | {"report": asking.evidence(explanation)}))
        else:
            typer.echo("\n".join(asking.lines(explanation)))
    if replay:
        raise typer.Exit(asking.replay(join, home, found))


@app.command()
def seed(
    blobs: Annotated[Path, typer.Option(help="Folder of chunks, as a coordinator or a node keeps it.")],
    key: Annotated[Path, typer.Option(help="File of the seeder's key; made if it is not there.")],
    listen: Annotated[str, typer.Option(help="Where to serve; port 0 takes any.")] = "127.0.0.1:0",
) -> None:
    """Serve a folder of chunks over libp2p until standard input ends; the first line printed says where, as JSON."""
    import trio

    from swarm_node import identity
    from swarm_node.seed import seed as serve

    _log_to_stderr(quiet=True)
    host, _, port = listen.rpartition(":")
    trio.run(serve, blobs, identity.load_or_create(key).seed, host, int(port))


@app.command("engine", hidden=True, context_settings={"ignore_unknown_options": True, "allow_extra_args": True})
def run_engine(context: typer.Context) -> None:
    """The sampling engine's process, started by the agent."""
    from swarm_node.engine.child import main as run_child

    _log_to_stderr(quiet=True)
    run_child(context.args)


def main() -> None:
    """Run a command; a named error becomes one line and an exit code."""
    try:
        app()
    except KeyboardInterrupt:  # before the program could take the signal itself
        sys.exit(130)
    except SwarmError as error:
        typer.echo(f"swarm-node: {named(error)}", err=True)
        sys.exit(2 if isinstance(error, ConfigInvalid) else 1)
    except BaseExceptionGroup as group:
        errors, rest = group.split(SwarmError)
        if rest is not None or errors is None:
            raise
        for leaf in _leaves(errors):
            typer.echo(f"swarm-node: {named(leaf)}", err=True)
        sys.exit(1)


def _leaves(group: BaseExceptionGroup[BaseException]) -> list[BaseException]:
    found: list[BaseException] = []
    for error in group.exceptions:
        found += _leaves(error) if isinstance(error, BaseExceptionGroup) else [error]
    return found


def _log_to_stderr(quiet: bool) -> None:
    logging.basicConfig(
        level=logging.WARNING if quiet else logging.INFO,
        format="%(asctime)s %(levelname)s %(message)s",
        datefmt="%H:%M:%S",
        stream=sys.stderr,
    )
    for noisy in ("httpx", "httpcore", "libp2p", "multiaddr"):
        logging.getLogger(noisy).setLevel(logging.ERROR)


def _check_settings(name: str, price: int, listen: str, advertise: str) -> None:
    """Refuse what the coordinator would refuse, before anything is started."""
    from protocol.messages import Register

    for address in filter(None, (listen, advertise)):
        try:
            Register.from_value(
                {"name": name, "price_micros_per_mtok": price, "addresses": [address], "agent": "echo-swarm"}
            )
        except MalformedMessage as error:
            raise ConfigInvalid(
                error.message, hint="A name has 40 characters at most, an address looks like host:port."
            ) from None
