"""Hosts of URLs that an operator sets, in any form that a browser or a node would understand."""

from urllib.parse import urlsplit


def host_of_url(url: str) -> str:
    """Return the host of a URL, or of `host:port` without a scheme; empty if there is none."""
    try:
        return urlsplit(url if "//" in url else f"//{url}").hostname or ""
    except ValueError:  # brackets that are not closed
        return ""
