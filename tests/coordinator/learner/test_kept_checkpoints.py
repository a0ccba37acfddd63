"""The choice of checkpoints that stay on the disk: the newest, and those that replays of drawn updates begin with."""

from math import log2
from pathlib import Path

import pytest
from typer.testing import CliRunner

from coordinator.cli import app
from coordinator.learner.checkpoint import needed, newest
from coordinator.learner.policy import TrainedPolicy
from coordinator.learner.settings import TrainSettings
from protocol.errors import ConfigInvalid
from tests.coordinator.learner.groups import UNEQUAL


@pytest.mark.parametrize(
    ("drawn", "kept"),
    [
        (None, {12}),
        ((), {6, 9, 12}),
        ((1,), {0, 6, 9, 12}),
        ((3,), {0, 6, 9, 12}),
        ((4, 5), {3, 6, 9, 12}),
        ((99,), {6, 9, 12}),
    ],
)
def test_a_drawn_update_keeps_the_checkpoint_before_it(drawn: tuple[int, ...] | None, kept: set[int]) -> None:
    assert needed([0, 3, 6, 9, 12], drawn) == kept
    assert needed([], drawn) == set()


def test_checkpoints_that_nobody_needs_are_removed_and_the_others_are_whole(
    policy_folder: Path, tmp_path: Path
) -> None:
    settings = TrainSettings(learning_rate=1e-2, warmup_updates=1)
    policy = TrainedPolicy(policy_folder, settings)
    roots = {}
    for update in range(6):
        policy.saving(tmp_path, drawn=(2,))()()
        roots[update] = policy.rooting()()
        policy.train_step(UNEQUAL)
    assert sorted(int(path.name) for path in tmp_path.iterdir()) == [1, 3, 4, 5]
    assert newest(tmp_path) == tmp_path / "000000005"
    for number in (1, 5):
        resumed = TrainedPolicy(policy_folder, settings)
        resumed.restore(tmp_path / f"{number:09d}")
        assert resumed.rooting()() == roots[number]


def test_a_learner_on_another_machine_keeps_no_updates(tmp_path: Path) -> None:
    """The coordinator could not publish checkpoints of that machine, and auditors would accuse the round."""
    file = tmp_path / "round.toml"
    file.write_text(f'[round]\ndirectory = "{tmp_path / "round"}"\n[learner]\nkept_one_in = 5\n')
    result = CliRunner().invoke(app, ["learner", str(file), "--coordinator", "http://127.0.0.1:9"])
    assert isinstance(result.exception, ConfigInvalid)
    assert "kept_one_in" in str(result.exception)


@pytest.mark.parametrize("dense", [1, 2, 4])
@pytest.mark.parametrize("interval", [1, 3])
def test_a_retraction_makes_at_most_twice_the_updates_since_the_first_bad_one(dense: int, interval: int) -> None:
    """Dense lately, sparse before: what is left after each of thousands of checkpoints."""
    kept: set[int] = {0}
    for count in range(1, 1501):
        newest = interval * count
        kept = needed([*kept, newest], None, dense)
        if count % 97 and count > 200:
            continue
        assert 0 in kept
        assert {newest - interval * back for back in range(min(dense, count + 1))} <= kept
        assert len(kept) <= dense + 1 + 2 * log2(count / dense + 1)
        for bad in range(1, newest + 1):
            replayed = newest - max(number for number in kept if number < bad)
            assert replayed <= 2 * (newest - bad + 1) + interval


def test_drawn_updates_and_retractions_keep_checkpoints_together() -> None:
    numbers = list(range(0, 41, 2))
    assert needed(numbers, (21,), 2) == needed(numbers, (21,)) | needed(numbers, None, 2)
