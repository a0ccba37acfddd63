"""The speed of an auditor against what nodes deliver, before anything was measured; pure.

- Each claim costs two replays, under its own version and the one before; one without `audit.neighbours`.
- A newcomer's first `audit.first_groups` groups are audited in full, later ones with `audit.floor` at least. What needs
  more than the floor (escrow, doubtful claims) comes on top.
- The speed is arithmetic alone, by the card's data sheet or the processor's threads, times an efficiency. Loading
  versions is not included.
"""

from dataclasses import dataclass
from typing import Any

from coordinator.config import Config
from coordinator.reports.estimated_plan import Range, figures
from coordinator.rules import hardware
from coordinator.rules.hardware import DecoderShape

HOUR_S = 3600.0


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


def report(config: Config, load: AuditLoad) -> dict[str, Any]:
    """Return the auditor's speed, what nodes deliver, the share that it can audit, and whether it keeps up."""
    samples, audit = config.sampling.samples_per_group, config.audit
    replays = 2 if audit.neighbours else 1
    lengths, delivered = load.completion_tokens, load.delivered
    speeds = [
        rate * samples * length / (replays * hardware.replay_flops(load.shape, load.prompt_tokens, length, samples))
        for rate in _operations_per_s(config, load)
        for length in (min(lengths), max(lengths))
    ]
    speed = Range.between(min(speeds), max(speeds), _source(config, load))
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


def _source(config: Config, load: AuditLoad) -> str:
    if config.audit.device == "cpu":
        low, high = hardware.THREAD_GFLOPS
        named = "audit.threads" if config.audit.threads else "half of this machine's cores; audit.threads sets it"
        return f"{low:.0f} to {high:.0f} GFLOP/s on each of {load.threads} threads ({named})"
    low, high = hardware.REPLAY_EFFICIENCY
    return f"data sheet in float32 x {low:.0%} to {high:.0%}; nothing was measured on a {load.card}"


def lines(found: dict[str, Any]) -> list[str]:
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
