"""Free keys beside honest nodes, with real programs: a broadcast neither waits for them nor asks them anything."""

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.processes.free_keys import MODES, free_keys
from tests.processes.programs import Program, Swarm, until
from tests.processes.rounds import Coordinator, Operator, Settings, held, mirror, operator_of, random_weights

SETTINGS: Settings = {
    "round": {"max_updates": 1000},
    "staleness": {"max_updates": 100},
    "publish": {"patches": False},
}
KEYS = 20
SIZE_BYTES = 2 * 1024 * 1024


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[Swarm]:
    """The programs of one test: each has a round of its own."""
    made = Swarm(tmp_path)
    yield made
    made.close()


def weights(swarm: Swarm) -> Path:
    number = time.monotonic_ns()
    return random_weights(swarm.folder / f"weights-{number}", seed=number, size_bytes=SIZE_BYTES)


def begin(swarm: Swarm) -> tuple[Coordinator, Operator]:
    coordinator = Coordinator(swarm, SETTINGS).start()
    operator = operator_of(swarm, coordinator, weights(swarm))
    operator.publish()
    return coordinator, operator


def broadcast(swarm: Swarm, operator: Operator, nodes: list[Program]) -> None:
    operator.policy = weights(swarm)
    version = operator.publish()
    for node in nodes:
        held(node, version)


def test_free_keys_that_arrive_are_asked_nothing_by_those_whom_the_swarm_knows(alone: Swarm) -> None:
    coordinator, operator = begin(alone)
    nodes = [mirror(alone, f"honest-{number}", coordinator.join_string, "--listen", "127.0.0.1:0") for number in (1, 2)]
    for node in nodes:
        held(node, 1)
    broadcast(alone, operator, nodes)
    with free_keys(coordinator.join_string, coordinator.folder / "blobs", MODES, KEYS, beat_s=1.0) as keys:
        for _ in range(2):
            broadcast(alone, operator, nodes)
            until("all keys to follow", lambda: keys.settled >= keys.newest, within_s=120)
        assert keys.wants == 0
        assert keys.streams == 0


def test_a_round_that_free_keys_join_first_is_theirs_for_one_version_at_most(alone: Swarm) -> None:
    coordinator, operator = begin(alone)
    with free_keys(coordinator.join_string, coordinator.folder / "blobs", MODES, KEYS, beat_s=1.0) as keys:
        node = mirror(alone, "honest", coordinator.join_string, "--listen", "127.0.0.1:0")
        held(node, 1)
        broadcast(alone, operator, [node])
        wants = keys.wants
        broadcast(alone, operator, [node])
        assert keys.wants == wants
