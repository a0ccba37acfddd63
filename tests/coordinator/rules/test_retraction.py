"""The plan of a retraction: the last clean state, the groups to leave out, and what is made again."""

import pytest

from coordinator.rules.retraction import (
    EarlierRetraction,
    KeptState,
    OwnedGroup,
    RetractionPlan,
    named_owners,
    plan,
    to_leave_out,
)
from protocol import limits
from protocol.errors import ConfigInvalid

SIZES = dict.fromkeys(range(1, 11), 2)
"""Ten batches of two groups."""


def group(batch: int, owner: str, number: int = 0) -> OwnedGroup:
    return OwnedGroup(batch, f"{batch}-{owner}-{number}", frozenset({owner}))


def planned(
    groups: list[OwnedGroup],
    states: list[int | KeptState],
    earlier: tuple[EarlierRetraction, ...] = (),
    *,
    version: int = 0,
    chosen: int = 0,
) -> RetractionPlan | None:
    kept = [KeptState(each) if isinstance(each, int) else each for each in states]
    return plan(groups, kept, earlier, sizes=SIZES, version=version, chosen=chosen)


@pytest.mark.parametrize(
    ("first_bad", "start", "updates"),
    [(1, 0, 10), (2, 0, 10), (4, 3, 7), (5, 3, 7), (7, 6, 4), (10, 9, 1)],
    ids=["the first batch", "soon", "right after a checkpoint", "one later", "in the middle", "the newest batch"],
)
def test_the_replay_begins_with_the_last_state_before_the_first_bad_batch(
    first_bad: int, start: int, updates: int
) -> None:
    found = planned([group(first_bad, "a")], [0, 3, 6, 9])
    assert found is not None
    assert found.start == KeptState(start)
    assert (found.first_trained, found.last, found.updates) == (first_bad, 10, updates)
    assert [each.batch for each in found.left_out] == [first_bad]


def test_without_an_old_checkpoint_the_replay_begins_with_the_starting_policy() -> None:
    start = KeptState(0, is_start=True)
    found = planned([group(4, "a")], [start, 6, 9])
    assert found is not None
    assert found.start == start
    both = planned([group(4, "a")], [start, 0])
    assert both is not None
    assert both.start == KeptState(0), "a checkpoint has the random state, too"


def test_an_update_without_another_group_is_not_made_again() -> None:
    found = planned([group(5, "a"), group(5, "a", 1), group(7, "a")], [3])
    assert found is not None
    assert found.emptied == (5,)
    assert found.updates == 6


def test_groups_that_were_never_trained_on_need_no_retraction() -> None:
    assert planned([], [0, 3]) is None


def test_behind_a_version_of_the_operators_choice_no_replay_leads() -> None:
    states: list[int | KeptState] = [0, 3, KeptState(6, version=4)]
    found = planned([group(5, "a")], states, version=4, chosen=4)
    assert found is not None
    assert found.start is None
    found = planned([group(8, "a")], states, version=4, chosen=4)
    assert found is not None
    assert found.start == KeptState(6, version=4)


FIRST = EarlierRetraction(version=5, last=6, owners=frozenset({"a"}))
"""Owner a's groups in batches up to 6 were left out; version 5 is the result."""


def test_what_was_left_out_already_is_not_left_out_again_by_itself() -> None:
    assert planned([group(2, "a")], [0, 3], (FIRST,), version=5) is None
    found = planned([group(2, "a"), group(8, "a")], [0, 3, KeptState(7, version=5)], (FIRST,), version=5)
    assert found is not None
    assert found.start == KeptState(7, version=5)
    assert found.first_trained == 8


def test_a_replay_from_before_an_earlier_retraction_leaves_out_its_groups_too() -> None:
    """Checkpoint 3 was written when owner a's group of batch 2 was still in the policy."""
    groups = to_leave_out([group(2, "a"), group(5, "b"), group(9, "a")], ["b"], (FIRST,))
    assert [each.batch for each in groups] == [2, 5], "owner a may work again after the retraction"
    found = planned(groups, [0, 1, 3, KeptState(7, version=5)], (FIRST,), version=5)
    assert found is not None
    assert found.start == KeptState(1)
    assert [each.batch for each in found.left_out] == [2, 5]
    assert found.first_trained == 5


def test_more_owners_than_an_entry_can_name_are_refused_with_another_way_out() -> None:
    groups = [group(4 + number % 2, f"{number:03}") for number in range(limits.RETRACTED_OWNERS_MAX)]
    assert named_owners([*groups, *groups]) == sorted(f"{number:03}" for number in range(limits.RETRACTED_OWNERS_MAX))
    with pytest.raises(ConfigInvalid, match="257 owners") as refused:
        named_owners([*groups, group(3, "one more")])
    assert "before update 3" in refused.value.hint
