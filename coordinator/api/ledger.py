"""Routes of the ledger's public files: checkpoint, tiles and bundles as in C2SP tlog-tiles, and receipts.

- A tile or bundle never changes and may be cached for ever; the checkpoint must not be cached.
- A receipt is built on request, under the newest checkpoint, for one claim or for many; it stays valid for ever.
- Anyone may deliver the signatures of witnesses: each signature proves its author.
- Pages of other sites may read what a verifier needs, so that a copy of `verify.html` works wherever it lies. All of it
  is public, and no cookie or token counts here. Where the round's own address is private, they may not: any website
  could read the ledger of a home's or a company's round through the browser of a visitor inside.
"""

from aiohttp import web

from coordinator.api.http import MSGPACK, ROUND, body, reply
from coordinator.api.strangers import read_for_stranger
from coordinator.base.clock import now_ms
from coordinator.config.round import host_of_url
from coordinator.publishing.mirror import IMMUTABLE
from coordinator.transactions import witnesses
from ledger import store
from ledger.gaps import Keys
from ledger.note import NOTE_MAX_BYTES
from ledger.proof import ClaimProof, LedgerReceipt, LedgerReceipts, PackedProof, ReceiptsRequest
from ledger.tiles import Tile
from protocol import limits
from protocol.errors import NotFound
from protocol.people.addresses import is_public_host

routes = web.RouteTableDef()

RECEIPTS_REQUEST_MAX_BYTES = 70 * limits.RECEIPTS_MAX + limits.KIB
"""A claim's id is 64 characters, and two bytes before it."""

OPEN_TO_PAGES = ("/v1/ledger/", "/v1/metadata/", "/v1/leaderboard", "/v1/audits/")
"""Prefixes of the paths that verifiers read."""


def serve(app: web.Application) -> None:
    """Let pages of other sites read the public files of a public round's ledger, and that one of them is not there."""
    settings = app[ROUND].config.round
    if is_public_host(host_of_url(settings.join_string(""))):
        app.on_response_prepare.append(_open_to_pages)


async def _open_to_pages(request: web.Request, response: web.StreamResponse) -> None:
    if request.method == "GET" and request.path.startswith(OPEN_TO_PAGES):
        response.headers["Access-Control-Allow-Origin"] = "*"


@routes.get("/v1/ledger/checkpoint")
async def checkpoint(request: web.Request) -> web.Response:
    """Return the newest signed checkpoint of the ledger."""
    round_ = request.app[ROUND]
    note = await read_for_stranger(request, witnesses.checkpoint, round_.config.ledger.keys)
    if note is None:
        raise NotFound("No checkpoint is signed yet.", hint="Try again in a few seconds.")
    headers = {"Cache-Control": "no-store"}
    return web.Response(body=note, content_type="text/plain", charset="utf-8", headers=headers)


@routes.get("/v1/ledger/cosigned")
async def cosigned(request: web.Request) -> web.Response:
    """Return the last checkpoint that each of the round's witnesses has signed."""
    round_ = request.app[ROUND]
    signed = await read_for_stranger(request, witnesses.cosigned, round_.config.ledger.keys)
    return web.Response(body=signed.to_bytes(), content_type=MSGPACK, headers={"Cache-Control": "no-store"})


@routes.post("/v1/ledger/cosignatures")
async def cosign(request: web.Request) -> web.Response:
    """Record a checkpoint that a witness has signed. Anyone may deliver it, and repeating it is harmless."""
    round_ = request.app[ROUND]
    round_.database.require_room()
    taken = await round_.database.run_for_node(
        witnesses.record_signature,
        await body(request, NOTE_MAX_BYTES),
        keys=Keys(round_.roots, round_.round_id),
        witnesses=round_.config.ledger.keys,
        now_ms=now_ms(),
    )
    return reply(taken)


@routes.get("/v1/ledger/tile/{name:.{1,60}}")
async def tile(request: web.Request) -> web.Response:
    """Return a tile of the log."""
    data = await read_for_stranger(request, store.read_file, Tile.parse(request.match_info["name"]))
    return web.Response(body=data, content_type="application/octet-stream", headers={"Cache-Control": IMMUTABLE})


@routes.get("/v1/receipts/{claim:[0-9a-f]{64}}")
async def receipt(request: web.Request) -> web.Response:
    """Return the ledger's receipt for a claim: its entries with their proofs."""
    round_ = request.app[ROUND]
    note, entries = await read_for_stranger(request, store.prove_claim, request.match_info["claim"])
    made = LedgerReceipt(roots=round_.roots, checkpoint=note, entries=tuple(entries))
    return web.Response(body=made.to_bytes(), content_type=MSGPACK, headers={"Cache-Control": "no-store"})


@routes.post("/v1/receipts")
async def receipts(request: web.Request) -> web.Response:
    """Return the receipts of many claims under the newest checkpoint; one that is not published has no entries."""
    round_ = request.app[ROUND]
    asked = ReceiptsRequest.from_bytes(await body(request, RECEIPTS_REQUEST_MAX_BYTES))
    note, found = await read_for_stranger(request, store.prove_claims, asked.claims)
    claims = tuple(
        ClaimProof(claim_id=claim, checkpoint=0, entries=tuple(map(PackedProof.pack, proven)))
        for claim, proven in found.items()
    )
    made = LedgerReceipts(roots=round_.roots, checkpoints=(note,), claims=claims)
    return web.Response(body=made.to_bytes(), content_type=MSGPACK, headers={"Cache-Control": "no-store"})
