"""Decisions about when the worker requests more leases, and which of the offered leases it begins.

A lease is begun unless it has expired, cannot be met in time, or pays less than the owner's floor:

- The others are returned at once, so that another node gets them sooner.
- No I/O. The clock is the coordinator's, estimated from its answers: leases expire by that clock.
- The duration of work is estimated from this node's own groups; before the first has ended, a lease counts as the
  minimum: one token for each sample.
- Leases are completed in the order in which they arrived, all together at the measured rate.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import trio

from protocol import limits
from protocol.text.money import unitless_price
from protocol.work.lease import Lease

REQUEST_PAUSE_S = 1.0
"""Pause after a request for work, before another request for less than half of the groups: short groups share
requests."""


class LeasePacing:
    """Timing of lease requests, for engines that run `groups()` groups at once, within the protocol's limit."""

    def __init__(self, groups: Callable[[], int]) -> None:
        self._groups = groups
        self._pause_ends = self._additional_pause_ends = self._requested_at = 0.0

    @property
    def _groups_at_once(self) -> int:
        return min(self._groups(), limits.LEASES_PER_REQUEST_MAX)

    @property
    def pause_s(self) -> float:
        """Remaining time without requests, in seconds."""
        return max(0.0, self._pause_ends - trio.current_time())

    def pause(self, seconds: float) -> None:
        """Request no work for `seconds`; running groups continue."""
        self._pause_ends = trio.current_time() + seconds

    def pause_additional(self, seconds: float) -> None:
        """Request no additional work for `seconds`; once nothing runs, there may be a newer version to work on."""
        self._additional_pause_ends = trio.current_time() + seconds

    def free_groups(self, running: int) -> int:
        """Return the number of groups to request."""
        return self._groups_at_once - running

    def record_request(self) -> None:
        """Record that a request was answered."""
        self._requested_at = trio.current_time()

    def is_due(self, running: int) -> bool:
        """Return True if a request is due: half of the groups have ended, or some have and the pause is over."""
        due = self._requested_at if running <= self._groups_at_once // 2 else self._requested_at + REQUEST_PAUSE_S
        return self.free_groups(running) > 0 and trio.current_time() >= max(
            due, self._pause_ends, self._additional_pause_ends
        )


class NodePace(NamedTuple):
    """Measured pace of this node."""

    tokens_per_s: float = 0.0
    """0 means unknown, so nothing is too slow."""
    tokens_per_sample: float = 1.0


class Sorted(NamedTuple):
    """An offer of leases, sorted into those to begin and those to return."""

    begun: tuple[Lease, ...]
    declined: tuple[str, ...]
    """Lease ids."""
    why: str = ""
    """Reason for the first declined lease."""


def sort_out(leases: Sequence[Lease], *, now_ms: int, pace: NodePace, price_floor: int) -> Sorted:
    """Sort the offered leases into those to begin and those to decline."""
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
        price, floor = unitless_price(lease.price_micros_per_mtok), unitless_price(price_floor)
        return f"it pays {price} per million tokens, your minimum is {floor} (both in the round's unit)"
    if left_s <= 0:
        return f"it expired {-left_s:.1f} s ago by the coordinator's clock"
    needed_s = tokens / pace.tokens_per_s if pace.tokens_per_s else 0.0
    if needed_s > left_s:
        return f"it would take {needed_s:.0f} s at {pace.tokens_per_s:.0f} tokens/s, but expires in {left_s:.0f} s"
    return ""


def _tokens(lease: Lease, pace: NodePace) -> float:
    """Return the estimated number of tokens left to sample for a lease."""
    done = sum(1 for prefix in lease.prefixes if prefix.finish)
    own = min(pace.tokens_per_sample, lease.turn_tokens_max or lease.tokens_max or pace.tokens_per_sample)
    return (lease.samples - done) * max(1.0, own)
