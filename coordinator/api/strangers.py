"""Reads for requests that anybody may send: a thread of their own, and a share of its queue for each neighbourhood.

- At most `STRANGERS_READS_MAX` reads wait, and one neighbourhood has at most a quarter of them.
- When the queue is full, a request from a smaller neighbourhood takes the place of the newest one from the largest: a
  crowd at a few addresses does not lock out the nodes, each of which reads at an address of its own.
- Trusted connections that name nobody (`HERE`) have no share, and lose no place.
"""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Concatenate, ParamSpec, TypeVar

import sqlalchemy as sa
from aiohttp import web

from coordinator.api.caller import HERE, place_of
from coordinator.api.guard import SHARES
from coordinator.api.http import ROUND
from coordinator.store.state import STRANGERS_READS_MAX
from protocol.errors import Overloaded

P = ParamSpec("P")
T = TypeVar("T")

AGAIN = "Send the request again in a few seconds."


class StrangersQueue:
    """The reads of strangers that wait, by neighbourhood."""

    def __init__(self) -> None:
        self._waiting: dict[str, deque[asyncio.Timeout]] = {}
        """One entry for each read, oldest first; it ends the wait of a read that loses its place."""

    @property
    def size(self) -> int:
        """The number of reads that wait."""
        return sum(map(len, self._waiting.values()))

    @asynccontextmanager
    async def waiting(self, where: str) -> AsyncIterator[None]:
        """Hold a place of the queue; raise `Overloaded` if there is none, or if it is lost."""
        own = len(self._waiting.get(where, ()))
        if where != HERE and own >= STRANGERS_READS_MAX // SHARES:
            raise Overloaded("Too many requests from this address wait.", hint=AGAIN)
        if self.size >= STRANGERS_READS_MAX:
            self._drop_newest_of_largest(for_less_than=own + 1)
        patience = asyncio.timeout(None)
        try:
            async with patience:
                self._waiting.setdefault(where, deque()).append(patience)
                yield
        except TimeoutError:
            raise _full() from None
        finally:
            self._leave(where, patience)

    def _drop_newest_of_largest(self, *, for_less_than: int) -> None:
        sizes = {where: len(reads) for where, reads in self._waiting.items() if where != HERE}
        largest = max(sizes, key=sizes.__getitem__, default=HERE)
        if largest == HERE or sizes[largest] <= for_less_than:
            raise _full()
        newest = self._waiting[largest][-1]
        newest.reschedule(asyncio.get_running_loop().time())
        self._leave(largest, newest)

    def _leave(self, where: str, patience: asyncio.Timeout) -> None:
        others = self._waiting.get(where, deque())
        if patience in others:
            others.remove(patience)
        if not others:
            self._waiting.pop(where, None)


STRANGERS_READS = web.AppKey("strangers_reads", StrangersQueue)


async def read_for_stranger(
    request: web.Request, effect: Callable[Concatenate[sa.Connection, P], T], *args: P.args, **kwargs: P.kwargs
) -> T:
    """Call a reading effect for a request that anybody may send."""
    async with request.app[STRANGERS_READS].waiting(place_of(request)):
        return await request.app[ROUND].database.read_for_stranger(effect, *args, **kwargs)


def _full() -> Overloaded:
    return Overloaded("The coordinator is overloaded.", hint="Try again after the time in Retry-After.")
