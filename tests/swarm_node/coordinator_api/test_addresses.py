"""Addresses taken apart: where to listen, and who a socket says is calling."""

import socket
from contextlib import suppress

import pytest
import trio

from protocol.errors import ConfigInvalid
from protocol.people.addresses import host_and_port, neighbourhood
from swarm_node.p2p.host import open_host
from swarm_node.p2p.link import Link
from tests.swarm_node.p2p_world import PATIENT_SECONDS, as_peer, key, node


@pytest.mark.parametrize(
    ("address", "parts"),
    [
        ("0.0.0.0:8701", ("0.0.0.0", 8701)),
        ("localhost:0", ("localhost", 0)),
        ("[::]:8701", ("::", 8701)),
        ("[fe80::1%eth0]:65535", ("fe80::1%eth0", 65535)),
        ("node.example.org:1", ("node.example.org", 1)),
    ],
)
def test_an_address_has_a_host_and_a_port(address: str, parts: tuple[str, int]) -> None:
    assert host_and_port(address) == parts


@pytest.mark.parametrize(
    "address",
    [
        *("", ":", "8701", ":8701", "[]:8701", "::1", "::1:8701", "[::1:8701", "::1]:8701", "[::1]", "[::1]8701"),
        *("[localhost]:1", "[[::1]]:1", "a:b", "a:-1", "a:65536", "a: 1", "a:\u0661"),
    ],
)
def test_what_is_no_address_is_refused_with_an_example(address: str) -> None:
    with pytest.raises(ConfigInvalid, match=r"is not host:port.*\[::\]:8703"):
        host_and_port(address)


@pytest.mark.parametrize(
    ("address", "place"),
    [
        ("192.0.2.7", "192.0.2.7"),
        ("::ffff:192.0.2.7", "192.0.2.7"),
        ("::ffff:192.0.2.8%eth0", "192.0.2.8"),
        ("2001:db8::1", "2001:db8::/56"),
        ("2001:db8::1:2:3:4%eth0", "2001:db8::/56"),
    ],
)
def test_an_ipv4_caller_is_no_neighbour_of_all_others_where_both_families_share_a_socket(
    address: str, place: str
) -> None:
    assert neighbourhood(address) == place


def has_both_families() -> bool:
    with socket.socket(socket.AF_INET6) as listener, suppress(OSError):
        listener.bind(("::", 0))
        listener.listen()
        with socket.create_connection(("127.0.0.1", listener.getsockname()[1]), timeout=PATIENT_SECONDS):
            return True
    return False


@pytest.mark.trio
async def test_a_host_for_both_families_starts_and_knows_its_ipv4_callers_apart() -> None:
    if not has_both_families():
        pytest.skip("no socket takes both families here")  # what such a socket says is tested above, everywhere
    seen: list[str] = []

    async def look(link: Link) -> None:
        seen.append(link.neighbourhood)
        await link.close()

    host, port = host_and_port("[::]:0")
    async with open_host(key(1), host, port) as one, node(2) as two:
        one.serve(look)
        entry = as_peer(one).model_copy(update={"address": f"127.0.0.1:{host_and_port(one.addresses[0])[1]}"})
        with trio.fail_after(PATIENT_SECONDS):
            link = await two.connect(entry, dial_s=5.0)
            while not await link.receive():
                pass
    assert seen == ["127.0.0.1"]
