"""Follower of the round's policy: refreshes the trust state, downloads and rebuilds new versions for the worker.

- Work continues with the old version while the new one is downloaded; the worker swaps between two batches.
- If no offered version can be trusted, `distrust` gives the reason, and no work is requested until that changes. Only
  errors about the version do that; any other failure is this node's or its coordinator's, and is retried during work.
- The coordinator's plan names the peers to ask; without a plan, those of the last one are asked, and the origins.
- A version with unknown or compressed files is refused before any of it is downloaded.
- A version that does not fit on the disk is not downloaded, and `trouble` reports it until it does.
- The folder of a version in use is kept, however many versions arrive meanwhile (`hold_versions`).
- Trust ends with its signed timestamp: a coordinator that only stops publishing statements also stops work.
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
from protocol.text.money import Unit
from protocol.text.plain import size_text
from protocol.work.messages import Blame, FetchPlan, PeerUpload, PlanRequest, Transfer, TransferReceipt
from swarm_node.base.disk import disk_named
from swarm_node.base.logs import DRAWN
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
from swarm_node.versions.other_rounds import OtherRounds
from swarm_node.versions.progress import Download, progress_text
from swarm_node.versions.updater import Updater

log = logging.getLogger(__name__)

REFRESH_S = 20.0
"""Interval of checks of the trust state without a hint: a withheld version is noticed within this time."""

RETRY_S = 1.0
"""Pause after a failed refresh or download."""

BLAMES_KEPT = 16
"""Blames kept for the next heartbeat."""


def refresh_in_s(proved_until: datetime | None, now: datetime) -> float:
    """Return the time until the next check without a hint: well before the current proof ends."""
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


class PolicyFollower:
    """Keeps `ready` at the newest version that this node has verified and downloaded."""

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
        other_rounds: OtherRounds | None = None,
    ) -> None:
        self._coordinator = coordinator
        self._origins = origins
        self._updater = updater
        self._blobs = blobs
        self._arrivals = arrivals
        self._folder = folder
        self._host = host
        self._rng = rng
        self._other_rounds = other_rounds or OtherRounds(folder / "none")
        host.punches.on_news = lambda: self._hint.set()
        self._hint = trio.Event()
        self._changed = trio.Event()
        self._announced = 0
        self._planned = 0
        self._plan: FetchPlan | None = None
        """The last plan that was followed, and its version; the peers in its `calls` are called."""
        self.dialled: bool | None = None
        """True if other nodes could recently dial this node, by the last plan that knew."""
        self._caught: Counter[str] = Counter()
        """Count of wrong chunks by peer: peers with more are asked later."""
        self._kept: list[HeldVersion] = []
        """The version before `ready`, for nodes that are behind, and `ready`."""
        self._held: tuple[HeldVersion, ...] = ()
        """Versions that an engine has or loads."""
        self.ready: HeldVersion | None = None
        self.distrust: SwarmError | None = None
        self.trouble = Trouble()
        self.download: Download | None = None
        self.traffic = Traffic()
        self.milestones = Milestones()

    @property
    def unit(self) -> Unit:
        """The unit of the round's amounts, by its trusted root."""
        return self._updater.unit

    @property
    def newest(self) -> int:
        """The newest version that this node knows of."""
        return self._announced

    async def run(self) -> None:
        """Follow until cancelled."""
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
        """Record an unverified hint of a newer version, and check for it."""
        if newest_version > self._announced:
            self._announced = newest_version
            self._hint.set()

    async def usable(self) -> HeldVersion:
        """Wait for the version to work with: present, verified and trusted."""
        while (policy := self.usable_now()) is None:
            await self._changed.wait()
        return policy

    def usable_now(self) -> HeldVersion | None:
        """Return the version to work with, if there is one and it is trusted."""
        self._expire()
        return self.ready if self.distrust is None else None

    def _expire(self) -> None:
        """Stop work when the last proof has expired without a newer one, and request one."""
        until = self._updater.proved_until
        if self.distrust is None and until is not None and datetime.now(UTC) > until:
            said = f"The coordinator's last signed statement expired at {until:%H:%M:%S} UTC."
            self._judge(MetadataExpired(said, hint=FROZEN))
            self._hint.set()

    def hold_versions(self, policy: HeldVersion, *others: HeldVersion | None) -> bool:
        """Keep the folders of these versions until others are held; return False if the first may have been removed."""
        if policy not in (*self._kept, *self._held):
            return False
        self._held = (policy, *filter(None, others))
        return True

    async def newer_than(self, policy: HeldVersion, *, patience_s: float) -> None:
        """Return when another version than `policy` is ready, or after `patience_s`."""
        with trio.move_on_after(patience_s):
            while self.ready == policy:
                await self._changed.wait()

    async def _follow(self) -> bool:
        """Get the newest version; return False if it cannot be trusted."""
        self._hint = trio.Event()
        await self._origins.learn()
        try:
            manifest = await self._updater.refresh()
        except (Unreachable, NotFound, DiskFull):
            raise
        except SwarmError as error:
            self._judge(error)
            return False
        self._announced = manifest.version if manifest else 0  # proved: an unverified hint does not count any more
        if manifest is None:
            return True
        if not (self.ready and self.ready.manifest == manifest) and not await self._adopt(manifest):
            self._hint.set()  # it has waited already
            return True
        if self._planned != manifest.version:
            await self._feed(manifest)
        if self._host.punches.has_news:
            with suppress(SwarmError):  # it is sent with the next request for a plan
                await self._report_place(manifest.version)
        return True

    async def _adopt(self, manifest: PolicyManifest) -> bool:
        """Get a version, offer it to the worker, and remove old ones; return False while another round fetches it."""
        self.milestones.passed(manifest.version, "heard")
        require_files(manifest)
        receipt: TransferReceipt | None = None
        folder = await trio.to_thread.run_sync(assemble.find, self._folder, manifest)
        if folder is None:
            # In slices: the trust in the version that is being worked with must be renewed meanwhile.
            slice_s = refresh_in_s(self._updater.proved_until, datetime.now(UTC))
            if not await self._other_rounds.wait_for_shared(self._folder, manifest, slice_s=slice_s):
                return False
            folder, receipt = await self._make(manifest)
        self.milestones.passed(manifest.version, "fetched")
        self.ready = HeldVersion(manifest, folder)
        self._kept = [*self._kept[-1:], self.ready]
        self._notify()
        if receipt is not None:
            with suppress(SwarmError):  # a lost receipt is not worth a retry
                await self._coordinator.fetched(receipt)
        in_use = [policy.folder for policy in (*self._kept, *self._held)]
        await trio.to_thread.run_sync(assemble.prune, self._folder, in_use)
        await self._forget_chunks()
        await trio.to_thread.run_sync(assemble.restock, folder, manifest, self._blobs)
        return True

    async def _forget_chunks(self, *of_others: PolicyManifest) -> None:
        """Delete the chunks that neither a kept version nor one of these has."""
        manifests = (*(policy.manifest for policy in self._kept), *of_others)
        wanted = {ChunkId(chunk) for manifest in manifests for chunk in manifest.chunk_sizes()}
        await trio.to_thread.run_sync(self._blobs.prune, wanted)

    async def _feed(self, manifest: PolicyManifest) -> None:
        """Call the peers that this node must feed, for a version that was already on the disk."""
        self._host.own_network = await self._origins.at_home()
        await self._new_plan(manifest.version)

    async def _new_plan(self, version: int) -> FetchPlan | None:
        """Request and apply the plan of a version; None if the coordinator gives none."""
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
        """Report this node's reachability with a request for a plan; the next version's plan uses it."""
        report = self._host.punches.report()
        request = PlanRequest(
            version=version, observed=report.observed, punched=report.punched, unpunched=report.unpunched
        )
        plan = await self._coordinator.plan(request)
        self._host.punches.confirm(report)
        return plan

    def _makeshift(self) -> FetchPlan:
        """Return a substitute plan: the peers of the last one, which may have the version now, without stripes."""
        peers = [peer.model_copy(update={"stripes": ()}) for peer in (self._plan.peers if self._plan else ())]
        return FetchPlan(stripes=1, peers=tuple(peers), rate=0.0, hops=1, help_rate=0.0)

    async def _make(self, manifest: PolicyManifest) -> tuple[Path, TransferReceipt]:
        """Download a version, and build its folder while chunks arrive; first delete chunks that are not needed."""
        with self._other_rounds.fetching(self._folder, manifest):
            await self._forget_chunks(manifest)
            await trio.to_thread.run_sync(self._other_rounds.take_over, self._folder, manifest, self._blobs)
            try:
                return await self._build(manifest)
            finally:
                with trio.CancelScope(shield=True):
                    await trio.to_thread.run_sync(assemble.clear_taken, self._folder)

    async def _build(self, manifest: PolicyManifest) -> tuple[Path, TransferReceipt]:
        """Download and build a version from what is on this disk and what is missing."""
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
        """Return the receipt of a download: the sending peers, and the peers that could be dialled."""
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
        self.download = Download(manifest.version, sum(sizes.values()), report)
        if self.ready is None:
            log.info("fetching the first version: %s", size_text(self.download.bytes))
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
        if self.download is not None and self.download.advance(progress, len(self._host.connected())):
            log.info("%s", progress_text(self.download.to_json()), extra={DRAWN: True})

    def _judge(self, error: SwarmError | None) -> None:
        """Set or clear `distrust`, and log the change once."""
        if (error and error.code) != (self.distrust and self.distrust.code):
            if error:
                log.error("work stopped code=%s: %s", error.code, error)
            else:
                log.info("work continues: the coordinator can be trusted again")
        self.distrust = error
        self._notify()

    def _notify(self) -> None:
        self._changed.set()
        self._changed = trio.Event()
