"""Parts common to all pages: the round as they name it, head, navigation, the strip with its state, tables, links."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from coordinator.pages import words
from coordinator.pages.pictures import portrait
from coordinator.reports.health import IDLE_MAX, UPDATES_LATELY
from protocol.policy.description import RoundDescription
from protocol.text.html import Markup, el

SOFTWARE = "Echo Swarm"


@dataclass(frozen=True)
class Site:
    """The round as its pages name it; texts that the operator left out have a default."""

    join_string: str
    description: RoundDescription
    task: str
    phrase: str = ""
    """The fingerprint in words."""
    serves_installer: bool = False
    """True if the installer at this address installs a wheel of the operator's."""
    finished: bool = False
    """True once the round has ended: nobody is invited any more."""

    @property
    def title(self) -> str:
        return self.description.title or SOFTWARE

    @property
    def lead(self) -> str:
        """Return what is trained, in a sentence or two."""
        return self.description.description or (
            f"Volunteers' computers train one language model together, on the task {self.task}. "
            "Their work is checked, and each verified sample earns credit in a public ledger."
        )

    @property
    def home(self) -> str:
        """Return the address of the round, without the fingerprint of the join string."""
        return self.join_string.partition("#")[0].rstrip("/")

    def facts(self) -> dict[str, str]:
        """Return who runs the round and under which terms, as far as the operator says."""
        said = self.description
        facts = {"Operator": said.operator, "Licence of the model": said.licence, "Contact": said.contact}
        return {name: text for name, text in facts.items() if text}


PLACES = {"/": "Overview", "/training": "Training", "/leaderboard": "Leaderboard", "/entries": "Ledger"}

EXPORTS = {
    "/stats/nodes.csv": "nodes as CSV",
    "/stats/nodes.json": "nodes as JSON",
    "/stats/tables.xml": "BOINC-style stats",
    "/v1/leaderboard": "leaderboard as JSON",
    "/v1/status": "status as JSON",
    "/v1/broadcast": "newest broadcast as JSON",
    "/v1/ledger/checkpoint": "signed checkpoint",
    "/feed.atom": "news as Atom feed",
}


OF_THE_LEARNER = ("update", "last update", "learner idle")
"""Figures of the round's own learner."""


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


def document(title: str, place: str, site: Site, *main: Any, heading: bool = True, about: str = "") -> str:
    """Build a complete page; without `heading`, `main` has the page's own h1. Link previews say `about`."""
    links = (el("a", name, href=href, aria_current="page" if href == place else None) for href, name in PLACES.items())
    brand = el("a", _logo(), el("bdi", site.title), href="/", class_="brand", title=site.title)
    join = el("a", "Join", href="/join", class_="button", aria_current="page" if place == "/join" else None)
    invitation = None if site.finished else join
    header = el("header", el("div", brand, el("nav", links, aria_label="Pages"), invitation, class_="top"))
    skip = el("a", "Skip to content", href="#main", class_="skip")
    top = el("h1", title) if heading else None
    body = el("body", skip, header, el("main", top, *main, id="main", tabindex="-1"), _footer(site))
    return f"<!doctype html>\n{el('html', _head(title, site, about or site.lead), body, lang='en')}\n"


def _head(title: str, site: Site, about: str) -> Markup:
    shown = f"{title} · {SOFTWARE if title == site.title else site.title}"
    preview = {
        "og:type": "website", "og:site_name": site.title, "og:title": shown, "og:description": about,
        "og:image": f"{site.home}/static/card.png", "og:image:width": 1200, "og:image:height": 630,
        "og:image:alt": "A curve that rises, drawn by many connected computers",
    }  # fmt: skip
    return el(
        "head",
        el("meta", charset="utf-8"),
        el("meta", name="viewport", content="width=device-width, initial-scale=1"),
        el("meta", name="color-scheme", content="light dark"),
        el("title", shown),
        el("meta", name="description", content=about),
        (el("meta", property=name, content=content) for name, content in preview.items()),
        el("meta", name="twitter:card", content="summary_large_image"),
        el("link", rel="icon", href="/static/icon.svg"),
        el("link", rel="alternate", type="application/atom+xml", title="News of this round", href="/feed.atom"),
        el("link", rel="stylesheet", href="/static/style.css"),
        el("script", type="module", src="/static/live.js"),
        el("script", type="module", src="/static/look.js"),
    )


def _logo() -> Markup:
    """Draw the icon: a node in the middle, and four that it reaches."""
    ways = el("path", d="M16 16 6 7M16 16l11-8M16 16l2 12M16 16 4 21")
    places = ((16, 16, 5), (6, 7, 3), (27, 8, 3), (18, 28, 3), (4, 21, 3))
    dots = (el("circle", cx=x, cy=y, r=radius) for x, y, radius in places)
    return el("svg", ways, dots, viewBox="0 0 32 32", aria_hidden="true", class_="logo", width=24, height=24)


def _footer(site: Site) -> Markup:
    facts = (el("div", el("dt", name), el("dd", _contact(text))) for name, text in site.facts().items())
    exports = (el("li", el("a", name, href=href)) for href, name in EXPORTS.items())
    return el(
        "footer",
        el("dl", facts, class_="about") if site.facts() else None,
        el(
            "p",
            f"Made with {SOFTWARE}. Amounts in exports are in millionths of the round's unit; times are in UTC. ",
            el("a", "Check the ledger in your browser", href="/verify.html"),
            "; ",
            el("a", "usage of API keys", href="/usage"),
            ".",
        ),
        el("ul", exports, aria_label="Data exports"),
        el("p", "", id="live", role="status"),
    )


def _contact(text: str) -> Any:
    """Link a text that is a web or mail address as a whole."""
    words_ = text.split()
    if len(words_) == 1 and text.startswith(("https://", "http://")):
        return el("a", text, href=text, rel="nofollow noopener")
    if len(words_) == 1 and text.count("@") == 1 and ":" not in text:
        return el("a", text, href=f"mailto:{text}")
    return text


def live(name: str, *children: Any, heading: str = "", lead: str = "") -> Markup:
    """Build a part of a page that the script refreshes."""
    title = el("h2", heading, id=f"{name}-heading") if heading else None
    told = el("p", lead, class_="lead") if lead else None
    return el(
        "section", title, told, *children, id=name, data_live=True,
        aria_labelledby=f"{name}-heading" if heading else None,
    )  # fmt: skip


def facts(figures: Mapping[str, Any]) -> Markup:
    """Build a list of named figures; one without a value is left out."""
    shown = (el("div", el("dt", name), el("dd", value)) for name, value in figures.items() if value)
    return el("dl", shown, class_="facts")


def numbers(figures: Mapping[str, tuple[Any, Any]]) -> Markup:
    """Build a row of large numbers, each with its name and a line about it."""
    shown = (
        el("div", el("dt", name), el("dd", el("span", value, class_="number"), el("small", about)))
        for name, (value, about) in figures.items()
    )
    return el("dl", shown, class_="numbers")


def bar(share: float) -> Markup:
    """Draw a bar that is filled to `share`; the figure beside it says the same."""
    width = f"{100 * min(1.0, max(0.0, share)):.2f}"
    filled = el("rect", width=width, height=4, class_="full")
    return el(
        "svg", el("rect", width=100, height=4, class_="rest"), filled,
        viewBox="0 0 100 4", preserveAspectRatio="none", aria_hidden="true", class_="meter",
    )  # fmt: skip


def aged(age_ms: int) -> Markup | None:
    """Build the line that says how old the figures are, if they are old."""
    old = f"These figures are from {words.ago(age_ms)}: the coordinator's machine is busy."
    return el("p", old, class_="notice") if age_ms else None


def wanted(status: Mapping[str, Any]) -> Markup | None:
    """Build the call for more nodes, if training waits for their samples. Alarms are for the operator alone."""
    if status["finished"] or not status["version"]:
        return None
    if status["nodes_alive"] and status["learner_idle_share_lately"] <= IDLE_MAX:
        return None
    return el("p", el("strong", "We need more GPUs: "), el("a", "join this round", href="/join"), ".", class_="notice")


def strip(status: Mapping[str, Any], now_ms: int, age_ms: int = 0, score: str = "") -> Markup:
    """Build the line of figures about the round's state; that of another trainer makes no updates here."""
    age, idle = status["update_age_s"], status["learner_idle_share_lately"]
    lately = min(UPDATES_LATELY, status["update"])
    figures = {
        "phase": status["phase"],
        "version": status["version"],
        "published": words.ago(now_ms + age_ms - status["published_ms"]) if status["published_ms"] else words.DASH,
        "made by": "another trainer",
        "update": f"{status['update']} / {status['max_updates']}",
        "last update": words.DASH if age is None else words.ago(int(1000 * age) + age_ms),
        "nodes up to date": f"{status['nodes_up_to_date']} / {status['nodes_alive']}",
        "learner idle": f"{words.percent(idle)} in {words.counted(lately, 'update')}" if lately else words.DASH,
        "score": score,
    }
    for name in OF_THE_LEARNER if status["external"] else ("made by",):
        del figures[name]
    return live("strip", aged(age_ms), wanted(status), facts(figures))


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
    shown = portrait(node_id), el("bdi", words.readable(name, node_id))
    return el("a", shown, href=f"/nodes/{node_id}", title=node_id, class_="node")


def error_page(title: str, message: str, hint: str, site: Site) -> str:
    """Build a page that shows an error, its hint, and the way back."""
    home, board = el("a", "Overview", href="/", class_="button"), el("a", "Leaderboard", href="/leaderboard")
    ways = el("p", home, " ", board, class_="actions")
    return document(title, "", site, el("p", message, class_="lead"), el("p", hint, class_="soft"), ways)
