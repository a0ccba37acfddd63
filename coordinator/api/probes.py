"""Routes with which nodes probe their own connection: upload speed, and whether they can be dialled.

- Bodies are read up to a limit and discarded. The server dials only the address of a signed request, a few at once, of
  which one neighbourhood has a quarter: keys are free, and a dial that nobody answers takes seconds.
- The reply to a failed dial takes the same time for every cause, so that it does not reveal open ports of a proxy.
"""

import asyncio
import hmac
from collections import Counter

import sqlalchemy as sa
from aiohttp import web

from coordinator.api.caller import HERE, known_caller, place_of
from coordinator.api.guard import SHARES
from coordinator.api.http import act, pieces, reply
from protocol import limits
from protocol.errors import Overloaded
from protocol.ids import NodeId
from protocol.work.messages import DIAL_S, Dial, Dialled, Uploaded

routes = web.RouteTableDef()

DIALS_AT_ONCE = 8

DIALS = web.AppKey("dials", Counter[str])
"""Dials under way, by place."""


@routes.post("/v1/probe/upload")
async def upload(request: web.Request) -> web.Response:
    """Read and discard a body, and return its size."""
    size = sum([len(piece) async for piece in pieces(request, limits.PROBE_MAX_BYTES)])
    return reply(Uploaded(size_bytes=size))


@routes.post("/v1/probe/dial")
async def dial(request: web.Request) -> web.Response:
    """Dial the address of the request's client, and return whether its listener answers."""
    wanted = await act(request, Dial, _wanted)
    address = known_caller(request)
    if not address:
        return reply(Dialled(reached=False, proxied=True))
    dials, where = request.app[DIALS], place_of(request)
    if dials.total() >= DIALS_AT_ONCE or (where != HERE and dials[where] >= DIALS_AT_ONCE // SHARES):
        raise Overloaded("The server is dialling too many other nodes.", hint="Try again in a few seconds.")
    dials[where] += 1
    try:
        return reply(Dialled(reached=await _says(address, wanted.port, wanted.word), proxied=False))
    finally:
        dials[where] -= 1
        if not dials[where]:
            del dials[where]


def share(app: web.Application) -> None:
    """Store the state that these handlers share in `app`."""
    app[DIALS] = Counter()


def _wanted(_connection: sa.Connection, _node: NodeId, message: Dial, *, now_ms: int) -> Dial:
    return message


async def _says(host: str, port: int, word: str) -> bool:
    """Return True if a listener at `host`:`port` sends `word`."""
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
