"""kill -9 the coordinator above its learner, or the learner alone: training resumes at the right update and version."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import sqlalchemy as sa

from tests.processes.light_node import at_work
from tests.processes.programs import ENDS_WITHIN_S, Swarm, alive, until
from tests.processes.rounds import Coordinator
from tests.processes.training import (
    KAPPA,
    assert_versions_and_batches_are_whole,
    child,
    last_checkpoints,
    learner_log,
    resumed_at,
    training,
)

pytestmark = pytest.mark.processes

LABOURERS = 2


@pytest.fixture(scope="module")
def everything(swarm: Swarm, policy: Path) -> Iterator[Coordinator]:
    coordinator = Coordinator(swarm, training(policy)).start(learner=True, preflight=True)
    with at_work(*[coordinator.join_string] * LABOURERS):
        yield coordinator
        if not coordinator.program.running:
            coordinator.start()  # a labourer may still wait for its verdict


@pytest.fixture
def coordinator(everything: Coordinator) -> Coordinator:
    """A coordinator that is up, with a learner in the middle of its round."""
    if not everything.program.running:
        everything.start(learner=True)
    everything.reaches("update", int(everything.status()["update"]) + 2 * KAPPA + 2)
    return everything


def test_coordinator_killed_above_its_learner_takes_its_children_along_and_training_resumes(
    coordinator: Coordinator,
) -> None:
    children = [child(coordinator, "learner"), child(coordinator, "seed")]
    coordinator.program.kill()
    until("learner and seeder to leave by themselves", lambda: not any(map(alive, children)), within_s=ENDS_WITHIN_S)
    expected = last_checkpoints(coordinator)
    log = learner_log(coordinator)
    with coordinator.copy_of_store() as connection:
        newest = connection.execute(sa.text("SELECT MAX(version) FROM versions")).scalar_one()

    coordinator.start(learner=True)
    resumed = resumed_at(coordinator, log)
    assert resumed in expected
    assert newest in (1 + resumed // KAPPA, resumed // KAPPA)
    coordinator.reaches("update", resumed + 2 * KAPPA)
    coordinator.reaches("version", newest + 1)
    assert_versions_and_batches_are_whole(coordinator)


def test_learner_killed_alone_is_started_again_and_resumes(coordinator: Coordinator) -> None:
    seeder, log = child(coordinator, "seed"), learner_log(coordinator)
    child(coordinator, "learner").kill()
    coordinator.program.said(r"learner was ended by SIGKILL, perhaps since memory ran out; starting it again")
    expected = last_checkpoints(coordinator)
    resumed = resumed_at(coordinator, log)
    assert resumed in expected
    coordinator.reaches("update", resumed + 2 * KAPPA)
    assert child(coordinator, "seed") == seeder
    assert_versions_and_batches_are_whole(coordinator)


def test_ctrl_c_ends_coordinator_learner_and_seeder(swarm: Swarm, coordinator: Coordinator) -> None:
    assert len(coordinator.program.descendants()) >= 2
    seconds = coordinator.program.interrupt()
    assert seconds < ENDS_WITHIN_S, f"Ctrl-C took {seconds:.1f} s"
    print(f"Ctrl-C took {seconds:.1f} s")
    assert coordinator.program.process.returncode == 0
    until("every process of it to be gone", lambda: not swarm.members())
    assert "Traceback" not in coordinator.program.log
    assert_versions_and_batches_are_whole(coordinator)
