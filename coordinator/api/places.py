"""Which callers share one share: those of a neighbourhood; and who needs none, as this machine itself."""

from protocol.places import neighbourhood

OWN = ("127.", "::1", "::ffff:127.")
"""How the addresses of this machine begin."""

HERE = ""
"""The place of what comes from this machine: the operator's own, or a proxy's, which speaks for many."""


def place(address: str | None) -> str:
    """Where a caller comes from."""
    return HERE if is_own(address or "") else neighbourhood(address or "unknown")


def is_own(address: str) -> bool:
    return address.startswith(OWN)
