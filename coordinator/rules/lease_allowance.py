"""How many groups a node may hold: as many as it has shown to finish, and to finish in time. Pure.

- An allowance doubles with every lease that its node answers and falls by one with every lease that it does not. So a
  node that claims and lets expire is soon at one, and one that answers is soon at the most.
- Who lets them expire falls further: below 0 it is given one to try, after a wait that doubles with each. All that a
  node held may expire at once, as in an outage, and it need not wait.
- What was measured bounds it besides: a node holds no more than it gives in a part of a lease's time.
- A lease that the coordinator took back counts for nothing.

Admission on the visible version says how many groups a node may start with the policy that it has loaded. With S the
staleness bound, B the groups per update, and u the update of the version *that node* would sample with, a group may
start only while

    (S + u + 1) · B − issued > 0

where *issued* counts every group that is trained, accepted or in flight. The batch that leads to update n + 1 takes
groups in order of their version, so a group of update u enters at latest the batch S + u + 1, formed when the learner
stands at update S + u: its staleness is then at most S. Nothing needs to be thrown away, however slow the learner is.

Echo's replay buffer is the other way: a group may start for any version that is not too old yet, as long as there is
room in a buffer of so many updates' worth. Nodes never pause, and what grows too old on the way was wasted samples.

A group that fails gives its place back. Whatever still arrives too late, since a node was slow, is stopped at intake
and when a batch is formed.
"""

from collections.abc import Sequence
from typing import Protocol

from protocol.work.lease import LeaseEvent


def admissible_groups(*, staleness: int, groups_per_update: int, visible_update: int, issued_groups: int) -> int:
    """How many more groups may start for a node that holds the version of `visible_update`."""
    return max(0, (staleness + visible_update + 1) * groups_per_update - issued_groups)


def room_in_buffer(*, buffered_max: int, groups_per_update: int, unfinished_groups: int) -> int:
    """How many more groups may start where nothing is asked but that they fit into the buffer."""
    return max(0, buffered_max * groups_per_update - unfinished_groups)


def is_stale(*, staleness: int, policy_update: int, learner_update: int) -> bool:
    """Whether a rollout of that version may no longer be trained on by a learner that stands at that update."""
    return learner_update - policy_update > staleness


MEASURED_MIN = 4
"""Answers, before their times say anything."""

MEASURED_MAX = 16
"""The last so many are looked at."""

IN_TIME = 0.5
"""The part of a lease's time that its node is counted on to need: lengths vary."""

MISSED_MAX = 6
"""The longest wait is that of so many: half an hour where a lease lasts a minute."""


class Answered(Protocol):
    """A lease whose answer was accepted."""

    @property
    def issued_ms(self) -> int: ...
    @property
    def ended_ms(self) -> int: ...


def allowance_after(allowance: int, event: LeaseEvent, *, most: int) -> int:
    """How many leases a node may hold after one of its leases ended so."""
    if event is LeaseEvent.ACCEPT:
        return min(most, 2 * max(1, allowance))
    if event is LeaseEvent.EXPIRE:
        return max(-MISSED_MAX, min(most, allowance) - 1)
    if event in (LeaseEvent.REJECT, LeaseEvent.SKIP):
        return max(min(1, allowance), min(most, allowance) - 1)
    return allowance


def wait_ms(misses: int, *, timeout_ms: int) -> int:
    """How long a node gets nothing after it let the last of so many leases expire."""
    return int(timeout_ms * 2 ** (min(misses, MISSED_MAX) - 1)) if misses > 0 else 0


def groups_in_time(answered: Sequence[Answered], *, timeout_ms: int) -> int | None:
    """How many groups a node gives in a part of a lease's time, at least one; None before that is known."""
    if len(answered) < MEASURED_MIN:
        return None
    busy_ms, busy_until = 0, 0
    for one in sorted(answered, key=lambda one: one.issued_ms):
        busy_ms += max(0, one.ended_ms - max(one.issued_ms, busy_until))
        busy_until = max(busy_until, one.ended_ms)
    if not busy_ms:
        return None
    return max(1, int(IN_TIME * timeout_ms * len(answered) / busy_ms))
