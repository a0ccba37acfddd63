"""The state of a simulated round that has rules of its own: the clock, the buffer and the payroll.

- Events happen in the order of their times, and those of one moment in the order in which they were scheduled.
- Costs add up between changes: whoever changes who is paid settles the time before.
"""

import heapq
from collections import defaultdict, deque
from collections.abc import Callable
from typing import Any, NamedTuple

from coordinator.sim.machines import SimulatedGroup, SimulatedNode
from coordinator.sim.outcome import Trace


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
