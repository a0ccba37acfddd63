"""The leaderboard: nodes, owners, teams or days; a hundred lines at a time, sorted and searched by the server."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlencode

from coordinator.pages import words
from coordinator.pages.html import Markup, el
from coordinator.pages.layout import Column, Screen, document, live, node_link, strip, table
from coordinator.reports.ranking import SORTS, Day, RankingLine

LINES_PER_PAGE = 100
DAYS_SHOWN = 100
SEARCH_MAX = 60
VIEWS = {"nodes": "Nodes", "owners": "Owners", "teams": "Teams", "days": "Days"}

COLUMNS: tuple[tuple[str, Column], ...] = (
    ("", Column("#")),
    ("", Column("name", is_text=True)),
    ("score", Column("score", "validated credit, half as much after every seven days")),
    ("credit", Column("credit", "all validated credit", screen=Screen.TABLET)),
    ("pending", Column("in escrow", "the share of the credit that is not settled yet", screen=Screen.DESKTOP)),
    ("tokens", Column("tokens", "validated tokens", screen=Screen.TABLET)),
    ("accepted", Column("accepted", "of the groups sent in; the interval holds the true share 95 times in 100")),
    ("lag", Column("lag", "how many updates old its groups were in the median, when trained on", screen=Screen.TABLET)),
    ("cost", Column("cost / Mtok", "credit for a million validated tokens", screen=Screen.DESKTOP)),
    ("uploaded", Column("uploaded", "to other nodes, by the receipts of those who received", screen=Screen.DESKTOP)),
    ("", Column("trust", "what audits found: new, known, trusted, held, banned", is_text=True, screen=Screen.DESKTOP)),
    ("rate", Column("tokens/s", "as the node says", screen=Screen.DESKTOP)),
    ("", Column("state", is_text=True)),
)

EMPTY = dict.fromkeys(VIEWS, "Nobody has joined yet.") | {
    "teams": "Nobody is in a team yet: a node called rig@heron is in team heron."
}

DAY_COLUMNS = (
    Column("day", is_text=True),
    Column("credit", "validated on that day"),
    Column("tokens"),
    Column("groups", screen=Screen.TABLET),
    Column("nodes", "whose credit was validated on that day"),
)


@dataclass(frozen=True)
class Wish:
    """What a visitor wants to see; every query string means one."""

    view: str = "nodes"
    sort: str = "score"
    search: str = ""
    page: int = 1

    @classmethod
    def parse(cls, query: Mapping[str, str]) -> "Wish":
        """Whatever is no view, order or page is the first; of the words, what is no character is a question mark."""
        page = query.get("page", "")
        search = query.get("q", "").encode(errors="replace").decode()
        return cls(
            view=view if (view := query.get("view", "")) in VIEWS else "nodes",
            sort=sort if (sort := query.get("sort", "")) in SORTS else "score",
            search=search.strip()[:SEARCH_MAX],
            page=max(1, int(page)) if page.isascii() and page.isdigit() and len(page) < 7 else 1,
        )

    def link(self, **change: Any) -> str:
        """The address of the same with something changed."""
        wish = {"view": self.view, "sort": self.sort, "q": self.search, "page": self.page} | change
        usual = {"view": "nodes", "sort": "score", "q": "", "page": 1}
        return "/?" + urlencode({name: value for name, value in wish.items() if value != usual[name]})


@dataclass(frozen=True)
class BoardFigures:
    """The figures of one moment."""

    status: Mapping[str, Any]
    nodes: Sequence[RankingLine]
    owners: Sequence[RankingLine]
    teams: Sequence[RankingLine]
    days: Mapping[int, Day]
    ledger_size: int
    now_ms: int
    join_string: str
    age_ms: int = 0
    """How old the figures are when the page is made; 0 while that does not matter."""


def render(board: BoardFigures, wish: Wish) -> str:
    """The page."""
    views = (
        el("a", title, href=wish.link(view=view, page=1), aria_current="true" if view == wish.view else None)
        for view, title in VIEWS.items()
    )
    part = _days(board) if wish.view == "days" else _lines(board, wish)
    return document(
        "Leaderboard",
        "/",
        board.join_string,
        strip(board.status, board.now_ms, board.age_ms),
        el("div", el("nav", views, class_="tabs", aria_label="Views"),
           None if wish.view == "days" else _search(wish), class_="tools"),
        live("board", part),
    )  # fmt: skip


def _search(wish: Wish) -> Markup:
    kept = {"view": wish.view, "sort": wish.sort}
    return el(
        "form",
        (el("input", type="hidden", name=name, value=value) for name, value in kept.items()),
        el("label", "Name or id ", el("input", type="search", name="q", value=wish.search, maxlength=SEARCH_MAX)),
        el("button", "Search"),
        role="search",
        action="/",
    )


def _lines(board: BoardFigures, wish: Wish) -> tuple[Any, ...]:
    ranked = {"owners": board.owners, "teams": board.teams}.get(wish.view, board.nodes)
    places = list(enumerate(ranked, 1))
    if wish.search:
        sought = wish.search.casefold()
        places = [(rank, line) for rank, line in places if sought in _searched(line)]
    if wish.sort != "score":
        places.sort(key=lambda place: -SORTS[wish.sort](place[1]))
    pages = max(1, -(-len(places) // LINES_PER_PAGE))
    page = min(wish.page, pages)
    here = places[(page - 1) * LINES_PER_PAGE : page * LINES_PER_PAGE]
    columns = [_sortable(name, column, wish) for name, column in COLUMNS]
    rows = [_cells(rank, line, wish.view) for rank, line in here]
    caption = f"{VIEWS[wish.view]}, sorted by {wish.sort}"
    empty = "Nobody is called that." if wish.search else EMPTY[wish.view]
    return table(caption, columns, rows, empty=empty), _pager(wish, page, pages, len(places))


def _searched(line: RankingLine) -> str:
    return f"{line.name} {line.node_id} {line.owner} {words.owner(line.owner)}".casefold()


def _sortable(name: str, column: Column, wish: Wish) -> Column:
    if not name:
        return column
    chosen = "descending" if name == wish.sort else ""
    link = wish.link(sort=name, page=1)
    return Column(column.title, column.help, column.is_text, Screen.ANY if chosen else column.screen, link, chosen)


def _cells(rank: int, line: RankingLine, view: str) -> list[Any]:
    name: Any = node_link(line.node_id, line.name)
    if view == "owners" and (line.nodes > 1 or line.owner != line.node_id):
        members = f"/?{urlencode({'q': line.owner})}"
        name = [el("a", el("bdi", words.owner(line.owner)), href=members, title=line.owner), f" ({line.nodes})"]
    if view == "teams":
        name = [el("a", el("bdi", line.team), href=f"/?{urlencode({'q': '@' + line.team})}"), f" ({line.nodes})"]
    node = f"/nodes/{line.node_id}"
    return [
        rank,
        name,
        words.whole(round(line.score_micros)),
        el("a", words.whole(line.posted_micros), href=f"{node}#days"),
        words.percent(line.escrow_share),
        el("a", words.whole(line.validated_tokens), href=f"{node}#receipts"),
        _accepted(line),
        words.DASH if line.lag is None else line.lag,
        words.figure(line.cost_micros_per_mtok),
        words.size(line.uploaded_bytes),
        words.DASH if view == "teams" else line.trust,
        words.figure(line.tokens_per_s),
        el("span", line.state, class_=f"state {line.state}"),
    ]


def _accepted(line: RankingLine) -> Any:
    if line.accept_interval is None:
        return words.DASH
    low, high = line.accept_interval
    between = f"{100 * low:.0f}–{100 * high:.0f}"
    told = f"{words.whole(line.accepted)} of {words.whole(line.accepted + line.rejected)}"
    shown = [words.percent(line.accept_ratio), " ", el("small", f"({between})", class_=Screen.TABLET)]
    return el("a", shown, href=f"/nodes/{line.node_id}#refusals", title=told)


def _pager(wish: Wish, page: int, pages: int, lines: int) -> Markup | None:
    if pages == 1:
        return None
    return el(
        "nav",
        el("a", "← better", href=wish.link(page=page - 1), rel="prev") if page > 1 else None,
        el("span", f"page {page} of {pages}, {words.whole(lines)} lines"),
        el("a", "further →", href=wish.link(page=page + 1), rel="next") if page < pages else None,
        class_="pager",
        aria_label="Pages of the board",
    )


def _days(board: BoardFigures) -> Markup:
    days = sorted(board.days.items(), reverse=True)[:DAYS_SHOWN]
    rows = [
        [
            el("a", words.day(number), href=f"/entries/{day.first_entry}"),
            words.whole(day.credit_micros),
            words.whole(day.tokens),
            words.whole(day.groups),
            words.whole(day.nodes),
        ]
        for number, day in days
    ]
    return table("Validated credit by day", DAY_COLUMNS, rows, empty="Nothing is validated yet.")
