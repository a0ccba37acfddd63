"""A round in the running coordinator: its folder, store and publisher, and the state that requests share.

- `coordinator.service.opening` opens the folder, the keys and the books.
- The folder: `keys/`, `operator.token`, `resolved.json`, `metadata/`, `blobs/`, `public/`, `logs/`, `state.db` …
- Only events that wake waiting requests and the sessions of agents are in memory; what counts is in the store.
"""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

from coordinator.base.clock import now_ms
from coordinator.config import Config, fixed
from coordinator.publishing.mirror import open_mirror
from coordinator.publishing.publish import Publisher
from coordinator.publishing.signed_metadata import utc_now
from coordinator.reports import standby, summary
from coordinator.rules import calibration
from coordinator.rules.calibration import Calibration
from coordinator.service import local_nodes, opening
from coordinator.service.agent_sessions import AgentSessions
from coordinator.service.news import NewestPolicy, RoundNews
from coordinator.service.offered_versions import OfferedVersions
from coordinator.service.plans import Plans
from coordinator.service.publication import VersionPublication
from coordinator.service.waiting import WaitingRequests
from coordinator.store.state import Database
from coordinator.tasks.kinds import task_label, turn_tokens_max
from coordinator.tasks.task import open_task
from coordinator.transactions import lottery, tally
from coordinator.transactions.claims import Judge
from coordinator.transactions.leases import terms_of
from ledger import store
from ledger.checkpoint import ledger_key
from ledger.note import NoteKey
from protocol.errors import ConfigInvalid
from protocol.policy import root_document
from protocol.policy.manifest import Sampler

T = TypeVar("T")


class Round:
    """The state that the handlers and timers of one round share."""

    def __init__(self, config: Config, *, leads: bool = True) -> None:
        self.config = config
        self.leads = leads
        """True for the one process that trains, publishes, plans and signs; those `beside` it only serve nodes."""
        with ExitStack() as held:
            if leads:
                held.enter_context(opening.lead(config))
            self.task = open_task(config)
            self.metadata = opening.open_metadata(config, self.folder, leads=leads)
            self.round_id = self.metadata.round_id
            self.database = held.enter_context(closing(Database(config.state)))
            self._open_books()
            if leads:
                self._take_over()
            self._held = held.pop_all()
        mirror = open_mirror(config.publish.upload, self.folder)
        self.operator_token = opening.open_token(self.folder)
        own = local_nodes.open_keys(config)
        self.invited = None if config.fleet.strangers else own
        """The nodes that may join; None: all."""
        probes = own.union(config.audit.probes)
        self.audits = self._open_audits(probes)
        self.roots = self.metadata.roots()
        self.waiting = WaitingRequests(self.database)
        led_as = opening.led_as(config, len(self.roots))
        self.news = RoundNews(self.database, self.waiting.idle_nodes, led_as, leads=leads)
        self.publisher = self._open_publisher()
        self._beside = ThreadPoolExecutor(max_workers=1, thread_name_prefix="beside")
        self.plans = Plans()
        self.sessions = AgentSessions()
        self.policy = NewestPolicy(config, self.task, self.publisher, self.news, self.plans)
        self.up_since_ms = now_ms()
        self.publication = VersionPublication(
            config,
            self.publisher,
            self.metadata,
            self.database,
            mirror=mirror,
            splits=lambda: self.evaluated,
            refresh=self.news.refresh,
        )
        self.terms = replace(terms_of(config, turn_tokens_max=turn_tokens_max(config)), probes=probes)

    def _open_books(self) -> None:
        """Bind the store to the round and its problems; anew for a round that was not launched yet."""
        is_draft = self.leads and not fixed.was_launched(self.folder)
        if fixed.was_launched(self.folder):
            self.database.run_now(opening.require_books, self.config.state)
        earlier = fixed.earlier_ids(self.folder) if is_draft else ()
        budget_micros = self.config.market.budget_micros
        self.database.run_now(
            opening.open_books, self.round_id, budget_micros, now_ms(), is_draft=is_draft, earlier=earlier
        )
        self.database.run_now(opening.open_problems, self.config, is_draft=is_draft)

    def _open_audits(self, probes: frozenset[str]) -> lottery.AuditTerms:
        terms = replace(opening.audit_terms(self.config, self.folder), probes=probes)
        self.database.run_now(lottery.open_first_epoch, terms, now_ms())
        return terms

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
        """Prepare the round for its leader: log the roots before anything is signed or served under them."""
        opening.require_resumption(self.metadata, self.folder)
        self.database.run_now(opening.log_roots, self.metadata, now_ms())
        opening.mend_metadata(self.metadata, self.folder)
        self.metadata.set_description(self.config.round.describe(self.round_id), utc_now())
        self.database.run_now(tally.recount)

    @classmethod
    def beside(cls, folder: Path) -> "Round":
        """Open the round in `folder` that another process leads, with the settings of that process."""
        config = fixed.load_resolved(folder)
        if not config.store.url:
            raise ConfigInvalid(
                "A round on SQLite can be served by one process only.", hint="Create it with store.url=postgresql://…"
            )
        made = cls(config, leads=False)
        try:
            made.news.require_led_alike()
        except ConfigInvalid:
            made.close()
            raise
        return made

    @property
    def folder(self) -> Path:
        return self.config.round.directory

    @property
    def silent_after_ms(self) -> int:
        """Return the time without a message after which a node counts as offline."""
        return self.config.leases.silent_after_ms

    @property
    def plays(self) -> bool:
        """Return True if the samples are episodes of an environment."""
        return self.terms.turn_tokens_max > 0

    def public_settings(self) -> dict[str, Any]:
        """Return the settings that nodes and visitors need."""
        return summary.public_settings(self.config, self.round_id)

    @cached_property
    def offered(self) -> OfferedVersions:
        """Return the versions that trainers offer, in the process that leads."""
        return OfferedVersions(self.publisher.uploads)

    @cached_property
    def ledger_key(self) -> NoteKey:
        """Return the ledger key that the newest root names."""
        return ledger_key(self.round_id, root_document.ledger_key(self.roots[-1]))

    @cached_property
    def evaluated(self) -> dict[str, int]:
        """Return the number of problems of each evaluated split; empty if there are no evaluations."""
        if not self.config.eval.every:
            return {}
        return {split: len(self.task.problems(split)) for split in self.config.eval.splits}

    async def judge(self) -> Judge:
        text = await self.policy.text()
        return Judge(self.round_id, self.terms, text.bounds, text.reward if text.judges else None, self.audits)

    def tolerances(self) -> Calibration:
        """Return the tolerances for audits of this round's claims."""
        return calibration.load(self.folder, self.metadata.root())

    async def publish_checkpoint(self) -> bytes:
        """Sign a checkpoint of the ledger, if it has grown; at most up to the entries that a standby copy has."""
        copy = await asyncio.to_thread(standby.current, self.folder)
        limit = copy.ledger_size if copy else None
        return await self.database.run(store.publish, self.ledger_key, self.metadata.sign_for_ledger, limit)

    async def beside_the_loop(self, work: Callable[[], T]) -> T:
        """Run slow work without the store on one thread, so that it blocks neither the event loop nor the writer."""
        return await asyncio.get_running_loop().run_in_executor(self._beside, work)

    def close(self) -> None:
        self._beside.shutdown()
        self._held.close()
