"""Callers of the endpoint that wait for answers to their queries.

One task looks for the answers of all of them: with a thousand callers, one statement reads what has come for all.
"""

import asyncio
import logging
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress

from coordinator.store.state import Database
from coordinator.transactions.query_answers import QueryAnswer, read_answers

log = logging.getLogger(__name__)

LOOK_AGAIN_S = 0.25
"""Time between two looks: answers that another API process has accepted set no event here."""

ASKS_AT_ONCE = 32
"""Requests whose queries are recorded at once; others wait here, and not in the line of the nodes' requests."""

Answer = asyncio.Future[QueryAnswer]


class QueryWatch:
    """The queries that callers of this process wait for."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self.asking = asyncio.Semaphore(ASKS_AT_ONCE)
        """Held while the queries of a request are recorded."""
        self._waiting: dict[int, Answer] = {}
        self._came = asyncio.Event()
        self._looking: asyncio.Task[None] | None = None

    @contextmanager
    def awaited(self, numbers: Collection[int]) -> Iterator[list[Answer]]:
        """Look for the answers to these queries; yield them, in the order of the numbers, as they come."""
        loop = asyncio.get_running_loop()
        answers = [self._waiting.setdefault(number, loop.create_future()) for number in numbers]
        if self._looking is None or self._looking.done():
            self._looking = loop.create_task(self._look())
        try:
            yield answers
        finally:
            for number in numbers:
                self._waiting.pop(number).cancel()

    def look(self) -> None:
        """Look at once: rollouts were accepted."""
        self._came.set()

    async def _look(self) -> None:
        while self._waiting:
            self._came.clear()
            try:
                found = await self._database.read(read_answers, list(self._waiting))
            except Exception:  # the store may be available again later
                log.exception("could not read the answers to queries")
                found = {}
            for number, answer in found.items():
                waiting = self._waiting.get(number)
                if waiting is not None and not waiting.done():
                    waiting.set_result(answer)
            with suppress(TimeoutError):
                async with asyncio.timeout(LOOK_AGAIN_S):
                    await self._came.wait()
