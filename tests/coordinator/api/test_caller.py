"""The address of a caller: what a node writes about itself is worth nothing, and what a trusted proxy writes is."""

import logging
from ipaddress import ip_network

import pytest
from aiohttp import web
from aiohttp.test_utils import make_mocked_request
from multidict import CIMultiDict

from coordinator.api import caller
from coordinator.api.caller import HERE, THIS_MACHINE
from coordinator.config import load
from protocol.errors import ConfigInvalid

PROXY = "10.0.0.5"
PROXIES = (*THIS_MACHINE, ip_network("10.0.0.0/24"), ip_network("2001:db8:ffff::5"))
FOR = "X-Forwarded-For"


def request(remote: str, *headers: tuple[str, str], app: web.Application | None = None) -> web.Request:
    if app is None:
        app = web.Application()
        caller.serve(app, PROXIES)
    made = make_mocked_request("POST", "/v1/leases", headers=CIMultiDict(headers), app=app)
    return made.clone(remote=remote)


@pytest.mark.parametrize("invented", ["127.0.0.1", PROXY, "192.0.2.77", "nonsense", ""])
def test_a_node_that_writes_x_forwarded_for_itself_stays_the_neighbour_that_it_is(invented: str) -> None:
    """Else each request would have a fresh share of trials, streams and memory, or none at all to bound it."""
    said = request("203.0.113.9", (FOR, invented), ("Via", "1.1 me"), ("Forwarded", "for=192.0.2.7"))
    assert caller.place_of(said) == "203.0.113.9"


@pytest.mark.parametrize("remote", [PROXY, "127.0.0.1", "::1", "::ffff:127.0.0.1", "2001:db8:ffff::5"])
def test_a_trusted_proxy_names_its_caller_last(remote: str) -> None:
    assert caller.place_of(request(remote, (FOR, "198.51.100.4"))) == "198.51.100.4"
    assert caller.place_of(request(remote, (FOR, "6.6.6.6, 198.51.100.4"))) == "198.51.100.4"


def test_a_header_line_that_the_client_wrote_before_the_proxys_own_is_ignored() -> None:
    """HAProxy appends a line of its own, and leaves the client's where it was."""
    assert caller.place_of(request(PROXY, (FOR, "6.6.6.6"), (FOR, "198.51.100.4"))) == "198.51.100.4"


def test_a_chain_of_trusted_proxies_leads_to_the_first_address_that_is_not_one() -> None:
    assert caller.place_of(request("127.0.0.1", (FOR, f"6.6.6.6, 198.51.100.4, {PROXY}"))) == "198.51.100.4"


def test_a_client_that_claims_to_be_behind_a_trusted_address_gains_nothing() -> None:
    assert caller.place_of(request(PROXY, (FOR, f"6.6.6.6, {PROXY}, 198.51.100.4"))) == "198.51.100.4"


@pytest.mark.parametrize(
    ("word", "place"),
    [
        ("198.51.100.4:5123", "198.51.100.4"),
        ("[2001:db8::4]:5123", "2001:db8::/56"),
        ("[2001:db8::4]", "2001:db8::/56"),
        ("2001:db8::4", "2001:db8::/56"),
        ("::ffff:198.51.100.4", "198.51.100.4"),
    ],
)
def test_addresses_are_read_as_proxies_write_them(word: str, place: str) -> None:
    assert caller.place_of(request(PROXY, (FOR, word))) == place


@pytest.mark.parametrize("headers", [(), ((FOR, ""),), ((FOR, "unknown"),), ((FOR, "6.6.6.6, unknown"),)])
def test_a_trusted_address_that_names_nobody_stands_for_many(headers: tuple[tuple[str, str], ...]) -> None:
    assert caller.place_of(request(PROXY, *headers)) == HERE


def test_others_are_sent_to_a_caller_only_where_it_can_be_reached() -> None:
    assert caller.known_caller(request(PROXY, (FOR, "198.51.100.4"))) == "198.51.100.4"
    assert caller.known_caller(request("198.51.100.4")) == "198.51.100.4"
    assert caller.known_caller(request(PROXY, ("Via", "1.1 proxy"))) == "", "the proxy's address is not the node's"
    assert caller.known_caller(request("198.51.100.200", (FOR, "192.0.2.1"))) == "", "an unlisted proxy, or a liar"


def test_a_proxy_that_is_missing_in_the_settings_is_logged_and_not_for_every_request(
    caplog: pytest.LogCaptureFixture,
) -> None:
    app = web.Application()
    caller.serve(app, PROXIES)
    with caplog.at_level(logging.WARNING):
        for number in range(9):
            for _ in range(2):
                caller.caller(request(f"192.0.2.{number}", (FOR, "198.51.100.4"), app=app))
        caller.caller(request("198.51.100.9", app=app))
    assert [record.args for record in caplog.records] == [(f"192.0.2.{number}",) for number in range(3)]
    assert "round.trusted_proxies" in caplog.records[0].getMessage()


def test_settings_name_networks_and_refuse_what_is_none() -> None:
    config = load(None, ['round.trusted_proxies=["10.0.0.5", "2001:db8::/32"]'])
    assert config.round.proxies == (ip_network("10.0.0.5"), ip_network("2001:db8::/32"))
    with pytest.raises(ConfigInvalid, match=r"10\.0\.0\.0/24"):
        load(None, ['round.trusted_proxies=["10.0.0.7/24"]'])
    with pytest.raises(ConfigInvalid, match="trusted_proxies"):
        load(None, ['round.trusted_proxies=["proxy.example.org"]'])
