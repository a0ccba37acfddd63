"""What a plan says about time: how long a chunk may take to come, and how often the seeder may be asked to help."""

from dataclasses import dataclass
from typing import Self

HOP_MAX_S = 30.0
"""A plan that takes links for slower than this must not make anybody wait so long."""


@dataclass(frozen=True)
class PlanPace:
    """For chunks of one size; without a plan nothing is far away, and the seeder helps freely."""

    hop_s: float = 0.0
    """For a chunk to pass one uplink of its tree, at the rate of one stripe; 0 in a small swarm."""
    lag_s: float = 0.0
    """How much longer a chunk is on its way than in a small swarm, where nobody is more than two uplinks away."""
    help_s: float = 0.0
    """Between two chunks asked of the seeder beyond its part."""

    @classmethod
    def of(cls, chunk_bytes: int, *, stripes: int, rate: float, hops: int, help_rate: float) -> Self:
        """What a plan's numbers mean for chunks of this size."""
        hop_s = min(chunk_bytes * stripes / rate, HOP_MAX_S) if rate and hops > 2 else 0.0
        return cls(hop_s, max(0, hops - 2) * hop_s, chunk_bytes / help_rate if help_rate else 0.0)
