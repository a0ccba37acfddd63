"""Routes of the pages: leaderboard, training, a node, the ledger's entries, and the static files that they use.

- First paint needs no script: the server renders everything (`coordinator.pages`), a script only refreshes it.
- The leaderboard and the training page are built once per snapshot and sent compressed; a browser that has a page
  already gets a 304 by its ETag.
- A wrong address gets a page with the error's message.
"""

import mimetypes
from dataclasses import replace
from functools import cache
from importlib import resources

import sqlalchemy as sa
from aiohttp import web

from coordinator.api.http import ROUND
from coordinator.api.snapshot import Page
from coordinator.api.watch import WATCH
from coordinator.pages import board, entries, layout, node, training
from coordinator.pages.board import Wish
from coordinator.reports import history
from coordinator.reports.earning_rates import OwnerPayouts
from coordinator.reports.ranking import RankingLine
from ledger import store
from ledger.store import Recorded
from protocol.errors import NotFound

routes = web.RouteTableDef()

STATIC_AGE_S = 60
"""Time for which a browser may use a script or style without checking for changes."""


@routes.get("/")
async def leaderboard(request: web.Request) -> web.Response:
    """Return the leaderboard as a page."""
    wish = Wish.parse(request.query)
    watched = request.app[WATCH].board
    moment, age_ms = await watched.get(), watched.age_ms()

    def make(figures: board.BoardFigures) -> Page:
        return _html(board.render(replace(figures, age_ms=age_ms), wish))

    return moment.page(f"{wish.link()} {age_ms}", make).reply(request)


@routes.get("/training")
async def training_page(request: web.Request) -> web.Response:
    """Return the training page."""
    watched = request.app[WATCH].training
    moment, age_ms = await watched.get(), watched.age_ms()

    def make(figures: training.Training) -> Page:
        return _html(training.render(replace(figures, age_ms=age_ms)))

    return moment.page(f"/training {age_ms}", make).reply(request)


@routes.get("/nodes/{node:.{1,100}}")
async def node_page(request: web.Request) -> web.Response:
    """Return the page of a node, by its id."""
    round_ = request.app[ROUND]
    figures = (await request.app[WATCH].board.get()).figures
    sought = request.match_info["node"]
    line = next((line for line in figures.nodes if line.node_id == sought), None)
    if line is None:
        return missing(
            request,
            NotFound("No node with this id has joined this round.", hint="Search for the node on the leaderboard."),
        )

    rates = (await request.app[WATCH].rates.get()).figures

    def read(connection: sa.Connection, line: RankingLine) -> node.NodeFigures:
        return node.NodeFigures(
            line=line,
            days=history.days(connection, line.node_id),
            refusals=history.refusals(connection, line.node_id),
            claims=history.claims(connection, line.node_id),
            round_id=round_.round_id,
            now_ms=figures.now_ms,
            join_string=figures.join_string,
            unit=round_.config.round.money,
            pace=rates.pace(line.node_id),
            paid=rates.paid.get(line.owner, OwnerPayouts()),
            payouts=rates.payouts,
        )

    return _html(node.render(await round_.database.read(read, line))).reply(request)


@routes.get("/entries/{index:[0-9]{1,18}}")
async def entries_page(request: web.Request) -> web.Response:
    """Return the page of the ledger's entries from an index on."""
    round_ = request.app[ROUND]
    start = int(request.match_info["index"])

    def read(connection: sa.Connection) -> tuple[list[Recorded], int]:
        return store.entries(connection, start, entries.SHOWN), store.size(connection)

    recorded, size = await round_.database.read(read)
    join = round_.config.round.join_string(round_.round_id)
    return _html(entries.render(start, recorded, size, join, round_.config.round.money)).reply(request)


@routes.get("/static/{name:[a-z]+[.][a-z]+}")
async def static(request: web.Request) -> web.Response:
    """Return a style sheet, script or icon of the pages."""
    page = _static().get(request.match_info["name"])
    if page is None:
        raise NotFound(f"There is nothing at {request.path[:100]}.")
    return page.reply(request)


@cache
def _static() -> dict[str, Page]:
    """Return all static files, read once."""
    folder = resources.files("coordinator").joinpath("pages/static")
    return {
        file.name: Page(file.read_bytes(), _content_type(file.name), f"max-age={STATIC_AGE_S}")
        for file in folder.iterdir()
        if file.is_file()
    }


def _content_type(name: str) -> str:
    kind = mimetypes.guess_type(name)[0] or "application/octet-stream"
    return kind if kind.startswith("image/") else f"{kind}; charset=utf-8"


def _html(text: str, status: int = 200) -> Page:
    # Lone surrogates in a name have no UTF-8 form; they are replaced instead of raising an error.
    return Page(text.encode(errors="replace"), "text/html; charset=utf-8", status=status)


def missing(request: web.Request, error: NotFound) -> web.Response:
    """Render the page for a wrong address."""
    round_ = request.app[ROUND]
    text = layout.error_page("Not found", error.message, error.hint, round_.config.round.join_string(round_.round_id))
    return _html(text, error.http_status).reply(request)
