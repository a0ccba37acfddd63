"""The default gateway: the only machine that is asked to forward a port, and whose replies are accepted.

- Linux has it in its routing table, macOS prints it (`route -n get default`). IPv4 only: IPv6 has no NAT.
- Behind a VPN no router is asked: it would reveal the home's address, which the owner hides.
- A machine with a public address needs no mapping, and its gateway belongs to a provider: it is not asked.
"""

import re
import socket
import struct
import sys
from ipaddress import IPv4Address
from pathlib import Path
from subprocess import DEVNULL
from typing import NamedTuple

import trio

ROUTES = Path("/proc/thread-self/net/route")
ROUTE_COMMAND = ("/sbin/route", "-n", "get", "default")

INTERNET = "192.0.2.1"
"""A documentation address (RFC 5737): the kernel reports the route to it, and nothing is sent there."""

ROUTE_S = 5.0
"""Time-out of a command that reads a table of the kernel."""

UP, VIA_GATEWAY = 0x1, 0x2
"""Flags of a route in Linux."""


class NoMapping(Exception):
    """Reason why a router forwards no port; the text is for the node's owner."""


class Gateway(NamedTuple):
    """A router, and this machine as the router sees it."""

    address: str
    own_address: str


async def find_gateway() -> Gateway:
    """Return the default gateway of this machine."""
    if sys.platform == "darwin":
        address = gateway_from_command(await _route_command())
    else:
        address = gateway_from_routes(_kernel_routes())
    own_address = _address_towards(address)
    if _address_towards(INTERNET) != own_address:
        raise NoMapping(f"the way to the internet does not lead over the gateway {address}, as with a VPN")
    return Gateway(address, own_address)


def _address_towards(address: str) -> str:
    """Return this machine's source address for connections to `address`."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((address, 9))  # on a datagram socket this sends nothing
        except OSError as error:
            raise NoMapping(f"there is no way to {address}: {error.strerror}") from None
        own_address: str = probe.getsockname()[0]
        return own_address


def gateway_from_routes(table: str) -> str:
    """Return the gateway of the default route with the lowest metric, from Linux's table."""
    routes: list[tuple[int, str]] = []
    for line in table.splitlines()[1:]:
        fields = line.split()
        if len(fields) < 8 or fields[1] != "00000000" or fields[7] != "00000000":
            continue
        flags, metric = int(fields[3], 16), int(fields[6])
        if flags & UP and flags & VIA_GATEWAY:
            routes.append((metric, str(IPv4Address(struct.pack("=I", int(fields[2], 16))))))
    if not routes:
        raise NoMapping("this machine has no default gateway")
    return min(routes)[1]


def gateway_from_command(output: str) -> str:
    """Return the gateway that macOS's `route` names."""
    match = re.search(r"^\s*gateway: (\d+\.\d+\.\d+\.\d+)$", output, re.MULTILINE)
    if match is None:
        raise NoMapping("this machine has no default gateway")
    return str(IPv4Address(match[1]))


def _kernel_routes() -> str:
    """Return Linux's table, which the kernel makes in memory; empty where there is none."""
    return ROUTES.read_text() if ROUTES.exists() else ""


async def _route_command() -> str:
    with trio.move_on_after(ROUTE_S):
        done = await trio.run_process(ROUTE_COMMAND, capture_stdout=True, stderr=DEVNULL, check=False)
        return done.stdout.decode(errors="replace")
    return ""
