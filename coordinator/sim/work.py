"""The groups of a simulated round: their leases and their answers; its clock, its buffer and its payroll.

- Events happen in the order of their times, and those of one moment in the order in which they were scheduled.
- Costs add up between changes: whoever changes who is paid settles the time before.
- A node first gets groups that were begun under its version, then those of the next groups that suit its speed
  (`coordinator.rules.lengths`).
- The next node of the same version continues the part of a group that a lost node has reported; other nodes start
  again.
- A lease without an answer in time ends, and its group is open again, also if its node is still alive.
"""

import heapq
from bisect import insort
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from math import inf
from random import Random
from typing import Any, NamedTuple

from coordinator.rules import lease_allowance, lengths
from coordinator.rules.lengths import WaitingGroup
from coordinator.sim.machines import BOAST, SimulatedGroup, SimulatedLease, SimulatedNode, draw_length, make_group, pace
from coordinator.sim.report import SimulationOutcome, Trace
from coordinator.sim.scenario import Scenario
from coordinator.transactions.leases import LEASES_HELD_FACTOR
from coordinator.transactions.stragglers import LATE, choose
from coordinator.transactions.stragglers import GroupAtWork as Late
from protocol.work.lease import LeaseEvent


class VirtualClock:
    """A clock that moves from event to event, and a hash of the events that have happened."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.scheduled = 0
        """Events so far, whether they have happened or not."""
        self.trace = Trace()
        self._events: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []

    @property
    def is_over(self) -> bool:
        """Return True if nothing more will happen."""
        return not self._events

    def after(self, delay_s: float, happen: Callable[..., None], *subject: Any) -> None:
        """Schedule an event."""
        self.scheduled += 1
        heapq.heappush(self._events, (self.now_s + delay_s, self.scheduled, happen, subject))

    def step(self) -> None:
        """Let the next event happen."""
        self.now_s, _, happen, subject = heapq.heappop(self._events)
        self.trace.add(self.now_s, happen.__name__)
        happen(*subject)


class Accepted(NamedTuple):
    """An accepted group that waits for the learner."""

    group: SimulatedGroup
    node: SimulatedNode


class GroupBuffer:
    """The groups that wait for the learner, by the update of their policy."""

    def __init__(self) -> None:
        self._waiting: defaultdict[int, deque[Accepted]] = defaultdict(deque)
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def add(self, accepted: Accepted, update: int) -> None:
        """Add a group to the end."""
        self._waiting[update].append(accepted)
        self._count += 1

    def remove(self, unwanted: Callable[[Accepted], bool]) -> list[Accepted]:
        """Remove and return groups that are not wanted any more."""
        removed = list[Accepted]()
        for update, waiting in self._waiting.items():
            bad = [accepted for accepted in waiting if unwanted(accepted)]
            if bad:
                self._waiting[update] = deque(accepted for accepted in waiting if not unwanted(accepted))
            removed += bad
        self._count -= len(removed)
        return removed

    def updates(self) -> list[int]:
        """Return the updates of which groups wait."""
        return list(self._waiting)

    def pop(self, update: int) -> deque[Accepted]:
        """Remove and return the groups of an update."""
        popped = self._waiting.pop(update)
        self._count -= len(popped)
        return popped

    def draw(self, count: int) -> list[tuple[int, Accepted]]:
        """Remove and return the oldest groups, at most `count`, each with its update."""
        drawn = list[tuple[int, Accepted]]()
        for update in sorted(self._waiting):
            waiting = self._waiting[update]
            while waiting and len(drawn) < count:
                drawn.append((update, waiting.popleft()))
            if not waiting:
                del self._waiting[update]
        self._count -= len(drawn)
        return drawn


class Payroll:
    """The nodes at work, the cost of these and of the learner per second, and the sum so far."""

    def __init__(self, learner_per_s: float) -> None:
        self.at_work = 0
        self.spent = 0.0
        self._per_s = learner_per_s
        self._paid_until_s = 0.0

    def pay(self, now_s: float) -> None:
        """Pay everybody up to now."""
        self.spent += self._per_s * (now_s - self._paid_until_s)
        self._paid_until_s = now_s

    def employ(self, node: SimulatedNode, now_s: float, *, alive: bool, working: bool) -> None:
        """Record if a node is alive and works; all nodes are paid up to now."""
        self.pay(now_s)
        before = node.alive and node.working
        node.alive, node.working = alive, working
        change = (alive and working) - before
        self.at_work += change
        self._per_s += change * node.cost


TELL_S = 5.0
"""The interval at which a node reports its samples, like real nodes."""


class SimulatedWork:
    """All groups that are not trained on yet."""

    def __init__(self, scenario: Scenario, chance: Random, outcome: SimulationOutcome) -> None:
        self._scenario, self._chance, self._outcome = scenario, chance, outcome
        self._open: dict[int, SimulatedGroup] = {}
        """Groups without a lease."""
        self._begun: defaultdict[int, list[int]] = defaultdict(list)
        """The open groups that were begun, by the update of the policy."""
        self._fresh: list[int] = []
        """The other open groups, the oldest first."""
        self._next = 0
        self.out: dict[int, SimulatedGroup] = {}
        """Groups with a lease."""
        self.pace: deque[tuple[float, float]] = deque(maxlen=lease_allowance.MEASURED_MAX)

    def lease(self, node: SimulatedNode, count: int, now_s: float) -> list[SimulatedLease]:
        """Return `count` new leases of open groups."""
        return [self._lease(self._open.pop(number), node, now_s) for number in self._choose(node, count)]

    def late(self, now_s: float) -> tuple[list[SimulatedGroup], float]:
        """Return the groups that may be leased twice, and the time at which the next one is late."""
        typical_s = pace(self.pace) or inf
        late_s = LATE * typical_s
        late, next_s = [], inf
        for group in self.out.values():
            since_s = now_s - group.out[0].begun_s
            if since_s > late_s or len(group.out) > 1:
                late.append(group)
            else:
                next_s = min(next_s, now_s - since_s + late_s)
        return late, next_s

    def help(
        self, node: SimulatedNode, late: Sequence[SimulatedGroup], missing: int, now_s: float
    ) -> list[SimulatedLease]:
        """Return second leases of late groups, by the real choice."""
        everybody, own = pace(self.pace), pace(node.pace)
        if everybody is None or own is None:
            return []
        out = (
            Late(group.number, group.out[0].begun_s, len(group.out), any(lease.node is node for lease in group.out))
            for group in late
        )
        bound = self._scenario.over_issue
        chosen = choose(out, missing=missing, bound=bound, typical_s=everybody, helper_s=own, now_s=now_s)
        leases = [self._lease(self.out[number], node, now_s, afresh=True) for number in chosen[: node.free]]
        self._outcome.helped += len(leases)
        return leases

    def answered(self, lease: SimulatedLease, now_s: float) -> list[SimulatedLease]:
        """Complete the lease's group; return its other leases, which were cancelled."""
        self.end(lease, LeaseEvent.ACCEPT)
        lease.node.pace.append((now_s - lease.begun_s, self._left(lease)))
        self.pace.append(lease.node.pace[-1])
        self.out.pop(lease.group.number, None)
        others = list(lease.group.out)
        for other in others:
            self.end(other, LeaseEvent.CANCEL)
            self._outcome.discarded["answered by another first"] += min(1.0, (now_s - other.begun_s) / other.took_s)
        return others

    def lost(self, lease: SimulatedLease, event: LeaseEvent, why: str, now_s: float) -> None:
        """End a lease without an answer; its reported part is kept if another node can continue."""
        worked_s = min(now_s - lease.begun_s, lease.took_s)
        told_s = worked_s // TELL_S * TELL_S if self._scenario.continues and event is not LeaseEvent.REJECT else 0.0
        share = (1.0 - lease.start) / lease.took_s if lease.took_s else 0.0
        self._outcome.discarded[why] += share * (worked_s - told_s)
        self.end(lease, event)
        group = lease.group
        if not group.out:
            group.done, group.update = lease.start + share * told_s, lease.update
            self.out.pop(group.number, None)
            self._offer(group)

    def end(self, lease: SimulatedLease, event: LeaseEvent) -> None:
        lease.move(event)
        lease.group.out.remove(lease)
        lease.node.out.remove(lease)
        most = max(1, LEASES_HELD_FACTOR * lease.node.hands)
        lease.node.allowance = lease_allowance.allowance_after(lease.node.allowance, event, most=most)

    def reopen(self, group: SimulatedGroup) -> None:
        """Open an accepted group again, which is not to be trained on."""
        group.done = 0.0
        self._offer(group)

    def forget(self, update: int) -> None:
        """Drop the reported parts of policies up to `update`, which no node can continue any more."""
        for old in [begun for begun in self._begun if begun <= update]:
            for number in self._begun.pop(old):
                insort(self._fresh, number)

    def _offer(self, group: SimulatedGroup) -> None:
        self._open[group.number] = group
        if group.done:
            self._begun[group.update].append(group.number)
        else:
            insort(self._fresh, group.number)

    def _choose(self, node: SimulatedNode, count: int) -> list[int]:
        begun, self._begun[node.update] = self._begun[node.update][:count], self._begun[node.update][count:]
        wanted, window = count - len(begun), self._scenario.lookahead
        if wanted <= 0:
            return begun
        while len(self._fresh) < max(wanted, window):
            self._offer(make_group(self._next, self._scenario, self._chance))
            self._next += 1
        if window:
            seen = self._fresh[: max(wanted, window)]
            waiting = [WaitingGroup(number, self._open[number].expected) for number in seen]
            chosen = lengths.pick(waiting, wanted, speed=self._speed(node), window=window)
        else:
            chosen = self._fresh[:wanted]
        for number in chosen:
            self._fresh.remove(number)
        return begun + chosen

    def _speed(self, node: SimulatedNode) -> float:
        """Return the node's speed as a multiple of all nodes' recent speed."""
        everybody, own = pace(self.pace), pace(node.pace)
        return everybody / own if everybody and own else 1.0

    def _lease(
        self, group: SimulatedGroup, node: SimulatedNode, now_s: float, *, afresh: bool = False
    ) -> SimulatedLease:
        goes_on = not afresh and group.done > 0 and group.update == node.update
        if goes_on:
            self._outcome.continued += 1
        elif not afresh:
            self._outcome.discarded["begun under another version"] += group.done
            draw_length(group, self._scenario, self._chance)
        start = group.done if goes_on else 0.0
        whole_s = node.hands / node.rate * group.length / (BOAST if node.lies else 1.0)
        lease = SimulatedLease(group, node, node.update, now_s, whole_s * (1.0 - start), node.life, start)
        lease.move(LeaseEvent.BEGIN)
        group.out.append(lease)
        node.out.append(lease)
        self.out[group.number] = group
        return lease

    @staticmethod
    def _left(lease: SimulatedLease) -> float:
        return lease.group.length * (1.0 - lease.start)
