"""The policy as requests of nodes and callers need it: its tokenizer and bounds, prompts to draw, chunks to fetch.

- The tokenizer is read once: every version of a round has the same.
- The names of the chunks that nodes may fetch are read once for each newest version.
"""

import asyncio
import secrets

from coordinator.config import Config
from coordinator.publishing.publish import Publisher
from coordinator.service.news import RoundNews
from coordinator.service.plans import Plans
from coordinator.tasks.chat import Chat
from coordinator.tasks.task_text import TaskText
from coordinator.transactions.blames import BlameEvidence
from coordinator.transactions.offers import PromptDraw
from protocol.errors import NotFound
from protocol.tasks import Task


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
