"""The training page: learning curves, the learner's waiting time and its causes, and the cost of an update.

Evaluations are shown as a curve for each split, and as a table with all axes.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import attrgetter, itemgetter
from typing import Any

from coordinator.pages import charts, tree, words
from coordinator.pages.html import Markup, el
from coordinator.pages.layout import Column, Screen, document, live, node_link, strip, table
from coordinator.reports.curves import REWARD, Branch, BroadcastSpread, Point, thinned
from coordinator.reports.history import Incident
from coordinator.reports.overview import bound_in_force
from protocol.text.money import MICROS, Unit, parse_unit
from protocol.text.plain import plural

ROWS_MAX = 100
"""Number of evaluations in the table, the newest; the curve has all."""

COLUMNS = (
    Column("version"),
    Column("update", screen=Screen.TABLET),
    Column("samples", "total trained on", screen=Screen.DESKTOP),
    Column("tokens", "total trained on", screen=Screen.DESKTOP),
    Column("seconds", "since the start of the round", screen=Screen.DESKTOP),
    Column("cost", "total credit for the samples trained on", screen=Screen.TABLET),
    Column("split", is_text=True),
    Column("average", "mean score over all problems"),
    Column("95 %", "95 % confidence interval of the average", is_text=True),
    Column("pass@k", "probability that at least one of k samples is right", is_text=True, screen=Screen.TABLET),
    Column("state", is_text=True),
)


def evaluation_parts(rows: Sequence[Mapping[str, Any]], unit: Unit) -> Any:
    """Build a curve for each split and the table of evaluations, newest first."""
    made = [
        _curve(number, split, list(of_split))
        for number, (split, of_split) in enumerate(groupby(sorted(rows, key=itemgetter("split")), itemgetter("split")))
    ]
    listed = [_row(row, unit) for row in reversed(rows[-ROWS_MAX:])]
    return el("div", made, class_="charts"), table(
        f"Evaluations; costs in {unit.name}", COLUMNS, listed, empty="No evaluations yet."
    )


def _curve(number: int, split: str, rows: Sequence[Mapping[str, Any]]) -> Any:
    done = sorted((row for row in rows if row["result"]), key=itemgetter("update"))
    low, high = ([(row["update"], row["result"]["interval"][place]) for row in done] for place in (0, 1))
    curves = {"average": [(row["update"], row["result"]["average"]) for row in done], "low": low, "high": high}
    drawn = {name: thinned(points) for name, points in curves.items()} if done else {}
    return charts.lines(
        f"eval-{number}",
        f"{split.replace('_', '-')} average with its 95 % interval",
        "update",
        drawn,
        from_zero=True,
        interval=("low", "high"),
    )


def _row(row: Mapping[str, Any], unit: Unit) -> list[Any]:
    result = row["result"]
    figures = [words.DASH] * 3
    if result:
        low, high = result["interval"]
        passed = (f"@{j} {words.figure(share)}" for j, share in result["passed"].items())
        figures = [words.figure(result["average"]), f"{words.figure(low)} to {words.figure(high)}", ", ".join(passed)]
    state = row["state"] if row["state"] == "done" else f"{row['state']}, {row['answered']} of {row['problems']}"
    return [
        words.whole(row["version"]),
        words.whole(row["update"]),
        words.whole(int(row["samples"])),
        words.whole(int(row["tokens"])),
        words.figure(row["seconds"]),
        words.sum_of(unit, row["cost"]),
        row["split"].replace("_", "-"),
        *figures,
        state,
    ]


FLEET_COLUMNS = (
    Column("node", is_text=True),
    Column("role", is_text=True),
    Column("groups/s"),
    Column("credit/s", screen=Screen.TABLET),
    Column("since", is_text=True, screen=Screen.TABLET),
    Column("reason", is_text=True),
)
INCIDENT_COLUMNS = (
    Column("when", is_text=True),
    Column("node", is_text=True),
    Column("event", is_text=True),
    Column("times"),
    Column("detail", is_text=True, screen=Screen.TABLET),
)

ORDER_COLUMNS = (
    Column("when", is_text=True),
    Column("order", is_text=True),
    Column("subject", is_text=True),
    Column("reason", is_text=True),
)


@dataclass(frozen=True)
class Training:
    """The figures of training at one moment."""

    status: Mapping[str, Any]
    metrics: Mapping[str, Sequence[Point]]
    evaluations: Sequence[Mapping[str, Any]]
    idle_share: Sequence[Point]
    cost_micros: Sequence[Point]
    ages: Sequence[Point]
    spreads: Sequence[BroadcastSpread]
    branches: Sequence[Branch]
    incidents: Sequence[Incident]
    orders: Sequence[Mapping[str, Any]]
    now_ms: int
    join_string: str
    age_ms: int = 0
    """Age of the figures when the page is built; 0 while they are fresh enough."""


def render(figures: Training) -> str:
    """Return the training page as HTML."""
    status = figures.status
    return document(
        "Training",
        "/training",
        figures.join_string,
        strip(status, figures.now_ms, figures.age_ms),
        live("health", _health(status), heading="Health"),
        live("learning", _learning(figures), heading="Learning"),
        live(
            "evaluations", evaluation_parts(figures.evaluations, parse_unit(status.get("unit"))), heading="Evaluations"
        ),
        live("pace", _pace(figures), heading="Pace"),
        live("broadcast", _broadcast(figures), heading="Broadcasts"),
        live("fleet", _fleet(status), heading="Fleet"),
        live("incidents", _incidents(figures.incidents), heading="Incidents"),
        live("orders", _orders(figures.orders), heading="Orders"),
    )


def _health(status: Mapping[str, Any]) -> Markup:
    age, load = status["age"], status["load"]
    facts = {
        "learner idle, whole round": words.percent(status["learner_idle_share"]),
        "wasted work": words.percent(status["in_vain_share"]),
        "staleness in updates": f"mean {age['mean']:.1f}, p99 {age['p99']}, max {age['max']}",
        "max staleness S": f"{bound_in_force(status)} {plural(status['staleness'], 'update')}",
        "publish interval": words.counted(status["publish_every"], "update"),
        "length bias": words.DASH if status["length_bias"] is None else f"{status['length_bias']:.2f} ×",
        "budget left": words.money(parse_unit(status.get("unit")), status["budget_micros"]),
    }
    if load:
        facts |= {
            "time per update": words.seconds(load["train_s"]),
            "time per broadcast": words.seconds(load["broadcast_s"]),
            "time per group": words.seconds(load["rollout_s"]),
        }
    ends = ", ".join(f"{words.whole(count)} {name}" for name, count in sorted(status["leases"].items()))
    refused = ", ".join(f"{words.whole(count)} {code}" for code, count in sorted(status["rejected"].items()))
    wasted = ", ".join(f"{words.whole(count)} {why}" for why, count in sorted(status["in_vain"].items()))
    return el(
        "div",
        el("dl", (el("div", el("dt", name), el("dd", value)) for name, value in facts.items()), class_="facts"),
        el(
            "p",
            f"Leases: {ends or 'none yet'}. Rejected: {refused or 'none'}. Wasted: {wasted or 'none'}.",
            class_="soft",
        ),
    )


def _learning(figures: Training) -> Markup:
    made = []
    status = figures.status
    for number, (name, points) in enumerate(figures.metrics.items()):
        shown = name.replace("_", " ")
        made.append(charts.lines(f"metric-{number}", shown, "update", {shown: points}, from_zero=name == REWARD))
    before, after = status["accuracy_before"], status["accuracy_after"]
    ends = [(0.0, before), (float(status["update"]), after)]
    points = [(x, accuracy) for x, accuracy in ends if accuracy is not None]
    made.insert(
        1,
        charts.lines(
            "evaluation", "held-out accuracy", "update", {"accuracy": points}, tell=words.percent, from_zero=True
        ),
    )
    return el("div", made, class_="charts")


def _pace(figures: Training) -> Markup:
    unit = parse_unit(figures.status.get("unit"))
    cost = {"credit": [(update, micros / MICROS) for update, micros in figures.cost_micros]}
    share = {"idle share": figures.idle_share}
    return el(
        "div",
        charts.lines(
            "idle", "share of time the learner waits for groups", "update", share, tell=words.percent, from_zero=True
        ),
        charts.lines("cost", f"{unit.name} per update", "update", cost, from_zero=True),
        charts.bars("ages", "groups trained on, by staleness in updates", "staleness", figures.ages),
        class_="charts",
    )


def _broadcast(figures: Training) -> Markup:
    curves = {
        name: [(float(spread.version), value) for spread in figures.spreads if (value := take(spread)) is not None]
        for name, take in (("median", attrgetter("median_s")), ("slowest", attrgetter("max_s")))
    }
    last = figures.status["broadcast"]
    spread = charts.lines(
        "t-bcast",
        "time from publication to the first token",
        "version",
        curves if any(curves.values()) else {},
        tell=words.seconds,
        from_zero=True,
    )
    return el(
        "div",
        el("div", spread, class_="charts"),
        el("h3", f"How version {last['version']} spread") if last else None,
        tree.picture(last["version"], figures.branches) if last else None,
    )


def _fleet(status: Mapping[str, Any]) -> Any:
    unit = parse_unit(status.get("unit"))
    rows = [
        [
            node_link(node["node_id"], node["name"]),
            "working" if node["works"] else "standby",
            words.figure(node["groups_per_s"]),
            words.sum_of(unit, node["cost_micros_per_s"]),
            words.moment(node["since_ms"]),
            node["reason"],
        ]
        for node in status["fleet"]
    ]
    working = [node for node in status["fleet"] if node["works"]]
    spent = sum(node["cost_micros_per_s"] for node in working)
    load = status["load"]
    empty = "All nodes are working." if status["nodes_alive"] else "No node is active."
    total = None
    if working and load:
        total = el(
            "p",
            f"Total {words.money(unit, spent)} per second, "
            f"at most {words.money(unit, spent * load['train_s'])} per update.",
        )
    return total, table("Working and standby nodes", FLEET_COLUMNS, rows, empty=empty)


def _incidents(incidents: Sequence[Incident]) -> Markup:
    rows = [
        [
            words.moment(incident.ms),
            node_link(incident.node_id, incident.name) if incident.node_id else incident.name,
            el("code", incident.what),
            words.whole(incident.count),
            words.line(incident.detail),
        ]
        for incident in incidents
    ]
    return table("Recent incidents", INCIDENT_COLUMNS, rows, empty="No incidents.")


def _orders(orders: Sequence[Mapping[str, Any]]) -> Markup:
    """Build the table of orders. It omits the account and machine that gave an order: these are private."""
    rows = [
        [
            words.moment(order["given_ms"]),
            order["action"],
            el("code", words.line(order["subject"])),
            words.line(order["reason"]),
        ]
        for order in orders
    ]
    return table("The operator's orders, newest first", ORDER_COLUMNS, rows, empty="No orders.")
