"""Which callers share one share: those of a neighbourhood; and who needs none, as this machine itself."""

from aiohttp import web

from coordinator.api.bounds import BOUNDS
from protocol.places import neighbourhood

HERE = ""
"""The place of what comes from this machine: the operator's own, or a proxy's, which speaks for many."""


def place(address: str | None, own_addresses: tuple[str, ...]) -> str:
    """Where a caller comes from; an address of this machine begins as one of `own_addresses`."""
    address = address or "unknown"
    return HERE if address.startswith(own_addresses) else neighbourhood(address)


def caller(request: web.Request) -> str:
    """The address that a request comes from: of a proxy on this machine, the one that it names."""
    address = request.remote or ""
    named = request.headers.get("X-Forwarded-For", "").rpartition(",")[2].strip()
    return named if named and address.startswith(request.app[BOUNDS].own_addresses) else address
