"""A round is saved while its learner trains, lost, and restored: the learner goes on from its checkpoint."""

import shutil
import subprocess
from pathlib import Path

import pytest

from tests.processes.light_node import at_work
from tests.processes.programs import PATIENCE_S, Swarm, script, until
from tests.processes.rounds import Coordinator
from tests.processes.training import KAPPA, assert_versions_and_batches_are_whole, resumed_at, training

pytestmark = pytest.mark.processes

LABOURERS = 2


def run(*command: str) -> str:
    program = [script("swarm-coordinator"), *command]
    done = subprocess.run(program, capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_a_learner_goes_on_from_a_restored_backup(swarm: Swarm, policy: Path) -> None:
    coordinator = Coordinator(swarm, training(policy)).start(learner=True)
    passphrase, saved, new = (swarm.folder / name for name in ("passphrase", "saved.tar", "new"))
    passphrase.write_text("correct horse battery")
    with at_work(*[coordinator.join_string] * LABOURERS):
        coordinator.reaches("update", KAPPA + 1)
        run("backup", str(coordinator.config_file), str(saved), "--passphrase-file", str(passphrase))
    join_string = coordinator.join_string
    coordinator.program.kill()
    shutil.rmtree(coordinator.folder)

    run("restore", str(saved), str(new), "--passphrase-file", str(passphrase), "--nothing-newer")
    command = ["launch", str(new / "operator.toml"), "--no-auditor"]
    restored = swarm.start("restored", script("swarm-coordinator"), *command)
    assert restored.said(r"swarm-node join (\S+)$")[1] == join_string
    coordinator.folder = new
    with at_work(*[join_string] * LABOURERS):
        until("the learner's log", lambda: (new / "logs" / "learner.log").exists())
        resumed = resumed_at(coordinator, "")
        assert resumed >= KAPPA
        coordinator.reaches("update", resumed + KAPPA)
    assert_versions_and_batches_are_whole(coordinator)
