"""Admission, by simulation: whatever the order of events, what intake accepts is trained on in time.

- The simulated round keeps its own books; only the decisions are the real ones.
- Nodes may hold old versions, answer late, or never; versions may be published late.
"""

from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from coordinator.rules.lease_allowance import admissible_groups, is_stale


@pytest.mark.parametrize(
    ("staleness", "size", "visible", "issued", "admissible"),
    [
        (0, 16, 0, 0, 16),  # on-policy: one batch, no more
        (0, 16, 0, 15, 1),
        (0, 16, 0, 16, 0),
        (4, 16, 0, 79, 1),  # S + 1 batches
        (4, 16, 0, 80, 0),
        (4, 16, 0, 500, 0),  # never negative, whatever happened
        (4, 16, 3, 80, 48),
        (2, 1, 10**6, 10**6, 3),
    ],
)
def test_admission_by_hand(staleness: int, size: int, visible: int, issued: int, admissible: int) -> None:
    found = admissible_groups(staleness=staleness, groups_per_update=size, visible_update=visible, issued_groups=issued)
    assert found == admissible


@given(st.integers(0, 8), st.integers(0, 100), st.integers(0, 100))
def test_the_bound_itself_is_not_yet_stale(staleness: int, policy_update: int, lag: int) -> None:
    stale = is_stale(staleness=staleness, policy_update=policy_update, learner_update=policy_update + lag)
    assert stale == (lag > staleness)


@given(st.integers(0, 6), st.integers(1, 7), st.integers(1, 20), st.integers(0, 200))
def test_a_waiting_learner_is_never_starved(staleness: int, kappa: int, size: int, update: int) -> None:
    """A node with the newest version may always start the groups that the batch lacks, if kappa is within the bound."""
    kappa = min(kappa, staleness + 1)
    newest = update - update % kappa
    for ready in range(size):
        admissible = admissible_groups(
            staleness=staleness,
            groups_per_update=size,
            visible_update=newest,
            issued_groups=update * size + ready,
        )
        assert admissible >= size - ready


@dataclass(order=True)
class Group:
    """An accepted group in the order in which batches take them."""

    update: int
    accepted: int
    number: int = field(compare=False)


class Swarm(RuleBasedStateMachine):
    """A round on paper."""

    @initialize(staleness=st.integers(0, 4), size=st.integers(1, 4), late=st.integers(0, 4))
    def begin(self, staleness: int, size: int, late: int) -> None:
        self.staleness, self.size = staleness, size
        self.kappa = 1 + late % (staleness + 1)
        self.learner_update = 0
        self.published = [0]
        self.leased: list[tuple[int, int]] = []  # number, update
        self.buffer: list[Group] = []
        self.clock = 0

    @property
    def issued(self) -> int:
        return self.learner_update * self.size + len(self.leased) + len(self.buffer)

    def may_start(self, update: int) -> int:
        return admissible_groups(
            staleness=self.staleness,
            groups_per_update=self.size,
            visible_update=update,
            issued_groups=self.issued,
        )

    def too_old(self, update: int) -> bool:
        return is_stale(staleness=self.staleness, policy_update=update, learner_update=self.learner_update)

    @rule(data=st.data(), wanted=st.integers(1, 8))
    def a_node_takes_leases(self, data: Any, wanted: int) -> None:
        update = data.draw(st.sampled_from(self.published[-3:]))
        if not self.too_old(update):
            for _ in range(min(wanted, self.may_start(update))):
                self.clock += 1
                self.leased.append((self.clock, update))

    @rule(data=st.data(), count=st.integers(1, 8))
    def answers_arrive_in_any_order(self, data: Any, count: int) -> None:
        for _ in range(min(count, len(self.leased))):
            number, update = self.leased.pop(data.draw(st.integers(0, len(self.leased) - 1)))
            if not self.too_old(update):
                self.clock += 1
                self.buffer.append(Group(update, self.clock, number))

    @rule(data=st.data())
    def a_lease_expires(self, data: Any) -> None:
        if self.leased:
            self.leased.pop(data.draw(st.integers(0, len(self.leased) - 1)))

    @rule()
    def the_learner_trains(self) -> None:
        if len(self.buffer) >= self.size:
            self.buffer.sort()
            for group in self.buffer[: self.size]:
                assert self.learner_update - group.update <= self.staleness
            del self.buffer[: self.size]
            self.learner_update += 1

    @rule()
    def a_version_is_published(self) -> None:
        newest = self.learner_update - self.learner_update % self.kappa
        if newest > self.published[-1]:
            self.published.append(newest)

    @invariant()
    def nothing_that_was_accepted_grows_too_old(self) -> None:
        if hasattr(self, "buffer"):
            assert not any(self.too_old(group.update) for group in self.buffer)

    def teardown(self) -> None:
        """Continue from any state: all leases expire, and a node loads the newest version."""
        if not hasattr(self, "buffer"):
            return
        self.a_version_is_published()
        self.leased.clear()
        assert len(self.buffer) >= self.size or self.may_start(self.published[-1]) >= self.size - len(self.buffer)


TestSwarm = Swarm.TestCase
TestSwarm.settings = settings(max_examples=60, deadline=None)
