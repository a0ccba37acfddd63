"""One round as the running coordinator holds it: its folder, store, publisher, and what requests need of them.

- What it is opened with is in `coordinator.opening`.
- The folder: `keys/`, `operator.token`, `resolved.json`, `metadata/`, `blobs/`, `public/`, `logs/`, `state.db` …
- Only events that wake waiting requests live in memory; everything counted is in the store.
"""

import asyncio
import logging
import secrets
import time
from collections import Counter
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import sqlalchemy as sa

from coordinator import broadcasts, evaluations, local_nodes, lottery, opening, publish
from coordinator.audit import calibration
from coordinator.audit.calibration import Calibration
from coordinator.best import Best
from coordinator.config import Config
from coordinator.data.kinds import shown
from coordinator.data.task import open_task
from coordinator.evaluations import EvaluationTerms
from coordinator.intake import Judge
from coordinator.leases import terms_of
from coordinator.mirror import open_mirror
from coordinator.offers import Draw
from coordinator.plans import Plans
from coordinator.policy_text import PolicyText
from coordinator.publish import Publisher
from coordinator.signed_metadata import utc_now
from coordinator.state import Database, get_fact
from ledger import store
from ledger.checkpoint import ledger_key
from protocol import trust
from protocol.errors import ConfigInvalid, NotFound, OutOfOrder
from protocol.ids import NodeId
from protocol.learning import Publication
from protocol.manifest import PolicyManifest, Sampler
from protocol.messages import Peer
from protocol.origin import OriginList

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class News:
    """What nodes are told with every answer: kept in memory, since everybody asks and it seldom changes."""

    version: int
    finished: bool

    @staticmethod
    def read(connection: sa.Connection) -> "News":
        version, _ = publish.newest_version(connection)
        return News(version, bool(get_fact(connection, "finished", False)))


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
            self._held = held.pop_all()
        self.origins = OriginList(urls=config.publish.origins)
        self.mirror = open_mirror(config.publish.upload, self.folder)
        self.operator_token = opening.open_token(self.folder)
        own = local_nodes.open_keys(config)
        self.invited = None if config.fleet.strangers else own
        """Who may join, if not everybody."""
        self.audits = opening.audit_terms(config, self.folder)
        self.database.run_now(lottery.begin, self.audits, now_ms())
        self.news = self.database.run_now(News.read)
        self.roots = self.metadata.roots()
        self.ledger_key = ledger_key(self.round_id, trust.ledger_key(self.roots[-1]))
        self.publisher = Publisher(
            folder=self.folder,
            metadata=self.metadata,
            task=shown(config),
            sampler=Sampler(temperature=config.sampling.temperature, max_new_tokens=config.sampling.max_new_tokens),
            chunk_size_bytes=config.publish.chunk_size_bytes,
            keep=config.staleness.max_updates + 2,
            patches=config.publish.patches,
        )
        self.best = Best(self.folder, self.database, self.publisher.write_folder)
        self.batch_ready = asyncio.Event()
        self.unscored = asyncio.Event()
        """Something was accepted whose rewards take a process."""
        self.seeder: Peer | None = None
        self.plans = Plans()
        self.silent_after_ms = int(3000 * config.leases.heartbeat_s)
        """Who was not heard of for so long is not counted on."""
        self.up_since_ms = now_ms()
        self.questions: Counter[NodeId] = Counter()
        """Requests for news that are held open, by node."""
        self._publishing = asyncio.Lock()
        self._changed = asyncio.Event()
        self._publication: asyncio.Task[None] | None = None
        self._text: PolicyText | None = None
        self.evaluation_terms = EvaluationTerms.of(config)
        self.terms = terms_of(config)

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
        return cls(config, leads=False)

    def told(self) -> dict[str, Any]:
        """What the operator set, as far as nodes and visitors want to know it."""
        config = self.config
        return {
            "round_id": self.round_id,
            "task": shown(config),
            "staleness": config.staleness.max_updates,
            "max_updates": config.round.max_updates,
            "samples_per_group": config.sampling.samples_per_group,
            "max_price_micros_per_mtok": config.market.max_price_micros_per_mtok,
        }

    @cached_property
    def evaluated(self) -> dict[str, int]:
        """How many problems each split has that is measured; nothing is counted where nothing is."""
        if not self.config.eval.every:
            return {}
        return {split: len(self.task.problems(split)) for split in self.config.eval.splits}

    async def text(self) -> PolicyText:
        """The policy's tokenizer and bounds; there is none before the first version."""
        if self._text is None:
            version = self.news.version
            if not version:
                raise NotFound("No policy version is published yet.", hint="Wait for the first one.")
            self._text = await asyncio.to_thread(
                PolicyText,
                lambda name: self.publisher.read_file(version, name),
                self.task,
                self.config.sampling.max_new_tokens,
            )
        return self._text

    async def draw(self) -> Draw:
        text = await self.text()
        return Draw(
            prompt=text.prompt,
            lease_id=lambda: secrets.token_hex(16),
            seed=lambda: secrets.randbits(63),
            episode=text.episode,
            environment=text.environment,
        )

    async def judge(self) -> Judge:
        text = await self.text()
        return Judge(self.round_id, self.terms, text.bounds, text.reward if text.judges else None, self.audits)

    async def publish(self, publication: Publication) -> None:
        """Publish an uploaded version, to the end even if the caller goes away; a published one is left as it is."""
        self._publication = asyncio.create_task(self._publish(publication))
        await asyncio.shield(self._publication)

    async def _publish(self, publication: Publication) -> None:
        async with self._publishing:
            newest, _ = await self.database.run(publish.newest_version)
            if publication.version <= newest:
                return
            if publication.version != newest + 1:
                raise OutOfOrder(f"Version {publication.version} does not follow version {newest}.")
            manifest, digest = await asyncio.to_thread(self.publisher.publish, publication)
            if self.mirror:
                await self.mirror.caught_up(self.config.publish.upload_patience_s)
            await self.database.run(self._enter, manifest, digest, now_ms=now_ms())
            log.info("published version=%d update=%d", manifest.version, manifest.update)
            await self.look()
            needed = await self.database.read(evaluations.oldest_needed)
            await asyncio.to_thread(self.publisher.forget_old, publication.version, audited=needed)

    def _enter(self, connection: sa.Connection, manifest: PolicyManifest, digest: str, *, now_ms: int) -> None:
        """A version is there: let dispatch, ledger and nodes know of it, and begin to measure it where that is due."""
        broadcasts.begin(connection, manifest, digest, silent_after_ms=self.silent_after_ms, now_ms=now_ms)
        evaluations.due(connection, manifest.version, self.evaluated, self.evaluation_terms, now_ms)

    async def look(self) -> None:
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

    def tolerances(self) -> Calibration:
        """What this round's claims are judged by."""
        return calibration.load(self.folder, self.metadata.root())

    async def renew_timestamp(self) -> None:
        """Sign a fresh timestamp; never while a version is being published."""
        async with self._publishing:
            await asyncio.to_thread(self.metadata.renew_timestamp, utc_now())
            if self.mirror:
                await self.mirror.changed()

    async def publish_checkpoint(self) -> bytes:
        """Sign the ledger as it is now, or find the last checkpoint still true."""
        return await self.database.run(store.publish, self.ledger_key, self.metadata.sign_for_ledger)

    def close(self) -> None:
        self._held.close()


def now_ms() -> int:
    """The coordinator's clock."""
    return time.time_ns() // 1_000_000


def join_string(config: Config, round_id: str) -> str:
    """What an operator hands to volunteers: where to go, and whom to trust."""
    place = config.round
    url = place.public_url or (f"https://{place.tls_listen}" if place.tls_listen else f"http://{place.listen}")
    return f"{url}#{round_id}"
