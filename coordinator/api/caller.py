"""The address of a request's client, also behind proxies.

1. `round.trusted_proxies` names the proxies on other machines; this machine is always trusted.
2. A connection from any other address is the client's own. Its `X-Forwarded-For` is ignored: a node could choose
   another address for each request, and so escape every limit per caller.
3. For a trusted connection, the client is the last address in `X-Forwarded-For` that is not trusted: each proxy appends
   the address that it sees, and whatever stands further left was written by the client.
4. A trusted connection that names nobody is the operator's own, or stands for many clients: no share limits it.
"""

import ipaddress
import logging
from functools import lru_cache

from aiohttp import web

from protocol.errors import ConfigInvalid
from protocol.people.addresses import IP, host_and_port, ip_of, neighbourhood

log = logging.getLogger(__name__)

Network = ipaddress.IPv4Network | ipaddress.IPv6Network
Networks = tuple[Network, ...]

THIS_MACHINE: Networks = (ipaddress.IPv4Network("127.0.0.0/8"), ipaddress.IPv6Network("::1/128"))

HERE = ""
"""The place of trusted connections that name nobody."""

PROXIES = web.AppKey("proxies", tuple[Network, ...])

SUSPECTS = web.AppKey("suspects", set[str])
SUSPECTS_MAX = 3
"""Addresses about which the log warns: enough for an operator's own proxies, and few for those who invent headers."""

FORWARDED_FOR = "X-Forwarded-For"
PROXY_HEADERS = ("Forwarded", FORWARDED_FOR, "Via")


def serve(app: web.Application, proxies: Networks) -> None:
    """Store in `app` which proxies are trusted."""
    app[PROXIES], app[SUSPECTS] = proxies, set()


def is_trusted(address: str, proxies: Networks) -> bool:
    """Return True if connections from `address` are this machine's, or a trusted proxy's."""
    ip = _ip(address)
    return ip is not None and any(ip in network for network in proxies)


def place(address: str | None, proxies: Networks) -> str:
    """Return the neighbourhood of `address`, or `HERE` if it is trusted."""
    address = address or "unknown"
    return HERE if is_trusted(address, proxies) else neighbourhood(address)


def caller(request: web.Request) -> str:
    """Return the address of a request's client; the connection's own address if no trusted proxy names another."""
    address, proxies = request.remote or "", request.app[PROXIES]
    if not is_trusted(address, proxies):
        _warn(request, address)
        return address
    for named in reversed(_named(request)):
        ip = _ip(named)
        if ip is None:
            break  # whoever stands further left was not named by a trusted proxy
        address = str(ip)
        if not is_trusted(address, proxies):
            break
    return address


def place_of(request: web.Request) -> str:
    """Return the neighbourhood of a request's client, or `HERE`."""
    return place(caller(request), request.app[PROXIES])


def known_caller(request: web.Request) -> str:
    """Return the address at which others may reach a request's client; "" if a proxy hides it."""
    address = caller(request)
    is_hidden = address == request.remote and any(name in request.headers for name in PROXY_HEADERS)
    return "" if is_hidden else address


def _named(request: web.Request) -> list[str]:
    """Return the addresses in all `X-Forwarded-For` headers: some proxies append a header, others a word."""
    words = ",".join(request.headers.getall(FORWARDED_FOR, ())).split(",")
    return [word.strip() for word in words if word.strip()]


@lru_cache(maxsize=4096)
def _ip(word: str) -> IP | None:
    """Return the IP address that a socket or a proxy names, with or without brackets and port; None for others."""
    try:
        return ip_of(word[1:-1] if word.startswith("[") and word.endswith("]") else word)
    except ValueError:
        pass
    try:
        return ip_of(host_and_port(word)[0])
    except (ValueError, ConfigInvalid):
        return None


def _warn(request: web.Request, address: str) -> None:
    """Log that a proxy may be missing in the settings: all its clients would count as one."""
    suspects = request.app[SUSPECTS]
    if FORWARDED_FOR not in request.headers or address in suspects or len(suspects) >= SUSPECTS_MAX:
        return
    suspects.add(address)
    log.warning(
        "%s sends X-Forwarded-For, which is ignored. If it is your proxy, add it to round.trusted_proxies: until then "
        "all its clients share the limits of one address.",
        address,
    )
