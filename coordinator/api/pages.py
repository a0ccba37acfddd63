"""Routes of the pages: front page, leaderboard, training, a node, the ledger's entries, and their static files.

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
from coordinator.api.snapshot import SECURITY, Page
from coordinator.api.strangers import read_for_stranger
from coordinator.api.watch import WATCH, site_of
from coordinator.pages import board, entries, feed, front, joining, layout, node, pictures, training, usage, verifying
from coordinator.pages.board import Wish
from coordinator.reports import history
from coordinator.reports.earning_rates import OwnerPayouts
from coordinator.reports.ranking import RankingLine
from coordinator.store.tables import nodes, versions
from ledger import store
from protocol.errors import NotFound

routes = web.RouteTableDef()

STATIC_AGE_S = 60
"""Time for which a browser may use a script or style without checking for changes."""

PICTURE_AGE_S = 300
"""Time for which another site's visitors may be shown the same badge."""


@routes.get("/")
async def front_page(request: web.Request) -> web.Response:
    """Return the front page; the leaderboard had this address once, with a query."""
    if Wish.asks(request.query):
        return web.Response(
            status=302, headers={**SECURITY, "Location": f"/leaderboard?{request.rel_url.raw_query_string}"}
        )
    watch = request.app[WATCH]
    moment, age_ms = await watch.front.get(), watch.board.age_ms()

    def make(figures: front.FrontFigures) -> Page:
        return _html(front.render(replace(figures, board=replace(figures.board, age_ms=age_ms))))

    return moment.page(f"/ {age_ms}", make).reply(request)


@routes.get("/join")
async def join_page(request: web.Request) -> web.Response:
    """Return the page with the commands to join."""
    return _html(joining.render(site_of(request.app[ROUND]))).reply(request)


@routes.get("/leaderboard")
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


@routes.get("/nodes/{node:[^/]{1,100}}")
async def node_page(request: web.Request) -> web.Response:
    """Return the page of a node, by its id."""
    try:
        figures = await _node(request)
    except NotFound as error:
        return missing(request, error)
    return _html(node.render(figures)).reply(request)


@routes.get("/nodes/{node:[^/]{1,100}}/{picture:badge|card}.svg")
async def node_picture(request: web.Request) -> web.Response:
    """Return a node's badge or card, for pages of others."""
    figures = (await request.app[WATCH].board.get()).figures  # other sites ask for many: no other statement for each
    rank, line = _ranked(figures, request.match_info["node"])
    draw = pictures.badge if request.match_info["picture"] == "badge" else pictures.card
    text = draw(node.contribution(line, rank, len(figures.nodes), figures.site, request.app[ROUND].config.round.money))
    return Page(text.encode(errors="replace"), "image/svg+xml", f"max-age={PICTURE_AGE_S}").reply(request)


async def _node(request: web.Request) -> node.NodeFigures:
    round_ = request.app[ROUND]
    figures = (await request.app[WATCH].board.get()).figures
    rank, line = _ranked(figures, request.match_info["node"])
    rates = (await request.app[WATCH].rates.get()).figures

    def read(connection: sa.Connection) -> node.NodeFigures:
        return node.NodeFigures(
            line=line,
            days=history.days(connection, line.node_id),
            refusals=history.refusals(connection, line.node_id),
            claims=history.claims(connection, line.node_id),
            round_id=round_.round_id,
            now_ms=figures.now_ms,
            site=figures.site,
            unit=round_.config.round.money,
            pace=rates.pace(line.node_id),
            paid=rates.paid.get(line.owner, OwnerPayouts()),
            payouts=rates.payouts,
            rank=rank,
            nodes=len(figures.nodes),
            finished=round_.news.finished,
        )

    return await read_for_stranger(request, read)


def _ranked(figures: board.BoardFigures, node_id: str) -> tuple[int, RankingLine]:
    """Return a node's place on the leaderboard, and its line."""
    found = next(((rank, line) for rank, line in enumerate(figures.nodes, 1) if line.node_id == node_id), None)
    if found is None:
        raise NotFound("No node with this id has joined this round.", hint="Search for the node on the leaderboard.")
    return found


@routes.get("/entries/{index:[0-9]{1,18}}")
async def entries_page(request: web.Request) -> web.Response:
    """Return the page of the ledger's entries from an index on."""
    return await _entries(request, int(request.match_info["index"]))


@routes.get("/entries")
async def newest_entries(request: web.Request) -> web.Response:
    """Return the page of the ledger's newest entries."""
    return await _entries(request, None)


async def _entries(request: web.Request, index: int | None) -> web.Response:
    round_ = request.app[ROUND]

    def read(connection: sa.Connection) -> entries.EntriesPage:
        size = store.size(connection)
        start = entries.newest_start(size) if index is None else index
        recorded = store.entries(connection, start, 2 * entries.SHOWN if index is None else entries.SHOWN)
        named = sa.select(nodes.c.node_id, nodes.c.name).where(nodes.c.node_id.in_(entries.node_ids(recorded)))
        names = {row.node_id: row.name for row in connection.execute(named)}
        return entries.EntriesPage(start, recorded, size, names, newest_first=index is None)

    page = await read_for_stranger(request, read)
    return _html(entries.render(page, site_of(round_), round_.config.round.money)).reply(request)


@routes.get("/verify.html")
async def verify_page(request: web.Request) -> web.Response:
    """Return the page that checks a whole round in the browser, as one file to save."""
    return _verifier().reply(request)


@routes.get("/usage")
async def usage_page(request: web.Request) -> web.Response:
    """Return the page that asks for the usage of API keys, with the key or token that its visitor pastes."""
    return _html(usage.render(site_of(request.app[ROUND]))).reply(request)


@cache
def _verifier() -> Page:
    return replace(_html(verifying.render()), policy=verifying.policy())


@routes.get("/static/{name:[a-z]+[.][a-z]+}")
async def static(request: web.Request) -> web.Response:
    """Return a style sheet, script or icon of the pages."""
    page = _static().get(request.match_info["name"])
    if page is None:
        raise NotFound(f"There is nothing at {request.path[:100]}.")
    return page.reply(request)


@routes.get("/feed.atom")
async def news(request: web.Request) -> web.Response:
    """Return the last versions and incidents as an Atom feed."""
    round_ = request.app[ROUND]

    def read(connection: sa.Connection) -> tuple[list[feed.PublishedVersion], list[history.Incident]]:
        newest = sa.select(versions).order_by(versions.c.version.desc()).limit(feed.ENTRIES_MAX)
        rows = [
            feed.PublishedVersion(row.version, row.policy_update, row.published_ms)
            for row in connection.execute(newest)
        ]
        return rows, history.incidents(connection)

    text = feed.render(site_of(round_), *await read_for_stranger(request, read), round_.round_id)
    return Page(text.encode(errors="replace"), "application/atom+xml; charset=utf-8").reply(request)


@routes.get("/favicon.ico")
async def favicon(request: web.Request) -> web.Response:
    """Return the icon, for browsers that ask for it by this name."""
    return _static()["icon.png"].reply(request)


@routes.get("/robots.txt")
async def robots(request: web.Request) -> web.Response:
    """Return what search engines may index: the pages, and not the data of programs."""
    text = "User-agent: *\nDisallow: /v1/\nDisallow: /stats/\nDisallow: /metrics\n"
    return Page(text.encode(), "text/plain; charset=utf-8", f"max-age={STATIC_AGE_S}").reply(request)


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
    text = layout.error_page("Not found", error.message, error.hint, site_of(round_))
    return _html(text, error.http_status).reply(request)
