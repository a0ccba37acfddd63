"""The leaderboard: nodes, owners, teams or days, 100 lines a page, sorted and searched by the server."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple
from urllib.parse import urlencode

from coordinator.pages import words
from coordinator.pages.layout import Column, Screen, Site, aged, bar, document, live, node_link, numbers, table, wanted
from coordinator.pages.pictures import sparkline
from coordinator.reports.ranking import SORTS, Day, RankingLine, risen
from protocol.text.html import Markup, el
from protocol.text.money import Unit, parse_unit

LINES_PER_PAGE = 100
DAYS_SHOWN = 100
SEARCH_MAX = 60
VIEWS = {"nodes": "Nodes", "owners": "Owners", "teams": "Teams", "days": "Days"}

EMPTY = dict.fromkeys(VIEWS, "No node has joined yet.") | {
    "teams": "No teams yet. A node named rig@heron is in team heron."
}

DAY_COLUMNS = (
    Column("day", is_text=True),
    Column("credit", "credit validated on that day"),
    Column("tokens"),
    Column("groups", screen=Screen.TABLET),
    Column("nodes", "nodes with credit validated on that day"),
)


@dataclass(frozen=True)
class Wish:
    """A visitor's choice of view, order, search text and page. Every query string parses to a valid choice."""

    view: str = "nodes"
    sort: str = "score"
    search: str = ""
    page: int = 1

    @classmethod
    def parse(cls, query: Mapping[str, str]) -> "Wish":
        """Parse `query`: an unknown view, order or page becomes the first; invalid characters become question marks."""
        page = query.get("page", "")
        search = query.get("q", "").encode(errors="replace").decode()
        return cls(
            view=view if (view := query.get("view", "")) in VIEWS else "nodes",
            sort=sort if (sort := query.get("sort", "")) in SORTS else "score",
            search=search.strip()[:SEARCH_MAX],
            page=max(1, int(page)) if page.isascii() and page.isdigit() and len(page) < 7 else 1,
        )

    @staticmethod
    def asks(query: Mapping[str, str]) -> bool:
        """Return True if `query` chooses something of the leaderboard."""
        return not {"view", "sort", "q", "page"}.isdisjoint(query)

    def link(self, **change: Any) -> str:
        """Return the address of this choice with `change` applied."""
        wish = {"view": self.view, "sort": self.sort, "q": self.search, "page": self.page} | change
        usual = {"view": "nodes", "sort": "score", "q": "", "page": 1}
        return "/leaderboard?" + urlencode({name: value for name, value in wish.items() if value != usual[name]})


@dataclass(frozen=True)
class BoardFigures:
    """The figures of the leaderboard at one moment."""

    status: Mapping[str, Any]
    nodes: Sequence[RankingLine]
    owners: Sequence[RankingLine]
    teams: Sequence[RankingLine]
    days: Mapping[int, Day]
    ledger_size: int
    now_ms: int
    site: Site
    age_ms: int = 0
    """Age of the figures when the page is built; 0 while they are fresh enough."""


class PlacedLine(NamedTuple):
    """A line of the leaderboard at its place by recent credit, as one view shows it."""

    rank: int
    rise: int | None
    """The places that it has risen within a day."""
    line: RankingLine
    best: float
    """The recent credit of the best line."""
    view: str
    unit: Unit


class BoardColumn(NamedTuple):
    """A column of the leaderboard: its key in `SORTS` ("" if it does not sort), its heading, and its cell of a line."""

    sort: str
    heading: Column
    cell: Callable[[PlacedLine], Any]


def render(board: BoardFigures, wish: Wish) -> str:
    """Return the leaderboard as an HTML page."""
    views = (
        el("a", title, href=wish.link(view=view, page=1), aria_current="true" if view == wish.view else None)
        for view, title in VIEWS.items()
    )
    part = _days(board) if wish.view == "days" else _lines(board, wish)
    return document(
        "Leaderboard",
        "/leaderboard",
        board.site,
        live("totals", aged(board.age_ms), wanted(board.status), _totals(board)),
        el("div", el("nav", views, class_="tabs", aria_label="Views"),
           None if wish.view == "days" else _search(wish), class_="tools"),
        live("board", part),
    )  # fmt: skip


def _totals(board: BoardFigures) -> Markup:
    status, nodes, unit = board.status, board.nodes, parse_unit(board.status.get("unit"))
    credit = sum(line.posted_micros for line in nodes)
    return numbers(
        {
            "Nodes": (words.whole(status["nodes_alive"]), f"active, of {words.whole(len(nodes))}"),
            "Owners": (words.whole(len(board.owners)), words.counted(len(board.teams), "team")),
            "Tokens": (words.whole(sum(line.validated_tokens for line in nodes)), "verified"),
            "Credit": (words.sum_of(unit, credit), [f"{unit.name} ", el("a", "in the ledger", href="/entries")]),
        }
    )


def _search(wish: Wish) -> Markup:
    kept = {"view": wish.view, "sort": wish.sort}
    return el(
        "form",
        (el("input", type="hidden", name=name, value=value) for name, value in kept.items()),
        el("label", "Name or id ", el("input", type="search", name="q", value=wish.search, maxlength=SEARCH_MAX)),
        el("button", "Search"),
        role="search",
        action="/leaderboard",
    )


def _lines(board: BoardFigures, wish: Wish) -> tuple[Any, ...]:
    ranked = {"owners": board.owners, "teams": board.teams}.get(wish.view, board.nodes)
    rises, places = risen(ranked), list(range(len(ranked)))
    best = max((line.score_micros for line in ranked), default=0.0)
    if wish.search:
        sought = wish.search.casefold()
        places = [place for place in places if sought in ranked[place].searched]
    if wish.sort != "score":
        places.sort(key=lambda place: -SORTS[wish.sort](ranked[place]))
    pages = max(1, -(-len(places) // LINES_PER_PAGE))
    page = min(wish.page, pages)
    shown = places[(page - 1) * LINES_PER_PAGE : page * LINES_PER_PAGE]
    headings = [_sortable(column, wish) for column in COLUMNS]
    unit = parse_unit(board.status.get("unit"))
    placed = [PlacedLine(place + 1, rises[place], ranked[place], best, wish.view, unit) for place in shown]
    rows = [[column.cell(each) for column in COLUMNS] for each in placed]
    sorted_by = next(column.heading.title for column in COLUMNS if column.sort == wish.sort)
    order = "recent credit" if wish.sort == "score" else sorted_by
    caption = f"{VIEWS[wish.view]}, sorted by {order}; amounts in {unit.name}"
    empty = "No name or id matches this search." if wish.search else EMPTY[wish.view]
    return table(caption, headings, rows, empty=empty), _pager(wish, page, pages, len(places))


def _sortable(column: BoardColumn, wish: Wish) -> Column:
    name, heading = column.sort, column.heading
    if not name:
        return heading
    chosen = "descending" if name == wish.sort else ""
    link = wish.link(sort=name, page=1)
    return Column(heading.title, heading.help, heading.is_text, Screen.ANY if chosen else heading.screen, link, chosen)


def _rank(place: PlacedLine) -> Any:
    """Show a place, and how it moved within a day."""
    if not place.rise:
        return place.rank
    way, word = ("rise", "up") if place.rise > 0 else ("fall", "down")
    moved = f"{word} {words.counted(abs(place.rise), 'place')} within a day"
    arrow = "▲" if place.rise > 0 else "▼"
    shown = el("span", arrow, abs(place.rise), aria_hidden="true")
    return (
        place.rank,
        "\u00a0",
        el("small", shown, el("span", moved, class_="quiet"), class_=f"moved {way}", title=moved),
    )


def _name(place: PlacedLine) -> Any:
    line, view = place.line, place.view
    if view == "teams":
        members = f"/leaderboard?{urlencode({'q': '@' + line.team})}"
        return [el("a", el("bdi", line.team), href=members), f" ({line.nodes})"]
    if view == "owners" and (line.nodes > 1 or line.owner != line.node_id):
        members = f"/leaderboard?{urlencode({'q': line.owner})}"
        return [el("a", el("bdi", words.owner(line.owner)), href=members, title=line.owner), f" ({line.nodes})"]
    return node_link(line.node_id, line.name)


def _recent(place: PlacedLine) -> Any:
    score = place.line.score_micros
    return [words.sum_of(place.unit, score), bar(score / place.best) if place.best > 0 else None]


def _last_day(place: PlacedLine) -> Any:
    hours = place.line.hours
    return sparkline(hours, f"{words.money(place.unit, sum(hours))} in the last 24 hours")


def _details(place: PlacedLine, shown: Any, part: str) -> Markup:
    """Link a figure to the part of the node's page that has its details."""
    return el("a", shown, href=f"/nodes/{place.line.node_id}#{part}")


def _accepted(place: PlacedLine) -> Any:
    line = place.line
    if line.accept_interval is None:
        return words.DASH
    low, high = line.accept_interval
    between = f"{100 * low:.1f}–{100 * high:.1f}"
    counts = f"{words.whole(line.accepted)} of {words.whole(line.accepted + line.rejected)}"
    shown = [words.percent(line.accept_ratio), " ", el("small", f"({between})", class_=Screen.TABLET)]
    return el("a", shown, href=f"/nodes/{line.node_id}#refusals", title=counts)


COLUMNS = (
    BoardColumn("", Column("#", "place by recent credit, and the places won or lost within a day"), _rank),
    BoardColumn("", Column("name", is_text=True), _name),
    BoardColumn(
        "score",
        Column("recent", "recent credit: with a half-life of 7 days; the bar compares it with the best"),
        _recent,
    ),
    BoardColumn("", Column("24 h", "credit of the last 24 hours, by hour", screen=Screen.DESKTOP), _last_day),
    BoardColumn(
        "credit",
        Column("credit", "all validated credit", screen=Screen.TABLET),
        lambda place: _details(place, words.sum_of(place.unit, place.line.posted_micros), "days"),
    ),
    BoardColumn(
        "pending",
        Column("escrow", "share of the credit that is not settled yet", screen=Screen.DESKTOP),
        lambda place: words.percent(place.line.escrow_share),
    ),
    BoardColumn(
        "tokens",
        Column("tokens", "validated tokens", screen=Screen.TABLET),
        lambda place: _details(place, words.whole(place.line.validated_tokens), "receipts"),
    ),
    BoardColumn(
        "accepted",
        Column("accepted", "share of the submitted groups, with its 95 % confidence interval"),
        _accepted,
    ),
    BoardColumn(
        "lag",
        Column("staleness", "median age of its groups when trained on, in updates", screen=Screen.TABLET),
        lambda place: words.DASH if place.line.lag is None else place.line.lag,
    ),
    BoardColumn(
        "cost",
        Column("cost / Mtok", "credit per million validated tokens", screen=Screen.DESKTOP),
        lambda place: words.sum_of(place.unit, place.line.cost_micros_per_mtok),
    ),
    BoardColumn(
        "uploaded",
        Column("uploaded", "sent to other nodes, by the transfer receipts of the receivers", screen=Screen.DESKTOP),
        lambda place: words.size(place.line.uploaded_bytes),
    ),
    BoardColumn(
        "",
        Column("trust", "audit status: new, known, trusted, held or banned", is_text=True, screen=Screen.DESKTOP),
        lambda place: words.DASH if place.view == "teams" else place.line.trust,
    ),
    BoardColumn(
        "rate",
        Column("tokens/s", "as reported by the node", screen=Screen.DESKTOP),
        lambda place: words.figure(place.line.tokens_per_s),
    ),
    BoardColumn(
        "",
        Column("state", is_text=True),
        lambda place: el("span", place.line.state, class_=f"state {place.line.state}"),
    ),
)


def _pager(wish: Wish, page: int, pages: int, lines: int) -> Markup | None:
    if pages == 1:
        return None
    return el(
        "nav",
        el("a", "← previous", href=wish.link(page=page - 1), rel="prev") if page > 1 else None,
        el("span", f"page {page} of {pages}, {words.whole(lines)} lines"),
        el("a", "next →", href=wish.link(page=page + 1), rel="next") if page < pages else None,
        class_="pager",
        aria_label="Pages of the leaderboard",
    )


def _days(board: BoardFigures) -> Markup:
    days = sorted(board.days.items(), reverse=True)[:DAYS_SHOWN]
    unit = parse_unit(board.status.get("unit"))
    rows = [
        [
            el("a", words.day(number), href=f"/entries/{day.first_entry}"),
            words.sum_of(unit, day.credit_micros),
            words.whole(day.tokens),
            words.whole(day.groups),
            words.whole(day.nodes),
        ]
        for number, day in days
    ]
    return table(
        f"Validated credit by day, in {unit.name}", DAY_COLUMNS, rows, empty="No credit has been validated yet."
    )
