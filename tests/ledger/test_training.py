"""The chain of updates: what continues it, and every change of state, batch or number that does not."""

import pytest

from ledger.entry import Entry
from ledger.training import TrainingChain, TrainingSummary, groups_root, is_drawn
from ledger.tree import EMPTY_ROOT, leaf_hash, root_of
from protocol.errors import ProofInvalid
from tests.ledger.naive_tree import mth
from tests.ledger.values import formed, retraction, trained, version

THREE: list[Entry] = [version(1), formed(1), trained(1, "1", "2"), formed(2), trained(2, "2", "3"), formed(3)]


def chain(entries: list[Entry]) -> TrainingChain:
    made = TrainingChain()
    for index, entry in enumerate(entries):
        made.add(index, entry)
    return made


def test_updates_that_follow_each_other_are_one_chain() -> None:
    made = chain([*THREE, trained(3, "3", "4")])
    assert made.summary == TrainingSummary(first=1, last=3, settings=((1, "5" * 64),))
    assert made.places == {1: 2, 2: 4, 3: 6}


@pytest.mark.parametrize(
    ("entry", "said"),
    [
        (trained(3, "9", "4"), "the weights or the optimizer were changed in between"),
        (trained(4, "3", "4"), "an update was skipped"),
        (trained(3, "3", "4", groups="c"), "groups or rewards were changed after that"),
        (trained(3, "3", "4", attempt=2), "attempt 1 would be the next"),
        (trained(2, "2", "4"), "attempt 2 would be the next"),
        (trained(3, "9", "4", by=2), "version 2, which is not in the log"),
    ],
    ids=["weights copied from elsewhere", "skipped", "another batch", "attempt", "repeated", "unknown version"],
)
def test_an_entry_that_does_not_continue_the_chain_is_refused(entry: Entry, said: str) -> None:
    with pytest.raises(ProofInvalid, match=said):
        chain([*THREE, entry])


def test_an_update_without_a_batch_is_refused_once_batches_are_logged() -> None:
    with pytest.raises(ProofInvalid, match="batch 3 was never formed"):
        chain([*THREE[:-1], trained(3, "3", "4")])
    assert chain([version(1), trained(4, "1", "2"), formed(5), trained(5, "2", "3")]).summary.first == 4


def test_an_update_that_is_made_again_is_counted_and_the_chain_follows_its_result() -> None:
    again: list[Entry] = [*THREE, trained(3, "3", "4"), trained(2, "2", "a", attempt=2)]
    made = chain([*again, trained(3, "a", "b", attempt=2)])
    assert made.summary.repeated == 2
    with pytest.raises(ProofInvalid, match="in between"):
        chain([*again, trained(3, "3", "b", attempt=2)])


def test_the_first_update_in_the_log_begins_with_one_state_however_often_it_is_made() -> None:
    first: list[Entry] = [version(1), formed(1), trained(1, "1", "2")]
    assert chain([*first, trained(1, "1", "3", attempt=2)]).summary.repeated == 1
    with pytest.raises(ProofInvalid, match="in between"):
        chain([*first, trained(1, "4", "3", attempt=2)])


def test_a_version_of_the_operator_and_other_settings_are_named() -> None:
    summary = chain([*THREE, trained(3, "9", "4", by=1, settings="6")]).summary
    assert summary.replaced == (1,)
    assert summary.settings == ((1, "5" * 64), (3, "6" * 64))


RETRACTED: list[Entry] = [*THREE, trained(3, "3", "4"), version(2), retraction(2, 2, 3, "2", "b"), formed(4)]


def test_an_update_after_a_retraction_begins_with_the_state_that_it_ended_with() -> None:
    made = chain([*RETRACTED, trained(4, "b", "c", by=2), formed(5), trained(5, "c", "d")])
    assert [each.version for each in made.summary.retractions] == [2]
    again: list[Entry] = [version(3), retraction(3, 4, 5, "b", "e"), formed(6), trained(6, "e", "f", by=3)]
    assert chain([*RETRACTED, formed(5), *again]).summary.last == 6, "a retraction may begin with another's result"


@pytest.mark.parametrize(
    ("entries", "said"),
    [
        ([trained(4, "9", "c", by=2)], "other weights were put in its place"),
        ([trained(4, "b", "c")], "does not begin with version 2, the result of a retraction up to update 3"),
        ([trained(4, "4", "c")], "does not begin with version 2, the result of a retraction up to update 3"),
        ([version(3), retraction(3, 1, 4, "9", "e")], "which is none after update 0"),
        ([formed(5), trained(5, "b", "c", by=2)], "whose retraction ends with update 3"),
        ([version(3), retraction(3, 3, 4, "9", "e")], "which is none after update 2"),
        ([version(3), retraction(2, 3, 4, "3", "e")], "the last version in the log is 3"),
        ([version(3), retraction(3, 3, 9, "3", "e")], "batch 9 was never formed"),
        ([version(3), retraction(3, 3, 2, "3", "e")], "back to update 2"),
    ],
    ids=[
        "other weights",
        "unnamed",
        "not loaded",
        "another starting policy",
        "another update",
        "another start",
        "another version",
        "no batch",
        "backwards",
    ],
)
def test_a_retraction_that_lies_is_refused(entries: list[Entry], said: str) -> None:
    with pytest.raises(ProofInvalid, match=said):
        chain([*RETRACTED, *entries])


def test_a_rollback_may_follow_a_retraction_before_its_last_update_has_an_entry() -> None:
    """A learner that was killed in its last update loads the result, passes over the batch, and then the rollback."""
    killed: list[Entry] = [*THREE, version(2), retraction(2, 2, 3, "2", "b"), version(3), formed(4)]
    assert chain([*killed, trained(4, "9", "c", by=3)]).summary.replaced == (3,)
    with pytest.raises(ProofInvalid, match="does not begin with version 2"):
        chain([*killed, trained(4, "9", "c")])
    with pytest.raises(ProofInvalid, match="does not begin with version 2"):
        chain([*killed, trained(4, "9", "c", by=1)])


def test_a_learner_that_loads_a_later_version_before_the_retraction_is_repeated_without_it() -> None:
    """A learner that resumes from an older checkpoint loads the rollback there, and makes the next updates again."""
    again: list[Entry] = [version(3), trained(3, "9", "5", attempt=2, by=3), trained(4, "5", "6")]
    assert chain([*RETRACTED, *again]).summary.last == 4


@pytest.mark.parametrize("count", [0, 1, 2, 3, 7, 8, 9])
def test_the_root_of_groups_is_that_of_rfc_6962(count: int) -> None:
    groups = [bytes([number]) for number in range(count)]
    assert groups_root(groups) == root_of([leaf_hash(group) for group in groups]).hex()
    assert bytes.fromhex(groups_root(groups)) == (mth(groups) if groups else EMPTY_ROOT)


def test_one_of_k_updates_is_drawn_and_nobody_can_tell_which_without_the_root() -> None:
    root = bytes(range(32))
    drawn = [update for update in range(1, 10_001) if is_drawn(root, update, 10)]
    assert 850 <= len(drawn) <= 1150  # five standard deviations
    assert drawn != [update for update in range(1, 10_001) if is_drawn(bytes(32), update, 10)]
    assert all(is_drawn(root, update, 1) for update in range(1, 100))
    assert not any(is_drawn(root, update, 0) for update in range(1, 100))
