"""Random histories of a whole round on its real store: nothing too old is trained on, nothing credited twice or lost.

- An auditor beside the store keeps plain lists of what nodes were told, and compares after every step.
- Histories hold slow, silent, cheating and repeating nodes, work that is told of and handed on, groups given to
  two, restarts, and a learner that crashes between any two calls.
- The round is as tight as can be: S = 1, one group per update, and a budget for a few leases at a time.
"""

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import sqlalchemy as sa
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from coordinator.store import tables
from ledger import store
from ledger.entry import Deposit
from protocol.wire.signing import NodeKey
from protocol.work.lease import OPEN, Lease
from protocol.work.rollout import unpack_tokens
from tests.coordinator.world import (
    END,
    HONEST_TOKENS,
    MAX_COST,
    World,
    answer,
    fragment,
    honest_sample,
    rest,
)

STALENESS, SIZE = 1, 1
TOP_UP = 2 * MAX_COST
"""The sum that the operator deposits at a time."""


class History(RuleBasedStateMachine):
    """A round with its history."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = TemporaryDirectory()
        self.world = World(Path(self.folder.name), staleness=STALENESS, size=SIZE, budget_micros=TOP_UP, over_issue=1)
        self.world.publish(1, 0)
        self.updates = [0]  # of versions 1, 2, …
        self.nodes = [self.world.join(number) for number in (1, 2)]
        self.held: list[tuple[NodeKey, Lease]] = []
        self.accepted: dict[str, tuple[NodeKey, bytes, int]] = {}
        self.answered: set[bytes] = set()
        """The prompts of groups that are whole."""
        self.surplus = 0
        self.batched = self.reported = 0
        self.deposits = 1
        self.posted: set[str] = set()
        self.trained: list[str] = []

    def teardown(self) -> None:
        self.world.release_leftovers()
        assert self.world.audit() == []
        self.world.database.close()
        self.folder.cleanup()

    @rule(node=st.integers(0, 1), back=st.integers(0, 2), groups=st.integers(1, 3), continues=st.booleans())
    def a_node_takes_leases(self, node: int, back: int, groups: int, continues: bool) -> None:
        version = max(1, len(self.updates) - back)
        reply = self.world.offer(self.nodes[node], version=version, groups=groups, continues=continues)
        for lease in reply.leases:
            assert continues or not lease.prefixes
            self.held.append((self.nodes[node], lease))

    @precondition(lambda self: self.held)
    @rule(data=st.data(), count=st.integers(1, 3))
    def answers_arrive_in_any_order(self, data: st.DataObject, count: int) -> None:
        for _ in range(min(count, len(self.held))):
            key, lease = self.held.pop(data.draw(st.integers(0, len(self.held) - 1)))
            verdict = self.world.submit(key, answer(key, lease))
            if verdict.outcome == "accepted":
                assert lease.expires_ms > self.world.now_ms
                if self._is_surplus(lease):
                    self.surplus += 1
                else:
                    assert lease.prompt not in self.answered
                    assert self.batched - self.updates[lease.version - 1] <= STALENESS
                    self.answered.add(lease.prompt)
                self.accepted[lease.lease_id] = (key, answer(key, lease), verdict.credit_micros)
            else:
                assert verdict.code in {"lease_closed", "stale_version"}

    def _is_surplus(self, lease: Lease) -> bool:
        """Return True if a lease came second, or was a newcomer's trial without a place."""
        (row,) = (row for row in self.world.rows(tables.rollouts) if row["lease_id"] == lease.lease_id)
        return bool(row["state"] == "surplus")

    @precondition(lambda self: self.held)
    @rule(data=st.data(), number=st.integers(0, 1))
    def a_node_tells_of_its_next_token(self, data: st.DataObject, number: int) -> None:
        key, lease = data.draw(st.sampled_from(self.held))
        new = unpack_tokens(rest(lease)[number].tokens if lease.prefixes else honest_sample(lease).tokens).tolist()[:1]
        if new:
            self.world.tell(key, fragment(key, lease, {number: new}), held=[lease])

    @precondition(lambda self: self.held)
    @rule(data=st.data(), how=st.sampled_from(["cheats", "gives back", "steals"]))
    def a_node_spoils_a_lease(self, data: st.DataObject, how: str) -> None:
        key, lease = data.draw(st.sampled_from(self.held))
        if how == "gives back":
            self.world.give_back(key, lease)
            return
        if how == "steals":
            key = next(other for other in self.nodes if other is not key)
        verdict = self.world.submit(key, answer(key, lease, lease_digest="0" * 64))
        assert verdict.outcome == "rejected"

    @precondition(lambda self: self.accepted)
    @rule(data=st.data())
    def a_node_repeats_itself(self, data: st.DataObject) -> None:
        key, envelope, credit = data.draw(st.sampled_from(list(self.accepted.values())))
        verdict = self.world.submit(key, envelope)
        assert (verdict.outcome, verdict.credit_micros) == ("already_accepted", credit)

    @rule(share=st.sampled_from([0.1, 1.0]))
    def time_passes(self, share: float) -> None:
        self.world.now_ms += int(share * self.world.terms.timeout_ms)
        self.world.expire()

    @rule(
        crashes=st.sampled_from(["never", "never", "before the report", "before the version"]), suspects=st.booleans()
    )
    def the_learner_works(self, crashes: str, suspects: bool) -> None:
        """Make an update, from any state in which a crash left the learner."""
        batch = self.world.batch(self.reported + 1)
        if batch is not None:
            claims = [group.claim_id for group in batch.groups]
            assert all(unpack_tokens(s.tokens).tolist()[1:] == [END] for group in batch.groups for s in group.samples)
            if self.batched == self.reported:
                self.batched += 1
                assert len(claims) == SIZE
                assert all(self.batched - 1 - group.policy_update <= STALENESS for group in batch.groups)
                self.trained += claims
            if crashes == "before the report":
                return
            worked = claims + [one.claim_id for group in batch.groups for one in group.earlier]
            assert self.world.report(self.batched, worked if suspects else [])
            assert not self.world.report(self.batched, [] if suspects else worked)
            assert all(self.world.find(claim) is suspects for claim in worked)
            self.posted.update(claims)
            self.reported += 1
        if crashes == "never" and self.reported > self.updates[-1]:
            self.updates.append(self.reported)
            self.world.publish(len(self.updates), self.reported)

    @precondition(lambda self: self.world.budget() < TOP_UP)
    @rule()
    def the_operator_pays_in(self) -> None:
        self.deposits += 1
        self.world.run(store.append, Deposit(reference=f"{self.deposits}", amount_micros=TOP_UP), 0)

    @rule()
    def the_coordinator_restarts(self) -> None:
        self.world.reopen()

    @invariant()
    def the_store_agrees_with_the_auditor(self) -> None:
        groups, leases, rollouts = self.world.run(_rows)
        assert len(set(self.trained)) == len(self.trained)
        assert sorted(row["lease_id"] for row in rollouts) == sorted(self.accepted)
        assert not any(row["state"] == "stale" for row in rollouts), "admission left something to drop"
        _no_prompt_is_lost(groups, leases, rollouts)
        self._money_is_right_to_the_micro(sum(row["max_cost_micros"] for row in leases if row["state"] in OPEN))

    def _money_is_right_to_the_micro(self, reserved: int) -> None:
        owed = [self.world.owed(key.node_id) for key in self.nodes]
        unsettled = len(self.accepted) - self.surplus - len(self.posted)
        assert sum(pending for pending, _ in owed) == unsettled * HONEST_TOKENS
        assert sum(payable for _, payable in owed) == (len(self.posted) + self.surplus) * HONEST_TOKENS
        assert self.world.budget() == self.deposits * TOP_UP - len(self.accepted) * HONEST_TOKENS
        assert reserved <= self.world.budget()


Rows = list[dict[str, Any]]


def _rows(connection: sa.Connection) -> tuple[Rows, ...]:
    every = (tables.groups, tables.leases, tables.rollouts)
    return tuple([dict(row) for row in connection.execute(sa.select(table)).mappings()] for table in every)


def _no_prompt_is_lost(groups: Rows, leases: Rows, rollouts: Rows) -> None:
    """Every group is open, or at most two open leases or exactly one rollout answer for it.

    A newcomer's lease leaves its group on trial: for this, that is as good as leased.
    """
    working = [row["group_no"] for row in leases if row["state"] in OPEN and not row["surplus"]]
    assert len(working) <= len(set(working)) + 1, "one group at a time may be given to two"
    expected = {
        "leased": sorted(set(working)),
        "accepted": sorted(row["group_no"] for row in rollouts if row["state"] == "buffered"),
        "trained": sorted(row["group_no"] for row in rollouts if row["state"] == "batched"),
    }
    kinds = {state: {state} | ({"trial"} if state == "leased" else set()) for state in expected}
    found = {state: sorted(row["group_no"] for row in groups if row["state"] in kinds[state]) for state in expected}
    assert found == expected
    assert sorted(row["group_no"] for row in groups) == list(range(len(groups)))


TestHistory = History.TestCase
TestHistory.settings = settings(max_examples=12, stateful_step_count=50, deadline=None)
