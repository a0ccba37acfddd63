"""Figures for visitors, and their events: leaderboard and training figures, each computed once for all visitors.

- Everything is read outside the writer, in one transaction for each kind of figures.
- While there are listeners, one task reads the leaderboard every `LOOK_S` for all of them.
- A listener gets the newest state, never a queue: a slow one skips states. A state's name is a hash of its content, so
  a listener that reconnects with that name gets only a newer state.

`/v1/events` sends a `moment` whenever the figures of the pages have changed (server-sent events).

    id: 9f86d081884c7d65
    event: moment
    data: {"phase": "learning", "version": 7, "update": 19, …}

- A client that reconnects with `Last-Event-ID` gets only newer states; there is no history to replay, since every event
  has the whole state.
- A comment is sent every `BEAT_S`, so that proxies and both ends detect a lost connection.
- A client that does not read for `BEAT_S` is disconnected. The number of streams is limited, in total and for each
  neighbourhood; a client that gets 503 should poll. When the server is full, the neighbourhood with the most streams
  loses its newest.
- A client behind a trusted proxy counts as itself. A proxy that names nobody has a quarter of the streams.
"""

import asyncio
import functools
import json
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, replace
from hashlib import sha256
from typing import Any

import sqlalchemy as sa
from aiohttp import web

from coordinator.api.caller import HERE, caller, place
from coordinator.api.guard import Bounds
from coordinator.api.snapshot import SECURITY, PageSnapshot
from coordinator.base.clock import now_ms
from coordinator.pages.board import BoardFigures
from coordinator.pages.front import FrontFigures
from coordinator.pages.layout import Site
from coordinator.pages.training import Training
from coordinator.reports import curves, earning_rates, history, summary
from coordinator.reports.curves import Curves
from coordinator.reports.earning_rates import EarningRates, RateFigures
from coordinator.reports.evaluation_samples import SampleArchive
from coordinator.reports.ranking import Fold, by_node, by_owner, by_team
from coordinator.service.round import Round
from coordinator.store.tables import versions
from coordinator.tasks.kinds import task_label
from coordinator.transactions import evaluations, orders, standings, suite_runs
from ledger import store
from protocol.policy.phrase import phrase
from protocol.work.learning import EvaluationSamples

LOOK_S = 2.0
RATES_FRESH_S = 5.0
"""Age up to which rates and payouts are shown without a new computation, which reads only new entries: every agent asks
for its own each minute, and a newcomer looks for its first credit."""

SHARES = 4
"""The share of all streams for a proxy that does not name its clients is 1 / `SHARES`."""


def site_of(round_: Round) -> Site:
    """Return what all pages of a round share."""
    settings, round_id = round_.config.round, round_.round_id
    return Site(
        settings.join_string(round_id),
        settings.describe(round_id),
        task_label(round_.config),
        _phrase(round_id),
        bool(settings.agent_wheel),
        round_.news.finished,
    )


_phrase = functools.cache(phrase)


@dataclass(frozen=True)
class WatchState:
    """The state sent to listeners: a name that changes with the pages, and the figures of one line."""

    name: str
    data: str


class Watch:
    """The newest figures of one round, and the listeners that wait for newer ones."""

    def __init__(self, round_: Round, bounds: Bounds) -> None:
        self._round = round_
        self._bounds = bounds
        self._fold = Fold()
        self._curves = Curves()
        self._archive = SampleArchive(round_.config.eval.publish_samples)
        self.board = PageSnapshot(self._board)
        self.training = PageSnapshot(self._training)
        self.front = PageSnapshot(self._front)
        self._rates = EarningRates()
        self.rates = PageSnapshot(self._earning_rates, fresh_s=RATES_FRESH_S, shown_at_most_s=3 * RATES_FRESH_S)
        self.listeners = Counter[str]()
        """Number of open streams by place."""
        self._streams: dict[asyncio.Timeout, str] = {}
        """Place of each open stream, newest last; a stream ends when its time-out expires."""
        self._state: WatchState | None = None
        self._changed = asyncio.Event()
        self._wanted = asyncio.Event()

    async def run(self, _app: web.Application) -> AsyncIterator[None]:
        """Produce states for as long as the application lives."""
        task = asyncio.create_task(self._produce())
        yield
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task
        await self.front.close()
        await self.board.close()
        await self.training.close()
        await self.rates.close()

    def has_room(self, address: str) -> bool:
        """Return True if `address` may open another event stream.

        When the server is full, the newest stream of the place with most streams is closed to make room.
        """
        where = place(address, self._bounds.proxies)
        share = self._bounds.listeners // SHARES if where == HERE else self._round.config.round.listeners_per_address
        if 0 < share <= self.listeners[where]:
            return False
        if self.listeners.total() < self._bounds.listeners:
            return True
        most = max(self.listeners, key=lambda address: self.listeners[address])
        newest = next((stream for stream, holder in reversed(self._streams.items()) if holder == most), None)
        if newest is None or self.listeners[most] <= self.listeners[where] + 1:
            return False
        del self._streams[newest]
        newest.reschedule(asyncio.get_running_loop().time())
        return True

    @asynccontextmanager
    async def listening(self, address: str) -> AsyncIterator[None]:
        """Count an open stream, for which states are produced; raise `TimeoutError` when another stream replaces it."""
        where, stream = place(address, self._bounds.proxies), asyncio.timeout(None)
        self.listeners[where] += 1
        self._streams[stream] = where
        self._wanted.set()
        try:
            async with stream:
                yield
        finally:
            self._streams.pop(stream, None)
            self.listeners[where] -= 1
            if not self.listeners[where]:
                del self.listeners[where]

    async def state_after(self, name: str) -> WatchState:
        """Return the newest state; wait while it is the one called `name`."""
        while self._state is None or self._state.name == name:
            await self._changed.wait()
        return self._state

    async def _produce(self) -> None:
        while True:
            await self._wanted.wait()
            with suppress(Exception):  # the snapshot has logged it, and the next attempt may succeed
                self._compare((await self.board.get()).figures)
            if not self.listeners:
                self._wanted.clear()
            await asyncio.sleep(LOOK_S)

    def _compare(self, board: BoardFigures) -> None:
        state = {name: board.status[name] for name in TOLD}
        data = json.dumps(state | {"ledger_size": board.ledger_size, "seen": _seen(board)})
        name = sha256(data.encode()).hexdigest()[:16]
        if self._state is None or self._state.name != name:
            self._state = WatchState(name, data)
            self._changed.set()
            self._changed = asyncio.Event()

    async def _board(self) -> BoardFigures:
        return await self._round.database.read(self._read_board, now_ms())

    def _read_board(self, connection: sa.Connection, moment_ms: int) -> BoardFigures:
        self._fold.read(connection)
        levels = standings.levels(connection, self._round.audits.settings)
        nodes = by_node(connection, self._fold, levels, silent_after_ms=self._round.silent_after_ms, now_ms=moment_ms)
        return BoardFigures(
            status=self._status(connection, moment_ms),
            nodes=nodes,
            owners=by_owner(nodes),
            teams=by_team(nodes),
            days=dict(self._fold.days),
            ledger_size=store.size(connection),
            now_ms=moment_ms,
            site=site_of(self._round),
        )

    async def _earning_rates(self) -> RateFigures:
        config = self._round.config
        return await self._round.database.read(
            lambda connection: earning_rates.figures(connection, self._rates, config, now_ms())
        )

    async def _training(self) -> Training:
        training = await self._round.database.read(self._read_training, now_ms())
        return replace(training, samples=await self.samples() if self.publishes_samples else None)

    @property
    def publishes_samples(self) -> bool:
        return self._round.config.eval.publish_samples > 0

    async def samples(self) -> list[EvaluationSamples]:
        """Return the samples of evaluations, as many as the round publishes, newest evaluation first."""
        if not self._round.news.version:
            return []
        text = await self._round.policy.text()
        return await self._round.database.read(self._archive.read, text.decode)

    def _read_training(self, connection: sa.Connection, moment_ms: int) -> Training:
        self._curves.read(connection)
        status = self._status(connection, moment_ms)
        last = status["broadcast"]
        return Training(
            status=status,
            metrics=self._curves.metrics(),
            evaluations=evaluations.list_evaluations(connection),
            suites=suite_runs.list_runs(connection),
            idle_share=self._curves.idle_share(),
            cost_micros=self._curves.cost_micros(),
            ages=curves.ages(connection),
            spreads=curves.spreads(connection),
            branches=curves.tree(connection, last["version"]) if last else [],
            incidents=history.incidents(connection),
            orders=orders.about(connection),
            published=curves.published(connection),
            now_ms=moment_ms,
            site=site_of(self._round),
        )

    async def _front(self) -> FrontFigures:
        board, training = await self.board.get(), await self.training.get()
        return FrontFigures(board.figures, training.figures)

    def _status(self, connection: sa.Connection, moment_ms: int) -> dict[str, Any]:
        round_ = self._round
        since_ms = moment_ms - round_.silent_after_ms
        status = summary.status(connection, config=round_.config, alive_since_ms=since_ms, now_ms=moment_ms)
        published = sa.select(versions.c.published_ms).where(versions.c.version == status["version"])
        return status | round_.public_settings() | {"published_ms": connection.execute(published).scalar()}


WATCH = web.AppKey("watch", Watch)

TOLD = ("phase", "fraction", "version", "update", "nodes_alive", "nodes_up_to_date", "rollouts", "alarm", "finished")


def _seen(board: BoardFigures) -> str:
    """Return a text that changes whenever the state of a node changes."""
    return sha256("".join(line.state[0] for line in board.nodes).encode()).hexdigest()[:8]


routes = web.RouteTableDef()

BEAT_S = 15.0
RETRY_MS = 5000
"""Time after which a browser reconnects."""


@routes.get("/v1/events")
async def events(request: web.Request) -> web.StreamResponse:
    """Send the state of the round as server-sent events."""
    watch = request.app[WATCH]
    address = caller(request)
    if not watch.has_room(address):
        return web.Response(
            status=503, text="Too many event streams are open. Poll the page instead.\n", headers={"Retry-After": "30"}
        )
    headers = {**SECURITY, "Cache-Control": "no-store", "X-Accel-Buffering": "no", "Content-Type": "text/event-stream"}
    stream = web.StreamResponse(headers=headers)
    await stream.prepare(request)
    known = request.headers.get("Last-Event-ID", "")
    said = f"retry: {RETRY_MS}\n\n"
    with suppress(ConnectionError, TimeoutError):
        async with watch.listening(address):
            while True:
                async with asyncio.timeout(BEAT_S):
                    await stream.write(said.encode())
                try:
                    async with asyncio.timeout(BEAT_S):
                        state = await watch.state_after(known)
                except TimeoutError:
                    said = ": still here\n\n"
                else:
                    known = state.name
                    said = f"id: {state.name}\nevent: moment\ndata: {state.data}\n\n"
    return stream
