"""Discrete events: nodes sample groups, the learner trains on them, versions travel, nodes come and go.

- Every decision is the coordinator's own: `dispatch` admits and refuses, `capacity` says what is needed, `fleet` who
  works. Only time is made up.
- A node samples with the version it holds, and changes between two groups. Groups that are lost with their node keep
  their place until their lease has run out.
- The learner takes the oldest versions first. A batch is formed as soon as there are enough groups and it is free.
- A node is paid by the hour while it works, idle or not; the learner always.
"""

import heapq
import math
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random
from typing import Any

from coordinator.dispatch import admissible_groups, is_stale
from coordinator.fleet import Candidate, Change, Fleet, Need, Work, decide, measured_rate
from coordinator.sim.scenario import HOUR_S, Scenario, around

WORK_REMEMBERED = 16
"""Answers of a node by which its rate is measured."""

HALF_LIFE_STEPS = 4
"""Updates after which an answer says half as much of its node's rate."""

NOTHING = -1
"""The version of a node that holds none."""


@dataclass(eq=False)
class Node:
    """A machine that takes its time."""

    name: str
    rate: float
    cost: float
    free: int
    alive: bool = False
    working: bool = False
    update: int = NOTHING
    fetching: bool = False
    waiting: bool = False
    in_flight: int = 0
    life: int = 0
    """Which of its lives this is: what happens to an earlier one is void."""
    done: deque[Work] = field(default_factory=lambda: deque(maxlen=WORK_REMEMBERED))


@dataclass(frozen=True)
class Step:
    """One update: when its batch was formed, how long the learner had waited, how old the groups were."""

    update: int
    formed_s: float
    waited_s: float
    ages: Counter[int]
    working: int
    spent: float


@dataclass
class Outcome:
    """What happened."""

    steps: list[Step] = field(default_factory=list)
    discarded: Counter[str] = field(default_factory=Counter)
    """Groups that were sampled in vain, by what became of them."""
    accepted: int = 0
    changes: list[tuple[float, Change]] = field(default_factory=list)
    events: int = 0
    ended_s: float = 0.0
    spent: float = 0.0


class Simulation:
    """One run of a scenario."""

    def __init__(self, scenario: Scenario) -> None:
        self._scenario = scenario
        self._kappa = scenario.interval
        self._chance = Random(scenario.seed)
        self._now_s = 0.0
        self._events: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._outcome = Outcome()
        self._batch = 0
        self._newest = 0
        self._training = False
        self._free_since_s = 0.0
        self._in_flight = 0
        self._buffer: Counter[int] = Counter()
        self._waiting: deque[Node] = deque()
        self._fleet = Fleet()
        self._nodes = [self._make_node(number) for number in range(scenario.pool.nodes)]
        self._at_work = 0
        self._cost = scenario.learner_price_per_hour / HOUR_S
        self._paid_until_s = 0.0

    def run(self) -> Outcome:
        """Until the last update is trained, or until nothing more can happen."""
        for node in self._nodes:
            self._come(node)
        if self._scenario.gamma:
            self._steer()
        while self._events and self._batch < self._scenario.updates:
            self._now_s, _, happen, subject = heapq.heappop(self._events)
            happen(*subject)
        self._pay()
        self._outcome.ended_s = self._now_s
        return self._outcome

    def _at(self, delay_s: float, happen: Callable[..., None], *subject: Any) -> None:
        self._outcome.events += 1
        heapq.heappush(self._events, (self._now_s + delay_s, self._outcome.events, happen, subject))

    # Nodes.

    def _make_node(self, number: int) -> Node:
        pool, chance = self._scenario.pool, self._chance
        rate = around(chance, pool.at_once / pool.group_s, pool.speed_spread)
        cost = around(chance, pool.price_per_hour, pool.price_spread) / HOUR_S
        return Node(f"node-{number}", rate, cost, pool.at_once, working=not self._scenario.gamma)

    def _employ(self, node: Node, *, alive: bool, working: bool) -> None:
        """Note who is there and who works; everybody is paid up to now."""
        self._pay()
        before = node.alive and node.working
        node.alive, node.working = alive, working
        change = (alive and working) - before
        self._at_work += change
        self._cost += change * node.cost

    def _come(self, node: Node) -> None:
        self._employ(node, alive=True, working=node.working)
        node.free, node.update = self._scenario.pool.at_once, NOTHING
        self._fetch(node, self._newest)
        if self._scenario.pool.stay_s < math.inf:
            self._at(self._chance.expovariate(1 / self._scenario.pool.stay_s), self._go, node)

    def _go(self, node: Node) -> None:
        self._employ(node, alive=False, working=node.working)
        node.life += 1
        self._at(self._scenario.lease_s, self._expire, node.in_flight)
        self._outcome.discarded["lost with their node"] += node.in_flight
        node.in_flight = 0
        self._at(self._chance.expovariate(1 / self._scenario.pool.away_s), self._come, node)

    def _expire(self, groups: int) -> None:
        self._in_flight -= groups
        self._wake(groups)

    def _fetch(self, node: Node, update: int) -> None:
        node.fetching = True
        delay_s = around(self._chance, self._scenario.broadcast_s, self._scenario.broadcast_spread)
        self._at(delay_s, self._arrive, node, node.life, update)

    def _arrive(self, node: Node, life: int, update: int) -> None:
        if life == node.life and update > node.update:
            node.update = update
            node.fetching = update < self._newest
            self._start(node)

    # Groups.

    def _start(self, node: Node) -> int:
        """Begin as many groups as the node has hands for and admission allows."""
        if not (node.alive and node.working and node.free and node.update >= 0):
            return 0
        count = min(node.free, self._admissible(node))
        for _ in range(count):
            length = around(self._chance, 1.0, self._scenario.pool.length_spread)
            took_s = self._scenario.pool.at_once / node.rate * length
            self._at(took_s, self._finish, node, node.life, node.update, self._now_s)
        node.free -= count
        node.in_flight += count
        self._in_flight += count
        if node.free and not node.waiting:
            node.waiting = True
            self._waiting.append(node)
        return count

    def _admissible(self, node: Node) -> int:
        scenario = self._scenario
        if scenario.admission == "overlap":
            return 0 if node.fetching else node.free
        if self._is_stale(node.update):
            return 0
        return admissible_groups(
            staleness=scenario.staleness,
            groups_per_update=scenario.groups_per_update,
            visible_update=node.update,
            issued_groups=self._batch * scenario.groups_per_update + self._in_flight + self._buffer.total(),
        )

    def _finish(self, node: Node, life: int, update: int, begun_s: float) -> None:
        if life != node.life:
            return
        node.free += 1
        node.in_flight -= 1
        self._in_flight -= 1
        stale = self._is_stale(update)
        node.done.append(Work(begun_s, self._now_s, not stale))
        if stale:
            self._outcome.discarded["too old when they came"] += 1
            self._wake(1)
        else:
            self._outcome.accepted += 1
            self._buffer[update] += 1
            self._form()
        self._start(node)

    def _wake(self, groups: int) -> None:
        """Places became free for those who wait."""
        for _ in range(len(self._waiting)):
            if groups <= 0:
                return
            node = self._waiting.popleft()
            node.waiting = False
            groups -= self._start(node)
            if node.waiting and node.update == self._newest:
                return  # who holds the newest version may start no more, so nobody may

    def _is_stale(self, update: int) -> bool:
        return is_stale(staleness=self._scenario.staleness, policy_update=update, learner_update=self._batch)

    # The learner.

    def _form(self) -> None:
        """Take the oldest groups that may still be trained on, if the learner is free and they are enough."""
        if self._training:
            return
        for update in [update for update in self._buffer if self._is_stale(update)]:
            dropped = self._buffer.pop(update)
            self._outcome.discarded["too old when the learner came"] += dropped
            self._wake(dropped)
        missing = self._scenario.groups_per_update
        if self._buffer.total() < missing:
            return
        ages: Counter[int] = Counter()
        for update in sorted(self._buffer):
            taken = min(missing, self._buffer[update])
            ages[self._batch - update] += taken
            self._buffer[update] -= taken
            missing -= taken
        self._buffer = +self._buffer
        self._note(ages)
        self._batch += 1
        self._training = True
        self._at(self._scenario.train_s, self._learned)

    def _note(self, ages: Counter[int]) -> None:
        self._pay()
        waited_s = self._now_s - self._free_since_s
        step = Step(self._batch + 1, self._now_s, waited_s, +ages, self._at_work, self._outcome.spent)
        self._outcome.steps.append(step)

    def _learned(self) -> None:
        self._training = False
        self._free_since_s = self._now_s
        if self._batch % self._kappa == 0:
            self._publish()
        self._form()

    def _publish(self) -> None:
        self._newest = self._batch
        for node in self._nodes:
            if node.alive:
                self._fetch(node, self._newest)

    # The fleet.

    def _steer(self) -> None:
        """Let the fleet decide, once per update."""
        scenario = self._scenario
        self._at(scenario.train_s, self._steer)
        floor = scenario.rule.min_rate(scenario.load, self._kappa)
        candidates = [self._candidate(node) for node in self._nodes if node.alive]
        need = Need(floor, scenario.gamma * floor)
        self._fleet, changes = decide(self._fleet, candidates, need, scenario.rules, now_s=self._now_s)
        self._outcome.changes += [(self._now_s, change) for change in changes]
        for node in self._nodes:
            if (works := node.name in self._fleet.working) != node.working:
                self._employ(node, alive=node.alive, working=works)
                self._start(node)

    def _candidate(self, node: Node) -> Candidate:
        half_life_s = HALF_LIFE_STEPS * self._scenario.train_s
        rate = measured_rate(node.rate, node.done, now_s=self._now_s, half_life_s=half_life_s)
        return Candidate(node.name, rate, node.cost)

    def _pay(self) -> None:
        self._outcome.spent += self._cost * (self._now_s - self._paid_until_s)
        self._paid_until_s = self._now_s
