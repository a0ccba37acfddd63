"""What the learner calls, with the operator's token: upload, publish, batch, report, progress."""

import asyncio
import logging
from pathlib import Path
from typing import Any

import sqlalchemy as sa
from aiohttp import web
from pydantic import TypeAdapter, ValidationError

from coordinator.api.http import ROUND, body, pieces, reply, require_operator
from coordinator.base.clock import now_ms
from coordinator.base.files import ArrivingFile
from coordinator.reports import programs
from coordinator.service import publication
from coordinator.store.state import get_fact, set_fact
from coordinator.transactions import batches, escrow, evaluations, fleet, lottery, policy_versions
from ledger import store
from protocol import limits
from protocol.errors import MalformedMessage, NotFound
from protocol.policy.manifest import FileName, PolicyManifest
from protocol.work.learning import KnownUploads, LearnerProgress, LearnerState, Publication, UpdateReport, UploadedFile

log = logging.getLogger(__name__)

routes = web.RouteTableDef()

BATCH_WAIT_S = 20.0
"""How long a request for a batch is held open; the learner asks again after it."""

LOOK_AGAIN_S = 0.5
"""A submission may have been stored without waking us: by another API process, or for a sender that hung up."""

UPLOAD_MAX_BYTES = 2**40
"""The operator's own learner is believed about sizes; the disk is the limit."""

WRITTEN_AT_ONCE_BYTES = limits.MIB
"""What is held of an upload, beside the server's own buffer; no more is read until it is written."""

_FILE_NAME = TypeAdapter(FileName)


@routes.get("/v1/learner/state")
async def state(request: web.Request) -> web.Response:
    """Where the round stands, for the learner."""
    here = require_operator(request)

    def read(connection: sa.Connection) -> LearnerState:
        programs.heard(connection, now_ms())
        version, update = policy_versions.newest_version(connection)
        finished = bool(get_fact(connection, "finished", False))
        asked = fleet.load(connection, here.config, alive_since_ms=now_ms() - here.silent_after_ms)
        return LearnerState(
            round_id=here.round_id,
            newest_version=version,
            newest_update=update,
            publish_every=fleet.kappa(asked, here.config),
            ledger_size=store.size(connection),
            ledger_head=store.checkpoint(connection) or b"",
            finished=finished,
            evaluating=evaluations.is_running(connection, "last"),
            evaluated=evaluations.latest_results(connection),
            replacement=publication.newest_replacement(connection),
        )

    return reply(await here.database.run(read))


@routes.get("/v1/learner/uploads/{version:[0-9]+}")
async def unchanged(request: web.Request) -> web.Response:
    """The files of the version before: those that are the same need not be sent again."""
    here = require_operator(request)
    files = await asyncio.to_thread(here.publisher.unchanged, int(request.match_info["version"]))
    return reply(KnownUploads(files=files))


@routes.put("/v1/learner/uploads/{version:[0-9]+}/{name}")
async def upload(request: web.Request) -> web.Response:
    """One file of a version to be published."""
    here = require_operator(request)
    try:
        name = _FILE_NAME.validate_python(request.match_info["name"])
    except ValidationError:
        raise MalformedMessage("That is no name for a policy file.") from None
    folder = here.publisher.uploads / str(int(request.match_info["version"]))
    arriving = await _arriving(folder / name)
    try:
        waiting = bytearray()
        async for piece in pieces(request, UPLOAD_MAX_BYTES):
            waiting += piece
            if len(waiting) >= WRITTEN_AT_ONCE_BYTES:
                await asyncio.to_thread(arriving.write, waiting)
                waiting = bytearray()
        await asyncio.to_thread(arriving.write, waiting)
        await asyncio.to_thread(arriving.finish, request.query.get("digest", ""))
    finally:
        arriving.discard()
    return web.Response(status=204)


async def _arriving(path: Path) -> ArrivingFile:
    """A file to write into; who hangs up while it is made leaves none behind."""
    making = asyncio.ensure_future(asyncio.to_thread(ArrivingFile, path))
    try:
        return await asyncio.shield(making)
    except asyncio.CancelledError:
        making.add_done_callback(_discard)
        raise


def _discard(made: asyncio.Future[ArrivingFile]) -> None:
    if made.exception() is None:
        made.result().discard()


@routes.post("/v1/learner/versions")
async def publish_version(request: web.Request) -> web.Response:
    """Publish what was uploaded as the next version."""
    here = require_operator(request)
    await here.publication.publish(Publication.from_bytes(await body(request)))
    return web.Response(status=204)


@routes.get("/v1/learner/versions/{version:[0-9]+}")
async def published(request: web.Request) -> web.Response:
    """The files of a published version, for a learner that goes on from it."""
    manifest = await _manifest(request)
    files = tuple(UploadedFile(path=entry.path, digest=entry.digest) for entry in manifest.files)
    return reply(Publication(version=manifest.version, update=manifest.update, files=files))


@routes.get("/v1/learner/versions/{version:[0-9]+}/{name}")
async def published_file(request: web.Request) -> web.StreamResponse:
    """One file of a published version."""
    manifest, name = await _manifest(request), request.match_info["name"]
    for entry in manifest.files:
        if entry.path == name:
            publisher = request.app[ROUND].publisher
            return web.FileResponse(
                await asyncio.to_thread(publication.file_of, publisher, manifest.version, name, entry.digest)
            )
    raise NotFound(f"Version {manifest.version} has no such file.")


async def _manifest(request: web.Request) -> PolicyManifest:
    here = require_operator(request)
    version = int(request.match_info["version"])
    manifest = await asyncio.to_thread(here.publisher.manifest, version)
    if manifest is None:
        raise NotFound(f"Version {version} was not published, or is not kept any more.")
    return manifest


@routes.get("/v1/learner/batches/{number:[0-9]+}")
async def batch(request: web.Request) -> web.Response:
    """A batch to train on, held until it is full."""
    here = require_operator(request)
    deadline = asyncio.get_running_loop().time() + BATCH_WAIT_S
    await here.database.run(programs.heard, now_ms(), asks_for=int(request.match_info["number"]))
    while True:
        here.batch_ready.clear()
        found = await here.database.run(
            batches.get,
            int(request.match_info["number"]),
            terms=here.terms,
            audits=here.audits,
            now_ms=now_ms(),
        )
        if found is not None:
            return reply(found)
        try:
            async with asyncio.timeout(LOOK_AGAIN_S):
                await here.batch_ready.wait()
        except TimeoutError:
            if asyncio.get_running_loop().time() >= deadline:
                return web.Response(status=204)


@routes.post("/v1/learner/reports")
async def report(request: web.Request) -> web.Response:
    """What became of a batch."""
    here = require_operator(request)
    message = UpdateReport.from_bytes(await body(request))
    await here.database.run(batches.report, message, audits=here.audits, adapts=here.terms.adapts, now_ms=now_ms())
    await here.database.run(programs.heard, now_ms())
    return web.Response(status=204)


@routes.post("/v1/learner/progress")
async def progress(request: web.Request) -> web.Response:
    """What the learner is doing."""
    here = require_operator(request)
    message = LearnerProgress.from_bytes(await body(request))

    def remember(connection: sa.Connection) -> dict[str, Any]:
        programs.heard(connection, now_ms())
        before: dict[str, Any] = get_fact(connection, "progress", {})
        known = {name: value for name, value in message.model_dump().items() if value is not None}
        set_fact(connection, "progress", before | known)
        return before

    before = await here.database.run(remember)
    if (message.phase, int(10 * message.fraction)) != (before.get("phase"), int(10 * before.get("fraction", 0))):
        log.info("learner phase=%r done=%.0f%% %s", message.phase, 100 * message.fraction, message.detail)
    return web.Response(status=204)


@routes.post("/v1/learner/finish")
async def finish(request: web.Request) -> web.Response:
    """The last update is reported: no more leases, and what is still pending is settled, or audited first."""
    here = require_operator(request)

    def end(connection: sa.Connection) -> None:
        if get_fact(connection, "finished", False):
            return
        set_fact(connection, "finished", True)
        evaluations.stop_all(connection, now_ms())
        batches.release_leftovers(connection, audits=here.audits, now_ms=now_ms())
        lottery.end(connection, here.audits, now_ms())
        escrow.settle_all(connection, here.audits, now_ms())

    await here.database.run(end)
    await here.refresh()
    return web.Response(status=204)
