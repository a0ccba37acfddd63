"""A learner on a machine of its own outlives its coordinator: it waits, says so once, and trains on nothing twice."""

import json
import random
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.processes.light_node import at_work
from tests.processes.programs import PATIENCE_S, Program, Swarm, script, until
from tests.processes.relay import Relay
from tests.processes.rounds import Coordinator
from tests.processes.training import KAPPA, MOVING, assert_versions_and_batches_are_whole, training

pytestmark = pytest.mark.processes

LABOURERS = 2
KILLS = 4
WEIGHTS = "model.safetensors"


@dataclass(frozen=True)
class Scene:
    """A learner with a folder of its own, the line, and the coordinator at its other end."""

    coordinator: Coordinator
    relay: Relay
    learner: Program
    folder: Path

    def dies_and_comes_back(self) -> None:
        """The coordinator alone; the learner notices both."""
        before = len(self.learner.log)
        self.coordinator.program.kill()
        self.learner.said("waiting for the coordinator", after=before)
        self.coordinator.start()
        self.learner.said("the coordinator answers again", after=before)

    def updates(self) -> list[int]:
        """Return the learner's updates, in order."""
        lines = (self.folder / "learner" / "metrics.jsonl").read_text().splitlines()
        return [json.loads(line)["update"] for line in lines]


@pytest.fixture(scope="module")
def scene(swarm: Swarm, policy: Path) -> Iterator[Scene]:
    settings = dict(training(policy, learning_rate=1e-3), objective=MOVING)
    coordinator = Coordinator(swarm, settings).init()
    relay, folder = Relay(coordinator.address), swarm.folder / "elsewhere"
    learner = swarm.start(
        "learner", script("swarm-coordinator"), "learner", str(coordinator.config_file),
        "--coordinator", f"http://{relay.address}", "--token", str(coordinator.folder / "operator.token"),
        "--set", f"round.directory={folder}",
    )  # fmt: skip
    yield Scene(coordinator, relay, learner, folder)
    relay.close()


def test_a_learner_that_is_there_first_waits_for_its_coordinator(scene: Scene) -> None:
    scene.learner.said("waiting for the coordinator")
    scene.coordinator.start()
    scene.learner.said("the coordinator answers again")
    scene.learner.said("published version=1 update=0")


@pytest.mark.slow
def test_a_coordinator_that_dies_while_the_learner_waits_for_a_batch_is_waited_for(scene: Scene) -> None:
    scene.dies_and_comes_back()
    with at_work(scene.coordinator.join_string):
        scene.coordinator.reaches("update", 1)


def test_a_coordinator_that_dies_in_the_middle_of_an_upload_gets_all_of_it_again(scene: Scene) -> None:
    scene.relay.hold(f"/{WEIGHTS}?digest=".encode())
    with at_work(scene.coordinator.join_string):
        assert scene.relay.held.wait(PATIENCE_S)
        uploads = scene.coordinator.folder / "uploads"
        (half,) = until("some of the file to be there", lambda: list(uploads.glob(f"*/.{WEIGHTS}.*")))
        scene.dies_and_comes_back()
        scene.coordinator.reaches("version", int(half.parent.name))
    assert_versions_and_batches_are_whole(scene.coordinator)


@pytest.mark.slow
def test_a_coordinator_killed_at_any_moment_costs_the_learner_nothing_but_time(scene: Scene) -> None:
    seed = random.SystemRandom().randrange(2**32)
    print(f"seed {seed}")
    chance = random.Random(seed)
    reached = int(scene.coordinator.status()["update"])
    with at_work(*[scene.coordinator.join_string] * LABOURERS):
        for _ in range(KILLS):
            reached += chance.randint(1, 2 * KAPPA)
            scene.coordinator.reaches("update", reached)
            scene.dies_and_comes_back()
        scene.coordinator.reaches("update", reached + 2 * KAPPA)
    log, updates = scene.learner.log, scene.updates()
    assert scene.learner.running
    assert updates == list(range(1, len(updates) + 1)), "an update was made twice, or not at all"
    assert log.count("waiting for the coordinator") == log.count("answers again") == KILLS + 3
    assert "resumed" not in log
    assert_versions_and_batches_are_whole(scene.coordinator)


def test_a_token_that_is_not_this_rounds_ends_the_learner_at_once(scene: Scene, swarm: Swarm, tmp_path: Path) -> None:
    (token := tmp_path / "token").write_text("0" * 64)
    refused = swarm.start(
        "refused", script("swarm-coordinator"), "learner", str(scene.coordinator.config_file),
        "--coordinator", scene.coordinator.url, "--token", str(token), "--set", f"round.directory={tmp_path}",
    )  # fmt: skip
    assert refused.process.wait(PATIENCE_S) == 1
    assert "[not_authorised]" in refused.log
    assert "waiting for the coordinator" not in refused.log


def test_a_coordinator_that_comes_back_behind_what_was_seen_of_it_ends_the_learner(scene: Scene) -> None:
    """The coordinator is restored from a copy that is two versions old: the learner would train on batches twice."""
    coordinator = scene.coordinator
    copy, newest = coordinator.folder.with_name("copy"), int(coordinator.status()["version"])
    coordinator.program.kill()
    shutil.copytree(coordinator.folder, copy)
    coordinator.start()
    with at_work(coordinator.join_string):
        coordinator.reaches("version", newest + 2)
    coordinator.program.kill()
    shutil.rmtree(coordinator.folder)
    copy.rename(coordinator.folder)
    coordinator.start()
    assert scene.learner.process.wait(PATIENCE_S) == 1
    assert "[out_of_order]" in scene.learner.log
