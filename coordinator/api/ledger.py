"""The ledger's public files: checkpoint, tiles and bundles as C2SP tlog-tiles has them, and receipts.

- What has a full or partial width in its name never changes and may be cached for ever; the checkpoint not at all.
- A receipt is made when it is asked for, under the last checkpoint; any will do for ever.
- What witnesses have signed is taken from anybody: the signatures say whose word it is.
"""

from aiohttp import web

from coordinator.api.http import MSGPACK, ROUND, body, reply
from coordinator.base.clock import now_ms
from coordinator.publishing.mirror import IMMUTABLE
from coordinator.transactions import witnesses
from ledger import store
from ledger.gaps import Keys
from ledger.note import NOTE_MAX_BYTES
from ledger.proof import LedgerReceipt
from ledger.tiles import Tile
from protocol.errors import NotFound

routes = web.RouteTableDef()


@routes.get("/v1/ledger/checkpoint")
async def checkpoint(request: web.Request) -> web.Response:
    """The newest signed checkpoint of the ledger."""
    here = request.app[ROUND]
    note = await here.database.read(witnesses.checkpoint, here.config.ledger.keys)
    if note is None:
        raise NotFound("No checkpoint is signed yet.", hint="Wait for the first one.")
    headers = {"Cache-Control": "no-store"}
    return web.Response(body=note, content_type="text/plain", charset="utf-8", headers=headers)


@routes.get("/v1/ledger/cosigned")
async def cosigned(request: web.Request) -> web.Response:
    """The last checkpoint that each of the round's witnesses has signed."""
    here = request.app[ROUND]
    found = await here.database.read(witnesses.cosigned, here.config.ledger.keys)
    return web.Response(body=found.to_bytes(), content_type=MSGPACK, headers={"Cache-Control": "no-store"})


@routes.post("/v1/ledger/cosignatures")
async def cosign(request: web.Request) -> web.Response:
    """A checkpoint that a witness has signed, by whoever brings it; repeating it is harmless."""
    here = request.app[ROUND]
    here.database.require_room()
    taken = await here.database.run_for_node(
        witnesses.record_signature,
        await body(request, NOTE_MAX_BYTES),
        keys=Keys(here.roots, here.round_id),
        witnesses=here.config.ledger.keys,
        now_ms=now_ms(),
    )
    return reply(taken)


@routes.get("/v1/ledger/tile/{name:.{1,60}}")
async def tile(request: web.Request) -> web.Response:
    """A tile of the log."""
    data = await request.app[ROUND].database.read(store.read_file, Tile.parse(request.match_info["name"]))
    return web.Response(body=data, content_type="application/octet-stream", headers={"Cache-Control": IMMUTABLE})


@routes.get("/v1/receipts/{claim:[0-9a-f]{64}}")
async def receipt(request: web.Request) -> web.Response:
    """What the ledger says of a claim, with its proof."""
    here = request.app[ROUND]
    note, entries = await here.database.read(store.prove_claim, request.match_info["claim"])
    made = LedgerReceipt(roots=here.roots, checkpoint=note, entries=tuple(entries))
    return web.Response(body=made.to_bytes(), content_type=MSGPACK, headers={"Cache-Control": "no-store"})
