"""News of a round, kept in memory: every reply to a node has them, and they seldom change.

- The leader writes the digest of its settings and keys to the store when it starts; all else here only reads.
- `refresh` reads the news from the store, and wakes the requests that wait for them.
- A request for a newer version is held until there is one, so that nodes fetch it at once. Each node may hold few.
"""

import asyncio
from collections import Counter
from contextlib import suppress
from typing import NamedTuple

import sqlalchemy as sa

from coordinator.service.waiting import IdleNodes
from coordinator.store.facts import FINISHED, Fact, get_fact, set_fact
from coordinator.store.state import Database
from coordinator.transactions import policy_versions
from protocol.errors import ConfigInvalid
from protocol.ids import NodeId

NEWS_HOLD_S = 20.0
"""Longest time a request for a newer version is held open; below the time-outs of clients and proxies."""

HELD_PER_NODE = 2
"""Requests held at once: one, and one whose connection was lost unnoticed. A third is answered at once."""

LED_AS = Fact("led_as", "")
"""The fact that shows processes beside the leader a change of its settings or keys."""


class StoredNews(NamedTuple):
    """The news as last read from the store."""

    version: int
    finished: bool
    led_as: str


class RoundNews:
    """The newest version of a round, its end, and the state of its leader.

    With `leads`, `led_as` is written to the store, and every other process with another digest stops itself: only the
    leader of the round may pass it as True.
    """

    def __init__(self, database: Database, idle_nodes: IdleNodes, led_as: str, *, leads: bool) -> None:
        self._database = database
        self._idle_nodes = idle_nodes
        self._led_as = led_as
        """Digest of the settings and keys with which this process started, by `opening.led_as`."""
        if leads:
            database.run_now(set_fact, LED_AS, led_as)
        self._stored = database.run_now(_read)
        self._changed = asyncio.Event()
        self._held: Counter[NodeId] = Counter()
        """Number of requests for a newer version that are held open, by node."""

    @property
    def version(self) -> int:
        """The newest version; 0 before the first."""
        return self._stored.version

    @property
    def finished(self) -> bool:
        """True once the round has ended."""
        return self._stored.finished

    @property
    def is_led_alike(self) -> bool:
        """True if the leader has the settings and keys with which this process started."""
        return self._stored.led_as == self._led_as

    def require_led_alike(self) -> None:
        """Raise an error if the leader has other settings or keys than this process."""
        if not self.is_led_alike:
            raise ConfigInvalid(
                "The leader of this round has other settings or keys than this process.",
                hint="Restart this process. If keys were replaced since the last launch, restart the round first.",
            )

    @property
    def held_requests(self) -> int:
        """Number of requests for a newer version that are held open."""
        return self._held.total()

    async def refresh(self) -> None:
        """Read the news from the store, and wake the requests that wait for them."""
        stored = await self._database.run(_read)
        if stored != self._stored:
            self._stored = stored
            self._changed.set()
            self._changed = asyncio.Event()
            self._idle_nodes.call_all()

    async def wait_for_newer(self, node: NodeId, version: int) -> None:
        """Hold a node's request until there is a version above `version`, or for `NEWS_HOLD_S`."""
        self._held[node] += 1
        try:
            if self._held[node] <= HELD_PER_NODE:
                with suppress(TimeoutError):
                    async with asyncio.timeout(NEWS_HOLD_S):
                        while self.version <= version:
                            await self._changed.wait()
        finally:
            self._held[node] -= 1
            if not self._held[node]:
                del self._held[node]


def _read(connection: sa.Connection) -> StoredNews:
    version, _ = policy_versions.newest_version(connection)
    return StoredNews(version, get_fact(connection, FINISHED), get_fact(connection, LED_AS))
