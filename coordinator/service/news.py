"""News of a round, kept in memory, and its newest policy: every reply to a node has the news, and they seldom change.

- The leader writes the digest of its settings and keys to the store when it starts; all else here only reads.
- `refresh` reads the news from the store, and wakes the requests that wait for them.
- A request for a newer version is held until there is one, so that nodes fetch it at once. Each node may hold few.
- The policy is there as requests of nodes and callers need it: its tokenizer and bounds, prompts to draw, chunks to
  fetch. The tokenizer is read once: every version of a round has the same. The names of the chunks that nodes may fetch
  are read once for each newest version.
"""

import asyncio
import secrets
from collections import Counter
from contextlib import suppress
from typing import NamedTuple

import sqlalchemy as sa

from coordinator.config import Config
from coordinator.publishing.publish import Publisher
from coordinator.service.plans import Plans
from coordinator.service.waiting import IdleNodes
from coordinator.store.facts import FINISHED, Fact, get_fact, set_fact
from coordinator.store.state import Database
from coordinator.tasks.chat import Chat
from coordinator.tasks.task_text import TaskText
from coordinator.transactions import policy_versions
from coordinator.transactions.blames import BlameEvidence
from coordinator.transactions.offers import PromptDraw
from protocol.errors import ConfigInvalid, NotFound
from protocol.ids import NodeId
from protocol.tasks import Task

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


class NewestPolicy:
    """The newest version of the policy, in the running coordinator."""

    def __init__(self, config: Config, task: Task, publisher: Publisher, news: RoundNews, plans: Plans) -> None:
        self._config = config
        self._task = task
        self._publisher = publisher
        self._news = news
        self._plans = plans
        self._text: TaskText | None = None
        self._evidence: tuple[int, BlameEvidence] | None = None
        """The newest version when the evidence was read, and the evidence."""

    async def text(self) -> TaskText:
        """Return the policy's tokenizer and bounds; raise `NotFound` before the first version."""
        if self._text is None:
            version = self._news.version
            if not version:
                raise NotFound("No policy version is published yet.", hint="Wait for the first version.")
            self._text = await asyncio.to_thread(
                TaskText,
                lambda name: self._publisher.read_file(version, name),
                self._task,
                self._config.sampling.max_new_tokens,
                Chat.from_config(self._config.data),
            )
        return self._text

    async def draw(self) -> PromptDraw:
        """Return what a lease draws: a prompt, an id and a seed."""
        text = await self.text()
        return PromptDraw(
            prompt=text.prompt,
            lease_id=lambda: secrets.token_hex(16),
            seed=lambda: secrets.randbits(63),
        )

    async def blame_evidence(self) -> BlameEvidence:
        """Return the chunks of the versions that nodes still fetch, and who fetches them from whom."""
        version = self._news.version
        if self._evidence is None or self._evidence[0] != version:
            chunks_kept = await asyncio.to_thread(self._publisher.chunks_in_use, version)
            self._evidence = (version, BlameEvidence(chunks_kept, self._plans.is_planned))
        return self._evidence[1]
