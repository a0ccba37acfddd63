"""`swarm-coordinator retract` on a round of real processes: beside a learner at work, after kill -9, and all alone."""

import json
import re
import signal
import subprocess
from pathlib import Path

import pytest
import sqlalchemy as sa

from tests.processes.light_node import Labourer, at_work
from tests.processes.programs import Swarm, script, until
from tests.processes.rounds import Coordinator, assert_ledger_is_sound
from tests.processes.training import KAPPA, child, learner_log, resumed_at, training

pytestmark = pytest.mark.processes


@pytest.fixture(scope="module")
def coordinator(swarm: Swarm, policy: Path) -> Coordinator:
    # Nobody is right about anything here: decay, and the pull back from it, make every update change the policy.
    settings = dict(training(policy, learning_rate=1e-3, weight_decay=0.1, kept_checkpoints=3, kept_one_in=1))
    settings["objective"] = {"beta": 0.01}
    settings["staleness"] = {"max_updates": 60, "publish_every": KAPPA}
    return Coordinator(swarm, settings).start(learner=True)


def worked(coordinator: Coordinator, updates: int) -> None:
    """Let honest nodes work for so many updates: a round that went on would have more and more to make again."""
    update = int(coordinator.status()["update"])
    with at_work(*[coordinator.join_string] * 2):
        coordinator.reaches("update", update + updates)


def command(coordinator: Coordinator, name: str, *words: str) -> list[str]:
    return [script("swarm-coordinator"), *name.split(), str(coordinator.config_file), *words]


def say(coordinator: Coordinator, name: str, *words: str) -> str:
    """Run a command that must succeed; return its output."""
    done = subprocess.run(command(coordinator, name, *words), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def hostile(coordinator: Coordinator, *, beside: int = 1) -> str:
    """Let another owner work until some of its groups were trained on, and ban it; return the id of its node.

    All stop then: the round would train on while the commands start, and have more and more to make again.
    """
    labourer = Labourer(coordinator.join_string)
    node = str(labourer.node.key.node_id)
    with at_work(*[coordinator.join_string] * beside):
        labourer.start()
        until("its groups to be in batches", lambda: len(batches_with(coordinator, node)) > 2)
        labourer.finish()
    say(coordinator, "nodes ban", node, "--reason", "a trigger", "--yes")
    return node


def batches_with(coordinator: Coordinator, node: str) -> list[int]:
    with coordinator.copy_of_store() as connection:
        query = "SELECT DISTINCT batch FROM rollouts WHERE batch > 0 AND node_id = :node ORDER BY batch"
        return list(connection.execute(sa.text(query), {"node": node}).scalars())


def took(coordinator: Coordinator, version: int) -> int:
    """Return the update at which the learner took a version."""
    text = f"the learner to take version {version}"
    match = until(text, lambda: re.search(rf"took version={version} update=(\d+)", learner_log(coordinator)))
    assert match
    return int(match[1])


def verified(coordinator: Coordinator) -> str:
    """Return what a participant's check of the whole public log says."""
    line = [script("swarm-node"), "ledger", "verify", coordinator.join_string]
    done = subprocess.run(line, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_killed_and_repeated_it_publishes_a_policy_that_never_saw_the_groups(coordinator: Coordinator) -> None:
    worked(coordinator, 2 * KAPPA)
    node = hostile(coordinator)
    first = batches_with(coordinator, node)[0]
    planned = say(coordinator, "retract", node, "--dry-run")
    assert f"Update {first} was the first to train on their groups." in planned
    start = int(re.findall(r"the checkpoint after update (\d+)", planned)[0])
    assert first - KAPPA <= start < first

    with subprocess.Popen(
        command(coordinator, "retract", node, "--reason", "a trigger"), stdout=subprocess.PIPE, text=True
    ) as killed:
        assert killed.stdout
        for line in killed.stdout:
            if "made again, with" in line:
                killed.send_signal(signal.SIGKILL)
                break
    done = json.loads(say(coordinator, "retract", node, "--reason", "a trigger", "--json"))
    assert done["changed"]
    worked(coordinator, 2 * KAPPA)
    update = took(coordinator, done["version"])
    summary = verified(coordinator)
    assert f"were made again without {done['left_out']} group" in summary
    assert f"version {done['version']}." in summary
    assert f"put version {done['version']} in the place" not in summary
    assert_ledger_is_sound(coordinator)
    assert json.loads(say(coordinator, "retract", node, "--reason", "again", "--json")) == {"changed": False}
    assert not (coordinator.folder / "learner" / "retracting").exists()

    words = [script("swarm-node"), "audit-learner", coordinator.join_string, "--update", str(update + KAPPA + 1)]
    audited = subprocess.run(words, capture_output=True, text=True, check=False)
    assert audited.returncode == 0, audited.stdout + audited.stderr


@pytest.mark.slow
def test_beside_nodes_at_work_and_a_learner_that_is_killed_before_its_next_checkpoint(coordinator: Coordinator) -> None:
    node = hostile(coordinator)
    with at_work(coordinator.join_string):
        done = json.loads(say(coordinator, "retract", node, "--reason", "another", "--json"))
        update = took(coordinator, done["version"])
        log = learner_log(coordinator)
        child(coordinator, "learner").kill()
        resumed_at(coordinator, log)
        coordinator.reaches("update", update + KAPPA + 1)
    assert_ledger_is_sound(coordinator)
    assert f"version {done['version']}." in verified(coordinator)


@pytest.mark.slow
def test_a_stopped_round_is_retracted_by_the_command_alone(coordinator: Coordinator) -> None:
    node = hostile(coordinator, beside=0)
    coordinator.program.kill()
    done = json.loads(say(coordinator, "retract", node, "--reason", "a third", "--json"))
    assert done["changed"]
    coordinator.start(learner=True)
    worked(coordinator, 2)
    took(coordinator, done["version"])
    assert_ledger_is_sound(coordinator)
    assert f"version {done['version']}." in verified(coordinator)


def test_an_owner_who_is_not_banned_is_refused(coordinator: Coordinator) -> None:
    labourer = Labourer(coordinator.join_string)
    labourer.node.register()
    words = command(coordinator, "retract", labourer.node.key.node_id, "--dry-run")
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    labourer.node.close()
    assert done.returncode != 0
    assert "is not banned" in done.stderr
