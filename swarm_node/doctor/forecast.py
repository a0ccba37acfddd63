"""Estimate of a node's earnings in a round before it joins: price × speed × demand, and how sure the estimate is.

- The speed is the one that this machine had in this round (`swarm-node bench`, or the last run of the agent). Without
  it, the range is that of the nodes that work there now; without nodes, only the worth of 100 tokens/s is known.
- Where rounds are compared, the speed in another round with a model of a similar size is scaled by the size of the
  weights, which are read once for each token.
- The demand is between the share of the nodes that sample now and all of the time. A round without nodes has work for
  the first one all of the time, until its learner has enough.
- Nothing is estimated beyond the remaining budget, and nothing per day: a round may end within the hour.
- Amounts are micro-units; the coordinator's figures are not signed.
"""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from statistics import quantiles
from typing import Any, NamedTuple

from protocol.text.money import Unit, next_payout
from protocol.text.plain import counted, duration_text, plural
from swarm_node.base.disk import write_durably

FILE = "speed.json"
"""The file in a round's folder with the last measured speed."""

ALIVE_MS = 60_000
NODES_MIN = 2
"""Smallest number of nodes for an estimate from others' speeds."""

TOKENS_PER_S = 100
"""The speed whose worth is stated without an estimate."""

SPEED_MAX = 1e9

CLASSES_SHOWN = 4
"""Exact classes of the round's auditors that are shown."""


class MeasuredSpeed(NamedTuple):
    """The sampling speed of this machine in a round, and when it was measured."""

    tokens_per_s: float
    measured_ms: int
    scaled_by: float = 0.0
    """The factor by which the speed in another round was scaled to this round's model; 0 if it was measured here."""

    def age_text(self, now_ms: int) -> str:
        """Return the age; a clock that was set back gives none."""
        return duration_text(max(0, now_ms - self.measured_ms) / 1000)


def record_speed(folder: Path, tokens_per_s: float, now_ms: int) -> None:
    """Save the speed that was measured in a round, if its folder exists."""
    if tokens_per_s > 0 and folder.is_dir():
        data = json.dumps({"tokens_per_s": tokens_per_s, "measured_ms": now_ms}).encode()
        write_durably(folder / FILE, data, temp_folder=folder)


def find_speed(folder: Path) -> MeasuredSpeed | None:
    """Return the speed measured in a round; None if there is none that can be read."""
    try:
        value = json.loads((folder / FILE).read_bytes())
        speed, measured_ms = float(value["tokens_per_s"]), int(value["measured_ms"])
    except (OSError, ValueError, LookupError, TypeError, OverflowError):
        return None
    return MeasuredSpeed(speed, measured_ms) if 0 < speed < SPEED_MAX else None


class Forecast(NamedTuple):
    """Estimated earnings in micro-units per hour and their basis, or the reason why there is no estimate."""

    low: int = 0
    high: int = 0
    basis: str = ""
    unknown: str = ""


def forecast(
    status: Mapping[str, Any],
    rows: list[dict[str, Any]],
    *,
    price: int,
    unit: Unit,
    speed: MeasuredSpeed | None = None,
) -> Forecast:
    """Estimate the earnings of a node in this round at this price."""
    if status.get("finished"):
        return Forecast(unknown="the round is finished")
    if price > status.get("max_price_micros_per_mtok", price):
        return Forecast(unknown=f"this round pays at most {unit.price(status['max_price_micros_per_mtok'])}")
    budget = max(0, int(status["budget_micros"]))
    alive = [row for row in rows if row["last_seen_ms"] >= status["as_of_ms"] - ALIVE_MS and row["tokens_per_s"] > 0]
    sampling = sum(row["phase"] == "generating" for row in alive)
    busy = sampling / len(alive) if alive else 1.0
    if speed is not None:
        slow = fast = speed.tokens_per_s
        basis = f"from {_speed_source(speed, int(status['as_of_ms']))}. {_certainty(speed, sampling, len(alive))}"
    elif len(alive) >= NODES_MIN:
        slow, _, fast = quantiles((row["tokens_per_s"] for row in alive), n=4, method="inclusive")
        basis = (
            f"from the speeds of {len(alive)} nodes here. Rough: this machine's own speed in this round is not known"
        )
    else:
        few = counted(len(alive), "node has", "nodes have")
        return Forecast(unknown=f"{few} reported a speed here, and this machine's own speed in this round is not known")
    low, high = (min(budget, int(rate * 3600 * price / 1e6)) for rate in (slow * busy, fast))
    return Forecast(low, high, basis)


def _speed_source(speed: MeasuredSpeed, as_of_ms: int) -> str:
    """Return where a speed comes from."""
    if speed.scaled_by:
        return f"{speed.tokens_per_s:,.0f} tokens/s, estimated from this machine's speed in another round"
    age = speed.age_text(as_of_ms)
    return f"the {speed.tokens_per_s:,.0f} tokens/s that this machine reached in this round {age} ago"


def _certainty(speed: MeasuredSpeed, sampling: int, alive: int) -> str:
    """Return how sure an estimate is: rough if the speed is scaled, or if some nodes have no work now."""
    if not alive:
        others = "no node works here yet"
    else:
        others = f"{sampling} of {counted(alive, 'node')} here {plural(sampling, 'samples', 'sample')} now"
    return f"{'Fairly sure while there is work' if sampling == alive and not speed.scaled_by else 'Rough'}: {others}"


def hourly_text(estimate: Forecast, unit: Unit) -> str:
    """Return the expected earnings per hour; without work for the nodes that are here, only their upper bound."""
    if not estimate.low and estimate.high:
        return f"up to {unit.amount(estimate.high)} per hour, while there is work"
    return f"about {unit.between(estimate.low, estimate.high)} per hour"


def lines(
    status: Mapping[str, Any], rows: list[dict[str, Any]], *, price: int, unit: Unit, speed: MeasuredSpeed | None = None
) -> Iterator[str]:
    """Yield price, expected earnings and payments so far as lines of text."""
    worth = TOKENS_PER_S * 3600 * price / 1e6
    is_open = not status.get("finished")
    if is_open:
        asked = f"{unit.price(price)} (--price {price})"
        yield f"Price: you ask {asked}: {TOKENS_PER_S} tokens/s earn {unit.amount(worth)} per hour of work"
    if is_open and (bonus := float(status.get("exact_bonus", 0))):
        classes = " or ".join(str(name) for name in list(status.get("exact_classes") or ())[:CLASSES_SHOWN])
        here = f"class {classes}" if classes else "none yet: no auditor has met such work"
        yield f"Bonus: {bonus:.2%} more with --dtype exact, from the first audit that repeats this node's bits: {here}"
    estimate = forecast(status, rows, price=price, unit=unit, speed=speed)
    if not is_open:
        yield f"Earnings: none: {estimate.unknown}"
    elif estimate.unknown:
        yield f"Earnings: unknown: {estimate.unknown}"
    elif not int(status["budget_micros"]) or not price:
        yield "Earnings: none: " + ("you ask nothing" if not price else "the round's budget is used up")
    else:
        yield f"Earnings: {hourly_text(estimate, unit)}, {estimate.basis}"
    if payouts := status.get("payouts"):
        paid = f"{unit.exact(payouts['paid_micros'])} in {counted(payouts['batches'], 'payout')} so far"
        due = next_payout(unit, payouts["next_ms"], payouts["minimum_micros"], int(status["as_of_ms"]))
        yield f"Payouts: {paid if payouts['batches'] else 'none so far'}; next payout: {due}"
