"""The operator's screen: the verdict first, the real status below it, and nothing that steers a terminal."""

import asyncio
import json
import logging
from collections.abc import Iterator
from io import StringIO
from typing import Any

import pytest
from rich.console import Console

from coordinator.config import parse
from coordinator.reports import overview, screen, summary
from tests.coordinator.world import World, answer

ROUND = {"round_id": "a" * 64, "staleness": 2, "max_updates": 9}
STEERING = "\x1b[2J[bold]evil[/]\x07"


@pytest.fixture
def told(world: World) -> dict[str, Any]:
    """A round with one update behind it, and a node that answers twice to one lease."""
    key = world.join(1)
    for _ in range(world.terms.groups_per_update):
        world.earn(key)
    world.train(1)
    lease = world.lease(key)
    world.now_ms += world.terms.timeout_ms
    world.expire()
    world.submit(key, answer(key, lease))
    found: dict[str, Any] = world.run(summary.explained, config=parse({}), alive_since_ms=0)
    read: dict[str, Any] = json.loads(json.dumps(found | ROUND, allow_nan=False))
    return read


def lines(told: dict[str, Any]) -> dict[str, tuple[str, ...]]:
    return {part.title: part.lines for part in overview.parts(told)}


def test_the_verdict_comes_first(told: dict[str, Any]) -> None:
    first = overview.text(told).splitlines()[0]
    assert first.startswith("learner    ")
    assert told["learner"]["why"] in first


def test_a_round_with_a_trainer_of_its_own_counts_the_trainers_updates(world: World) -> None:
    world.publish(2, update=5)
    told = world.run(summary.explained, config=parse({"learner": {"external": True}}), alive_since_ms=0) | ROUND
    assert lines(told)["round"][0] == "starting: update 5 of the trainer"
    assert lines(told)["versions"][0] == "version 2 of update 5, one for each publication of the trainer"
    said = overview.text(told)
    assert "the learner waited" not in said, "nothing is trained here"
    assert "trained on groups" not in said


def test_credit_and_budget_say_how_long_the_money_lasts(told: dict[str, Any]) -> None:
    micros = {"posted_micros": 8, "pending_micros": 0, "voided_micros": 0}
    assert told["credit"] == micros | {"posted_tokens": 8, "pending_tokens": 0, "voided_tokens": 0}
    assert lines(told)["credit"] == (
        "earned 0.000008, in escrow 0.00, taken back 0.00 credits",
        "budget left 1.00 credits, about 124,999 more updates at the current cost",
    )
    assert lines(told | {"update": 0})["credit"][1] == "budget left 1.00 credits", "no update has a cost yet"


def test_a_round_after_its_last_update_works_on_no_batch_and_promises_no_more_updates(told: dict[str, Any]) -> None:
    """The batch after the last one is formed while the last one is trained on, and never trained on."""
    last = told | {"update": 9, "batch": 10}
    assert lines(told | {"update": 8, "batch": 9})["round"][1].endswith("at work on batch 9")
    assert lines(last)["round"][1].endswith("no batch under way")
    assert lines(last | {"finished": True})["credit"][1] == "budget left 1.00 credits"


def test_what_went_wrong_is_dated_and_named(told: dict[str, Any]) -> None:
    (line,) = lines(told)["incidents"]
    assert line.startswith("13 Nov 02:13:21 UTC node 1 lease_closed: ")


def test_who_leaves_hardly_a_lease_is_not_named_for_it(told: dict[str, Any]) -> None:
    rows = [{"name": f"n{share}", "skipped_share": share, "expired_share": 0.0} for share in (0.02, 0.004)]
    fleet = lines(told | {"unfinished_by": rows})["fleet"]
    assert [line for line in fleet if "skipped" in line] == ["n0.02 skipped 2% of its leases, let 0% expire"]


def test_an_alarm_that_is_the_verdict_is_told_once(told: dict[str, Any]) -> None:
    assert told["alarm"] == told["learner"]["why"] != ""
    first, other = told["alarms"][0], {"code": "other", "text": "Another one."}
    assert "alarm" not in lines(told | {"alarms": [first]})
    assert lines(told | {"alarms": [first, other]})["alarm"] == ("Another one.",)
    assert lines(told | {"alarm": "Something else.", "alarms": []})["alarm"] == ("Something else.",)


def test_a_name_cannot_steer_the_terminal(told: dict[str, Any]) -> None:
    hostile = told | {"fleet": [{"name": STEERING, "works": True, "groups_per_s": 1.0, "reason": STEERING}]}
    assert "\x1b" not in overview.text(hostile)
    drawn = StringIO()
    screen.show(Console(file=drawn, force_terminal=True, width=200, color_system=None), hostile)
    assert "[bold]evil[/]" in drawn.getvalue(), "markup is text"
    assert "\x07" not in drawn.getvalue()
    assert "\x1b" not in drawn.getvalue()


def test_a_large_fleet_still_fits_on_one_screen(told: dict[str, Any]) -> None:
    rows = [{"name": f"n{number}", "works": True, "groups_per_s": 1.0, "reason": "cheap"} for number in range(1000)]
    fleet = lines(told | {"fleet": rows})["fleet"]
    assert len(fleet) <= overview.NODES_SHOWN + 3
    assert "and 992 more: `swarm-coordinator nodes list`" in fleet


def test_a_pipe_gets_lines_and_a_terminal_a_panel(told: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    screen.show(Console(file=StringIO()), told)
    assert capsys.readouterr().out == overview.text(told) + "\n"
    drawn = StringIO()
    screen.show(Console(file=drawn, force_terminal=True, width=200, color_system=None), told)
    assert drawn.getvalue().startswith("╭─ round aaaaaaaaaaaa")
    for part in overview.parts(told):
        assert all(line in drawn.getvalue() for line in part.lines)


@pytest.fixture
def root_log() -> Iterator[logging.Logger]:
    root = logging.getLogger()
    before, level = list(root.handlers), root.level
    root.setLevel(logging.INFO)
    yield root
    root.handlers[:] = before
    root.setLevel(level)


@pytest.mark.asyncio
async def test_a_view_that_fails_once_is_drawn_again_below_the_log(
    told: dict[str, Any], root_log: logging.Logger
) -> None:
    drawn, seen = StringIO(), asyncio.Event()
    looks = iter([KeyError("a figure"), told, told])

    async def look() -> dict[str, Any]:
        match next(looks, None):
            case Exception() as error:
                raise error
            case dict() as found:
                return found
        seen.set()
        root_log.info("a line of the log")
        return told

    console = Console(file=drawn, force_terminal=True, width=200, height=60, color_system=None)
    task = asyncio.ensure_future(screen.below_log(console, every_s=0)(look))
    await asyncio.wait_for(seen.wait(), 30)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    text = drawn.getvalue()
    assert text.index("could not draw the view") < text.index("round aaaaaaaaaaaa") < text.index("a line of the log")
    assert "\x1b[?25h" in text[text.rindex("╯") :], "the cursor is back"


def test_without_a_terminal_a_launch_draws_nothing(root_log: logging.Logger) -> None:
    before = list(root_log.handlers)
    assert screen.for_launch() is None
    assert root_log.handlers == before
