"""Where a node can be dialled, by what it says and by where it called from.

- A socket that listens on every address does not know which of them others see; the coordinator has just seen one.
- A loopback address is of use to nodes on that machine alone: it counts where coordinator and node share one.
- Behind a proxy nobody knows where a node called from, and what it says of itself has to do.
"""

import ipaddress
from collections.abc import Sequence


def dialable(addresses: Sequence[str], caller: str) -> list[str]:
    """Those that others may try, as `host:port`; empty `caller`: unknown."""
    found = dict.fromkeys(_seen(address, caller) for address in addresses)
    return [address for address in found if address]


def _seen(address: str, caller: str) -> str:
    host, _, port = address.rpartition(":")
    said, seen = _ip(host.strip("[]")), _ip(caller)
    if said is None or not (said.is_unspecified or said.is_loopback):
        return address
    if said.is_loopback:
        return address if seen is None or seen.is_loopback else ""
    return "" if seen is None else f"[{seen}]:{port}" if seen.version == 6 else f"{seen}:{port}"


def _ip(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """The IPv4 address, where one was dressed as IPv6; None of a name."""
    try:
        found = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return None
    return (found.ipv4_mapped or found) if isinstance(found, ipaddress.IPv6Address) else found
