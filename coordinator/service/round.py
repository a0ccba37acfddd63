"""One round as the running coordinator holds it: its folder, store, publisher, and what requests need of them.

- What it is opened with is in `coordinator.service.opening`.
- The folder: `keys/`, `operator.token`, `resolved.json`, `metadata/`, `blobs/`, `public/`, `logs/`, `state.db` …
- Only events that wake waiting requests live in memory; everything counted is in the store.
"""

import asyncio
import logging
import secrets
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import sqlalchemy as sa

from coordinator.base.clock import now_ms
from coordinator.config import Config
from coordinator.publishing.best import Best
from coordinator.publishing.mirror import open_mirror
from coordinator.publishing.publish import Publisher
from coordinator.reports import standby, summary
from coordinator.rules import calibration
from coordinator.rules.calibration import Calibration
from coordinator.service import local_nodes, opening
from coordinator.service.plans import Plans
from coordinator.service.publication import VersionPublication
from coordinator.store.state import Database, get_fact, set_fact
from coordinator.tasks.chat import Chat
from coordinator.tasks.kinds import task_label
from coordinator.tasks.task import open_task
from coordinator.tasks.task_text import TaskText
from coordinator.transactions import blames, lottery, policy_versions, tally
from coordinator.transactions.claims import Judge
from coordinator.transactions.evaluations import EvaluationTerms
from coordinator.transactions.leases import terms_of
from coordinator.transactions.offers import PromptDraw
from ledger import store
from ledger.checkpoint import ledger_key
from ledger.note import NoteKey
from protocol.errors import ConfigInvalid, NotFound
from protocol.ids import NodeId
from protocol.policy import trust
from protocol.policy.manifest import Sampler
from protocol.policy.origin import OriginList
from protocol.work.messages import Peer

log = logging.getLogger(__name__)

T = TypeVar("T")

LED_AS = "led_as"
"""The fact by which processes beside the leader see that it goes on with other settings or keys."""


@dataclass(frozen=True)
class News:
    """What nodes are told with every answer: kept in memory, since everybody asks and it seldom changes."""

    version: int
    finished: bool
    led_as: str
    """By which settings and keys the round is led, as `opening.led_as` says it."""

    @staticmethod
    def read(connection: sa.Connection) -> "News":
        version, _ = policy_versions.newest_version(connection)
        return News(version, bool(get_fact(connection, "finished", False)), get_fact(connection, LED_AS, ""))


class Round:
    """Everything the handlers and timers of one round share."""

    def __init__(self, config: Config, *, leads: bool = True) -> None:
        self.config = config
        self.folder = config.round.directory
        self.leads = leads
        """One process of a round trains, publishes, plans and signs; those `beside` it serve nodes."""
        with ExitStack() as held:
            if leads:
                held.enter_context(opening.lead(config))
            self.task = open_task(config)
            self.metadata = opening.open_metadata(config, self.folder, leads=leads)
            self.round_id = self.metadata.round_id
            self.database = held.enter_context(closing(Database(config.state)))
            self.database.run_now(opening.open_books, self.round_id, config.market.budget_micros, now_ms())
            self.database.run_now(opening.open_problems, config)
            if leads:
                self._take_over()
            self._held = held.pop_all()
        self.origins = OriginList(urls=config.publish.origins)
        self.mirror = open_mirror(config.publish.upload, self.folder)
        self.operator_token = opening.open_token(self.folder)
        own = local_nodes.open_keys(config)
        self.invited = None if config.fleet.strangers else own
        """Who may join, if not everybody."""
        probes = own.union(config.audit.probes)
        self.audits = replace(opening.audit_terms(config, self.folder), probes=probes)
        self.database.run_now(lottery.open_first_epoch, self.audits, now_ms())
        self.roots = self.metadata.roots()
        self.led_as = opening.led_as(config, len(self.roots))
        if leads:
            self.database.run_now(set_fact, LED_AS, self.led_as)
        self.news = self.database.run_now(News.read)
        self.publisher = self._open_publisher()
        self.best = Best(self.folder, self.database, self.publisher.write_folder)
        self._beside = ThreadPoolExecutor(max_workers=1, thread_name_prefix="beside")
        self.batch_ready = asyncio.Event()
        self.unscored = asyncio.Event()
        """Something was accepted whose rewards take a process."""
        self.seeder: Peer | None = None
        self.seeder_up = 0.0
        """What it sent in its best second of late, bytes."""
        self.plans = Plans()
        self.silent_after_ms = config.leases.silent_after_ms
        """Who was not heard of for so long is not counted on."""
        self.up_since_ms = now_ms()
        self.questions: Counter[NodeId] = Counter()
        """Requests for news that are held open, by node."""
        self.publication = VersionPublication(
            config,
            self.publisher,
            self.metadata,
            self.database,
            mirror=self.mirror,
            splits=lambda: self.evaluated,
            refresh=self.refresh,
        )
        self._changed = asyncio.Event()
        self._text: TaskText | None = None
        self._evidence: tuple[int, blames.BlameEvidence] | None = None
        self.evaluation_terms = EvaluationTerms.from_config(config)
        self.terms = replace(terms_of(config), probes=probes)

    def _open_publisher(self) -> Publisher:
        config = self.config
        return Publisher(
            folder=self.folder,
            metadata=self.metadata,
            task=task_label(config),
            sampler=Sampler(temperature=config.sampling.temperature, max_new_tokens=config.sampling.max_new_tokens),
            chunk_size_bytes=config.publish.chunk_size_bytes,
            keep=config.staleness.max_updates + 2,
            patches=config.publish.patches,
            room_bytes=int(config.audit.kept_gib * 2**30),
        )

    def _take_over(self) -> None:
        """What only who leads does with what is there: the log has the roots before it signs or serves under them."""
        opening.require_resumption(self.metadata, self.folder)
        self.database.run_now(opening.log_roots, self.metadata, now_ms())
        opening.mend_metadata(self.metadata, self.folder)
        self.database.run_now(tally.recount)

    @classmethod
    def beside(cls, folder: Path) -> "Round":
        """The round of a folder that another process leads, with the settings of that process."""
        resolved = folder / "resolved.json"
        if not resolved.exists():
            raise ConfigInvalid(f"There is no round in {folder}.", hint="Make one with `swarm-coordinator launch`.")
        config = Config.model_validate_json(resolved.read_text())
        if not config.store.url:
            raise ConfigInvalid(
                "A round on SQLite is served by one process.", hint="Make it with store.url=postgresql://…"
            )
        made = cls(config, leads=False)
        try:
            made.require_led_alike()
        except ConfigInvalid:
            made.close()
            raise
        return made

    @property
    def is_led_alike(self) -> bool:
        """Whether the round is led by the settings and keys that this process began with."""
        return self.news.led_as == self.led_as

    def require_led_alike(self) -> None:
        """Refuse to serve by other settings or keys than the leader's."""
        if not self.is_led_alike:
            raise ConfigInvalid(
                "The round is led with other settings or keys than this process began with.",
                hint="Start this process again, and before it the round, if keys were replaced since its last launch.",
            )

    def public_settings(self) -> dict[str, Any]:
        """What the operator set, as far as nodes and visitors want to know it."""
        return summary.public_settings(self.config, self.round_id)

    @cached_property
    def ledger_key(self) -> NoteKey:
        """The one that the newest root names."""
        return ledger_key(self.round_id, trust.ledger_key(self.roots[-1]))

    @cached_property
    def evaluated(self) -> dict[str, int]:
        """How many problems each split has that is measured; nothing is counted where nothing is."""
        if not self.config.eval.every:
            return {}
        return {split: len(self.task.problems(split)) for split in self.config.eval.splits}

    async def text(self) -> TaskText:
        """The policy's tokenizer and bounds; there is none before the first version."""
        if self._text is None:
            version = self.news.version
            if not version:
                raise NotFound("No policy version is published yet.", hint="Wait for the first one.")
            self._text = await asyncio.to_thread(
                TaskText,
                lambda name: self.publisher.read_file(version, name),
                self.task,
                self.config.sampling.max_new_tokens,
                Chat.from_config(self.config.data),
            )
        return self._text

    async def draw(self) -> PromptDraw:
        text = await self.text()
        return PromptDraw(
            prompt=text.prompt,
            lease_id=lambda: secrets.token_hex(16),
            seed=lambda: secrets.randbits(63),
            episode=text.episode,
            environment=text.environment,
        )

    async def judge(self) -> Judge:
        text = await self.text()
        return Judge(self.round_id, self.terms, text.bounds, text.reward if text.judges else None, self.audits)

    async def refresh(self) -> None:
        """See what is new in the store, and wake those who wait for it."""
        news = await self.database.run(News.read)
        if news != self.news:
            self.news = news
            self._changed.set()
            self._changed = asyncio.Event()

    async def version_after(self, version: int, *, patience_s: float) -> int:
        """The newest version, as soon as it is above this one or when patience ends."""
        with suppress(TimeoutError):
            async with asyncio.timeout(patience_s):
                while self.news.version <= version:
                    await self._changed.wait()
        return self.news.version

    async def blame_evidence(self) -> blames.BlameEvidence:
        """Return the chunks of the versions that nodes still fetch, read once for each newest version."""
        version = self.news.version
        if self._evidence is None or self._evidence[0] != version:
            chunks_kept = await asyncio.to_thread(self.publisher.chunks_in_use, version)
            self._evidence = (version, blames.BlameEvidence(chunks_kept, self.plans.is_planned))
        return self._evidence[1]

    def tolerances(self) -> Calibration:
        """What this round's claims are judged by."""
        return calibration.load(self.folder, self.metadata.root())

    async def publish_checkpoint(self) -> bytes:
        """Sign the ledger as it is now, or find the last checkpoint still true; nothing that a standby copy lacks."""
        copy = await asyncio.to_thread(standby.current, self.folder)
        limit = copy.ledger_size if copy else None
        return await self.database.run(store.publish, self.ledger_key, self.metadata.sign_for_ledger, limit)

    async def beside_the_loop(self, work: Callable[[], T]) -> T:
        """Call what takes long and needs no store, one after the other, so that it holds up neither loop nor writer."""
        return await asyncio.get_running_loop().run_in_executor(self._beside, work)

    def close(self) -> None:
        self._beside.shutdown()
        self._held.close()
