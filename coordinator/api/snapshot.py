"""Snapshots: figures computed once for all requests within a short time, and their pages, each compressed once.

- At most one computation runs. A request during it gets the previous figures, unless those are too old to be shown; so
  only the first visitor after a pause waits for a large leaderboard.
- After a long computation, the next one starts after `RESTS` times its duration, at most `REST_MAX_S`.
- A request waits at most `PATIENCE_S` for a computation while there are older figures: these are shown with their age.
- The age of figures counts from the beginning of their computation, when they were read.
- A page belongs to the figures that it was built from: newer figures discard all older pages.
- Every page has an ETag of its bytes; a browser that has the page gets a 304 of a hundred bytes.
- Snapshots are in memory, bounded; a restart computes them anew.
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
"""Age up to which figures are shown without a new computation."""

SHOWN_AT_MOST_S = 10.0
"""Age above which figures are not shown."""

RESTS, REST_MAX_S = 5, 20.0
"""Pause after a computation, as a multiple of its duration, and its maximum in seconds. So computations do not occupy
a core, and one slow computation on a busy machine does not leave figures minutes old."""

PATIENCE_S = 10.0
"""Longest wait for a computation while there are older figures to show."""

PAGES_MAX = 128
"""Pages kept per snapshot: enough for every view and order of the board; further ones are built for each request."""

GZIP_LEVEL = 5

POLICY = (
    "default-src 'none'; connect-src 'self'; style-src 'self'; script-src 'self'; img-src 'self'; "
    "form-action 'self'; base-uri 'none'"
)
"""The Content-Security-Policy of pages whose scripts and styles are files of this server."""

SECURITY = {
    "Content-Security-Policy": f"{POLICY}; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
}


@dataclass(frozen=True)
class Page:
    """A page as bytes to send, with its own ETag."""

    body: bytes
    content_type: str
    caching: str = "no-cache"
    status: int = 200
    policy: str = POLICY

    @cached_property
    def etag(self) -> str:
        return sha256(self.body).hexdigest()[:32]

    @cached_property
    def compressed(self) -> bytes:
        return gzip.compress(self.body, GZIP_LEVEL, mtime=0)

    def reply(self, request: web.Request) -> web.Response:
        """Build the response for `request`: a 304 without body, the compressed bytes, or the plain bytes."""
        headers = {**SECURITY, "ETag": f'"{self.etag}"', "Cache-Control": self.caching, "Vary": "Accept-Encoding"}
        headers["Content-Security-Policy"] = f"{self.policy}; frame-ancestors 'none'"
        if any(known.value == self.etag for known in request.if_none_match or ()):
            return web.Response(status=304, headers=headers)
        body = self.body
        if "gzip" in request.headers.get("Accept-Encoding", ""):
            headers["Content-Encoding"] = "gzip"
            body = self.compressed
        headers["Content-Type"] = self.content_type
        return web.Response(body=body, status=self.status, headers=headers)


class Moment(Generic[T]):
    """Figures of one moment, and the pages built from them."""

    def __init__(self, figures: T) -> None:
        self.figures = figures
        self._pages: dict[str, Page] = {}

    def page(self, name: str, make: Callable[[T], Page]) -> Page:
        """Return the page with this name; build it if there is none yet."""
        page = self._pages.get(name)
        if page is None:
            page = make(self.figures)
            if len(self._pages) < PAGES_MAX:
                self._pages[name] = page
        return page


class PageSnapshot(Generic[T]):
    """The newest moment of some figures; `make` computes new ones."""

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
        """Return a moment that is recent enough to be shown."""
        newest = self._moment
        rested_s = self._clock() - self._made_s - self._took_s
        rest_s = max(self._fresh_s - self._took_s, min(RESTS * self._took_s, REST_MAX_S))
        if newest is not None and rested_s < rest_s:
            return newest
        if self._making is None:
            self._making = asyncio.create_task(self._compute())
            self._making.add_done_callback(self._ended)
        if newest is not None and rested_s < max(self._shown_at_most_s - self._took_s, 2 * rest_s):
            return newest
        try:
            async with asyncio.timeout(self._patience_s if newest is not None else None):
                return await asyncio.shield(self._making)
        except TimeoutError:
            if newest is None:
                raise
            return newest

    def age_s(self) -> float:
        """Return the age of the newest figures; 0 if there are none."""
        return self._clock() - self._made_s if self._moment is not None else 0.0

    def age_ms(self) -> int:
        """Return the age in steps of `OLD_S` for pages: below one step it is 0, so that a page is built once."""
        return int(1000 * OLD_S * (self.age_s() // OLD_S))

    async def close(self) -> None:
        """Wait for a running computation."""
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
