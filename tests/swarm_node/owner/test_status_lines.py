"""The status of a running agent as its owner reads it: in every state, and never a zero for what is not known."""

import errno
import io
import logging
import re
from types import SimpleNamespace
from typing import Any, cast

import pytest
import trio
from rich.console import Console

from protocol.text import plain
from swarm_node.owner import live_view, status_lines
from swarm_node.owner.snapshot import AgentSnapshot

NOW_MS = 1_800_000_000_000


STEERING = "\x1b]52;c;cm0gLXJm\x07\x1b[2J\rpaid to evm:0x0"
"""Fills a terminal's clipboard, clears its screen, and begins a line anew."""


def rates(**changes: Any) -> dict[str, Any]:
    """The coordinator's report of an owner, as the agent keeps it."""
    return {
        "rate": {"hour_micros": 1_100_000, "day_micros": 24_000_000, "earning_s": 86_400.0},
        "paid_micros": 12_500_000,
        "under_way_micros": 0,
        "payouts": 3,
        "last_ms": NOW_MS - 2 * 86_400_000,
        "next_ms": NOW_MS + 5 * 86_400_000,
        "minimum_micros": 1_000_000,
    } | changes


def told(**changes: Any) -> dict[str, Any]:
    """A snapshot of an agent that works."""
    moved = {"from_peers": 3_000_000_000, "from_seeder": 0, "from_http": 1_000_000, "to_peers": 2_500_000_000}
    return {
        "now_ms": NOW_MS,
        "node_id": "12D3KooWtest",
        "name": "calm-heron-417",
        "coordinator": "http://coordinator.test:8700",
        "home": "home",
        "pid": 42,
        "started_ms": NOW_MS - 3_700_000,
        "phase": "generating",
        "resting": "",
        "finishing": False,
        "no_work": "",
        "distrust": "",
        "trouble": "",
        "trouble_ms": 0,
        "version": 7,
        "version_age_s": 75.0,
        "newest_version": 8,
        "engine": "llama",
        "tokens_per_s": 1234.5,
        "open_leases": 3,
        "unsent": 1,
        "accepted": 12,
        "rejected": {"stale_version": 2},
        "tokens": 99,
        "credit_micros": 55_000,
        "pending_micros": 400_000,
        "payable_micros": 1_200_000,
        "earnings_ms": NOW_MS,
        "unit": {"name": "EUR", "decimals": 2},
        "rates": rates(),
        "last_verdict": {
            "at_ms": NOW_MS,
            "lease_id": "ab" * 16,
            "outcome": "rejected",
            "code": "stale_version",
            "message": "late",
            "credit_micros": 0,
        },
        "download": None,
        "transfer": moved,
        "uploaded_month_bytes": 4_000_000_000,
        "upload_cap_bytes": 5_000_000_000,
        "no_upload": "",
        "reach": "others can connect to you",
        "dialled": True,
        "addresses": ["[::]:8703"],
        "mapping": "",
        "cards": [{"name": "RTX 4090", "celsius": 61.0, "watts": 300.4, "used_bytes": 8_000_000_000}],
        "celsius": None,
        "watts": None,
        "limits": {"hours": "22:00-07:00"},
    } | changes


def test_earnings_have_a_unit_a_rate_and_payouts() -> None:
    said = "\n".join(status_lines.of_status(told()))
    assert "credit    0.06 EUR in this run; reported 0 s ago: 0.40 EUR pending, 1.20 EUR payable" in said
    assert "rate      1.10 EUR per hour, 24.00 EUR in the last day; the last hour is 10% above" in said
    assert "payouts   12.50 EUR paid to the owner in 3 payouts, the last 2 d 0 h ago; next payout: due on" in said
    live = drawn(told(), 160)
    assert "1.10 EUR per hour" in live
    assert "12.50 EUR paid" in live
    assert "micro" not in said + live


def test_a_rate_that_nobody_reported_is_not_a_zero() -> None:
    state = told(rates=None)
    assert (status_lines.rate(state), status_lines.payouts(state)) == ("not known yet", "not known yet")
    nothing = rates(rate={"hour_micros": 0, "day_micros": 0, "earning_s": None})
    state = told(rates=nothing, accepted=0, credit_micros=0)
    assert status_lines.rate(state) == "no credit counted in the last day; new credit is counted within two minutes"


def test_credit_that_is_newer_than_the_report_does_not_contradict_it() -> None:
    """Each old figure stands behind the age of the report, and a rate of nothing is not stated beside accepted work."""
    nothing = rates(rate={"hour_micros": 0, "day_micros": 0, "earning_s": None})
    early = {"rates": nothing, "today_micros": 0, "pending_micros": 0, "payable_micros": 0}
    state = told(credit_micros=12_700, unit={"name": "EUR", "decimals": 4}, earnings_ms=NOW_MS - 36_000, **early)
    assert status_lines.credit(state) == (
        "0.0127 EUR in this run; reported 36 s ago: 0.00 EUR pending, 0.00 EUR payable, 0.00 EUR today"
    )
    assert status_lines.rate(state) == "not known yet; the credit of this run is counted within two minutes"


@pytest.mark.parametrize(
    ("rejected", "said"),
    [
        ({}, "none rejected"),
        ({"lease_closed": 1_200}, "1,200 rejected (lease_closed)"),
        ({"lease_closed": 3, "stale_version": 1}, "4 rejected (3 lease_closed, 1 stale_version)"),
    ],
)
def test_rejected_rollouts_are_counted_before_their_codes(rejected: dict[str, int], said: str) -> None:
    assert status_lines.rejected_text(rejected) == said


def test_a_node_that_only_downloads_is_not_called_idle_nor_working() -> None:
    load = {"version": 9, "bytes_done": 0, "bytes": 1_000_000_000, "peers": 0, "bytes_per_s": 0.0}
    load |= {"bytes_arrived": 0, "bytes_from_peers": 0}
    state = told(phase="idle", download=load)
    assert status_lines.doing(state).startswith("fetching version 9: 0%")
    assert not status_lines.is_working(state)
    assert status_lines.is_working(told())


def test_an_older_agent_has_no_unit_and_no_rate() -> None:
    state = {name: value for name, value in told().items() if name not in ("unit", "rates")}
    said = "\n".join(status_lines.of_status(state))
    assert "credits payable" in said
    assert "rate      not known yet" in said


def test_a_clock_that_was_set_back_makes_no_negative_times() -> None:
    state = told(rates=rates(last_ms=NOW_MS + 10**9, next_ms=NOW_MS - 10**12, under_way_micros=1_000_000))
    assert "the last 0 s ago; 1.00 EUR being paid; next payout: overdue since" in status_lines.payouts(state)


def drawn(snapshot: dict[str, Any], width: int = 100) -> str:
    console = Console(width=width, file=io.StringIO(), force_terminal=False)
    console.print(live_view.panel(snapshot))
    file: Any = console.file
    return str(file.getvalue())


def test_everything_that_is_promised_stands_in_the_status_and_in_the_live_view() -> None:
    promised = [
        "generating",
        "7 (latest 8)",
        "1,234 tokens/s, llama",
        "0.40 EUR pending, 1.20 EUR payable",
    ]
    promised += [
        "12 rollouts accepted, 2 rejected (stale_version)",
        "last: rejected stale_version",
        "61 °C, 300 W",
        "of 5 GB",
    ]
    status = "\n".join(status_lines.of_status(told()))
    for words in promised:
        assert words in status
        assert words in drawn(told(), width=160)
    assert "up 1 h 1 min" in status
    assert "hours 22:00-07:00" in status


def test_a_node_between_two_versions_names_the_latest() -> None:
    assert status_lines.version(told(version=0)) == "none loaded yet (latest 8)"


def test_a_node_that_rests_has_put_its_version_down() -> None:
    """The version was loaded before, and will be again."""
    assert status_lines.version(told(version=0, resting="paused by you")) == "none loaded while paused (latest 8)"
    assert (
        status_lines.version(told(version=0, newest_version=0, resting="paused by you")) == "none loaded while paused"
    )


def test_one_of_a_thing_is_not_called_by_its_plural() -> None:
    queue = next(line for line in status_lines.of_status(told(open_leases=1, unsent=1)) if line.startswith("queue"))
    assert queue == "queue     1 group in the engine, 1 rollout not sent yet"


def test_what_is_not_known_is_called_so() -> None:
    unknown = told(
        version=0,
        version_age_s=None,
        tokens_per_s=0.0,
        engine="",
        earnings_ms=None,
        pending_micros=None,
        payable_micros=None,
        last_verdict=None,
        accepted=0,
        rejected={},
        cards=[],
        phase="offline",
        newest_version=0,
    )
    status = "\n".join(status_lines.of_status(unknown))
    for words in ("none loaded yet", "not measured yet", "not known yet", "no verdict received", "not available"):
        assert words in status
    assert "waiting for the first version" in status
    assert drawn(unknown)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"resting": "paused by you"}, "not working: paused by you"),
        ({"distrust": "proof ended"}, "stopped: proof ended"),
        (
            {"phase": "idle", "trouble": "Set the clock.", "trouble_ms": NOW_MS - 90_000},
            "idle with a problem for 1 min 30 s: Set the clock.",
        ),
        ({"phase": "idle", "open_leases": 0, "no_work": "no budget"}, "idle: no budget"),
        ({"phase": "generating", "no_work": "no budget"}, "generating"),
        ({"phase": "offline"}, "loading"),
    ],
)
def test_why_nothing_is_done_is_told(changes: dict[str, Any], said: str) -> None:
    assert status_lines.doing(told(**changes)) == said
    assert said in drawn(told(**changes))


def test_a_download_has_its_share_rate_and_peers() -> None:
    load = {"version": 9, "bytes_done": 250_000_000, "bytes": 1_000_000_000, "peers": 4, "bytes_per_s": 12_500_000.0}
    load |= {"bytes_arrived": 200_000_000, "bytes_from_peers": 150_000_000}
    assert status_lines.doing(told(download=load)) == (
        "generating, fetching version 9: 25% of 1 GB, 12.5 MB/s from 4 peers, about 60 s left, "
        "75% of it from other nodes"
    )
    assert "━" in drawn(told(download=load))
    assert "0%" in status_lines.doing(told(download=load | {"bytes": 0, "bytes_done": 0}))


@pytest.mark.parametrize("width", [20, 40, 80])
def test_a_narrow_terminal_breaks_lines_and_nothing_else(width: int) -> None:
    assert max(map(len, drawn(told(name="[bold]x[/bold]"), width=width).splitlines())) <= width


def test_names_are_no_markup() -> None:
    assert "[red]evil[/red]" in drawn(told(name="[red]evil[/red]"))


def test_where_no_agent_runs_the_reason_of_the_last_one_is_told() -> None:
    last = {"at_ms": NOW_MS - 60_000, "code": "disk_full", "message": "No room.", "hint": "Make some."}
    assert list(status_lines.of_stopped("None runs.", last, now_ms=NOW_MS)) == [
        "None runs.",
        "The last agent ended 1 min 0 s ago: No room. [disk_full]",
        "Make some.",
    ]
    never = "\n".join(status_lines.of_stopped("None runs.", None, now_ms=NOW_MS))
    assert "killed" in never
    assert "`swarm-node status --home FOLDER`" in never


@pytest.mark.parametrize(
    ("count", "said"), [(0, "0 B"), (999, "999 B"), (1000, "1 kB"), (1_500_000, "1.5 MB"), (2.34e12, "2.34 TB"),
     (999_499, "999 kB"), (999_500, "1 MB"), (999_700_000, "1 GB")],
)  # fmt: skip
def test_sizes(count: float, said: str) -> None:
    assert plain.size_text(count) == said


@pytest.mark.parametrize("place", ["resting", "distrust", "trouble", "no_work", "no_upload", "rejected", "mapping"])
def test_no_word_of_a_coordinator_steers_the_terminal(place: str) -> None:
    change: dict[str, Any] = {place: {STEERING: 1} if place == "rejected" else STEERING, "open_leases": 0}
    assert "\x1b" not in "".join(status_lines.of_status(told(**change)))
    drawn = io.StringIO()
    Console(file=drawn, width=200, force_terminal=True, color_system=None).print(live_view.panel(told(**change)))
    assert "\x1b]" not in drawn.getvalue()
    assert "\x1b[2J" not in drawn.getvalue()
    last = {"at_ms": NOW_MS, "message": STEERING, "hint": STEERING, "code": STEERING}
    assert "\x1b" not in "".join(status_lines.of_stopped("No agent runs.", last, now_ms=NOW_MS))


def card(number: int, **changes: Any) -> dict[str, Any]:
    readings = {"name": f"RTX {number}", "celsius": 61.0, "watts": 300.4, "used_bytes": 8e9, "memory_bytes": 24e9}
    state = {"number": number, "state": "sampling", "reason": "", "tokens_per_s": 1234.4, "groups": 2, "pid": 7}
    return readings | state | changes


def test_each_of_several_cards_has_a_line_with_its_speed_readings_and_reason() -> None:
    resting = card(2, state="resting", groups=0, reason="paused by you until 14:00", celsius=None, watts=None)
    unused = {key: value for key, value in card(3).items() if key not in ("state", "reason", "tokens_per_s", "groups")}
    state = told(cards=[card(0), resting, unused], limits={"cards": {"2": {"celsius": 80.0}}, "upload_gb": 5.0})
    lines = list(status_lines.of_status(state))
    assert "machine   3 graphics cards" in lines
    assert "card 0    RTX 0: sampling, 1,234 tokens/s, 2 groups; 61 °C, 300 W, 8.0 of 24.0 GB used" in lines
    assert "card 2    RTX 2: resting, 1,234 tokens/s, 0 groups; 8.0 of 24.0 GB used; paused by you until 14:00" in lines
    assert "card 3    RTX 3: not used by this node; 61 °C, 300 W, 8.0 of 24.0 GB used" in lines
    assert "limits    upload_gb 5.0, card 2 celsius 80.0" in lines
    live = drawn(state, 160)
    assert "RTX 2: resting" in live
    assert "paused by you until 14:00" in live


def test_a_single_card_stands_with_the_machine() -> None:
    assert status_lines.cards(told(cards=[card(0)])) == []
    assert status_lines.machine(told(cards=[card(0)])) == "RTX 0: 61 °C, 300 W, 8.0 of 24.0 GB used"


def row(number: int, **changes: Any) -> dict[str, Any]:
    """One of several rounds, as the agent reports it."""
    unit = {"name": "credits", "decimals": 6}
    known = {"phase": "idle", "open_leases": 0, "accepted": 2, "credit_micros": 5_000_000, "unit": unit}
    texts = {"error": "", "distrust": "", "trouble": "", "no_work": "", "resting": "", "by_owner": False}
    return {"coordinator": f"http://{number}.test", "ended": False, "shown": False} | texts | known | changes


def test_each_of_several_rounds_has_a_line_with_its_state_and_credit() -> None:
    rows = [
        row(1, trouble="It does not answer."),
        row(2, open_leases=3, price_micros_per_mtok=1_000_000, hour_micros=360_000),
        row(3, error=f"Banned.{STEERING}", ended=True),
        row(4, resting="round paused by you"),
        row(5, ended=True, by_owner=True),
        row(6, ended=True, price_micros_per_mtok=2_500_000, hour_micros=None),
        row(7, price_micros_per_mtok=2_500_000, hour_micros=None),
    ]
    lines = list(status_lines.of_status(told(rounds=rows)))
    assert lines[1] == "round     7 rounds  (agent 42, up 1 h 1 min)"
    shown = [line[10:] for line in lines if re.match(r"round \d ", line)]
    assert "shown     the rows below are those of http://coordinator.test:8700" in lines
    assert shown[0].startswith("http://1.test: waiting: It does not answer.; 2 accepted, 5.00 credits")
    assert shown[0].endswith(" in this run"), "an agent of an earlier release says nothing of prices"
    assert shown[1].startswith("http://2.test: 3 groups; ")
    assert shown[1].endswith("; pays 1.00 credits per million tokens, 0.36 credits per hour of work")
    assert shown[6].endswith("; pays 2.50 credits per million tokens"), "its speed was not measured"
    assert shown[2].startswith("http://3.test: left: Banned.")
    assert shown[3].startswith("http://4.test: not working: round paused by you; ")
    assert shown[4].startswith("http://5.test: left by you until the agent starts again; ")
    assert shown[5].startswith("http://6.test: the round is finished; ")
    assert shown[5].endswith(" in this run"), "it pays no more"
    assert all(line.isprintable() for line in lines)
    assert sum(line.startswith("round") for line in status_lines.of_status(told())) == 1, "one round has one line"
    assert "round 7" in drawn(told(rounds=rows), 160)


class Terminal(io.StringIO):
    """A terminal whose window may be closed."""

    is_closed = False

    def write(self, text: str) -> int:
        if self.is_closed:
            raise OSError(errno.EIO, "Input/output error")
        return super().write(text)


@pytest.mark.trio
async def test_the_live_view_of_a_terminal_that_closes_ends_alone() -> None:
    terminal = Terminal()
    root = logging.getLogger()
    before = root.handlers[:]

    def look() -> AgentSnapshot:
        terminal.is_closed = True
        return cast("AgentSnapshot", SimpleNamespace(to_json=told))

    try:
        show = live_view.make(Console(file=terminal, width=200, force_terminal=True))
        with trio.fail_after(5):
            await show(look)
    finally:
        root.handlers[:] = before
