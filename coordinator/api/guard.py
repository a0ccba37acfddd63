"""Limits on what callers can consume before a signature is checked: memory for bodies, connections, and time.

Bodies have a budget in memory, and each neighbourhood of addresses a share of it.

- A body above `FREE_BYTES` takes its declared length before a byte of it is read, or what has come of it where none is
  declared, and gives it back when its request is answered. Smaller ones are bounded by the connections.
- A neighbourhood has at most a quarter. When its quarter or the whole is used up, a client gets 503 + Retry-After.
- Where the whole is taken, who would hold less than the largest neighbourhood gets room: that one's oldest unfinished
  body is given up, since honest ones end.
- This machine has no share to pass and gives nothing up: it is a proxy, which should hold bodies until they are whole.
- What comes with the operator's token is not counted.

Connections of one neighbourhood are limited too, and answers are not kept for callers that do not read them. aiohttp
serves each connection with two more deadlines: for the head of a request and for a TLS handshake. `Bounds` holds the
numbers with their reasons; what a message may hold is in `protocol.limits`.

- Every `look_s` all connections are checked, those that have not agreed on TLS yet, too. Of a neighbourhood that has
  more than its share the newest are closed.
- All together are as many as this process may have files, less those that it needs itself. Beyond, shares shrink until
  the rest fits: the largest neighbourhoods lose first.
- A connection that has not sent the whole head of a request within `head_s` is closed, a proxy's, too: these send heads
  at once. The first head begins with the connection, the next with its first byte: until then it may be idle.
- An answer that waits in memory to be read may take the grace and the time that its size needs at the rate at which
  bodies must come; it begins anew where more was written, as a stream does while it is read. All such answers together
  hold at most `unread_bytes`, else the largest go first.
- What comes from this machine is the operator's own, or a proxy's, which speaks for many: it has no share to pass. A
  proxy elsewhere wants `round.connections_per_address=0`, and to bound its callers itself.
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

from protocol import limits
from protocol.errors import ConfigInvalid, Overloaded
from protocol.limits import KIB, MIB
from protocol.people.addresses import host_and_port, neighbourhood

HERE = ""
"""The place of what comes from this machine: the operator's own, or a proxy's, which speaks for many."""


def place(address: str | None, own_addresses: tuple[str, ...]) -> str:
    """Where a caller comes from; an address of this machine begins as one of `own_addresses`."""
    address = address or "unknown"
    return HERE if address.startswith(own_addresses) else neighbourhood(address)


def caller(request: web.Request) -> str:
    """The address that a request comes from: of a proxy on this machine, the one that it names."""
    address = request.remote or ""
    named = request.headers.get("X-Forwarded-For", "").rpartition(",")[2].strip()
    return named if named and address.startswith(request.app[BOUNDS].own_addresses) else address


FILES_KEPT = 128
"""For the store, chunks on their way out, and the pipes of children."""


def connections_max() -> int:
    """Return how many connections this process has files for."""
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return max(files - FILES_KEPT, files // 2) if files != resource.RLIM_INFINITY else sys.maxsize


@dataclass(frozen=True)
class Bounds:
    """Bounds on the time, connections and memory of callers."""

    own_addresses: tuple[str, ...] = ("127.", "::1", "::ffff:127.")
    """Beginnings of the addresses of this machine."""
    look_s: float = 2.0
    """Seconds between two checks of all connections."""
    connections: int = field(default_factory=connections_max)
    handshake_s: float = 10.0
    """For TLS, from the connection to its first request: two round trips, sent again a few times on a bad line."""
    head_s: float = 10.0
    """For the head of a request: one packet, sent again a few times on a bad line."""
    idle_s: float = 75.0
    """Between two requests of a connection: longer than proxies keep theirs."""
    grace_s: float = 30.0
    bytes_per_s: float = 8 * KIB
    """A body may take the grace and the time that its size needs at this rate: a tenth of the slowest lines at homes.
    An answer that waits to be read may do so, too."""
    unread_bytes: int = 256 * MIB
    """Answers that wait: a few times the largest files of the ledger and the board, for as many slow readers."""
    bodies_bytes: int = 256 * MIB
    """Thirty of the largest at once. A body is there twice while its pieces are put together."""
    listeners: int = 1000
    """Open streams; each costs a socket and a few kilobytes. Who comes then is told to ask again by itself."""


BOUNDS = web.AppKey("bounds", Bounds)


SHARES = 4

FREE_BYTES = limits.SMALL_REQUEST_MAX_BYTES


@dataclass(eq=False)
class Body:
    """One that is coming, or that somebody works on."""

    place: str
    patience: asyncio.Timeout
    """Ends the reading of a body that is given up."""
    size: int = 0
    is_given_up: bool = False


class Bodies:
    """What the bodies of one server hold."""

    def __init__(self, budget_bytes: int) -> None:
        self._budget_bytes = budget_bytes
        self.held_bytes = 0
        self._held = Counter[str]()
        """By place."""
        self._coming: dict[str, dict[Body, None]] = {}
        """The unfinished ones by place, the oldest first."""

    @asynccontextmanager
    async def coming(self, request: web.Request) -> AsyncIterator[Body]:
        """A body while it is read, when it may be given up; it holds what it holds until its request is answered."""
        request[HELD] = body = Body(place(request.remote, request.app[BOUNDS].own_addresses), asyncio.timeout(None))
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
        """Let a body hold so many bytes in all, if there is room."""
        more = size - body.size
        if size <= FREE_BYTES or more <= 0:
            return
        if body.place != HERE and self._held[body.place] + more > self._budget_bytes // SHARES:
            raise _full()
        while self.held_bytes + more > self._budget_bytes:
            self._give_one_up(for_less_than=self._held[body.place] + more)
        self._coming.setdefault(body.place, {})[body] = None
        self._hold(body, more)

    def let_go(self, body: Body) -> None:
        """It is no longer needed."""
        self._is_no_longer_coming(body)
        self._hold(body, -body.size)

    def _give_one_up(self, *, for_less_than: int) -> None:
        """The oldest body of whoever holds most of those who could give one up."""
        largest = max((one for one in self._coming if one != HERE), key=lambda one: self._held[one], default=HERE)
        if largest == HERE or self._held[largest] <= for_less_than:
            raise _full()
        oldest = next(iter(self._coming[largest]))
        oldest.is_given_up = True
        oldest.patience.reschedule(asyncio.get_running_loop().time())
        self.let_go(oldest)

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
    """What a request's body holds is given back when there is an answer, or nobody waits for one."""
    try:
        return await handler(request)
    finally:
        if HELD in request:
            request.app[BODIES].let_go(request[HELD])


def _full() -> Overloaded:
    return Overloaded("Too many large requests are on their way.", hint="Send it again in a moment.")


class Connection(web.RequestHandler):
    """One connection, which knows since when the head of a request is on its way.

    The first head begins with the connection, every other with its first byte.
    """

    __slots__ = ("head_since_s",)

    def __init__(self, manager: web.Server, *, loop: asyncio.AbstractEventLoop, **options: Any) -> None:
        super().__init__(manager, loop=loop, **options)
        self.head_since_s: float | None = None
        """None while no head is awaited: a request is answered, or the connection is idle."""

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


class _Server(web.Server):
    """Makes such connections."""

    def __call__(self) -> web.RequestHandler:
        return Connection(self, loop=self._loop, **self._kwargs)


class Handshake(asyncio.Protocol):
    """A connection until TLS is agreed on; then an HTTP connection goes on in its place."""

    def __init__(self, runner: "Runner", secure: SSLContext, handshake_s: float) -> None:
        self._runner, self._secure, self._handshake_s = runner, secure, handshake_s
        self._early = b""
        """Bytes that came between the handshake and the HTTP connection."""

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
        except OSError:  # a fault of the caller's, or of the line
            transport.abort()
            return
        finally:
            del self._runner.handshakes[self]
        server = self._runner.server
        if made is None or made.is_closing() or server is None:  # lost, or we are about to end
            transport.abort()
            return
        connection = server()
        made.set_protocol(connection)
        connection.connection_made(made)
        if self._early:
            connection.data_received(self._early)


class Runner(web.AppRunner):
    """Runs an application on such connections."""

    def __init__(self, app: web.Application, **options: Any) -> None:
        super().__init__(app, **options)
        self.handshakes: dict[Handshake, asyncio.Transport] = {}
        """Handshakes under way, the oldest first."""

    async def _make_server(self) -> web.Server:
        made = await super()._make_server()
        return _Server(
            made.request_handler,
            request_factory=made.request_factory,
            handler_cancellation=made.handler_cancellation,
            **made._kwargs,
        )


class _SecureSite(web.TCPSite):
    """An address with HTTPS. Its callers are known before they have shaken hands, unlike those of aiohttp's own."""

    def __init__(self, runner: Runner, host: str, port: int, secure: SSLContext, handshake_s: float) -> None:
        super().__init__(runner, host, port, ssl_context=secure)
        self._make = partial(Handshake, runner, secure, handshake_s)

    async def start(self) -> None:
        """Listen."""
        await web.BaseSite.start(self)
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(self._make, self._host, self._port, backlog=self._backlog)


async def listen(runner: Runner, address: str, secure: SSLContext | None = None, *, handshake_s: float = 0.0) -> None:
    """Serve an application at an address; with a certificate, by HTTPS."""
    host, port = host_and_port(address)
    site = _SecureSite(runner, host, port, secure, handshake_s) if secure else web.TCPSite(runner, host, port)
    try:
        await site.start()
    except OSError as error:
        raise ConfigInvalid(
            f"Cannot listen on {address}: {error}.",
            hint="Is this round running already? Else set round.listen=host:port.",
        ) from error


@dataclass
class _Unread:
    """An answer that waits: since when, how large it was then, and at the last look."""

    since_s: float
    began_bytes: int
    last_bytes: int

    def seen(self, size: int, now_s: float) -> "_Unread":
        grew = size > self.last_bytes
        return _Unread(now_s, size, size) if grew else _Unread(self.since_s, self.began_bytes, size)


class Callers:
    """The connections of one server."""

    def __init__(self, runner: Runner, per_address: int, bounds: Bounds) -> None:
        self._runner = runner
        self._per_address = per_address
        self._bounds = bounds
        self._unread: dict[web.RequestHandler, _Unread] = {}

    async def run(self, _app: web.Application) -> AsyncIterator[None]:
        """Look after them as long as the application lives."""
        task = asyncio.create_task(self._keep_looking())
        yield
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task

    async def _keep_looking(self) -> None:
        while True:
            await asyncio.sleep(self._bounds.look_s)  # a timer: a caller may be too much for so long
            self.close_excess(asyncio.get_running_loop().time())

    def close_excess(self, now_s: float) -> None:
        """Close what is too much."""
        found = self._runner.server.connections if self._runner.server else ()  # the oldest first
        open_ones = [(one, one.transport) for one in found if one.transport is not None]
        lines = [(one, line, self._place_of(line)) for one, line in (*open_ones, *self._runner.handshakes.items())]
        share = _share(Counter(where for _, _, where in lines), self._per_address, self._bounds.connections)
        held = Counter[str]()
        unread: dict[web.RequestHandler, _Unread] = {}
        for one, transport, where in lines:
            held[where] += 1
            if (held[where] > share and where != HERE) or self._is_late(one, now_s):
                transport.abort()
            elif isinstance(one, web.RequestHandler) and (size := transport.get_write_buffer_size()):
                unread[one] = self._unread.get(one, _Unread(now_s, size, size)).seen(size, now_s)
        self._unread = unread
        self._cut_slow(now_s)

    def _is_late(self, one: object, now_s: float) -> bool:
        since_s = one.head_since_s if isinstance(one, Connection) else None
        return since_s is not None and now_s - since_s > self._bounds.head_s

    def _place_of(self, transport: asyncio.Transport) -> str:
        address = str((transport.get_extra_info("peername") or ("",))[0])
        return place(address, self._bounds.own_addresses)

    def _cut_slow(self, now_s: float) -> None:
        total = sum(answer.last_bytes for answer in self._unread.values())
        for one, answer in sorted(self._unread.items(), key=lambda item: -item[1].last_bytes):
            may_take_s = self._bounds.grace_s + answer.began_bytes / self._bounds.bytes_per_s
            if total > self._bounds.unread_bytes or now_s - answer.since_s > may_take_s:
                total -= answer.last_bytes
                if one.transport is not None:
                    one.transport.abort()


def _share(held: Counter[str], share: int, total_max: int) -> int:
    """How many each neighbourhood may have, at most its share, so that all together are no more than that."""
    rest = total_max - held.pop(HERE, 0)
    share = min(share or sys.maxsize, max(held.values(), default=0))
    while share > 1 and sum(min(share, one) for one in held.values()) > rest:
        share -= 1
    return share
