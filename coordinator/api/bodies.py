"""Memory for the bodies of requests, which come before a signature can be checked: a budget, and shares of it.

- A body above `FREE_BYTES` takes its declared length before a byte of it is read, or what has come of it where none is
  declared, and gives it back when its request is answered. Smaller ones are bounded by the connections.
- A neighbourhood has at most a quarter. Who comes when its quarter or the whole is taken is told to come again.
- Where the whole is taken, who would hold less than the largest neighbourhood gets room: that one's oldest unfinished
  body is given up, since honest ones end.
- This machine has no share to pass and gives nothing up: it is a proxy, which should hold bodies until they are whole.
- What comes with the operator's token is not counted.
"""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass

from aiohttp import web

from coordinator.api.bounds import BOUNDS
from coordinator.api.places import HERE, place
from protocol import limits
from protocol.errors import Overloaded

SHARES = 4

FREE_BYTES = limits.SMALL_REQUEST_MAX_BYTES


@dataclass(eq=False)
class Body:
    """One that is coming, or that somebody works on."""

    place: str
    patience: asyncio.Timeout
    """Ends the reading of a body that is given up."""
    size: int = 0
    is_given_up: bool = False


class Bodies:
    """What the bodies of one server hold."""

    def __init__(self, budget_bytes: int) -> None:
        self._budget_bytes = budget_bytes
        self.held_bytes = 0
        self._held = Counter[str]()
        """By place."""
        self._coming: dict[str, dict[Body, None]] = {}
        """The unfinished ones by place, the oldest first."""

    @asynccontextmanager
    async def coming(self, request: web.Request) -> AsyncIterator[Body]:
        """A body while it is read, when it may be given up; it holds what it holds until its request is answered."""
        request[HELD] = body = Body(place(request.remote, request.app[BOUNDS].own_addresses), asyncio.timeout(None))
        try:
            async with body.patience:
                yield body
        except TimeoutError:
            raise _full() from None
        finally:
            self._is_no_longer_coming(body)
        if body.is_given_up:  # with its last byte on the way
            raise _full()

    def grow(self, body: Body, size: int) -> None:
        """Let a body hold so many bytes in all, if there is room."""
        more = size - body.size
        if size <= FREE_BYTES or more <= 0:
            return
        if body.place != HERE and self._held[body.place] + more > self._budget_bytes // SHARES:
            raise _full()
        while self.held_bytes + more > self._budget_bytes:
            self._give_one_up(for_less_than=self._held[body.place] + more)
        self._coming.setdefault(body.place, {})[body] = None
        self._hold(body, more)

    def let_go(self, body: Body) -> None:
        """It is no longer needed."""
        self._is_no_longer_coming(body)
        self._hold(body, -body.size)

    def _give_one_up(self, *, for_less_than: int) -> None:
        """The oldest body of whoever holds most of those who could give one up."""
        largest = max((one for one in self._coming if one != HERE), key=lambda one: self._held[one], default=HERE)
        if largest == HERE or self._held[largest] <= for_less_than:
            raise _full()
        oldest = next(iter(self._coming[largest]))
        oldest.is_given_up = True
        oldest.patience.reschedule(asyncio.get_running_loop().time())
        self.let_go(oldest)

    def _hold(self, body: Body, more: int) -> None:
        body.size += more
        self.held_bytes += more
        self._held[body.place] += more
        if not self._held[body.place]:
            del self._held[body.place]

    def _is_no_longer_coming(self, body: Body) -> None:
        others = self._coming.get(body.place, {})
        others.pop(body, None)
        if not others:
            self._coming.pop(body.place, None)


BODIES = web.AppKey("bodies", Bodies)
HELD = web.RequestKey("held", Body)


@web.middleware
async def held_until_answered(
    request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> web.StreamResponse:
    """What a request's body holds is given back when there is an answer, or nobody waits for one."""
    try:
        return await handler(request)
    finally:
        if HELD in request:
            request.app[BODIES].let_go(request[HELD])


def _full() -> Overloaded:
    return Overloaded("Too many large requests are on their way.", hint="Send it again in a moment.")
