"""The owner's page as HTML: the figures of `status`, and forms for what the commands do.

- Pure: a snapshot and what belongs to it in, text out. All texts about the state are those of `status_lines`.
- The builder escapes markup; `one_line` escapes what would turn the direction of a text, or hide a part of it.
- A part marked `data-live` holds figures only: the script replaces its content, and nobody is typing there.
- Without the script everything can be read and done; the page then shows the moment at which it was loaded.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from protocol.limits import GB, HOUR_S
from protocol.text.html import Markup, el
from protocol.text.money import EarningPace, Unit, parse_unit
from protocol.text.plain import one_line
from swarm_node.allowance.settings import CardLimits, Limits
from swarm_node.owner import status_lines
from swarm_node.owner.page.limits_form import limits_form

DASH = "–"
SNOOZE_MINUTES = 60
REFRESH_S = 3
"""Interval of the script."""


@dataclass(frozen=True)
class PageFigures:
    """Everything that the page shows."""

    state: Mapping[str, Any]
    """A snapshot, as `status --json` prints it."""
    limits: Limits
    given: Mapping[str, Any] = field(default_factory=dict)
    """Limits that `join` has set for this run."""
    kept_receipts: frozenset[str] = frozenset()
    """Claims whose receipt this home has."""
    lines: Sequence[str] = ()
    """The last log lines."""
    notice: str = ""
    """Result of the last change."""
    error: str = ""
    """Reason why a change was refused, with the next step."""


def document(figures: PageFigures, prefix: str) -> str:
    """Build the page; `prefix` is the path at which it is served."""
    state = figures.state
    told = [
        el("p", coded(one_line(figures.error)), class_="notice bad", role="alert") if figures.error else None,
        el("p", figures.notice, class_="notice", role="status") if figures.notice else None,
    ]
    main = (
        told,
        _now(state, prefix),
        _earnings(state),
        _cards(state, figures.limits, prefix),
        _limits(figures, prefix),
        _answers(figures, prefix),
        _details(state),
        _log(figures.lines),
        _stop(prefix),
    )
    return _whole(one_line(str(state["name"])), prefix, *main, script=True)


def refusal(status: int, message: str, hint: str, prefix: str) -> str:
    """Build the page for a request that is refused; `prefix` is empty where it must stay secret."""
    again = el("p", el("a", "Open the page", href=prefix, class_="button")) if prefix else None
    return _whole(f"Error {status}", prefix, el("h1", message), el("p", coded(hint), class_="soft"), again)


def _whole(title: str, prefix: str, *main: Any, script: bool = False) -> str:
    head = el(
        "head",
        el("meta", charset="utf-8"),
        el("meta", name="viewport", content="width=device-width, initial-scale=1"),
        el("meta", name="color-scheme", content="light dark"),
        el("meta", name="robots", content="noindex"),
        el("title", f"{title} · Echo Swarm node"),
        [
            el("link", rel="icon", href=f"{prefix}icon.svg"),
            el("link", rel="stylesheet", href=f"{prefix}style.css"),
        ]
        if prefix
        else None,
        el("script", type="module", src=f"{prefix}page.js") if script else None,
    )
    skip = el("a", "Skip to content", href="#main", class_="skip")
    brand = el("span", el("bdi", title), class_="brand")
    told = el("p", "Shows the moment at which it was loaded.", id="fresh", class_="soft") if script else None
    header = el("header", el("div", brand, told, class_="top"))
    body = el("body", skip, header, el("main", *main, id="main", tabindex="-1"))
    return f"<!doctype html>\n{el('html', head, body, lang='en', data_refresh_s=REFRESH_S)}\n"


def _section(name: str, heading: str, *children: Any) -> Markup:
    title = el("h2", heading, id=f"{name}-heading")
    return el("section", title, *children, id=name, aria_labelledby=f"{name}-heading")


def coded(text: str) -> list[Markup | str]:
    """Return a text of the program with its commands, which stand between backticks, as code."""
    return [el("code", part) if place % 2 else part for place, part in enumerate(text.split("`"))]


def _live(name: str, *children: Any, tag: str = "div", **attributes: Any) -> Markup:
    """Build a part that the script refreshes."""
    return el(tag, *children, id=name, data_live=True, **attributes)


def _now(state: Mapping[str, Any], prefix: str) -> Markup:
    snapshot = dict(state)
    calm = status_lines.is_working(snapshot)
    doing = el("span", coded(one_line(status_lines.doing(snapshot))), class_=f"state {'works' if calm else 'waits'}")
    load = state["download"]
    share = load["bytes_done"] / load["bytes"] if load and load["bytes"] else None
    about = one_line(f"{status_lines.speed(snapshot)} · {status_lines.queue(snapshot)}")
    return el(
        "section",
        el("h1", _live("doing", doing, tag="span", role="status")),
        _live(
            "pace",
            el("p", about, class_="lead"),
            _rounds(snapshot),
            el("progress", value=f"{share:.3f}", aria_label="Download of the version") if share is not None else None,
        ),
        _orders(prefix, "the node"),
        id="now",
        aria_label="Now",
    )


def _rounds(state: dict[str, Any]) -> list[Markup]:
    """Build a line for each of several rounds, and say which one the other figures are of."""
    lines = [el("li", coded(one_line(line))) for line in status_lines.rounds(state)]
    shown = one_line(f"The figures on this page are those of the round at {state['coordinator']}.")
    return [el("ul", lines), el("p", shown, class_="soft")] if lines else []


def _orders(prefix: str, name: str, card: int | None = None) -> Markup:
    """Build the buttons that pause and resume the node or one card."""
    place = "node" if card is None else f"card-{card}"
    quiet = el("span", f" {name}", class_="quiet")
    minutes = el(
        "input", type="number", name="minutes", id=f"{place}-minutes", value=SNOOZE_MINUTES, min=1, max=10080,
        step="any", inputmode="decimal", required=True,
    )  # fmt: skip
    return el(
        "form",
        el("input", type="hidden", name="card", value=card) if card is not None else None,
        el("button", "Pause", quiet, name="do", value="pause", formnovalidate=True),
        el("button", "Resume", quiet, name="do", value="resume", formnovalidate=True),
        el(
            "span",
            el("button", "Snooze", quiet, name="do", value="snooze"),
            minutes,
            el("label", "minutes", el("span", f" without work of {name}", class_="quiet"), for_=f"{place}-minutes"),
            class_="snooze",
        ),
        method="post", action=f"{prefix}orders", class_="orders",
    )  # fmt: skip


def _earnings(state: Mapping[str, Any]) -> Markup:
    snapshot, unit = dict(state), parse_unit(state.get("unit"))
    told = state.get("rates")
    pace = EarningPace.parse(told["rate"]) if told else None
    age = state["earnings_ms"]
    asked = status_lines.ago((state["now_ms"] - age) / 1000) if age is not None else ""
    figures = {
        "per hour": (_amount(unit, pace.per_hour if pace else None), _hour_source(pace)),
        "per day": (_amount(unit, _per_day(pace) if pace else None), _day_source(pace)),
        "today": (_amount(unit, state.get("today_micros")), f"since midnight{asked and f', reported {asked} ago'}"),
        "this run": (_amount(unit, state["credit_micros"]), "since the start"),
        "pending": (_amount(unit, state["pending_micros"]), "until it is audited"),
        "payable": (_amount(unit, state["payable_micros"]), "at the next payout"),
    }
    shown = (
        el("div", el("dt", name), el("dd", el("span", value, class_="number"), el("small", about)))
        for name, (value, about) in figures.items()
    )
    unknown = "the rate is not known yet: the coordinator has not reported it"
    rate = _sentence(unknown if pace is None else status_lines.rate(snapshot))
    lines = (rate, f" Reported {asked} ago." if asked else "", el("br"), _sentence(status_lines.payouts(snapshot)))
    return _section(
        "earnings",
        f"Earnings in {unit.name}",
        _live("figures", el("dl", shown, class_="numbers"), el("p", lines, class_="soft")),
    )


def _amount(unit: Unit, micros: float | None) -> str:
    return DASH if micros is None else unit.figure(micros)


def _per_day(pace: EarningPace) -> float | None:
    """Return the credit of the last day, or what a day brings at the mean rate of at least an hour."""
    mean = pace.mean_per_hour
    return None if mean is None or (pace.earning_s or 0) < HOUR_S else mean * 24


def _hour_source(pace: EarningPace | None) -> str:
    if pace is None or pace.earning_s is None or pace.per_hour is None:
        return "not known yet"
    return "in the last hour" if pace.earning_s >= HOUR_S else f"from {status_lines.ago(pace.earning_s)}"


def _day_source(pace: EarningPace | None) -> str:
    if pace is None or pace.earning_s is None or _per_day(pace) is None:
        return "known after an hour of earning"
    if pace.earning_s >= 24 * HOUR_S:
        return "in the last 24 hours"
    return f"at the rate of the last {status_lines.ago(pace.earning_s)}"


def _sentence(text: str) -> str:
    return f"{text[0].upper()}{text[1:]}." if text else ""


def _cards(state: Mapping[str, Any], limits: Limits, prefix: str) -> Markup:
    if not state["cards"]:
        heat = {"temperature": _reading(state["celsius"], "°C"), "power": _reading(state["watts"], "W")}
        speed = {"speed": _reading(state["tokens_per_s"] or None, "tokens/s")}
        shown = el("li", el("h3", "Processor"), _live("processor", _facts({**speed, **heat})))
        return _section("cards", "Machine", el("ul", shown, class_="cards"))
    several = len(state["cards"]) > 1
    rows = (_card(card, limits, prefix, several=several) for card in state["cards"])
    return _section("cards", "Graphics cards", el("ul", rows, class_="cards"))


def _card(card: Mapping[str, Any], limits: Limits, prefix: str, *, several: bool) -> Markup:
    number = card.get("number", 0)
    is_used = "state" in card
    figures: dict[str, Any] = {
        "state": el("span", card["state"], class_=f"state {'works' if card['state'] == 'sampling' else 'waits'}")
        if is_used
        else "not used by this node",
        "temperature": _reading(card["celsius"], "°C"),
        "power": _reading(card["watts"], "W"),
        "speed": _reading(card["tokens_per_s"], "tokens/s") if is_used else None,
        "memory": _memory(card),
    }
    reason = el("p", coded(one_line(card["reason"])), class_="soft") if card.get("reason") else None
    own = limits.cards.get(str(number), CardLimits())
    return el(
        "li",
        el("h3", f"Card {number}: ", el("bdi", one_line(card["name"]))),
        _live(f"card-{number}", _facts(figures), reason),
        _orders(prefix, f"card {number}", number) if is_used else None,
        el(
            "details",
            el("summary", f"Limits of card {number}"),
            el("p", "They hold in addition to those of the node.", class_="soft"),
            limits_form(f"{prefix}limits", own, card=number),
        )
        if is_used and several
        else None,
    )


def _reading(value: float | None, unit: str) -> str:
    return DASH if value is None else f"{value:,.0f} {unit}"


def _memory(card: Mapping[str, Any]) -> str:
    used, total = card.get("used_bytes"), card.get("memory_bytes")
    if used is None:
        return DASH
    of_total = f" of {total / GB:.1f}" if total is not None else ""
    return f"{used / GB:.1f}{of_total} GB"


def _facts(figures: Mapping[str, Any]) -> Markup:
    shown = (el("div", el("dt", name), el("dd", value)) for name, value in figures.items() if value)
    return el("dl", shown, class_="facts")


def _limits(figures: PageFigures, prefix: str) -> Markup:
    about = (
        "While a limit holds, the node does not work, but keeps its place in the round and fetches versions. "
        "Changes are saved in limits.toml, as `swarm-node limits` does, and apply within seconds."
    )
    return _section(
        "limits",
        "Limits",
        el("p", coded(about), class_="soft"),
        limits_form(f"{prefix}limits", figures.limits, given=figures.given),
    )


def _answers(figures: PageFigures, prefix: str) -> Markup:
    state, unit = figures.state, parse_unit(figures.state.get("unit"))
    rows = [_answer(answer, figures, unit, prefix) for answer in state.get("answers", [])]
    titles = {
        "lease": "text",
        "age": "text",
        "answer": "text",
        "tokens": "wide-only",
        "credit": None,
        "receipt": "text",
    }
    head = el("tr", (el("th", title, scope="col", class_=kind) for title, kind in titles.items()))
    label = f"Last answers of the coordinator; credit in {unit.name}"
    made = el("table", el("caption", label, class_="quiet"), el("thead", head), el("tbody", rows))
    shown = el("div", made, class_="wide", tabindex="0", role="region", aria_label=label)
    about = (
        "A receipt proves a credit permanently. `swarm-node ledger receipts` fetches and checks the receipts of all "
        "accepted work; `swarm-node why LEASE` explains a rejection with the evidence."
    )
    return _section(
        "answers",
        "Answers and receipts",
        _live(
            "verdicts",
            el("p", one_line(_sentence(status_lines.verdicts(dict(state))))),
            shown if rows else None,
        ),
        el("p", coded(about), class_="soft"),
    )


def _answer(answer: Mapping[str, Any], figures: PageFigures, unit: Unit, prefix: str) -> Markup:
    rejected = answer["outcome"] == "rejected"
    if rejected:
        code = el("span", one_line(answer["code"] or "rejected"), class_="bad")
        said = el("td", code, el("br"), el("small", one_line(answer["message"])), class_="text said")
    else:
        said = el("td", str(answer["outcome"]).replace("_", " "), class_="text")
    claim, lease = answer["claim_id"], one_line(answer["lease_id"])
    if claim in figures.kept_receipts:
        receipt: Any = el("a", "file", href=f"{prefix}receipts/{claim}", download=f"{claim}.receipt")
    else:
        receipt = "not yet" if claim else DASH
    age = status_lines.ago((figures.state["now_ms"] - answer["at_ms"]) / 1000)
    return el(
        "tr",
        el("th", el("code", lease[:8], title=lease), scope="row", class_="text"),
        el("td", age, class_="text"),
        said,
        el("td", f"{answer['tokens']:,}", class_="wide-only"),
        el("td", unit.exact_figure(answer["credit_micros"])),
        el("td", receipt, class_="text"),
    )


def _details(state: Mapping[str, Any]) -> Markup:
    snapshot = dict(state)
    figures = {
        "version": status_lines.version(snapshot),
        "traffic": one_line(status_lines.traffic(snapshot)),
        "reachable": one_line(status_lines.reach(snapshot)),
        "round": one_line(state["coordinator"]),
        "node": el("code", state["node_id"]),
        "folder": el("code", state["home"]),
        "running": status_lines.ago((state["now_ms"] - state["started_ms"]) / 1000),
    }
    return _section("node", "Node", _live("node-facts", _facts(figures)))


def _log(lines: Iterable[str]) -> Markup:
    kept = list(lines)
    shown = "\n".join(kept) if kept else "No lines yet."
    box = el(
        "pre",
        _live("lines", shown, tag="code"),
        tabindex="0",
        role="region",
        aria_label="Log lines, the newest last",
        class_="log",
    )
    return _section("log", "Last log lines", box)


def _stop(prefix: str) -> Markup:
    return el(
        "details",
        el("summary", "Stop the agent"),
        el(
            "form",
            el("p", el("button", "Finish", name="do", value="finish"), " Stops when the current groups are sampled and "
               "sent. Resume cancels it."),
            el("p", el("button", "Leave", name="do", value="leave"), " Stops now; unfinished work is returned. Run ",
               el("code", "swarm-node join"), " to continue."),
            method="post", action=f"{prefix}orders", class_="stop",
        ),
        id="stop",
    )  # fmt: skip
