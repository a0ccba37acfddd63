"""A small HTTP/1.1 server, of the owner's page on loopback and of a witness: h11 on trio, one request per connection.

- Every bound is here: connections, time for a request, bytes of head and body, time for an answer.
- A connection beyond the limit is closed at once, so that no program can use up the agent's file descriptors.
- A client's fault ends its connection; an error of our own is logged and answered with 500. Neither ends the agent.
- Every answer has the headers that keep other sites out: no frames, no sniffing, no foreign script, no cache.
"""

import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from urllib.parse import parse_qsl

import h11
import trio

from protocol import limits
from protocol.people.addresses import ip_of, neighbourhood

log = logging.getLogger(__name__)

CONNECTIONS_MAX = 32
"""A browser opens six; the page of a second browser, or its script, needs some more."""

ADDRESS_CONNECTIONS_MAX = 8
"""Connections of one neighbourhood of addresses beyond this machine: a slow client leaves room for others."""

REQUEST_S, ANSWER_S = 5.0, 30.0
"""Time for a whole request, and for a whole answer: the page may be shown through a slow SSH connection."""

HEAD_MAX_BYTES = 64 * limits.KIB
"""Other programs of this machine set cookies for 127.0.0.1, too, and browsers send all of them."""

BODY_MAX_BYTES = 32 * limits.KIB
"""A form has less than 2 KiB, a request to a witness less than 20 KiB."""

FIELDS_MAX = 100
"""Fields of a form or a query; ours have 50 at most."""

LINGER_S, LINGER_MAX_BYTES = 1.0, limits.MIB
"""A client that still sends while it is refused must be read, or the system drops our answer with the connection."""

READ_BYTES = 16 * limits.KIB

POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
)

HEADERS = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": POLICY,
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}
"""Headers of every answer."""


@dataclass(frozen=True)
class PageRequest:
    """A complete request, within all limits."""

    method: str
    path: str
    query: Mapping[str, str]
    headers: Mapping[str, str]
    """Header fields by their name in lower case; repeated ones are joined by a comma."""
    body: bytes = b""

    def form(self) -> dict[str, str]:
        """Return the fields of a form; of repeated fields, the last one."""
        return _fields(self.body.decode(errors="replace"))


@dataclass(frozen=True)
class PageReply:
    """An answer."""

    body: bytes = b""
    status: int = 200
    kind: str = "text/html; charset=utf-8"
    headers: Mapping[str, str] = field(default_factory=dict)
    """Header fields in addition to `HEADERS`, or in their place."""


Answer = Callable[[PageRequest], Awaitable[PageReply]]


def plain(text: str, status: int) -> PageReply:
    """Return an answer that is only text."""
    return PageReply(f"{text}\n".encode(), status, "text/plain; charset=utf-8")


async def serve(listener: trio.SocketListener, answer: Answer, *, request_s: float = REQUEST_S) -> None:
    """Answer requests until cancelled."""
    await trio.serve_listeners(partial(_converse, answer, ConnectionRoom(), request_s), [listener])


class ConnectionRoom:
    """The open connections, and how many of them each neighbourhood of addresses has."""

    def __init__(self) -> None:
        self._open: Counter[str] = Counter()

    @contextmanager
    def entered(self, address: str) -> Iterator[bool]:
        """Count a connection from `address` for the duration of the block; yield False if it is one too many.

        This machine's own connections may be a proxy's, or the browser's of the owner: only their total is limited.
        """
        key = neighbourhood(address)
        share = CONNECTIONS_MAX if ip_of(address).is_loopback else ADDRESS_CONNECTIONS_MAX
        if self._open.total() >= CONNECTIONS_MAX or self._open[key] >= share:
            yield False
            return
        self._open[key] += 1
        try:
            yield True
        finally:
            self._open[key] -= 1
            self._open += Counter()  # drops those without connections


async def _converse(answer: Answer, room: ConnectionRoom, request_s: float, stream: trio.SocketStream) -> None:
    left = (OSError, trio.BrokenResourceError, trio.ClosedResourceError)
    async with stream:
        with suppress(*left), room.entered(stream.socket.getpeername()[0]) as may_stay:
            if may_stay:
                await _answer_one(answer, stream, request_s)


async def _answer_one(answer: Answer, stream: trio.SocketStream, request_s: float) -> None:
    connection = h11.Connection(h11.SERVER, max_incomplete_event_size=HEAD_MAX_BYTES)
    request: PageRequest | PageReply | None = None
    with trio.move_on_after(request_s):
        request = await _read(connection, stream)
    if request is None:  # too slow, or the client left
        return
    if isinstance(request, PageReply):
        reply, method = request, ""
    else:
        reply, method = await _reply(answer, request), request.method
    with trio.move_on_after(ANSWER_S):
        await stream.send_all(_encode(connection, reply, method))
        await stream.send_eof()
    with trio.move_on_after(LINGER_S):
        read_bytes = 0
        while read_bytes < LINGER_MAX_BYTES and (part := await stream.receive_some(READ_BYTES)):
            read_bytes += len(part)


async def _reply(answer: Answer, request: PageRequest) -> PageReply:
    try:
        return await answer(request)
    except Exception:  # a fault of one answer must not end the agent, which earns
        log.exception("the answer to %s failed", request.path.rpartition("/")[2][:100])
        return plain("The answer failed. The program continues; its log has the reason.", 500)


async def _read(connection: h11.Connection, stream: trio.SocketStream) -> PageRequest | PageReply | None:
    """Read a request; return the refusal if it breaks a limit or is not HTTP, and None if the client left."""
    head: h11.Request | None = None
    body = bytearray()
    try:
        while True:
            event = connection.next_event()
            if event is h11.NEED_DATA:
                connection.receive_data(await stream.receive_some(READ_BYTES))
            elif isinstance(event, h11.Request):
                head = event
            elif isinstance(event, h11.Data):
                body += event.data
                if len(body) > BODY_MAX_BYTES:
                    return plain(f"The request is larger than {BODY_MAX_BYTES} bytes.", 413)
            elif isinstance(event, h11.EndOfMessage) and head is not None:
                return _request(head, bytes(body))
            else:
                return None
    except h11.RemoteProtocolError as error:
        return plain("The request is not valid HTTP/1.1.", error.error_status_hint)


def _request(head: h11.Request, body: bytes) -> PageRequest | PageReply:
    headers: dict[str, str] = {}
    for name, value in head.headers:
        text = value.decode("latin-1")
        key = name.decode("latin-1")
        headers[key] = f"{headers[key]}, {text}" if key in headers else text
    target = head.target.decode("latin-1")
    if not target.startswith("/"):
        return plain("The request names no path of this page.", 400)
    path, _, query = target.partition("?")
    return PageRequest(head.method.decode("latin-1"), path, _fields(query), headers, body)


def _fields(text: str) -> dict[str, str]:
    try:
        return dict(parse_qsl(text, keep_blank_values=True, max_num_fields=FIELDS_MAX))
    except ValueError:  # more fields than any form of ours
        return {}


def _encode(connection: h11.Connection, reply: PageReply, method: str) -> bytes:
    """Return the bytes of an answer; that to HEAD has no body."""
    fields = {
        "Content-Type": reply.kind,
        "Content-Length": str(len(reply.body)),
        "Connection": "close",
        **HEADERS,
        **reply.headers,
    }
    response = h11.Response(status_code=reply.status, headers=list(fields.items()))
    head = connection.send(response) or b""
    return head if method == "HEAD" else head + reply.body
