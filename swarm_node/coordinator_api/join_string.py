"""The join string: the address of a coordinator, and the fingerprint of its round's root.

Resolution of host names, and the rule that untrusted addresses may lead to the internet only.

- A socket for both families shows an IPv4 caller as an IPv6 address, `::ffff:a.b.c.d`: the IPv4 address counts.
- Plans and lists of origins come from a coordinator that the owner chose, but contain addresses that anybody
  registered.
- A coordinator in this machine's own network may also name addresses in that network: so a swarm in a home works.
"""

import re
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import SplitResult, urlsplit

import trio

from protocol.errors import ConfigInvalid
from protocol.people.addresses import ip_of


@dataclass(frozen=True)
class JoinString:
    """Parsed join string, `http://host:port#<64 hex digits>`."""

    url: str
    round_id: str

    def __str__(self) -> str:
        return f"{self.url}#{self.round_id}"


TRUST_FILE, POLICIES, SEEN_LOG = "trust.msgpack", "policies", "ledger"
"""Names in the folder of a round."""

ROUNDS = "rounds"
"""Folder in a node's home with one folder for each round."""


_LABEL = re.compile(r"(?!-)\S{1,63}(?<!-)")

SHOWN_CHARS = 120
"""The longest text that is repeated as it was typed."""


def round_folder(home: Path, join: JoinString) -> Path:
    """Return the folder of a round in a node's home."""
    return home / ROUNDS / join.round_id[:16]


def was_trusted(home: Path, join: JoinString) -> bool:
    """Return True if a node in `home` has trusted this round before: what is wrong now may pass, and it waits."""
    return (round_folder(home, join) / TRUST_FILE).exists()


def parse(text: str) -> JoinString:
    try:
        parts = urlsplit(text.strip())
    except ValueError:  # brackets without an IPv6 address
        parts = urlsplit("")
    if "://" in text and parts.scheme not in ("", "http", "https"):
        raise ConfigInvalid(
            f"A join string begins with http:// or https://, not with {parts.scheme[:20]}://.",
            hint="A join string has the form http://host:port#fingerprint.",
        )
    if parts.scheme not in ("http", "https") or not parts.netloc:
        raise ConfigInvalid(
            f"{text if len(text) <= SHOWN_CHARS else text[: SHOWN_CHARS - 1] + '…'!r} is not a join string.",
            hint="A join string has the form http://host:port#fingerprint.",
        )
    if not _is_place(parts):
        raise ConfigInvalid(
            f"{parts.netloc[:SHOWN_CHARS]!r} in this join string is no valid host and port.",
            hint="A join string has the form http://host:port#fingerprint, with a port from 1 to 65535.",
        )
    if not re.fullmatch(r"[0-9a-f]{64}", parts.fragment):
        length = len(parts.fragment)
        found = "other characters there" if length == 64 else f"{length} characters there" if length else "none"
        raise ConfigInvalid(
            f"After the # of a join string are 64 digits (0-9, a-f), its root fingerprint. This one has {found}.",
            hint="Copy the whole join string; the node verifies the coordinator by its fingerprint.",
        )
    return JoinString(f"{parts.scheme}://{parts.netloc}{parts.path.rstrip('/')}", parts.fragment)


def _is_place(parts: SplitResult) -> bool:
    """Return True if a URL has a host that can be resolved, and a port that exists, or none."""
    try:
        host, port = parts.hostname or "", parts.port
    except ValueError:
        return False
    is_host = ":" in host or all(_LABEL.fullmatch(label) for label in host.removesuffix(".").split("."))
    return is_host and port != 0


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
