"""Which callers share one share: those of a neighbourhood; and who needs none, as this machine itself."""

from aiohttp import web

from protocol.places import neighbourhood

OWN = ("127.", "::1", "::ffff:127.")
"""How the addresses of this machine begin."""

HERE = ""
"""The place of what comes from this machine: the operator's own, or a proxy's, which speaks for many."""


def place(address: str | None) -> str:
    """Where a caller comes from."""
    return HERE if is_own(address or "") else neighbourhood(address or "unknown")


def caller(request: web.Request) -> str:
    """The address that a request comes from: of a proxy on this machine, the one that it names."""
    address = request.remote or ""
    named = request.headers.get("X-Forwarded-For", "").rpartition(",")[2].strip() if is_own(address) else ""
    return named or address


def is_own(address: str) -> bool:
    return address.startswith(OWN)
