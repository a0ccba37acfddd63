"""Listening for other nodes: the default address, and the addresses at which this node can be dialled.

- If the coordinator is on another machine, so are the other nodes: every interface, IPv4 and IPv6. If the coordinator
  has a loopback address, all nodes are on this machine: loopback, and any free port.
- The port is the first free one of `PORTS`, so that one firewall rule covers several nodes of a machine. If all are
  taken it is any other: a node that cannot be dialled is better than none.
- libp2p shares its port with other sockets that allow it (SO_REUSEPORT), so a port may only seem free. A node therefore
  also binds the UDP port of the same number on loopback, exclusively, as long as it runs.
- Addresses that the owner sets replace the listening addresses; the router's address is added in both cases.
- The coordinator reports whether others can connect (`FetchPlan.dialled`), from the receipts of nodes that tried.
"""

import ipaddress
import socket
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import NamedTuple
from urllib.parse import urlsplit

import trio

from protocol import limits
from protocol.people.addresses import host_and_port, ip_of
from swarm_node.coordinator_api.join_string import resolve

CAN, CANNOT = (
    "others can connect to you",
    "others cannot connect to you, so your node connects to them",
)


@dataclass
class Reachability:
    """Reachability of one node."""

    shares: bool
    """True if the node listens for others."""
    own: tuple[str, ...] = ()
    """The listening addresses, or those that the owner advertises."""
    mapped: str = ""
    """The router's address that is forwarded to this node; empty if there is none."""
    mapping: str = ""
    """Result of the attempt to map the port, in one sentence."""

    @property
    def addresses(self) -> tuple[str, ...]:
        """The dialable addresses that the node registers."""
        addresses = dict.fromkeys((*self.own, *filter(None, [self.mapped])))
        return tuple(addresses)[: limits.ADDRESSES_MAX] if self.shares else ()

    def describe(self, dialled: bool | None) -> str:
        """Return one sentence on whether others can connect; `dialled` is the coordinator's report, None if unknown."""
        if not self.shares:
            return "incoming connections are off (--no-share); your node connects to others"
        if dialled is None:
            return "not known yet whether others can connect to you"
        return CAN if dialled else CANNOT


PORTS = range(8703, 8711)
"""Not assigned by IANA, below the ephemeral ranges of Linux (from 32768), Windows and macOS (from 49152), and after the
ports of a coordinator on the same machine (8700 to 8702). Eight: one for each card of a large machine."""

RESOLVE_S = 5.0
"""Time-out of resolving the coordinator's name; a name not resolved by then is not this machine's."""

BOTH_FAMILIES, IPV4_ONLY = "::", "0.0.0.0"


class ListenAddress(NamedTuple):
    """An address to listen on."""

    host: str
    port: int

    @property
    def is_loopback(self) -> bool:
        try:
            return ip_of(self.host).is_loopback
        except ValueError:
            return self.host == "localhost"


@asynccontextmanager
async def open_place(listen: str, coordinator_url: str) -> AsyncIterator[ListenAddress]:
    """Choose the address, and hold its port against other nodes of this machine."""
    if listen:
        yield ListenAddress(*host_and_port(listen))
    elif await is_on_this_machine(coordinator_url):
        yield ListenAddress("127.0.0.1", 0)
    else:
        host = BOTH_FAMILIES if has_both_families() else IPV4_ONLY
        with claimed_port(host) as port:
            yield ListenAddress(host, port)


async def is_on_this_machine(url: str) -> bool:
    """Return True if the host of a URL has only loopback addresses."""
    addresses: list[str] = []
    with trio.move_on_after(RESOLVE_S):
        addresses = await resolve(urlsplit(url).hostname or "")
    return bool(addresses) and all(ip_of(address).is_loopback for address in addresses)


@contextmanager
def claimed_port(host: str, ports: Sequence[int] = PORTS) -> Iterator[int]:
    """Hold the first free one of these ports; yield 0, which means any port, if all are taken."""
    for port in ports:
        claim = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        with claim:
            if _binds(claim, "127.0.0.1", port) and _is_free(host, port):
                yield port
                return
    yield 0


def has_both_families() -> bool:
    """Return True if this machine can open an IPv6 socket that also accepts IPv4 connections."""
    if not socket.has_ipv6:
        return False
    try:
        with socket.socket(socket.AF_INET6, socket.SOCK_STREAM) as probe:
            probe.bind((BOTH_FAMILIES, 0))
            return not probe.getsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY)
    except OSError:  # IPv6 is switched off
        return False


def describe(addresses: tuple[str, ...], *, connections: int, per_address: int, upload_cap_gb: float) -> str:
    """Return one line with the listening address, its limits, and how to turn it off."""
    host, port = host_and_port(addresses[0])
    ip = ipaddress.ip_address(host)
    if ip.is_loopback:
        where = f"only if they run on this machine, port {port}"
    elif ip.is_unspecified:
        where = f"on all interfaces, {'IPv4 and IPv6' if ip.version == 6 else 'IPv4'}, TCP port {port}"
    else:
        where = f"on {host}, TCP port {port}"
    cap = f"{upload_cap_gb:g} GB of upload a month" if upload_cap_gb else "no upload cap (--upload-gb sets one)"
    return (
        f"Other nodes can fetch chunks {where}: at most {connections} connections, {per_address} from one address, "
        f"{cap}. --no-share turns this off."
    )


NOTHING_LISTENS = "This node opens no port and publishes no address (--no-share)."


def _is_free(host: str, port: int) -> bool:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        return _binds(probe, host, port)


def _binds(sock: socket.socket, host: str, port: int) -> bool:
    try:
        sock.bind((host, port))
    except OSError:
        return False
    return True
