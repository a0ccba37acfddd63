"""Addresses of programs, and where a caller comes from.

- An address is `host:port`; whoever takes one apart does it here. An IPv6 host stands in brackets, which it leaves.
- Shares belong to neighbourhoods, of which a stranger pays for each, not to addresses.
"""

import ipaddress

from protocol.errors import ConfigInvalid

IP = ipaddress.IPv4Address | ipaddress.IPv6Address

PORT_MAX = 2**16 - 1


def host_and_port(address: str) -> tuple[str, int]:
    """The parts of `host:port`."""
    host, _, port = address.rpartition(":")
    bare = host[1:-1] if host.startswith("[") and host.endswith("]") else host
    is_port = port.isascii() and port.isdigit() and int(port) <= PORT_MAX
    if not (bare and is_port) or set(bare) & set("[]") or (":" in bare) != (bare != host):
        raise ConfigInvalid(
            f"{address!r} is not host:port.", hint="For example 0.0.0.0:8701, or [::]:8701 for IPv6; port 0 takes any."
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
