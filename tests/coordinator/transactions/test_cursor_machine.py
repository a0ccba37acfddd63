"""The cursor of the data under random histories: leases, answers, losses, batches, crashes; with and without selection.

Whatever the order:

- every place of the train split that was looked at became one group, waits for that, or was left out for a reason;
- no group is lost, and none is trained on twice;
- a coordinator that is started again from its files, at any moment, gives the same prompts and the same batch;
- every prompt is leased again within bounded time, whatever was measured of it.
"""

import shutil
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from coordinator.rules.selection import OFF, SelectionRules
from coordinator.store import tables
from coordinator.store.facts import get_fact
from coordinator.transactions.curriculum import STANDS
from protocol.wire.signing import NodeKey
from protocol.work.lease import Lease
from protocol.work.rollout import pack_logprobs, pack_tokens, unpack_tokens
from tests.coordinator.world import END, World, answer, honest_sample

PROBLEMS, NODES = 5, 2
RULES = (
    OFF,
    SelectionRules(filter_after=1, probe_every=2, window=3),
    SelectionRules(filter_after=2, probe_every=4, window=8),
    SelectionRules(window=4, share=0.5, probe_every=3),
    SelectionRules(filter_after=1, window=5, share=0.3, exploration=0.0, probe_every=5),
)


class CursorMachine(RuleBasedStateMachine):
    """A round whose data set has few prompts, so that they come up again and again."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = TemporaryDirectory()

    @initialize(rules=st.sampled_from(RULES), size=st.integers(1, 3), lookahead=st.sampled_from([0, 4]))
    def begin(self, rules: SelectionRules, size: int, lookahead: int) -> None:
        self.options: dict[str, Any] = {
            "staleness": 10_000,
            "size": size,
            "lookahead": lookahead,
            "selection": rules,
            "problems": PROBLEMS,
        }
        self.world = World(Path(self.folder.name), **self.options)
        self.world.publish(1, 0)
        self.keys = [self.world.join(number) for number in range(1, NODES + 1)]
        self.held: dict[str, tuple[NodeKey, Lease]] = {}
        self.batches: list[list[str]] = []

    def teardown(self) -> None:
        if hasattr(self, "world"):
            self.a_copy_goes_on_as_the_original_does()
            self.world.database.close()
        self.folder.cleanup()

    @rule(who=st.integers(0, NODES - 1), wanted=st.integers(1, 5))
    def a_node_takes_leases(self, who: int, wanted: int) -> None:
        for lease in self.world.offer(self.keys[who], groups=wanted).leases:
            self.held[lease.lease_id] = (self.keys[who], lease)

    @rule(data=st.data(), rights=st.lists(st.integers(0, 2), min_size=1, max_size=4))
    def answers_arrive(self, data: Any, rights: list[int]) -> None:
        """All wrong, half right or all right."""
        for right in rights[: len(self.held)]:
            key, lease = self.held.pop(data.draw(st.sampled_from(sorted(self.held))))
            submit(self.world, key, lease, right)

    @rule(data=st.data())
    def a_node_gives_back(self, data: Any) -> None:
        if self.held:
            key, lease = self.held.pop(data.draw(st.sampled_from(sorted(self.held))))
            self.world.give_back(key, lease)

    @rule(part=st.sampled_from([0.4, 1.1]))
    def time_passes(self, part: float) -> None:
        self.world.now_ms += int(part * self.world.terms.timeout_ms)
        self.world.expire()

    @rule()
    def the_learner_trains(self) -> None:
        batch = self.world.batch(len(self.batches) + 1)
        if batch is not None:
            self.batches.append([group.claim_id for group in batch.groups])
            self.world.report(batch.number)

    @rule()
    def all_crash(self) -> None:
        before = self.world.dump()
        self.world.reopen()
        assert self.world.dump() == before
        for number, claims in enumerate(self.batches, 1):
            again = self.world.batch(number)
            assert again is not None
            assert [group.claim_id for group in again.groups] == claims

    @invariant()
    def every_place_is_accounted_for(self) -> None:
        if not hasattr(self, "world"):
            return
        rows = self.world.rows(tables.groups)
        numbers, places = [row["group_no"] for row in rows], [row["prompt"] for row in rows]
        assert sorted(numbers) == list(range(len(rows))), "no group is lost"
        assert len(set(places)) == len(places), "no place is used twice"
        stands = self.world.run(get_fact, STANDS)
        if stands is None:
            assert sorted(places) == list(range(len(rows)))
            return
        assert not set(places) & set(stands["chosen"])
        left_out = sum(stands["counts"].values()) - stands["counts"]["probed"]
        assert len(places) + len(stands["chosen"]) + left_out == stands["next"]
        assert max([*places, *stands["chosen"]]) < stands["next"]

    @invariant()
    def nothing_is_trained_on_twice(self) -> None:
        if hasattr(self, "world"):
            trained = [row["group_no"] for row in self.world.rows(tables.rollouts) if row["state"] == "batched"]
            assert len(set(trained)) == len(trained) == sum(map(len, self.batches))

    def a_copy_goes_on_as_the_original_does(self) -> None:
        """Compare two rounds from the same file: the open leases, the next prompts, and the batch that they make."""
        self.world.now_ms += 2 * self.world.terms.timeout_ms
        self.world.expire()
        self.world.database.close()
        with TemporaryDirectory() as elsewhere:
            copy = World(Path(elsewhere), **self.options)
            copy.database.close()
            assert isinstance(self.world.where, Path)
            assert isinstance(copy.where, Path)
            shutil.copyfile(self.world.where, copy.where)
            copy.now_ms, copy.draw = self.world.now_ms, self.world.draw
            self.world.reopen()
            copy.reopen()
            number = len(self.batches) + 1
            assert went_on(self.world, number) == went_on(copy, number)
            copy.database.close()


def submit(world: World, key: NodeKey, lease: Lease, right: int) -> str:
    good = honest_sample(lease)
    bad = good.model_copy(update={"tokens": pack_tokens([9, END]), "logprobs": pack_logprobs([-1.0, -1.0])})
    samples = tuple(good if number < right else bad for number in range(lease.samples))
    return world.submit(key, answer(key, lease, samples=samples)).outcome


def went_on(world: World, number: int) -> tuple[list[int], list[bytes]]:
    """Return the leases of one honest node from now on, until every prompt came up; and the next batch."""
    key, served = world.join(99), list[int]()
    rules, waiting = world.terms.selection, len(world.rows(tables.groups))
    most = waiting + 4 * PROBLEMS * rules.probe_every + 4 * rules.window
    while len(served) < most and (len(served) < 8 or set(served) != set(range(PROBLEMS))):
        lease = world.lease(key)
        problem = int(unpack_tokens(lease.prompt)[0]) - 10
        served.append(problem)
        assert submit(world, key, lease, 1 if problem % 2 else 2) == "accepted"
    assert set(served) == set(range(PROBLEMS)), f"some prompts never come up again: {served}"
    batch = world.batch(number)
    assert batch is not None
    return served, [group.prompt for group in batch.groups]


TestCursorMachine = CursorMachine.TestCase
TestCursorMachine.settings = settings(max_examples=8, stateful_step_count=12, deadline=None)
