"""Replies that clients fetch by an id, and the order in which the requests of a model run.

- A request is answered at once with its id. Its reply is kept until it is fetched, and after that as long as there is
  room: the client may repeat a fetch whose answer it did not get.
- The requests of a model are numbered from 1. They may arrive in any order, and run one at a time in the order of
  their numbers. If one never arrives, those that wait for it fail by name.
"""

import asyncio
import json
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from protocol import limits
from protocol.errors import NotFound, OutOfOrder, Overloaded, SwarmError


@dataclass(frozen=True, slots=True)
class FinishedReply:
    """The body of a reply, as the client reads it."""

    body: bytes
    is_protobuf: bool = False


def json_reply(**fields: Any) -> FinishedReply:
    """Return a reply in JSON."""
    return FinishedReply(json.dumps(fields).encode())


def failed_reply(error: SwarmError) -> FinishedReply:
    """Return the reply to a request that failed, which the client raises as a `RequestFailedError`."""
    category = "user" if error.http_status < 500 else "server"
    return json_reply(error=f"{error} ({error.code})", category=category)


class Replies:
    """The requests that are not answered yet, and the replies to the others."""

    def __init__(
        self, *, pending_max: int = limits.TINKER_PENDING_MAX, kept_max_bytes: int = limits.TINKER_REPLIES_MAX_BYTES
    ) -> None:
        self._pending_max, self._kept_max_bytes = pending_max, kept_max_bytes
        self._pending = dict[str, asyncio.Event]()
        self._unread, self._read = OrderedDict[str, FinishedReply](), OrderedDict[str, FinishedReply]()
        self._kept_bytes = 0

    def begin(self, request_id: str) -> bool:
        """Record a new request; return False if it is known: the client repeats it."""
        if request_id in self._pending or request_id in self._unread or request_id in self._read:
            return False
        if len(self._pending) >= self._pending_max:
            raise Overloaded(f"{self._pending_max:,} requests are under way.", hint="Wait for some of them.")
        self._pending[request_id] = asyncio.Event()
        return True

    def finish(self, request_id: str, reply: FinishedReply) -> None:
        """Record the reply to a request."""
        arrived = self._pending.pop(request_id, None)
        if arrived is None:
            return
        self._unread[request_id] = reply
        self._kept_bytes += len(reply.body)
        while self._kept_bytes > self._kept_max_bytes and len(self._unread) + len(self._read) > 1:
            _, dropped = (self._read or self._unread).popitem(last=False)
            self._kept_bytes -= len(dropped.body)
        arrived.set()

    async def fetch(self, request_id: str, *, wait_s: float = limits.TINKER_POLL_S) -> FinishedReply | None:
        """Return the reply to a request, or None if it does not come within `wait_s`."""
        if (pending := self._pending.get(request_id)) is not None:
            try:
                await asyncio.wait_for(pending.wait(), wait_s)
            except TimeoutError:
                return None
        if (reply := self._unread.pop(request_id, None)) is not None:
            self._read[request_id] = reply
        if (reply := self._read.get(request_id)) is None:
            raise NotFound(
                f"There is no request {request_id[:80]}.",
                hint="The server was restarted, or the reply was dropped to make room: create the client anew.",
            )
        return reply


@dataclass(frozen=True, slots=True)
class NumberedRequest:
    """A request that waits for its turn."""

    run: Callable[[], Awaitable[None]]
    fail: Callable[[SwarmError], None]


class RequestLine:
    """The requests of one model, from number 1 on. `run` is its task."""

    def __init__(self, *, gap_s: float = limits.TINKER_GAP_S) -> None:
        self._gap_s = gap_s
        self._next = 1
        self._waiting = dict[int, NumberedRequest]()
        self._arrived = asyncio.Event()

    def add(self, number: int, request: NumberedRequest) -> None:
        """Add a request at its place."""
        if number < self._next or number in self._waiting:
            raise OutOfOrder(f"seq_id {number} was used before.", hint="Number the requests of a model from 1, by one.")
        self._waiting[number] = request
        self._arrived.set()

    async def run(self) -> None:
        """Run the requests in their order, until cancelled."""
        while True:
            if (request := self._waiting.pop(self._next, None)) is not None:
                await request.run()
                self._next += 1
                continue
            self._arrived.clear()
            try:
                await asyncio.wait_for(self._arrived.wait(), self._gap_s if self._waiting else None)
            except TimeoutError:
                self._fail_first()

    def close(self, error: SwarmError) -> None:
        """Fail all that waits."""
        for request in self._waiting.values():
            request.fail(error)
        self._waiting.clear()

    def _fail_first(self) -> None:
        """Fail the first request that waits, since the one before it has not arrived."""
        number = min(self._waiting)
        missing = f"seq_id {self._next} has not arrived within {self._gap_s:g} s, so seq_id {number} cannot run."
        self._waiting.pop(number).fail(OutOfOrder(missing, hint="Create the training client anew from a saved state."))
        self._next = number + 1
