"""The addresses at which a member listens: all for a coordinator elsewhere, loopback for one on this machine."""

import socket

import pytest
import trio

from protocol.errors import ConfigInvalid
from protocol.people.addresses import host_and_port
from swarm_node.commands.options import check_settings
from swarm_node.p2p.host import open_host
from swarm_node.reach import listening
from swarm_node.reach.listening import PORTS, Reachability, claimed_port, describe, open_place
from tests.swarm_node.p2p_world import PATIENT_SECONDS, as_peer, key, node

ELSEWHERE = "http://203.0.113.7:8700"
EVERYWHERE = listening.BOTH_FAMILIES if listening.has_both_families() else listening.IPV4_ONLY


@pytest.mark.trio
@pytest.mark.parametrize("url", ["http://127.0.0.1:8700", "https://localhost/round", "http://[::1]:8700"])
async def test_a_coordinator_on_this_machine_is_joined_without_listening_to_the_network(url: str) -> None:
    async with open_place("", url) as place:
        assert place == ("127.0.0.1", 0)


@pytest.mark.trio
@pytest.mark.parametrize("url", [ELSEWHERE, "http://10.0.0.9:8700", "http://no-such-host.invalid:8700"])
async def test_a_documented_join_listens_on_all_interfaces_at_a_port_that_a_firewall_can_name(url: str) -> None:
    async with open_place("", url) as place:
        assert (place.host, place.port in PORTS) == (EVERYWHERE, True)
        assert not place.is_loopback


@pytest.mark.trio
async def test_the_owner_decides_where_to_listen() -> None:
    async with open_place("192.0.2.7:4001", ELSEWHERE) as place:
        assert place == ("192.0.2.7", 4001)
    with pytest.raises(ConfigInvalid):
        async with open_place("here", ELSEWHERE):
            pass


@pytest.mark.trio
async def test_several_nodes_of_one_machine_get_a_port_each() -> None:
    async with (
        open_place("", ELSEWHERE) as first,
        open_host(key(1), *first) as one,
        open_place("", ELSEWHERE) as second,
        open_host(key(2), *second) as other,
    ):
        ports = [host_and_port(host.addresses[0])[1] for host in (one, other)]
        assert (len(set(ports)), set(ports) <= set(PORTS)) == (2, True)


def test_two_nodes_that_start_at_the_same_moment_do_not_share_a_port() -> None:
    """libp2p would let both listen there: nothing listens yet, and the second takes half of the first's callers."""
    with claimed_port(EVERYWHERE) as first, claimed_port(EVERYWHERE) as second:
        assert first != second


def test_a_port_of_another_program_is_passed_over() -> None:
    with claimed_port(EVERYWHERE) as free, socket.socket() as other:
        pass
    with socket.socket() as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        other.bind(("0.0.0.0", free))
        other.listen()
        with claimed_port(EVERYWHERE) as port:
            assert port != free


def test_a_node_that_finds_all_ports_taken_listens_at_any_other() -> None:
    few = range(18_703, 18_705)
    with claimed_port(EVERYWHERE, few), claimed_port(EVERYWHERE, few), claimed_port(EVERYWHERE, few) as port:
        assert port == 0


@pytest.mark.trio
async def test_a_node_that_does_not_share_listens_nowhere_and_dials_all_the_same() -> None:
    async with open_host(key(1), None, 0) as silent, node(2) as two:
        assert silent.addresses == ()
        two.serve(lambda link: link.close())
        with trio.fail_after(PATIENT_SECONDS):
            link = await silent.connect(as_peer(two), dial_s=PATIENT_SECONDS)
            await link.close()
    assert Reachability(shares=False, own=("[::]:8703",), mapped="203.0.113.7:8703").addresses == ()


def test_one_line_says_what_is_listened_on_how_it_is_limited_and_how_to_turn_it_off() -> None:
    bounds = {"connections": 192, "per_address": 64}
    line = describe(("[::]:8703",), **bounds, upload_cap_gb=0)
    assert line == (
        "Other nodes can fetch chunks on all interfaces, IPv4 and IPv6, TCP port 8703: at most 192 connections, "
        "64 from one address, no upload cap (--upload-gb sets one). --no-share turns this off."
    )
    assert "IPv4, TCP port 8704" in describe(("0.0.0.0:8704",), **bounds, upload_cap_gb=0)
    assert "50 GB of upload a month" in describe(("192.0.2.7:1",), **bounds, upload_cap_gb=50)
    assert "only if they run on this machine, port 1:" in describe(("127.0.0.1:1",), **bounds, upload_cap_gb=0)


@pytest.mark.parametrize(
    ("advertise", "why"),
    [
        ("203.0.113.7:0", "port 0"),
        ("203.0.113.7:65536", "from 1 to 65535"),
        ("203.0.113.7", "host:port"),
        ("224.0.0.1:8703", "multicast"),
        ("255.255.255.255:8703", "broadcast"),
        ("gpu.example.org:8703,127.1:8703", "number"),
        ("gpu_1:8703", "neither an address nor a host name"),
    ],
)
def test_an_address_that_nobody_can_dial_is_not_advertised(advertise: str, why: str) -> None:
    with pytest.raises(ConfigInvalid, match=why) as caught:
        check_settings("-", 0, "", advertise)
    assert "198.51.100.7:8703" in caught.value.hint


@pytest.mark.parametrize(
    ("name", "price", "listen", "said"),
    [
        ("n" * 41, 0, "", "--name: this name has 41 characters. The maximum is 40."),
        ("a\udcffb", 0, "", "--name: this name contains characters that cannot be shown."),
        ("a\nb", 0, "", "--name: this name contains characters that cannot be shown."),
        ("-", -5, "", "--price -5: a price is from 0 to 1000000000000 "),
        ("-", 10**12 + 1, "", "--price 1000000000001: "),
        ("-", 0, "99999", "--listen: '99999' is not host:port."),
        ("-", 0, "0.0.0.0:65536", "--listen: '0.0.0.0:65536' is not host:port."),
    ],
)
def test_a_setting_that_no_coordinator_accepts_is_named_before_the_start(
    name: str, price: int, listen: str, said: str
) -> None:
    with pytest.raises(ConfigInvalid) as caught:
        check_settings(name, price, listen, "")
    assert caught.value.message.startswith(said)


def test_more_addresses_than_a_node_may_register_are_refused() -> None:
    with pytest.raises(ConfigInvalid, match="at most 8 addresses"):
        check_settings("-", 0, "", ",".join(f"203.0.113.{last}:8703" for last in range(9)))


@pytest.mark.parametrize("name", ["n" * 40, "rig@team"])
def test_a_setting_at_the_limit_is_accepted(name: str) -> None:
    check_settings(name, 10**12, "[::]:0", "203.0.113.7:8703")


@pytest.mark.parametrize("advertise", ["", "gpu.example.org:8703", "203.0.113.7:8703,[2001:db8::7]:8703", "0.0.0.0:9"])
def test_an_address_that_may_be_dialled_is_advertised(advertise: str) -> None:
    check_settings("-", 0, "", advertise)


@pytest.mark.trio
async def test_the_listening_port_can_be_dialled_from() -> None:
    """Hole punching needs it: the caller's port is the one on which others reach it."""
    async with open_host(key(1), EVERYWHERE, 0) as host, node(2) as other:
        port = host_and_port(host.addresses[0])[1]
        with socket.socket() as caller:
            caller.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            caller.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            caller.bind(("0.0.0.0", port))
            caller.connect(host_and_port(other.addresses[0]))
            assert caller.getsockname()[1] == port
