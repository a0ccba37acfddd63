"""The commands of `swarm-coordinator` that look ahead: `plan` by formulas, `simulate` by playing a round through."""

import json
import math
from pathlib import Path
from typing import Annotated, Any

import typer

from coordinator.config import load
from coordinator.fleet import Rules

ConfigFile = Annotated[Path, typer.Argument(help="The round's TOML file: S, kappa and groups per update are its own.")]
Settings = Annotated[
    list[str], typer.Option("--set", default_factory=list, help="section.key=value on top of the file; repeatable.")
]


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
NodePrice = Annotated[float, _number("What a node costs an hour.")]
LearnerPrice = Annotated[float, _number("What the learner costs an hour.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print everything, for scripts.")]


def plan(
    config_file: ConfigFile,
    settings: Settings,
    train_s: TrainS,
    group_s: GroupS,
    at_once: AtOnce = 1,
    broadcast_s: Annotated[float | None, _number("T_bcast, if known; else it follows from size and links.")] = None,
    size_mb: Annotated[float, _number("Megabytes of a version as it travels.")] = 0.0,
    source_mbit: Annotated[float, _number("The seeder's uplink, Mbit/s.", least=1e-3)] = 1000.0,
    node_mbit: Annotated[float, _number("A node's downlink, Mbit/s.", least=1e-3)] = 100.0,
    node_up_mbit: Annotated[float | None, _number("A node's uplink, Mbit/s; else as its downlink.", least=1e-3)] = None,
    load_s: Annotated[float, _number("Seconds from the last byte to the first token.")] = 0.0,
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
    oldest    how old, in updates, what is trained on can be
    T_bcast   from publication to a node's first token
    groups/s  the least throughput at which the learner never waits
    nodes     gamma times that, in nodes of the given speed

    `visible` is admission on the version that each node holds, as `launch` runs it; `overlap` is ECHO-2's own rule,
    whose nodes wait while a version is under way. Below come the same for other S, and with one input changed.
    """
    from coordinator import planning

    config = load(config_file, settings)
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


def simulate(
    config_file: ConfigFile,
    settings: Settings,
    train_s: TrainS,
    group_s: GroupS,
    nodes: Annotated[int, typer.Option(min=1, max=100_000, help="How many nodes there are.")] = 100,
    updates: Annotated[int, typer.Option(min=1, help="How many updates are played through.")] = 100,
    at_once: AtOnce = 1,
    broadcast_s: Annotated[float, _number("From publication to a node's first token.")] = 0.0,
    gamma: Annotated[float | None, _number("In place of `fleet.gamma`; 0 lets every node work.")] = None,
    node_price: NodePrice = 0.0,
    learner_price: LearnerPrice = 0.0,
    spread: Annotated[
        float,
        _number("How unlike nodes are in speed, price and broadcast: a log-normal's sigma.", most=3),
    ] = 0.3,
    lengths: Annotated[float, _number("The same, of how long groups are.", most=3)] = 0.5,
    stay_s: Annotated[float | None, _number("How long a node stays on average.", least=1e-3)] = None,
    away_s: Annotated[float, _number("How long until another comes in its place.", least=1e-3)] = 3600.0,
    overlap: Annotated[bool, typer.Option("--overlap", help="Admit as ECHO-2 does.")] = False,
    seed: Annotated[int, typer.Option(help="Decides everything that is drawn; the same seed is the same run.")] = 0,
    as_json: AsJson = False,
) -> None:
    """Play a round through under a virtual clock, with the real admission, capacity model and fleet.

    Nodes, learner and network only take time here: nothing is sampled, trained or sent. Use it to see what a setting
    does in a swarm that is not there yet: how long the learner waits, how old its rollouts are, what was in vain.
    """
    from coordinator.sim import report
    from coordinator.sim.scenario import Pool, Scenario
    from coordinator.sim.world import Simulation

    config = load(config_file, settings)
    scenario = Scenario(
        staleness=config.staleness.max_updates,
        kappa=config.staleness.publish_every,
        groups_per_update=config.learner.groups_per_update,
        updates=updates,
        train_s=train_s,
        broadcast_s=broadcast_s,
        broadcast_spread=spread,
        lease_s=config.leases.timeout_s,
        admission="overlap" if overlap else "visible",
        gamma=config.fleet.gamma if gamma is None else gamma,
        rules=Rules(config.fleet.window_s, config.fleet.margin, config.fleet.dwell_s),
        learner_price_per_hour=learner_price,
        seed=seed,
        pool=Pool(
            nodes=nodes,
            group_s=group_s,
            at_once=at_once,
            speed_spread=spread,
            length_spread=lengths,
            price_per_hour=node_price,
            price_spread=spread,
            stay_s=math.inf if stay_s is None else stay_s,
            away_s=away_s,
        ),
    )
    found = report.figures(scenario, Simulation(scenario).run())
    typer.echo(json.dumps(found, indent=2) if as_json else report.text(scenario, found))
