"""Decides when the worker requests more leases, and which of the offered ones it begins.

A lease is begun unless it has expired, cannot be met in time, or pays less than the owner's floor:

- The others go back at once, declared, so that somebody else has them sooner.
- Pure. The clock is the coordinator's, as its answers tell it: leases end by that one.
- How long work takes is known from this node's own groups; before the first has ended, a lease counts as the least that
  it can be: a token for each sample.
- Leases are met in the order in which they came, all at the measured rate together.
"""

from collections.abc import Sequence
from typing import NamedTuple

import trio

from protocol.work.lease import Lease

ASK_AGAIN_S = 1.0
"""After a request for work, before another for less than half of the groups: short ones share requests."""


class LeasePacing:
    """Of an engine that runs so many groups at once."""

    def __init__(self, groups: int) -> None:
        self._groups = groups
        self._pause_ends = self._refusal_ends = self._asked = 0.0

    @property
    def pause_s(self) -> float:
        """How much longer to hold back."""
        return max(0.0, self._pause_ends - trio.current_time())

    def pause(self, seconds: float) -> None:
        """Ask for no work for so long; what is being sampled goes on."""
        self._pause_ends = trio.current_time() + seconds

    def refused(self, seconds: float) -> None:
        """Ask for no more beside what runs for so long; once nothing runs there may be a newer version to ask for."""
        self._refusal_ends = trio.current_time() + seconds

    def room(self, running: int) -> int:
        """Groups to ask for."""
        return self._groups - running

    def record_request(self) -> None:
        """A request was answered."""
        self._asked = trio.current_time()

    def is_due(self, running: int) -> bool:
        """Whether to ask now: half of the groups have ended, or some, and it is a while since the last request."""
        due = self._asked if running <= self._groups // 2 else self._asked + ASK_AGAIN_S
        return self.room(running) > 0 and trio.current_time() >= max(due, self._pause_ends, self._refusal_ends)


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
        return f"it pays {lease.price_micros_per_mtok} micro-units per million tokens, your minimum is {price_floor}"
    if left_s <= 0:
        return f"it expired {-left_s:.1f} s ago by the coordinator's clock"
    needed_s = tokens / pace.tokens_per_s if pace.tokens_per_s else 0.0
    if needed_s > left_s:
        return f"it would take {needed_s:.0f} s at {pace.tokens_per_s:.0f} tokens/s, but expires in {left_s:.0f} s"
    return ""


def _tokens(lease: Lease, pace: NodePace) -> float:
    """What is left to sample of a lease, as far as one can tell."""
    done = sum(1 for prefix in lease.prefixes if prefix.finish)
    return (lease.samples - done) * max(1.0, pace.tokens_per_sample)
