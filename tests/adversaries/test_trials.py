"""Tests of the report of `make adversaries` on attacks that tests play: only those that passed were withstood."""

import json
from pathlib import Path

import pytest

from tests.adversaries import trials
from tests.adversaries.__main__ import play_outsiders
from tests.adversaries.outsiders import OUTSIDERS, Outsider, chosen

TESTS = """
import pytest

def test_stands():
    pass

def test_falls():
    assert not "an attack"

@pytest.mark.skip("no such machine")
def test_waits():
    pass

@pytest.mark.parametrize("form", ["here", "elsewhere"])
def test_stands_in_one_form(form):
    if form == "elsewhere":
        pytest.skip("no such database")
"""


def test_only_what_ran_and_passed_was_withstood(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "test_made_up.py"
    file.write_text(TESTS)
    names = ["test_stands", "test_falls", "test_waits", "test_stands_in_one_form"]
    whole = Outsider("whole", {str(file): ["test_stands", "test_stands_in_one_form"]})
    broken = Outsider("broken", {str(file): names})
    trials.play(tmp_path, [whole, broken])
    done = list(trials.played(tmp_path, [whole, broken]))
    assert [ends for _, ends in done] == [
        {"test_stands": "passed", "test_stands_in_one_form": "passed"},
        {
            "test_stands": "passed",
            "test_falls": "failed",
            "test_waits": "skipped",
            "test_stands_in_one_form": "passed",
        },
    ]
    assert trials.show(done[:1], 1)
    assert capsys.readouterr().out.endswith(f"| whole | {whole.played_by} | yes |\n")
    assert not trials.show(done, 2)
    assert capsys.readouterr().out.endswith("| test_falls: failed; test_waits: skipped |\n")
    assert not trials.show(done[:1], 2)
    assert "played: 1 of 2" in capsys.readouterr().out
    assert not trials.show([(whole, {})], 1)
    assert "test_stands: not run" in capsys.readouterr().out.replace(str(file) + "::", "")
    (log,) = tmp_path.glob("Broken-*.log")
    assert 'assert not "an attack"' in log.read_text()


@pytest.mark.slow
def test_a_test_that_is_not_there_ends_nothing_well(tmp_path: Path) -> None:
    gone = Outsider("gone", {"tests/adversaries/test_trials.py": ["test_no_such"]})
    trials.play(tmp_path, [gone])
    assert all(not ends for _, ends in trials.played(tmp_path, [gone]))


def test_what_was_played_is_shown_and_not_played_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    outsider = OUTSIDERS[0]
    assert outsider.name == "ChunkPoisoning"
    assert chosen([outsider.name]) == [outsider]
    assert chosen([]) == list(OUTSIDERS)
    assert not play_outsiders(tmp_path, [outsider.name], only_show=True)
    assert "played: 0 of 1" in capsys.readouterr().out
    trials.place(tmp_path, outsider).write_text(
        json.dumps({test: "passed" for tests in outsider.tests.values() for test in tests})
    )
    assert play_outsiders(tmp_path, [outsider.name], only_show=False)
    assert capsys.readouterr().out.endswith(f"| {outsider.attack} | {outsider.played_by} | yes |\n")
    assert play_outsiders(tmp_path, ["Canned"], only_show=False)
    assert capsys.readouterr().out == "", "nothing of this table was asked for"
