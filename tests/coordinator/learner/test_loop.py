"""Which round a checkpoint may go on in."""

import pytest

from coordinator.learner.loop import follows
from protocol.errors import OutOfOrder
from protocol.learning import LearnerState

CHECKPOINT = {"version": 5, "ledger_size": 100, "ledger_head": b""}


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
    follows(at(version, ledger_size), CHECKPOINT)


@pytest.mark.parametrize(("version", "ledger_size"), [(4, 100), (5, 99), (0, 0)])
def test_a_round_that_was_put_back_is_refused(version: int, ledger_size: int) -> None:
    with pytest.raises(OutOfOrder, match="made at version 5"):
        follows(at(version, ledger_size), CHECKPOINT)
