"""What names stand for, and where a stranger's word may send us: to the internet, not into our own network.

- A socket for both families shows an IPv4 caller as an IPv6 address, `::ffff:a.b.c.d`: it is the IPv4 one that counts.
- Plans and lists of origins come from a coordinator that the owner chose, but name addresses that anybody registered.
- A coordinator in this machine's own network may name addresses there, too: so a swarm in one house works.
"""

import trio

from protocol.people.addresses import ip_of


async def resolve(host: str) -> list[str]:
    """What a name stands for; an unknown one stands for nothing."""
    try:
        found = await trio.socket.getaddrinfo(host, None, type=trio.socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return []
    return [str(entry[4][0]) for entry in found]


def is_public(address: str) -> bool:
    """Whether an address belongs to the internet rather than to a home, a machine or a test."""
    ip = ip_of(address)
    return ip.is_global and not ip.is_multicast


async def allowed(host: str, *, own_network: bool) -> list[str]:
    """Those of a name's addresses that may be connected to."""
    return [address for address in await resolve(host) if own_network or is_public(address)]


async def is_in_own_network(host: str) -> bool:
    """Whether a name leads into this machine's own network and nowhere else."""
    found = await resolve(host)
    return bool(found) and not any(map(is_public, found))
