"""The preview of a round before it is joined: a range by those who work there, or that nobody knows."""

from pathlib import Path
from typing import Any, cast

import pytest
import typer
from typer.testing import CliRunner

from coordinator.config.round import RoundSection
from protocol.errors import Unreachable
from protocol.text.money import Unit
from protocol.wire.signing import NodeKey
from swarm_node.cli import app
from swarm_node.commands.join import FittingRound, end_dry_run, verdict_line
from swarm_node.commands.preview import finding_line, key_in_use, lines, understood, why_not
from swarm_node.coordinator_api.client import Coordinator
from swarm_node.doctor import line, report
from swarm_node.doctor.examine import description_texts, judge_earnings
from swarm_node.doctor.forecast import MeasuredSpeed, find_speed, forecast, record_speed
from swarm_node.doctor.line import RoundAnswer
from swarm_node.doctor.report import CheckState
from swarm_node.engine.client import Choose
from swarm_node.member import MemberSettings

NOW_MS = 1_000_000_000
EUR = Unit("EUR", 2)
STATUS: dict[str, Any] = {
    "as_of_ms": NOW_MS,
    "max_price_micros_per_mtok": 5_000_000,
    "budget_micros": 10**9,
    "finished": False,
    "nodes_alive": 4,
    "update": 3,
    "max_updates": 100,
    "learner_idle_share_lately": 0.25,
    "fleet": [],
}


def row(tokens_per_s: float, *, phase: str = "generating", silent_ms: int = 0) -> dict[str, Any]:
    return {"tokens_per_s": tokens_per_s, "phase": phase, "last_seen_ms": NOW_MS - silent_ms}


def test_the_range_goes_from_the_slow_quarter_as_busy_as_now_to_the_fast_quarter() -> None:
    rows = [row(100), row(200), row(300, phase="idle"), row(400, phase="idle"), row(1e9, silent_ms=61_000), row(0)]
    found = forecast(STATUS, rows, price=1_000_000, unit=EUR)
    assert (found.low, found.high, found.unknown) == (int(175 * 0.5 * 3600), (325 * 3600), "")
    assert "Rough" in found.basis


def test_a_key_that_is_active_elsewhere_is_warned_of_and_one_that_left_is_not() -> None:
    me = row(100) | {"node_id": "me"}
    (said,) = key_in_use(STATUS, [row(1) | {"node_id": "other"}, me | {"last_seen_ms": NOW_MS - 3000}], "me")
    assert said.startswith("WARNING: Key: an agent with this node's key was active 3 s ago")
    assert said.endswith("If this agent has just crashed, wait 15 s and ignore this warning.")
    for row_ in (me | {"phase": "left"}, me | {"last_seen_ms": NOW_MS - 16_000}, me | {"node_id": "other"}):
        assert key_in_use(STATUS, [row_], "me") == []
    assert key_in_use({}, [me], "me") == []
    assert key_in_use(STATUS, [{}], "me") == []


def test_a_full_disk_is_a_warning_with_its_step_and_small_sizes_are_not_zero() -> None:
    full = report.fail("disk", "There is not enough disk space.", "12 MB free, 1.07 GB needed", "Free some space.")
    said = "WARNING: Disk: There is not enough disk space. 12 MB free, 1.07 GB needed. Free some space."
    assert finding_line(full) == said
    assert finding_line(report.ok("disk", "Enough.", "2 GB free")) == "Disk: Enough. 2 GB free"


def test_nobody_is_promised_more_than_the_budget_has() -> None:
    found = forecast(STATUS | {"budget_micros": 500}, [row(100), row(200)], price=1_000_000, unit=EUR)
    assert (found.low, found.high) == (500, 500)


@pytest.mark.parametrize(
    ("changes", "rows", "price", "why"),
    [
        ({}, [], 1, "0 nodes have reported a speed here"),
        ({}, [row(10)], 1, "1 node has reported a speed here"),
        ({}, [row(1), row(2)], 5_000_001, "pays at most 5.00 EUR per million tokens"),
    ],
)
def test_what_nobody_knows_is_called_unknown(
    changes: dict[str, Any], rows: list[dict[str, Any]], price: int, why: str
) -> None:
    found = forecast(STATUS | changes, rows, price=price, unit=EUR)
    assert why in found.unknown
    assert f"Earnings: unknown: {found.unknown}" in list(lines(STATUS | changes, rows, price=price, unit=EUR))


def test_a_finished_round_invites_nobody() -> None:
    over = STATUS | {"finished": True, "update": 100, "exact_bonus": 0.1}
    said = list(lines(over, [row(1), row(2)], price=1_000_000, unit=EUR, speed=MeasuredSpeed(100.0, NOW_MS)))
    assert said == [
        "Round: finished; it gives no more work; update 100 of 100",
        "Earnings: none: the round is finished",
    ]
    assert forecast(over, [row(1), row(2)], price=1, unit=EUR).unknown == "the round is finished"


def test_the_doctor_fails_a_finished_round_and_judges_one_that_runs() -> None:
    found = judge_earnings(STATUS | {"finished": True, "update": 100}, [], EUR, None)
    assert (found.state, found.evidence) == (CheckState.FAIL, "update 100 of 100")
    assert "finished" in found.said
    assert "bench" not in found.next_step
    assert judge_earnings(STATUS, [], EUR, MeasuredSpeed(100.0, NOW_MS)).state is CheckState.OK
    assert judge_earnings({}, [], EUR, None).state is CheckState.SKIP


def test_an_estimate_without_work_now_is_an_upper_bound_and_is_not_called_sure() -> None:
    """A node of which all are idle has no lower bound, and nothing is said of a day."""
    speed = MeasuredSpeed(100.0, NOW_MS - 7_200_000)
    said = list(lines(STATUS, [row(1, phase="idle")], price=1_000_000, unit=EUR, speed=speed))[-1]
    assert said == (
        "Earnings: up to 0.36 EUR per hour, while there is work, from the 100 tokens/s that this machine reached in "
        "this round 2 h ago. Rough: 0 of 1 node here sample now"
    )


def test_a_bonus_for_exact_work_is_shown_before_joining_with_the_class_that_gets_it() -> None:
    terms = STATUS | {"exact_bonus": 0.05, "exact_classes": ["exact/fp32/cpu-0123456789ab"]}
    said = "\n".join(lines(terms, [], price=1_000_000, unit=EUR))
    assert "Bonus: 5.00% more with --dtype exact" in said
    assert "class exact/fp32/cpu-0123456789ab" in said
    assert "none yet" in "\n".join(lines(STATUS | {"exact_bonus": 0.05}, [], price=1, unit=EUR))
    assert "Bonus" not in "\n".join(lines(STATUS, [], price=1, unit=EUR))


def test_demand_tells_who_is_wanted_and_who_stands_by() -> None:
    fleet = [{"works": True}, {"works": True}, {"works": False}]
    said = "\n".join(lines(STATUS | {"fleet": fleet}, [row(1), row(2)], price=1, unit=EUR))
    assert "2 selected for work, 1 on standby" in said
    assert "waits for samples 25% of the time" in said


def test_the_first_node_is_told_that_training_waits_for_it() -> None:
    quiet = STATUS | {"nodes_alive": 0, "learner_idle_share_lately": 0.0}
    assert "Demand: high; no node works here" in "\n".join(lines(quiet, [], price=1, unit=EUR))
    assert "high" not in "\n".join(lines(quiet | {"finished": True}, [], price=1, unit=EUR))


@pytest.mark.parametrize(
    ("changes", "said"),
    [({"nodes_alive": 0}, "Round: 0 active nodes;"), ({"finished": True}, "Round: finished;")],
)
def test_where_nobody_works_nobody_is_said_to_be_wanted(changes: dict[str, Any], said: str) -> None:
    told = next(iter(lines(STATUS | changes, [], price=1, unit=EUR)))
    assert told.startswith(said)
    assert "wanted" not in told


@pytest.mark.parametrize(
    ("status", "rows"),
    [
        ({}, []),
        (STATUS | {"fleet": [1]}, []),
        (STATUS | {"max_price_micros_per_mtok": "all"}, []),
        (STATUS | {"budget_micros": float("inf")}, [row(1), row(2)]),
        (STATUS, [row(1), {}]),
        (STATUS, "rows"),
    ],
)
def test_a_coordinator_that_talks_nonsense_is_not_understood(status: dict[str, Any], rows: Any) -> None:
    (said,) = understood(status, rows, price=1, unit=EUR)
    assert "unknown" in said


def test_a_dry_run_that_learns_nothing_fails(tmp_path: Path) -> None:
    words = ("join", f"http://127.0.0.1:9#{'a' * 64}", "--dry-run", "--engine", "torch", "--home", str(tmp_path))
    found = CliRunner().invoke(app, words)
    assert isinstance(found.exception, Unreachable), found.output


def test_the_last_line_of_a_dry_run_says_whether_this_machine_can_join() -> None:
    full = report.fail("disk", "There is not enough disk space.", "", "Free some space.")
    assert verdict_line(why_not(STATUS, 1, EUR, [report.ok("disk", "fine")])).startswith("This machine can join")
    assert why_not(STATUS | {"finished": True}, 1, EUR).startswith("the round is finished")
    assert why_not(STATUS, 6_000_000, EUR) == (
        "it pays at most 5.00 EUR per million tokens, and you ask 6.00 EUR per million tokens"
    )
    assert verdict_line(why_not(STATUS, 1, EUR, [full])) == (
        "This machine cannot join this round now: There is not enough disk space. Free some space."
    )
    assert why_not({}, 1, EUR) == ""
    assert why_not(STATUS, 1, EUR, [line.clock(-600.0)]).startswith("The clock is off by more than")
    assert why_not(STATUS, 1, EUR, [line.clock(1.0), line.clock(None)]) == ""


def test_a_dry_run_fails_if_no_round_can_be_joined_now() -> None:
    member, choose = cast("MemberSettings", None), cast("Choose", None)
    open_, finished = FittingRound(member, choose, ()), FittingRound(member, choose, (), "the round is finished")
    end_dry_run([finished, open_])
    with pytest.raises(typer.Exit) as ended:
        end_dry_run([finished, finished])
    assert ended.value.exit_code == 1


def test_a_coordinator_does_not_write_to_the_terminal() -> None:
    said = understood(STATUS | {"update": "\x1b]0;owned\x07\n"}, [], price=1, unit=EUR)
    assert said[0].endswith("update ?]0;owned?? of 100")


def test_what_the_operator_signed_is_shown_without_empty_texts() -> None:
    said = RoundSection(title="Sums for all", licence="CC0-1.0").describe("ab" * 32)
    answer = RoundAnswer(Coordinator("http://127.0.0.1:9", "ab" * 32, NodeKey(b"1" * 32)), None, said)
    assert description_texts(answer) == {"title": "Sums for all", "licence": "CC0-1.0"}
    assert description_texts(answer._replace(description=None)) == {}


def test_a_measured_machine_gets_its_own_estimate_also_as_the_first_node() -> None:
    """100 tokens/s at 1 EUR per million tokens are 0.36 EUR per hour."""
    speed = MeasuredSpeed(100.0, NOW_MS - 7_200_000)
    first = forecast(STATUS, [], price=1_000_000, unit=EUR, speed=speed)
    assert (first.low, first.high) == (360_000, 360_000)
    assert "no node works here yet" in first.basis
    rows = [row(9_999), row(9_999, phase="idle")]
    later = forecast(STATUS, rows, price=1_000_000, unit=EUR, speed=speed)
    assert (later.low, later.high) == (180_000, 360_000)
    said = list(lines(STATUS, [], price=1_000_000, unit=EUR, speed=speed))
    assert (
        "Price: you ask 1.00 EUR per million tokens (--price 1000000): 100 tokens/s earn 0.36 EUR per hour of work"
        in said
    )
    assert any(line.startswith("Earnings: about 0.36 EUR per hour, from the 100") for line in said)
    assert any("2 h ago. Fairly sure" in line for line in said)


@pytest.mark.parametrize(
    ("changes", "price", "why"), [({"budget_micros": 0}, 1, "used up"), ({}, 0, "you ask nothing")]
)
def test_a_round_that_pays_nothing_is_said_to_pay_nothing(changes: dict[str, Any], price: int, why: str) -> None:
    (said,) = [
        line for line in lines(STATUS | changes, [row(1), row(2)], price=price, unit=EUR) if line.startswith("Earnings")
    ]
    assert said.startswith("Earnings: none: ")
    assert why in said


@pytest.mark.parametrize(
    ("payouts", "said"),
    [
        (
            {"batches": 0, "next_ms": None},
            "Payouts: none so far; next payout: not scheduled (minimum balance 2.00 EUR)",
        ),
        (
            {"next_ms": 86_400_000 * 30},
            "Payouts: 7.50 EUR in 3 payouts so far; next payout: due on 1970-01-31 (m",
        ),
        ({"next_ms": 86_400_000}, "next payout: overdue since 1970-01-02 (minimum balance 2.00 EUR)"),
        ({"next_ms": 10**30}, "next payout: not scheduled"),
    ],
)
def test_what_a_round_has_paid_is_said_before_joining(payouts: dict[str, Any], said: str) -> None:
    status = STATUS | {
        "payouts": {"paid_micros": 7_500_000, "batches": 3, "last_ms": 1, "minimum_micros": 2_000_000} | payouts
    }
    assert said in "\n".join(lines(status, [], price=1, unit=EUR))


def test_a_measured_speed_is_kept_for_the_next_estimate(tmp_path: Path) -> None:
    record_speed(tmp_path / "no-round", 5.0, NOW_MS)
    assert not (tmp_path / "no-round").exists()
    assert find_speed(tmp_path) is None
    record_speed(tmp_path, 12.5, NOW_MS)
    record_speed(tmp_path, 0.0, NOW_MS)  # an agent that sampled nothing
    assert find_speed(tmp_path) == MeasuredSpeed(12.5, NOW_MS)
    assert MeasuredSpeed(1.0, NOW_MS).age_text(NOW_MS - 10**9) == "0 s", "the clock was set back"


@pytest.mark.parametrize(
    "data", [b"", b"[]", b"{}", b'{"tokens_per_s": "x"}', b'{"tokens_per_s": 1e99, "measured_ms": 1}']
)
def test_a_damaged_speed_is_none(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "speed.json").write_bytes(data)
    assert find_speed(tmp_path) is None
