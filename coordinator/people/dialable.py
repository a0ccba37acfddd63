"""Where a node can be dialled, by what it says and by where it called from.

- A socket that listens on every address does not know which of them others see; the coordinator has just seen one.
- A loopback address is of use to nodes on that machine alone: it counts where coordinator and node share one.
- An address of a private network is of use to nodes in that network: it is left out where its node calls from the
  internet, since no other node dials such an address in a round on the internet.
- What nobody can dial, such as port 0 or a multicast address, is rejected: only a faulty or hostile node names it.
- Behind a proxy nobody knows where a node called from, and what it says of itself has to do.
"""

from collections.abc import Sequence

from protocol.breach import different
from protocol.errors import MalformedMessage
from protocol.places import IP, host_and_port, ip_of, is_loopback_name, why_undialable


def dialable(addresses: Sequence[str], caller: str) -> list[str]:
    """Return those that others may try, as `host:port`; empty `caller`: unknown."""
    for address in addresses:
        if why := why_undialable(address):
            raise MalformedMessage(
                f"The address {address!r} cannot be dialled: {why}.",
                hint="Advertise a host:port that other nodes can reach, or none.",
                breach=different("addresses", "addresses that can be dialled", address),
            )
    found = dict.fromkeys(_seen(address, caller) for address in addresses)
    return [address for address in found if address]


def _seen(address: str, caller: str) -> str:
    host, port = host_and_port(address)
    said, seen = _ip(host), _ip(caller)
    if said is None:
        is_local = is_loopback_name(host)
    elif said.is_unspecified:
        return _at_caller(seen, port)
    else:
        is_local = said.is_loopback
    if is_local:
        return address if seen is None or seen.is_loopback else ""
    is_elsewhere = said is not None and seen is not None and seen.is_global and not said.is_global
    return "" if is_elsewhere else address


def _at_caller(seen: IP | None, port: int) -> str:
    """Return the caller's own address with this port; empty if it is unknown, or none that can be dialled."""
    if seen is None or seen.is_unspecified:
        return ""
    address = f"[{seen}]:{port}" if seen.version == 6 else f"{seen}:{port}"
    return "" if why_undialable(address) else address


def _ip(host: str) -> IP | None:
    """Return the IPv4 address, where one was dressed as IPv6; None of a name."""
    try:
        return ip_of(host)
    except ValueError:
        return None
