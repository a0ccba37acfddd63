"""Numbers behind the picker's rules, and what a plan says about time; seconds, chunks and factors."""

from dataclasses import dataclass
from typing import Self


@dataclass(frozen=True)
class PickerRules:
    """The numbers behind the rules above."""

    window: int = 2
    """Chunks that a source can send at once and was asked for: one under way, one behind it."""
    window_max: int = 8
    """One more where a link falls idle between two chunks, because the next WANT is still on its way."""
    gap: float = 0.1
    """As a share of the usual time between two chunks: what counts as idle."""
    fluent: int = 16
    """Chunks without such a gap, after which one less is asked for."""
    waits: int = 4
    """Chunks that a parent was asked for and does not hold yet."""
    behind: float = 0.02
    """As a share of what was missing at the start: who has less than others by more than that asks whom it can."""
    behind_chunks: int = 3
    ahead: float = 1.1
    """How many times sooner a source must be done to take over from another, and by how much at the least."""
    ahead_s: float = 0.3
    slow: float = 1.2
    """A source that takes this many times longer to answer than the others do takes nothing over."""
    confirm_s: float = 2.0
    """To wait for the word that a chunk will not come from whom it was taken back from."""
    overdue_s: float = 3.0
    """At the least, before a second source is asked."""
    overdue_factor: float = 4.0
    last_overdue_s: float = 0.5
    last_overdue_factor: float = 1.5
    """The same once every chunk is asked of somebody: from then on links have time to spare."""
    silence_s: float = 0.6
    """At the least, before a source that does not say a word loses its turn: more than a HAVE takes to be due, and than
    a lost packet on a usual link."""
    sample: int = 8
    """Chunks looked at when one is chosen by chance."""
    outlook: int = 64
    """Chunks planned of the seeder among which the next is chosen."""
    survey_s: float = 0.05
    look_s: float = 0.25
    """How often to look whether somebody has fallen behind."""
    first_word_s: float = 1.0
    """For a source to deliver its first chunk, at the least, before nothing is expected of it any more."""
    origin_patience_s: float = 4.0
    pause_s: float = 0.05
    pause_max_s: float = 1.0
    failure_pause_s: float = 0.5
    failure_pause_max_s: float = 10.0
    """A parent that restarts is back soon after; and of a thousand children a hundred knock each second meanwhile."""
    strikes_max: int = 4
    give_up_s: float = 60.0


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
    def from_plan(cls, chunk_bytes: int, *, stripes: int, rate: float, hops: int, help_rate: float) -> Self:
        """What a plan's numbers mean for chunks of this size."""
        hop_s = min(chunk_bytes * stripes / rate, HOP_MAX_S) if rate and hops > 2 else 0.0
        return cls(hop_s, max(0, hops - 2) * hop_s, chunk_bytes / help_rate if help_rate else 0.0)
