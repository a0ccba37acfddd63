"""Resolution of host names, and the rule that untrusted addresses may lead to the internet only.

- A socket for both families shows an IPv4 caller as an IPv6 address, `::ffff:a.b.c.d`: the IPv4 address counts.
- Plans and lists of origins come from a coordinator that the owner chose, but contain addresses that anybody
  registered.
- A coordinator in this machine's own network may also name addresses in that network: so a swarm in a home works.
"""

import trio

from protocol.people.addresses import ip_of


async def resolve(host: str) -> list[str]:
    """Return the addresses of a host name; empty if it is unknown."""
    try:
        entries = await trio.socket.getaddrinfo(host, None, type=trio.socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return []
    return [str(entry[4][0]) for entry in entries]


def is_public(address: str) -> bool:
    """Return True if an address belongs to the internet rather than to a home, a machine or a test."""
    ip = ip_of(address)
    return ip.is_global and not ip.is_multicast


async def allowed(host: str, *, own_network: bool) -> list[str]:
    """Return the addresses of a host name that may be dialled."""
    return [address for address in await resolve(host) if own_network or is_public(address)]


async def is_in_own_network(host: str) -> bool:
    """Return True if all addresses of a host name are in this machine's own network."""
    addresses = await resolve(host)
    return bool(addresses) and not any(map(is_public, addresses))
