"""Figures that are computed once for all who ask within a moment, and the pages made of them, each compressed once.

- However many ask at once, one computation runs. Who asks while it does gets the figures before, unless those are too
  old to be shown; so nobody waits for a large leaderboard but the first visitor after a pause.
- A page belongs to the figures it was made of: newer ones forget all pages of the older.
- Every page has an ETag of its bytes; who has it already is told so in a hundred bytes.
- Lives in memory, bounded; a restart computes anew.
"""

import asyncio
import gzip
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import cached_property
from hashlib import sha256
from typing import Generic, TypeVar

from aiohttp import web

log = logging.getLogger(__name__)

T = TypeVar("T")

FRESH_S = 2.0
"""Figures of this age are shown without another thought."""

SHOWN_AT_MOST_S = 10.0
"""Older figures are shown to nobody."""

RESTS = 5
"""Figures that take long to compute stay fresh for so many times as long: they never take a core for themselves."""

PAGES_MAX = 128
"""Pages kept for one moment: every view and order of the board; a crawler's other ones are made again each time."""

GZIP_LEVEL = 5

SECURITY = {
    "Content-Security-Policy": (
        "default-src 'none'; connect-src 'self'; style-src 'self'; script-src 'self'; img-src 'self'; "
        "form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
}


@dataclass(frozen=True)
class Page:
    """Bytes to send, under their own ETag."""

    body: bytes
    content_type: str
    caching: str = "no-cache"
    status: int = 200

    @cached_property
    def etag(self) -> str:
        return sha256(self.body).hexdigest()[:32]

    @cached_property
    def compressed(self) -> bytes:
        return gzip.compress(self.body, GZIP_LEVEL, mtime=0)

    def reply(self, request: web.Request) -> web.Response:
        """What this caller needs of it: nothing, the compressed bytes, or all of them."""
        headers = {**SECURITY, "ETag": f'"{self.etag}"', "Cache-Control": self.caching, "Vary": "Accept-Encoding"}
        if any(known.value == self.etag for known in request.if_none_match or ()):
            return web.Response(status=304, headers=headers)
        body = self.body
        if "gzip" in request.headers.get("Accept-Encoding", ""):
            headers["Content-Encoding"] = "gzip"
            body = self.compressed
        headers["Content-Type"] = self.content_type
        return web.Response(body=body, status=self.status, headers=headers)


class Moment(Generic[T]):
    """Figures of one moment, and the pages that were made of them."""

    def __init__(self, figures: T) -> None:
        self.figures = figures
        self._pages: dict[str, Page] = {}

    def page(self, name: str, make: Callable[[T], Page]) -> Page:
        """The page of that name, made now if nobody has asked for it yet."""
        found = self._pages.get(name)
        if found is None:
            found = make(self.figures)
            if len(self._pages) < PAGES_MAX:
                self._pages[name] = found
        return found


class Snapshot(Generic[T]):
    """The newest moment; `make` computes the figures of another."""

    def __init__(
        self,
        make: Callable[[], Awaitable[T]],
        *,
        fresh_s: float = FRESH_S,
        shown_at_most_s: float = SHOWN_AT_MOST_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._make = make
        self._fresh_s = fresh_s
        self._shown_at_most_s = shown_at_most_s
        self._clock = clock
        self._moment: Moment[T] | None = None
        self._made_s = self._took_s = 0.0
        self._making: asyncio.Task[Moment[T]] | None = None

    async def get(self) -> Moment[T]:
        """A moment that may be shown."""
        age_s = self._clock() - self._made_s
        fresh_s = max(self._fresh_s, RESTS * self._took_s)
        if self._moment is not None and age_s < fresh_s:
            return self._moment
        if self._making is None:
            self._making = asyncio.create_task(self._compute())
            self._making.add_done_callback(self._ended)
        if self._moment is not None and age_s < max(self._shown_at_most_s, 2 * fresh_s):
            return self._moment
        return await asyncio.shield(self._making)

    async def close(self) -> None:
        """Wait for what is being computed."""
        if self._making is not None:
            await asyncio.wait([self._making])

    async def _compute(self) -> Moment[T]:
        began_s = self._clock()
        moment = Moment(await self._make())
        self._moment, self._made_s, self._took_s = moment, began_s, self._clock() - began_s
        return moment

    def _ended(self, task: asyncio.Task[Moment[T]]) -> None:
        self._making = None
        if not task.cancelled() and (error := task.exception()):
            log.error("the figures could not be computed", exc_info=error)
