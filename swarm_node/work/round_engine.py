"""The engine as one round uses it: the round's turn at the engine, the round's version in it, and its failures.

- An agent in several rounds has one engine. Once another round has acquired it, nothing of this round is loaded.
- The files of the version in the engine, and of the one being loaded, are kept (`hold_versions`).
- The first load shows the class of numerics, without which no lease can be requested.
- Rounds may have models of different speeds: the cards remember that of each round (`EnginePool.speed_with`).
- A version with which the engine fails repeatedly is not tried again; the node waits for the next one. Too many
  failures in a row, with any versions, are an error: the machine needs its owner.
"""

import logging

from protocol.errors import EngineFailed, EngineNotStarted, SwarmError
from protocol.limits import retry_pause_s
from swarm_node.engine.client import Choose
from swarm_node.engine.pool import EnginePool
from swarm_node.engine.throughput import SampleWork
from swarm_node.versions.fetcher import HeldVersion
from swarm_node.versions.follower import PolicyFollower
from swarm_node.work.engine_turn import EngineTurn

log = logging.getLogger(__name__)

VERSION_FAILURES_MAX = 4
"""Failures in a row with one version; then the node waits for the next version, and uses no power meanwhile."""

ENGINE_FAILURES_MAX = 2 * VERSION_FAILURES_MAX
"""Failures in a row with any versions; a machine that fails this often needs its owner."""

CRASH_PAUSES_S = (0.0, 2.0, 10.0, 30.0)
"""Pauses after the first, second … failure of the engine in a row: an overheated card or a restarting driver needs
time."""


class VersionUnusable(EngineFailed):
    """The engine failed repeatedly with this version; the node waits for the next one."""

    code = "version_unusable"


class VersionFailures:
    """Failures of the engine since the last group that ended."""

    def __init__(self) -> None:
        self._count = 0
        self._suspect: HeldVersion | None = None
        """The version with which the engine last failed."""
        self._suspect_count = 0

    @property
    def pause_s(self) -> float:
        """Pause after the last failure, in seconds."""
        return retry_pause_s(self._count - 1, CRASH_PAUSES_S)

    def reset(self) -> None:
        """Record that a group has ended."""
        self._count = self._suspect_count = 0

    def is_unusable(self, policy: HeldVersion) -> bool:
        """Return True if the engine has failed too often with this version."""
        return policy == self._suspect and self._suspect_count >= VERSION_FAILURES_MAX

    def count(self, error: SwarmError, policy: HeldVersion | None) -> SwarmError | None:
        """Count a failure; return the error for the owner, or None for other groups of an unusable version.

        Raise an error after `ENGINE_FAILURES_MAX` failures.
        """
        log.error("engine failed times=%d: %s", self._count + 1, error)
        if policy is not None and self.is_unusable(policy):
            return None
        self._count += 1
        if policy is not None and not isinstance(error, EngineNotStarted):  # of which no version is the reason
            self._suspect_count = self._suspect_count + 1 if policy == self._suspect else 1
            self._suspect = policy
            error = self._unusable(policy, error) if self.is_unusable(policy) else error
        if self._count >= ENGINE_FAILURES_MAX:
            raise EngineFailed(
                f"The engine failed {self._count} times in a row; the last time: {error.message}",
                hint=f"{error.hint} Run `swarm-node doctor` to test every engine.".strip(),
            ) from error
        return error

    def _unusable(self, policy: HeldVersion, error: SwarmError) -> VersionUnusable:
        return VersionUnusable(
            f"Version {policy.manifest.version} cannot be used: the engine failed {self._suspect_count} times with "
            f"it. The last time: {error.message} The node waits for the next version.",
            hint="Run `swarm-node doctor` to test every engine; if they work, report this to the operator.",
        )


class RoundEngine:
    """The engine of one round's worker."""

    def __init__(
        self, pool: EnginePool, turn: EngineTurn, policies: PolicyFollower, choose: Choose | None = None
    ) -> None:
        self.pool = pool
        self.turn = turn
        self._policies = policies
        self._choose = choose
        """Chooses the engine for the versions of this round; None: the pool's choice."""
        self._last_loaded: HeldVersion | None = None
        self._changes_at_load = 0
        """Value of `turn.changes` when that was loaded."""
        self.is_new = True
        """True until the first load of a version of this round has ended, with or without success."""
        self.numerics = ""
        """Class of numerics; empty before the first load."""
        self.continues = False
        """True if the engine can continue samples that another node began."""

    @property
    def loaded(self) -> HeldVersion | None:
        """The version of this round in the engine, if there is one."""
        return self._last_loaded if self.turn.changes == self._changes_at_load else None

    @property
    def version(self) -> int:
        """The number of that version; 0 if there is none."""
        return self.loaded.manifest.version if self.loaded else 0

    @property
    def name(self) -> str:
        """Name of the engine; empty if no version of this round is in it."""
        return self.pool.name if self.loaded else ""

    @property
    def tokens_per_s(self) -> float:
        """The speed with this round's model, of the cards that may work now; 0 before the first measurement."""
        return self.pool.speed_with(self._choose)

    async def load(self, policy: HeldVersion) -> bool:
        """Load a version; return False if it became too old before it could be loaded."""
        if not self._policies.hold_versions(policy, self.loaded):
            return False
        self._last_loaded = None
        self._changes_at_load = self.turn.changes
        warm_up = SampleWork.first(policy.manifest.task, policy.manifest.sampler)
        try:
            loaded = await self.pool.load(policy.folder, policy.manifest.version, warm_up, self._choose)
        finally:
            self.is_new = False
        self._last_loaded, self.numerics, self.continues = policy, loaded.numerics, loaded.continues
        self._policies.hold_versions(policy)
        self._policies.milestones.passed(policy.manifest.version, "loaded")
        update = policy.manifest.update
        log.info("version loaded version=%d update=%d seconds=%.2f", self.version, update, loaded.seconds)
        return True

    async def unload(self) -> None:
        """Free the memory of the engine until the next load."""
        self._last_loaded = None
        await self.pool.rest()
