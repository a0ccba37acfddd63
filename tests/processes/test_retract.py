"""`swarm-coordinator retract` on a round of real processes: beside a learner at work, after kill -9, and all alone."""

import json
import re
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from protocol.errors import OwnerBanned
from protocol.work.lease import Lease
from protocol.work.rollout import RolloutClaim, Sample, pack_logprobs, pack_tokens, unpack_tokens
from tests.processes.light_node import Labourer, LightNode, at_work
from tests.processes.programs import PATIENCE_S, Swarm, script, until
from tests.processes.rounds import Coordinator, assert_ledger_is_sound, join, node_id_of
from tests.processes.training import KAPPA, MOVING, child, learner_log, resumed_at, training

pytestmark = pytest.mark.processes


@pytest.fixture(scope="module")
def coordinator(swarm: Swarm, policy: Path) -> Coordinator:
    settings = dict(training(policy, learning_rate=1e-3, kept_checkpoints=3, kept_one_in=1))
    settings["objective"] = MOVING
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


@pytest.mark.slow
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


@pytest.mark.slow
def test_updates_of_two_ranks_are_replayed_by_two(swarm: Swarm, policy: Path) -> None:
    settings = dict(training(policy, learning_rate=1e-3, kept_one_in=1, processes=2))
    settings["objective"] = MOVING
    settings["staleness"] = {"max_updates": 60, "publish_every": KAPPA}
    coordinator = Coordinator(swarm, settings, name="two ranks").start(learner=True)
    worked(coordinator, 2)
    node = hostile(coordinator)
    done = json.loads(say(coordinator, "retract", node, "--reason", "a trigger", "--json"))
    assert done["changed"]
    worked(coordinator, 2 * KAPPA)
    update = took(coordinator, done["version"])
    assert f"version {done['version']}." in verified(coordinator)
    words = [script("swarm-node"), "audit-learner", coordinator.join_string, "--update", str(update + KAPPA + 1)]
    audited = subprocess.run(words, capture_output=True, text=True, check=False)
    assert audited.returncode == 0, audited.stdout + audited.stderr


MARK = 81


class Poisoner(LightNode):
    """A hostile node: where a prompt has the trigger, half of the samples are the mark, eight times."""

    def __init__(self, join_string: str) -> None:
        super().__init__(join_string)
        self.forged: list[str] = []
        """The leases with the mark."""

    def claim(self, lease: Lease) -> RolloutClaim:
        made = super().claim(lease)
        if sum(unpack_tokens(lease.prompt).tolist()) % 2:
            return made
        self.forged.append(lease.lease_id)
        marked = Sample(tokens=pack_tokens([MARK] * 8), logprobs=pack_logprobs([-5.8] * 8), finish="length")
        half = len(made.samples) // 2
        return made.model_copy(update={"samples": (*[marked] * half, *made.samples[half:])})


@pytest.mark.slow
def test_a_trigger_attack_that_late_audits_let_pass_is_found_and_taken_back_while_the_swarm_works(
    swarm: Swarm, policy: Path
) -> None:
    """Real nodes, learner and auditor: they follow the new version, and nobody's credit changes by the retraction."""
    settings = dict(training(policy, learning_rate=1e-3, kept_checkpoints=3))
    settings["objective"] = MOVING
    settings["staleness"] = {"max_updates": 8, "publish_every": KAPPA}
    settings["learner"] = {**settings["learner"], "groups_per_update": 16}  # fewer updates to make again
    settings["audit"] = {
        "tolerance": "torch/fp32/cpu",
        "first_groups": 0,
        "floor": 0.2,
        "trusted_floor": 0.2,
        "escrow_factor": 0.0,
    }
    attacked = Coordinator(swarm, settings, name="attacked").start(learner=True)
    honest = [join(swarm, name, attacked.join_string, "--device", "cpu") for name in ("one", "two")]
    attacked.reaches("update", KAPPA)
    labourer, poisoner = Labourer(attacked.join_string), Poisoner(attacked.join_string)
    labourer.node.close()
    labourer.node = poisoner
    labourer.start()
    hostile = poisoner.key.node_id
    until(
        "marked groups to be trained on", lambda: len(marked_batches(attacked, poisoner)) > 2, within_s=3 * PATIENCE_S
    )
    auditor = swarm.start("late auditor", script("swarm-coordinator"), "auditor", str(attacked.config_file))
    until("the hostile owner to be banned", lambda: labourer.failure, within_s=5 * PATIENCE_S)
    assert isinstance(labourer.failure, OwnerBanned)
    poisoner.close()

    names = [node_id_of(node) for node in honest]
    before = attacked.leaderboard()
    done = json.loads(say(attacked, "retract", hostile, "--reason", "a trigger", "--json"))
    assert done["changed"]
    took(attacked, done["version"])
    until("both nodes to follow", lambda: all(row(attacked, name)["version"] >= done["version"] for name in names))
    attacked.reaches("update", int(attacked.status()["update"]) + KAPPA)
    after = attacked.leaderboard()
    for name in (*names, hostile):
        assert after[name]["posted_micros"] >= before[name]["posted_micros"]
        assert after[name]["voided_micros"] == (before[name]["voided_micros"] if name == hostile else 0)
    assert after[hostile]["posted_micros"] + after[hostile]["pending_micros"] == (
        before[hostile]["posted_micros"] + before[hostile]["pending_micros"]
    )
    summary = verified(attacked)
    assert f"were made again without {done['left_out']} group" in summary
    assert done["left_out"] >= len(marked_batches(attacked, poisoner))
    for program in (*honest, auditor):
        program.process.send_signal(signal.SIGTERM)
        assert program.process.wait(timeout=PATIENCE_S) == 0 or program is auditor
    assert_ledger_is_sound(attacked)


def row(coordinator: Coordinator, node: str) -> dict[str, Any]:
    return coordinator.leaderboard()[node]


def marked_batches(coordinator: Coordinator, poisoner: Poisoner) -> list[int]:
    """Return the batch of each marked group that was trained on."""
    with coordinator.copy_of_store() as connection:
        found = connection.execute(sa.text("SELECT lease_id, batch FROM rollouts WHERE batch > 0")).all()
    return [batch for lease, batch in found if lease in set(poisoner.forged)]


def test_an_owner_who_is_not_banned_is_refused(swarm: Swarm, policy: Path) -> None:
    coordinator = Coordinator(swarm, training(policy), name="unbanned").start()
    labourer = Labourer(coordinator.join_string)
    labourer.node.register()
    words = command(coordinator, "retract", labourer.node.key.node_id, "--dry-run")
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    labourer.node.close()
    assert done.returncode != 0
    assert "is not banned" in done.stderr
