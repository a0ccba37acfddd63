"""Tests of the report of `make adversaries`: an attack that was not played proves nothing."""

import pytest

from tests.adversaries.__main__ import main, show
from tests.adversaries.campaign import Result
from tests.adversaries.forging import Canned
from tests.adversaries.tournament import Campaign

PLAYED = (
    Campaign(Canned, "torch/bf16/cpu", 2),
    Result(
        attack="canned answers", groups=2, cheats=2, by="replay", noticed_after=1, banned=True, gain_micros=0,
        per_group_micros=1.0, honest_groups=1, honest_hard_faults=0, honest_voided_micros=0,
    ),
)  # fmt: skip


@pytest.mark.parametrize(("played", "wanted", "sound"), [(0, 0, False), (0, 1, False), (1, 2, False), (1, 1, True)])
def test_what_was_not_played_is_not_sound(
    played: int, wanted: int, sound: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    assert show([PLAYED] * played, wanted) == sound
    assert (f"played: {played} of {wanted}" in capsys.readouterr().out) is not sound


def test_an_attack_that_does_not_exist_is_refused_with_those_that_do(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as refused:
        main(["--only", "Canned", "Typo"])
    assert refused.value.code == 2
    said = capsys.readouterr().err
    assert "no attack is called Typo" in said
    assert "Canned" in said
