"""Nodes of the arena: an honest one, and one that cheats whenever its plan says so."""

from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from protocol.errors import OwnerBanned
from protocol.wire.signing import NodeKey
from protocol.work.auditing import Found
from protocol.work.lease import Lease, is_exact
from protocol.work.messages import Verdict
from protocol.work.rollout import RolloutClaim, Sample
from tests.coordinator.world import PRICE, ROUND

if TYPE_CHECKING:
    from tests.adversaries.arena import Arena

Samples = tuple[Sample, ...]


class Node:
    """An honest node."""

    wants: ClassVar[int] = 4
    """Groups that it asks for in a turn."""

    def __init__(self, arena: "Arena", number: int) -> None:
        self.arena = arena
        self.number = number
        self.keys = [arena.world.join(number, PRICE)]
        """All that it had; the last one works."""
        self.banned = False
        self.given = 0
        """Leases that it had."""
        self.accepted = 0
        self.cheated: set[str] = set()
        """Leases that it did not work for."""
        self.noticed_after: int | None = None
        """The number of cheats that it had sent when the first was found."""
        self.hard_faults = 0
        self.codes: list[str] = []
        """The reasons for which answers were rejected."""

    @property
    def key(self) -> NodeKey:
        return self.keys[-1]

    def ask(self) -> tuple[Lease, ...]:
        """Leases to work on in this turn."""
        try:
            world, version = self.arena.world, self.arena.version
            leases = world.offer(
                self.key, version=version, groups=self.wants, continues=True, numerics=self.arena.stage.tolerance
            ).leases
        except OwnerBanned:
            self.banned = True
            return ()
        self.given += len(leases)
        return leases

    def weights(self, lease: Lease) -> Path | None:
        """The policy folder that it samples a lease with; None if it samples nothing."""
        return self.arena.policy(lease.version)

    def work(self, lease: Lease, said: Samples) -> None:
        """Answer a lease, of which its weights have made this."""
        self.submit(lease, said)

    def submit(self, lease: Lease, samples: Samples) -> Verdict:
        return self.send(self.key.seal("rollout", self.claim(lease, samples)))

    def claim(self, lease: Lease, samples: Samples) -> bytes:
        claim = RolloutClaim(round_id=ROUND, lease_id=lease.lease_id, lease_digest=lease.digest, samples=samples)
        return claim.to_bytes()

    def send(self, envelope: bytes) -> Verdict:
        verdict = self.arena.world.submit(self.key, envelope)
        self.accepted += verdict.outcome == "accepted"
        if verdict.outcome == "rejected":
            self.codes.append(verdict.code)
            self._was_noticed()
        return verdict

    def hear(self, finding: Found) -> None:
        """Record the finding of an audit of one of its claims."""
        if finding == "hard":
            self.hard_faults += 1
            self._was_noticed()

    def _was_noticed(self) -> None:
        if self.noticed_after is None:
            self.noticed_after = len(self.cheated)


class Adversary(Node):
    """A node that forges what it is asked for, always or as `cheats` says."""

    attack: ClassVar[str]
    """The name in the table."""

    def cheats(self, lease: Lease) -> bool:
        """Return True if it cheats with this lease."""
        return True

    def forge(self, lease: Lease, said: Samples) -> Samples:
        """Return the forged samples for a lease."""
        raise NotImplementedError  # who cheats by `work` itself, with leases and not with answers, forges nothing

    def work(self, lease: Lease, said: Samples) -> None:
        if self.cheats(lease):
            forged = self.forge(lease, said)
            self.cheated.update([] if self._worked(lease, said, forged) else [lease.lease_id])
            said = forged
        self.submit(lease, said)

    def _worked(self, lease: Lease, said: Samples, forged: Samples) -> bool:
        """Return True if the answer is that of honest work; in the exact class, if its tokens are."""
        policy = self.arena.policy(lease.version)
        if self.weights(lease) == policy:
            return _tokens(forged) == _tokens(said)
        return is_exact(self.arena.stage.tolerance) and _tokens(forged) == _tokens(self.arena.sample(policy, lease))


def _tokens(samples: Samples) -> list[bytes]:
    return [sample.tokens for sample in samples]
