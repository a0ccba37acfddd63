"""Functions that all handlers share: reading bodies within bounds, checking signatures, turning errors into replies.

- Programs use canonical MessagePack; an error is `{code, message, hint}` with the status of `protocol.errors`.
- People get JSON errors: a request outside `/v1/`, with an `Accept` that names JSON or HTML, or not MessagePack, with a
  body of JSON, or with an API key.
- A browser that requests a wrong address outside `/v1/` gets the "not found" page.
- A round that is not on the internet answers no request for a name of the internet, except its own: by such a name, a
  page of another site in a browser of this network could read it (DNS rebinding). Addresses and private names pass.
- A body that declares too large a length is rejected before a byte of it is read; one without a length, where it gets
  too long; and one that arrives too slowly, since an open connection is one that others do not get. The memory for
  bodies comes from a budget (`coordinator.api.guard`).
"""

import asyncio
import hmac
import json
import logging
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar
from urllib.parse import urlsplit

import sqlalchemy as sa
from aiohttp import ClientConnectionResetError, HttpVersion10, HttpVersion11, web
from pydantic import BaseModel, ValidationError

from coordinator.api.guard import BODIES, BOUNDS
from coordinator.base.clock import now_ms
from coordinator.base.files import ArrivingFile
from coordinator.config import Config
from coordinator.config.round import host_of_url
from coordinator.service.round import Round
from coordinator.transactions import api_keys, registry
from protocol import limits
from protocol.breach import Breach
from protocol.errors import (
    FieldRefused,
    KeyRefused,
    MalformedMessage,
    MessageTooLarge,
    Misdirected,
    NotAuthorised,
    NotFound,
    Overloaded,
    SwarmError,
    TooManyStatements,
)
from protocol.ids import NodeId
from protocol.people.addresses import ip_of, is_public_host
from protocol.wire import canonical
from protocol.wire.message import Message
from protocol.work.messages import LeaseProgress, Submission, open_request

log = logging.getLogger(__name__)

ROUND = web.AppKey("round", Round)
BY_OPERATOR = web.RequestKey("by_operator", bool)
ERROR_PAGE: web.AppKey[Callable[[web.Request, NotFound], web.Response]] = web.AppKey("error_page")
"""The function that renders the page for a wrong address outside the API (`/v1/`)."""
OWN_HOSTS = web.AppKey("own_hosts", frozenset[str])
"""Host names of a round that is not on the internet; absent for one that is."""
KEY_READS = web.AppKey("key_reads", asyncio.Semaphore)
"""Turns of the requests with API keys that read."""
KEY_READS_AT_ONCE = 32
"""A burst of queries waits for its turns, and neither it nor invented keys take the places of the round's own reads."""
MSGPACK = "application/msgpack"

NUMBER_MAX_CHARS = 9
"""The most digits of a number in an address."""

SPOKEN = (HttpVersion10, HttpVersion11)

LINGER_S = 10.0
"""Seconds for which the rest of a rejected body is read, so that its sender reads the answer."""

CLIENT_LEFT = 499
"""Status for the log of a request whose client closed its connection before the answer; nobody receives it."""

RETRY_AFTER_S = (2, 8)
"""Bounds of Retry-After; a client that comes too early costs a tenth of a request."""

WRITTEN_AT_ONCE_BYTES = limits.MIB
"""Bytes of an upload kept in memory, besides the server's own buffer, before they are written."""

M = TypeVar("M", bound=Message)
B = TypeVar("B", bound=BaseModel)
T = TypeVar("T")
P = ParamSpec("P")
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@web.middleware
async def errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Turn every failure into a named error."""
    try:
        if request.version not in SPOKEN:
            raise MalformedMessage("This server supports HTTP/1.0 and HTTP/1.1 only.")
        if OWN_HOSTS in request.app:
            _require_own_host(request.headers.get("Host", ""), request.app[OWN_HOSTS])
        return await handler(request)
    except SwarmError as error:
        return await _refuse(request, error)
    except web.HTTPNotFound:
        nothing = f"There is nothing at {request.path[:100]}"
        if not _is_of_the_endpoint(request):
            return await _refuse(request, NotFound(f"{nothing}."))
        # Clients of OpenAI's API show the message alone.
        message = f"{nothing}: the endpoint has /v1/completions, /v1/chat/completions and /v1/models."
        return await _refuse(request, NotFound(message, hint="The base URL of the endpoint ends with /v1."))
    except web.HTTPException as error:
        return await _refuse(request, MalformedMessage(f"{request.method} {request.path[:100]}: {error.reason}."))
    except Exception as error:  # the client gets an answer, and the operator the traceback
        if isinstance(error, ConnectionError) and _has_left(request):
            level = logging.DEBUG if _is_of_the_client(error, request) else logging.WARNING
            log.log(level, "%s %s: the client has left (%r)", request.method, request.path, error)
            return web.Response(status=CLIENT_LEFT)
        log.exception("%s %s failed", request.method, request.path)
        failed = SwarmError("The coordinator had an internal error. The rollout is not lost.", hint="Try again later.")
        return await _refuse(request, failed)


def _has_left(request: web.Request) -> bool:
    """Return True if the client has closed its connection."""
    return request.transport is None or request.transport.is_closing()


def _is_of_the_client(error: ConnectionError, request: web.Request) -> bool:
    """Return True if aiohttp raised the error for the client's own connection.

    Other errors come from a database or a server, whose outage makes clients leave, too.
    """
    if error is request.content.exception():  # while the body arrived
        return True
    if isinstance(error, ClientConnectionResetError):  # before a write; one of our own HTTP client has a cause
        return error.__cause__ is None
    return type(error) is ConnectionError  # while a write waited


def own_hosts(config: Config) -> frozenset[str] | None:
    """Return the host names of a round that is not on the internet; None for one that is."""
    section = config.round
    hosts = [host_of_url(url) for url in (section.join_string(""), section.listen, section.tls_listen)]
    return None if is_public_host(hosts[0]) else frozenset((*hosts, *section.hosts))


def _require_own_host(header: str, own: frozenset[str]) -> None:
    """Refuse a request for another host: only a public name can be another site's."""
    try:
        host = (urlsplit(f"//{header}").hostname or "").rstrip(".")
        is_foreign = not _is_address(host) and is_public_host(host) and host not in own
    except ValueError:
        host, is_foreign = header, True
    if is_foreign:
        raise Misdirected(
            f"This round is not on the internet, and {host[:100]!r} is not its name.",
            hint="Use the address from the join string. The operator can allow this name in round.hosts.",
        )


def _is_address(host: str) -> bool:
    try:
        ip_of(host)
    except ValueError:
        return False
    return True


async def _refuse(request: web.Request, error: SwarmError) -> web.Response:
    """Answer with an error; close the connection if the body is not complete.

    A client that is sending reads the answer only if the rest of its body is read, so up to `REQUEST_MAX_BYTES` of it
    are read, but none for a client without the operator's token.
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
    """A node's request with valid signature, audience and form; the first effect uses its nonce."""

    node: NodeId
    message: M
    nonce: bytes | None
    sent_ms: int


async def read_signed_request(request: web.Request, kind: type[M]) -> Asked[M]:
    """Read a node's signed request; a large one on a thread outside the event loop."""
    round_ = request.app[ROUND]
    round_.database.require_room()  # before a signature is checked, which costs more than anything else
    data = await body(
        request, limits.REQUEST_MAX_BYTES if kind in (Submission, LeaseProgress) else limits.SMALL_REQUEST_MAX_BYTES
    )

    def read() -> Asked[M]:
        signed, opened = open_request(data, round_id=round_.round_id, path=request.path, now_ms=now_ms())
        return Asked(signed.signer, kind.from_bytes(opened.body), opened.nonce, opened.sent_ms)

    return await round_.beside_the_loop(read) if len(data) > limits.READ_AT_ONCE_BYTES else read()


async def commit(request: web.Request, said: Asked[M], effect: Callable[..., T], **context: Any) -> T:
    """Run `effect(connection, node, message, …)` in one transaction, the first of a request with its nonce."""
    return await request.app[ROUND].database.run_for_node(effect_of(said, effect, **context))


def effect_of(said: Asked[M], effect: Callable[..., T], **context: Any) -> Callable[[sa.Connection], T]:
    """Return `effect(connection, node, message, …)` at this time, the first of a request with its nonce."""
    moment_ms = now_ms()
    nonce, said.nonce = said.nonce, None

    def once(connection: sa.Connection) -> T:
        if nonce is not None:
            registry.spend_nonce(connection, said.node, nonce, said.sent_ms)
        return effect(connection, said.node, said.message, now_ms=moment_ms, **context)

    return once


async def act(request: web.Request, kind: type[M], effect: Callable[..., T], **context: Any) -> T:
    """Read a node's signed request, and run its effect in one transaction with its nonce."""
    return await commit(request, await read_signed_request(request, kind), effect, **context)


async def body(request: web.Request, max_bytes: int = limits.REQUEST_MAX_BYTES) -> bytes:
    """Return the request's body; raise an error if it is too large or there is no memory for it."""
    if not request.content.is_eof():
        return await _gathered(request, max_bytes)
    data = await _next_piece(request, 0.0)  # it arrived with its head, as small ones do: needs no time-out
    if len(data) > max_bytes:
        raise MessageTooLarge(f"The request has {len(data)} bytes; the limit is {max_bytes} bytes.")
    return data


async def read_json(request: web.Request, kind: type[B], name: str) -> B:
    """Return the JSON body of a request as an object of `kind`; errors call it `name`."""
    try:
        return kind.model_validate_json(await body(request, limits.SMALL_REQUEST_MAX_BYTES))
    except ValidationError as error:
        raise MalformedMessage(f"The {name} is not valid: {error}.") from None


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
        raise MessageTooLarge(f"The request has {request.content_length} bytes; the limit is {max_bytes} bytes.")


async def pieces(request: web.Request, max_bytes: int) -> AsyncIterator[bytes]:
    """Yield the body piece by piece, for bodies that are too large for the memory."""
    _require_fitting(request, max_bytes)
    bounds = request.app[BOUNDS]
    size, began = 0, asyncio.get_running_loop().time()
    while piece := await _next_piece(request, began + bounds.grace_s + size / bounds.bytes_per_s):
        size += len(piece)
        if size > max_bytes:
            raise MessageTooLarge(f"The request is larger than the limit of {max_bytes} bytes.")
        yield piece


async def _next_piece(request: web.Request, until_s: float) -> bytes:
    """Return some bytes of the body; none at its end."""
    try:
        if request.content.is_eof():  # all of it is here
            return request.content.read_nowait()
        async with asyncio.timeout_at(until_s):
            return await request.content.readany()
    except TimeoutError:
        raise MalformedMessage(
            "The request's body arrived too slowly.", hint="Send it again over a faster connection."
        ) from None
    except web.RequestPayloadError as error:
        raise MalformedMessage("The encoding of the request's body does not match its headers.") from error


async def receive_file(request: web.Request, path: Path, digest: str | None, *, max_bytes: int) -> None:
    """Write the request's body to `path`, if it has this BLAKE3 digest; without one, the reader checks the content."""
    arriving = await _arriving(path)
    try:
        waiting = bytearray()
        async for piece in pieces(request, max_bytes):
            waiting += piece
            if len(waiting) >= WRITTEN_AT_ONCE_BYTES:
                await asyncio.to_thread(arriving.write, waiting)
                waiting = bytearray()
        await asyncio.to_thread(arriving.write, waiting)
        await asyncio.to_thread(arriving.finish, digest)
    finally:
        arriving.discard()


async def _arriving(path: Path) -> ArrivingFile:
    """Create a file to write into; if the client disconnects during that, remove the file."""
    making = asyncio.ensure_future(asyncio.to_thread(ArrivingFile, path))
    try:
        return await asyncio.shield(making)
    except asyncio.CancelledError:
        making.add_done_callback(_discard)
        raise


def _discard(made: asyncio.Future[ArrivingFile]) -> None:
    if made.exception() is None:
        made.result().discard()


def require_key(request: web.Request) -> str:
    """Return the API key that the request has."""
    scheme, _, key = request.headers.get("Authorization", "").partition(" ")
    if scheme.lower() != "bearer" or not key.strip():
        raise KeyRefused("The request has no API key.", hint="Send it as `Authorization: Bearer KEY`.")
    return key.strip()


async def read_for_key(
    request: web.Request, effect: Callable[Concatenate[sa.Connection, P], T], *args: P.args, **kwargs: P.kwargs
) -> T:
    """Call a reading effect for a request with an API key, which anybody may have invented."""
    async with request.app[KEY_READS]:
        return await request.app[ROUND].database.read(effect, *args, **kwargs)


def asked_days(request: web.Request) -> int:
    """Return the number of days whose usage a request asks for in its address."""
    text, most = request.query.get("days", str(limits.USAGE_DAYS)), limits.USAGE_DAYS_MAX
    if not (text.isascii() and text.isdigit() and len(text) <= NUMBER_MAX_CHARS and 1 <= int(text) <= most):
        said = f"days is {text[:NUMBER_MAX_CHARS]!r}; a whole number from 1 to {most} is accepted."
        raise FieldRefused(said, breach=Breach("days"))
    return int(text)


def require_operator(request: web.Request) -> Round:
    """Return the round if the request has the operator's token; raise `NotAuthorised` otherwise."""
    round_ = request.app[ROUND]
    given = request.headers.get("Authorization", "").removeprefix("Bearer ")
    # Header bytes that are no UTF-8 arrive as surrogates, which plain encoding would reject with a different error.
    if not hmac.compare_digest(given.encode(errors="surrogateescape"), round_.operator_token.encode()):
        raise NotAuthorised("Only the operator may use this address.", hint="Send the token in operator.token.")
    request[BY_OPERATOR] = True
    return round_


def reply(message: Message) -> web.Response:
    return web.Response(body=message.to_bytes(), content_type=MSGPACK)


def reply_json(value: Any) -> web.Response:
    return web.json_response(value, headers={"Cache-Control": "no-store"})


def error_headers(error: SwarmError) -> dict[str, str] | None:
    """Return the headers of an error that say when to come again."""
    if isinstance(error, Overloaded):  # random, so that clients rejected together do not come back together
        return {"Retry-After": str(random.randint(*RETRY_AFTER_S))}
    if isinstance(error, TooManyStatements):
        return {"Retry-After": str(error.retry_after_s)}
    return None


def _is_of_the_endpoint(request: web.Request) -> bool:
    """Return True for a caller of the endpoint, such as one with a wrong base URL: it reads no msgpack."""
    bearer = request.headers.get("Authorization", "").removeprefix("Bearer ")
    return request.content_type == "application/json" or bearer.startswith(api_keys.PREFIX)


def _reads_msgpack(accepted: str) -> bool:
    """Return True if a header `Accept` allows MessagePack and names no type for people; nodes send `*/*`, or none."""
    if "json" in accepted or "html" in accepted:
        return False
    return not accepted or any(kind in accepted for kind in ("*/*", "application/*", "msgpack"))


def _error(request: web.Request, error: SwarmError) -> web.Response:
    accepted = request.headers.get("Accept", "")
    page = request.app.get(ERROR_PAGE)
    if page and isinstance(error, NotFound) and "html" in accepted and not request.path.startswith("/v1/"):
        return page(request, error)
    headers = error_headers(error)
    if not request.path.startswith("/v1/") or not _reads_msgpack(accepted) or _is_of_the_endpoint(request):
        text, kind = json.dumps(error.to_wire()), "application/json"
        return web.Response(text=text, content_type=kind, status=error.http_status, headers=headers)
    packed = canonical.encode(error.to_wire())
    return web.Response(body=packed, content_type=MSGPACK, status=error.http_status, headers=headers)
