"""Figures that are computed once for all who ask within a moment, and the pages made of them, each compressed once.

- However many ask at once, one computation runs. Who asks while it does gets the figures before, unless those are too
  old to be shown; so nobody waits for a large leaderboard but the first visitor after a pause.
- After a computation that took long, the next one waits for as long a few times over, at most `REST_MAX_S`.
- Nobody waits longer than `PATIENCE_S` for a computation while there are older figures: these are shown with their age.
- A moment's age counts from the beginning of its computation, when its figures were read.
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

from coordinator.reports.overview import OLD_S

log = logging.getLogger(__name__)

T = TypeVar("T")

FRESH_S = 2.0
"""Figures of this age are shown without another thought."""

SHOWN_AT_MOST_S = 10.0
"""Older figures are shown to nobody."""

RESTS, REST_MAX_S = 5, 20.0
"""Figures that take long to compute rest for so many times as long, at most so long: they do not take a core for
themselves, and no operator looks at figures of minutes ago because one computation met a busy machine."""

PATIENCE_S = 10.0
"""For a computation, where there are older figures to show."""

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


class PageSnapshot(Generic[T]):
    """The newest moment; `make` computes the figures of another."""

    def __init__(
        self,
        make: Callable[[], Awaitable[T]],
        *,
        fresh_s: float = FRESH_S,
        shown_at_most_s: float = SHOWN_AT_MOST_S,
        patience_s: float = PATIENCE_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._make = make
        self._fresh_s = fresh_s
        self._shown_at_most_s = shown_at_most_s
        self._patience_s = patience_s
        self._clock = clock
        self._moment: Moment[T] | None = None
        self._made_s = self._took_s = 0.0
        self._making: asyncio.Task[Moment[T]] | None = None

    async def get(self) -> Moment[T]:
        """A moment that may be shown."""
        found = self._moment
        rested_s = self._clock() - self._made_s - self._took_s
        rest_s = max(self._fresh_s - self._took_s, min(RESTS * self._took_s, REST_MAX_S))
        if found is not None and rested_s < rest_s:
            return found
        if self._making is None:
            self._making = asyncio.create_task(self._compute())
            self._making.add_done_callback(self._ended)
        if found is not None and rested_s < max(self._shown_at_most_s - self._took_s, 2 * rest_s):
            return found
        try:
            async with asyncio.timeout(self._patience_s if found is not None else None):
                return await asyncio.shield(self._making)
        except TimeoutError:
            if found is None:
                raise
            return found

    def age_s(self) -> float:
        """Return how old the newest figures are; 0 if there are none."""
        return self._clock() - self._made_s if self._moment is not None else 0.0

    def age_ms(self) -> int:
        """Return the same for pages, in steps of `OLD_S`: younger figures are 0, and their pages made once."""
        return int(1000 * OLD_S * (self.age_s() // OLD_S))

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
            log.error("could not compute the figures", exc_info=error)
