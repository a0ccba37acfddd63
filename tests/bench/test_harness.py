"""The bench harness keeps its form: the record, the last line and the exit status agree."""

import json
from pathlib import Path

import pytest

from bench.harness import Bench, quick_from_environment


def measured(results: Path) -> Bench:
    """A bench of two cases in three rounds; the machine slows down to a tenth in the last one."""
    bench = Bench("two-cases", inputs={"rounds": 3}, results=results, quick=True)
    for fast, slow in ((40.0, 10.0), (60.0, 20.0), (4.0, 1.0)):
        bench.measure("fast", fast, unit="MB/s")
        bench.measure("slow", slow, unit="MB/s")
    return bench


def test_a_met_bench_says_so_last_and_exits_0(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bench = measured(tmp_path)
    assert bench.goal("fast enough", bench.median("fast"), at_least=40.0, at_most=40.0)
    assert bench.finish() == 0
    assert capsys.readouterr().out.splitlines()[-1] == "RESULT two-cases met"


def test_a_missed_goal_is_named_last_and_exits_1(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bench = measured(tmp_path)
    bench.goal("fast enough", bench.median("fast"), at_least=1.0)
    bench.goal("small enough", 3.0, at_most=2.0)
    bench.check("came to an end", ok=False)
    assert bench.finish() == 1
    assert capsys.readouterr().out.splitlines()[-1] == "RESULT two-cases missed: small enough, came to an end"


def test_the_record_holds_every_value_and_every_judgement(tmp_path: Path) -> None:
    bench = measured(tmp_path)
    bench.goal("ratio", bench.ratio("fast / slow", "fast", "slow"), at_least=3.5)
    bench.finish()
    record = json.loads((tmp_path / "two-cases.json").read_text())
    assert record["inputs"] == {"rounds": 3}
    assert record["quick"] is True
    assert record["machine"]["cores"] >= 1
    assert record["date"].endswith("+00:00")
    assert record["cases"]["fast"] == {"unit": "MB/s", "values": [40.0, 60.0, 4.0], "median": 40.0}
    assert record["goals"] == {"ratio": {"value": 4.0, "at_least": 3.5, "at_most": None, "met": True}}
    assert record["met"] is True


def test_a_ratio_is_the_median_of_the_rounds(tmp_path: Path) -> None:
    bench = measured(tmp_path)
    assert bench.ratio("fast / slow", "fast", "slow") == 4.0  # of 4, 3 and 4, although the last round was slow


def test_cases_of_unequal_rounds_are_not_compared(tmp_path: Path) -> None:
    bench = measured(tmp_path)
    bench.measure("fast", 1.0)
    with pytest.raises(ValueError, match="zip"):
        bench.ratio("fast / slow", "fast", "slow")


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_is_no_number_is_refused(tmp_path: Path, value: float) -> None:
    bench = measured(tmp_path)
    with pytest.raises(ValueError, match="no measurement"):
        bench.measure("fast", value)
    with pytest.raises(ValueError, match="no measurement"):
        bench.goal("fast enough", value, at_least=1.0)


def test_a_bench_without_a_bound_or_a_goal_is_a_mistake(tmp_path: Path) -> None:
    bench = measured(tmp_path)
    with pytest.raises(ValueError, match="no bound"):
        bench.goal("anything", 1.0)
    with pytest.raises(ValueError, match="without a goal"):
        bench.finish()


@pytest.mark.parametrize(("value", "quick"), [("1", True), ("0", False), ("", False)])
def test_quick_comes_from_the_environment(monkeypatch: pytest.MonkeyPatch, value: str, quick: bool) -> None:
    monkeypatch.setenv("QUICK", value)
    assert quick_from_environment() is quick
