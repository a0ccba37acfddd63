"""The learner's loop: rounds that it may continue, and claims with impossible log-probabilities."""

from math import inf, nan

import pytest

from coordinator.learner.loop import MISMATCH_NATS, follows, mismatched
from protocol.errors import OutOfOrder
from protocol.work.learning import LearnerState


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
