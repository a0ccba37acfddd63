"""What anyone may read as data: the leaderboard, the status, trust metadata and chunks."""

import asyncio
from typing import Any

import sqlalchemy as sa
from aiohttp import web

from coordinator import publish, summary
from coordinator.api.http import ROUND, reply, reply_json
from coordinator.mirror import IMMUTABLE
from coordinator.round import now_ms
from ledger import store
from protocol.errors import NotFound, UnknownChunk
from protocol.ids import ChunkId
from protocol.origin import chunk_path, may_change

routes = web.RouteTableDef()


@routes.get("/v1/leaderboard")
async def leaderboard(request: web.Request) -> web.Response:
    """Who earned what, by the first `ledger_size` entries of the ledger."""

    def read(connection: sa.Connection) -> dict[str, Any]:
        return {"ledger_size": store.size(connection), "nodes": summary.leaderboard(connection)}

    return reply_json(await request.app[ROUND].database.run(read))


@routes.get("/v1/status")
async def status(request: web.Request) -> web.Response:
    here = request.app[ROUND]
    found = await here.database.run(summary.status, config=here.config, alive_since_ms=now_ms() - here.silent_after_ms)
    return reply_json(found | here.told())


@routes.get("/v1/broadcast")
async def broadcast(request: web.Request) -> web.Response:
    """How the last version spread, node by node."""
    here = request.app[ROUND]
    return reply_json(await here.database.run(summary.broadcast, alive_since_ms=now_ms() - here.silent_after_ms))


@routes.get("/v1/origins")
async def origins(request: web.Request) -> web.Response:
    return reply(request.app[ROUND].origins)


@routes.get("/v1/metadata/{name}")
async def metadata(request: web.Request) -> web.Response:
    name = request.match_info["name"]
    data = await asyncio.to_thread(request.app[ROUND].metadata.read, name)
    if data is None:
        raise NotFound(f"There is no trust document {name[:100]}.")
    caching = "no-store" if may_change(name) else IMMUTABLE
    return web.Response(body=data, content_type="application/octet-stream", headers={"Cache-Control": caching})


@routes.get("/v1/chunks/{start:[0-9a-f]{2}}/{chunk:[0-9a-f]{64}}")
async def chunk(request: web.Request) -> web.Response:
    name = ChunkId(request.match_info["chunk"])
    if request.path != f"/v1/{chunk_path(name)}":
        raise NotFound(f"There is nothing at {request.path[:100]}.")
    data = await asyncio.to_thread(request.app[ROUND].publisher.read_chunk, name)
    if data is None:
        raise UnknownChunk("The origin does not keep this chunk.", hint="Refresh: it may belong to an older version.")
    return web.Response(body=data, content_type="application/octet-stream", headers={"Cache-Control": IMMUTABLE})


@routes.get("/healthz")
async def healthz(request: web.Request) -> web.Response:
    await request.app[ROUND].database.run(publish.newest_version)  # the store answers
    return web.Response(text="ok\n")
