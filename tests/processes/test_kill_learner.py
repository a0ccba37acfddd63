"""kill -9 the coordinator above its learner, or the learner alone: training resumes at the right update and version."""

import re
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import sqlalchemy as sa

from tests.processes.light_node import Labourer
from tests.processes.programs import ENDS_WITHIN_S, Swarm, alive, until
from tests.processes.rounds import Coordinator, Settings, assert_ledger_is_sound

pytestmark = pytest.mark.processes

KAPPA = 3
GROUPS_PER_UPDATE = 2
LABOURERS = 2


@pytest.fixture(scope="module")
def labourers() -> Iterator[list[Labourer]]:
    """Work for the learner as long as the module lasts."""
    crowd: list[Labourer] = []
    yield crowd
    for labourer in crowd:
        labourer.finish()


@pytest.fixture(scope="module")
def everything(swarm: Swarm, policy: Path, labourers: list[Labourer]) -> Coordinator:
    settings: Settings = {
        "round": {"max_updates": 100_000},
        "model": {"path": str(policy)},
        "sampling": {"samples_per_group": 4},
        "staleness": {"max_updates": KAPPA + 1, "publish_every": KAPPA},
        "learner": {"groups_per_update": GROUPS_PER_UPDATE},
    }
    coordinator = Coordinator(swarm, settings).start(learner=True)
    labourers += [Labourer(coordinator.join_string) for _ in range(LABOURERS)]
    for labourer in labourers:
        labourer.start()
    return coordinator


@pytest.fixture
def coordinator(everything: Coordinator) -> Coordinator:
    """Up, with a learner in the middle of its round."""
    if not everything.program.running:
        everything.start(learner=True)
    everything.reaches("update", int(everything.status()["update"]) + 2 * KAPPA + 2)
    return everything


def learner_log(coordinator: Coordinator) -> str:
    return (coordinator.folder / "logs" / "learner.log").read_text()


def child(coordinator: Coordinator, command: str) -> psutil.Process:
    """The coordinator's child that runs this command."""
    (found,) = (process for process in coordinator.program.descendants() if command in process.cmdline())
    return found


def resumed_at(coordinator: Coordinator, log_before: str) -> int:
    """The update from which a learner that was started since then goes on."""
    found = until(
        "the learner to resume",
        lambda: re.search(r"resumed update=(\d+)", learner_log(coordinator)[len(log_before) :]),
    )
    assert found
    return int(found[1])


def last_checkpoints(coordinator: Coordinator) -> set[int]:
    """Where the newest checkpoint may stand: at the last multiple of kappa, or one before while that is being saved."""
    with coordinator.copy_of_store() as connection:
        reported = connection.execute(sa.text("SELECT MAX(batch) FROM batches WHERE reported_ms IS NOT NULL")).scalar()
    assert reported
    newest = reported // KAPPA * KAPPA
    return {newest, newest - KAPPA} if reported == newest else {newest}


def assert_versions_and_batches_are_whole(coordinator: Coordinator) -> None:
    """Versions follow each other, every batch but the newest is reported, and each of its groups is settled once."""
    with coordinator.copy_of_store() as connection:
        versions = connection.execute(sa.text("SELECT version, policy_update FROM versions ORDER BY version")).all()
        batches = connection.execute(sa.text("SELECT batch, reported_ms FROM batches ORDER BY batch")).all()
        sizes = dict(
            map(
                tuple,
                connection.execute(sa.text("SELECT batch, COUNT(*) FROM rollouts WHERE batch > 0 GROUP BY batch")),
            )
        )
        unsettled = connection.execute(
            sa.text(
                "SELECT r.claim_id FROM rollouts r JOIN batches b ON r.batch = b.batch "
                "JOIN ledger_claims c ON c.claim_id = r.claim_id "
                "WHERE b.reported_ms IS NOT NULL AND c.state != 'posted'"
            )
        ).all()
    assert [tuple(row) for row in versions] == [(number + 1, KAPPA * number) for number in range(len(versions))]
    assert [number for number, _ in batches] == list(range(1, len(batches) + 1))
    assert all(reported_ms for _, reported_ms in batches[:-1])
    assert set(sizes.values()) == {GROUPS_PER_UPDATE}
    assert unsettled == []
    assert_ledger_is_sound(coordinator)


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
    coordinator.program.said(r"learner ended with code -9; starting it again")
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
    assert swarm.members() == []
    assert "Traceback" not in coordinator.program.log
    assert_versions_and_batches_are_whole(coordinator)
