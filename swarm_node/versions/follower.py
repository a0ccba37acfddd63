"""Follower of the round's policy: refreshes the trust state, and fetches new versions for the worker.

- Work continues with the old version while the new one is downloaded; the worker swaps between two batches.
- If no offered version can be trusted, `distrust` gives the reason, and no work is requested until that changes. Only
  errors about the version do that; any other failure is this node's or its coordinator's, and is retried during work.
- `fetcher` downloads and builds a version, from the peers and by the plans in `broadcast_plans`.
- A version with unknown or compressed files is refused before any of it is downloaded.
- While a version does not fit on the disk, `trouble` reports it.
- The folder of a version in use is kept, however many versions arrive meanwhile (`hold_versions`).
- Trust ends with its signed timestamp: a coordinator that only stops publishing statements also stops work.
- `Milestones` are the stages that the last versions have passed here. Each is passed once, and reported with its age,
  since this machine's clock may be wrong, until a coordinator that knows the version has answered a heartbeat.
"""

import logging
from contextlib import suppress
from datetime import UTC, datetime

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
from protocol.policy.folder import require_files
from protocol.policy.manifest import PolicyManifest
from protocol.policy.trust import FROZEN
from protocol.text.money import Unit
from protocol.work.messages import Reached, Stage
from swarm_node.base.disk import disk_named
from swarm_node.base.trouble import Trouble
from swarm_node.coordinator_api.origins import Origins
from swarm_node.p2p.download import NoSource
from swarm_node.versions.broadcast_plans import BroadcastPlans
from swarm_node.versions.fetcher import HeldVersion, VersionFetcher
from swarm_node.versions.updater import Updater


class Milestones:
    """The stages that were passed recently."""

    def __init__(self) -> None:
        self._passed: dict[tuple[int, Stage], float] = {}
        """Time of each stage, on the loop's monotonic clock."""
        self._received: set[tuple[int, Stage]] = set()

    def passed(self, version: int, stage: Stage, *, ago_s: float = 0.0) -> None:
        """Record that a version passed a stage, `ago_s` seconds ago."""
        if (version, stage) in self._passed:
            return
        self._passed[version, stage] = trio.current_time() - ago_s
        for oldest in list(self._passed)[: -limits.REACHED_MAX]:
            del self._passed[oldest]
            self._received.discard(oldest)

    def heard_ago_s(self, version: int) -> float | None:
        """Return the seconds since this node first knew of a version; None if unknown."""
        heard_at = self._passed.get((version, "heard"))
        return None if heard_at is None else trio.current_time() - heard_at

    def unreported(self) -> tuple[Reached, ...]:
        """Return the stages that the coordinator may not know yet."""
        now = trio.current_time()
        return tuple(
            Reached(version=version, stage=stage, ago_s=min(now - passed_at, limits.REACHED_AGO_MAX_S))
            for (version, stage), passed_at in self._passed.items()
            if (version, stage) not in self._received
        )

    def acknowledge(self, reached: tuple[Reached, ...], *, newest_version: int) -> None:
        """Record that the coordinator received these stages; it could not use those of a version above its newest."""
        self._received |= {(stage.version, stage.stage) for stage in reached if stage.version <= newest_version}


log = logging.getLogger(__name__)

REFRESH_S = 20.0
"""Interval of checks of the trust state without a hint: a withheld version is noticed within this time."""

RETRY_S = 1.0
"""Pause after a failed refresh or download."""


def refresh_in_s(proved_until: datetime | None, now: datetime) -> float:
    """Return the time until the next check without a hint: well before the current proof ends."""
    if proved_until is None:
        return REFRESH_S
    return min(REFRESH_S, max(RETRY_S, (proved_until - now).total_seconds() / 2))


class PolicyFollower:
    """Keeps `ready` at the newest version that this node has verified and downloaded."""

    def __init__(self, *, origins: Origins, updater: Updater, plans: BroadcastPlans, fetcher: VersionFetcher) -> None:
        self._origins = origins
        self._updater = updater
        self.plans = plans
        self.fetcher = fetcher
        self._hint = trio.Event()
        plans.punches.results.on_change = lambda: self._hint.set()
        self._changed = trio.Event()
        self._announced = 0
        self._kept: list[HeldVersion] = []
        """The version before `ready`, for nodes that are behind, and `ready`."""
        self._held: tuple[HeldVersion, ...] = ()
        """Versions that an engine has or loads."""
        self.ready: HeldVersion | None = None
        self.distrust: SwarmError | None = None
        self.trouble = Trouble()
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
                with disk_named(self.fetcher.folder):
                    trusted = await self._follow()
                self.trouble.clear()
                if trusted:
                    self._judge(None)
                    patience_s = refresh_in_s(self._updater.proved_until, datetime.now(UTC))
            except (Unreachable, NotFound) as error:
                log.debug("cannot check for a new version reason=%r", error.message)
            except NoSource as error:
                log.warning("version not fetched code=%s: %s", error.code, error)
            except DiskFull as error:
                self.trouble.record(error, "cannot store the new version")
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
        if self.plans.version != manifest.version:  # it was on the disk: call the peers that this node must feed
            await self.plans.begin(manifest.version)
        if self.plans.punches.results.has_unreported:
            with suppress(SwarmError):  # it is sent with the next request for a plan
                await self.plans.report_place(manifest.version)
        return True

    async def _adopt(self, manifest: PolicyManifest) -> bool:
        """Get a version, offer it to the worker, and remove old ones; return False while another round fetches it."""
        self.milestones.passed(manifest.version, "heard")
        require_files(manifest)
        # In slices: the trust in the version that is being worked with must be renewed meanwhile.
        slice_s = refresh_in_s(self._updater.proved_until, datetime.now(UTC))
        fetched = await self.fetcher.get(manifest, self._kept, patience_s=slice_s)
        if fetched is None:
            return False
        self.milestones.passed(manifest.version, "fetched")
        self.ready = fetched.version
        self._kept = [*self._kept[-1:], self.ready]
        self._notify()
        if fetched.receipt is not None:
            await self.plans.send(fetched.receipt)
        await self.fetcher.remove_old(self._kept, self._held)
        return True

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
