"""The training page: is the policy learning, does the learner wait and why, and what does a step cost.

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
from protocol.text.plain import plural

ROWS_MAX = 100
"""The last so many are listed; the curve has all of them."""

COLUMNS = (
    Column("version"),
    Column("update", screen=Screen.TABLET),
    Column("samples", "trained on until then", screen=Screen.DESKTOP),
    Column("tokens", "trained on until then", screen=Screen.DESKTOP),
    Column("seconds", "since the round began", screen=Screen.DESKTOP),
    Column("cost", "credited for what was trained on until then", screen=Screen.TABLET),
    Column("split", is_text=True),
    Column("average", "mean score of the samples, over problems"),
    Column("95 %", "the interval holds the true average 95 times in 100", is_text=True),
    Column("pass@k", "the chance that one of k samples is right", is_text=True, screen=Screen.TABLET),
    Column("state", is_text=True),
)


def evaluation_parts(rows: Sequence[Mapping[str, Any]]) -> Any:
    """Curves by split, then the table, the newest first."""
    made = [
        _curve(number, split, list(of_split))
        for number, (split, of_split) in enumerate(groupby(sorted(rows, key=itemgetter("split")), itemgetter("split")))
    ]
    listed = [_row(row) for row in reversed(rows[-ROWS_MAX:])]
    return el("div", made, class_="charts"), table("Evaluations", COLUMNS, listed, empty="Nothing was evaluated yet.")


def _curve(number: int, split: str, rows: Sequence[Mapping[str, Any]]) -> Any:
    done = sorted((row for row in rows if row["result"]), key=itemgetter("update"))
    low, high = ([(row["update"], row["result"]["interval"][place]) for row in done] for place in (0, 1))
    curves = {"average": [(row["update"], row["result"]["average"]) for row in done], "low": low, "high": high}
    drawn = {name: thinned(points) for name, points in curves.items()} if done else {}
    return charts.lines(
        f"eval-{number}",
        f"{split.replace('_', '-')} average, and its interval of 95 %",
        "update",
        drawn,
        from_zero=True,
        interval=("low", "high"),
    )


def _row(row: Mapping[str, Any]) -> list[Any]:
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
        words.figure(row["cost"]),
        row["split"].replace("_", "-"),
        *figures,
        state,
    ]


FLEET_COLUMNS = (
    Column("node", is_text=True),
    Column("part", is_text=True),
    Column("groups/s"),
    Column("credit/s", screen=Screen.TABLET),
    Column("since", is_text=True, screen=Screen.TABLET),
    Column("because", is_text=True),
)
INCIDENT_COLUMNS = (
    Column("when", is_text=True),
    Column("node", is_text=True),
    Column("what", is_text=True),
    Column("times"),
    Column("detail", is_text=True, screen=Screen.TABLET),
)

ORDER_COLUMNS = (
    Column("when", is_text=True),
    Column("order", is_text=True),
    Column("about", is_text=True),
    Column("why", is_text=True),
)


@dataclass(frozen=True)
class Training:
    """The figures of one moment."""

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
    """How old the figures are when the page is made; 0 while that does not matter."""


def render(figures: Training) -> str:
    """The page."""
    status = figures.status
    return document(
        "Training",
        "/training",
        figures.join_string,
        strip(status, figures.now_ms, figures.age_ms),
        live("health", _health(status), heading="Health"),
        live("learning", _learning(figures), heading="Learning"),
        live("evaluations", evaluation_parts(figures.evaluations), heading="Evaluations"),
        live("pace", _pace(figures), heading="Pace"),
        live("broadcast", _broadcast(figures), heading="Broadcasts"),
        live("fleet", _fleet(status), heading="Fleet"),
        live("incidents", _incidents(figures.incidents), heading="Incidents"),
        live("orders", _orders(figures.orders), heading="Orders"),
    )


def _health(status: Mapping[str, Any]) -> Markup:
    age, load = status["age"], status["load"]
    facts = {
        "learner idle in all": words.percent(status["learner_idle_share"]),
        "wasted work": words.percent(status["in_vain_share"]),
        "age of groups": f"mean {age['mean']:.1f}, p99 {age['p99']}, most {age['max']}",
        "bound S": f"{bound_in_force(status)} {plural(status['staleness'], 'update')}",
        "a version every": words.counted(status["publish_every"], "update"),
        "late work longer by": words.DASH if status["length_bias"] is None else f"{status['length_bias']:.2f} ×",
        "budget left": words.whole(status["budget_micros"]),
    }
    if load:
        facts |= {
            "update takes": words.seconds(load["train_s"]),
            "broadcast takes": words.seconds(load["broadcast_s"]),
            "a group takes": words.seconds(load["rollout_s"]),
        }
    ends = ", ".join(f"{words.whole(count)} {name}" for name, count in sorted(status["leases"].items()))
    refused = ", ".join(f"{words.whole(count)} {code}" for code, count in sorted(status["rejected"].items()))
    vain = ", ".join(f"{words.whole(count)} {why}" for why, count in sorted(status["in_vain"].items()))
    return el(
        "div",
        el("dl", (el("div", el("dt", name), el("dd", value)) for name, value in facts.items()), class_="facts"),
        el(
            "p",
            f"Leases: {ends or 'none yet'}. Refused: {refused or 'nothing'}. In vain: {vain or 'nothing'}.",
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
    share, cost = {"idle share": figures.idle_share}, {"credit": figures.cost_micros}
    return el(
        "div",
        charts.lines(
            "idle", "share of its time that the learner waited", "update", share, tell=words.percent, from_zero=True
        ),
        charts.lines("cost", "credit for the groups of an update", "update", cost, from_zero=True),
        charts.bars("ages", "groups trained on, by age in updates", "age", figures.ages),
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
        "from publication to the first token",
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
    rows = [
        [
            node_link(one["node_id"], one["name"]),
            "works" if one["works"] else "stands by",
            words.figure(one["groups_per_s"]),
            words.figure(one["cost_micros_per_s"]),
            words.moment(one["since_ms"]),
            one["reason"],
        ]
        for one in status["fleet"]
    ]
    working = [one for one in status["fleet"] if one["works"]]
    spent = sum(one["cost_micros_per_s"] for one in working)
    load = status["load"]
    empty = "Everybody works." if status["nodes_alive"] else "Nobody is there."
    told = None
    if working and load:
        told = el(
            "p", f"Together {words.figure(spent)} credit/s, at most {words.figure(spent * load['train_s'])} a step."
        )
    return told, table("Who works and who stands by", FLEET_COLUMNS, rows, empty=empty)


def _incidents(incidents: Sequence[Incident]) -> Markup:
    rows = [
        [
            words.moment(one.ms),
            node_link(one.node_id, one.name) if one.node_id else one.name,
            el("code", one.what),
            words.whole(one.count),
            words.line(one.detail),
        ]
        for one in incidents
    ]
    return table("What went wrong lately", INCIDENT_COLUMNS, rows, empty="Nothing went wrong.")


def _orders(orders: Sequence[Mapping[str, Any]]) -> Markup:
    """Not by whom: the account and the machine that an order came from are the operator's own business."""
    rows = [
        [
            words.moment(one["given_ms"]),
            one["action"],
            el("code", words.line(one["subject"])),
            words.line(one["reason"]),
        ]
        for one in orders
    ]
    return table("What the operator ordered, the newest first", ORDER_COLUMNS, rows, empty="Nothing was ordered.")
