"""The number of groups that a node may hold: as many as it has shown to finish in time. Pure.

- An allowance doubles with every lease that its node answers and falls by one with every lease that it does not. So a
  node whose leases expire soon has an allowance of one, and a node that answers soon has the largest.
- An allowance falls below 0 if more leases expire: the node is then given one lease to try, after a wait that doubles
  each time. If all leases of a node expire at once, as in an outage, it need not wait.
- The measured speed is a second limit: a node holds no more groups than it finishes in a part of a lease's time.
- A lease that the coordinator cancelled changes nothing.

Admission on the visible version says how many groups a node may start with the policy that it has loaded. With S the
staleness bound, B the groups per update, and u the update of the version *that node* would sample with, a group may
start only while

    (S + u + 1) · B − issued > 0

where *issued* counts every group that is trained, accepted or in flight. The batch that leads to update n + 1 takes
groups in order of their version, so a group of update u enters at latest the batch S + u + 1, formed when the learner
stands at update S + u: its staleness is then at most S. No sample is wasted, however slow the learner is.

Echo's replay buffer is the other way: a group may start for any version that is not too old yet, as long as there is
room in a buffer of `buffered_max` updates. Nodes never pause, and groups that become too old on the way are wasted.

A group that fails frees its place. Groups that still arrive too late, since a node was slow, are refused at intake and
when a batch is formed.
"""

from collections.abc import Sequence
from typing import Protocol

from protocol.work.lease import LeaseEvent


def admissible_groups(*, staleness: int, groups_per_update: int, visible_update: int, issued_groups: int) -> int:
    """Return how many more groups may start for a node that holds the version of `visible_update`."""
    return max(0, (staleness + visible_update + 1) * groups_per_update - issued_groups)


def room_in_buffer(*, buffered_max: int, groups_per_update: int, unfinished_groups: int) -> int:
    """Return how many more groups may start if they only have to fit into the buffer."""
    return max(0, buffered_max * groups_per_update - unfinished_groups)


def is_stale(*, staleness: int, policy_update: int, learner_update: int) -> bool:
    """Return True if a rollout of `policy_update` is too old for a learner that has reached `learner_update`."""
    return learner_update - policy_update > staleness


MEASURED_MIN = 4
"""The fewest answers whose times are used."""

MEASURED_MAX = 16
"""The number of last answers whose times are used."""

IN_TIME = 0.5
"""The part of a lease's time in which its node should finish: lengths vary."""

MISSED_MAX = 6
"""The number of expired leases with the longest wait: half an hour if a lease lasts a minute."""


class Answered(Protocol):
    """A lease whose answer was accepted."""

    @property
    def issued_ms(self) -> int: ...
    @property
    def ended_ms(self) -> int: ...


def allowance_after(allowance: int, event: LeaseEvent, *, most: int) -> int:
    """Return how many leases a node may hold after one of its leases ended by `event`."""
    if event is LeaseEvent.ACCEPT:
        return min(most, 2 * max(1, allowance))
    if event is LeaseEvent.EXPIRE:
        return max(-MISSED_MAX, min(most, allowance) - 1)
    if event in (LeaseEvent.REJECT, LeaseEvent.SKIP):
        return max(min(1, allowance), min(most, allowance) - 1)
    return allowance


def wait_ms(misses: int, *, timeout_ms: int) -> int:
    """Return how long a node gets no lease after the last of `misses` leases expired, in milliseconds."""
    return int(timeout_ms * 2 ** (min(misses, MISSED_MAX) - 1)) if misses > 0 else 0


def groups_in_time(answered: Sequence[Answered], *, timeout_ms: int) -> int | None:
    """Return how many groups a node finishes in a part of a lease's time, at least 1; None before that is known."""
    if len(answered) < MEASURED_MIN:
        return None
    busy_ms, busy_until = 0, 0
    for answer in sorted(answered, key=lambda answer: answer.issued_ms):
        busy_ms += max(0, answer.ended_ms - max(answer.issued_ms, busy_until))
        busy_until = max(busy_until, answer.ended_ms)
    if not busy_ms:
        return None
    return max(1, int(IN_TIME * timeout_ms * len(answered) / busy_ms))
