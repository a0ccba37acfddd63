"""Routes of Tinker's HTTP interface. Each is authenticated, read, and passed to the service.

- A refusal has a status below 500, and none of 408, 409 and 429: the client raises its text at once. It repeats a call
  for minutes after other statuses.
- The data of forward_backward are checked when their turn comes: a call that is refused takes its place in the model's
  line all the same, or those after it would wait for its number.
"""

import hmac
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from aiohttp import web
from pydantic import BaseModel, ValidationError

from echo_swarm.tinker import calls
from echo_swarm.tinker.forms import read_forward_backward
from echo_swarm.tinker.service import TinkerService
from protocol import limits
from protocol.errors import FieldRefused, KeyRefused, MalformedMessage, MessageTooLarge, Overloaded, SwarmError

C = TypeVar("C", bound=BaseModel)

routes = web.RouteTableDef()

SERVICE = web.AppKey("service", TinkerService)
KEY = web.AppKey("key", str)

KEY_PREFIX = "tml-"
"""The client takes no key without it: clients have the API key of the swarm behind this prefix."""

NOT_OFFERED = {
    "create_custom_loss": "losses are not uploaded; forward_backward_custom computes them at the client",
    "copy_weights": "states stay in the folder of this server",
    "weights_info": "states belong to this server's policy",
    "retrieve_futures": "replies are fetched one by one",
    "join_sampling_session": "a sampler belongs to the process that made it",
    "training_runs": "runs and their states are not listed",
    "checkpoints": "states are not listed",
    "sessions": "sessions are not listed",
    "billing": "`GET /v1/key` of the round has what a key has spent",
    "audit": "the round's public ledger has what was paid",
    "auth": "keys are not exchanged for tokens",
}
"""Calls that are refused, by the first part of their path."""


def create_app(service: TinkerService, key: str) -> web.Application:
    """Return the application."""
    app = web.Application(middlewares=[_named_errors], client_max_size=limits.TINKER_BODY_MAX_BYTES)
    app[SERVICE], app[KEY] = service, KEY_PREFIX + key
    app.add_routes(routes)
    return app


@web.middleware
async def _named_errors(
    request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> web.StreamResponse:
    """Answer an error by its text and code; require the key of everything but the health check."""
    try:
        if request.path != "/api/v1/healthz":
            _require_key(request)
        return await handler(request)
    except web.HTTPRequestEntityTooLarge:
        return _refusal(
            MessageTooLarge(f"The body is above {limits.TINKER_BODY_MAX_BYTES:,} bytes.", hint="Send less.")
        )
    except SwarmError as error:
        return _refusal(error)


def _require_key(request: web.Request) -> None:
    given = request.headers.get("X-API-Key", "")
    if not hmac.compare_digest(given.encode(), request.app[KEY].encode()):
        raise KeyRefused(
            "This is not the key of this server.", hint=f"Set TINKER_API_KEY to {KEY_PREFIX} and the swarm's API key."
        )


def _refusal(error: SwarmError) -> web.Response:
    status = 400 if error.http_status in (408, 409) else error.http_status
    headers = {"Retry-After": "1"} if isinstance(error, Overloaded) else {}
    return web.json_response({"detail": str(error), "code": error.code}, status=status, headers=headers)


async def _read(request: web.Request, call: type[C]) -> C:
    """Return the body of a call."""
    try:
        return call.model_validate_json(await request.read())
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        place = ".".join(map(str, first["loc"])) or "the body"
        said = "this value is not offered" if first["type"] == "literal_error" else first["msg"]
        raise FieldRefused(f"{place}: {said}.", hint="docs/trainers.md lists what is offered.") from None


async def _line_up(request: web.Request, call: type[C], line_up: Callable[[C], str]) -> web.Response:
    """Line up a call of a model. If it cannot be read, its refusal takes its place."""
    service = request.app[SERVICE]
    try:
        return _promised(line_up(await _read(request, call)))
    except FieldRefused as error:
        numbered = await _read(request, calls.NumberedCall)
        is_step = call is calls.OptimStep
        return _promised(service.refuse(numbered.model_id, numbered.seq_id, error, clears_gradient=is_step))


def _promised(request_id: str, **more: Any) -> web.Response:
    return web.json_response({"request_id": request_id, **more})


@routes.get("/api/v1/healthz")
async def health(_: web.Request) -> web.Response:
    """Answer that the server runs."""
    return web.json_response({"status": "ok"})


@routes.post("/api/v1/client/config")
async def client_config(_: web.Request) -> web.Response:
    """Return the client's settings: no exchange of keys, and parts of the client that need nothing more of a server."""
    return web.json_response(
        {
            "pjwt_auth_enabled": False,
            "use_pyqwest_transport": False,
            "proto_compress_fwdbwd": False,
            "sample_use_retrieve_futures": False,
            "custom_loss_server_side": False,
            "sample_join_sampling_session": False,
        }
    )


@routes.post("/api/v1/client/dynamic_config")
async def dynamic_config(_: web.Request) -> web.Response:
    """Return the client's settings that may change: it cancels samples that nobody waits for."""
    return web.json_response({"sample_cancel_enabled": True})


@routes.post("/api/v1/telemetry")
async def telemetry(_: web.Request) -> web.Response:
    """Accept the client's telemetry unread: it goes nowhere."""
    return web.json_response({"status": "accepted"})


@routes.get("/api/v1/get_server_capabilities")
async def capabilities(request: web.Request) -> web.Response:
    """Return the one model that is served."""
    name = request.app[SERVICE].policy.name
    return web.json_response({"supported_models": [{"model_name": name, "trainable": True, "sampleable": True}]})


@routes.post("/api/v1/create_session")
async def create_session(request: web.Request) -> web.Response:
    """Open a session."""
    return web.json_response({"type": "create_session", "session_id": request.app[SERVICE].open_session()})


@routes.post("/api/v1/session_heartbeat")
async def heartbeat(request: web.Request) -> web.Response:
    """Keep a session open."""
    request.app[SERVICE].heartbeat((await _read(request, calls.SessionCall)).session_id)
    return web.json_response({"type": "session_heartbeat"})


@routes.post("/api/v1/sessions/{session_id}/finish")
async def finish_session(request: web.Request) -> web.Response:
    """End a session; its models are dropped."""
    request.app[SERVICE].finish_session(request.match_info["session_id"])
    return web.json_response({})


@routes.post("/api/v1/create_model")
async def create_model(request: web.Request) -> web.Response:
    """Create a model with a new adapter."""
    return _promised(request.app[SERVICE].create_model(await _read(request, calls.CreateModel)))


@routes.post("/api/v1/get_info")
async def get_info(request: web.Request) -> web.Response:
    """Return what a model is, and the folder with its tokenizer."""
    service = request.app[SERVICE]
    model = service.find_model((await _read(request, calls.ModelCall)).model_id)
    policy = service.policy
    return web.json_response(
        {
            "type": "get_info",
            "model_id": model.model_id,
            "model_data": {"model_name": policy.name, "tokenizer_id": str(policy.folder.absolute())},
            "is_lora": True,
            "lora_rank": model.shape.rank,
            "model_name": policy.name,
        }
    )


@routes.post("/api/v1/forward_backward")
async def forward_backward(request: web.Request) -> web.Response:
    """Compute a loss and its gradient."""
    if request.content_type != "application/x-protobuf":
        raise MalformedMessage("forward_backward needs application/x-protobuf.", hint="Use tinker 0.38 or newer.")
    return _promised(request.app[SERVICE].forward_backward(read_forward_backward(await request.read())))


@routes.post("/api/v1/optim_step")
async def optim_step(request: web.Request) -> web.Response:
    """Make a step of AdamW."""
    return await _line_up(request, calls.OptimStep, request.app[SERVICE].optim_step)


@routes.post("/api/v1/save_weights")
async def save_weights(request: web.Request) -> web.Response:
    """Save a state."""
    return await _line_up(request, calls.SaveWeights, request.app[SERVICE].save_weights)


@routes.post("/api/v1/load_weights")
async def load_weights(request: web.Request) -> web.Response:
    """Continue from a state."""
    return _promised(request.app[SERVICE].load_weights(await _read(request, calls.LoadWeights)))


@routes.post("/api/v1/save_weights_for_sampler")
async def save_for_sampler(request: web.Request) -> web.Response:
    """Publish a model's weights."""
    return await _line_up(request, calls.SaveForSampler, request.app[SERVICE].save_for_sampler)


@routes.post("/api/v1/save_weights_external")
async def save_external(request: web.Request) -> web.Response:
    """Refuse to save weights elsewhere, in the model's line."""
    call = await _read(request, calls.NumberedCall)
    refusal = FieldRefused(
        "save_weights_external is not offered: weights leave a round as its versions.",
        hint="Use `swarm-coordinator export`, or save_state.",
    )
    return _promised(request.app[SERVICE].refuse(call.model_id, call.seq_id, refusal))


@routes.post("/api/v1/create_sampling_session")
async def create_sampler(request: web.Request) -> web.Response:
    """Return a sampler of a version."""
    call = await _read(request, calls.CreateSampler)
    sampler_id = await request.app[SERVICE].create_sampler(
        call.session_id, call.sampling_session_seq_id, call.model_path, call.base_model
    )
    return web.json_response({"type": "create_sampling_session", "sampling_session_id": sampler_id})


@routes.get("/api/v1/samplers/{sampler_id}")
async def get_sampler(request: web.Request) -> web.Response:
    """Return what a sampler samples from."""
    service, sampler_id = request.app[SERVICE], request.match_info["sampler_id"]
    sampler = service.find_sampler(sampler_id)
    said = {"sampler_id": sampler_id, "base_model": service.policy.name, "model_path": sampler.model_path}
    return web.json_response({name: value for name, value in said.items() if value is not None})


@routes.post("/api/v1/asample")
async def sample(request: web.Request) -> web.Response:
    """Sample with the nodes."""
    call = await _read(request, calls.SampleCall)
    call.require_offered()
    request_id = request.app[SERVICE].sample(call)
    return _promised(request_id, sample_sequence_ids=[f"{request_id}:{number}" for number in range(call.num_samples)])


@routes.post("/api/v1/cancel_future")
async def cancel(request: web.Request) -> web.Response:
    """Cancel a sample that nobody waits for."""
    request.app[SERVICE].cancel((await _read(request, calls.ReplyCall)).request_id)
    return web.json_response({})


@routes.post("/api/v1/retrieve_future")
async def retrieve(request: web.Request) -> web.Response:
    """Return the reply to a request; 408 if it is not there yet: the client asks again."""
    request_id = (await _read(request, calls.ReplyCall)).request_id
    reply = await request.app[SERVICE].replies.fetch(request_id)
    if reply is None:
        waiting = {"type": "try_again", "request_id": request_id, "queue_state": "active"}
        return web.json_response(waiting, status=408)
    kind = "application/x-protobuf" if reply.is_protobuf else "application/json"
    return web.Response(body=reply.body, content_type=kind)


@routes.route("*", "/{path:.*}")
async def not_offered(request: web.Request) -> web.Response:
    """Refuse every other call by its name."""
    path = request.path.removeprefix("/api/v1/")
    reason = NOT_OFFERED.get(path.partition("/")[0], "it is no call that this server knows")
    raise FieldRefused(f"{request.method} {path[:80]} is not offered: {reason}.", hint="See docs/trainers.md.")
