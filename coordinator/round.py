"""One round as the running coordinator holds it: its folder, store, publisher, and what requests need of them.

- Opening an existing folder continues that round; opening an empty one makes keys, store and the operator's deposit.
- The folder: `keys/`, `operator.token`, `resolved.json`, `metadata/`, `blobs/`, `public/`, `logs/`, `state.db` …
- Only events that wake waiting requests live in memory; everything counted is in the store.
"""

import asyncio
import fcntl
import logging
import secrets
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import IO

import sqlalchemy as sa

from coordinator import broadcasts, publish
from coordinator.config import Config
from coordinator.files import write_durably
from coordinator.intake import Judge
from coordinator.leases import Draw, Terms
from coordinator.mirror import open_mirror
from coordinator.plans import Plans
from coordinator.policy_text import PolicyText
from coordinator.publish import Publisher
from coordinator.signed_metadata import SignedMetadata, utc_now
from coordinator.state import Database
from ledger import store
from ledger.checkpoint import ledger_key
from ledger.entry import Deposit
from protocol import trust
from protocol.errors import ConfigInvalid, NotFound, OutOfOrder
from protocol.ids import NodeId
from protocol.learning import Publication
from protocol.manifest import Sampler
from protocol.messages import Peer
from protocol.origin import OriginList
from protocol.tasks import task

log = logging.getLogger(__name__)

FIXED = (
    "round.seed",
    "model.path",
    "model.revision",
    "task.name",
    "sampling.temperature",
    "sampling.samples_per_group",
    "sampling.max_new_tokens",
    "learner.groups_per_update",
    "learner.lora_rank",
    "market.budget_micros",
)
"""Settings that batches, versions, leases or the ledger of a round were counted with."""


class Round:
    """Everything the handlers and timers of one round share."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.folder = config.round.directory
        resolved = self.folder / "resolved.json"
        _check_settings(resolved, config)
        self._lock = only_coordinator(self.folder)
        write_durably(resolved, config.model_dump_json(indent=2).encode())
        self.metadata = _open_metadata(config, self.folder)
        self.round_id = self.metadata.round_id
        self.origins = OriginList(urls=config.publish.origins)
        self.mirror = open_mirror(config.publish.upload, self.folder)
        self.operator_token = _open_token(self.folder)
        self.database = Database(self.folder / "state.db")
        self.database.run_now(_deposit, config.market.budget_micros, now_ms())
        self.roots = self.metadata.roots()
        self.ledger_key = ledger_key(self.round_id, trust.ledger_key(self.roots[-1]))
        self.publisher = Publisher(
            folder=self.folder,
            metadata=self.metadata,
            task=config.task.name,
            sampler=Sampler(temperature=config.sampling.temperature, max_new_tokens=config.sampling.max_new_tokens),
            chunk_size_bytes=config.publish.chunk_size_bytes,
            keep=config.staleness.max_updates + 2,
            patches=config.publish.patches,
        )
        self.batch_ready = asyncio.Event()
        self.seeder: Peer | None = None
        self.plans = Plans()
        self.silent_after_ms = int(3000 * config.leases.heartbeat_s)
        """Who was not heard of for so long is not counted on."""
        self.up_since_ms = now_ms()
        self.questions: Counter[NodeId] = Counter()
        """Requests for news that are held open, by node."""
        self._publishing = asyncio.Lock()
        self._published = asyncio.Event()
        self._publication: asyncio.Task[None] | None = None
        self._text: PolicyText | None = None
        self.terms = Terms(
            staleness=config.staleness.max_updates,
            groups_per_update=config.learner.groups_per_update,
            groups_per_request=config.leases.groups_per_request,
            samples_per_group=config.sampling.samples_per_group,
            max_new_tokens=config.sampling.max_new_tokens,
            timeout_ms=int(config.leases.timeout_s * 1000),
            hourly_budget_micros=config.fleet.budget_micros_per_hour,
        )

    async def text(self) -> PolicyText:
        """The policy's tokenizer and bounds; there is none before the first version."""
        if self._text is None:
            version, _ = await self.database.run(publish.newest_version)
            if not version:
                raise NotFound("No policy version is published yet.", hint="Wait for the first one.")
            problems = task(self.config.task.name, seed=self.config.round.seed)
            self._text = await asyncio.to_thread(
                PolicyText,
                lambda name: self.publisher.read_file(version, name),
                problems,
                self.config.sampling.max_new_tokens,
            )
        return self._text

    async def draw(self) -> Draw:
        text = await self.text()
        return Draw(prompt=text.prompt, lease_id=lambda: secrets.token_hex(16), seed=lambda: secrets.randbits(63))

    async def judge(self) -> Judge:
        text = await self.text()
        return Judge(self.round_id, self.config.staleness.max_updates, text.bounds, text.reward)

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
            await self.database.run(
                broadcasts.begin, manifest, digest, silent_after_ms=self.silent_after_ms, now_ms=now_ms()
            )
            log.info("published version=%d update=%d", manifest.version, manifest.update)
            self._published.set()
            self._published = asyncio.Event()
            await asyncio.to_thread(self.publisher.forget_old, publication.version)

    async def version_after(self, version: int, *, patience_s: float) -> int:
        """The newest version, as soon as it is above this one or when patience ends."""
        published = self._published
        newest, _ = await self.database.run(publish.newest_version)
        if newest > version:
            return newest
        with suppress(TimeoutError):
            await asyncio.wait_for(published.wait(), patience_s)
        newest, _ = await self.database.run(publish.newest_version)
        return newest

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
        self.database.close()
        self._lock.close()


def now_ms() -> int:
    """The coordinator's clock."""
    return time.time_ns() // 1_000_000


def join_string(config: Config, round_id: str) -> str:
    """What an operator hands to volunteers: where to go, and whom to trust."""
    url = config.round.public_url or f"http://{config.round.listen}"
    return f"{url}#{round_id}"


def only_coordinator(folder: Path) -> IO[str]:
    """One coordinator per round: two would sign the same version numbers."""
    folder.mkdir(parents=True, exist_ok=True)
    lock = (folder / "coordinator.lock").open("w")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        lock.close()
        raise ConfigInvalid(
            f"A coordinator is running in {folder}.", hint="Stop it, or choose another round.directory."
        ) from None
    return lock


def _check_settings(path: Path, config: Config) -> None:
    """A round that exists goes on with the settings that its history depends on."""
    if not path.exists():
        return
    before = Config.model_validate_json(path.read_text())
    for name in FIXED:
        section, _, key = name.partition(".")
        old, new = (getattr(getattr(settings, section), key) for settings in (before, config))
        if old != new:
            raise ConfigInvalid(
                f"The round in {path.parent} was made with {name} = {old}, not {new}.",
                hint="Keep the old value, or give the new round another round.directory.",
            )


def _open_metadata(config: Config, folder: Path) -> SignedMetadata:
    keys, metadata = folder / "keys", folder / "metadata"
    lifetime_s = config.publish.timestamp_lifetime_s
    if (metadata / "timestamp.json").exists():
        opened = SignedMetadata(keys, metadata, lifetime_s)
        opened.mend(utc_now())
        return opened
    return SignedMetadata.create(keys, metadata, lifetime_s, utc_now())


def _open_token(folder: Path) -> str:
    path = folder / "operator.token"
    if not path.exists():
        write_durably(path, secrets.token_hex(32).encode(), private=True)
    return path.read_text()


def _deposit(connection: sa.Connection, budget_micros: int, moment_ms: int) -> None:
    if budget_micros:
        store.append(connection, Deposit(reference="opening", amount_micros=budget_micros), moment_ms)
