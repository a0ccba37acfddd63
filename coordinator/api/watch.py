"""What visitors see of a round: the board and the training figures, each computed once for all who look at a moment.

- Everything is read beside the writer, in one transaction for each kind of figures.
- While somebody listens, one task looks at the board every `LOOK_S` for all listeners; else only who asks does.
- A listener gets the newest state and never a queue: who is slow skips what it missed. States have a name made of their
  content, so who comes back with that name is told only what it does not know.

`/events` sends a `moment` whenever the figures of the pages have changed (server-sent events).

    id: 9f86d081884c7d65
    event: moment
    data: {"phase": "learning", "version": 7, "update": 19, …}

- Whoever comes back with `Last-Event-ID` hears only of what it does not know; there is no history to replay, since
  every event has the whole state.
- A comment goes out every `BEAT_S`, so that proxies and both ends know that the other is there.
- Who does not read for `BEAT_S` is let go. There are so many streams and no more, of all together and of one
  neighbourhood: 503 means to ask now and then. Where all are taken, the neighbourhood with most loses its newest.
- A proxy on this machine names whom it speaks for in `X-Forwarded-For`. Without that, this machine has a quarter.
"""

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from hashlib import sha256
from typing import Any

import sqlalchemy as sa
from aiohttp import web

from coordinator.api.guard import HERE, Bounds, caller, place
from coordinator.api.snapshot import SECURITY, PageSnapshot
from coordinator.base.clock import now_ms
from coordinator.pages.board import BoardFigures
from coordinator.pages.training import Training
from coordinator.reports import curves, history, summary
from coordinator.reports.curves import Curves
from coordinator.reports.ranking import Fold, by_node, by_owner, by_team
from coordinator.service.round import Round
from coordinator.store.tables import versions
from coordinator.transactions import evaluations, orders, standings
from ledger import store

LOOK_S = 2.0
SHARES = 4
"""This machine has one of so many shares of all streams: a proxy that does not name its callers speaks for many."""


@dataclass(frozen=True)
class WatchState:
    """What is told to listeners: enough to know that the pages have changed, and a line to read."""

    name: str
    data: str


class Watch:
    """The newest figures of one round, and who waits for newer ones."""

    def __init__(self, here: Round, bounds: Bounds) -> None:
        self._here = here
        self._bounds = bounds
        self._fold = Fold()
        self._curves = Curves()
        self.board = PageSnapshot(self._board)
        self.training = PageSnapshot(self._training)
        self.listeners = Counter[str]()
        """Open streams by the place that they go to."""
        self._streams: dict[asyncio.Timeout, str] = {}
        """The same, one by one, the newest last; each ends when its time does."""
        self._state: WatchState | None = None
        self._changed = asyncio.Event()
        self._wanted = asyncio.Event()

    async def run(self, _app: web.Application) -> AsyncIterator[None]:
        """Produce states as long as the application lives."""
        task = asyncio.create_task(self._produce())
        yield
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task
        await self.board.close()
        await self.training.close()

    def has_room(self, address: str) -> bool:
        """Whether one more may listen from there, if need be in the place of the newest from where most do."""
        here = place(address, self._bounds.own_addresses)
        share = self._bounds.listeners // SHARES if here == HERE else self._here.config.round.listeners_per_address
        if 0 < share <= self.listeners[here]:
            return False
        if self.listeners.total() < self._bounds.listeners:
            return True
        most = max(self.listeners, key=lambda one: self.listeners[one])
        newest = next((stream for stream, where in reversed(self._streams.items()) if where == most), None)
        if newest is None or self.listeners[most] <= self.listeners[here] + 1:
            return False
        del self._streams[newest]
        newest.reschedule(asyncio.get_running_loop().time())
        return True

    @asynccontextmanager
    async def listening(self, address: str) -> AsyncIterator[None]:
        """While somebody does, states are produced; ends in `TimeoutError` where another gets the place."""
        here, stream = place(address, self._bounds.own_addresses), asyncio.timeout(None)
        self.listeners[here] += 1
        self._streams[stream] = here
        self._wanted.set()
        try:
            async with stream:
                yield
        finally:
            self._streams.pop(stream, None)
            self.listeners[here] -= 1
            if not self.listeners[here]:
                del self.listeners[here]

    async def state_after(self, name: str) -> WatchState:
        """The newest state, once it is another than the named one."""
        while self._state is None or self._state.name == name:
            await self._changed.wait()
        return self._state

    async def _produce(self) -> None:
        while True:
            await self._wanted.wait()
            with suppress(Exception):  # the snapshot has logged it, and the next look may succeed
                self._look((await self.board.get()).figures)
            if not self.listeners:
                self._wanted.clear()
            await asyncio.sleep(LOOK_S)

    def _look(self, board: BoardFigures) -> None:
        told = {name: board.status[name] for name in TOLD}
        data = json.dumps(told | {"ledger_size": board.ledger_size, "seen": _seen(board)})
        name = sha256(data.encode()).hexdigest()[:16]
        if self._state is None or self._state.name != name:
            self._state = WatchState(name, data)
            self._changed.set()
            self._changed = asyncio.Event()

    async def _board(self) -> BoardFigures:
        return await self._here.database.read(self._read_board, now_ms())

    def _read_board(self, connection: sa.Connection, moment_ms: int) -> BoardFigures:
        self._fold.read(connection)
        levels = standings.levels(connection, self._here.audits.rules)
        nodes = by_node(connection, self._fold, levels, silent_after_ms=self._here.silent_after_ms, now_ms=moment_ms)
        return BoardFigures(
            status=self._status(connection, moment_ms),
            nodes=nodes,
            owners=by_owner(nodes),
            teams=by_team(nodes),
            days=dict(self._fold.days),
            ledger_size=store.size(connection),
            now_ms=moment_ms,
            join_string=self._here.config.round.join_string(self._here.round_id),
        )

    async def _training(self) -> Training:
        return await self._here.database.read(self._read_training, now_ms())

    def _read_training(self, connection: sa.Connection, moment_ms: int) -> Training:
        self._curves.read(connection)
        status = self._status(connection, moment_ms)
        last = status["broadcast"]
        return Training(
            status=status,
            metrics=self._curves.metrics(),
            evaluations=evaluations.list_evaluations(connection),
            idle_share=self._curves.idle_share(),
            cost_micros=self._curves.cost_micros(),
            ages=curves.ages(connection),
            spreads=curves.spreads(connection),
            branches=curves.tree(connection, last["version"]) if last else [],
            incidents=history.incidents(connection),
            orders=orders.about(connection),
            now_ms=moment_ms,
            join_string=self._here.config.round.join_string(self._here.round_id),
        )

    def _status(self, connection: sa.Connection, moment_ms: int) -> dict[str, Any]:
        here = self._here
        since_ms = moment_ms - here.silent_after_ms
        found = summary.status(connection, config=here.config, alive_since_ms=since_ms, now_ms=moment_ms)
        published = sa.select(versions.c.published_ms).where(versions.c.version == found["version"])
        return found | here.public_settings() | {"published_ms": connection.execute(published).scalar()}


WATCH = web.AppKey("watch", Watch)

TOLD = ("phase", "fraction", "version", "update", "nodes_alive", "nodes_up_to_date", "rollouts", "alarm", "finished")


def _seen(board: BoardFigures) -> str:
    """Changes when any node's state does."""
    return sha256("".join(line.state[0] for line in board.nodes).encode()).hexdigest()[:8]


routes = web.RouteTableDef()

BEAT_S = 15.0
RETRY_MS = 5000
"""How long a browser waits before it comes back."""


@routes.get("/v1/events")
async def events(request: web.Request) -> web.StreamResponse:
    """The round as it happens, as server-sent events."""
    watch = request.app[WATCH]
    address = caller(request)
    if not watch.has_room(address):
        return web.Response(status=503, text="Too many listen; ask again instead.\n", headers={"Retry-After": "30"})
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
