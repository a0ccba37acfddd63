"""A learner whose updates anybody follows in the log: through a kill and a rollback of the operator."""

import json
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.processes.light_node import at_work
from tests.processes.programs import Swarm, script, until
from tests.processes.rounds import Coordinator
from tests.processes.training import KAPPA, MOVING, child, learner_log, resumed_at, training

pytestmark = pytest.mark.processes

LABOURERS = 2


@pytest.fixture(scope="module")
def coordinator(swarm: Swarm, policy: Path) -> Iterator[Coordinator]:
    settings = dict(training(policy, learning_rate=1e-3, groups_per_update=8))
    settings["objective"] = MOVING
    settings["staleness"] = {"max_updates": 60, "publish_every": KAPPA}
    made = Coordinator(swarm, settings).start(learner=True)
    with at_work(*[made.join_string] * LABOURERS):
        yield made


def verified(coordinator: Coordinator) -> dict[str, Any]:
    """Verify the whole ledger as a stranger does, and return what the log says about training."""
    command = [script("swarm-node"), "ledger", "verify", coordinator.join_string, "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    training: dict[str, Any] = json.loads(done.stdout)["training"]
    return training


def _with_replaced(training: dict[str, Any]) -> dict[str, Any]:
    return training if training["replaced"] else {}


@pytest.mark.slow
def test_the_updates_stay_one_chain_through_a_kill_and_a_rollback(coordinator: Coordinator) -> None:
    coordinator.reaches("update", 2 * KAPPA + 2)
    first = verified(coordinator)
    assert (first["first"], first["repeated"], first["replaced"]) == (1, 0, [])
    assert first["last"] >= 2 * KAPPA

    log = learner_log(coordinator)
    child(coordinator, "learner").kill()
    resumed = resumed_at(coordinator, log)
    coordinator.reaches("update", resumed + KAPPA + 1)
    after_kill = verified(coordinator)
    assert (after_kill["repeated"], len(after_kill["settings"])) == (0, 1)
    assert after_kill["last"] > resumed

    log = learner_log(coordinator)
    command = [script("swarm-coordinator"), "policy", "rollback", str(coordinator.config_file), "2"]
    subprocess.run([*command, "--reason", "a test"], check=True, capture_output=True)
    took = until(
        "the learner to take it", lambda: re.search(r"took version=(\d+)", learner_log(coordinator)[len(log) :])
    )
    assert took
    newest = int(coordinator.status()["version"])
    coordinator.reaches("version", newest + 2)
    last = until("the log to have the update after it", lambda: _with_replaced(verified(coordinator)))
    assert last["replaced"] == [int(took[1])]
    assert last["repeated"] == 0
