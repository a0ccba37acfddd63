"""The commands of `swarm-coordinator` that look ahead: `plan` by formulas, `simulate` by playing a round through."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from coordinator.commands.options import AsJson, Settings
from coordinator.config import Config, load
from protocol.errors import NotFound, Unreachable

if TYPE_CHECKING:
    from coordinator.sim.scenario import Scenario

ConfigFile = Annotated[
    Path,
    typer.Argument(metavar="ROUND.toml", help="The round's TOML file: S, kappa and groups per update are its own."),
]
ConfigFileOrNone = Annotated[
    Path | None, typer.Argument(metavar="ROUND.toml", help="The same; with --gpu it may be left out, for the defaults.")
]
Gpu = Annotated[
    str, typer.Option(metavar="CARD:COUNT", help="Print the memory that the learner needs on h100:1 or 24GiB:2.")
]
Model = Annotated[
    str, typer.Option(help="With --gpu: a folder with config.json, or hf://owner/name, in place of model.path.")
]
PromptTokens = Annotated[int, typer.Option(min=1, help="With --gpu: tokens of a prompt.")]


def _finite(value: float | None) -> float | None:
    if value is not None and not math.isfinite(value):
        raise typer.BadParameter("a finite number is needed")
    return value


def _number(text: str, *, least: float = 0.0, most: float | None = None) -> Any:
    return typer.Option(min=least, max=most, callback=_finite, help=text)


TrainS = Annotated[float, _number("Seconds of one update.", least=1e-3)]
GroupS = Annotated[float, _number("Seconds in which a node samples a group.", least=1e-6)]
AtOnce = Annotated[int, typer.Option(min=1, help="Groups that a node samples together in that time.")]
Gamma = Annotated[float, _number("Throughput to keep, as a multiple of the least that is enough.")]
SourceMbit = Annotated[float, _number("The seeder's uplink, Mbit/s.", least=1e-3)]
NodeMbit = Annotated[float, _number("A node's downlink, Mbit/s.", least=1e-3)]
LoadS = Annotated[float, _number("Seconds from the last byte to the first token.")]
SpreadOption = Annotated[
    float, _number("How unlike nodes are in speed, price, links and broadcast: a log-normal's sigma.", most=3)
]
NodePrice = Annotated[float, _number("What a node costs an hour.")]
LearnerPrice = Annotated[float, _number("What the learner costs an hour.")]


def plan(
    settings: Settings,
    config_file: ConfigFileOrNone = None,
    gpu: Gpu = "",
    model: Model = "",
    prompt_tokens: PromptTokens = 512,
    live: Annotated[bool, typer.Option("--live", help="Plan by what the running round has measured.")] = False,
    train_s: Annotated[float | None, _number("Seconds of one update.", least=1e-3)] = None,
    group_s: Annotated[float | None, _number("Seconds in which a node samples a group.", least=1e-6)] = None,
    at_once: AtOnce = 1,
    broadcast_s: Annotated[float | None, _number("T_bcast, if known; else it follows from size and links.")] = None,
    size_mb: Annotated[float, _number("Megabytes of a version as it travels.")] = 0.0,
    source_mbit: SourceMbit = 1000.0,
    node_mbit: NodeMbit = 100.0,
    node_up_mbit: Annotated[float | None, _number("A node's uplink, Mbit/s; else as its downlink.", least=1e-3)] = None,
    load_s: LoadS = 0.0,
    node_price: NodePrice = 0.0,
    learner_price: LearnerPrice = 0.0,
    gamma: Gamma = 1.1,
    nodes: Annotated[int | None, typer.Option(min=0, help="Also tell how long the learner waits with so many.")] = None,
    as_json: AsJson = False,
) -> None:
    """What a round would need and cost, before it runs.

    The learner stays busy if rollouts keep coming while versions travel. How many nodes that takes follows from S, the
    time of an update, the time of a broadcast, and how fast nodes sample:

    \b
    kappa     updates between two versions: the largest that costs no throughput
    oldest    max staleness of training data, in updates
    T_bcast   from publication to a node's first token
    groups/s  the least throughput at which the learner never waits
    nodes     gamma times that, in nodes of the given speed

    `visible` is admission on the version that each node holds, as `launch` runs it; `overlap` is ECHO-2's own rule,
    whose nodes wait while a version is under way. Below come the same for other S, and with one input changed.

    With `--live` nothing need be given: the running round is asked what its updates, broadcasts and nodes take.

    With `--gpu` it prints instead the memory that the learner needs on such cards, from the model's config.json alone.
    """
    from coordinator.reports import planning

    if gpu:
        _plan_memory(config_file, settings, gpu, model, prompt_tokens, as_json=as_json)
        return
    if config_file is None:
        raise typer.BadParameter("ROUND.toml is needed, or --gpu for the memory of the learner alone")
    config = load(config_file, settings)
    if live:
        _plan_live(config, gamma, learner_price, as_json=as_json)
        return
    if train_s is None or group_s is None:
        raise typer.BadParameter("--train-s and --group-s are needed, or --live for a round that runs")
    found = planning.report(
        planning.Inputs(
            staleness=config.staleness.max_updates,
            groups_per_update=config.learner.groups_per_update,
            kappa=config.staleness.publish_every,
            train_s=train_s,
            group_s=group_s,
            at_once=at_once,
            broadcast_s=broadcast_s,
            size_mb=size_mb,
            source_mbit=source_mbit,
            node_mbit=node_mbit,
            node_up_mbit=node_mbit if node_up_mbit is None else node_up_mbit,
            load_s=load_s,
            node_price_per_hour=node_price,
            learner_price_per_hour=learner_price,
            gamma=gamma,
        ),
        nodes,
    )
    typer.echo(json.dumps(found, indent=2) if as_json else planning.text(found))


def _plan_memory(
    config_file: Path | None, settings: list[str], gpu: str, model: str, prompt_tokens: int, *, as_json: bool
) -> None:
    """Print what the learner needs on cards; exit code 2 if it does not fit."""
    from coordinator.learner import memory_plan
    from coordinator.learner import memory_plan as cards

    named = [f"model.path={json.dumps(model.removesuffix('/config.json'))}"] if model else []
    found = memory_plan.report(load(config_file, [*settings, *named]), cards.parse(gpu), prompt_tokens)
    typer.echo(json.dumps(found, indent=2) if as_json else memory_plan.text(found))
    if not found["plan"]["fits"]:
        raise typer.Exit(2)


def _plan_live(config: Config, gamma: float, learner_price: float, *, as_json: bool) -> None:
    """The same from what a running coordinator has measured."""
    import httpx

    from coordinator.reports import live_plan

    address = f"http://{config.round.listen}"
    try:
        token = (config.round.directory / "operator.token").read_text()
        answer = httpx.get(f"{address}/v1/measured", headers={"Authorization": f"Bearer {token}"}, timeout=30)
        answer.raise_for_status()
    except (httpx.HTTPError, OSError) as error:
        raise Unreachable(
            f"No coordinator of this round answers at {address} ({error}).", hint="Launch it first."
        ) from error
    measured = answer.json()
    if measured["load"] is None:
        raise NotFound("Nothing is measured yet.", hint="Wait for the learner's second update.")
    found = live_plan.report(live_plan.live(measured, measured["gamma"] or gamma, learner_price))
    typer.echo(json.dumps(found, indent=2) if as_json else live_plan.text(found))


def simulate(
    config_file: ConfigFile,
    settings: Settings,
    train_s: TrainS,
    group_s: GroupS,
    nodes: Annotated[int, typer.Option(min=1, max=100_000, help="How many nodes there are.")] = 100,
    updates: Annotated[int, typer.Option(min=1, help="How many updates are played through.")] = 100,
    at_once: AtOnce = 1,
    broadcast_s: Annotated[float, _number("From publication to a node's first token.")] = 0.0,
    size_mb: Annotated[float, _number("Megabytes of a version: its way over the links is played, too.")] = 0.0,
    source_mbit: SourceMbit = 1000.0,
    node_mbit: NodeMbit = 100.0,
    node_up_mbit: Annotated[float, _number("A node's uplink, Mbit/s, on average.", least=1e-3)] = 20.0,
    load_s: LoadS = 0.0,
    gamma: Annotated[float | None, _number("In place of `fleet.gamma`; 0 lets every node work.")] = None,
    node_price: NodePrice = 0.0,
    learner_price: LearnerPrice = 0.0,
    spread: SpreadOption = 0.3,
    lengths: Annotated[float, _number("The same, of how long groups are.", most=3)] = 0.5,
    foresight: Annotated[float, _number("How much of that is expected when a prompt comes up.", most=1)] = 0.0,
    stay_s: Annotated[float | None, _number("How long a node stays on average.", least=1e-3)] = None,
    preempt_s: Annotated[float | None, _number("How long until it is preempted, on average.", least=1e-3)] = None,
    away_s: Annotated[float, _number("How long until another comes in its place.", least=1e-3)] = 3600.0,
    liars: Annotated[float, _number("Share of nodes that forge, and boast.", most=1)] = 0.0,
    continues: Annotated[
        bool, typer.Option("--continue/--no-continue", help="Go on with what lost nodes have told.")
    ] = True,
    overlap: Annotated[bool, typer.Option("--overlap", help="Admit as ECHO-2 does.")] = False,
    seed: Annotated[int, typer.Option(help="Decides everything that is drawn; the same seed is the same run.")] = 0,
    svg: Annotated[Path | None, typer.Option(help="Draw the run into this folder.")] = None,
    as_json: AsJson = False,
) -> None:
    """Play a round through under a virtual clock, with the real admission, leases, capacity model, fleet and trees.

    Nodes, learner and network only take time here: nothing is sampled, trained or sent. Use it to see what a setting
    does in a swarm that is not there yet: how long the learner waits, how old its rollouts are, what was in vain.
    """
    from coordinator.sim.scenario import Links, SimulatedPool, scenario_of

    comings = {"stay_s": _or_ever(stay_s), "preempt_s": _or_ever(preempt_s), "away_s": away_s, "liars": liars}
    pool = SimulatedPool(nodes, group_s, at_once, spread, lengths, foresight, node_price, spread, **comings)
    scenario = scenario_of(
        load(config_file, settings),
        pool,
        updates=updates,
        train_s=train_s,
        broadcast_s=broadcast_s,
        broadcast_spread=spread,
        links=Links(size_mb, source_mbit, node_mbit, node_up_mbit, spread, load_s),
        learner_price_per_hour=learner_price,
        continues=continues,
        seed=seed,
    )
    if overlap:
        scenario = replace(scenario, admission="overlap")
    if gamma is not None:
        scenario = replace(scenario, gamma=gamma)
    _play(scenario, svg, as_json=as_json)


def _or_ever(seconds: float | None) -> float:
    return math.inf if seconds is None else seconds


def _play(scenario: "Scenario", svg: Path | None, *, as_json: bool) -> None:
    """Run, tell, and draw where that is wanted."""
    from coordinator.sim import report
    from coordinator.sim.world import Simulation

    outcome = Simulation(scenario).run()
    found = report.figures(scenario, outcome)
    typer.echo(json.dumps(found, indent=2) if as_json else report.text(scenario, found))
    for path in report.draw(outcome, svg) if svg is not None else ():
        typer.echo(f"drawn: {path}", err=True)
