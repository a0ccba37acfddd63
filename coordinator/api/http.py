"""What all handlers share: reading bodies within bounds, checking signatures, and turning errors into replies.

- Machines speak canonical MessagePack; an error is `{code, message, hint}` with the status of `protocol.errors`.
- People speak JSON; an address asked for with `Accept: application/json` (or a browser's) gets JSON errors.
- A browser that asks for a wrong address outside `/v1/` gets the "not found" page.
- A body is refused by its declared length before a byte of it is read, one without a length where it gets too long, and
  any that comes too slowly: a connection that is held open is one that others do not get. What is read takes its
  memory from a budget (`coordinator.api.guard`).
"""

import asyncio
import hmac
import json
import logging
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import sqlalchemy as sa
from aiohttp import HttpVersion10, HttpVersion11, web

from coordinator.api.guard import BODIES, BOUNDS
from coordinator.base.clock import now_ms
from coordinator.service.round import Round
from coordinator.transactions import registry
from protocol import limits
from protocol.errors import (
    MalformedMessage,
    MessageTooLarge,
    NotAuthorised,
    NotFound,
    Overloaded,
    SwarmError,
    TooManyStatements,
)
from protocol.ids import NodeId
from protocol.wire import canonical
from protocol.wire.message import Message
from protocol.work.messages import LeaseProgress, Submission, open_request

log = logging.getLogger(__name__)

ROUND = web.AppKey("round", Round)
BY_OPERATOR = web.RequestKey("by_operator", bool)
ERROR_PAGE: web.AppKey[Callable[[web.Request, NotFound], web.Response]] = web.AppKey("error_page")
"""Renders the page that a browser gets at a wrong address outside the API (`/v1/`)."""
MSGPACK = "application/msgpack"

SPOKEN = (HttpVersion10, HttpVersion11)

LINGER_S = 10.0
"""Seconds for which the rest of a refused body is read, so that its sender reads the answer."""

RETRY_AFTER_S = (2, 8)
"""When to come again, at the earliest and the latest; whoever comes too early costs a tenth of a request."""

M = TypeVar("M", bound=Message)
T = TypeVar("T")
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@web.middleware
async def errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Every failure as a named error."""
    try:
        if request.version not in SPOKEN:
            raise MalformedMessage("This server speaks HTTP/1.0 and HTTP/1.1.")
        return await handler(request)
    except SwarmError as error:
        return await _refuse(request, error)
    except web.HTTPNotFound:
        return await _refuse(request, NotFound(f"There is nothing at {request.path[:100]}."))
    except web.HTTPException as error:
        return await _refuse(request, MalformedMessage(f"{request.method} {request.path[:100]}: {error.reason}."))
    except Exception:  # whatever it is, the client gets an answer and the operator the traceback
        log.exception("%s %s failed", request.method, request.path)
        failed = SwarmError("The coordinator failed; the rollout is not lost.", hint="Try again later.")
        return await _refuse(request, failed)


async def _refuse(request: web.Request, error: SwarmError) -> web.Response:
    """Answer with an error; where the body has not come yet, the connection ends.

    A client that is sending reads the answer only if the rest is read as well: so much of it as a node sends is, but
    not for a caller without the operator's token.
    """
    response = _error(request, error)
    if request.version not in SPOKEN:
        response.force_close()
    if request.content.is_eof():
        return response
    response.force_close()
    with suppress(ConnectionError, TimeoutError, web.RequestPayloadError):
        await response.prepare(request)
        await response.write_eof()
        left = 0 if isinstance(error, NotAuthorised) else limits.REQUEST_MAX_BYTES
        async with asyncio.timeout(LINGER_S):
            while left > 0 and (piece := await request.content.readany()):
                left -= len(piece)
    return response


@dataclass
class Asked(Generic[M]):
    """A node's request whose signature, audience and form are right; its nonce is used with the first effect."""

    node: NodeId
    message: M
    nonce: bytes | None
    sent_ms: int


async def read_signed_request(request: web.Request, kind: type[M]) -> Asked[M]:
    """Read a node's signed request; a large one on a thread beside the loop."""
    here = request.app[ROUND]
    here.database.require_room()  # before a signature is checked, which costs more than anything else
    data = await body(
        request, limits.REQUEST_MAX_BYTES if kind in (Submission, LeaseProgress) else limits.SMALL_REQUEST_MAX_BYTES
    )

    def read() -> Asked[M]:
        signed, opened = open_request(data, round_id=here.round_id, path=request.path, now_ms=now_ms())
        return Asked(signed.signer, kind.from_bytes(opened.body), opened.nonce, opened.sent_ms)

    return await here.beside_the_loop(read) if len(data) > limits.READ_AT_ONCE_BYTES else read()


async def commit(request: web.Request, said: Asked[M], effect: Callable[..., T], **context: Any) -> T:
    """Run `effect(connection, node, message, …)` in one transaction, the first of a request with its nonce."""
    moment_ms = now_ms()
    nonce, said.nonce = said.nonce, None

    def once(connection: sa.Connection) -> T:
        if nonce is not None:
            registry.spend_nonce(connection, said.node, nonce, said.sent_ms)
        return effect(connection, said.node, said.message, now_ms=moment_ms, **context)

    return await request.app[ROUND].database.run_for_node(once)


async def act(request: web.Request, kind: type[M], effect: Callable[..., T], **context: Any) -> T:
    """Read a node's signed request, and run its effect in one transaction with its nonce."""
    return await commit(request, await read_signed_request(request, kind), effect, **context)


async def body(request: web.Request, max_bytes: int = limits.REQUEST_MAX_BYTES) -> bytes:
    """The request's body, if it is not too large, and there is room for it."""
    if not request.content.is_eof():
        return await _gathered(request, max_bytes)
    data = await _next_piece(request, 0.0)  # it came with its head, as small ones do: one look, and no clock
    if len(data) > max_bytes:
        raise MessageTooLarge(f"The request has {len(data)} bytes; at most {max_bytes} are read here.")
    return data


async def _gathered(request: web.Request, max_bytes: int) -> bytes:
    if request.get(BY_OPERATOR):
        return b"".join([piece async for piece in pieces(request, max_bytes)])
    _require_fitting(request, max_bytes)
    bodies, gathered, size = request.app[BODIES], [], 0
    async with bodies.coming(request) as coming:
        bodies.grow(coming, request.content_length or 0)
        async for piece in pieces(request, max_bytes):
            bodies.grow(coming, size := size + len(piece))
            gathered.append(piece)
    return b"".join(gathered)


def _require_fitting(request: web.Request, max_bytes: int) -> None:
    if (request.content_length or 0) > max_bytes:
        raise MessageTooLarge(f"The request has {request.content_length} bytes; at most {max_bytes} are read here.")


async def pieces(request: web.Request, max_bytes: int) -> AsyncIterator[bytes]:
    """The same as it comes, for bodies that are too large for the memory."""
    _require_fitting(request, max_bytes)
    bounds = request.app[BOUNDS]
    size, began = 0, asyncio.get_running_loop().time()
    while piece := await _next_piece(request, began + bounds.grace_s + size / bounds.bytes_per_s):
        size += len(piece)
        if size > max_bytes:
            raise MessageTooLarge(f"The request goes on after {max_bytes} bytes, the most that is read here.")
        yield piece


async def _next_piece(request: web.Request, until_s: float) -> bytes:
    """Some bytes of the body; nothing at its end."""
    try:
        if request.content.is_eof():  # all of it is here
            return request.content.read_nowait()
        async with asyncio.timeout_at(until_s):
            return await request.content.readany()
    except TimeoutError:
        raise MalformedMessage(
            "The request's body comes too slowly.", hint="Send it again over a better line."
        ) from None
    except web.RequestPayloadError as error:
        raise MalformedMessage("The request's body is not encoded as its headers say.") from error


def require_operator(request: web.Request) -> Round:
    """The round, for a caller that holds the operator's token."""
    here = request.app[ROUND]
    given = request.headers.get("Authorization", "").removeprefix("Bearer ")
    # Header bytes that are no UTF-8 arrive as surrogates, which plain encoding would refuse with an error of its own.
    if not hmac.compare_digest(given.encode(errors="surrogateescape"), here.operator_token.encode()):
        raise NotAuthorised("This address is the operator's.", hint="Send the token in operator.token.")
    request[BY_OPERATOR] = True
    return here


def reply(message: Message, status: int = 200) -> web.Response:
    return web.Response(body=message.to_bytes(), content_type=MSGPACK, status=status)


def reply_json(value: Any) -> web.Response:
    return web.json_response(value, headers={"Cache-Control": "no-store"})


def _error(request: web.Request, error: SwarmError) -> web.Response:
    accepted = request.headers.get("Accept", "")
    page = request.app.get(ERROR_PAGE)
    if page and isinstance(error, NotFound) and "html" in accepted and not request.path.startswith("/v1/"):
        return page(request, error)
    headers = None
    if isinstance(error, Overloaded):  # drawn, so that those who are refused together do not come back together
        headers = {"Retry-After": str(random.randint(*RETRY_AFTER_S))}
    elif isinstance(error, TooManyStatements):
        headers = {"Retry-After": str(error.retry_after_s)}
    if "json" in accepted or "html" in accepted:
        text, kind = json.dumps(error.to_wire()), "application/json"
        return web.Response(text=text, content_type=kind, status=error.http_status, headers=headers)
    packed = canonical.encode(error.to_wire())
    return web.Response(body=packed, content_type=MSGPACK, status=error.http_status, headers=headers)
