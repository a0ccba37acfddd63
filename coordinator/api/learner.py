"""Routes for the learner, with the operator's token: upload, publish, batch, report, progress."""

import asyncio
import logging
from collections.abc import Mapping
from typing import Any

import sqlalchemy as sa
from aiohttp import web
from pydantic import TypeAdapter, ValidationError

from coordinator.api.http import ROUND, body, receive_file, reply, require_operator
from coordinator.base.clock import now_ms
from coordinator.reports import evaluation_samples, programs
from coordinator.service import publication
from coordinator.service.round import Round
from coordinator.store.facts import FINISHED, PROGRESS, get_fact, set_fact
from coordinator.transactions import batches, commitments, escrow, evaluations, fleet, lottery, policy_versions
from ledger import store
from protocol import limits
from protocol.errors import MalformedMessage, NotFound
from protocol.policy.manifest import FileName, PolicyManifest
from protocol.work.learning import (
    KnownUploads,
    LearnerProgress,
    LearnerState,
    OfferedVersion,
    OfferOutcome,
    Publication,
    UpdateCommitment,
    UpdateReport,
    UploadedFile,
)

log = logging.getLogger(__name__)

routes = web.RouteTableDef()

BATCH_WAIT_S = 20.0
"""Longest time a request for a batch is held open; the learner then repeats it."""

OFFER_WAIT_S = 20.0
"""Longest time a request for an offer of a trainer is held open; the learner's process then repeats it."""

LOOK_AGAIN_S = 0.5
"""Time between two looks: another API process, or a request whose client disconnected, may store a submission
without setting the event."""

UPLOAD_MAX_BYTES = 2**40
"""Uploads have no real limit but the disk: the operator's own learner is trusted."""

_FILE_NAME = TypeAdapter(FileName)


@routes.get("/v1/learner/state")
async def state(request: web.Request) -> web.Response:
    """Return the state of the round that the learner needs."""
    round_ = require_operator(request)

    def read(connection: sa.Connection) -> LearnerState:
        programs.record_learner_request(connection, now_ms())
        version, update = policy_versions.newest_version(connection)
        finished = get_fact(connection, FINISHED)
        asked = fleet.load(connection, round_.config, alive_since_ms=now_ms() - round_.silent_after_ms)
        replacement = publication.newest_replacement(connection)
        retraction = commitments.retraction_to(connection, replacement) if replacement else None
        return LearnerState(
            round_id=round_.round_id,
            newest_version=version,
            newest_update=update,
            publish_every=fleet.kappa(asked, round_.config),
            ledger_size=store.size(connection),
            ledger_head=store.checkpoint(connection) or b"",
            finished=finished,
            evaluating=evaluations.is_running(connection, "last"),
            evaluated=evaluations.latest_results(connection),
            replacement=replacement,
            retracted=retraction.after if retraction else "",
            kept=commitments.drawn(connection, keeps=bool(round_.config.learner.kept_one_in)),
        )

    return reply(await round_.database.run(read))


@routes.get("/v1/learner/evaluations/{number:[0-9]+}/samples")
async def samples(request: web.Request) -> web.Response:
    """Return samples of an evaluation as text, for the learner's boards; `count` limits them."""
    round_ = require_operator(request)
    asked = request.query.get("count", "")
    count = int(asked) if asked.isdecimal() and len(asked) < 6 else limits.EVALUATION_SAMPLES_MAX
    text = await round_.policy.text()
    return reply(
        await round_.database.read(
            evaluation_samples.of_evaluation,
            int(request.match_info["number"]),
            min(count, limits.EVALUATION_SAMPLES_MAX),
            text.decode,
        )
    )


@routes.get("/v1/learner/uploads/{version:[0-9]+}")
async def unchanged(request: web.Request) -> web.Response:
    """Return the files of the previous version: unchanged ones need not be uploaded again."""
    round_ = require_operator(request)
    files = await asyncio.to_thread(round_.publisher.unchanged, int(request.match_info["version"]))
    return reply(KnownUploads(files=files))


@routes.put("/v1/learner/uploads/{version:[0-9]+}/{name}")
async def upload(request: web.Request) -> web.Response:
    """Store a file of a version to be published."""
    round_ = require_operator(request)
    try:
        name = _FILE_NAME.validate_python(request.match_info["name"])
    except ValidationError:
        raise MalformedMessage("The name of the policy file is not valid.") from None
    path = round_.publisher.uploads / str(int(request.match_info["version"])) / name
    await receive_file(request, path, request.query.get("digest", ""), max_bytes=UPLOAD_MAX_BYTES)
    return web.Response(status=204)


@routes.post("/v1/learner/versions")
async def publish_version(request: web.Request) -> web.Response:
    """Publish the uploaded files as the next version."""
    round_ = require_operator(request)
    await round_.publication.publish(Publication.from_bytes(await body(request)))
    return web.Response(status=204)


@routes.get("/v1/learner/versions/{version:[0-9]+}")
async def published(request: web.Request) -> web.Response:
    """Return the list of files of a published version, for a learner that resumes from it."""
    manifest = await _manifest(request)
    files = tuple(UploadedFile(path=entry.path, digest=entry.digest) for entry in manifest.files)
    return reply(Publication(version=manifest.version, update=manifest.update, files=files))


@routes.get("/v1/learner/versions/{version:[0-9]+}/{name}")
async def published_file(request: web.Request) -> web.StreamResponse:
    """Return a file of a published version."""
    manifest, name = await _manifest(request), request.match_info["name"]
    for entry in manifest.files:
        if entry.path == name:
            publisher = request.app[ROUND].publisher
            return web.FileResponse(
                await asyncio.to_thread(publication.file_of, publisher, manifest.version, name, entry.digest)
            )
    raise NotFound(f"Version {manifest.version} has no file of this name.")


async def _manifest(request: web.Request) -> PolicyManifest:
    round_ = require_operator(request)
    version = int(request.match_info["version"])
    manifest = await asyncio.to_thread(round_.publisher.manifest, version)
    if manifest is None:
        raise NotFound(f"Version {version} was not published, or its files are no longer kept.")
    return manifest


@routes.get("/v1/learner/batches/{number:[0-9]+}")
async def batch(request: web.Request) -> web.Response:
    """Return a batch to train on; hold the request open until it is full."""
    round_ = require_operator(request)
    deadline = asyncio.get_running_loop().time() + BATCH_WAIT_S
    await round_.database.run(programs.record_learner_request, now_ms(), asks_for=int(request.match_info["number"]))
    while True:
        round_.waiting.batch_ready.clear()
        training_batch = await round_.database.run(
            batches.get,
            int(request.match_info["number"]),
            terms=round_.terms,
            audits=round_.audits,
            now_ms=now_ms(),
        )
        if training_batch is not None:
            return reply(training_batch)
        try:
            async with asyncio.timeout(LOOK_AGAIN_S):
                await round_.waiting.batch_ready.wait()
        except TimeoutError:
            if asyncio.get_running_loop().time() >= deadline:
                return web.Response(status=204)


@routes.get("/v1/learner/offers")
async def offered(request: web.Request) -> web.Response:
    """Return the weights that a trainer offers as the next version; hold the request open until there are some."""
    round_ = require_operator(request)
    await round_.database.run(programs.record_learner_request, now_ms())
    offer = await round_.offered.next(OFFER_WAIT_S)
    if offer is None:
        return web.Response(status=204)
    version, update = await round_.database.read(policy_versions.newest_version)
    return reply(OfferedVersion(offer=offer.identity, version=version + 1, update=update + offer.updates))


@routes.post("/v1/learner/offers")
async def answer_offer(request: web.Request) -> web.Response:
    """Tell a trainer which version has its weights, or why they are refused."""
    round_ = require_operator(request)
    round_.offered.answer(OfferOutcome.from_bytes(await body(request)))
    return web.Response(status=204)


@routes.post("/v1/learner/reports")
async def report(request: web.Request) -> web.Response:
    """Record the learner's report about a batch."""
    round_ = require_operator(request)
    message = UpdateReport.from_bytes(await body(request))
    await round_.database.run(
        batches.report, message, audits=round_.audits, adapts=round_.terms.adapts, now_ms=now_ms()
    )
    await round_.database.run(programs.record_learner_request, now_ms())
    return web.Response(status=204)


@routes.post("/v1/learner/commitments")
async def commit(request: web.Request) -> web.Response:
    """Record the learner's commitment to an update in the ledger."""
    round_ = require_operator(request)
    message = UpdateCommitment.from_bytes(await body(request))
    await round_.database.run(commitments.record, message, now_ms=now_ms())
    return web.Response(status=204)


@routes.post("/v1/learner/progress")
async def progress(request: web.Request) -> web.Response:
    """Record the learner's phase and progress."""
    round_ = require_operator(request)
    message = LearnerProgress.from_bytes(await body(request))

    def remember(connection: sa.Connection) -> Mapping[str, Any]:
        programs.record_learner_request(connection, now_ms())
        before = get_fact(connection, PROGRESS)
        known = {name: value for name, value in message.model_dump().items() if value is not None}
        set_fact(connection, PROGRESS, {**before, **known})
        return before

    before = await round_.database.run(remember)
    if (message.phase, int(10 * message.fraction)) != (before.get("phase"), int(10 * before.get("fraction", 0))):
        log.info("learner phase=%r done=%.0f%% %s", message.phase, 100 * message.fraction, message.detail)
    return web.Response(status=204)


@routes.post("/v1/learner/finish")
async def finish(request: web.Request) -> web.Response:
    """Finish the round after the last update."""
    await finish_round(require_operator(request))
    return web.Response(status=204)


async def finish_round(round_: Round) -> bool:
    """Grant no more leases, and settle pending claims, after their audits; return False if that was done before."""

    def end(connection: sa.Connection) -> bool:
        if get_fact(connection, FINISHED):
            return False
        set_fact(connection, FINISHED, True)
        evaluations.stop_all(connection, now_ms())
        batches.release_leftovers(connection, audits=round_.audits, now_ms=now_ms())
        lottery.end(connection, round_.audits, now_ms())
        escrow.settle_all(connection, round_.audits, now_ms())
        return True

    is_first = await round_.database.run(end)
    await round_.news.refresh()
    return is_first
