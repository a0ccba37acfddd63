"""What a round needs and what it may pay, told before anything of it is downloaded.

- From what everybody may read: the status and the standings. It is an estimate by the nodes that work there now, and
  says so; where nothing is known, it says that instead of a number.
- A range: from a slow quarter of these nodes, busy as they are now, to a fast quarter, busy all the time; never more
  than what is left of the budget.
"""

from collections.abc import Iterator
from statistics import quantiles
from typing import Any, NamedTuple

import trio

from protocol.errors import Unreachable
from protocol.text.plain import counted
from protocol.wire.signing import NodeKey
from swarm_node.coordinator_api.client import Coordinator
from swarm_node.coordinator_api.join_string import JoinString
from swarm_node.doctor import cards, report, storage
from swarm_node.doctor.examine import ask, config_bytes, weights_bytes
from swarm_node.engine.precision import Model, describe_model
from swarm_node.machine import gpu
from swarm_node.member import MemberSettings

PATIENCE_S = 20.0

CLASSES_MAX = 16
"""Classes that are read of an answer; a round admits fewer."""

NODES_MIN = 2
"""The fewest nodes from which earnings are estimated."""

NO_WAIT = "low; training is not waiting for samples now"
LABELS = {"disk": "Disk", "vram": "GPU memory"}


class Forecast(NamedTuple):
    """Micro-units an hour, or why nobody can tell."""

    low: int = 0
    high: int = 0
    unknown: str = ""


def forecast(status: dict[str, Any], rows: list[dict[str, Any]], *, price: int) -> Forecast:
    """What a node may earn here at this price."""
    if price > status.get("max_price_micros_per_mtok", price):
        return Forecast(
            unknown=f"this round pays at most {status['max_price_micros_per_mtok']} micro-units per million tokens"
        )
    if status.get("finished"):
        return Forecast(unknown="the round is finished")
    alive = [row for row in rows if row["last_seen_ms"] >= status["as_of_ms"] - 60_000 and row["tokens_per_s"] > 0]
    if len(alive) < NODES_MIN:
        return Forecast(unknown=f"{counted(len(alive), 'node works', 'nodes work')} here, too few for an estimate")
    slow, _, fast = quantiles((row["tokens_per_s"] for row in alive), n=4, method="inclusive")
    busy = sum(row["phase"] == "generating" for row in alive) / len(alive)
    budget = max(0, int(status["budget_micros"]))
    low, high = (min(budget, int(rate * 3600 * price / 1e6)) for rate in (slow * busy, fast))
    return Forecast(low, high)


def lines(status: dict[str, Any], rows: list[dict[str, Any]], *, price: int) -> Iterator[str]:
    """Demand and earnings, as people read them."""
    fleet = status.get("fleet") or []
    works = sum(1 for one in fleet if one["works"])
    here = counted(status["nodes_alive"], "active node")
    if status["finished"]:
        here = "finished"
    elif fleet:
        here += f", {works} selected for work, {len(fleet) - works} on standby"
    elif status["nodes_alive"]:
        here += ", all selected for work"
    yield f"Round: {here}; update {status['update']} of {status['max_updates']}"
    idle = status.get("learner_idle_share_lately", 0.0)
    left = f"remaining budget: {status['budget_micros']:,} micro-units"
    waits = f"training waits for samples {idle:.0%} of the time" if idle >= 0.005 else NO_WAIT
    yield f"Demand: {waits}; {left}"
    found = forecast(status, rows, price=price)
    if found.unknown:
        yield f"Earnings: unknown: {found.unknown}"
    else:
        spread = f"{found.low:,} to {found.high:,} micro-units per hour"
        yield f"Earnings: about {spread}, based on the nodes that work here now"


def understood(status: dict[str, Any], rows: list[dict[str, Any]], *, price: int) -> list[str]:
    """The same of what a coordinator really said, which nobody has signed: it may be another version's, or nonsense."""
    try:
        said = list(lines(status, rows, price=price))
    except (LookupError, TypeError, ValueError, ArithmeticError, AttributeError):
        return ["Demand and earnings: unknown: this version of swarm-node cannot read the coordinator's figures"]
    # A terminal obeys control characters, and these lines have a stranger's values in them.
    return ["".join(letter if letter.isprintable() else "?" for letter in line) for line in said]


async def print_preview(settings: MemberSettings, key: NodeKey) -> list[str]:
    """Demand, earnings, and the model against this machine; raises where the coordinator cannot be asked or trusted."""
    with trio.move_on_after(PATIENCE_S):
        return await _look(settings.join, settings, key)
    raise Unreachable(f"The coordinator at {settings.join.url} did not respond within {PATIENCE_S:.0f} s.")


class Published(NamedTuple):
    """A description of its model that a round gives before anything of it is downloaded."""

    model: Model | None
    """None while no version is published."""
    classes: tuple[str, ...]
    """Classes of numerics that it admits; none: any. The coordinator says so, and nobody signs it."""


async def published(settings: MemberSettings, key: NodeKey) -> Published:
    """Ask for the model; its sizes and its configuration are checked against what the round signs."""
    with trio.move_on_after(PATIENCE_S):
        coordinator = Coordinator(settings.join.url, settings.join.round_id, key)
        try:
            classes = (await coordinator.status()).get("classes")
            found = await ask(coordinator, settings.join)
            config = await config_bytes(found)
        finally:
            await coordinator.close()
        sound = isinstance(classes, list) and all(isinstance(one, str) and one.isprintable() for one in classes)
        weights = weights_bytes(found)
        model = None if weights is None else await trio.to_thread.run_sync(describe_model, weights, config)
        return Published(model, tuple(classes)[:CLASSES_MAX] if sound and classes else ())
    raise Unreachable(f"The coordinator at {settings.join.url} did not respond within {PATIENCE_S:.0f} s.")


async def _look(join: JoinString, settings: MemberSettings, key: NodeKey) -> list[str]:
    coordinator = Coordinator(join.url, join.round_id, key)
    try:
        status, rows = await coordinator.status(), await coordinator.leaderboard()
        said = understood(status, rows, price=settings.price_micros_per_mtok)
        round_ = await ask(coordinator, join)
    finally:
        await coordinator.close()
    size = sum(entry.size_bytes for entry in round_.manifest.files) if round_.manifest else None
    seen = await trio.to_thread.run_sync(gpu.find_cards)
    findings = (storage.space(settings.home, size), cards.memory(seen, weights_bytes(round_)))
    return said + [
        f"{LABELS.get(one.check, one.check)}: {one.said} {one.evidence}".rstrip()
        for one in findings
        if one.state != report.CheckState.SKIP
    ]
