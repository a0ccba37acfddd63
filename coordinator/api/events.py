"""The round as it happens, as server-sent events: a `moment` whenever the figures of the pages have changed.

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
from contextlib import suppress

from aiohttp import web

from coordinator.api.places import caller
from coordinator.api.snapshot import SECURITY
from coordinator.api.watch import WATCH

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
