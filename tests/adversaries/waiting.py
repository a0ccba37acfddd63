"""Patience: honest work until little is audited, then forgeries; and fresh identities after a ban."""

from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from coordinator.rules import trust
from coordinator.transactions import standings
from ledger import drawing, store
from ledger.entry import Reveal
from protocol.policy import chunks
from protocol.work.auditing import Found
from protocol.work.lease import Lease
from protocol.work.rollout import pack_logprobs
from tests.adversaries.forging import Canned
from tests.adversaries.nodes import Samples
from tests.coordinator.world import PRICE

if TYPE_CHECKING:
    from tests.adversaries.arena import Arena

VARIANTS_MAX = 16


class Sleeper(Canned):
    """Works until the least is audited that a young owner can reach; then forges every so many groups."""

    attack = "sleeper: 200 honest groups, then only forgeries"
    sleeps: ClassVar[int] = 200
    every: ClassVar[int] = 1

    def __init__(self, arena: "Arena", number: int) -> None:
        super().__init__(arena, number)
        self._places: dict[str, int] = {}
        """Leases, in the order in which they came."""

    def weights(self, lease: Lease) -> Path | None:
        return None if self.cheats(lease) else self.arena.policy(lease.version)

    def cheats(self, lease: Lease) -> bool:
        awake = self._places.setdefault(lease.lease_id, len(self._places)) - self.sleeps
        return awake >= 0 and awake % self.every == 0


class RareSleeper(Sleeper):
    attack = "sleeper: 200 honest groups, then one forgery in 20"
    every = 20


class Predicting(Sleeper):
    """Words each forgery so that the last secret that was revealed would not have drawn it."""

    attack = "audit prediction: a sleeper that goes by revealed secrets"

    def forge(self, lease: Lease, said: Samples) -> Samples:
        world = self.arena.world
        entries = (row.entry for row in world.run(store.entries, 0, 100_000))
        revealed = [entry.secret for entry in entries if isinstance(entry, Reveal)]
        rate = trust.rate_ppm(world.run(standings.find_standing, self.key.node_id), world.audits.settings)
        first, *rest = super().forge(lease, said)
        logprobs = np.frombuffer(first.logprobs, "<f4")
        variants = (
            (first.model_copy(update={"logprobs": pack_logprobs((logprobs - 1e-6 * nudge).tolist())}), *rest)
            for nudge in range(VARIANTS_MAX)
        )
        unseen = (
            made
            for made in variants
            if revealed and not drawing.is_drawn(revealed[-1], chunks.digest(self.claim(lease, made)), rate)
        )
        return next(unseen, (first, *rest))


class Whitewasher(Canned):
    """Forges, and comes back under a new key whenever it is banned."""

    attack = "whitewashing: forgeries, and a new key after every ban"

    def ask(self) -> tuple[Lease, ...]:
        leases = super().ask()
        if self.banned:
            self.banned = False
            self.keys.append(self.arena.world.join(1_000 * self.number + len(self.keys), PRICE))
        return leases


class ManyKeys(Sleeper):
    """Works under each key until not everything is audited, forges until it is found, and goes on under the next."""

    attack = "sybil: 12 honest groups and then forgeries under each of many keys"
    sleeps = 12
    found = False

    def ask(self) -> tuple[Lease, ...]:
        if self.found:
            self.found = False
            self._places.clear()
            self.keys.append(self.arena.world.join(1_000 * self.number + len(self.keys), PRICE))
        return super().ask()

    def hear(self, finding: Found) -> None:
        super().hear(finding)
        self.found |= finding == "hard"
