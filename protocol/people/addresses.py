"""Addresses of programs, and where a caller comes from.

- An address is `host:port`; whoever takes one apart does it here. An IPv6 host stands in brackets, which it leaves.
- Shares belong to neighbourhoods, of which a stranger pays for each, not to addresses.
"""

import ipaddress
import re

from protocol.errors import ConfigInvalid

IP = ipaddress.IPv4Address | ipaddress.IPv6Address

PORT_MAX = 2**16 - 1

HOST_NAME_MAX_CHARS = 253
"""As DNS has it."""

_LABEL = re.compile(r"[0-9A-Za-z]([0-9A-Za-z-]{0,61}[0-9A-Za-z])?")
_NUMBER = re.compile(r"[0-9]+|0[xX][0-9A-Fa-f]*")

LIMITED_BROADCAST = ipaddress.IPv4Address("255.255.255.255")
THIS_NETWORK = ipaddress.IPv4Network("0.0.0.0/8")


def host_and_port(address: str) -> tuple[str, int]:
    """The parts of `host:port`."""
    host, _, port = address.rpartition(":")
    bare = host[1:-1] if host.startswith("[") and host.endswith("]") else host
    is_port = port.isascii() and port.isdigit() and int(port) <= PORT_MAX
    if not (bare and is_port) or set(bare) & set("[]") or (":" in bare) != (bare != host):
        raise ConfigInvalid(
            f"{address!r} is not host:port.", hint="For example 0.0.0.0:8703, or [::]:8703 for IPv6; port 0 takes any."
        )
    return bare, int(port)


def ip_of(address: str) -> IP:
    """An address as a socket tells it, without the zone; the IPv4 one, where one was dressed as IPv6."""
    ip = ipaddress.ip_address(address.partition("%")[0])
    mapped = ip.ipv4_mapped if isinstance(ip, ipaddress.IPv6Address) else None
    return mapped or ip


def neighbourhood(address: str) -> str:
    """What one stranger has for the price of one address: an IPv6 network of 64 bits. What is no address is itself."""
    try:
        ip = ip_of(address)
    except ValueError:
        return address
    return str(ip) if ip.version == 4 else str(ipaddress.ip_network((ip, 64), strict=False))


def why_undialable(address: str) -> str:
    """Return why no node, wherever it is, can dial this `host:port`; empty if one may.

    The unspecified address passes: it stands for the address from which its node calls.
    """
    try:
        host, port = host_and_port(address)
    except ConfigInvalid:
        return "it is not host:port with a port from 1 to 65535"
    if port == 0:
        return "port 0 stands for any free port; name the port itself"
    try:
        ip = ip_of(host)
    except ValueError:
        return _why_no_host_name(host)
    if ip.is_multicast:
        return "a multicast address belongs to a group"
    if ip == LIMITED_BROADCAST:
        return "a broadcast address belongs to everybody in a network"
    if ip.is_unspecified or ip.is_loopback:
        return ""
    if ip.version == 4 and (ip in THIS_NETWORK or ip.is_reserved):
        return "the address is reserved"
    if ip.version == 6 and ip.is_link_local:
        return "a link-local address means something on its own link only"
    return ""


def is_loopback_name(host: str) -> bool:
    """Return True for `localhost` and the names below it, which mean the machine that resolves them (RFC 6761)."""
    return host.lower().rstrip(".").rpartition(".")[2] == "localhost"


def _why_no_host_name(host: str) -> str:
    labels = host.removesuffix(".").split(".")
    if len(host) > HOST_NAME_MAX_CHARS or not all(map(_LABEL.fullmatch, labels)):
        return "its host is neither an address nor a host name"
    if _NUMBER.fullmatch(labels[-1]):  # resolvers read 127.1, 2130706433 and 0x7f000001 as 127.0.0.1
        return "its host is a number; write the address out"
    return ""
