"""kill -9 one rank of a learner, or what started them: all end, and the learner goes on from the last checkpoint."""

from pathlib import Path

import psutil
import pytest

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


def ranks(coordinator: Coordinator) -> list[psutil.Process]:
    """The learner's processes, by rank, once all are there."""

    def look() -> list[psutil.Process]:
        processes = sorted(child(coordinator, "learner").children(), key=lambda process: process.pid)
        return processes if len(processes) == 2 else []

    return until("both ranks to be there", look)


@pytest.mark.slow
def test_a_rank_killed_alone_takes_the_others_along_and_nothing_is_lost(swarm: Swarm, policy: Path) -> None:
    coordinator = Coordinator(swarm, training(policy, processes=2)).start(learner=True)
    with at_work(coordinator.join_string):
        coordinator.reaches("update", KAPPA + 1)

        first, second = ranks(coordinator)
        log = learner_log(coordinator)
        second.kill()
        coordinator.program.said(r"learner ended with code (137|1); starting it again")
        until("the other rank to end", lambda: not alive(first), within_s=ENDS_WITHIN_S)
        expected = last_checkpoints(coordinator)
        resumed = resumed_at(coordinator, log)
        assert resumed in expected
        coordinator.reaches("update", resumed + KAPPA + 1)
        assert_versions_and_batches_are_whole(coordinator)

    orphans = ranks(coordinator)
    child(coordinator, "learner").kill()
    until("the ranks to leave by themselves", lambda: not any(map(alive, orphans)), within_s=ENDS_WITHIN_S)
