"""A plan before anything was measured: from the names of a model, a task and cards, with ranges and their sources.

- Each estimate is a low, a middle and a high value. What depends on several is computed for all their ends, and its
  range is that of the results.
- Where ECHO-2 measured the same setting, its figures are used as they are.
- The learner's memory is not estimated here: `coordinator.learner.memory_plan` simulates it.

An auditor's speed is compared with what nodes deliver (`audit_report`).

- Each claim costs two replays, under its own version and the one before; one without `audit.neighbours`.
- A newcomer's first `audit.first_groups` groups are audited in full, later ones with `audit.floor` at least. What needs
  more than the floor (escrow, doubtful claims) comes on top.
- The speed is arithmetic alone, by the card's data sheet or the processor's threads, times an efficiency. Loading
  versions is not included.
"""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from coordinator.config import Config
from coordinator.reports.planning import Inputs, plan, ways
from coordinator.rules import hardware
from coordinator.rules.hardware import DecoderShape
from protocol.errors import ConfigInvalid
from protocol.limits import GIB, HOUR_S
from protocol.text.plain import counted

TASKS = {
    "arithmetic": (16, (4, 8)),
    "math": (150, (300, 2_000)),
    "reasoning-gym": (200, (200, 1_500)),
    "data": (300, (200, 1_000)),
}
"""Tokens of a prompt, and the range of the mean of a completion."""

LENGTHS_SOURCE = "assumed for instruct models; --completion-tokens sets it"
ROOFLINE = "estimate: data sheet x {low:.0%} to {high:.0%} of the roofline; nothing was measured on this card"

BOUND_FACTOR = (1.06, 1.17)
"""A broadcast's time by its fluid bound, as measured (bench/RESULTS.md, from the source to every node)."""

PATCH_FACTOR = (20, 77)
"""A whole version's size by a patch's: the goal, and the best of six versions (bench/RESULTS.md, patches)."""

LOAD_BYTES_PER_S = (0.25e9, 2e9)
"""Bytes of weights that a node loads per second: 1.1 s for 0.27 GB on an H200 (bench/RESULTS.md), and fast disks."""

FORWARDS = 5.0
"""Forward passes that an update costs: one, a backward pass that costs two, one for the layers that are computed twice,
and one for the log-probabilities before the update."""

ECHO2_TRAIN_S = 1631.2
ECHO2_LEARNER = ("qwen/qwen3-8b", "a100", 4, 2048)
"""ECHO-2's learner: four A100 and 2,048 rollouts of at most 8,192 tokens per update (arXiv 2602.02192, S = 3)."""


@dataclass(frozen=True)
class Range:
    """A low, a middle and a high value, and their source."""

    low: float
    middle: float
    high: float
    source: str = ""

    @staticmethod
    def between(low: float, high: float, source: str = "") -> "Range":
        """Return a range with the geometric mean as its middle."""
        return Range(low, math.sqrt(low * high), high, source)

    def ends(self) -> tuple[float, ...]:
        return tuple(dict.fromkeys((self.low, self.middle, self.high)))

    def to_json(self) -> dict[str, Any]:
        return {"low": self.low, "middle": self.middle, "high": self.high, "source": self.source}


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """The names and numbers that a plan is wanted for."""

    model: str
    shape: DecoderShape
    task: str
    node_card: str
    nodes: int
    node_bytes: int
    """Memory of a node's card that its engine may use."""
    learner_card: str
    learners: int
    prompt_tokens: int
    completion_tokens: tuple[float, float]
    source_mbit: float
    node_mbit: float
    node_price: float
    learner_price: float
    gamma: float


def lengths(task: str) -> tuple[int, tuple[float, float]]:
    """Return the tokens of a prompt and of a completion; raise an error that lists the known tasks."""
    if task not in TASKS:
        raise ConfigInvalid(
            f"The lengths of task {task} are not known.",
            hint=f"Give --prompt-tokens and --completion-tokens, or a task of {', '.join(TASKS)}.",
        )
    return TASKS[task]


def report(wanted: Wanted, config: Config) -> dict[str, Any]:
    """Return the plan with all ranges, for scripts."""
    completions = Range.between(*wanted.completion_tokens, LENGTHS_SOURCE)
    if wanted.completion_tokens[0] == wanted.completion_tokens[1]:
        completions = replace(completions, source="given")
    at_once, cases = _cases(wanted, config, completions)
    needed = [plan(case).nodes for case in cases]
    paths = [ways(case, wanted.nodes)[0] for case in cases]
    steps = [3600 / path.step_s for path in paths]
    middle = len(cases) // 2
    kappas = sorted({plan(case).kappa for case in cases})
    return {
        "model": {"name": wanted.model, "parameters": wanted.shape.parameters, "bytes": wanted.shape.size_bytes},
        "task": {
            "name": wanted.task,
            "prompt_tokens": wanted.prompt_tokens,
            "completion_tokens": completions.to_json(),
        },
        "round": {
            "staleness": config.staleness.max_updates,
            "groups_per_update": config.learner.groups_per_update,
            "samples_per_group": config.sampling.samples_per_group,
            "kappa": kappas,
        },
        "train_s": _spread([case.train_s for case in cases], middle, _train_source(wanted, config)).to_json(),
        "node": {
            "card": wanted.node_card,
            "count": wanted.nodes,
            "sequences_at_once": at_once,
            "tokens_per_s": _node_rate(wanted, completions).to_json(),
        },
        "broadcast_s": _spread(
            [case.broadcast_s or 0.0 for case in cases], middle, _broadcast_source(config)
        ).to_json(),
        "whole_version_s": _transfer(wanted, wanted.shape.size_bytes, BOUND_FACTOR[1]),
        "nodes_needed": _needed(needed, middle),
        "steps_per_hour": _spread(steps, middle).to_json(),
        "delivered_tokens_per_s": _spread(
            _delivered(config, completions, [path.step_s for path in paths]), middle
        ).to_json(),
        "idle": _spread([max(0.0, path.idle) for path in paths], middle).to_json(),
        "cost_per_hour": wanted.learner_price + wanted.nodes * wanted.node_price,
        "cost_per_step": _spread([path.cost_per_update for path in paths], middle).to_json(),
    }


def _cases(wanted: Wanted, config: Config, completions: Range) -> tuple[list[int], list[Inputs]]:
    """Return the groups' sequences at once, and the inputs of a plan for every combination of ends."""
    trained = _ends(hardware.TRAIN_EFFICIENCY)
    sampled = _ends(hardware.SAMPLE_EFFICIENCY)
    spread = list(
        zip(_ends(BOUND_FACTOR), reversed(_ends(PATCH_FACTOR)), reversed(_ends(LOAD_BYTES_PER_S)), strict=True)
    )
    memory: list[int] = []
    cases = []
    for length, train, sample, (bound, patch, load) in itertools.product(completions.ends(), trained, sampled, spread):
        whole = wanted.prompt_tokens + length
        at_once = hardware.sequences_at_once(wanted.shape, wanted.node_bytes, whole)
        if at_once < 1:
            raise ConfigInvalid(
                f"{wanted.model} does not fit on a {wanted.node_card}: its weights take "
                f"{wanted.shape.size_bytes / GIB:.1f} GiB, and one sequence of {whole:,.0f} tokens more.",
                hint="Choose nodes with more memory, or a smaller model.",
            )
        memory.append(at_once)
        speed = hardware.find_speed(wanted.node_card)
        rate = sample * hardware.sampled_per_s(wanted.shape, speed, at_once, whole)
        samples = config.sampling.samples_per_group
        groups_at_once = max(1, at_once // samples)
        size = wanted.shape.size_bytes / (patch if config.publish.patches else 1)
        cases.append(
            Inputs(
                staleness=config.staleness.max_updates,
                groups_per_update=config.learner.groups_per_update,
                kappa=config.staleness.publish_every,
                train_s=_train_s(wanted, config, whole, train),
                group_s=groups_at_once * samples * length / rate,
                at_once=groups_at_once,
                broadcast_s=_transfer(wanted, size, bound) + wanted.shape.size_bytes / load,
                node_price_per_hour=wanted.node_price,
                learner_price_per_hour=wanted.learner_price,
                gamma=wanted.gamma,
            )
        )
    return sorted(set(memory)), cases


def _delivered(config: Config, completions: Range, steps_s: list[float]) -> list[float]:
    """Return the tokens of completions per second of each case; `_cases` varies the length last."""
    samples = config.learner.groups_per_update * config.sampling.samples_per_group
    each = len(steps_s) // len(completions.ends())
    lengths = [length for length in completions.ends() for _ in range(each)]
    return [samples * length / step_s for length, step_s in zip(lengths, steps_s, strict=True)]


def _ends(ends: tuple[float, float]) -> tuple[float, ...]:
    return Range.between(*ends).ends()


def _transfer(wanted: Wanted, size_bytes: float, factor: float) -> float:
    """Return the seconds in which a version of this size reaches all nodes, by the fluid bound and a factor."""
    inputs = Inputs(
        staleness=1,
        groups_per_update=1,
        train_s=1,
        group_s=1,
        size_mb=size_bytes / 1e6,
        source_mbit=wanted.source_mbit,
        node_mbit=wanted.node_mbit,
        node_up_mbit=wanted.node_mbit,
    )
    return factor * inputs.arrival_s(max(1, wanted.nodes))


def _is_echo2(wanted: Wanted, config: Config) -> bool:
    rollouts = config.learner.groups_per_update * config.sampling.samples_per_group
    return (wanted.model.lower(), wanted.learner_card, wanted.learners, rollouts) == ECHO2_LEARNER


def _train_s(wanted: Wanted, config: Config, length: float, efficiency: float) -> float:
    if _is_echo2(wanted, config):
        return ECHO2_TRAIN_S
    tokens = config.learner.groups_per_update * config.sampling.samples_per_group * length
    flops = hardware.train_flops(wanted.shape, tokens, length, FORWARDS)
    return flops / (efficiency * wanted.learners * hardware.find_speed(wanted.learner_card).tflops * 1e12)


def _train_source(wanted: Wanted, config: Config) -> str:
    if _is_echo2(wanted, config):
        return "measured by ECHO-2 (arXiv 2602.02192) with completions of at most 8,192 tokens"
    low, high = hardware.TRAIN_EFFICIENCY
    return ROOFLINE.format(low=low, high=high)


def _node_rate(wanted: Wanted, completions: Range) -> Range:
    speed, low, high = hardware.find_speed(wanted.node_card), *hardware.SAMPLE_EFFICIENCY
    rates = [
        hardware.sampled_per_s(
            wanted.shape, speed, hardware.sequences_at_once(wanted.shape, wanted.node_bytes, whole), whole
        )
        for whole in (wanted.prompt_tokens + length for length in (completions.low, completions.high))
    ]
    return Range.between(low * min(rates), high * max(rates), ROOFLINE.format(low=low, high=high))


def _broadcast_source(config: Config) -> str:
    patched = f"a patch {PATCH_FACTOR[0]} to {PATCH_FACTOR[1]} times smaller, " if config.publish.patches else ""
    return (
        f"{patched}{BOUND_FACTOR[0]} to {BOUND_FACTOR[1]} times the bound of the links, then loading: measured "
        "(bench/RESULTS.md)"
    )


def _spread(values: list[float], middle: int, source: str = "") -> Range:
    return Range(min(values), values[middle], max(values), source)


def _needed(needed: list[int | None], middle: int) -> dict[str, Any]:
    """Return the range of the numbers of nodes; None as its end if in one case no number is enough."""
    numbers = [number for number in needed if number is not None]
    return {
        "low": min(numbers) if numbers else None,
        "middle": needed[middle],
        "high": None if None in needed else max(numbers),
        "source": "computed from the ranges above",
    }


def text(found: dict[str, Any], memory: dict[str, Any], unit: str, auditor: Sequence[str] = ()) -> str:
    """Return the report, the learner's memory and lines about the auditor as text."""
    model, task, size, node = found["model"], found["task"], found["round"], found["node"]
    cards = f"{memory['card']}:{memory['count']}"
    verdict = "it fits" if memory["fits"] else f"IT DOES NOT FIT: `plan --gpu {cards}` compares ways that need less"
    kappa = " to ".join(map(str, sorted({size["kappa"][0], size["kappa"][-1]})))
    lines = [
        f"{model['name']}: {model['parameters'] / 1e9:.2f} billion parameters, {model['bytes'] / 1e9:.1f} GB in bf16",
        f"{task['name']}: prompts of {task['prompt_tokens']} tokens, completions of "
        f"{figures(task['completion_tokens'])} tokens",
        f"an update: {size['groups_per_update']} groups of {size['samples_per_group']} samples; S = "
        f"{size['staleness']}, a version every {kappa} updates",
        "",
        _line("T_train", found["train_s"], "s"),
        _line(f"a {node['card']} samples", node["tokens_per_s"], "tokens/s"),
        _line("T_bcast", found["broadcast_s"], "s"),
        f"  {'first version, whole':<22} {found['whole_version_s']:>24,.3g} s",
        "",
        f"learner on {memory['count']} x {memory['card']}: {verdict} ({memory['peak_gib']:.1f} of "
        f"{memory['usable_gib']:.1f} GiB; simulated by this program)",
        *auditor,
        f"nodes needed for S = {size['staleness']}: {_nodes(found['nodes_needed'])}",
        f"with {counted(node['count'], 'node')}: {figures(found['steps_per_hour'])} steps per hour; the learner waits "
        f"{found['idle']['middle']:.0%} ({found['idle']['low']:.0%} to {found['idle']['high']:.0%})",
    ]
    if found["cost_per_hour"]:
        lines.append(
            f"cost: {found['cost_per_hour']:,.2f} {unit} per hour, {figures(found['cost_per_step'])} {unit} per step"
        )
    else:
        lines.append("For the cost, give --node-price and --learner-price (per hour).")
    lines += ["", "Sources:"]
    sources = (
        ("T_train", found["train_s"]),
        ("sampling", node["tokens_per_s"]),
        ("T_bcast", found["broadcast_s"]),
        ("completions", task["completion_tokens"]),
    )
    lines += [f"  {name:<12} {value['source']}" for name, value in sources]
    lines.append(
        "Measure before you rent: `swarm-node bench`, then `plan --group-s`; `plan --live` in a running round."
    )
    return "\n".join(lines)


def _line(name: str, value: dict[str, Any], unit: str) -> str:
    return f"  {name:<22} {figures(value):>24} {unit}"


def figures(value: dict[str, Any]) -> str:
    """Return a range as text: its middle, and its ends in brackets."""
    if value["low"] == value["high"]:
        return f"{value['middle']:,.4g}"
    return f"{_short(value['middle'])} ({_short(value['low'])} to {_short(value['high'])})"


def _short(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _nodes(needed: dict[str, Any]) -> str:
    if needed["low"] is None:
        return "no number of nodes is enough; use a larger S"
    if needed["middle"] is None:
        return f"{needed['low']} at best; in the middle case no number is enough: use a larger S"
    if needed["high"] is None:
        return f"{needed['middle']} ({needed['low']} at best; in the worst case no number is enough: use a larger S)"
    return f"{needed['middle']} ({needed['low']} to {needed['high']})"


@dataclass(frozen=True, kw_only=True)
class AuditLoad:
    """The claims that an auditor is to replay, and where it computes."""

    shape: DecoderShape
    card: str
    """The auditor's card, if `audit.device` is one."""
    threads: int
    """The processor threads of an auditor on the CPU."""
    nodes: int
    prompt_tokens: int
    completion_tokens: tuple[float, ...]
    """Mean tokens of a completion: low, middle and high."""
    delivered: Range
    """Tokens of completions per second that nodes deliver."""


def audit_report(config: Config, load: AuditLoad) -> dict[str, Any]:
    """Return the auditor's speed, what nodes deliver, the share that it can audit, and whether it keeps up."""
    samples, audit = config.sampling.samples_per_group, config.audit
    replays = 2 if audit.neighbours else 1
    lengths, delivered = load.completion_tokens, load.delivered
    speeds = [
        rate * samples * length / (replays * hardware.replay_flops(load.shape, load.prompt_tokens, length, samples))
        for rate in _operations_per_s(config, load)
        for length in (min(lengths), max(lengths))
    ]
    speed = Range.between(min(speeds), max(speeds), _audit_source(config, load))
    held = Range(speed.low / delivered.high, speed.middle / delivered.middle, speed.high / delivered.low)
    first = load.nodes * audit.first_groups * samples * lengths[len(lengths) // 2]
    return {
        "device": audit.device,
        "dtype": audit.dtype,
        "replays": replays,
        "tokens_per_s": speed.to_json(),
        "delivered_tokens_per_s": delivered.to_json(),
        "planned_rate": audit.floor,
        "rate_held": Range(min(1.0, held.low), min(1.0, held.middle), min(1.0, held.high)).to_json(),
        "first_audits_s": first / speed.middle,
        "keeps_up": held.middle >= audit.floor,
        "audits": bool(audit.floor or audit.first_groups),
    }


def _operations_per_s(config: Config, load: AuditLoad) -> tuple[float, float]:
    """Return the low and the high end of the operations that the auditor computes in a second."""
    if config.audit.device == "cpu":
        low, high = hardware.THREAD_GFLOPS
        return low * load.threads * 1e9, high * load.threads * 1e9
    low, high = hardware.REPLAY_EFFICIENCY
    tflops = hardware.FLOAT32_TFLOPS[load.card]
    return low * tflops * 1e12, high * tflops * 1e12


def _audit_source(config: Config, load: AuditLoad) -> str:
    if config.audit.device == "cpu":
        low, high = hardware.THREAD_GFLOPS
        named = "audit.threads" if config.audit.threads else "half of this machine's cores; audit.threads sets it"
        return f"{low:.0f} to {high:.0f} GFLOP/s on each of {load.threads} threads ({named})"
    low, high = hardware.REPLAY_EFFICIENCY
    return f"data sheet in float32 x {low:.0%} to {high:.0%}; nothing was measured on a {load.card}"


def audit_lines(found: dict[str, Any]) -> list[str]:
    """Return the report as lines of text: the speed, what it can audit, and the next step if that is too little.

    There are none if nothing is audited.
    """
    if not found["audits"]:
        return []
    speed, delivered, held = found["tokens_per_s"], found["delivered_tokens_per_s"], found["rate_held"]
    times = {1: "once", 2: "twice"}[found["replays"]]
    rates = (
        f"it can audit {held['middle']:.1%} ({held['low']:.1%} to {held['high']:.1%}) of what nodes deliver, "
        f"{figures(delivered)} tokens/s, and audit.floor is {found['planned_rate']:.1%}"
    )
    if found["keeps_up"]:
        verdict = (
            f"it keeps up: {rates}. The first groups of these nodes take it {found['first_audits_s'] / HOUR_S:.2g} h"
        )
    else:
        verdict = (
            f"IT DOES NOT KEEP UP: {rates}. Name a free card in audit.device, raise audit.threads, or start more with "
            "`swarm-coordinator auditor`"
        )
    return [f"it audits {figures(speed)} tokens/s, each replayed {times}: {speed['source']}", verdict]
