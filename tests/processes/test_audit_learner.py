"""`swarm-node audit-learner` on a round of real processes: an honest learner, and a checkpoint that lies."""

import json
import subprocess
from pathlib import Path

import pytest

from tests.processes.light_node import at_work
from tests.processes.programs import Swarm, script, until
from tests.processes.rounds import Coordinator
from tests.processes.training import KAPPA, MOVING, training

pytestmark = pytest.mark.processes

UPDATES = 2 * KAPPA + 2


def audited(coordinator: Coordinator, *words: str) -> subprocess.CompletedProcess[str]:
    command = [script("swarm-node"), "audit-learner", coordinator.join_string, *words]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_a_volunteer_replays_an_update_and_finds_a_checkpoint_that_is_not_the_logs(
    swarm: Swarm, policy: Path, tmp_path: Path
) -> None:
    settings = dict(training(policy, learning_rate=1e-3, kept_one_in=1))
    settings["round"] = {"max_updates": UPDATES}
    settings["objective"] = MOVING  # so that every update changes something, whatever the rewards
    coordinator = Coordinator(swarm, settings).start(learner=True)
    with at_work(coordinator.join_string):
        until("the round to end", lambda: coordinator.status()["finished"])

    number = KAPPA + 2
    done = audited(coordinator, "--update", str(number), "--save", str(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Verified: 1 update replayed, each to the state that the log has." in done.stdout
    folder = tmp_path / f"update-{number}"
    entries = json.loads((folder / "updates.json").read_text())["updates"]
    assert [entry["update"] for entry in entries] == [KAPPA + 1, KAPPA + 2]

    checkpoints = coordinator.folder / "learner" / "checkpoints"
    other, served = checkpoints / f"{0:09d}", checkpoints / f"{KAPPA:09d}"
    for file in served.iterdir():
        file.write_bytes((other / file.name).read_bytes())
    done = audited(coordinator, "--update", str(number))
    assert done.returncode == 1
    assert "The checkpoint that is served has the root" in done.stdout
    assert "1 update of 1 did not match the log" in done.stderr
