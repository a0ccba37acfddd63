"""Callers of the endpoint that wait for answers to their queries, and those that read them while they grow.

One task looks for the answers of all of them: with a thousand callers, one statement reads what has come for all.
"""

import asyncio
import logging
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress

import sqlalchemy as sa

from coordinator.store.state import Database
from coordinator.transactions.query_answers import Growth, QueryAnswer, ReadUntil, read_answers, read_growth

log = logging.getLogger(__name__)

LOOK_AGAIN_S = 0.25
"""Time between two looks: what another API process has accepted sets no event here."""

ASKS_AT_ONCE = 32
"""Requests whose queries are recorded at once; others wait here, and not in the line of the nodes' requests."""

NEWS_MAX = 64
"""News of a request that it has not read; for a slow reader, growth beyond it stays in the store."""

News = asyncio.Queue[tuple[int, Growth | QueryAnswer]]
"""The queue of a request: the growth of its queries, and then each one's answer, once, with the query's number."""


class QueryWatch:
    """The queries that callers of this process wait for."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self.asking = asyncio.Semaphore(ASKS_AT_ONCE)
        """Held while the queries of a request are recorded."""
        self._waiting: dict[int, News] = {}
        self._reading: dict[int, ReadUntil] = {}
        """The queries whose callers read them while they grow."""
        self._came = asyncio.Event()
        self._looking: asyncio.Task[None] | None = None

    def __len__(self) -> int:
        return len(self._waiting)

    @contextmanager
    def awaited(self, numbers: Collection[int], *, grows: bool = False) -> Iterator[News]:
        """Look for the answers to these queries, and with `grows` for parts of them; yield the queue that gets them."""
        news = News()
        self._waiting |= dict.fromkeys(numbers, news)
        self._reading |= dict.fromkeys(numbers, ReadUntil()) if grows else {}
        if self._looking is None or self._looking.done():
            self._looking = asyncio.get_running_loop().create_task(self._check())
        try:
            yield news
        finally:
            for number in numbers:
                self._forget(number)

    def check_now(self) -> None:
        """Look at once: rollouts or fragments were accepted."""
        self._came.set()

    def _forget(self, number: int) -> None:
        self._waiting.pop(number, None)
        self._reading.pop(number, None)

    async def _check(self) -> None:
        while self._waiting:
            self._came.clear()
            try:
                reading = {
                    number: until for number, until in self._reading.items() if self._waiting[number].qsize() < NEWS_MAX
                }
                grown, answers = await self._database.read(_read, list(self._waiting), reading)
            except Exception:  # the store may be available again later
                log.exception("could not read the answers to queries")
                grown, answers = {}, {}
            for number, growth in grown.items():
                if number in self._reading:
                    self._reading[number] = growth.until
                    self._waiting[number].put_nowait((number, growth))
            for number, answer in answers.items():
                if number in self._waiting:
                    self._waiting[number].put_nowait((number, answer))
                    self._forget(number)
            if grown:  # there may be more
                continue
            with suppress(TimeoutError):
                async with asyncio.timeout(LOOK_AGAIN_S):
                    await self._came.wait()


def _read(
    connection: sa.Connection, waiting: Collection[int], reading: dict[int, ReadUntil]
) -> tuple[dict[int, Growth], dict[int, QueryAnswer]]:
    return read_growth(connection, reading), read_answers(connection, list(waiting))
