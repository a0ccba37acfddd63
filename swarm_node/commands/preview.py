"""Preview of a round before anything is downloaded: its demand and the expected earnings.

- Based on public data: the status and the leaderboard. `swarm_node.doctor.forecast` has the estimate.
- The unit of the amounts is signed: it comes from the round's first root.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import httpx
import trio

from protocol.errors import ConfigInvalid, Unreachable
from protocol.text.money import Unit
from protocol.text.plain import counted
from protocol.wire.signing import NodeKey
from swarm_node.coordinator_api.client import Coordinator
from swarm_node.coordinator_api.join_string import JoinString, round_folder
from swarm_node.doctor import cards, forecast, report
from swarm_node.doctor.examine import ask, config_bytes, description_texts, splits_of, weights_bytes
from swarm_node.doctor.forecast import MeasuredSpeed
from swarm_node.doctor.line import clock
from swarm_node.engine.precision import Model, describe_model
from swarm_node.keys import identity
from swarm_node.machine import gpu
from swarm_node.member import MemberSettings
from swarm_node.versions.updater import round_unit

PATIENCE_S = 20.0

CLASSES_MAX = 16
"""Limit of numerics classes read from an answer; a round admits fewer."""

NO_WAIT = "low; training is not waiting for samples now"
FIRST_NODE = "high; no node works here, and training waits for the first one"
IN_USE_MS = 15_000
"""Age of a heartbeat up to which its agent probably still runs."""

LABELS = {"disk": "Disk", "vram": "GPU memory", "clock": "Clock"}


def lines(
    status: dict[str, Any], rows: list[dict[str, Any]], *, price: int, unit: Unit, speed: MeasuredSpeed | None = None
) -> Iterator[str]:
    """Yield demand and earnings as lines of text."""
    fleet = status.get("fleet") or []
    works = sum(1 for row in fleet if row["works"])
    nodes = counted(status["nodes_alive"], "active node")
    if status["finished"]:
        nodes = "finished; it gives no more work"
    elif fleet:
        nodes += f", {works} selected for work, {len(fleet) - works} on standby"
    elif status["nodes_alive"]:
        nodes += ", all selected for work"
    yield f"Round: {nodes}; update {status['update']} of {status['max_updates']}"
    idle = status.get("learner_idle_share_lately", 0.0)
    left = f"remaining budget: {unit.amount(status['budget_micros'])}"
    if status["finished"]:
        yield from forecast.lines(status, rows, price=price, unit=unit, speed=speed)
        return
    waits = f"training waits for samples {idle:.0%} of the time" if idle >= 0.005 else NO_WAIT
    if not status["nodes_alive"]:
        waits = FIRST_NODE
    yield f"Demand: {waits}; {left}"
    yield from forecast.lines(status, rows, price=price, unit=unit, speed=speed)


def understood(
    status: dict[str, Any], rows: list[dict[str, Any]], *, price: int, unit: Unit, speed: MeasuredSpeed | None = None
) -> list[str]:
    """Return the lines for a coordinator's unsigned answer, which may come from another version or be invalid."""
    try:
        said = list(lines(status, rows, price=price, unit=unit, speed=speed))
    except (LookupError, TypeError, ValueError, ArithmeticError, AttributeError):
        return ["Demand and earnings: unknown: this version of swarm-node cannot read the coordinator's figures"]
    # The lines contain untrusted values, and a terminal would obey control characters in them.
    return ["".join(letter if letter.isprintable() else "?" for letter in line) for line in said]


class RoundPreview(NamedTuple):
    """Public figures of a round before it is joined, as text."""

    lines: list[str]
    why_not: str = ""
    """Reason why it cannot be joined now; empty if nothing speaks against it."""


def why_not(status: Mapping[str, Any], price: int, unit: Unit, findings: Sequence[report.CheckResult] = ()) -> str:
    """Return why a round cannot be joined now; empty if nothing speaks against it.

    It is finished, pays less, or the disk is full or the clock wrong.
    """
    maximum = status.get("max_price_micros_per_mtok")
    if status.get("finished") is True:
        return "the round is finished, and gives no more work"
    if isinstance(maximum, int) and price > maximum:
        return f"it pays at most {unit.price(maximum)}, and you ask {unit.price(price)}"
    failed = (finding for finding in findings if finding.state is report.CheckState.FAIL)
    reason = next((finding for finding in failed if finding.check in ("disk", "clock")), None)
    return f"{reason.said} {reason.next_step}".rstrip(".") if reason else ""


async def preview_round(settings: MemberSettings, key: NodeKey, *, joins_cards: bool = False) -> RoundPreview:
    """Return demand, earnings and the checks of the model; raise an error without a trusted answer.

    `joins_cards` says that this node samples with vLLM, for which several cards may hold the model together.
    """
    with trio.move_on_after(PATIENCE_S):
        return await _describe_round(settings.join, settings, key, joins_cards=joins_cards)
    raise Unreachable(f"The coordinator at {settings.join.url} did not respond within {PATIENCE_S:.0f} s.")


async def ask_before_move(join: JoinString, key: NodeKey) -> None:
    """Raise an error unless the coordinator responds, serves the round of the join string, and has work to come."""
    with trio.move_on_after(PATIENCE_S):
        coordinator = Coordinator(join.url, join.round_id, key)
        try:
            return await require_open(coordinator, join)
        finally:
            await coordinator.close()
    raise Unreachable(f"The coordinator at {join.url} did not respond within {PATIENCE_S:.0f} s.")


async def require_open(coordinator: Coordinator, join: JoinString) -> None:
    """Raise an error if the round is finished, or is another one than the join string names."""
    await round_unit(coordinator.origin, join.round_id)
    if (await coordinator.status()).get("finished"):
        raise ConfigInvalid(
            f"The round at {join.url} is finished: it has no more work.", hint="`swarm-node rounds` lists rounds."
        )


class Published(NamedTuple):
    """Published description of a round's model."""

    model: Model | None
    """None while no version is published."""
    classes: tuple[str, ...]
    """Classes of numerics that the round admits; empty: any. The coordinator's answer is not signed."""


async def published(join: JoinString, key: NodeKey, transport: httpx.AsyncBaseTransport | None = None) -> Published:
    """Request the description of the model; its sizes and its configuration are checked against signed documents."""
    with trio.move_on_after(PATIENCE_S):
        coordinator = Coordinator(join.url, join.round_id, key, transport)
        try:
            classes = (await coordinator.status()).get("classes")
            round_ = await ask(coordinator, join)
            config = await config_bytes(round_)
        finally:
            await coordinator.close()
        sound = isinstance(classes, list) and all(isinstance(name, str) and name.isprintable() for name in classes)
        weights = weights_bytes(round_)
        model = None if weights is None else await trio.to_thread.run_sync(describe_model, weights, config)
        return Published(model, tuple(classes)[:CLASSES_MAX] if sound and classes else ())
    raise Unreachable(f"The coordinator at {join.url} did not respond within {PATIENCE_S:.0f} s.")


async def _describe_round(
    join: JoinString, settings: MemberSettings, key: NodeKey, *, joins_cards: bool
) -> RoundPreview:
    coordinator = Coordinator(join.url, join.round_id, key)
    try:
        status, rows = await coordinator.status(), await coordinator.leaderboard()
        unit = await round_unit(coordinator.origin, join.round_id)
        speed = forecast.find_speed(round_folder(settings.home, join))
        said = understood(status, rows, price=settings.price_micros_per_mtok, unit=unit, speed=speed)
        round_ = await ask(coordinator, join)
        seen = await trio.to_thread.run_sync(gpu.find_cards)
        splits = await splits_of(round_, seen)
    finally:
        await coordinator.close()
    size = sum(entry.size_bytes for entry in round_.manifest.files) if round_.manifest else None
    memory = cards.memory(seen, weights_bytes(round_), splits=splits, joins_cards=joins_cards)
    findings = [cards.space(settings.home, size), memory]
    if (timing := clock(coordinator.clock_offset_s)).state is not report.CheckState.OK:
        findings.append(timing)
    about = [f"{name.capitalize()}: {text}" for name, text in description_texts(round_).items()]
    in_use = [] if identity.has_agent(settings.home) else key_in_use(status, rows, key.node_id)
    checks = [finding_line(each) for each in findings if each.state != report.CheckState.SKIP]
    return RoundPreview(about + said + checks + in_use, why_not(status, settings.price_micros_per_mtok, unit, findings))


def finding_line(finding: report.CheckResult) -> str:
    """Return a finding as a line of text; one that is not good is a warning with its next step."""
    line = f"{LABELS.get(finding.check, finding.check)}: {finding.said} {finding.evidence}".rstrip()
    return line if finding.state is report.CheckState.OK else f"WARNING: {line}. {finding.next_step}".rstrip()


def key_in_use(status: dict[str, Any], rows: list[dict[str, Any]], node_id: str) -> list[str]:
    """Return a warning if a node with this key was active just now, though no agent runs in this home."""
    try:
        ago_ms = [status["as_of_ms"] - row["last_seen_ms"] for row in rows if _is_active(row, node_id)]
        if not ago_ms or min(ago_ms) > IN_USE_MS:
            return []
        ago_s = max(0, int(min(ago_ms))) // 1000
    except (LookupError, TypeError, ValueError):  # the coordinator's answer is not signed
        return []
    return [
        f"WARNING: Key: an agent with this node's key was active {ago_s} s ago, and none runs in this folder. Two "
        "agents with one key replace each other's name and address. If one runs on another machine, stop it, or remove "
        "the copied node.key there: the next start makes a new key. If this agent has just crashed, wait "
        f"{IN_USE_MS // 1000} s and ignore this warning."
    ]


def _is_active(row: dict[str, Any], node_id: str) -> bool:
    return bool(row["node_id"] == node_id and row["phase"] != "left")
