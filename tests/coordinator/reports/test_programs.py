"""A learner that is dead, silent or has waited for hours is never told to work."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from coordinator.base.children import Life
from coordinator.config import parse
from coordinator.reports import overview, programs, summary
from coordinator.reports.metrics import exposition
from coordinator.store.facts import FINISHED, set_fact
from coordinator.store.tables import batches
from tests.coordinator.world import World

CONFIG = parse({"market": {"max_price_micros_per_mtok": 1_000_000}})

EXTERNAL = parse({"learner": {"external": True}})


@pytest.fixture
def at_work(world: World) -> World:
    """A launched round with a node, one update trained, and a learner that asks for the second batch."""
    world.run(programs.launched, world.now_ms)
    fares(world, "learner", Life("runs", None, 0))
    key = world.join(1)
    for _ in range(world.terms.groups_per_update):
        world.earn(key)
    train(world, 1)
    world.run(programs.record_learner_request, world.now_ms, asks_for=2)
    return world


def train(world: World, number: int) -> None:
    """An update that hardly waited."""
    world.train(number)
    world.run(lambda connection: connection.execute(sa.update(batches).values(idle_s=0.1, busy_s=30.0)))


def fares(world: World, name: str, life: Life) -> None:
    world.run(programs.record_child, name, asdict(life), world.now_ms)


def told(world: World, after_s: float = 0.0) -> dict[str, Any]:
    now_ms = world.now_ms + int(1000 * after_s)
    found: dict[str, Any] = world.run(summary.explained, config=CONFIG, alive_since_ms=world.now_ms, now_ms=now_ms)
    return found


def test_a_learner_that_asks_is_told_to_work(at_work: World) -> None:
    found = told(at_work, 1)
    assert (found["learner"]["state"], found["alarm"]) == ("works", "")
    assert (found["learner_silent_s"], found["learner_waits_s"], found["update_age_s"]) == (1, 1, 1)


def test_a_learner_that_refuses_its_settings_stands(at_work: World) -> None:
    fares(at_work, "learner", Life("ended", 2, 0))
    found = told(at_work, 180)
    assert found["learner"]["state"] == "stands"
    assert "ended with code 2, 3 min ago, and is not restarted" in found["alarm"]
    assert "learner.log" in found["alarm"]


def test_a_stopped_round_keeps_how_its_learner_ended(at_work: World, tmp_path: Path) -> None:
    config = parse({"round": {"directory": str(tmp_path)}})
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "learner.log").write_text("starts\nerror: learner.lora_rank is too large.\n\n")

    def stopped() -> dict[str, Any]:
        figures: dict[str, Any] = at_work.run(summary.stopped, config=config, since_ms=1)
        return figures | {"stopped": "STOPPED"}

    assert stopped()["learner"]["state"] != "stands"
    at_work.now_ms += 1000
    fares(at_work, "learner", Life("ended", 2, 0))
    state, learner, *_ = overview.text(stopped()).splitlines()
    assert state.split() == ["state", "STOPPED"]
    assert "code 2, before the round was stopped" in learner
    assert learner.endswith(": error: learner.lora_rank is too large.")
    fares(at_work, "learner", Life("runs", 2, 1))
    assert "lora_rank" not in stopped()["learner"]["why"], "the log's last line may be of the run after that"
    at_work.now_ms += 1000
    for _ in range(at_work.terms.groups_per_update):
        at_work.earn(at_work.join(2))
    train(at_work, 2)
    assert stopped()["learner"]["state"] != "stands"


def test_a_learner_that_crashes_again_and_again_stands_until_it_made_an_update(at_work: World) -> None:
    for restarts in (1, 2):
        at_work.now_ms += 1000
        fares(at_work, "learner", Life("crashed", 1, restarts))
        fares(at_work, "learner", Life("runs", 1, restarts))
        at_work.run(programs.record_learner_request, at_work.now_ms, asks_for=2)
    found = told(at_work)
    assert found["learner"]["state"] == "stands"
    assert "code 1, 0 s ago, 2 times" in found["alarm"]
    at_work.now_ms += 1000
    for _ in range(at_work.terms.groups_per_update):
        at_work.earn(at_work.join(2))
    train(at_work, 2)
    at_work.run(programs.record_learner_request, at_work.now_ms, asks_for=3)
    assert told(at_work)["learner"]["state"] == "works"


def test_a_learner_of_other_trainers_stands_until_it_has_published_a_version(at_work: World) -> None:
    at_work.now_ms += 1000
    fares(at_work, "learner", Life("crashed", 1, 2))
    fares(at_work, "learner", Life("runs", 1, 2))

    def alarm() -> str:
        found = at_work.run(programs.figures, EXTERNAL, at_work.now_ms)
        return str(found["learner_alarm"])

    assert "2 times since the launch" in alarm()
    at_work.now_ms += 1000
    at_work.publish(2, 2)
    assert alarm() == ""


def test_a_learner_that_says_nothing_stands(at_work: World) -> None:
    """The learner trains on the second batch, as far as is known."""
    for _ in range(at_work.terms.groups_per_update):
        at_work.earn(at_work.join(2))
    at_work.batch(2)
    assert told(at_work, programs.QUIET_MIN_S)["learner"]["state"] == "works"
    found = told(at_work, 7200)
    assert found["learner"]["state"] == "stands"
    assert "The learner has sent nothing for 2 h" in found["alarm"]


def test_a_learner_that_never_came_stands(world: World) -> None:
    """Launched with `--no-learner`, and none was started elsewhere."""
    world.run(programs.launched, world.now_ms)
    world.join(1)
    assert told(world, programs.START_S)["learner"]["state"] == "works"
    assert told(world, programs.START_S + 1)["learner"]["state"] == "stands"


def test_a_wait_that_goes_on_is_a_wait(at_work: World) -> None:
    """The learner asks again every 20 seconds, so it is not silent."""
    at_work.now_ms += 3_600_000
    at_work.run(programs.record_learner_request, at_work.now_ms, asks_for=2)
    found = told(at_work)
    assert found["learner"]["state"] == "waits"
    assert found["learner_waits_s"] == 3600
    assert found["learner_idle_share_lately"] > 0.9


def test_a_learner_that_waits_for_its_first_node_waits_all_of_its_time(world: World) -> None:
    """The learner has done nothing yet, which is no work either."""
    world.run(programs.launched, world.now_ms)
    asleep = told(world, 60)
    assert (asleep["learner_idle_share"], asleep["learner_idle_share_lately"]) == (0, 0), "it has asked for nothing yet"
    world.run(programs.record_learner_request, world.now_ms, asks_for=1)
    found = told(world, 60)
    assert (found["learner_idle_share"], found["learner_idle_share_lately"]) == (1, 1)
    assert "the learner waited 100% of the whole round" in overview.text(
        found | summary.public_settings(CONFIG, "a" * 64)
    )


def test_the_first_batch_may_take_minutes_and_not_hours(world: World) -> None:
    world.run(programs.launched, world.now_ms)
    world.run(programs.record_learner_request, world.now_ms, asks_for=1)
    world.join(1)
    for minutes, state in ((5, "works"), (60, "waits")):
        asked_ms = world.now_ms + 60_000 * minutes
        world.run(programs.record_learner_request, asked_ms, asks_for=1)
        assert told(world, 60 * minutes)["learner"]["state"] == state


def test_an_auditor_that_ended_is_an_alarm_and_the_learner_works(at_work: World) -> None:
    fares(at_work, "auditor", Life("ended", 2, 0))
    found = told(at_work)
    assert found["learner"]["state"] == "works"
    assert "The auditor ended with code 2" in found["alarm"]


def test_the_end_of_a_round_is_no_alarm(at_work: World) -> None:
    at_work.run(set_fact, FINISHED, True)
    fares(at_work, "learner", Life("ended", 0, 0))
    found = told(at_work, 7200)
    assert (found["learner"]["state"], found["alarm"]) == ("finished", "")


def test_the_overview_and_the_metrics_name_every_program(at_work: World) -> None:
    fares(at_work, "seeder", Life("crashed", -9, 3))
    found = told(at_work, 130)
    lines = overview.text(found | summary.public_settings(CONFIG, "r"))
    assert "last update 2 min ago, last learner request 2 min ago, learner runs, seeder crashed with code -9" in lines
    page = exposition(found).decode()
    assert 'echo_swarm_program_up{program="seeder"} 0.0' in page
    assert 'echo_swarm_program_up{program="learner"} 1.0' in page
    assert "echo_swarm_learner_silent_seconds 130.0" in page
