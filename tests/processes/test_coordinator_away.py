"""A coordinator that is not there yet, or goes away: the node waits, says so once, and goes on; no work is lost."""

import re
import socket
from pathlib import Path

import pytest

from tests.processes.programs import Program, Swarm, until
from tests.processes.rounds import (
    NOBODY_LEARNS,
    Coordinator,
    Settings,
    assert_ledger_is_sound,
    join,
    operator_of,
    outbox_of,
)

pytestmark = pytest.mark.processes

SETTINGS: Settings = {
    "sampling": {"samples_per_group": 16, "max_new_tokens": 256},
    **NOBODY_LEARNS,
    "leases": {"timeout_s": 600.0, "heartbeat_s": 0.5},
}


def complaints(log: str) -> list[str]:
    """Return the lines of a log that report problems to the owner."""
    return re.findall(r"^\S+ (?:WARNING|ERROR|CRITICAL) .*$|^.*unreachable.*$", log, re.MULTILINE)


def works(coordinator: Coordinator) -> None:
    before = coordinator.accepted_groups()
    until("the node to work", lambda: coordinator.accepted_groups() > before)


def goes_away(coordinator: Coordinator, home: Path) -> dict[str, bytes]:
    """Kill the coordinator while the node generates; what the node finishes alone."""
    until("the node to have leases", coordinator.open_leases)
    coordinator.program.kill()
    return until("the node to finish rollouts by itself", lambda: outbox_of(home))


def await_attempts(address: str, count: int) -> None:
    """Be there in the coordinator's place and say nothing, until the node has tried so often."""
    host, _, port = address.partition(":")
    with socket.create_server((host, int(port))) as door:
        door.settimeout(60)
        for _ in range(count):
            door.accept()[0].close()


@pytest.fixture(scope="module")
def home(swarm: Swarm) -> Path:
    return swarm.folder / "home"


@pytest.fixture(scope="module")
def coordinator(swarm: Swarm) -> Coordinator:
    """Return a coordinator that does not run yet; only its join string is known."""
    return Coordinator(swarm, SETTINGS).init()


@pytest.fixture(scope="module")
def node(swarm: Swarm, coordinator: Coordinator, home: Path, policy: Path) -> Program:
    """A node that was started before its coordinator."""
    node = join(swarm, "node", coordinator.join_string, home=home)
    node.said("waiting for the coordinator")
    coordinator.start()
    node.said("registered")
    operator_of(swarm, coordinator, policy).publish()
    node.said("version loaded version=1")
    return node


def test_node_that_starts_before_the_coordinator_waits_and_says_so_once(node: Program) -> None:
    (said,) = complaints(node.log)
    assert "waiting for the coordinator" in said
    assert "does not respond" in said


def test_coordinator_that_goes_away_and_comes_back_is_waited_for(
    coordinator: Coordinator, node: Program, home: Path
) -> None:
    works(coordinator)
    before = len(node.log)
    unsent = goes_away(coordinator, home)
    node.said("waiting for the coordinator", after=before)
    await_attempts(coordinator.address, 5)
    coordinator.start()
    node.said("the coordinator answers again", after=before)
    until("the unsent rollouts to be delivered", lambda: not unsent.keys() & outbox_of(home).keys())
    works(coordinator)
    assert len(complaints(node.log[before:])) == 1
    assert node.running
    assert_ledger_is_sound(coordinator)


def test_rollouts_finished_while_the_coordinator_was_away_survive_a_restart_of_the_node(
    swarm: Swarm, coordinator: Coordinator, node: Program, home: Path
) -> None:
    works(coordinator)
    goes_away(coordinator, home)
    node.kill()
    unsent = outbox_of(home)
    assert unsent
    coordinator.start()
    again = join(swarm, "node-again", coordinator.join_string, home=home)
    until("the outbox to be delivered", lambda: not unsent.keys() & outbox_of(home).keys())
    with coordinator.copy_of_store() as connection:
        stored = dict(map(tuple, connection.exec_driver_sql("SELECT lease_id, envelope FROM rollouts")))
    assert {lease_id: stored[lease_id] for lease_id in unsent} == unsent
    assert "rollout rejected" not in again.log
    assert_ledger_is_sound(coordinator)
