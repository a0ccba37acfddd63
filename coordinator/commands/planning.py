"""The planning commands of `swarm-coordinator`: `plan` uses formulas, `simulate` simulates a round."""

import json
import math
import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated, Any

import typer

from coordinator.commands.options import AsJson, Settings
from protocol.errors import NotFound, SwarmError, Unreachable
from protocol.text.commands import with_option_groups

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from coordinator.config import Config
    from coordinator.learner.memory_plan import Cards
    from coordinator.reports.estimated_plan import AuditLoad, Wanted
    from coordinator.rules.hardware import DecoderShape
    from coordinator.sim.scenario import Scenario, SimulatedPool

ConfigFile = Annotated[
    Path,
    typer.Argument(
        metavar="ROUND.toml", help="The round's TOML file; S, kappa and groups per update are read from it."
    ),
]
ConfigFileOrNone = Annotated[
    Path | None,
    typer.Argument(metavar="ROUND.toml", help="The round's TOML file; optional with --gpu (default settings)."),
]
Gpu = Annotated[
    str,
    typer.Option(
        metavar="CARD:COUNT", help="Print the learner's memory use on these GPUs, for example h100:1 or 24GiB:2."
    ),
]
Model = Annotated[
    str,
    typer.Option(
        help="With --gpu or --learner: a folder with config.json, or hf://owner/name, instead of model.path; with "
        "--learner also Qwen/Qwen3-4B and the like."
    ),
]
PromptTokens = Annotated[
    int, typer.Option(min=0, help="Tokens per prompt; 0: 512 with --gpu, the task's with --learner.")
]
CompletionTokens = Annotated[
    int, typer.Option(min=0, help="With --learner: mean tokens per completion; 0: the range of the task.")
]
LearnerCards = Annotated[
    str,
    typer.Option(
        metavar="CARD:COUNT",
        help="Estimate everything from names, with --model, --task and --nodes CARD:COUNT: nothing need be measured.",
    ),
]
TaskName = Annotated[str, typer.Option(help="With --learner: the task, instead of task.name.")]
Nodes = Annotated[
    str,
    typer.Option(
        metavar="COUNT|CARD:COUNT",
        help="Also show how long the learner waits with this number of nodes; with --learner: their cards.",
    ),
]


def _finite(value: float | None) -> float | None:
    if value is not None and not math.isfinite(value):
        raise typer.BadParameter("the value must be a finite number")
    return value


def _number(text: str, *, least: float = 0.0, most: float | None = None) -> Any:
    return typer.Option(min=least, max=most, callback=_finite, help=text)


TrainS = Annotated[float | None, _number("Time of one update, in seconds.", least=1e-3)]
GroupS = Annotated[float | None, _number("Time in which a node samples a group, in seconds.", least=1e-6)]
ASSUMED_TRAIN_S = 60.0
"""The time of an update that `simulate` assumes if none is given."""
AtOnce = Annotated[int, typer.Option(min=1, help="Groups that a node samples at once in that time.")]
Gamma = Annotated[float, _number("Target throughput, as a multiple of the minimum.")]
SourceMbit = Annotated[float, _number("The seeder's uplink, Mbit/s.", least=1e-3)]
NodeMbit = Annotated[float, _number("A node's downlink, Mbit/s.", least=1e-3)]
LoadS = Annotated[float, _number("Time from the last byte to the first token, in seconds.")]
SpreadOption = Annotated[
    float, _number("Spread of nodes' speeds, prices, links and broadcast times: sigma of a log-normal.", most=3)
]
NodePrice = Annotated[float, _number("Cost of a node per hour.")]
LearnerPrice = Annotated[float, _number("Cost of the learner per hour.")]


def plan(
    settings: Settings,
    config_file: ConfigFileOrNone = None,
    gpu: Gpu = "",
    model: Model = "",
    prompt_tokens: PromptTokens = 0,
    learner: LearnerCards = "",
    task: TaskName = "",
    completion_tokens: CompletionTokens = 0,
    live: Annotated[bool, typer.Option("--live", help="Use the measurements of the running round.")] = False,
    train_s: TrainS = None,
    group_s: GroupS = None,
    at_once: AtOnce = 1,
    broadcast_s: Annotated[float | None, _number("T_bcast in seconds; default: computed from size and links.")] = None,
    size_mb: Annotated[float, _number("Size of a published version, in MB.")] = 0.0,
    source_mbit: SourceMbit = 1000.0,
    node_mbit: NodeMbit = 100.0,
    node_up_mbit: Annotated[
        float | None, _number("A node's uplink, Mbit/s; default: as its downlink.", least=1e-3)
    ] = None,
    load_s: LoadS = 0.0,
    node_price: NodePrice = 0.0,
    learner_price: LearnerPrice = 0.0,
    gamma: Gamma = 1.1,
    nodes: Nodes = "",
    as_json: AsJson = False,
) -> None:
    """Compute the nodes and the cost that a round needs, before it runs.

    The learner stays busy if nodes deliver rollouts while a version is distributed. The number of nodes follows from S,
    the time of an update, the time of a broadcast, and the speed of nodes:

    \b
    kappa     updates between two versions: the largest number without loss of throughput
    oldest    max staleness of training data, in updates
    T_bcast   time from publication to a node's first token, in seconds
    groups/s  the minimum throughput at which the learner never waits
    nodes     number of nodes for gamma times that throughput

    `visible` is the admission rule of `launch`: a node gets work only if its version is recent enough. `overlap` is
    ECHO-2's own rule: nodes wait during a broadcast. More tables vary S, and one input at a time.

    With `--live` no figures are needed: the times of updates, broadcasts and nodes come from the running round.

    With `--gpu` it prints only the memory that learner and auditor need on these GPUs, from the model's config.json.

    With `--learner` and `--nodes CARD:COUNT` it needs neither a file nor measurements: it estimates the times from the
    names of model, task and cards, and prints each with its range and source, and whether the auditor keeps up.
    """
    from coordinator.config import load
    from coordinator.reports import planning

    if gpu:
        _plan_memory(config_file, settings, gpu, model, prompt_tokens or 512, as_json=as_json)
        return
    if learner:
        prices = (node_price, learner_price)
        links = (source_mbit, node_mbit)
        tokens = (prompt_tokens, completion_tokens)
        _plan_by_names(config_file, settings, (model, task, learner, nodes), tokens, links, prices, gamma, as_json)
        return
    if config_file is None:
        raise typer.BadParameter("give ROUND.toml, or --learner and --nodes CARD:COUNT, or --gpu for the memory alone")
    config = load(config_file, settings)
    if live:
        _plan_live(config, gamma, learner_price, as_json=as_json)
        return
    if train_s is None or group_s is None:
        raise typer.BadParameter(
            f"choose what to plan, for example: swarm-coordinator plan {config_file} --gpu 4090:1 (does the "
            "learner fit), --train-s 60 --group-s 55 (how many nodes, by your measurements), "
            "--learner h100:1 --nodes 4090:8 (estimates by names), or --live (a running round)"
        )
    figures = planning.report(
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
        _count(nodes),
    )
    typer.echo(json.dumps(figures, indent=2) if as_json else planning.text(figures))


def _count(nodes: str) -> int | None:
    if nodes and not (nodes.isascii() and nodes.isdigit()):
        raise typer.BadParameter("--nodes CARD:COUNT needs --learner; without it, give a number")
    return int(nodes) if nodes else None


def _plan_by_names(
    config_file: Path | None,
    settings: list[str],
    names: tuple[str, str, str, str],
    tokens: tuple[int, int],
    links: tuple[float, float],
    prices: tuple[float, float],
    gamma: float,
    as_json: bool,
) -> None:
    """Print a plan from the names of model, task and cards; exit with code 2 if the learner does not fit."""
    from coordinator.config import load
    from coordinator.learner import memory_plan
    from coordinator.reports import estimated_plan
    from coordinator.rules import hardware

    model, task, learner, nodes = names
    if not nodes:
        raise typer.BadParameter("--learner needs --nodes CARD:COUNT")
    before = load(config_file, settings)
    task, model = task or before.task.name, model or before.model.path
    prompt, completions = estimated_plan.lengths(task) if not all(tokens) else (0, (0.0, 0.0))
    prompt, completions = tokens[0] or prompt, (tokens[1], tokens[1]) if tokens[1] else completions
    longest = [] if config_file else [f"sampling.max_new_tokens={int(completions[1])}"]
    config = load(config_file, [*longest, *settings])
    shape, folder = _shape_and_folder(model)
    with folder as place:
        learners, cards = memory_plan.parse(learner), memory_plan.parse(nodes)
        for named in (learners, cards):
            hardware.find_speed(named.name)
        shaped = load(config_file, [*longest, *settings, f"model.path={json.dumps(place)}", 'learner.dtype="bfloat16"'])
        fits = memory_plan.plan_only(shaped, learners, prompt)
    wanted = estimated_plan.Wanted(
        model=model,
        shape=shape,
        task=task,
        node_card=cards.name,
        nodes=cards.count,
        node_bytes=cards.usable_bytes,
        learner_card=learners.name,
        learners=learners.count,
        prompt_tokens=prompt,
        completion_tokens=completions,
        source_mbit=links[0],
        node_mbit=links[1],
        node_price=prices[0],
        learner_price=prices[1],
        gamma=gamma,
    )
    figures = estimated_plan.report(wanted, config)
    audits = estimated_plan.audit_report(config, _audit_load(config, wanted, figures))
    if as_json:
        typer.echo(json.dumps({**figures, "learner": fits, "audits": audits}, indent=2))
    else:
        about = [memory_plan.auditor_line(fits["auditor"], learners.name), *estimated_plan.audit_lines(audits)]
        typer.echo(estimated_plan.text(figures, fits, config.round.unit, about))
    if not (fits["fits"] and fits["auditor"]["fits"]):
        raise typer.Exit(2)


def _audit_load(config: "Config", wanted: "Wanted", figures: dict[str, Any]) -> "AuditLoad":
    """Return what an auditor has to replay; a card of its own is taken to be of the learner's kind."""
    from coordinator.audit.auditor import threads_of
    from coordinator.reports.estimated_plan import AuditLoad, Range

    completions = figures["task"]["completion_tokens"]
    return AuditLoad(
        shape=wanted.shape,
        card=wanted.learner_card,
        threads=threads_of(config),
        nodes=wanted.nodes,
        prompt_tokens=wanted.prompt_tokens,
        completion_tokens=(completions["low"], completions["middle"], completions["high"]),
        delivered=Range(**figures["delivered_tokens_per_s"]),
    )


def _shape_and_folder(model: str) -> "tuple[DecoderShape, AbstractContextManager[str]]":
    """Return a model's shape, and a folder with its config.json: the model's own, or one that is made of the shape."""
    from contextlib import nullcontext

    from coordinator.rules import hardware

    file = Path(model.removesuffix("/config.json")) / "config.json"
    if file.is_file():
        return hardware.DecoderShape.from_config(json.loads(file.read_bytes())), nullcontext(str(file.parent))
    shape = hardware.find_shape(model)
    return shape, _made_folder(shape)


@contextmanager
def _made_folder(shape: "DecoderShape") -> Iterator[str]:
    with TemporaryDirectory() as place:
        (Path(place) / "config.json").write_text(json.dumps(shape.to_config()))
        yield place


def _plan_memory(
    config_file: Path | None, settings: list[str], gpu: str, model: str, prompt_tokens: int, *, as_json: bool
) -> None:
    """Print the memory of learner and auditor on the GPUs; exit with code 2 if one of them does not fit."""
    from coordinator.config import load
    from coordinator.learner import memory_plan, start

    named = [f"model.path={json.dumps(model.removesuffix('/config.json'))}"] if model else []
    config, cards = load(config_file, [*settings, *named]), memory_plan.parse(gpu)
    if config.model.path == start.EMBEDDED and not as_json:
        typer.echo("It fits: the embedded policy is tiny. `--model` plans for another one.")
        return
    try:
        figures = memory_plan.report(config, cards, prompt_tokens)
    except start.HubUnreachable as error:
        figures = _memory_by_name(config, cards, prompt_tokens, error)
    typer.echo(json.dumps(figures, indent=2) if as_json else memory_plan.text(figures))
    if not (figures["plan"]["fits"] and figures["auditor"]["fits"]):
        raise typer.Exit(2)


def _memory_by_name(config: "Config", cards: "Cards", prompt_tokens: int, error: SwarmError) -> dict[str, Any]:
    """Compute the memory from the model's name, and print that its config.json was not read; raise for other names."""
    from coordinator.learner import memory_plan
    from coordinator.rules import hardware

    name = config.model.path
    try:
        shape = hardware.find_shape(name)
    except SwarmError:
        raise error from None
    typer.echo(
        f"{error.message} The memory below is computed from the shape that this program knows for this name. "
        "Next: check the network, or give a folder in hub format on this machine: --model FOLDER.\n",
        err=True,
    )
    with _made_folder(shape) as place:
        model = config.model.model_copy(update={"path": place})
        figures = memory_plan.report(config.model_copy(update={"model": model}), cards, prompt_tokens)
    return {**figures, "model": name}


def _plan_live(config: "Config", gamma: float, learner_price: float, *, as_json: bool) -> None:
    """Print the plan from the measurements of a running coordinator."""
    import httpx

    from coordinator.reports import live_plan

    address = f"http://{config.round.listen}"
    try:
        token = (config.round.directory / "operator.token").read_text()
        answer = httpx.get(f"{address}/v1/measured", headers={"Authorization": f"Bearer {token}"}, timeout=30)
        answer.raise_for_status()
    except (httpx.HTTPError, OSError) as error:
        raise Unreachable(
            f"No coordinator of this round answers at {address} ({error}).",
            hint="Run `swarm-coordinator launch` first.",
        ) from error
    measured = answer.json()
    if measured["load"] is None:
        raise NotFound("There are no measurements yet.", hint="Wait for the learner's second update.")
    figures = live_plan.report(live_plan.live(measured, measured["gamma"] or gamma, learner_price))
    typer.echo(json.dumps(figures, indent=2) if as_json else live_plan.text(figures))


@dataclass(frozen=True, kw_only=True)
class PoolOptions:
    """The options that describe the nodes of a simulated round."""

    group_s: GroupS = None
    nodes: Annotated[int, typer.Option(min=1, max=100_000, help="Number of nodes.")] = 100
    at_once: AtOnce = 1
    spread: SpreadOption = 0.3
    lengths: Annotated[float, _number("Spread of group lengths: sigma of a log-normal.", most=3)] = 0.5
    foresight: Annotated[float, _number("Share of that spread that is predicted before sampling.", most=1)] = 0.0
    node_price: NodePrice = 0.0
    stay_s: Annotated[float | None, _number("Mean time that a node stays, in seconds.", least=1e-3)] = None
    preempt_s: Annotated[float | None, _number("Mean time until a node is preempted, in seconds.", least=1e-3)] = None
    away_s: Annotated[float, _number("Mean time until another node replaces it, in seconds.", least=1e-3)] = 3600.0
    liars: Annotated[float, _number("Share of nodes that forge samples and overstate their speed.", most=1)] = 0.0

    def pool(self, config: "Config", train_s: float) -> "SimulatedPool":
        """Return the pool that the simulation draws its nodes from.

        Without `group_s`, a group takes as long as an update (`train_s`), or less if the learner needs more of them.
        """
        from coordinator.sim.scenario import SimulatedPool

        nodes = self.nodes if config.fleet.strangers else config.fleet.local_nodes
        enough_s = train_s * min(1.0, nodes * self.at_once / config.learner.groups_per_update)
        return SimulatedPool(
            nodes=self.nodes,
            group_s=self.group_s or enough_s,
            at_once=self.at_once,
            speed_spread=self.spread,
            length_spread=self.lengths,
            foresight=self.foresight,
            price_per_hour=self.node_price,
            price_spread=self.spread,
            stay_s=_or_ever(self.stay_s),
            preempt_s=_or_ever(self.preempt_s),
            away_s=self.away_s,
            liars=self.liars,
        )


@dataclass(frozen=True)
class LinkOptions:
    """The options that describe what a version travels over."""

    broadcast_s: Annotated[float, _number("Time from publication to a node's first token, in seconds.")] = 0.0
    size_mb: Annotated[float, _number("Size of a version, in MB; if given, its transfer is simulated.")] = 0.0
    source_mbit: SourceMbit = 1000.0
    node_mbit: NodeMbit = 100.0
    node_up_mbit: Annotated[float, _number("Mean uplink of a node, Mbit/s.", least=1e-3)] = 20.0
    load_s: LoadS = 0.0


@with_option_groups
def simulate(
    config_file: ConfigFile,
    settings: Settings,
    *,
    train_s: TrainS = None,
    updates: Annotated[int, typer.Option(min=1, help="Number of updates to simulate.")] = 100,
    fleet: PoolOptions,
    network: LinkOptions,
    gamma: Annotated[float | None, _number("Replaces `fleet.gamma`; 0: every node works.")] = None,
    learner_price: LearnerPrice = 0.0,
    continues: Annotated[
        bool, typer.Option("--continue/--no-continue", help="Continue partial rollouts of lost nodes.")
    ] = True,
    overlap: Annotated[bool, typer.Option("--overlap", help="Use ECHO-2's own admission rule.")] = False,
    seed: Annotated[int, typer.Option(help="Random seed; the same seed gives the same run.")] = 0,
    svg: Annotated[Path | None, typer.Option(help="Write charts of the run (SVG) to this folder.")] = None,
    as_json: AsJson = False,
) -> None:
    """Simulate a round under a virtual clock, with the real admission, leases, capacity model, fleet and trees.

    Nodes, learner and network are simulated: nothing is sampled, trained or sent. Use it to see the effect of a setting
    before a swarm exists: how long the learner waits, the staleness of its rollouts, and the wasted work.

    The result depends most on --train-s and --group-s. Without them it assumes 60 s, and nodes that give what the
    learner needs. `plan --live` measures both in a running round; `plan --learner --nodes` estimates them from names.
    """
    from coordinator.config import load
    from coordinator.sim.scenario import Links, scenario_of

    links = (network.size_mb, network.source_mbit, network.node_mbit, network.node_up_mbit)
    config, update_s = load(config_file, settings), train_s or ASSUMED_TRAIN_S
    pool = fleet.pool(config, update_s)
    if assumed := _assumed_line(config_file, train_s, fleet.group_s, pool.group_s):
        typer.echo(assumed, err=True)
    scenario = scenario_of(
        config,
        pool,
        updates=updates,
        train_s=update_s,
        broadcast_s=network.broadcast_s,
        broadcast_spread=fleet.spread,
        links=Links(*links, spread=fleet.spread, load_s=network.load_s),
        learner_price_per_hour=learner_price,
        continues=continues,
        seed=seed,
    )
    if overlap:
        scenario = replace(scenario, admission="overlap")
    if gamma is not None:
        scenario = replace(scenario, gamma=gamma)
    _play(scenario, svg, as_json=as_json)


def _assumed_line(file: Path, train_s: float | None, group_s: float | None, assumed_group_s: float) -> str:
    """Return what is assumed in the place of missing times, and how to measure them; empty if nothing is."""
    parts = [] if train_s else [f"an update takes {ASSUMED_TRAIN_S:g} s (--train-s)"]
    if not group_s:
        parts.append(
            f"a node samples a group in {assumed_group_s:.4g} s (--group-s), so that all nodes together give what the "
            "learner needs"
        )
    if not parts:
        return ""
    return (
        f"Assumed: {', and '.join(parts)}. Your machines differ. To measure both in a running round: "
        f"swarm-coordinator plan {shlex.quote(str(file))} --live. To estimate them: swarm-coordinator plan "
        f"{shlex.quote(str(file))} --learner CARD:COUNT --nodes CARD:COUNT\n"
    )


def _or_ever(seconds: float | None) -> float:
    return math.inf if seconds is None else seconds


def _play(scenario: "Scenario", svg: Path | None, *, as_json: bool) -> None:
    """Run the simulation, print its report, and draw its charts if `svg` is given."""
    from coordinator.sim import report
    from coordinator.sim.world import Simulation

    outcome = Simulation(scenario).run()
    figures = report.figures(scenario, outcome)
    typer.echo(json.dumps(figures, indent=2) if as_json else report.text(scenario, figures))
    for path in report.draw(outcome, svg) if svg is not None else ():
        typer.echo(f"wrote {path}", err=True)
