"""The engine as one round uses it: the round's turn at the engine, and the round's version in it.

- An agent in several rounds has one engine. Once another round has acquired it, nothing of this round is loaded.
- The files of the version in the engine, and of the one being loaded, are kept (`hold_versions`).
- The first load shows the class of numerics, without which no lease can be requested.
- Rounds may have models of different speeds: the cards remember that of each round (`EnginePool.speed_with`).
"""

import logging

from swarm_node.engine.client import Choose
from swarm_node.engine.pool import EnginePool
from swarm_node.engine.throughput import SampleWork
from swarm_node.versions.fetcher import HeldVersion
from swarm_node.versions.follower import PolicyFollower
from swarm_node.work.engine_turn import EngineTurn

log = logging.getLogger(__name__)


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
