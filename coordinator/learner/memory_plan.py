"""The memory that a learner needs on named cards, as `swarm-coordinator plan --gpu` prints it.

The settings of the file come first, phase by phase; then all weights and adapters in comparison, with layers computed
once and twice, on 1 card up to all cards.

`CARDS_GIB` names graphics cards; `Cards` computes the part of their memory that a learner can use.
"""

import difflib
import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from coordinator.config import Config
from coordinator.learner.settings import TrainSettings, train_settings
from protocol import limits
from protocol.errors import ConfigInvalid

GIB = 1024 * limits.MIB

CARDS_GIB = {
    "h200": 140.4,
    "h100": 79.6,
    "h100-94": 93.6,
    "h20": 95.6,
    "b200": 178.4,
    "a100": 79.3,
    "a100-80": 79.3,
    "a100-40": 39.6,
    "a6000": 47.4,
    "a40": 44.7,
    "a10": 22.5,
    "l40s": 44.7,
    "l40": 44.7,
    "l4": 22.5,
    "t4": 14.9,
    "v100": 31.7,
    "5090": 31.8,
    "5080": 15.9,
    "4090": 24.0,
    "4080": 16.0,
    "3090": 24.0,
    "rtx6000ada": 47.4,
    "rtxpro6000": 95.6,
    "mi250": 64.0,
    "mi300x": 192.0,
    "mi325x": 256.0,
}
"""GiB that the driver reports: a little less than the nominal size, since error correction takes some."""

RESERVED_BYTES = GIB
"""Memory of the driver's context, the workspaces of matrix products and NCCL's buffers on each card."""

FRAGMENTED = 0.05
"""The share of the rest that is lost between tensors: the allocator's blocks are larger than their tensors."""

CARDS_MAX = 64
"""The most cards: the largest value of `learner.processes`."""


@dataclass(frozen=True)
class Cards:
    """Equal graphics cards of a machine."""

    name: str
    size_bytes: int
    count: int

    @property
    def usable_bytes(self) -> int:
        """Return the bytes of each card that tensors can use."""
        return int((self.size_bytes - RESERVED_BYTES) * (1 - FRAGMENTED))


def parse(written: str) -> Cards:
    """Parse `h100`, `h100:2` or `24GiB:2`: a name or a size, and the number of cards."""
    name, _, count = written.lower().partition(":")
    if not re.fullmatch(r"[1-9]\d?", count or "1") or int(count or 1) > CARDS_MAX:
        raise ConfigInvalid(
            f"{written}: the number of cards is from 1 to {CARDS_MAX}.",
            hint="Write NAME:COUNT or SIZE:COUNT, as in h100:1 or 24GiB:2.",
        )
    size = re.fullmatch(r"(\d+(?:\.\d+)?)(gib|gb|g)", name)
    gib = float(size[1]) * (1 if size[2] == "gib" else 1e9 / GIB) if size else CARDS_GIB.get(name)
    if not gib:
        close = difflib.get_close_matches(name, CARDS_GIB, n=1)
        raise ConfigInvalid(
            f"{written} is not a known card.",
            hint=f"{f'Did you mean {close[0]}? ' if close else ''}Write NAME:COUNT or SIZE:COUNT, as in h100:1 or "
            f"24GiB:2. Names: {', '.join(sorted(CARDS_GIB))}.",
        )
    return Cards(name.replace("gib", "GiB"), int(gib * GIB), int(count or 1))


if TYPE_CHECKING:
    from coordinator.learner.memory import AuditorNeed, Estimate, Footprint


def auditors_card(config: Config, count: int) -> str:
    """Return the auditor's card if it is not one of the learner's `count` cards; empty if it is, or on the CPU."""
    device, learner = config.audit.device, config.learner.device
    if device == "cpu":
        return ""
    number = int(device.partition(":")[2] or 0)
    first = int(learner.partition(":")[2] or 0) if count == 1 else 0
    return "" if learner != "cpu" and first <= number < first + count else device


LORA_RANK = 32
"""The rank of the adapters that are shown if the file trains all weights."""

RANKS = (1, 2, 4, 8, 16, 32, 64)
"""The numbers of cards that are shown."""

SHOWN = (
    "lora_rank",
    "dtype",
    "gradient_checkpointing",
    "micro_batch_tokens",
    "optimizer_dtype",
    "optimizer_offload",
)
"""The settings of the learner that decide its memory."""


def report(config: Config, cards: Cards, prompt: int) -> dict[str, Any]:
    """Return the memory that the file's settings need on these cards, and that of other ways to train."""
    from coordinator.learner import memory

    simulations = memory.Simulations(memory.described(config))
    rank = config.learner.lora_rank or LORA_RANK
    device = "cuda" if config.learner.device == "cpu" else config.learner.device
    versions = memory.kept_versions(config)
    estimates: dict[TrainSettings, memory.Estimate] = {}

    def estimate(**changes: Any) -> memory.Estimate:
        settings = replace(train_settings(config), device=device, **changes)
        if settings not in estimates:
            estimates[settings] = memory.estimate(config, simulations, prompt=prompt, device=device, **changes)
        return estimates[settings]

    checkpoints = memory.kept_checkpoints(config)
    plan = estimate().footprint(cards.count, device=device, versions=versions, checkpoints=checkpoints)
    auditor = _auditor(config, simulations.auditor(config, prompt), cards, plan.peak_bytes)
    return {
        "model": config.model.path,
        "card": {
            "name": cards.name,
            "count": cards.count,
            "gib": _gib(cards.size_bytes),
            "usable_gib": _gib(cards.usable_bytes),
        },
        "settings": {name: getattr(config.learner, name) for name in SHOWN},
        "prompt_tokens": prompt,
        "plan": _figures(plan, cards),
        "auditor": auditor,
        "ways": [
            {**way, **_figures(footprint, cards)} for way, footprint in _ways(estimate, cards.count, rank, device)
        ],
    }


def plan_only(config: Config, cards: Cards, prompt: int) -> dict[str, Any]:
    """Return whether the file's settings fit on these cards, without the comparison with other ways to train."""
    from coordinator.learner import memory

    device = "cuda" if config.learner.device == "cpu" else config.learner.device
    simulations = memory.Simulations(memory.described(config))
    estimate = memory.estimate(config, simulations, prompt=prompt, device=device)
    versions, checkpoints = memory.kept_versions(config), memory.kept_checkpoints(config)
    footprint = estimate.footprint(cards.count, device=device, versions=versions, checkpoints=checkpoints)
    plan = _figures(footprint, cards)
    return {
        "auditor": _auditor(config, simulations.auditor(config, prompt), cards, footprint.peak_bytes),
        "card": cards.name,
        "count": cards.count,
        "usable_gib": _gib(cards.usable_bytes),
        "parameters": plan["parameters"],
        "peak_gib": plan["peak_gib"],
        "fits": plan["fits"],
    }


def _figures(footprint: "Footprint", cards: Cards) -> dict[str, Any]:
    return {
        "cards": footprint.ranks,
        "parameters": footprint.parameters,
        "trained": footprint.trained,
        "phases_gib": {name: _gib(size) for name, size in footprint.phases.items()},
        "peak_gib": _gib(footprint.peak_bytes),
        "host_gib": _gib(footprint.host_bytes),
        "disk_gib": _gib(footprint.disk_bytes),
        "fits": footprint.peak_bytes <= cards.usable_bytes,
    }


def _auditor(config: Config, need: "AuditorNeed", cards: Cards, learner_bytes: int) -> dict[str, Any]:
    """Return what the auditor needs, and whether it fits: beside the learner, if it is on one of these cards.

    A card of its own is taken to be of the same kind.
    """
    other = auditors_card(config.model_copy(update={"learner": _on_cards(config)}), cards.count)
    shares = need.on_card and not other
    beside = learner_bytes + RESERVED_BYTES if shares else 0
    return {
        "device": need.device,
        "dtype": need.dtype,
        "phases_gib": {name: _gib(size) for name, size in need.phases.items()},
        "peak_gib": _gib(need.peak_bytes),
        "host_gib": _gib(need.host_bytes),
        "shares_card": shares,
        "fits": not need.on_card or need.peak_bytes + beside <= cards.usable_bytes,
    }


def _on_cards(config: Config) -> Any:
    """Return the learner's section as it is planned: on these cards."""
    return config.learner.model_copy(update={"device": "cuda"}) if config.learner.device == "cpu" else config.learner


def auditor_line(auditor: dict[str, Any], card: str) -> str:
    """Return where the auditor computes, what it needs, and the next step if it does not fit."""
    said = f"auditor in {auditor['dtype']} on {auditor['device']}"
    if auditor["device"] == "cpu":
        return f"{said}: {auditor['host_gib']:.1f} GiB of the host's memory"
    where = "beside the learner" if auditor["shares_card"] else f"on a {card} of its own"
    said += f", {where}: {auditor['peak_gib']:.1f} GiB of the card, {auditor['host_gib']:.1f} GiB of the host's memory"
    if not auditor["fits"]:
        return f'{said}. IT DOES NOT FIT: set audit.device = "cpu", or name a card that the learner does not use'
    slows = "; a card that the learner uses, too, slows both: audit.device names another" * auditor["shares_card"]
    return f"{said}{slows}"


def _ways(
    estimate: Callable[..., "Estimate"], most: int, rank: int, device: str
) -> Iterator[tuple[dict[str, Any], "Footprint"]]:
    """Yield all weights and adapters, with layers computed once and twice, on 1 to `most` cards."""
    for lora_rank in (0, rank):
        for twice in (False, True):
            way = {"lora_rank": lora_rank, "gradient_checkpointing": twice}
            for ranks in sorted({most, *(count for count in RANKS if count <= most)}):
                yield way, estimate(**way).footprint(ranks, device=device)


def _gib(size: int) -> float:
    return round(size / GIB, 2)


def text(found: dict[str, Any]) -> str:
    """Return the report `found` as text."""
    plan, card, settings = found["plan"], found["card"], found["settings"]
    trained = f"LoRA of rank {settings['lora_rank']}" if settings["lora_rank"] else "all weights"
    lines = [
        f"{found['model']}: {plan['parameters'] / 1e9:.2f} billion parameters; {trained} trained "
        f"({plan['trained'] / 1e9:.2f} billion), products in {settings['dtype']}, "
        f"{settings['micro_batch_tokens'] or 'all'} tokens at once, prompts of {found['prompt_tokens']} tokens"
        f"{', layers computed twice' if settings['gradient_checkpointing'] else ''}",
        f"{card['count']} x {card['name']}: {card['gib']:.1f} GiB each, of which tensors can use "
        f"{card['usable_gib']:.1f} GiB",
        "",
        f"{'phase':<22} {'GiB on each card':>16}",
        *(f"{name:<22} {size:>16.1f}" for name, size in plan["phases_gib"].items()),
        "",
        f"{'memory of the host':<22} {plan['host_gib']:>16.1f}",
        f"{'disk':<22} {plan['disk_gib']:>16.1f}",
        "",
        f"{auditor_line(found['auditor'], card['name'])}.",
        "",
    ]
    counts = sorted({way["cards"] for way in found["ways"]})
    lines.append(f"{'most on each of':<40} {' '.join(f'{count:>3} cards' for count in counts)}")
    for number in range(0, len(found["ways"]), len(counts)):
        row = found["ways"][number : number + len(counts)]
        cells = (f"{way['peak_gib']:>8.1f}{' ' if way['fits'] else '!'}" for way in row)
        lines.append(f"{_way(row[0]):<40} {''.join(cells)}".rstrip())
    worst = max(plan["phases_gib"], key=plan["phases_gib"].get)
    verdict = "It fits" if plan["fits"] else f"It does not fit: {worst} needs {plan['peak_gib']:.1f} GiB"
    if plan["fits"] and not found["auditor"]["fits"]:
        verdict = "The learner fits, and the auditor does not"
    if not plan["fits"]:
        verdict += f". Next: {_next_step(found)}"
    return "\n".join([*lines, "", f"{verdict}. An exclamation mark marks more than a card has."])


def _next_step(found: dict[str, Any]) -> str:
    """Return the mildest change with which the learner fits on these cards, as far as the ways show one."""
    settings = found["settings"]
    here = [way for way in found["ways"] if way["cards"] == found["card"]["count"]]
    for way in sorted(here, key=lambda way: way["lora_rank"] != settings["lora_rank"]):
        changes = {name: way[name] for name in ("lora_rank", "gradient_checkpointing") if way[name] != settings[name]}
        if way["fits"] and changes:
            said = " and ".join(f"learner.{name} = {json.dumps(value)}" for name, value in changes.items())
            return f"{said} needs {way['peak_gib']:.1f} GiB"
    return "a smaller learner.micro_batch_tokens, more cards, or --prompt-tokens if your prompts are shorter"


def _way(row: dict[str, Any]) -> str:
    name = f"LoRA of rank {row['lora_rank']}" if row["lora_rank"] else "all weights"
    return f"{name}, layers computed twice" if row["gradient_checkpointing"] else name
