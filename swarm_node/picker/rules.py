"""Numbers of the picker's rules, and the timing of a plan; units are seconds, chunks and factors."""

from dataclasses import dataclass
from typing import Self


@dataclass(frozen=True)
class PickerRules:
    """Numbers of the picker's rules."""

    window: int = 2
    """Outstanding chunks that a source can send: one under way, one behind it."""
    window_max: int = 8
    """Upper limit of the window, which grows by 1 when a link is idle between two chunks."""
    gap: float = 0.1
    """Pause that counts as idle, as a share of the usual time between two chunks."""
    fluent: int = 16
    """Chunks without such a gap, after which the window shrinks by 1."""
    waits: int = 4
    """Outstanding chunks that a parent does not hold yet."""
    behind: float = 0.02
    """Share of the chunks missing at the start: a node that is behind others by more asks every source."""
    behind_chunks: int = 3
    ahead: float = 1.1
    """Factor by which a source must finish sooner to take over from another; `ahead_s` is the smallest difference."""
    ahead_s: float = 0.3
    slow: float = 1.2
    """A source whose answers take longer than the others' by this factor takes nothing over."""
    confirm_s: float = 2.0
    """Longest wait for the confirmation of a CANCEL."""
    overdue_s: float = 3.0
    """Shortest time before a second source is asked."""
    overdue_factor: float = 4.0
    last_overdue_s: float = 0.5
    last_overdue_factor: float = 1.5
    """The same once every chunk is requested: from then on links are idle."""
    silence_s: float = 0.6
    """Shortest silence before a source loses its turn: longer than the pause between HAVEs, and than a lost packet on a
    usual link."""
    sample: int = 8
    """Chunks considered in a random choice."""
    outlook: int = 64
    """Planned chunks of the seeder among which the next is chosen."""
    survey_s: float = 0.05
    look_s: float = 0.25
    """Interval of the check whether a source has fallen behind."""
    first_word_s: float = 1.0
    """Shortest time for a source to deliver its first chunk before it counts as mute."""
    origin_patience_s: float = 4.0
    pause_s: float = 0.05
    pause_max_s: float = 1.0
    failure_pause_s: float = 0.5
    failure_pause_max_s: float = 10.0
    """A parent that restarts is back soon; a thousand children make 100 tries per second meanwhile."""
    strikes_max: int = 4
    give_up_s: float = 60.0


HOP_MAX_S = 30.0
"""Upper limit of `hop_s`, for plans that assume slower links."""


@dataclass(frozen=True)
class PlanPace:
    """Timing of a plan, for chunks of one size; without a plan there is no lag, and the seeder helps freely."""

    hop_s: float = 0.0
    """Time for a chunk to pass one uplink of its tree, at the rate of one stripe; 0 in a small swarm."""
    lag_s: float = 0.0
    """Additional travel time of a chunk compared with a small swarm, where no node is more than two uplinks away."""
    help_s: float = 0.0
    """Pause between two chunks requested from the seeder beyond its part."""

    @classmethod
    def from_plan(cls, chunk_bytes: int, *, stripes: int, rate: float, hops: int, help_rate: float) -> Self:
        """Compute the timing from a plan's numbers, for chunks of `chunk_bytes`."""
        hop_s = min(chunk_bytes * stripes / rate, HOP_MAX_S) if rate and hops > 2 else 0.0
        return cls(hop_s, max(0, hops - 2) * hop_s, chunk_bytes / help_rate if help_rate else 0.0)
