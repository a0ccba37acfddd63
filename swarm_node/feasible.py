"""Which leases on offer are begun: none that expired, cannot be met in time, or pays less than the owner's floor.

- The others go back at once, declared, so that somebody else has them sooner.
- Pure. The clock is the coordinator's, as its answers tell it: leases end by that one.
- How long work takes is known from this node's own groups; before the first has ended, a lease counts as the least that
  it can be: a token for each sample.
- Leases are met in the order in which they came, all at the measured rate together.
"""

from collections.abc import Sequence
from typing import NamedTuple

from protocol.lease import Lease


class NodePace(NamedTuple):
    """How fast this node works."""

    tokens_per_s: float = 0.0
    """0: not known yet, so nothing is too slow."""
    tokens_per_sample: float = 1.0


class Sorted(NamedTuple):
    """What to do with an offer."""

    begun: tuple[Lease, ...]
    declined: tuple[str, ...]
    """Lease ids."""
    why: str = ""
    """Of the first that was declined."""


def sort_out(leases: Sequence[Lease], *, now_ms: int, pace: NodePace, price_floor: int) -> Sorted:
    """Take an offer apart."""
    begun: list[Lease] = []
    declined: dict[str, str] = {}
    tokens = 0.0
    for lease in leases:
        own = _tokens(lease, pace)
        why = _against(lease, tokens + own, now_ms, pace, price_floor)
        if why:
            declined[lease.lease_id] = why
        else:
            begun.append(lease)
            tokens += own
    return Sorted(tuple(begun), tuple(declined), next(iter(declined.values()), ""))


def _against(lease: Lease, tokens: float, now_ms: int, pace: NodePace, price_floor: int) -> str:
    left_s = (lease.expires_ms - now_ms) / 1000
    if lease.price_micros_per_mtok < price_floor:
        return f"it pays {lease.price_micros_per_mtok}, and your floor is {price_floor}"
    if left_s <= 0:
        return f"it expired {-left_s:.1f} s ago by the coordinator's clock"
    needed_s = tokens / pace.tokens_per_s if pace.tokens_per_s else 0.0
    if needed_s > left_s:
        return f"it would take {needed_s:.0f} s at {pace.tokens_per_s:.0f} tokens/s, and ends in {left_s:.0f} s"
    return ""


def _tokens(lease: Lease, pace: NodePace) -> float:
    """What is left to sample of a lease, as far as one can tell."""
    done = sum(1 for prefix in lease.prefixes if prefix.finish)
    return (lease.samples - done) * max(1.0, pace.tokens_per_sample)
