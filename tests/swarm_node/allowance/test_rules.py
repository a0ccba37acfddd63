"""The owner's limits: every reason, alone and together, and what it lets go on."""

import os
from datetime import UTC, datetime, time, timedelta
from pathlib import Path
from zoneinfo import ZoneInfo

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.errors import ConfigInvalid
from protocol.limits import CHUNK_MAX_BYTES, GB
from swarm_node.allowance import settings
from swarm_node.allowance.rules import CardReadings, Decision, Readings, decide, decide_card, within
from swarm_node.allowance.settings import Limits, checked

NOON = datetime(2026, 11, 22, 12, 0, tzinfo=UTC)


def whys(limits: Limits, seen: Readings) -> list[str]:
    return [reason.why for reason in decide(limits, seen).reasons]


def test_without_limits_a_node_works_and_uploads() -> None:
    decision = decide(Limits(), Readings(NOON))
    assert decision.may_work
    assert not decision.no_upload
    assert decision.reason_line == ""


@pytest.mark.parametrize(
    ("hours", "now", "works"),
    [
        ("22:00-07:00", time(22, 0), True),
        ("22:00-07:00", time(21, 59, 59), False),
        ("22:00-07:00", time(6, 59), True),
        ("22:00-07:00", time(7, 0), False),
        ("09:00-17:00", time(9, 0), True),
        ("09:00-17:00", time(17, 0), False),
        ("0:00-23:59", time(0, 0), True),
    ],
)
def test_hours_hold_over_midnight_and_end_at_their_end(hours: str, now: time, works: bool) -> None:
    assert whys(Limits(hours=hours), Readings(datetime.combine(NOON.date(), now, UTC))) == ([] if works else ["hours"])


def test_hours_are_meant_in_their_zone() -> None:
    limits = Limits(hours="22:00-07:00", zone="Asia/Tokyo")
    assert decide(limits, Readings(NOON.replace(hour=14).astimezone(ZoneInfo("Asia/Tokyo")))).may_work
    assert not decide(limits, Readings(NOON.astimezone(ZoneInfo("Asia/Tokyo")))).may_work


@given(st.times(), st.times(), st.times())
def test_a_moment_lies_in_a_span_or_in_the_rest_of_the_day(start: time, end: time, now: time) -> None:
    if start != end:
        assert within((start, end), now) != within((end, start), now)


def test_someone_at_the_machine_gets_it_at_once_and_the_memory_too() -> None:
    limits = Limits(idle_minutes=10.0)
    decision = decide(limits, Readings(NOON, idle_s=599.0))
    assert (decision.at_once, decision.keep_engine) == (True, False)
    assert decide(limits, Readings(NOON, idle_s=600.0)).may_work
    assert whys(limits, Readings(NOON, idle_s=600.0, others_load=0.9)) == ["idle"]


def test_a_machine_that_tells_nothing_is_not_taken_for_idle() -> None:
    assert whys(Limits(idle_minutes=1.0), Readings(NOON)) == ["idle"]
    assert whys(Limits(idle_minutes=1.0), Readings(NOON, others_load=0.0)) == []


def test_a_battery_is_not_emptied_unasked() -> None:
    assert decide(Limits(), Readings(NOON, on_battery=True)).at_once
    assert decide(Limits(on_battery=True), Readings(NOON, on_battery=True)).may_work
    assert decide(Limits(), Readings(NOON, on_battery=None)).may_work


def test_a_power_cap_is_kept_by_breaks_that_do_not_flutter_and_keep_the_engine() -> None:
    limits = Limits(power_watts=200.0)
    assert decide(limits, Readings(NOON, watts=200.0)).may_work
    decision = decide(limits, Readings(NOON, watts=201.0))
    assert (decision.may_work, decision.at_once, decision.keep_engine) == (False, False, True)
    assert whys(limits, Readings(NOON, watts=190.0, resting=True)) == ["power"]
    assert whys(limits, Readings(NOON, watts=180.0, resting=True)) == []
    assert whys(limits, Readings(NOON)) == [], "a card that tells no watts cannot be held to any"


def card_whys(limits: Limits, seen: CardReadings) -> list[str]:
    return [reason.why for reason in decide_card(1, limits, seen).reasons]


def test_a_card_that_is_too_hot_rests_at_once_until_it_is_cooler_and_keeps_its_engine() -> None:
    limits = checked({"celsius": 85, "cards": {"1": {"celsius": 70}}})
    decision = decide_card(1, limits, CardReadings(NOON, celsius=71.0))
    assert (decision.may_work, decision.at_once, decision.keep_engine) == (False, True, True)
    assert decision.reason_line == "temperature limit: 71 °C, your limit is 70 °C; work resumes at 65 °C"
    resting = frozenset(reason.why for reason in decision.reasons)
    assert card_whys(limits, CardReadings(NOON, celsius=66.0, resting=resting)) == ["heat"]
    assert card_whys(limits, CardReadings(NOON, celsius=65.0, resting=resting)) == []
    assert card_whys(limits, CardReadings(NOON, celsius=None)) == [], "a card without a sensor is held to nothing"
    assert decide_card(0, limits, CardReadings(NOON, celsius=84.0)).may_work, "another card has the node's limit"
    assert not decide_card(0, limits, CardReadings(NOON, celsius=86.0)).may_work


def test_a_card_has_hours_power_and_pauses_of_its_own() -> None:
    limits = checked({"cards": {"1": {"hours": "22:00-07:00", "power_watts": 200}}})
    seen = CardReadings(NOON, paused=True, paused_until=NOON.replace(hour=13), watts=201.0)
    assert card_whys(limits, seen) == ["paused", "hours", "power"]
    said = decide_card(1, limits, seen).reason_line
    assert said.startswith(
        "paused by you until 13:00 (`swarm-node resume --card 1` ends the pause); outside your hours"
    )
    assert decide_card(0, limits, seen._replace(paused=False)).may_work
    assert decide(limits, Readings(NOON)).may_work, "the limits of a card are not those of the node"


def test_a_node_rests_when_no_card_may_work_and_only_then() -> None:
    paused = decide_card(1, Limits(), CardReadings(NOON, paused=True))
    assert decide(Limits(), Readings(NOON), {0: Decision(), 1: paused}).may_work
    decision = decide(Limits(), Readings(NOON), {1: paused})
    assert (decision.may_work, decision.at_once) == (False, True)
    assert decision.reason_line == "card 1: paused by you; `swarm-node resume --card 1` continues"


def test_limits_of_a_card_are_written_and_read_and_leave_the_others_alone(tmp_path: Path) -> None:
    settings.write(tmp_path, settings.changed(tmp_path, {"celsius": 80}, card=1))
    settings.write(tmp_path, settings.changed(tmp_path, {"power_watts": 150.0}, card=1))
    settings.write(tmp_path, settings.changed(tmp_path, {"hours": "22:00-07:00"}, card=10))
    settings.write(tmp_path, settings.changed(tmp_path, {"upload_gb": 5}))
    kept = settings.read(tmp_path)
    assert kept.of_card(1).model_dump(exclude_defaults=True) == {"celsius": 80.0, "power_watts": 150.0}
    assert kept.of_card(10).hours == "22:00-07:00"
    assert kept.of_card(0) == settings.CardLimits()
    assert (kept.upload_gb, kept.hours) == (5.0, "")


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ({"1": {"vram_share": 0.5}}, "cards.1.vram_share"),
        ({"1": {"celsius": 200}}, "cards.1.celsius"),
        ({"first": {}}, "cards"),
        ({"1": 5}, "cards.1"),
        ([], "cards"),
    ],
)
def test_a_wrong_limit_of_a_card_is_named(wrong: object, named: str) -> None:
    with pytest.raises(ConfigInvalid, match=f"^{named} = "):
        checked({"cards": wrong})


def test_a_price_below_the_floor_takes_no_work() -> None:
    assert whys(Limits(price_floor=5), Readings(NOON, price_micros_per_mtok=4)) == ["price"]
    assert whys(Limits(price_floor=5), Readings(NOON, price_micros_per_mtok=5)) == []
    decision = decide(Limits(price_floor=5_000_000), Readings(NOON, price_micros_per_mtok=1_500_000))
    assert decision.reason_line == (
        "your price is 1.50 per million tokens, below your minimum of 5.00 (both in the round's unit): "
        "join with --price 5000000, or lower `limits --price-floor`"
    )


def test_a_volume_that_is_used_up_stops_uploading_and_nothing_else() -> None:
    limits = Limits(upload_gb=1.0)
    decision = decide(limits, Readings(NOON, uploaded_bytes=GB - CHUNK_MAX_BYTES))
    assert decision.may_work
    assert "1.00 of 1 GB" in decision.no_upload
    assert not decide(limits, Readings(NOON, uploaded_bytes=GB - CHUNK_MAX_BYTES - 1)).no_upload


def test_resume_is_not_said_to_continue_what_another_limit_stops() -> None:
    limits = Limits(hours="22:00-07:00", celsius=70.0)
    assert decide(limits, Readings(NOON, paused=True)).reason_line == (
        "paused by you (`swarm-node resume` ends the pause); outside your hours 22:00-07:00 (local time); "
        "work begins 22:00"
    )
    card = decide_card(1, limits, CardReadings(NOON, paused=True, celsius=80.0)).reason_line
    assert card.startswith("paused by you (`swarm-node resume --card 1` ends the pause); ")
    assert decide(Limits(), Readings(NOON, paused=True)).reason_line.endswith("continues")


def test_every_reason_is_told_and_the_strictest_decides() -> None:
    limits = Limits(hours="22:00-07:00", power_watts=1.0)
    decision = decide(limits, Readings(NOON, paused=True, watts=2.0))
    assert [reason.why for reason in decision.reasons] == ["paused", "hours", "power"]
    assert (decision.at_once, decision.keep_engine) == (True, False)
    assert decision.reason_line.count("; ") >= 2


@pytest.mark.parametrize(
    "wrong",
    [
        {"hours": "22-7"},
        {"hours": "24:00-07:00"},
        {"hours": "07:00-07:00"},
        {"zone": "Mars/Olympus"},
        {"zone": "../etc"},
        {"vram_share": 0.0},
        {"vram_share": 1.01},
        {"turns_mib": -1},
        {"turns_mib": 0.5},
        {"idle_minutes": -1.0},
        {"upload_gb": float("nan")},
        {"price_floor": 1.5},
        {"on_battery": "yes"},
        {"speed": 1},
    ],
)
def test_a_wrong_limit_is_refused_by_name(wrong: dict[str, object]) -> None:
    with pytest.raises(ConfigInvalid, match=next(iter(wrong))):
        checked(dict(wrong))


@pytest.mark.parametrize(
    ("wrong", "said", "hint"),
    [
        ({"celsius": 200}, "celsius = 200.0: the highest value is 150.", "°C"),
        ({"vram_share": 0}, "vram_share = 0.0: the value must be above 0.", "Share of the GPU's memory"),
        ({"threads": -1}, "threads = -1: the lowest value is 0.", "CPU threads"),
        ({"hours": "22-7"}, "hours = '22-7': write the hours as 22:00-07:00.", "Working hours"),
        ({"cards": {"1": {"power_watts": -1}}}, "cards.1.power_watts = -1.0: the lowest value is 0.", "watts"),
        ({"speed": 1}, "speed = 1: there is no such limit.", "Known limits: hours, celsius"),
        (
            {"cards": {"1": {"zone": "UTC"}}},
            "cards.1.zone = 'UTC': there is no such limit.",
            "of a card: hours, celsius",
        ),
    ],
)
def test_a_wrong_limit_says_its_bound_and_meaning(wrong: dict[str, object], said: str, hint: str) -> None:
    with pytest.raises(ConfigInvalid) as refused:
        checked(dict(wrong))
    assert refused.value.message == said
    assert hint in refused.value.hint
    assert ("Known limits" in refused.value.hint) == ("no such limit" in said)


def test_limits_are_written_with_what_they_mean_and_read_back(tmp_path: Path) -> None:
    limits = checked({"hours": "22:00-07:00", "upload_gb": 5, "on_battery": True})
    text = settings.write(tmp_path, limits).read_text()
    assert 'hours = "22:00-07:00"  # working hours' in text
    assert "# power_watts = 0.0" in text
    assert settings.read(tmp_path) == limits
    assert settings.changed(tmp_path, {"hours": ""}).span is None


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="only root writes for somebody else")
def test_limits_that_root_sets_can_be_read_by_the_agent_whose_home_it_is(tmp_path: Path) -> None:
    os.chown(tmp_path, 12_345, 12_345)
    written = settings.write(tmp_path, Limits(upload_gb=5)).stat()
    assert (written.st_uid, written.st_gid) == (12_345, 12_345)


def test_a_file_that_cannot_be_read_is_refused_and_names_itself(tmp_path: Path) -> None:
    assert settings.read(tmp_path) == Limits()
    (tmp_path / settings.FILE).write_text("hours = ")
    with pytest.raises(ConfigInvalid, match=r"limits\.toml"):
        settings.read(tmp_path)


def test_a_day_off_by_a_second_is_no_other_day() -> None:
    limits = Limits(hours="00:00-00:01")
    assert decide(limits, Readings(NOON.replace(hour=0, minute=0))).may_work
    assert not decide(limits, Readings(NOON.replace(hour=0, minute=0) - timedelta(seconds=1))).may_work
