"""Random histories of a round on the real store: leases, answers, losses, hand-ons, publications, crashes, restarts.

Whatever the order, and whatever the rule of admission:

- nothing older than S is trained on, and every batch is the same when it is asked for again;
- nothing is credited twice, and the books are what the entries say;
- no prompt is lost: each group is open, at work, waiting or trained on, and a trained one is trained on once;
- the budget holds, and that of any hour, at every moment and for the dearest answers to all open leases;
- admission never deadlocks: from wherever the history stands, a single honest node brings the round on.
"""

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from coordinator.store import tables
from coordinator.transactions import tally
from protocol.wire.signing import NodeKey
from protocol.work.lease import OPEN, Lease
from protocol.work.rollout import unpack_tokens
from tests.coordinator.world import MAX_COST, World, answer, fragment

NODES = 3
BUDGET = 100_000
HOUR_MS = 3_600_000
SAFE = ("open", "leased", "trial", "accepted", "trained")


class RoundMachine(RuleBasedStateMachine):
    """A round with a few nodes, with the leases that each holds and the fragments that it has sent."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = TemporaryDirectory()

    @initialize(
        staleness=st.integers(0, 3),
        size=st.integers(1, 3),
        late=st.integers(0, 3),
        over_issue=st.sampled_from([0, 2]),
        buffered=st.sampled_from([0, 0, 3]),
        lookahead=st.sampled_from([0, 4]),
        budget=st.sampled_from([BUDGET, 6 * MAX_COST]),
        hourly=st.sampled_from([0, MAX_COST, 2 * MAX_COST]),
    )
    def begin(
        self,
        staleness: int,
        size: int,
        late: int,
        over_issue: int,
        buffered: int,
        lookahead: int,
        budget: int,
        hourly: int,
    ) -> None:
        self.world = World(
            Path(self.folder.name),
            staleness=staleness,
            size=size,
            budget_micros=budget,
            over_issue=over_issue,
            buffered_max=buffered,
            lookahead=lookahead,
            newcomer_leases=4,
            budget_micros_per_hour=hourly,
        )
        self.hourly = hourly
        self.spent: list[tuple[int, int]] = []
        """Times and sums spent: when, and how much in all until then."""
        self.bound, self.kappa, self.budget = staleness, 1 + late % (staleness + 1), budget
        self.world.publish(1, 0)
        self.versions = {1: 0}
        self.keys = [self.world.join(number) for number in range(1, NODES + 1)]
        self.held: dict[str, tuple[NodeKey, Lease]] = {}
        self.told: dict[str, tuple[NodeKey, Lease]] = {}
        self.sent: dict[str, bytes] = {}
        """Answers that were accepted, which nodes may send again."""
        self.trained: list[int] = []
        self.batches: dict[int, list[str]] = {}
        self.reported = 0

    def teardown(self) -> None:
        if hasattr(self, "world"):
            self.one_honest_node_brings_it_on()
            assert self.world.audit() == []
            self.world.database.close()
        self.folder.cleanup()

    # What nodes do.

    @rule(who=st.integers(0, NODES - 1), back=st.integers(0, 2), wanted=st.integers(1, 5), continues=st.booleans())
    def a_node_takes_leases(self, who: int, back: int, wanted: int, continues: bool) -> None:
        version = max(1, max(self.versions) - back)
        for lease in self.world.offer(self.keys[who], version=version, groups=wanted, continues=continues).leases:
            self.held[lease.lease_id] = (self.keys[who], lease)
            assert len(self.batches) - self.versions[version] <= self.bound, "what is leased may still be trained on"

    @rule(data=st.data(), count=st.integers(1, 4))
    def answers_arrive_in_any_order(self, data: Any, count: int) -> None:
        for _ in range(min(count, len(self.held))):
            key, lease = self.held.pop(data.draw(st.sampled_from(sorted(self.held))))
            envelope = answer(key, lease)
            verdict = self.world.submit(key, envelope)
            if verdict.outcome == "accepted":
                self.sent[lease.lease_id] = envelope
                assert self.world.submit(key, envelope).outcome == "already_accepted"

    @rule(who=st.integers(0, NODES - 1), wanted=st.integers(4, 8))
    def a_node_works(self, who: int, wanted: int) -> None:
        """A node requests some groups and answers them, as nodes mostly do."""
        for lease in self.world.offer(self.keys[who], version=max(self.versions), groups=wanted).leases:
            envelope = answer(self.keys[who], lease)
            assert self.world.submit(self.keys[who], envelope).outcome == "accepted"
            self.sent[lease.lease_id] = envelope

    @rule(data=st.data())
    def an_old_answer_comes_again(self, data: Any) -> None:
        if self.sent:
            lease_id = data.draw(st.sampled_from(sorted(self.sent)))
            before = self.world.budget()
            for key in self.keys:
                assert self.world.submit(key, self.sent[lease_id]).outcome in ("already_accepted", "rejected")
            assert self.world.budget() == before

    @rule(data=st.data())
    def a_node_tells_how_far_it_is(self, data: Any) -> None:
        fresh = sorted(lease_id for lease_id in self.held if lease_id not in self.told)
        if fresh:
            key, lease = self.held[data.draw(st.sampled_from(fresh))]
            first = int(unpack_tokens(lease.prompt)[0])
            if not lease.prefixes and self.world.tell(key, fragment(key, lease, {0: [first]}), held=[lease]).taken:
                self.told[lease.lease_id] = (key, lease)
                del self.held[lease.lease_id]  # from now on it can only be lost, and another go on

    @rule(data=st.data())
    def a_node_gives_back(self, data: Any) -> None:
        known = self.held | self.told
        if known:
            lease_id = data.draw(st.sampled_from(sorted(known)))
            key, lease = known[lease_id]
            self.world.give_back(key, lease)
            self.held.pop(lease_id, None)
            self.told.pop(lease_id, None)

    @rule(part=st.sampled_from([0.3, 0.6, 1.1]))
    def time_passes(self, part: float) -> None:
        self.world.now_ms += int(part * self.world.terms.timeout_ms)
        self.world.expire()

    @rule()
    def an_hour_passes(self) -> None:
        self.world.now_ms += HOUR_MS
        self.world.expire()

    # What the learner and the operator do.

    @rule()
    def the_learner_asks_for_a_batch(self) -> None:
        number = len(self.batches) + 1
        if self.reported < number - 1:
            return
        batch = self.world.batch(number)
        if batch is None:
            return
        assert len(batch.groups) == self.world.terms.groups_per_update
        assert all(0 <= number - 1 - group.policy_update <= self.bound for group in batch.groups)
        self.batches[number] = [group.claim_id for group in batch.groups]
        self.trained += [int(unpack_tokens(group.prompt)[0]) for group in batch.groups]

    @rule()
    def the_learner_reports(self) -> None:
        if self.reported < len(self.batches):
            self.reported += 1
            self.world.report(self.reported)
            self.world.report(self.reported)

    @rule(updates=st.integers(1, 3))
    def the_learner_trains(self, updates: int) -> None:
        for _ in range(updates):
            self.the_learner_asks_for_a_batch()
            self.the_learner_reports()

    @rule()
    def a_version_is_published(self) -> None:
        due = self.reported - self.reported % self.kappa
        if due > max(self.versions.values()):
            self.versions[max(self.versions) + 1] = due
            self.world.publish(max(self.versions), due)

    @rule()
    def the_coordinator_crashes(self) -> None:
        """The coordinator and the learner crash; the learner requests its last batch again."""
        before = self.world.dump()
        self.world.reopen()
        assert self.world.dump() == before
        if self.batches:
            again = self.world.batch(len(self.batches))
            assert again is not None
            assert [group.claim_id for group in again.groups] == self.batches[len(self.batches)]

    @rule(staleness=st.integers(0, 3))
    def the_operator_restarts_with_another_bound(self, staleness: int) -> None:
        if self.kappa <= staleness + 1:
            self.world.tighten(staleness)
            self.bound = staleness

    # What holds all the time.

    @invariant()
    def no_prompt_is_lost(self) -> None:
        if not hasattr(self, "world"):
            return
        states = self.world.group_states()
        assert set(states) == set(range(len(states)))
        assert set(states.values()) <= set(SAFE)
        at_work = {
            row["group_no"] for row in self.world.rows(tables.leases) if row["state"] in OPEN and not row["surplus"]
        }
        assert {number for number, state in states.items() if state in ("leased", "trial")} == at_work
        buffered = [row["group_no"] for row in self.world.rows(tables.rollouts) if row["state"] == "buffered"]
        assert sorted(buffered) == sorted(number for number, state in states.items() if state == "accepted")
        assert len(set(self.trained)) == len(self.trained)
        assert sorted(number - 10 for number in self.trained) == sorted(
            number for number, state in states.items() if state == "trained"
        )

    @invariant()
    def the_budget_holds(self) -> None:
        if not hasattr(self, "world"):
            return
        reserved = sum(row["max_cost_micros"] for row in self.world.rows(tables.leases) if row["state"] in OPEN)
        assert self.world.budget() >= reserved
        owed = sum(sum(self.world.owed(key.node_id)) for key in self.keys)
        assert self.world.budget() + owed == self.budget
        before = max((spent for at_ms, spent in self.spent if at_ms <= self.world.now_ms - HOUR_MS), default=0)
        self.spent.append((self.world.now_ms, owed))
        assert not self.hourly or owed - before + reserved <= self.hourly

    @invariant()
    def what_is_tallied_is_what_there_is(self) -> None:
        if hasattr(self, "world"):
            assert self.world.run(tally.read) == self.world.run(tally.counted)

    @invariant()
    def nothing_is_credited_twice(self) -> None:
        if not hasattr(self, "world"):
            return
        rows = self.world.rows(tables.rollouts)
        assert len({row["lease_id"] for row in rows}) == len(rows)
        claims = [row["claim_id"] for row in (*rows, *self.world.rows(tables.parts))]
        assert len(claims) == len(set(claims))

    def one_honest_node_brings_it_on(self) -> None:
        """All others are gone: their leases run out, and the next update must come all the same, if it can be paid."""
        while self.reported < len(self.batches):
            self.the_learner_reports()
        self.a_version_is_published()
        self.world.now_ms += 2 * self.world.terms.timeout_ms
        self.world.expire()
        honest, done = self.world.join(99), len(self.batches)
        self.keys.append(honest)
        for _ in range(20 * self.world.terms.groups_per_update):
            self.the_learner_asks_for_a_batch()
            if len(self.batches) > done:
                return
            reply = self.world.offer(honest, version=max(self.versions), groups=1)
            if reply.reason == "budget" and self.hourly and self.world.budget() >= MAX_COST:
                self.an_hour_passes()
                continue
            if reply.reason == "budget":
                return
            assert reply.leases, f"an honest node gets nothing: {reply.reason}"
            assert self.world.submit(honest, answer(honest, reply.leases[0])).outcome == "accepted"
            self.the_budget_holds()
        pytest.fail("the round does not come on")


TestRoundMachine = RoundMachine.TestCase
TestRoundMachine.settings = settings(max_examples=12, stateful_step_count=20, deadline=None)
