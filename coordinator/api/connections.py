"""Connections as aiohttp serves them, with two more deadlines: for the head of a request and for a TLS handshake."""

import asyncio
from functools import partial
from ssl import SSLContext
from typing import Any

from aiohttp import web

from protocol.errors import ConfigInvalid
from protocol.places import host_and_port


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
