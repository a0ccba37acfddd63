"""The discrete events of a simulation: nodes sample groups, the learner trains, versions spread, nodes join and leave.

- Every decision is the coordinator's own: `lease_allowance` admits, refuses and bounds leases, `lengths` and
  `stragglers` choose groups, `capacity` computes the throughput needed, `fleet_choice` chooses the working nodes,
  `topology` plans the trees, `trust` chooses audits and bans. Only the times are simulated.
- A node requests a group when one has ended; a real node may wait a second for others. A newer version waits until all
  current samples have ended, and then its loading takes time. Groups that are lost with their node count as leased
  until their lease expires, or until the node returns them.
- The learner uses the oldest versions first. A batch is formed as soon as there are enough groups and it is free.
- A node is paid by the hour while it works, idle or not; the learner always.
"""

import heapq
import math
from collections import Counter, deque
from collections.abc import Callable, Sequence
from random import Random

from coordinator.rules.fleet_choice import Fleet, FleetCandidate, Need, decide, measured_rate
from coordinator.rules.fleet_choice import GroupRecord as Done
from coordinator.rules.lease_allowance import admissible_groups, is_stale, room_in_buffer
from coordinator.sim import machines
from coordinator.sim.machines import NOTHING, SimulatedLease, SimulatedNode, SimulatedSpread, make_node
from coordinator.sim.report import SimulatedUpdate, SimulationOutcome
from coordinator.sim.scenario import Scenario, around
from coordinator.sim.work import Accepted, GroupBuffer, Payroll, SimulatedWork, VirtualClock
from protocol.limits import HOUR_S
from protocol.work.lease import LeaseEvent

STALLED_S = 10 * 24 * HOUR_S
"""The time without an update after which the round counts as stalled."""

TICK_S = 0.1
"""The delay after the moment at which a group becomes late, so that it is late when it is checked."""

HALF_LIFE_STEPS = 4
"""The half-life of a speed measurement, in updates."""


class Simulation:
    """A run of a scenario."""

    def __init__(self, scenario: Scenario, nodes: Sequence[SimulatedNode] = ()) -> None:
        """Set up the run with the given nodes, or with nodes that the scenario draws."""
        self._scenario = scenario
        self._chance = Random(scenario.seed)
        self._clock = VirtualClock()
        self._outcome = SimulationOutcome()
        self._work = SimulatedWork(scenario, self._chance, self._outcome)
        self._batch = 0
        self._newest = 0
        self._training = False
        self._free_since_s = 0.0
        self._buffer = GroupBuffer()
        self._waiting: deque[SimulatedNode] = deque()
        self._look_again_s = 0.0
        """The time at which the next group becomes late."""
        self._fleet = Fleet()
        drawn = (make_node(number, scenario, self._chance) for number in range(scenario.pool.nodes))
        self._nodes = list(nodes or drawn)
        self._spread = SimulatedSpread(scenario.links)
        self._published_s, self._holding = 0.0, 0
        self._payroll = Payroll(scenario.learner_price_per_hour / HOUR_S)

    def run(self) -> SimulationOutcome:
        """Run until the last update is trained, no event is left, or the round is stalled."""
        if self._scenario.links.size_mb:
            self._spread.publish([node.links for node in self._nodes])
        for node in self._nodes:
            self._come(node)
        if self._scenario.gamma:
            self._steer()
        while not self._clock.is_over and self._batch < self._scenario.updates and not self._stalled():
            self._clock.step()
        self._payroll.pay(self._clock.now_s)
        self._outcome.ended_s, self._outcome.events = self._clock.now_s, self._clock.scheduled
        self._outcome.spent, self._outcome.trace = self._payroll.spent, str(self._clock.trace)
        return self._outcome

    def _stalled(self) -> bool:
        """Return True if no update came for `STALLED_S`: nodes may join and leave forever without finishing a group."""
        last_s = self._outcome.steps[-1].formed_s if self._outcome.steps else 0.0
        return self._clock.now_s > last_s + STALLED_S

    # Nodes.

    def _come(self, node: SimulatedNode) -> None:
        if node.banned:
            return
        pool = self._scenario.pool
        self._payroll.employ(node, self._clock.now_s, alive=True, working=node.working)
        node.update = node.fetched = NOTHING
        node.loading = False
        self._fetch(node, self._newest)
        for mean_s, leave in ((pool.stay_s, self._vanish), (pool.preempt_s, self._preempt)):
            if mean_s < math.inf:
                self._clock.after(self._chance.expovariate(1 / mean_s), leave, node, node.life)

    def _vanish(self, node: SimulatedNode, life: int) -> None:
        """Remove a node without returning its leases, which then expire."""
        if life == node.life:
            self._go(node)
            self._clock.after(self._chance.expovariate(1 / self._scenario.pool.away_s), self._come, node)

    def _preempt(self, node: SimulatedNode, life: int) -> None:
        """Remove a node after it has returned its leases."""
        if life == node.life:
            given = list(node.out)
            for lease in given:
                self._work.lost(lease, LeaseEvent.SKIP, "given back", self._clock.now_s)
            self._go(node)
            self._clock.after(self._chance.expovariate(1 / self._scenario.pool.away_s), self._come, node)
            self._wake(len(given))

    def _go(self, node: SimulatedNode) -> None:
        self._payroll.employ(node, self._clock.now_s, alive=False, working=node.working)
        node.life += 1
        for lease in node.out:
            lease.took_s = max(lease.took_s, self._clock.now_s - lease.begun_s)
            self._clock.after(
                max(0.0, lease.begun_s + self._scenario.lease_s - self._clock.now_s),
                self._expire,
                lease,
                self._clock.now_s,
            )

    def _fetch(self, node: SimulatedNode, update: int) -> None:
        node.fetching = True
        scenario = self._scenario
        if scenario.links.size_mb:
            delay_s = self._spread.delay_s(node.links)
        else:
            delay_s = around(self._chance, scenario.broadcast_s, scenario.broadcast_spread)
        self._clock.after(delay_s, self._arrive, node, node.life, update)

    def _arrive(self, node: SimulatedNode, life: int, update: int) -> None:
        if life == node.life and update > node.fetched:
            node.fetched = update
            node.fetching = update < self._newest
            self._start(node)

    def _change(self, node: SimulatedNode) -> None:
        """Load the newest complete version of a node, once all its current samples have ended."""
        if node.fetched > node.update and not (node.out or node.loading):
            node.loading = True
            load_s = self._scenario.links.load_s if self._scenario.links.size_mb else 0.0
            if load_s:
                self._clock.after(load_s, self._loaded, node, node.life, node.fetched)
            else:
                self._loaded(node, node.life, node.fetched)

    def _loaded(self, node: SimulatedNode, life: int, update: int) -> None:
        if life == node.life:
            node.update, node.loading = update, False
            if update == self._newest:
                self._note_spread()
            self._start(node)

    def _note_spread(self) -> None:
        self._holding += 1
        if self._holding == (len(self._nodes) + 1) // 2:
            self._outcome.spreads_s.append(self._clock.now_s - self._published_s)

    # Groups.

    def _start(self, node: SimulatedNode) -> int:
        """Begin as many groups as the node has slots for and admission allows."""
        if node.alive:
            self._change(node)
        if not (node.alive and node.working and node.free > 0 and node.update >= 0):
            return 0
        leases = self._work.lease(node, min(node.free, self._admissible(node)), self._clock.now_s)
        for lease in leases:
            self._begin(lease)
        if node.free > 0 and not node.waiting:
            node.waiting = True
            self._waiting.append(node)
        return len(leases)

    def _begin(self, lease: SimulatedLease) -> None:
        """Schedule the end of the lease: its completion, or its expiry."""
        if lease.took_s <= self._scenario.lease_s:
            self._clock.after(lease.took_s, self._finish, lease)
        else:
            self._clock.after(self._scenario.lease_s, self._expire, lease, self._clock.now_s + self._scenario.lease_s)

    def _admissible(self, node: SimulatedNode) -> int:
        scenario, unfinished = self._scenario, len(self._work.out) + len(self._buffer)
        if scenario.admission == "overlap":
            return 0 if node.fetching else node.free
        if self._is_stale(node.update):
            return 0
        if scenario.admission == "buffer":
            return room_in_buffer(
                buffered_max=scenario.room, groups_per_update=scenario.groups_per_update, unfinished_groups=unfinished
            )
        return admissible_groups(
            staleness=scenario.staleness,
            groups_per_update=scenario.groups_per_update,
            visible_update=node.update,
            issued_groups=self._batch * scenario.groups_per_update + unfinished,
        )

    def _finish(self, lease: SimulatedLease) -> None:
        node = lease.node
        if lease.life != node.life or not lease.is_open:
            return
        stale = self._is_stale(lease.update)
        node.done.append(Done(lease.begun_s, self._clock.now_s, not stale))
        if stale:
            self._work.lost(lease, LeaseEvent.REJECT, "too old when they came", self._clock.now_s)
            self._wake(1)
        else:
            others = self._work.answered(lease, self._clock.now_s)
            self._accept(Accepted(lease.group, node), lease.update)
            for other in others:
                self._start(other.node)
        self._start(node)

    def _expire(self, lease: SimulatedLease, until_s: float) -> None:
        """End a lease at its time limit; its node worked on it until then, or until it left."""
        if lease.is_open:
            gone = lease.life != lease.node.life
            why = "lost with their node" if gone else "not done in the lease's time"
            self._work.lost(lease, LeaseEvent.EXPIRE, why, until_s)
            self._wake(1)
            if not gone:
                self._start(lease.node)

    def _accept(self, accepted: Accepted, update: int) -> None:
        self._outcome.forged += accepted.node.lies
        self._buffer.add(accepted, update)
        if self._scenario.pool.liars and machines.is_drawn(accepted.node, self._scenario.audits, self._chance):
            self._clock.after(self._scenario.audit_s, self._verdict, accepted)
        self._form()
        self._help()

    def _verdict(self, accepted: Accepted) -> None:
        node = accepted.node
        if machines.judge(node, self._scenario.audits, forged=node.lies):
            self._outcome.banned += 1
            self._throw_out(lambda accepted_group: accepted_group.node is node)
            for lease in list(node.out):
                self._work.lost(lease, LeaseEvent.SKIP, "forged", self._clock.now_s)
            self._payroll.employ(node, self._clock.now_s, alive=False, working=node.working)
            node.life += 1
        elif node.lies:
            self._throw_out(lambda accepted_group: accepted_group is accepted)

    def _throw_out(self, unwanted: Callable[[Accepted], bool]) -> None:
        """Remove groups with a failed audit from the buffer, and offer them again."""
        removed = self._buffer.remove(unwanted)
        for accepted in removed:
            self._work.reopen(accepted.group)
        self._outcome.discarded["forged"] += len(removed)
        self._wake(len(removed))

    def _help(self) -> None:
        """Lease late groups to a second node, when the learner waits for these groups only."""
        missing = self._scenario.groups_per_update - len(self._buffer)
        if self._training or not 0 < missing <= self._scenario.over_issue:
            return
        late, next_s = self._work.late(self._clock.now_s)
        if any(len(group.out) == 1 for group in late):
            able = (node for node in self._waiting if node.alive and node.working and node.free > 0)
            for node in heapq.nsmallest(self._scenario.over_issue, able, key=lambda node: (-node.rate, node.name)):
                if not self._is_stale(node.update):
                    for lease in self._work.help(node, late, missing, self._clock.now_s):
                        self._begin(lease)
        if self._look_again_s <= self._clock.now_s and next_s < math.inf:
            self._look_again_s = next_s + TICK_S
            self._clock.after(self._look_again_s - self._clock.now_s, self._help)

    def _wake(self, groups: int) -> None:
        """Start waiting nodes, as `groups` places became free."""
        for _ in range(len(self._waiting)):
            if groups <= 0:
                return
            node = self._waiting.popleft()
            node.waiting = False
            groups -= self._start(node)
            if node.waiting and node.update == self._newest:
                return  # a node with the newest version may not start more groups, so no node may

    def _is_stale(self, update: int) -> bool:
        return is_stale(staleness=self._scenario.staleness, policy_update=update, learner_update=self._batch)

    # The learner.

    def _form(self) -> None:
        """Form a batch of the oldest groups that are not stale, if the learner is free and they are enough."""
        if self._training:
            return
        for update in filter(self._is_stale, self._buffer.updates()):
            dropped = self._buffer.pop(update)
            self._outcome.discarded["too old when the learner came"] += len(dropped)
            for accepted in dropped:
                self._work.reopen(accepted.group)
            self._wake(len(dropped))
        if len(self._buffer) < self._scenario.groups_per_update:
            return
        drawn = self._buffer.draw(self._scenario.groups_per_update)
        self._outcome.trained_forged += sum(accepted.node.lies for _, accepted in drawn)
        ages = Counter(self._batch - update for update, _ in drawn)
        self._record_update(ages)
        self._batch += 1
        self._work.forget(self._batch - self._scenario.staleness - 1)
        self._training = True
        self._clock.after(around(self._chance, self._scenario.train_s, self._scenario.train_spread), self._learned)

    def _record_update(self, ages: Counter[int]) -> None:
        now_s, payroll, outcome = self._clock.now_s, self._payroll, self._outcome
        payroll.pay(now_s)
        vain = sum(outcome.discarded.values())
        waited_s = now_s - self._free_since_s
        outcome.steps.append(
            SimulatedUpdate(self._batch + 1, now_s, waited_s, ages, payroll.at_work, payroll.spent, vain)
        )

    def _learned(self) -> None:
        self._training = False
        self._free_since_s = self._clock.now_s
        if self._batch % self._scenario.interval == 0:
            self._publish()
        self._form()
        self._help()

    def _publish(self) -> None:
        self._newest = self._batch
        self._published_s, self._holding = self._clock.now_s, 0
        alive = [node for node in self._nodes if node.alive]
        if self._scenario.links.size_mb and alive:
            self._spread.publish([node.links for node in alive])
        for node in alive:
            self._fetch(node, self._newest)

    # The fleet.

    def _steer(self) -> None:
        """Run the fleet's decision, once per update."""
        scenario = self._scenario
        self._clock.after(scenario.train_s, self._steer)
        floor = scenario.rule.min_rate(scenario.load, self._scenario.interval)
        candidates = [self._candidate(node) for node in self._nodes if node.alive]
        need = Need(floor, scenario.gamma * floor)
        self._fleet, changes = decide(self._fleet, candidates, need, scenario.rules, now_s=self._clock.now_s)
        self._outcome.changes += [(self._clock.now_s, change) for change in changes]
        for node in self._nodes:
            if (works := node.name in self._fleet.working) != node.working:
                self._payroll.employ(node, self._clock.now_s, alive=node.alive, working=works)
                self._start(node)

    def _candidate(self, node: SimulatedNode) -> FleetCandidate:
        half_life_s = HALF_LIFE_STEPS * self._scenario.train_s
        rate = measured_rate(node.claimed, node.done, now_s=self._clock.now_s, half_life_s=half_life_s)
        return FleetCandidate(node.name, rate, node.cost)
