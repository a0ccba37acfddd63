"""Other weights than those that were leased: a small model, a rounded one, an old one.

- Undisguised, a claim has the log-probabilities of what it was drawn from.
- *Prefilled*, it has those of the claimed version: only the tokens betray it.
"""

from pathlib import Path
from typing import ClassVar

from bench.verification.cheats import quantised
from coordinator.learner.policy import TrainedPolicy
from coordinator.learner.settings import TrainSettings
from protocol.work.lease import Lease
from protocol.work.rollout import unpack_tokens
from tests.adversaries.nodes import Adversary, Samples
from tests.tiny_policy import with_canary


class OtherWeights(Adversary):
    """Samples faithfully, from the wrong policy."""

    prefilled: ClassVar[bool] = False

    def forge(self, lease: Lease, said: Samples) -> Samples:
        if not self.prefilled:
            return said
        return self.arena.prefilled(lease, [unpack_tokens(sample.tokens).tolist() for sample in said])


class Rounded(OtherWeights):
    """Holds the claimed version in a few bits."""

    bits: ClassVar[int]

    def weights(self, lease: Lease) -> Path:
        return rounded(self.arena.policy(lease.version), self.bits)


class FourBits(Rounded):
    attack = "quantised: 4 bits"
    bits = 4


class FourBitsPrefilled(FourBits):
    attack = "quantised: 4 bits, prefilled"
    prefilled = True


class EightBits(Rounded):
    attack = "quantised: 8 bits"
    bits = 8


class EightBitsPrefilled(EightBits):
    attack = "quantised: 8 bits, prefilled"
    prefilled = True


class Small(OtherWeights):
    """Runs a policy that costs it less."""

    attack = "another model"

    def weights(self, lease: Lease) -> Path:
        return self.arena.stage.other


class SmallPrefilled(Small):
    attack = "another model, prefilled"
    prefilled = True


class Stale(OtherWeights):
    """Keeps the version before."""

    attack = "stale: the version before"

    def weights(self, lease: Lease) -> Path:
        return self.arena.policy(lease.version - 1) if lease.version > 1 else self.arena.policy(1)

    def cheats(self, lease: Lease) -> bool:
        return lease.version > 1


class StalePrefilled(Stale):
    attack = "stale: the version before, prefilled"
    prefilled = True


def rounded(policy: Path, bits: int) -> Path:
    """The policy with its matrices in so many bits, beside it; made once."""
    folder = policy.with_name(f"{policy.name}-{bits}bit")
    if not folder.exists():
        whole = TrainedPolicy(policy, TrainSettings(learning_rate=1e-6))
        whole.model = quantised(whole.model, bits)
        whole.writer.save_hub(folder)
        with_canary(folder)
    return folder
