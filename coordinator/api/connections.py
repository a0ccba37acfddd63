"""Connections as aiohttp serves them, with two more deadlines: for the head of a request and for a TLS handshake."""

import asyncio
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


class Runner(web.AppRunner):
    """Runs an application on such connections."""

    async def _make_server(self) -> web.Server:
        made = await super()._make_server()
        return _Server(
            made.request_handler,
            request_factory=made.request_factory,
            handler_cancellation=made.handler_cancellation,
            **made._kwargs,
        )


class _Site(web.TCPSite):
    """An address with HTTPS, where whoever does not shake hands in time is disconnected."""

    def __init__(self, runner: web.AppRunner, host: str, port: int, secure: SSLContext, handshake_s: float) -> None:
        super().__init__(runner, host, port, ssl_context=secure)
        self._handshake_s = handshake_s

    async def start(self) -> None:
        """As aiohttp's own, which leaves asyncio's minute as it is."""
        await web.BaseSite.start(self)
        server = self._runner.server
        assert server is not None
        self._server = await asyncio.get_running_loop().create_server(
            server,
            self._host,
            self._port,
            ssl=self._ssl_context,
            backlog=self._backlog,
            ssl_handshake_timeout=self._handshake_s,
            ssl_shutdown_timeout=self._handshake_s,
        )


async def listen(
    runner: web.AppRunner, address: str, secure: SSLContext | None = None, *, handshake_s: float = 0.0
) -> None:
    """Serve an application at an address; with a certificate, by HTTPS."""
    host, port = host_and_port(address)
    site = _Site(runner, host, port, secure, handshake_s) if secure else web.TCPSite(runner, host, port)
    try:
        await site.start()
    except OSError as error:
        raise ConfigInvalid(
            f"Cannot listen on {address}: {error}.",
            hint="Is this round running already? Else set round.listen=host:port.",
        ) from error
