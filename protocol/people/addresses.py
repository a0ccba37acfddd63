"""Network addresses of programs, and the network that a caller comes from.

- An address is `host:port`; only this module splits one. An IPv6 host is written in brackets, which are removed.
- Limits per caller count neighbourhoods, each of which costs an attacker money, not single addresses.
"""

import ipaddress
import re

from protocol.errors import ConfigInvalid

IP = ipaddress.IPv4Address | ipaddress.IPv6Address

PORT_MAX = 2**16 - 1

HOST_NAME_MAX_CHARS = 253
"""The limit of DNS."""

PRIVATE_NAMES = (
    ".localhost", ".localdomain", ".local", ".lan", ".home", ".home.arpa", ".internal", ".intranet", ".corp",
    ".fritz.box", ".test",
)  # fmt: skip
"""Ends of names that are given to machines of one network."""

CARRIERS_OF_IPV4 = (ipaddress.IPv6Network("64:ff9b::/96"), ipaddress.IPv6Network("::/96"))
"""IPv6 networks whose addresses end with the IPv4 address that they lead to: NAT64, and the old compatible form."""

HOME_PREFIX_BITS = 56
"""The IPv6 network that providers give to a home (RIPE-690): 256 networks of 64 bits, each as cheap as an address. With
/48, which a few give, 256 homes of the others would count as one, and 65,536 phones, each of which has a /64."""

_LABEL = re.compile(r"[0-9A-Za-z]([0-9A-Za-z-]{0,61}[0-9A-Za-z])?")
_NUMBER = re.compile(r"[0-9]+|0[xX][0-9A-Fa-f]*")

LIMITED_BROADCAST = ipaddress.IPv4Address("255.255.255.255")
THIS_NETWORK = ipaddress.IPv4Network("0.0.0.0/8")


def host_and_port(address: str) -> tuple[str, int]:
    """Split `host:port` into host and port."""
    host, _, port = address.rpartition(":")
    bare = host[1:-1] if host.startswith("[") and host.endswith("]") else host
    is_port = port.isascii() and port.isdigit() and int(port) <= PORT_MAX
    if not (bare and is_port) or set(bare) & set("[]") or (":" in bare) != (bare != host):
        raise ConfigInvalid(
            f"{address!r} is not host:port.", hint="For example 0.0.0.0:8703, or [::]:8703 for IPv6; port 0 takes any."
        )
    return bare, int(port)


def ip_of(address: str) -> IP:
    """Parse the address that a socket reports, without its zone; an IPv4-mapped IPv6 address becomes IPv4."""
    ip = ipaddress.ip_address(address.partition("%")[0])
    mapped = ip.ipv4_mapped if isinstance(ip, ipaddress.IPv6Address) else None
    return mapped or ip


def neighbourhood(address: str) -> str:
    """Return the network that costs its user as much as one address: an IPv6 address's /56, else `address` itself."""
    try:
        ip = ip_of(address)
    except ValueError:
        return address
    return str(ip) if ip.version == 4 else str(ipaddress.ip_network((ip, HOME_PREFIX_BITS), strict=False))


def is_public_host(host: str) -> bool:
    """Return True for an address that anyone on the internet can call, and for a name that may lead to one.

    DNS is not asked: a name of the internet that leads to a private address counts as public.
    """
    name = host.lower().rstrip(".")
    try:
        ip = ip_of(name)
    except ValueError:
        is_number = _NUMBER.fullmatch(name.rpartition(".")[2])
        return "." in name and not is_number and not name.endswith(PRIVATE_NAMES)
    if ip.version == 6:
        carried = any(ip in network for network in CARRIERS_OF_IPV4)
        ip = (ipaddress.IPv4Address(int(ip) % 2**32) if carried else ip.sixtofour) or ip
    return ip.is_global and not ip.is_multicast


def leads_to_this_machine(host: str) -> bool:
    """Return True for a host that means another machine to everyone who calls it: loopback, or no address at all."""
    try:
        ip = ip_of(host)
    except ValueError:
        return is_loopback_name(host)
    return ip.is_loopback or ip.is_unspecified


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
