"""A learner goes on training while its version is uploaded, is killed in the middle of that, and nothing is lost."""

import re
from pathlib import Path

import pytest

from tests.processes.light_node import at_work
from tests.processes.programs import PATIENCE_S, Program, Swarm, script
from tests.processes.relay import Relay
from tests.processes.rounds import Coordinator
from tests.processes.training import KAPPA, MOVING, assert_versions_and_batches_are_whole, training

pytestmark = pytest.mark.processes

WEIGHTS = "model.safetensors"


def learner(swarm: Swarm, coordinator: Coordinator, relay: Relay, folder: Path) -> Program:
    return swarm.start(
        "learner", script("swarm-coordinator"), "learner", str(coordinator.config_file),
        "--coordinator", f"http://{relay.address}", "--token", str(coordinator.folder / "operator.token"),
        "--set", f"round.directory={folder}",
    )  # fmt: skip


@pytest.mark.slow
def test_updates_go_on_during_an_upload_and_a_kill_there_costs_nothing(swarm: Swarm, policy: Path) -> None:
    settings = dict(training(policy, learning_rate=1e-3), objective=MOVING)
    coordinator = Coordinator(swarm, settings).start()
    relay, folder = Relay(coordinator.address), swarm.folder / "elsewhere"
    first = learner(swarm, coordinator, relay, folder)
    with at_work(coordinator.join_string):
        coordinator.reaches("update", KAPPA + 1)
        relay.hold(f"/{WEIGHTS}?digest=".encode())
        assert relay.held.wait(PATIENCE_S)
        held = int(coordinator.status()["version"])
        saved = KAPPA * held
        # Nodes hold the version before: the bound of staleness lets them sample two batches more, and no third.
        coordinator.reaches("update", saved + 2)
        assert int(coordinator.status()["version"]) == held
        first.kill()

        second = learner(swarm, coordinator, relay, folder)
        second.said(rf"resumed update={saved}\b")
        coordinator.reaches("update", saved + 2 * KAPPA)
        coordinator.reaches("version", held + 2)
    assert not re.search("waiting for the coordinator", second.log)
    assert coordinator.status()["rejected"] == {}
    assert_versions_and_batches_are_whole(coordinator)
    relay.close()
