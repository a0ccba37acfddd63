"""A node behind a real miniupnpd, for each protocol: dialled from outside while the port is mapped, and only then."""

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
import trio

from swarm_node.p2p.host import open_host
from swarm_node.reach.gateway import Gateway, NoMapping, find_gateway
from swarm_node.reach.listening import Reachability
from swarm_node.reach.mapping import PortMapper
from swarm_node.reach.methods import Method, NatPmp, Pcp, Upnp
from tests.swarm_node.p2p_world import PATIENT_SECONDS, POLL_S, key
from tests.swarm_node.reach import home_network as home
from tests.swarm_node.reach.home_network import HomeNetwork

PORT = 8703
METHODS = [Pcp, NatPmp, Upnp]


@pytest.fixture
def network(tmp_path: Path) -> Iterator[HomeNetwork]:
    if reason := home.missing():
        pytest.skip(reason)
    with home.home_network(tmp_path) as made:
        yield made


def seen_from_outside(network: HomeNetwork, methods: list[Method]) -> tuple[list[bool], Reachability, str]:
    """Run a node at home; return who could dial it before, during and after the mapping, and what was mapped."""
    dialled: list[bool] = []
    reach, rules = Reachability(shares=True), []

    async def look() -> None:
        dialled.append(await trio.to_thread.run_sync(network.can_dial, PORT))

    async def node() -> None:
        with trio.fail_after(PATIENT_SECONDS):
            async with open_host(key(1), "::", PORT):
                await look()
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(PortMapper(PORT, reach, methods=methods).run)
                    while not reach.mapping:  # noqa: ASYNC110  # nobody else needs to be told of it
                        await trio.sleep(POLL_S)
                    await look()
                    rules.append(await trio.to_thread.run_sync(network.forwarded))
                    nursery.cancel_scope.cancel()
                await look()

    network.call("home", partial(trio.run, node))
    return dialled, reach, rules[0]


@pytest.mark.parametrize("method", METHODS)
def test_a_node_behind_nat_is_dialled_from_outside_while_its_port_is_mapped_and_only_then(
    network: HomeNetwork, method: type[Method]
) -> None:
    network.start_router(natpmp=method is not Upnp, upnp=method is Upnp)
    dialled, reach, rules = seen_from_outside(network, [method()])
    assert dialled == [False, True, False]
    assert reach.mapped == f"{home.ROUTER_OUTSIDE}:{PORT}"
    assert reach.addresses == (reach.mapped,)
    assert reach.mapping == f"The router forwards {reach.mapped} to port {PORT} of this node ({method().name})."
    assert home.HOME in rules
    assert network.forwarded() == "", "the mapping is removed at the end"


def test_of_what_a_router_offers_the_first_that_works_is_used(network: HomeNetwork) -> None:
    network.start_router(natpmp=False)
    dialled, reach, _ = seen_from_outside(network, [Pcp(), NatPmp(), Upnp()])
    assert (dialled, "(UPnP)" in reach.mapping) == ([False, True, False], True)


@pytest.mark.parametrize("method", METHODS)
def test_a_router_that_refuses_leaves_the_node_as_it_was_and_is_named(
    network: HomeNetwork, method: type[Method]
) -> None:
    network.start_router(allow=False)
    dialled, reach, rules = seen_from_outside(network, [method()])
    assert (dialled, reach.mapped, rules) == ([False, False, False], "", "")
    assert reach.mapping.startswith(f"The router does not forward port {PORT} to this node: {method().name}: it ")


def test_a_router_that_offers_nothing_leaves_the_node_as_it_was(network: HomeNetwork) -> None:
    dialled, reach, _ = seen_from_outside(network, [Pcp(), NatPmp(), Upnp()])
    assert (dialled, reach.mapped) == ([False, False, False], "")
    for name in ("PCP: it does not offer this", "NAT-PMP: it does not offer this", "UPnP: it does not answer"):
        assert name in reach.mapping


@pytest.mark.parametrize("method", METHODS)
def test_a_router_that_dies_in_between_does_not_keep_the_node_from_ending(
    network: HomeNetwork, method: type[Method]
) -> None:
    network.start_router()

    async def node() -> None:
        reach = Reachability(shares=True)
        with trio.fail_after(PATIENT_SECONDS):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(PortMapper(PORT, reach, methods=[method()]).run)
                while not reach.mapped:  # noqa: ASYNC110  # nobody else needs to be told of it
                    await trio.sleep(POLL_S)
                await trio.to_thread.run_sync(network.stop_router)
                nursery.cancel_scope.cancel()

    network.call("home", partial(trio.run, node))


@pytest.mark.parametrize("method", METHODS)
def test_a_mapping_of_another_machine_is_not_stolen(network: HomeNetwork, method: type[Method]) -> None:
    """Two machines of one house listen on the same port, as the default has it: each gets an external one."""
    network.start_router()
    other = "192.168.77.3"
    network.add_address(other)

    async def both() -> list[int]:
        gateway, first, second = await find_gateway(), method(), method()
        theirs = await first.map(Gateway(gateway.address, other), PORT, 600)
        ours = await second.map(gateway, PORT, 600)
        return [theirs.port, ours.port]

    ports = network.call("home", partial(trio.run, both))
    assert len(set(ports)) == 2
    assert network.forwarded().count(home.HOME) == network.forwarded().count(other) == 1


def test_a_router_behind_another_nat_is_reported_and_not_advertised(tmp_path: Path) -> None:
    if reason := home.missing():
        pytest.skip(reason)
    with home.home_network(tmp_path, "10.9.9.1") as network:
        network.start_router()
        _, reach, rules = seen_from_outside(network, [Pcp(), NatPmp(), Upnp()])
    assert (reach.mapped, reach.addresses, rules) == ("", (), "")
    for reason in (
        "PCP: it has no resources left",
        "NAT-PMP: its line to the internet is down",
        "UPnP: it knows no external address of its own",
    ):
        assert reason in reach.mapping


def test_the_gateway_of_a_real_routing_table_is_asked_and_no_other(network: HomeNetwork) -> None:
    assert network.call("home", partial(trio.run, find_gateway)) == Gateway(home.ROUTER_INSIDE, home.HOME)
    with pytest.raises(NoMapping, match="no default gateway"):
        network.call("outside", partial(trio.run, find_gateway))


@pytest.mark.parametrize("routes", [("0.0.0.0/1", "128.0.0.0/1"), ("default",)])
def test_a_node_behind_a_vpn_does_not_give_its_home_address_away(network: HomeNetwork, routes: tuple[str, ...]) -> None:
    """The router would still forward, and name the address that the owner hides."""
    network.start_router()
    network.add_tunnel(routes)
    dialled, reach, rules = seen_from_outside(network, [Pcp(), NatPmp(), Upnp()])
    assert (dialled, reach.mapped, rules) == ([False, False, False], "", "")
    assert "VPN" in reach.mapping
