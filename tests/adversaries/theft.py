"""Key theft: somebody has a copy of the key of a node that works, and its owner revokes it once a forgery is found.

- The rightful machine goes on beside the thief, under the same key; after the revocation under a new one.
- The thief first tries to have the node, its address or its pay; forges; and keeps a lease for the time after.
- What its forgeries earned would be the owner's: the gain of these rows is the owner's, whose work a fault takes.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING

from protocol.errors import SwarmError
from protocol.people.owner import Revocation
from protocol.work.auditing import Found
from protocol.work.lease import Lease
from protocol.work.rollout import unpack_tokens
from tests.adversaries.nodes import Samples
from tests.adversaries.waiting import Sleeper
from tests.coordinator.transactions.test_owners import DELAY_MS, THIEF, address, delegate, say
from tests.coordinator.world import PRICE, fragment

if TYPE_CHECKING:
    from tests.adversaries.arena import Arena


class KeyThief(Sleeper):
    """Forges one group in four, so that its owner may hear of the first before there is a second."""

    attack = "key theft: one forgery in 4 under a stolen key, until it is revoked"
    sleeps = 12
    every = 4

    def __init__(self, arena: "Arena", number: int) -> None:
        super().__init__(arena, number)
        self.stolen = self.key
        self.kept: Lease | None = None
        self.found = False
        delegate(arena.world, self.stolen)
        say(arena.world, address(2))
        arena.world.now_ms += DELAY_MS

    def cheats(self, lease: Lease) -> bool:
        return self.key is self.stolen and super().cheats(lease)

    def ask(self) -> tuple[Lease, ...]:
        if self.given == 0:
            self.grab()
        if self.found and self.key is self.stolen:
            self.revoke()
            self.come_back()
        return super().ask()

    def grab(self) -> None:
        """Try the actions that a node's key does not allow."""
        world = self.arena.world
        self.is_refused("owner", lambda: delegate(world, self.stolen, THIEF, number=3))
        self.is_refused("address", lambda: say(world, address(4, "text:thief"), self.stolen))
        self.is_refused("address by another owner", lambda: say(world, address(4, "text:thief"), THIEF))
        self.is_refused(
            "revocation", lambda: say(world, Revocation(node_id=self.stolen.node_id, number=5), self.stolen)
        )

    def revoke(self) -> None:
        """Revoke the key, as the owner does after reading why the node lost its pay."""
        world = self.arena.world
        say(world, Revocation(node_id=self.stolen.node_id, number=6))
        self.keys.append(world.join(1_000 * self.number, PRICE))
        delegate(world, self.key, number=7)

    def come_back(self) -> None:
        """Try to ask, report and answer with a revoked key, and to move it to another owner."""
        world, kept = self.arena.world, self.kept
        self.is_refused("lease", lambda: world.offer(self.stolen, version=self.arena.version))
        self.is_refused("delegation", lambda: delegate(world, self.stolen, THIEF, number=8))
        if kept is None:
            return
        self.cheated.add(kept.lease_id)
        forged = self.forge(kept, ())
        fragments = {number: unpack_tokens(sample.tokens).tolist()[:1] for number, sample in enumerate(forged)}
        assert not world.tell(self.stolen, fragment(self.stolen, kept, fragments)).taken
        verdict = world.submit(self.stolen, self.stolen.seal("rollout", self.claim(kept, forged)))
        assert verdict.outcome == "rejected"
        self.codes.append(verdict.code)

    def is_refused(self, what: str, act: Callable[[], object]) -> None:
        self.cheated.add(what)
        try:
            act()
        except SwarmError as refusal:
            self.codes.append(refusal.code)
            self._was_noticed()
        else:
            raise AssertionError(f"a thief of a node's key has its {what}")

    def work(self, lease: Lease, said: Samples) -> None:
        if self.cheats(lease) and self.kept is None:
            self.kept = lease
        else:
            super().work(lease, said)

    def hear(self, finding: Found) -> None:
        super().hear(finding)
        self.found |= finding == "hard"


class GreedyThief(KeyThief):
    """Forges all it is given, and is found out before the owner can have heard of it."""

    attack = "key theft: nothing but forgeries under a stolen key"
    every = 1

    def hear(self, finding: Found) -> None:
        super().hear(finding)
        self.found = False  # the ban comes before a revocation, and a banned owner gets no other node
