"""Parts common to all pages: head, navigation, the strip with the round's state, tables, and links to exports."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from coordinator.pages import words
from coordinator.pages.html import Markup, el, join

PLACES = {"/": "Leaderboard", "/training": "Training", "/entries/0": "Ledger"}

EXPORTS = {
    "/stats/nodes.csv": "nodes as CSV",
    "/stats/nodes.json": "nodes as JSON",
    "/stats/tables.xml": "BOINC-style stats",
    "/v1/leaderboard": "leaderboard",
    "/v1/status": "status",
    "/v1/broadcast": "broadcast",
    "/v1/ledger/checkpoint": "signed checkpoint",
}


class Screen(StrEnum):
    """The narrowest screen on which something is shown."""

    ANY = ""
    TABLET = "tablet"
    DESKTOP = "desktop"


@dataclass(frozen=True)
class Column:
    """A column of a table; it is hidden on screens narrower than `screen`."""

    title: str
    help: str = ""
    is_text: bool = False
    screen: Screen = Screen.ANY
    link: str = ""
    sorted: str = ""


def document(title: str, place: str, join_string: str, *main: Any) -> str:
    """Build a complete page."""
    head = el(
        "head",
        el("meta", charset="utf-8"),
        el("meta", name="viewport", content="width=device-width, initial-scale=1"),
        el("meta", name="color-scheme", content="light dark"),
        el("title", f"{title} · Echo Swarm"),
        el("link", rel="icon", href="/static/icon.svg"),
        el("link", rel="stylesheet", href="/static/style.css"),
        el("script", type="module", src="/static/live.js"),
    )
    links = (el("a", name, href=href, aria_current="page" if href == place else None) for href, name in PLACES.items())
    header = el("header", el("a", "Echo Swarm", href="/", class_="brand"), el("nav", links, aria_label="Pages"))
    exports = (el("li", el("a", name, href=href)) for href, name in EXPORTS.items())
    footer = el(
        "footer",
        el("p", "Amounts in exports are in millionths of the round's unit; times are in UTC. To join: ",
           el("code", f"swarm-node join {join_string}")),
        el("ul", exports, aria_label="Data exports"),
        el("p", "", id="live", role="status"),
    )  # fmt: skip
    skip = el("a", "Skip to content", href="#main", class_="skip")
    body = el("body", skip, header, el("main", el("h1", title), *main, id="main", tabindex="-1"), footer)
    return f"<!doctype html>\n{el('html', head, body, lang='en')}\n"


def live(name: str, *children: Any, heading: str = "") -> Markup:
    """Build a part of a page that the script refreshes."""
    title = el("h2", heading, id=f"{name}-heading") if heading else None
    return el(
        "section", title, *children, id=name, data_live=True, aria_labelledby=f"{name}-heading" if heading else None
    )


def strip(status: Mapping[str, Any], now_ms: int, age_ms: int = 0) -> Markup:
    """Build the line of figures about the round's state, and the alarm, if there is one."""
    buffered = status["rollouts"].get("buffered", 0)
    measured = [status[f"accuracy_{when}"] for when in ("before", "after")]
    facts = {
        "phase": status["phase"],
        "version": status["version"],
        "published": words.ago(now_ms + age_ms - status["published_ms"]) if status["published_ms"] else words.DASH,
        "update": f"{status['update']} / {status['max_updates']}",
        "last update": words.DASH if (age := status["update_age_s"]) is None else words.ago(int(1000 * age) + age_ms),
        "nodes up to date": f"{status['nodes_up_to_date']} / {status['nodes_alive']}",
        "groups waiting": words.whole(buffered),
        "learner idle": words.percent(status["learner_idle_share_lately"]),
        "accuracy": " → ".join(words.percent(share) for share in measured if share is not None),
    }
    old = f"These figures are from {words.ago(age_ms)}: the coordinator's machine is busy."
    return live(
        "strip",
        el("p", old, class_="alarm") if age_ms else None,
        el(
            "dl", (el("div", el("dt", name), el("dd", value)) for name, value in facts.items() if value), class_="facts"
        ),
        el("p", el("strong", "Alarm: "), status["alarm"], class_="alarm") if status["alarm"] else None,
    )


def table(caption: str, columns: Sequence[Column], rows: Iterable[Sequence[Any]], *, empty: str) -> Markup:
    """Build a table in a frame that scrolls on its own, also by keyboard; a row's first text cell is its heading."""
    body = [_row(columns, row) for row in rows]
    if not body:
        return el("p", empty, class_="soft")
    head = el("tr", (_heading(column) for column in columns))
    made = el("table", el("caption", caption, class_="quiet"), el("thead", head), el("tbody", body))
    return el("div", made, class_="wide", tabindex="0", role="region", aria_label=caption)


def _heading(column: Column) -> Markup:
    title: Any = el("a", column.title, href=column.link) if column.link else column.title
    return el(
        "th", title, scope="col", class_=_classes(column), title=column.help or None, aria_sort=column.sorted or None
    )


def _row(columns: Sequence[Column], cells: Sequence[Any]) -> Markup:
    heading = next((place for place, column in enumerate(columns) if column.is_text), 0)
    return el(
        "tr",
        (
            el("th", cell, scope="row", class_=_classes(column))
            if place == heading
            else el("td", cell, class_=_classes(column))
            for place, (column, cell) in enumerate(zip(columns, cells, strict=True))
        ),
    )


def _classes(column: Column) -> str | None:
    return " ".join(["text"] * column.is_text + [column.screen.value]).strip() or None


def node_link(node_id: str, name: str) -> Markup:
    """Link to a node by its readable name, isolated so that its text direction affects nothing around it."""
    return el("a", el("bdi", words.readable(name, node_id)), href=f"/nodes/{node_id}", title=node_id)


def error_page(title: str, message: str, hint: str, join_string: str) -> str:
    """Build a page that shows an error and its hint."""
    return document(title, "", join_string, join(el("p", message), el("p", hint, class_="soft")))
