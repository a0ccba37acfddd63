"""A node at home, behind a router with NAT that offers port mapping, in a round on the internet."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import sqlalchemy as sa

from tests.processes.programs import Program, Swarm, script, until
from tests.processes.rounds import WHOLE_VERSIONS, Coordinator, held, node_id_of, operator_of, other_weights
from tests.swarm_node.reach import home_network as home
from tests.swarm_node.reach.home_network import HomeNetwork, home_network

pytestmark = pytest.mark.processes

PORT = 8703
VERSIONS_AT_MOST = 10


@pytest.fixture
def network(tmp_path: Path) -> Iterator[HomeNetwork]:
    if reason := home.missing():
        pytest.skip(reason)
    with home_network(tmp_path) as made:
        yield made


def mirror(network: HomeNetwork, swarm: Swarm, party: str, join_string: str, *more: str) -> Program:
    """Start a mirror as the documents say."""
    options = ("--home", str(swarm.folder / party), "--name", party, "--json", *more)
    return swarm.start(party, *network.command(party, script("swarm-node"), "mirror", join_string, *options))


def registered(coordinator: Coordinator, node: str) -> list[str]:
    with coordinator.copy_of_store() as connection:
        asked = sa.text("SELECT addresses FROM nodes WHERE node_id = :node")
        addresses: list[str] = json.loads(connection.execute(asked, {"node": node}).scalar_one())
        return addresses


def words_on(coordinator: Coordinator, node: str) -> set[bool]:
    with coordinator.copy_of_store() as connection:
        asked = sa.text("SELECT answered FROM dials WHERE node = :node")
        return set(map(bool, connection.execute(asked, {"node": node}).scalars()))


def round_outside(network: HomeNetwork, swarm: Swarm, policy: Path) -> None:
    """Start a round outside the home network, on the internet: the coordinator and another mirror."""
    coordinator = Coordinator(swarm, WHOLE_VERSIONS, host=home.OUTSIDE).start()
    operator = operator_of(swarm, coordinator, policy)
    at_home = mirror(network, swarm, "home", coordinator.join_string)
    at_home.said(rf"The router forwards {home.ROUTER_OUTSIDE}:{PORT} to port {PORT} of this node \(PCP\)")
    # One connection serves both directions: only a node that nobody can dial is sure to dial the other.
    outside = mirror(network, swarm, "outside", coordinator.join_string, "--listen", "127.0.0.1:0")
    node = node_id_of(at_home)
    coordinator.reaches("nodes", 2)
    assert registered(coordinator, node) == [f"{home.ROUTER_OUTSIDE}:{PORT}"]
    for number in range(VERSIONS_AT_MOST):
        version = operator.publish()
        for program in (at_home, outside):
            held(program, version)
        if words_on(coordinator, node):
            break
        operator.policy = other_weights(policy, swarm.folder / f"weights-{number}")
    until("the other mirror to say that it could dial the one at home", lambda: words_on(coordinator, node) == {True})
    at_home.interrupt()
    assert network.forwarded() == "", "the mapping is removed at the end"
    assert "Traceback" not in at_home.log + outside.log


def test_a_node_at_home_is_dialled_from_the_internet_through_the_port_that_it_maps(
    network: HomeNetwork, swarm: Swarm, policy: Path
) -> None:
    network.start_router()
    network.call("outside", lambda: round_outside(network, swarm, policy))


@pytest.mark.slow
def test_a_router_that_is_dead_or_forwards_nothing_does_not_keep_a_node_from_its_round(
    network: HomeNetwork, tmp_path: Path, policy: Path
) -> None:
    swarm = Swarm(tmp_path / "swarm")

    def outside() -> None:
        coordinator = Coordinator(swarm, WHOLE_VERSIONS, host=home.OUTSIDE).start()
        operator = operator_of(swarm, coordinator, policy)
        at_home = mirror(network, swarm, "home", coordinator.join_string)
        coordinator.reaches("nodes", 1)
        held(at_home, operator.publish())
        at_home.said(rf"The router does not forward port {PORT} to this node: PCP: .*NAT-PMP: .*UPnP: ")
        assert at_home.log.index("registered ") < at_home.log.index("The router"), "nothing waits for the router"
        at_home.interrupt()
        assert "Traceback" not in at_home.log

    try:
        network.call("outside", outside)
    finally:
        swarm.close()
