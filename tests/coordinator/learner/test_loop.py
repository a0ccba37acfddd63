"""The learner's loop: rounds that it may continue, and claims with impossible log-probabilities."""

from collections.abc import Callable
from math import inf, nan
from pathlib import Path
from threading import Event
from types import SimpleNamespace

import pytest

from coordinator.config import parse
from coordinator.learner.loop import MISMATCH_NATS, WARMS, Learner, follows, mismatched
from coordinator.learner.outgoing import Outgoing
from coordinator.learner.start import EMBEDDED
from protocol.errors import OutOfOrder
from protocol.work.learning import LearnerProgress, LearnerState, UpdateReport


def at(version: int, ledger_size: int) -> LearnerState:
    return LearnerState(
        round_id="a" * 64,
        newest_version=version,
        newest_update=0,
        publish_every=1,
        ledger_size=ledger_size,
        ledger_head=b"",
        finished=False,
    )


@pytest.mark.parametrize(("version", "ledger_size"), [(5, 100), (6, 100), (6, 130)])
def test_a_round_that_went_on_is_followed(version: int, ledger_size: int) -> None:
    follows(at(version, ledger_size), version=5, ledger_size=100)


@pytest.mark.parametrize(("version", "ledger_size"), [(4, 100), (5, 99), (0, 0)])
def test_a_round_that_was_put_back_is_refused(version: int, ledger_size: int) -> None:
    with pytest.raises(OutOfOrder, match="has seen version 5"):
        follows(at(version, ledger_size), version=5, ledger_size=100)


def test_a_policy_that_is_broken_makes_no_honest_claim_suspect() -> None:
    """Claims have finite numbers, so a distance of NaN comes from our own weights."""
    distances = {"near": 0.5, "ours": nan, "at": MISMATCH_NATS, "far": 10.0, "impossible": inf}
    assert mismatched(distances) == ("at", "far", "impossible")


class Starting:
    """A client, crew and tracker in one, of a round whose versions come from a trainer; it records what is done."""

    policy = SimpleNamespace(update=0, before_change=None)

    def __init__(self) -> None:
        self.done: list[str] = []

    def another(self) -> "Starting":
        return self

    def mention(self, progress: LearnerProgress) -> None:
        self.done.append(f"{progress.phase}: {progress.detail}")

    def warm_start(self, _progress: object) -> None:
        self.done.append("warm start")

    def publishing(self, _folder: Path) -> Callable[[], None]:
        return lambda: self.done.append("written")

    def publish(self, version: int, update: int, _folder: Path) -> None:
        self.done.append(f"version {version} of update {update}")

    def over(self) -> None:
        self.done.append("over")

    def close(self) -> None:
        """Close nothing."""


@pytest.mark.parametrize("path", [EMBEDDED, "/a/policy"])
def test_the_start_of_another_trainer_is_neither_measured_nor_saved_and_says_that_it_takes_time(
    tmp_path: Path, path: str
) -> None:
    round_ = Starting()
    learner = Learner.__new__(Learner)
    vars(learner).update(
        _config=parse({"model": {"path": path}, "learner": {"external": True}}),
        _client=round_, _crew=round_, _tracker=round_, _policy=round_.policy, _sent=0, _folder=tmp_path / "learner",
    )  # fmt: skip
    learner.publish_start()
    warmed = [f"warm start: {WARMS}", "warm start"] if path == EMBEDDED else []
    assert round_.done == [*warmed, "written", "version 1 of update 0", "over"]


class Counting:
    """A client, crew and commitments in one: a round whose retraction comes while an update is made again."""

    policy = SimpleNamespace(update=2, before_change=None)
    resumed = None

    def __init__(self) -> None:
        self.reported: list[int] = []

    def report(self, report: UpdateReport) -> None:
        self.reported.append(report.number)

    def state(self) -> LearnerState:
        return at(5, 100).model_copy(update={"replacement": 5, "retracted": "9" * 64})

    def finish(self) -> None:
        """Wait for nothing."""

    def restore(self, _folder: Path) -> None:
        self.policy.update = 4

    def replaced(self, by: int, root: str) -> None:
        assert (by, root) == (5, "9" * 64)


def test_a_retraction_that_is_loaded_between_two_updates_passes_over_its_batches(tmp_path: Path) -> None:
    """Batch 4 was formed before the learner was killed, and its claims must be settled."""
    (tmp_path / "learner" / "retracted" / ("9" * 16) / "000000004").mkdir(parents=True)
    round_ = Counting()
    learner = Learner.__new__(Learner)
    vars(learner).update(
        _client=round_, _crew=round_, _commitments=round_, _policy=round_.policy, _seen=(0, 0), _taken=0, _last=10,
        _sent=0, _folder=tmp_path / "learner",
    )  # fmt: skip
    learner._refresh()
    assert round_.reported == [3, 4]


class Replacing:
    """A client, crew, tracker and commitments in one: the operator replaces the policy as version 5 is published."""

    resumed = None

    def __init__(self, ordered_at: int) -> None:
        self.policy = SimpleNamespace(update=3, before_change=None)
        self.ordered_at = ordered_at
        self.done: list[str] = []
        self.has_told, self.has_replaced = Event(), False

    def another(self) -> "Replacing":
        return self

    def close(self) -> None:
        """Close nothing."""

    def replace(self) -> None:
        self.has_told.wait()
        self.has_replaced = True

    def state(self) -> LearnerState:
        self.has_told.set()
        if self.has_replaced:
            return at(6, 100).model_copy(update={"newest_update": self.ordered_at, "replacement": 6})
        return at(5, 100).model_copy(update={"newest_update": 2})

    def fetch(self, version: int, _folder: Path) -> None:
        self.done.append(f"fetched {version}")

    def continue_from(self, _folder: Path) -> None:
        self.done.append("loaded")

    def replaced(self, _by: int, _root: str) -> None:
        """Commit to nothing."""

    def beside(self) -> dict[str, object]:
        return {}

    def publish(self, version: int, update: int, _folder: Path) -> None:
        self.done.append(f"version {version} of update {update}")

    def finish(self) -> None:
        """Wait for nothing."""

    def measured(self, _evaluated: object) -> None:
        """Record nothing."""

    def saving(self, *, version: int, taken: int, **_beside: object) -> Callable[[], Callable[[], None]]:
        return lambda: lambda: self.done.append(f"checkpoint of version {version}, taken {taken}")

    def publishing(self, _folder: Path) -> Callable[[], None]:
        return lambda: self.done.append("written")


@pytest.mark.parametrize("ordered_at", [2, 3])
def test_a_policy_that_is_replaced_while_the_version_before_is_published_is_loaded_and_not_published_again(
    tmp_path: Path, ordered_at: int
) -> None:
    round_, outgoing = Replacing(ordered_at), Outgoing()
    learner = Learner.__new__(Learner)
    vars(learner).update(
        _client=round_, _crew=round_, _commitments=round_, _tracker=round_, _policy=round_.policy, _outgoing=outgoing,
        _config=parse({}), _seen=(0, 0), _taken=0, _last=10, _sent=2, _folder=tmp_path / "learner",
    )  # fmt: skip
    outgoing.start(lambda: None, round_.replace)
    learner._release_if_due()
    outgoing.finish()
    assert round_.done == ["fetched 6", "loaded"]
