"""Follows the round's policy: refresh the trust state, fetch what is new, rebuild it, offer it to the worker.

- Work goes on with the old version while the new one is fetched; the worker swaps between two batches.
- If nothing on offer can be trusted, `distrust` says why and no work is taken until that changes. Only what judges the
  version does that; any other failure is this node's or its coordinator's, and is tried again beside the work.
- Whom to ask, the coordinator's plan says; where it gives none, those of its last one are asked, and the origins.
- A version with files of no known use, or that unfold, is refused before one of its bytes is fetched.
- What does not fit on the disk is not fetched, and `trouble` says so until it does.
- The folder of a version that is in use stays, however many versions come meanwhile (`hold`).
- Trust ends with the timestamp that gave it: a coordinator that only falls silent about versions stops work, too.
"""

import logging
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from random import Random

import trio

from protocol import limits
from protocol.errors import (
    DiskFull,
    ManifestInvalid,
    MetadataExpired,
    NotFound,
    PatchInvalid,
    SwarmError,
    Unreachable,
)
from protocol.ids import ChunkId
from protocol.policy.folder import require_files
from protocol.policy.manifest import PolicyManifest
from protocol.policy.trust import FROZEN
from protocol.work.messages import Blame, FetchPlan, PeerUpload, PlanRequest, Transfer, TransferReceipt
from swarm_node.base.disk import disk_named
from swarm_node.base.trouble import Trouble
from swarm_node.chunks.arrivals import Arrivals
from swarm_node.chunks.blobs import BlobStore
from swarm_node.coordinator_api.client import Coordinator
from swarm_node.coordinator_api.origins import Origins
from swarm_node.p2p.download import DownloadProgress, FetchReport, NoSource, fetch_chunks
from swarm_node.p2p.host import Host
from swarm_node.reach.state import CAN, CANNOT
from swarm_node.versions import assemble, disk_space
from swarm_node.versions.assemble import Draft
from swarm_node.versions.milestones import Milestones
from swarm_node.versions.updater import Updater

log = logging.getLogger(__name__)

REFRESH_S = 20.0
"""Without a hint, how often the trust state is checked: a withheld version shows within this time."""

RETRY_S = 1.0
"""After a failed refresh or download."""

BLAMES_KEPT = 16
"""Evidence waiting for the next heartbeat."""


def refresh_in_s(proved_until: datetime | None, now: datetime) -> float:
    """When to look next without a hint: well before the proof in hand ends, however short proofs are here."""
    if proved_until is None:
        return REFRESH_S
    return min(REFRESH_S, max(RETRY_S, (proved_until - now).total_seconds() / 2))


@dataclass(frozen=True)
class HeldVersion:
    """A version whose files are on this disk, complete and verified."""

    manifest: PolicyManifest
    folder: Path


@dataclass
class Traffic:
    """Bytes and blames since the agent started."""

    from_peers: int = 0
    from_seeder: int = 0
    from_http: int = 0
    blames: list[Blame] = field(default_factory=list)

    def add(self, report: FetchReport) -> None:
        self.from_peers += report.bytes_from["peer"]
        self.from_seeder += report.bytes_from["seeder"]
        self.from_http += report.bytes_from["origin"]
        self.blames = (self.blames + report.blames)[-BLAMES_KEPT:]

    def message(self, to_peers: int) -> Transfer:
        return Transfer(
            from_peers=self.from_peers, from_seeder=self.from_seeder, from_http=self.from_http, to_peers=to_peers
        )


@dataclass
class Download:
    """A version on its way here."""

    version: int
    bytes_done: int = 0
    bytes: int = 0
    peers: int = 0
    """Connected now."""
    started_at: float = field(default_factory=trio.current_time)

    def to_json(self) -> dict[str, float]:
        seconds = max(1e-3, trio.current_time() - self.started_at)
        told = {"version": self.version, "bytes_done": self.bytes_done, "bytes": self.bytes, "peers": self.peers}
        return {**told, "bytes_per_s": self.bytes_done / seconds}


class PolicyFollower:
    """Keeps `ready` at the newest version this node has proved and fetched."""

    def __init__(
        self,
        *,
        coordinator: Coordinator,
        origins: Origins,
        updater: Updater,
        blobs: BlobStore,
        arrivals: Arrivals,
        folder: Path,
        host: Host,
        rng: Random,
    ) -> None:
        self._coordinator = coordinator
        self._origins = origins
        self._updater = updater
        self._blobs = blobs
        self._arrivals = arrivals
        self._folder = folder
        self._host = host
        self._rng = rng
        host.punches.on_news = lambda: self._hint.set()
        self._hint = trio.Event()
        self._changed = trio.Event()
        self._announced = 0
        self._planned = 0
        self._plan: FetchPlan | None = None
        """The version whose plan was last followed, and that plan: whom it says to call is called."""
        self.dialled: bool | None = None
        """Whether others could dial this node of late, as the last plan that knew says."""
        self._caught: Counter[str] = Counter()
        """How often each peer sent wrong bytes: the more often, the later among the peers it is asked."""
        self._kept: list[HeldVersion] = []
        """The version before `ready`, for those who are behind, and `ready`."""
        self._held: tuple[HeldVersion, ...] = ()
        """Those that an engine has, or loads."""
        self.ready: HeldVersion | None = None
        self.distrust: SwarmError | None = None
        self.trouble = Trouble()
        self.download: Download | None = None
        self.traffic = Traffic()
        self.milestones = Milestones()

    @property
    def newest(self) -> int:
        """The newest version that this node has heard of."""
        return self._announced

    async def run(self) -> None:
        """Follow for ever."""
        while True:
            patience_s = RETRY_S
            try:
                with disk_named(self._folder):
                    trusted = await self._follow()
                self.trouble.over()
                if trusted:
                    self._judge(None)
                    patience_s = refresh_in_s(self._updater.proved_until, datetime.now(UTC))
            except (Unreachable, NotFound) as error:
                log.debug("cannot check for a new version reason=%r", error.message)
            except NoSource as error:
                log.warning("version not fetched code=%s: %s", error.code, error)
            except DiskFull as error:
                self.trouble.met(error, "cannot store the new version")
                patience_s = 5 * RETRY_S
            except (ManifestInvalid, PatchInvalid) as error:
                self._judge(error)
            except SwarmError as error:
                log.warning("version not ready code=%s: %s", error.code, error)
            with trio.move_on_after(patience_s):
                await self._hint.wait()

    def hint(self, newest_version: int) -> None:
        """Somebody says that there is a newer version; worth a look, no more."""
        if newest_version > self._announced:
            self._announced = newest_version
            self._hint.set()

    async def usable(self) -> HeldVersion:
        """The version to work with, once there is one and nothing speaks against it."""
        while (policy := self.usable_now()) is None:
            await self._changed.wait()
        return policy

    def usable_now(self) -> HeldVersion | None:
        """The version to work with, if there is one and nothing speaks against it."""
        self._expire()
        return self.ready if self.distrust is None else None

    def _expire(self) -> None:
        """Proof has an end: when no newer one came, for whatever reason, work stops and it is asked for again."""
        until = self._updater.proved_until
        if self.distrust is None and until is not None and datetime.now(UTC) > until:
            said = f"The coordinator's last signed statement expired at {until:%H:%M:%S} UTC."
            self._judge(MetadataExpired(said, hint=FROZEN))
            self._hint.set()

    def hold_versions(self, policy: HeldVersion, *others: HeldVersion | None) -> bool:
        """Keep the folders of these versions until others are held; False if the first may be removed already."""
        if policy not in (*self._kept, *self._held):
            return False
        self._held = (policy, *filter(None, others))
        return True

    async def newer_than(self, policy: HeldVersion, *, patience_s: float) -> None:
        """Return when another version than this is ready, or after so many seconds."""
        with trio.move_on_after(patience_s):
            while self.ready == policy:
                await self._changed.wait()

    async def _follow(self) -> bool:
        """Have the newest version here; False if it cannot be trusted."""
        self._hint = trio.Event()
        await self._origins.learn()
        try:
            manifest = await self._updater.refresh()
        except (Unreachable, NotFound, DiskFull):
            raise
        except SwarmError as error:
            self._judge(error)
            return False
        self._announced = manifest.version if manifest else 0  # proved: what was only said does not count any more
        if manifest is None:
            return True
        if not (self.ready and self.ready.manifest == manifest):
            await self._take(manifest)
        if self._planned != manifest.version:
            await self._feed(manifest)
        if self._host.punches.has_news:
            with suppress(SwarmError):  # it goes with the next request for a plan
                await self._report_place(manifest.version)
        return True

    async def _take(self, manifest: PolicyManifest) -> None:
        """Have a version here, offer it, and forget the one before the last."""
        self.milestones.passed(manifest.version, "heard")
        require_files(manifest)
        receipt: TransferReceipt | None = None
        folder = await trio.to_thread.run_sync(assemble.find, self._folder, manifest)
        if folder is None:
            folder, receipt = await self._make(manifest)
        self.milestones.passed(manifest.version, "fetched")
        self.ready = HeldVersion(manifest, folder)
        self._kept = [*self._kept[-1:], self.ready]
        self._tell()
        if receipt is not None:
            with suppress(SwarmError):  # one that is lost is not worth a second try
                await self._coordinator.fetched(receipt)
        in_use = [policy.folder for policy in (*self._kept, *self._held)]
        await trio.to_thread.run_sync(assemble.prune, self._folder, in_use)
        await self._forget_chunks()
        await trio.to_thread.run_sync(assemble.restock, folder, manifest, self._blobs)

    async def _forget_chunks(self, *of_others: PolicyManifest) -> None:
        """All that no kept version has, nor any of these."""
        manifests = (*(policy.manifest for policy in self._kept), *of_others)
        wanted = {ChunkId(chunk) for manifest in manifests for chunk in manifest.chunk_sizes()}
        await trio.to_thread.run_sync(self._blobs.prune, wanted)

    async def _feed(self, manifest: PolicyManifest) -> None:
        """Call those whom this node is to feed, where nothing had to be fetched: the version was here from before."""
        self._host.own_network = await self._origins.at_home()
        await self._new_plan(manifest.version)

    async def _new_plan(self, version: int) -> FetchPlan | None:
        """Whom to ask for a version; whom to call is called. None if the coordinator does not say."""
        try:
            plan = await self._report_place(version)
        except SwarmError as error:
            log.info("no download plan version=%d code=%s: %s", version, error.code, error)
            return None
        self._host.call(peer for peer in plan.calls if peer.address)
        self._host.punches.follow(plan.punches, plan.observers)
        if plan.probe and plan.probe.address:
            self._host.dials.start(plan.probe)
        self._planned, self._plan = version, plan
        if plan.dialled is not None and plan.dialled != self.dialled:
            self.dialled = plan.dialled
            log.info("version=%d: %s", version, CAN if plan.dialled else CANNOT)
        return plan

    async def _report_place(self, version: int) -> FetchPlan:
        """Report what this node knows of its place in the network, which the next version's plan goes by."""
        report = self._host.punches.report()
        request = PlanRequest(
            version=version, observed=report.observed, punched=report.punched, unpunched=report.unpunched
        )
        plan = await self._coordinator.plan(request)
        self._host.punches.confirm(report)
        return plan

    def _makeshift(self) -> FetchPlan:
        """Without a plan: whoever was in the last one may have the version by now, and nobody feeds anybody."""
        peers = [peer.model_copy(update={"stripes": ()}) for peer in (self._plan.peers if self._plan else ())]
        return FetchPlan(stripes=1, peers=tuple(peers), rate=0.0, hops=1, help_rate=0.0)

    async def _make(self, manifest: PolicyManifest) -> tuple[Path, TransferReceipt]:
        """Fetch a version, and build its folder from the chunks as they come; first, make room for it."""
        await self._forget_chunks(manifest)
        bases = await trio.to_thread.run_sync(assemble.held_files, self._folder, manifest)
        sizes = {ChunkId(chunk): size for chunk, size in manifest.chunk_sizes_for(bases).items()}
        await trio.to_thread.run_sync(disk_space.require, self._folder, manifest, bases, sizes, self._blobs)
        draft = await trio.to_thread.run_sync(Draft, self._folder, manifest, self._blobs, bases)
        try:
            with draft.following(self._arrivals):
                self._host.own_network = await self._origins.at_home()
                plan = await self._new_plan(manifest.version) or self._makeshift()
                report = await self._fetch(manifest, sizes, plan)
            return await trio.to_thread.run_sync(draft.finish), self._witness(manifest, report)
        finally:
            with trio.CancelScope(shield=True):
                await trio.to_thread.run_sync(draft.discard)

    def _witness(self, manifest: PolicyManifest, report: FetchReport) -> TransferReceipt:
        """Who sent this version, and who could be dialled."""
        seconds = min(max(report.seconds, limits.FETCH_MIN_S), limits.FETCH_MAX_S)
        uploads = [
            PeerUpload(
                peer_id=name,
                size_bytes=size,
                busy_s=seconds if (busy_s := report.busy_s[name]) is None else min(busy_s, seconds),
            )
            for name, size in report.bytes_from_node.items()
        ]
        answered, unanswered = self._host.dials.take_report()
        to_dial = {peer.peer_id for plan in report.plans for peer in (*plan.peers, *plan.calls) if not peer.calls}
        probe = next((plan.probe.peer_id for plan in report.plans if plan.probe), None)
        return TransferReceipt(
            round_id=manifest.round_id,
            version=manifest.version,
            seconds=seconds,
            uploads=tuple(uploads[: limits.PEERS_MAX]),
            from_origins=report.bytes_from["origin"],
            answered=tuple(answered[: limits.DIALS_MAX]),
            unanswered=tuple([name for name in unanswered if name in to_dial][: limits.DIALS_MAX]),
            missed_probe=probe if probe in unanswered else None,
        )

    async def _fetch(self, manifest: PolicyManifest, sizes: dict[ChunkId, int], plan: FetchPlan) -> FetchReport:
        report = FetchReport()
        self.download = Download(manifest.version, bytes=sum(sizes.values()))
        try:
            await fetch_chunks(
                sizes,
                plan,
                order=[ChunkId(chunk) for chunk in manifest.chunk_sizes()],
                host=self._host,
                blobs=self._blobs,
                arrivals=self._arrivals,
                rng=self._rng,
                origin=self._origins.fetcher_for(manifest),
                another_plan=partial(self._new_plan, manifest.version),
                blames=self._caught,
                report=report,
                on_progress=self._note_progress,
            )
        finally:
            self.download = None
            self._caught.update(blame.peer_id for blame in report.blames)
            self.traffic.add(report)
            for blame in report.blames:
                log.warning("peer sent wrong bytes peer=%s chunk=%s", blame.peer_id, blame.chunk)
        log.info(
            "version fetched version=%d seconds=%.2f from_peers=%d from_seeder=%d from_http=%d on_disk=%d",
            manifest.version,
            report.seconds,
            report.bytes_from["peer"],
            report.bytes_from["seeder"],
            report.bytes_from["origin"],
            report.bytes_on_disk,
        )
        return report

    def _note_progress(self, progress: DownloadProgress) -> None:
        if self.download is not None:
            self.download.bytes_done, self.download.bytes = progress.bytes_done, progress.bytes
            self.download.peers = len(self._host.connected())

    def _judge(self, error: SwarmError | None) -> None:
        """Take or give up trust, and say so once."""
        if (error and error.code) != (self.distrust and self.distrust.code):
            if error:
                log.error("work stopped code=%s: %s", error.code, error)
            else:
                log.info("work goes on: the coordinator can be trusted again")
        self.distrust = error
        self._tell()

    def _tell(self) -> None:
        self._changed.set()
        self._changed = trio.Event()
