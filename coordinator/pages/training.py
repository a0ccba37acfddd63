"""The training page, by questions: is it learning, is it healthy, is the swarm fast; then fleet, incidents and orders.

Evaluations are shown as a curve for each split, and as a table with all axes; imported results of other suites below.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import attrgetter, itemgetter
from typing import Any

from coordinator.pages import charts, measured, metric_words, tree, words
from coordinator.pages.layout import Column, Screen, Site, document, facts, live, node_link, strip, table
from coordinator.pages.measured import quality
from coordinator.reports import overview
from coordinator.reports.curves import REWARD, Branch, BroadcastSpread, Point, thinned
from coordinator.reports.health import LENGTH_BIAS_MAX
from coordinator.reports.history import Incident
from coordinator.reports.overview import bound_in_force
from protocol.text.html import Markup, el
from protocol.text.money import MICROS, Unit, parse_unit
from protocol.text.plain import plural
from protocol.work.learning import EvaluationSamples

ROWS_MAX = 100
"""Number of evaluations in the table, the newest; the curve has all."""

GOOD_BIAS = f"good: at most {LENGTH_BIAS_MAX}; above, long answers come too late"

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


SUITE_COLUMNS = (
    Column("suite", is_text=True),
    Column("task", is_text=True),
    Column("metric", is_text=True),
    Column("version"),
    Column("value", "± standard error, if the suite reports one"),
    Column("samples", screen=Screen.TABLET),
    Column("imported", is_text=True, screen=Screen.DESKTOP),
)


def evaluation_parts(rows: Sequence[Mapping[str, Any]], unit: Unit, *, empty: str = "No evaluations yet.") -> Any:
    """Build a curve for each split and the table of evaluations, newest first; without any, say `empty`."""
    made = [
        _curve(number, split, list(of_split))
        for number, (split, of_split) in enumerate(groupby(sorted(rows, key=itemgetter("split")), itemgetter("split")))
    ]
    listed = [_row(row, unit) for row in reversed(rows[-ROWS_MAX:])]
    all_of_them = table(f"Evaluations; costs in {unit.name}", COLUMNS, listed, empty=empty)
    if listed:
        summary = el("summary", f"{words.counted(len(listed), 'evaluation')}, with intervals and pass@k")
        all_of_them = el("details", summary, all_of_them, id="evaluations-table")
    return el("div", made, class_="charts"), all_of_them


def suite_section(runs: Sequence[Mapping[str, Any]]) -> Markup | None:
    """Build the section of what other suites measured, the newest import first; None if nothing was imported."""
    if not runs:
        return None
    rows = [
        [
            f"{run['suite']} {run['release']}".rstrip(),
            el("bdi", words.line(metric["task"])),
            el("bdi", words.line(metric["metric"])),
            words.whole(run["version"]),
            overview.value_text(metric),
            words.DASH if metric["samples"] is None else words.whole(metric["samples"]),
            words.moment(run["imported_ms"]),
        ]
        for run in reversed(runs)
        for metric in run["results"]
    ]
    made = table("Results of other suites", SUITE_COLUMNS, rows[:ROWS_MAX], empty="")
    more = f"The newest {ROWS_MAX} of {words.whole(len(rows))} results; all are in /v1/evaluations."
    return live(
        "suites", made, el("p", more, class_="soft") if len(rows) > ROWS_MAX else None,
        heading="Measured by other suites",
        lead="Suites that queried a version through the swarm's endpoint. The operator imported their results; "
             "the swarm did not check them.",
    )  # fmt: skip


def _curve(number: int, split: str, rows: Sequence[Mapping[str, Any]]) -> Any:
    done = sorted((row for row in rows if row["result"]), key=itemgetter("update"))
    low, high = ([(row["update"], row["result"]["interval"][place]) for row in done] for place in (0, 1))
    curves = {"average": [(row["update"], row["result"]["average"]) for row in done], "low": low, "high": high}
    drawn = {name: thinned(points) for name, points in curves.items()} if done else {}
    return charts.lines(
        f"eval-{number}",
        charts.Caption(
            f"Score on {split.replace('_', '-')} problems",
            about="The average of an evaluation, with its 95 % confidence interval.",
        ),
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
    suites: Sequence[Mapping[str, Any]]
    """Imported runs of other suites, the oldest first."""
    idle_share: Sequence[Point]
    cost_micros: Sequence[Point]
    ages: Sequence[Point]
    spreads: Sequence[BroadcastSpread]
    branches: Sequence[Branch]
    incidents: Sequence[Incident]
    orders: Sequence[Mapping[str, Any]]
    published: Mapping[float, str]
    """The versions by the update that they contain."""
    now_ms: int
    site: Site
    samples: Sequence[EvaluationSamples] | None = None
    """Samples of evaluations, newest first; None if the round does not publish them."""
    age_ms: int = 0
    """Age of the figures when the page is built; 0 while they are fresh enough."""


def render(figures: Training) -> str:
    """Return the training page as HTML."""
    status = figures.status
    return document(
        "Training",
        "/training",
        figures.site,
        strip(status, figures.now_ms, figures.age_ms, quality(status, figures.evaluations).text),
        None if status["external"] else live(
            "learning", _learning(figures), heading="Is it learning?",
            lead="The reward and the score on problems that it never trains on should rise."),
        live("evaluations", evaluation_parts(figures.evaluations, parse_unit(status.get("unit")),
                                             empty=without_evaluations(status)),
             heading="Evaluations"),
        suite_section(figures.suites),
        measured.samples_section(figures.samples),
        live("health", _health(figures), heading="Is it healthy?",
             lead="Answers come from slightly older versions. They must stay close enough to learn from."),
        live("pace", _pace(figures), heading="Is the swarm fast?",
             lead="New versions should reach all nodes within seconds." if status["external"] else
                  "The learner should seldom wait, and new versions should reach all nodes within seconds."),
        live("fleet", _fleet(status), heading="Fleet"),
        live("incidents", _incidents(figures.incidents), heading="Incidents"),
        live("orders", _orders(figures.orders), heading="Orders"),
    )  # fmt: skip


def without_evaluations(status: Mapping[str, Any]) -> str:
    """Return the text of a round without evaluations: its score, if there is one, is the learner's own."""
    shares = {"before training": status["accuracy_before"], "after it": status["accuracy_after"]}
    measured = [f"{words.percent(share)} {moment}" for moment, share in shares.items() if share is not None]
    if status["external"] or not measured:
        return "No evaluations yet."
    said = ", ".join(measured)
    return f"The nodes evaluated no version. The learner itself measured held-out problems: {said}."


def _drawn(figures: Training, question: str, *others: tuple[bool, Markup]) -> Any:
    """Build the charts of the metrics for one question; those for experts and those that never change are folded.

    `others` are charts that come first, each with whether it is flat.
    """
    moving = [chart for is_flat, chart in others if not is_flat]
    flat = [chart for is_flat, chart in others if is_flat]
    secondary: list[Markup] = []
    for number, (name, points) in enumerate(figures.metrics.items()):
        if metric_words.question(name) == question:
            caption = metric_words.caption(name)
            drawn = charts.lines(
                f"metric-{number}", caption, "update", {caption.title: points}, from_zero=name == REWARD
            )
            place = flat if charts.is_flat(points) else secondary if metric_words.is_secondary(name) else moving
            place.append(drawn)
    return (
        el("div", moving, class_="charts"),
        _folded(f"more-{question}", "more chart", secondary),
        _folded(f"flat-{question}", "chart without a change", flat, "charts without a change"),
    )


def _folded(name: str, noun: str, drawn: Sequence[Markup], many: str = "") -> Markup | None:
    if not drawn:
        return None
    summary = el("summary", words.counted(len(drawn), noun, many))
    return el("details", summary, el("div", drawn, class_="charts"), id=name, class_="more")


def _health(figures: Training) -> Any:
    status = figures.status
    age, load = status["age"], status["load"]
    shown = {
        "wasted work": words.percent(status["in_vain_share"]),
        "max staleness S": f"{bound_in_force(status)} {plural(status['staleness'], 'update')}",
        "budget left": words.money(parse_unit(status.get("unit")), status["budget_micros"]),
    }
    if not status["external"]:
        shown |= {
            "staleness in updates": f"mean {age['mean']:.1f}, p99 {age['p99']}, max {age['max']}",
            "length bias": words.DASH if (bias := status["length_bias"]) is None else f"{bias:.2f} × ({GOOD_BIAS})",
            "learner idle, whole round": words.percent(status["learner_idle_share"]),
            "publish interval": words.counted(status["publish_every"], "update"),
        }
    if load:
        shown |= {
            "time per update": words.seconds(load["train_s"]),
            "time per broadcast": words.seconds(load["broadcast_s"]),
            "time per group": words.seconds(load["rollout_s"]),
        }
    ends = ", ".join(f"{words.whole(count)} {name}" for name, count in sorted(status["leases"].items()))
    refused = ", ".join(f"{words.whole(count)} {code}" for code, count in sorted(status["rejected"].items()))
    wasted = ", ".join(f"{words.whole(count)} {why}" for why, count in sorted(status["in_vain"].items()))
    caption = charts.Caption("Groups by age", about="Groups trained on, by their age in updates.")
    ages = (False, charts.bars("ages", caption, "staleness", figures.ages))
    return (
        facts(shown),
        None if status["external"] else _drawn(figures, metric_words.HEALTHY, ages),
        el("p", f"Leases: {ends or 'none yet'}. Rejected: {refused or 'none'}. Wasted: {wasted or 'none'}.",
           class_="soft"),
    )  # fmt: skip


def _learning(figures: Training) -> Any:
    return _drawn(figures, metric_words.LEARNING)


def _pace(figures: Training) -> Any:
    idle = charts.Caption("Waiting of the learner", about="Share of its time in which the learner waits for groups.")
    unit = parse_unit(figures.status.get("unit"))
    cost = charts.Caption(f"Credit per update, in {unit.name}", about="What the answers of an update were credited.")
    credit = [(update, micros / MICROS) for update, micros in figures.cost_micros]
    made = (
        (False, charts.lines("idle", idle, "update", {"idle share": figures.idle_share} if figures.idle_share else {},
                             tell=words.percent, from_zero=True)),
        (charts.is_flat(credit), charts.lines("cost", cost, "update", {"credit": credit}, from_zero=True)),
    )  # fmt: skip
    last = figures.status["broadcast"]
    return (
        _drawn(figures, metric_words.FAST, *(() if figures.status["external"] else made), (False, _spread(figures))),
        el("h3", f"How version {last['version']} spread") if last else None,
        tree.picture(last["version"], figures.branches) if last else None,
    )


def _spread(figures: Training) -> Markup:
    curves = {
        name: [(float(spread.version), value) for spread in figures.spreads if (value := take(spread)) is not None]
        for name, take in (("median", attrgetter("median_s")), ("slowest", attrgetter("max_s")))
    }
    until = "to its load on a node" if figures.status["external"] else "to its first token"
    caption = charts.Caption("Time to reach the nodes", about=f"From the publication of a version {until}.")
    return charts.lines(
        "t-bcast", caption, "version", curves if any(curves.values()) else {}, tell=words.seconds, from_zero=True
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
