"""Publication of versions: the learner's, and those that the operator orders instead.

    the learner's:   uploaded → signed → activated
    the operator's:  staged → checked → intended → signed → activated

- One version is published at a time, and a started publication is finished, even if the client disconnects.
- The operator can order an older version again, or the weights of another folder. Numbers only increase: these weights
  become the next version, at the update to which the newest batch leads. So the same staleness rule applies to every
  claim, also to one on the replaced version.
- The learner continues from the new weights when it sees a replacement that it has not loaded. Until then it may finish
  an update whose weights are not published.
- An order is stored before anything is signed. After a kill in between, the order is settled before the next version
  gets its number: a signed version, which nodes may have seen, is activated; an unsigned one is forgotten. So is an
  order at which something failed, at once. A signed version that could not be activated is tried again with every
  timestamp.
- The result of a retraction is published in the same way. Its entry in the ledger is part of the transaction that
  activates the version, and no batch is formed from the order on until then.
- An order for the weights of the newest version changes nothing, and the reply says so: an order can be repeated. A
  retraction with these weights is published unless it has been: the learner's state is another.
"""

import asyncio
import logging
import os
import shutil
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from pathlib import Path
from threading import Lock
from typing import Any, Literal, TypeVar

import sqlalchemy as sa
from pydantic import Field, model_validator

from coordinator.base.clock import now_ms
from coordinator.base.files import ArrivingFile, file_digest
from coordinator.config import Config
from coordinator.config.section import Section
from coordinator.publishing import weights
from coordinator.publishing.mirror import Mirror
from coordinator.publishing.publish import Publisher
from coordinator.publishing.signed_metadata import SignedMetadata, utc_now
from coordinator.reports import health, standby
from coordinator.store.facts import FINISHED, Fact, get_fact, set_fact
from coordinator.store.state import Database
from coordinator.transactions import batches as batch_table
from coordinator.transactions import broadcasts, commitments, evaluations, orders, policy_versions, retractions
from coordinator.transactions.leases import latest_batch
from coordinator.transactions.retractions import RetractionResult
from protocol import limits
from protocol.errors import ConfigInvalid, NotFound, OutOfOrder
from protocol.policy import chunks
from protocol.policy.manifest import PolicyManifest, target_path
from protocol.work.learning import Publication, UploadedFile

log = logging.getLogger(__name__)

T = TypeVar("T")

ORDERED = Fact[Mapping[str, Any] | None]("ordered_version", None)
REPLACED = Fact("replaced_version", 0)

STAGE = r"ordered-[0-9a-f]{16}"
"""Pattern of the name of a folder below `uploads/` that an order publishes."""

LOOK = "`swarm-coordinator policy list` shows which versions are kept; `publish.keep` keeps more of them."

NO_VERSION_YET = (
    "Wait until `swarm-coordinator status` shows version 1, then repeat the order. Or begin a new round from these "
    "weights, with model.path set to their folder and another round.directory."
)


class Replacement(Section):
    """The operator's order to replace the newest version, with its reason and its author."""

    action: Literal["rollback", "publish", "retract"]
    version: int = Field(0, ge=0, le=limits.VERSION_MAX)
    stage: str = Field("", pattern=rf"^({STAGE})?$")
    reason: str = Field(min_length=1, max_length=orders.REASON_MAX_CHARS)
    given_by: str = Field(min_length=1, max_length=100)
    retraction: RetractionResult | None = None
    """The updates that were made again; only with `retract`."""

    @model_validator(mode="after")
    def _says_what_was_retracted(self) -> "Replacement":
        if (self.action == "retract") != (self.retraction is not None):
            raise ValueError("the order retract has a retraction, and no other order has one")
        return self


class VersionPublication:
    """The publication of a round's versions: signs each and activates it for new leases."""

    def __init__(
        self,
        config: Config,
        publisher: Publisher,
        metadata: SignedMetadata,
        database: Database,
        *,
        mirror: Mirror | None,
        splits: Callable[[], dict[str, int]],
        refresh: Callable[[], Awaitable[None]],
    ) -> None:
        self._config = config
        self._publisher = publisher
        self._metadata = metadata
        self._database = database
        self.mirror = mirror
        self._splits = splits
        """Returns the number of problems of each split on which versions are evaluated."""
        self._refresh = refresh
        """Wakes the requests that wait for a new version."""
        self._kept = policy_versions.Keeping.by(config.publish)
        self._silent_after_ms = config.leases.silent_after_ms
        self._lock = asyncio.Lock()
        """Held while signing: each number is given to one version only."""
        self._under_way: set[asyncio.Task[Any]] = set()

    async def publish(self, publication: Publication) -> None:
        """Publish an uploaded version; do nothing if it is published already."""
        await self._to_the_end(self._publish(publication))

    async def replace(self, wanted: Replacement) -> dict[str, Any]:
        """Publish the ordered weights as the next version; return its number, and whether anything changed."""
        return await self._to_the_end(self._replace(wanted))

    async def settle_orders(self) -> None:
        """Finish or forget the order that a killed coordinator was carrying out."""
        async with self._lock:
            await self._settle()

    async def renew_timestamp(self) -> None:
        """Sign a fresh timestamp, and try again to activate a signed version; never while one is being published."""
        async with self._lock:
            await asyncio.to_thread(self._metadata.renew_timestamp, utc_now())
            if self.mirror:
                await self.mirror.changed()
            await self._settle()

    async def _to_the_end(self, work: Coroutine[Any, Any, T]) -> T:
        task = asyncio.create_task(work)
        self._under_way.add(task)
        task.add_done_callback(self._under_way.discard)
        return await asyncio.shield(task)

    async def _publish(self, publication: Publication) -> None:
        async with self._lock:
            await self._settle()
            newest, _ = await self._database.run(policy_versions.newest_version)
            if publication.version <= newest:
                return
            if publication.version != newest + 1:
                raise OutOfOrder(f"Version {publication.version} does not follow version {newest}.")
            await self.sign(publication)

    async def _replace(self, wanted: Replacement) -> dict[str, Any]:
        uploads = self._publisher.uploads
        stage = uploads / (wanted.stage or "ordered-rollback")
        async with self._lock:
            try:
                await self._settle()
                newest, update = await self._database.run(where_it_stands)
                await asyncio.to_thread(self._stage, wanted, stage, newest)
                files = await asyncio.to_thread(_described, stage)
                before = await asyncio.to_thread(self._publisher.manifest, newest)
                named = {(file.path, file.digest) for file in files}
                is_same = before is not None and {(entry.path, entry.digest) for entry in before.files} == named
                if is_same and await self._database.read(_is_in_place, wanted.retraction, newest):
                    return {"version": newest, "changed": False}
                await self._database.run(intend, wanted, newest + 1, now_ms=now_ms())
                try:
                    await asyncio.to_thread(_move, stage, uploads / str(newest + 1))
                    await self.sign(Publication(version=newest + 1, update=update, files=files))
                except Exception:  # whatever failed: the order is forgotten, or, if nodes may have seen it, activated
                    await self._settle()
                    if (await self._database.read(policy_versions.newest_version))[0] == newest:
                        raise
            finally:
                await asyncio.to_thread(shutil.rmtree, stage, ignore_errors=True)
        return {"version": newest + 1, "changed": True}

    async def _settle(self) -> None:
        """Activate the next version if a killed coordinator has signed it; otherwise forget the order."""
        version = 1 + (await self._database.read(policy_versions.newest_version))[0]
        signed = target_path(version) in self._metadata.targets()
        manifest = self._publisher.manifest(version) if signed else None
        if manifest:
            await self.activate(manifest)
        elif await self._database.read(get_fact, ORDERED):
            await self._database.run(forget_order)
            log.warning("an order about versions was not carried out, and nothing was signed: repeat the order")
        elif await self._database.read(_is_held_without_order, now_ms()):
            await self._database.run(batch_table.release)
            log.warning("batches are formed again: no order was stored with the hold of a retraction")

    async def sign(self, publication: Publication) -> None:
        """Sign and activate the next version; the caller holds the lock."""
        manifest, _ = await asyncio.to_thread(self._publisher.publish, publication)
        await self.activate(manifest)

    async def activate(self, manifest: PolicyManifest) -> None:
        """Activate a signed version for new leases, and delete files that are no longer needed."""
        await asyncio.to_thread(standby.wait_for, self._config.round.directory, manifest.version)
        if self.mirror:
            await self.mirror.caught_up(self._config.publish.upload_patience_s)
        await self._database.run(self._record, manifest, now_ms=now_ms())
        log.info("published version=%d update=%d", manifest.version, manifest.update)
        await self._refresh()
        needed = await self._database.read(evaluations.oldest_needed)
        wanted = await self._database.read(self._kept.chosen, now_ms())
        kept = await asyncio.to_thread(self._publisher.forget_old, manifest.version, audited=needed, kept=wanted)
        await self._database.run(set_fact, health.KEPT, kept._asdict())

    def _record(self, connection: sa.Connection, manifest: PolicyManifest, *, now_ms: int) -> None:
        """Record a version for leases, ledger and nodes, and start its evaluation if one is due."""
        digest = chunks.digest(manifest.to_bytes())
        broadcasts.start_broadcast(connection, manifest, digest, silent_after_ms=self._silent_after_ms, now_ms=now_ms)
        entered(connection, manifest.version, now_ms)
        evaluations.start_due_evaluations(connection, manifest.version, self._splits(), self._config, now_ms)

    def _stage(self, wanted: Replacement, stage: Path, newest: int) -> None:
        """Put the ordered files into `stage` and check that they are complete and sound; raise an error otherwise."""
        settings = self._config.learner
        if settings.lora_rank and not settings.publish_adapters and not wanted.retraction:
            raise ConfigInvalid(
                "This round's learner trains adapters and publishes merged weights: it cannot continue from a version.",
                hint="This needs a round with learner.publish_adapters=true.",
            )
        if wanted.action == "rollback":
            if not 1 <= wanted.version <= newest:
                raise NotFound(f"Version {wanted.version} was not published.", hint=LOOK)
            shutil.rmtree(stage, ignore_errors=True)
            if self._publisher.write_folder(wanted.version, stage) is None:
                raise NotFound(f"The files of version {wanted.version} are no longer kept.", hint=LOOK)
        elif not wanted.stage or not stage.is_dir():
            raise NotFound("The staged folder does not exist any more.", hint="Repeat the order.")
        manifest = self._publisher.manifest(newest)
        names, wanted_names = (
            {path.name for path in stage.iterdir()},
            {entry.path for entry in manifest.files} if manifest else set(),
        )
        if names != wanted_names:
            differ = ", ".join(sorted(names ^ wanted_names))
            raise ConfigInvalid(f"The files differ from those of this round's versions: {differ[:300]}.")
        weights.require_finite(weights.weight_files(stage))


def _is_in_place(connection: sa.Connection, retraction: RetractionResult | None, newest: int) -> bool:
    """Return True if a learner that has the newest version's weights needs nothing else of an order.

    The state that a retraction ends with has an optimizer, too, and the learner has made updates since that version.
    """
    done = commitments.retraction_to(connection, newest)
    return retraction is None or (done is not None and done.after == retraction.after)


def intend(connection: sa.Connection, wanted: Replacement, version: int, *, now_ms: int) -> None:
    """Store an order before anything is signed; the result of a retraction is checked, and no batch is formed then.

    Hold and order are one transaction: nothing would end a hold without an order.
    """
    if wanted.retraction:
        retractions.require_current(connection, wanted.retraction, version, now_ms)
    set_fact(connection, ORDERED, wanted.model_dump(mode="json") | {"becomes": version})


def forget_order(connection: sa.Connection) -> None:
    """Forget the order of which nothing was signed, and form batches again."""
    set_fact(connection, ORDERED, None)
    batch_table.release(connection)


def _is_held_without_order(connection: sa.Connection, now_ms: int) -> bool:
    """Return True if batches are held longer than a command can have them held, and no order will end it."""
    longest_ms = now_ms + int(1000 * retractions.HOLD_MAX_S)
    return get_fact(connection, batch_table.HELD) > longest_ms and not get_fact(connection, ORDERED)


def entered(connection: sa.Connection, version: int, now_ms: int) -> None:
    """Record that the order for this version is carried out; call it in the transaction that activates the version."""
    ordered = get_fact(connection, ORDERED)
    if not ordered or ordered["becomes"] != version:
        return
    set_fact(connection, ORDERED, None)
    set_fact(connection, REPLACED, version)
    what = f"version {ordered['version']} again: " if ordered["action"] == "rollback" else ""
    if ordered.get("retraction"):
        result = RetractionResult.model_validate(ordered["retraction"])
        retractions.record(connection, result, version, now_ms)
        what = f"updates {result.first} to {result.last} without {result.left_out} groups: "
    else:
        set_fact(connection, retractions.CHOSEN, version)
    orders.record(
        connection,
        ordered["action"],
        f"version {version}",
        f"{what}{ordered['reason']}"[: orders.REASON_MAX_CHARS],
        given_by=ordered["given_by"],
        now_ms=now_ms,
    )


def hold_batches(connection: sa.Connection, for_s: float, now_ms: int) -> int:
    """Form no batch for some seconds; return the newest. One that an ordered retraction needs is not shortened."""
    if (get_fact(connection, ORDERED) or {}).get("retraction"):
        return latest_batch(connection)
    return batch_table.hold(connection, for_s, now_ms)


def newest_replacement(connection: sa.Connection) -> int:
    """Return the last version that was published by order; 0 if there is none."""
    return get_fact(connection, REPLACED)


_REBUILDING = Lock()
"""Held while a file is rebuilt, in memory: after a restore there are no uploads, and several requests need the same."""


def file_of(publisher: Publisher, version: int, name: str, digest: str) -> Path:
    """Return the path of a complete file of a version: as uploaded, or rebuilt from its chunks."""
    path = publisher.uploads / str(version) / name
    with _REBUILDING:
        if not path.is_file() or file_digest(path) != digest:
            made = ArrivingFile(path)
            try:
                made.write(publisher.read_file(version, name))
                made.finish(digest)
            finally:
                made.discard()
    return path


def published_file(publisher: Publisher, version: int, digest: str) -> Path | None:
    """Return the path of a version's complete file with this digest; None if it has no such file."""
    manifest = publisher.manifest(version)
    named = next((entry.path for entry in manifest.files if entry.digest == digest), None) if manifest else None
    return file_of(publisher, version, named, digest) if named else None


def published_weights(publisher: Publisher, version: int) -> list[dict[str, Any]]:
    """Return name, digest, size and header of each file of a version's weights."""
    manifest = publisher.manifest(version)
    entries = [entry for entry in manifest.files if entry.path.endswith(weights.SUFFIX)] if manifest else []
    return [
        {
            "name": entry.path,
            "digest": entry.digest,
            "size_bytes": entry.size_bytes,
            "header": weights.header_text(file_of(publisher, version, entry.path, entry.digest)),
        }
        for entry in entries
    ]


def where_it_stands(connection: sa.Connection) -> tuple[int, int]:
    """Return the newest version, and the update of the next one; refuse a finished round, whose policy stays."""
    if get_fact(connection, FINISHED):
        raise OutOfOrder(
            "The round is finished: no more samples are generated.",
            hint="To get an older policy, use `swarm-coordinator export --version`.",
        )
    newest, update = policy_versions.newest_version(connection)
    if not newest:
        raise OutOfOrder("No version is published yet.", hint=NO_VERSION_YET)
    return newest, max(update, latest_batch(connection))


def _described(stage: Path) -> tuple[UploadedFile, ...]:
    return tuple(UploadedFile(path=path.name, digest=file_digest(path)) for path in sorted(stage.iterdir()))


def _move(stage: Path, target: Path) -> None:
    """Move the files one by one: a learner that is uploading its own version of this number loses, without an error."""
    target.mkdir(parents=True, exist_ok=True)
    for path in stage.iterdir():
        path.replace(target / path.name)


def stage_name() -> str:
    """Return a unique name for the folder of an order."""
    return f"ordered-{os.urandom(8).hex()}"
