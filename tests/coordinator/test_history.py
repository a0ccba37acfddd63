"""Random histories of a whole round on its real store: nothing too old is trained on, nothing credited twice or lost.

- An auditor beside the store keeps plain lists of what nodes were told, and compares after every step.
- Histories hold slow, silent, cheating and repeating nodes, restarts, and a learner that crashes between any two calls.
"""

from pathlib import Path
from tempfile import TemporaryDirectory

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from coordinator import batches, tables
from protocol.lease import Lease
from protocol.signing import NodeKey
from tests.coordinator.world import HONEST_TOKENS, MAX_COST, World, answer

STALENESS, SIZE, BUDGET = 2, 2, 30 * MAX_COST


class History(RuleBasedStateMachine):
    """One round."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = TemporaryDirectory()
        self.world = World(Path(self.folder.name), staleness=STALENESS, size=SIZE, budget_micros=BUDGET)
        self.world.publish(1, 0)
        self.updates = [0]  # of versions 1, 2, …
        self.nodes = [self.world.join(number) for number in (1, 2)]
        self.held: list[tuple[NodeKey, Lease]] = []
        self.accepted: dict[str, tuple[NodeKey, bytes]] = {}
        self.batched = self.reported = 0
        self.posted: set[str] = set()
        self.voided: set[str] = set()
        self.trained: list[str] = []

    def teardown(self) -> None:
        world = self.world
        world.run(batches.settle_leftovers, now_ms=world.now_ms)
        assert world.audit() == []
        world.database.close()
        self.folder.cleanup()

    @rule(node=st.integers(0, 1), back=st.integers(0, 2), groups=st.integers(1, 4))
    def lease(self, node: int, back: int, groups: int) -> None:
        version = max(1, len(self.updates) - back)
        for lease in self.world.offer(self.nodes[node], version=version, groups=groups).leases:
            self.held.append((self.nodes[node], lease))

    @precondition(lambda self: self.held)
    @rule(data=st.data(), cheats=st.booleans())
    def answer(self, data: st.DataObject, cheats: bool) -> None:
        key, lease = self.held.pop(data.draw(st.integers(0, len(self.held) - 1)))
        envelope = answer(key, lease, **({"seed": lease.seed ^ 1} if cheats else {}))
        before = self.world.lease_states()[lease.lease_id]
        verdict = self.world.submit(key, envelope)
        if verdict.outcome == "accepted":
            assert before == "open"
            assert not cheats
            assert lease.expires_ms > self.world.now_ms
            assert self.batched - self.updates[lease.version - 1] <= STALENESS
            self.accepted[lease.lease_id] = (key, envelope)
        else:
            assert verdict.code in {"lease_closed", "stale_version", "lease_mismatch"}

    @precondition(lambda self: self.accepted)
    @rule(data=st.data())
    def repeat(self, data: st.DataObject) -> None:
        key, envelope = data.draw(st.sampled_from(list(self.accepted.values())))
        verdict = self.world.submit(key, envelope)
        assert (verdict.outcome, verdict.credit_micros) == ("already_accepted", HONEST_TOKENS)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def give_back(self, data: st.DataObject) -> None:
        key, lease = data.draw(st.sampled_from(self.held))
        self.world.give_back(key, lease)

    @rule(share=st.sampled_from([0.3, 1.0]))
    def time_passes(self, share: float) -> None:
        self.world.now_ms += int(share * self.world.terms.timeout_ms)
        self.world.expire()

    @rule()
    def form(self) -> None:
        """The learner asks for the batch after the last one it reported."""
        batch = self.world.batch(self.reported + 1)
        if batch is not None and self.batched == self.reported:
            self.batched += 1
            assert len(batch.groups) == SIZE
            for group in batch.groups:
                assert self.batched - 1 - group.policy_update <= STALENESS
            self.trained += [group.claim_id for group in batch.groups]

    @precondition(lambda self: self.batched > self.reported)
    @rule(mismatch=st.booleans())
    def report(self, mismatch: bool) -> None:
        batch = self.world.batch(self.batched)
        assert batch is not None
        claims = [group.claim_id for group in batch.groups]
        bad = claims[:1] if mismatch else []
        assert self.world.report(self.batched, bad)
        assert not self.world.report(self.batched, claims)
        self.voided |= set(bad)
        self.posted |= set(claims) - set(bad)
        self.reported += 1

    @rule()
    def publish(self) -> None:
        if self.reported > self.updates[-1]:
            self.updates.append(self.reported)
            self.world.publish(len(self.updates), self.reported)

    @rule()
    def restart(self) -> None:
        self.world.reopen()

    @invariant()
    def nothing_is_trained_on_twice(self) -> None:
        assert len(set(self.trained)) == len(self.trained)

    @invariant()
    def no_prompt_is_lost(self) -> None:
        """Every group is open, or exactly one lease or rollout answers for it."""
        working = [row["group_no"] for row in self.world.rows(tables.leases) if row["state"] == "open"]
        answered = {
            row["group_no"]: row["state"] for row in self.world.rows(tables.rollouts) if row["state"] != "stale"
        }
        expected = {"leased": sorted(working), "accepted": [], "trained": []}
        for group, state in sorted(answered.items()):
            expected["trained" if state == "batched" else "accepted"].append(group)
        states = self.world.group_states()
        found = {name: sorted(group for group, state in states.items() if state == name) for name in expected}
        assert found == expected
        assert sorted(states) == list(range(len(states)))

    @invariant()
    def admission_left_nothing_to_drop(self) -> None:
        assert not any(row["state"] == "stale" for row in self.world.rows(tables.rollouts))

    @invariant()
    def the_money_is_right_to_the_micro(self) -> None:
        owed = [self.world.owed(key.node_id) for key in self.nodes]
        settled = len(self.posted) + len(self.voided)
        assert sum(pending for pending, _ in owed) == (len(self.accepted) - settled) * HONEST_TOKENS
        assert sum(payable for _, payable in owed) == len(self.posted) * HONEST_TOKENS
        spent = (len(self.accepted) - len(self.voided)) * HONEST_TOKENS
        assert self.world.budget() == BUDGET - spent
        reserved = sum(row["max_cost_micros"] for row in self.world.rows(tables.leases) if row["state"] == "open")
        assert reserved <= self.world.budget()


TestHistory = History.TestCase
TestHistory.settings = settings(max_examples=15, stateful_step_count=40, deadline=None)
