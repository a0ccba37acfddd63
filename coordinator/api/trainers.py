"""Routes for trainers that are not ours: they send weights and get a version, with an API key that may publish.

- Samples come from the endpoint (`coordinator.api.completions`), with the same key.
- Requests and answers are JSON, but for the weights themselves, which are files in hub format.
- A file may be sent as a patch (`protocol.policy.delta`) from a file of the newest version, which the coordinator has
  in any case. Its digest is that of the patched file, so what is published never depends on how it was sent.
"""

import asyncio
import os
from pathlib import Path
from typing import Annotated, Any

import sqlalchemy as sa
from aiohttp import web
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from coordinator.api.http import ROUND, body, read_for_key, receive_file, reply_json, require_key
from coordinator.base.clock import now_ms
from coordinator.publishing.publish import apply_patch
from coordinator.service.publication import published_file, published_weights
from coordinator.service.round import Round
from coordinator.transactions import api_keys, policy_versions, queries
from protocol import limits
from protocol.errors import MalformedMessage, MessageTooLarge, NotFound, OutOfOrder
from protocol.ids import Hex64
from protocol.policy.manifest import FileName

routes = web.RouteTableDef()

WIDER = 4
"""The most bytes of a trainer's file, in sizes of the newest version: it may be in float32 or float64."""

UPDATES_MAX = 10_000


class VersionOffer(BaseModel):
    """The files of a version, by name, that the trainer has sent, and the training steps since the version before."""

    model_config = ConfigDict(extra="forbid")

    files: Annotated[dict[FileName, Hex64], Field(min_length=1, max_length=limits.MANIFEST_MAX_FILES)]
    updates: int = Field(1, ge=1, le=UPDATES_MAX)


@routes.get("/v1/key")
async def key_state(request: web.Request) -> web.Response:
    """Return the budget of the caller's key, what it has spent, and whether it may publish."""
    return reply_json(await read_for_key(request, api_keys.state_of, require_key(request), now_ms=now_ms()))


@routes.get("/v1/trainer/versions")
async def versions(request: web.Request) -> web.Response:
    """Return the newest version, its update, and how many nodes hold which version that may still be sampled."""
    round_, key = request.app[ROUND], require_key(request)

    def read(connection: sa.Connection) -> dict[str, Any]:
        api_keys.number_of(connection, key, now_ms=now_ms())
        version, update = policy_versions.newest_version(connection)
        alive_since_ms = now_ms() - round_.silent_after_ms
        held = queries.versions_held(connection, terms=round_.terms, alive_since_ms=alive_since_ms)
        return {
            "newest_version": version,
            "newest_update": update,
            "max_staleness": round_.terms.staleness,
            "held": [{"version": number, "nodes": nodes} for number, nodes in held.items()],
        }

    return reply_json(await read_for_key(request, read))


@routes.get("/v1/trainer/files")
async def files(request: web.Request) -> web.Response:
    """Return the newest version's files of weights, with their safetensors headers: the bases of patches."""
    round_ = request.app[ROUND]
    await _publisher(request)
    version = await _newest(round_)
    described = await asyncio.to_thread(published_weights, round_.publisher, version)
    return reply_json({"version": version, "files": described})


@routes.put("/v1/trainer/files/{digest:[0-9a-f]{64}}")
async def send_file(request: web.Request) -> web.Response:
    """Receive the file of weights with this digest; with `?base=DIGEST`, as a patch from the file of that digest."""
    round_ = request.app[ROUND]
    number = await _publisher(request)
    digest = request.match_info["digest"]
    newest = await round_.database.read(policy_versions.newest_size_bytes)
    most = WIDER * newest + limits.MIB
    if (request.content_length or 0) > most:
        raise MessageTooLarge(f"The file has {request.content_length:,} bytes; this round takes at most {most:,}.")
    target = round_.offered.file(number, digest)
    if "base" in request.query:
        await _receive_patch(request, target, digest, most)
    else:
        await receive_file(request, target, digest, max_bytes=most)
    return web.Response(status=204)


@routes.post("/v1/trainer/versions")
async def publish(request: web.Request) -> web.Response:
    """Publish files that were sent as the next version; answer when it is signed and nodes may fetch it."""
    round_ = request.app[ROUND]
    number = await _publisher(request)
    try:
        offer = VersionOffer.model_validate_json(await body(request, limits.SMALL_REQUEST_MAX_BYTES))
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = ".".join(map(str, first["loc"])) or "the body"
        raise MalformedMessage(f"{place}: {first['msg']}.") from None
    newest = await _newest(round_)
    version = await round_.offered.publish(number, offer.files, offer.updates)
    return reply_json({"version": version, "changed": version > newest})


async def _receive_patch(request: web.Request, target: Path, digest: str, max_bytes: int) -> None:
    """Receive a patch, and write the file that it makes of a file of the newest version."""
    round_, base_digest = request.app[ROUND], request.query["base"]
    version, _ = await round_.database.read(policy_versions.newest_version)
    missing = NotFound(
        f"No file of version {version} has the digest {base_digest[:12]}….",
        hint="Send the whole file, or a patch from a file that GET /v1/trainer/files lists.",
    )
    patch = target.with_name(f"{digest}.{os.urandom(8).hex()}.patch")
    try:
        base = await asyncio.to_thread(published_file, round_.publisher, version, base_digest)
        if base is None:
            raise missing
        await receive_file(request, patch, None, max_bytes=max_bytes)
        await asyncio.to_thread(apply_patch, base, base_digest, patch, target, digest, max_bytes=max_bytes)
    except FileNotFoundError:  # a newer version was published meanwhile
        raise missing from None
    finally:
        patch.unlink(missing_ok=True)


async def _newest(round_: Round) -> int:
    """Return the newest version, of which the next one takes the place."""
    newest, _ = await round_.database.read(policy_versions.newest_version)
    if not newest:
        raise OutOfOrder("The first version is not published yet.", hint="Wait until GET /v1/trainer/versions shows 1.")
    return newest


async def _publisher(request: web.Request) -> int:
    """Return the number of the caller's key, if it may publish in this round."""
    round_ = request.app[ROUND]
    number = await read_for_key(request, api_keys.publisher, require_key(request), now_ms=now_ms())
    _require_external(round_)
    return number


def _require_external(round_: Round) -> None:
    if not round_.config.learner.external:
        raise OutOfOrder(
            "The learner of this round publishes its versions.",
            hint="A trainer of your own needs a round with learner.external=true.",
        )
