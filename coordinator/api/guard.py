"""Limits on what callers can consume before a signature is checked: memory for bodies, connections, and time.

Bodies have a budget in memory, and each neighbourhood of addresses a share of it.

- A body above `FREE_BYTES` reserves its declared length before a byte of it is read, or the bytes received so far if it
  declares none. It releases them when its request is answered. Smaller bodies are bounded by the connections.
- A neighbourhood has at most a quarter. When its quarter or the whole is used up, a client gets 503 + Retry-After.
- When the whole is used up, a client of a smaller neighbourhood takes room from the largest one, whose oldest
  unfinished body is dropped: honest bodies end.
- A client behind a trusted proxy that names it counts as itself (`coordinator.api.caller`). A proxy that names nobody
  has no share, and no body of it is dropped: it should hold bodies until they are whole.
- Bodies sent with the operator's token are not counted.

Connections of one neighbourhood are limited too, and answers are not kept for callers that do not read them. Each
connection has two more deadlines than aiohttp's: for the head of a request and for a TLS handshake. `Bounds` holds the
numbers with their reasons; `protocol.limits` has the limits of messages.

- Every `look_s` all connections are checked, also those in a TLS handshake. If a neighbourhood has more than its share,
  its newest connections are closed.
- The total is the number of files that this process may open, less those that it needs itself. Above it, shares shrink
  until the rest fits: the largest neighbourhoods lose connections first.
- A connection that has not sent the whole head of a request within `head_s` is closed, also a proxy's: proxies send
  heads at once. The time of the first head begins with the connection, of the next with its first byte: a connection
  may be idle before.
- An unread answer in memory may take `grace_s` plus the time that its size needs at `bytes_per_s`. The time begins anew
  when more is written, as in a stream that is being read. All unread answers together hold at most `unread_bytes`;
  above it, the largest are closed first.
- Connections from this machine and from `round.trusted_proxies` have no share, since they serve many clients: a proxy
  must limit its clients' connections itself.
"""

import asyncio
import resource
import sys
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from ssl import SSLContext
from typing import Any

from aiohttp import web
from aiohttp.http import HttpProcessingError

from coordinator.api.caller import HERE, THIS_MACHINE, Networks, place, place_of
from protocol import limits
from protocol.errors import ConfigInvalid, Overloaded
from protocol.limits import KIB, MIB
from protocol.people.addresses import host_and_port

FILES_KEPT = 128
"""Files reserved for the store, chunks being sent, and pipes to child processes."""


SERVER = "echo-swarm"
"""The header `Server` of every answer; aiohttp's own has its version and Python's."""


def connections_max() -> int:
    """Return the number of connections for which this process has files."""
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return max(files - FILES_KEPT, files // 2) if files != resource.RLIM_INFINITY else sys.maxsize


@dataclass(frozen=True)
class Bounds:
    """Bounds on the time, connections and memory of callers."""

    proxies: Networks = THIS_MACHINE
    """Networks of this machine and of trusted proxies."""
    look_s: float = 2.0
    """Seconds between two checks of all connections."""
    connections: int = field(default_factory=connections_max)
    handshake_s: float = 10.0
    """The limit of a TLS handshake: two round trips, with a few retransmissions on a bad line."""
    head_s: float = 10.0
    """The limit of a request's head: one packet, with a few retransmissions on a bad line."""
    idle_s: float = 75.0
    """Idle time between two requests of a connection: longer than the time-out of proxies."""
    grace_s: float = 30.0
    bytes_per_s: float = 8 * KIB
    """Minimum rate of a body after `grace_s`: a tenth of the slowest home lines. It applies to unread answers, too."""
    unread_bytes: int = 256 * MIB
    """Total of all unread answers: enough for a few slow readers of the largest files of the ledger and the board."""
    bodies_bytes: int = 256 * MIB
    """Total of all bodies: about thirty of the largest. A body is in memory twice while its pieces are joined."""
    lease_hold_s: float = 2.0
    """The longest wait of an idle node's request for leases: it learns of a version or a query without polling."""
    query_s: float = 600.0
    """The longest that a query waits for its answer: as long as the clients of OpenAI's own API wait."""
    query_alive_s: float = 15.0
    """Time after which a stream of the endpoint without news gets a comment, so that no proxy closes it."""
    listeners: int = 1000
    """Open event streams; each costs a socket and a few kilobytes. Further clients are asked to poll instead."""


BOUNDS = web.AppKey("bounds", Bounds)


SHARES = 4

FREE_BYTES = limits.SMALL_REQUEST_MAX_BYTES


@dataclass(eq=False)
class Body:
    """The body of a request that is being received or handled."""

    place: str
    patience: asyncio.Timeout
    """Ends the reading of a dropped body."""
    size: int = 0
    is_given_up: bool = False


class Bodies:
    """The memory held by all request bodies of one server."""

    def __init__(self, budget_bytes: int) -> None:
        self._budget_bytes = budget_bytes
        self.held_bytes = 0
        self._held = Counter[str]()
        """Bytes by place."""
        self._coming: dict[str, dict[Body, None]] = {}
        """Unfinished bodies by place, oldest first."""

    @asynccontextmanager
    async def coming(self, request: web.Request) -> AsyncIterator[Body]:
        """Track a body while it is read, when it may be dropped; it keeps its memory until its request is answered."""
        request[HELD] = body = Body(place_of(request), asyncio.timeout(None))
        try:
            async with body.patience:
                yield body
        except TimeoutError:
            raise _full() from None
        finally:
            self._is_no_longer_coming(body)
        if body.is_given_up:  # with its last byte on the way
            raise _full()

    def grow(self, body: Body, size: int) -> None:
        """Reserve memory for `body` up to `size` bytes in total; raise `Overloaded` if there is none."""
        more = size - body.size
        if size <= FREE_BYTES or more <= 0:
            return
        if body.place != HERE and self._held[body.place] + more > self._budget_bytes // SHARES:
            raise _full()
        while self.held_bytes + more > self._budget_bytes:
            self._give_one_up(for_less_than=self._held[body.place] + more)
        self._coming.setdefault(body.place, {})[body] = None
        self._hold(body, more)

    def release(self, body: Body) -> None:
        """Release the memory of `body`."""
        self._is_no_longer_coming(body)
        self._hold(body, -body.size)

    def _give_one_up(self, *, for_less_than: int) -> None:
        """Drop the oldest unfinished body of the place that holds most."""
        largest = max(
            (where for where in self._coming if where != HERE), key=lambda where: self._held[where], default=HERE
        )
        if largest == HERE or self._held[largest] <= for_less_than:
            raise _full()
        oldest = next(iter(self._coming[largest]))
        oldest.is_given_up = True
        oldest.patience.reschedule(asyncio.get_running_loop().time())
        self.release(oldest)

    def _hold(self, body: Body, more: int) -> None:
        body.size += more
        self.held_bytes += more
        self._held[body.place] += more
        if not self._held[body.place]:
            del self._held[body.place]

    def _is_no_longer_coming(self, body: Body) -> None:
        others = self._coming.get(body.place, {})
        others.pop(body, None)
        if not others:
            self._coming.pop(body.place, None)


BODIES = web.AppKey("bodies", Bodies)
HELD = web.RequestKey("held", Body)


@web.middleware
async def held_until_answered(
    request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> web.StreamResponse:
    """Release the memory of a request's body when it is answered or its client has disconnected."""
    try:
        return await handler(request)
    finally:
        if HELD in request:
            request.app[BODIES].release(request[HELD])


def _full() -> Overloaded:
    return Overloaded(
        "The server is receiving too many large requests.", hint="Send the request again in a few seconds."
    )


class Connection(web.RequestHandler):
    """An HTTP connection that records since when it has been receiving the head of a request.

    The first head begins with the connection, every other one with its first byte.
    """

    __slots__ = ("head_since_s",)

    def __init__(self, manager: web.Server, *, loop: asyncio.AbstractEventLoop, **options: Any) -> None:
        super().__init__(manager, loop=loop, **options)
        self.head_since_s: float | None = None
        """None while no head is expected: a request is being answered, or the connection is idle."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self.head_since_s = self._loop.time()

    def data_received(self, data: bytes) -> None:
        requests = self._request_count
        super().data_received(data)
        is_idle = self._waiter is not None and not self._waiter.done()
        if self._request_count > requests:
            self.head_since_s = None
        elif self.head_since_s is None and is_idle:
            self.head_since_s = self._loop.time()

    def handle_error(self, *args: Any, **options: Any) -> web.StreamResponse:
        """Answer bytes that are no request, which reach no handler."""
        response = super().handle_error(*args, **options)
        response.headers["Server"] = SERVER
        return response

    def log_exception(self, *args: Any, **options: Any) -> None:
        """Log a failure of our own, and nothing about bytes that are no request: a stranger could fill the disk."""
        if not isinstance(options.get("exc_info"), HttpProcessingError):
            super().log_exception(*args, **options)


class _Server(web.Server):
    """A server that creates `Connection` objects."""

    def __call__(self) -> web.RequestHandler:
        return Connection(self, loop=self._loop, **self._kwargs)


class Handshake(asyncio.Protocol):
    """A connection during its TLS handshake; an HTTP connection then replaces it."""

    def __init__(self, runner: "Runner", secure: SSLContext, handshake_s: float) -> None:
        self._runner, self._secure, self._handshake_s = runner, secure, handshake_s
        self._early = b""
        """Bytes received between the handshake and the start of the HTTP connection."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        transport.pause_reading()
        self._runner.handshakes[self] = transport
        self._task = asyncio.get_running_loop().create_task(self._agree(transport))

    def data_received(self, data: bytes) -> None:
        self._early += data

    async def _agree(self, transport: asyncio.Transport) -> None:
        loop, deadline_s = asyncio.get_running_loop(), self._handshake_s
        try:
            made = await loop.start_tls(
                transport,
                self,
                self._secure,
                server_side=True,
                ssl_handshake_timeout=deadline_s,
                ssl_shutdown_timeout=deadline_s,
            )
        except OSError:  # the fault of the client or of the line
            transport.abort()
            return
        finally:
            del self._runner.handshakes[self]
        server = self._runner.server
        if made is None or made.is_closing() or server is None:  # disconnected, or this server is stopping
            transport.abort()
            return
        connection = server()
        made.set_protocol(connection)
        connection.connection_made(made)
        if self._early:
            connection.data_received(self._early)


async def _name_server(_request: web.Request, response: web.StreamResponse) -> None:
    response.headers["Server"] = SERVER


class Runner(web.AppRunner):
    """A runner that serves an application over `Connection` objects."""

    def __init__(self, app: web.Application, **options: Any) -> None:
        app.on_response_prepare.append(_name_server)
        super().__init__(app, **options)
        self.handshakes: dict[Handshake, asyncio.Transport] = {}
        """TLS handshakes in progress, oldest first."""

    async def _make_server(self) -> web.Server:
        made = await super()._make_server()
        return _Server(
            made.request_handler,
            request_factory=made.request_factory,
            handler_cancellation=made.handler_cancellation,
            **made._kwargs,
        )


class _SecureSite(web.TCPSite):
    """An HTTPS address. It counts clients before their handshake ends, unlike aiohttp's own site."""

    def __init__(self, runner: Runner, host: str, port: int, secure: SSLContext, handshake_s: float) -> None:
        super().__init__(runner, host, port, ssl_context=secure)
        self._make = partial(Handshake, runner, secure, handshake_s)

    async def start(self) -> None:
        """Start to listen."""
        await web.BaseSite.start(self)
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(self._make, self._host, self._port, backlog=self._backlog)


async def listen(runner: Runner, address: str, secure: SSLContext | None = None, *, handshake_s: float = 0.0) -> None:
    """Serve an application at `address`, by HTTPS if `secure` is given."""
    host, port = host_and_port(address)
    site = _SecureSite(runner, host, port, secure, handshake_s) if secure else web.TCPSite(runner, host, port)
    try:
        await site.start()
    except OSError as error:
        raise ConfigInvalid(
            f"Cannot listen on {address}: {error}.",
            hint="Check that this round is not running already, or set round.listen=host:port to a free port.",
        ) from error


@dataclass
class _Unread:
    """An unread answer: its start, its size then, and its size at the last check."""

    since_s: float
    began_bytes: int
    last_bytes: int

    def seen(self, size: int, now_s: float) -> "_Unread":
        grew = size > self.last_bytes
        return _Unread(now_s, size, size) if grew else _Unread(self.since_s, self.began_bytes, size)


class Callers:
    """The limits on the connections of one server."""

    def __init__(self, runner: Runner, per_address: int, bounds: Bounds) -> None:
        self._runner = runner
        self._per_address = per_address
        self._bounds = bounds
        self._unread: dict[web.RequestHandler, _Unread] = {}

    async def run(self, _app: web.Application) -> AsyncIterator[None]:
        """Check the connections for as long as the application lives."""
        task = asyncio.create_task(self._keep_looking())
        yield
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task

    async def _keep_looking(self) -> None:
        while True:
            await asyncio.sleep(self._bounds.look_s)  # a client may exceed its share for this long
            self.close_excess(asyncio.get_running_loop().time())

    def close_excess(self, now_s: float) -> None:
        """Close the connections that exceed a limit."""
        accepted = self._runner.server.connections if self._runner.server else ()  # oldest first
        open_ones = [(conn, conn.transport) for conn in accepted if conn.transport is not None]
        lines = [(conn, line, self._place_of(line)) for conn, line in (*open_ones, *self._runner.handshakes.items())]
        share = _share(Counter(where for _, _, where in lines), self._per_address, self._bounds.connections)
        held = Counter[str]()
        unread: dict[web.RequestHandler, _Unread] = {}
        for conn, transport, where in lines:
            held[where] += 1
            if (held[where] > share and where != HERE) or self._is_late(conn, now_s):
                transport.abort()
            elif isinstance(conn, web.RequestHandler) and (size := transport.get_write_buffer_size()):
                unread[conn] = self._unread.get(conn, _Unread(now_s, size, size)).seen(size, now_s)
        self._unread = unread
        self._cut_slow(now_s)

    def _is_late(self, conn: object, now_s: float) -> bool:
        since_s = conn.head_since_s if isinstance(conn, Connection) else None
        return since_s is not None and now_s - since_s > self._bounds.head_s

    def _place_of(self, transport: asyncio.Transport) -> str:
        address = str((transport.get_extra_info("peername") or ("",))[0])
        return place(address, self._bounds.proxies)

    def _cut_slow(self, now_s: float) -> None:
        total = sum(answer.last_bytes for answer in self._unread.values())
        for conn, answer in sorted(self._unread.items(), key=lambda item: -item[1].last_bytes):
            may_take_s = self._bounds.grace_s + answer.began_bytes / self._bounds.bytes_per_s
            if total > self._bounds.unread_bytes or now_s - answer.since_s > may_take_s:
                total -= answer.last_bytes
                if conn.transport is not None:
                    conn.transport.abort()


def _share(held: Counter[str], share: int, total_max: int) -> int:
    """Return the largest share up to `share` with which all neighbourhoods together hold at most `total_max`."""
    rest = total_max - held.pop(HERE, 0)
    share = min(share or sys.maxsize, max(held.values(), default=0))
    while share > 1 and sum(min(share, count) for count in held.values()) > rest:
        share -= 1
    return share
