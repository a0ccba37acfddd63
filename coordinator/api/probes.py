"""What machines ask to know their own lines: how fast is the way up, and can they be dialled?

- Bodies are read to a bound and thrown away; dials go to where a signed request came from, a few at once.
- A dial that fails is answered after the same time whatever was wrong: nobody learns which ports of a proxy are open.
"""

import asyncio
import hmac

import sqlalchemy as sa
from aiohttp import web

from coordinator.api.http import act, pieces, reply
from protocol import limits
from protocol.errors import Overloaded
from protocol.ids import NodeId
from protocol.work.probe import DIAL_S, Dial, Dialled, Uploaded

routes = web.RouteTableDef()

DIALS_AT_ONCE = 8

DIALS = web.AppKey("dials", asyncio.Semaphore)

PROXY_HEADERS = ("Forwarded", "X-Forwarded-For", "Via")


@routes.post("/v1/probe/upload")
async def upload(request: web.Request) -> web.Response:
    """Take bytes, throw them away, and say how many they were."""
    size = sum([len(piece) async for piece in pieces(request, limits.PROBE_MAX_BYTES)])
    return reply(Uploaded(size_bytes=size))


@routes.post("/v1/probe/dial")
async def dial(request: web.Request) -> web.Response:
    """Dial the address that the request came from, and say whether its listener answers."""
    wanted = await act(request, Dial, _wanted)
    if is_proxied(request) or request.remote is None:
        return reply(Dialled(reached=False, proxied=True))
    slots = request.app[DIALS]
    if slots.locked():
        raise Overloaded("Other machines are being dialled.", hint="Try again in a moment.")
    async with slots:
        return reply(Dialled(reached=await _says(request.remote, wanted.port, wanted.word), proxied=False))


def is_proxied(request: web.Request) -> bool:
    """Whether it came by a proxy that says so: then its address is the proxy's."""
    return any(name in request.headers for name in PROXY_HEADERS)


def share(app: web.Application) -> None:
    """What the handlers share."""
    app[DIALS] = asyncio.Semaphore(DIALS_AT_ONCE)


def _wanted(_connection: sa.Connection, _node: NodeId, message: Dial, *, now_ms: int) -> Dial:
    return message


async def _says(host: str, port: int, word: str) -> bool:
    """Whether somebody listens there and says the word."""
    loop = asyncio.get_running_loop()
    ends_at = loop.time() + DIAL_S
    writer: asyncio.StreamWriter | None = None
    try:
        async with asyncio.timeout_at(ends_at):
            reader, writer = await asyncio.open_connection(host, port)
            if hmac.compare_digest(await reader.readexactly(len(word)), word.encode()):
                return True
    except (OSError, TimeoutError, asyncio.IncompleteReadError):
        pass
    finally:
        if writer is not None:
            writer.close()
    await asyncio.sleep(max(0.0, ends_at - loop.time()))
    return False
