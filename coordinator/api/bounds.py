"""The bounds on the callers of one server, each with its reason; tests pass others.

What a message may hold is in `protocol.limits`. The operator sets how many connections and streams an address may have.
"""

import resource
import sys
from dataclasses import dataclass, field

from aiohttp import web

from protocol.limits import KIB, MIB

FILES_KEPT = 128
"""For the store, chunks on their way out, and the pipes of children."""


def connections_max() -> int:
    """Return how many connections this process has files for."""
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return max(files - FILES_KEPT, files // 2) if files != resource.RLIM_INFINITY else sys.maxsize


@dataclass(frozen=True)
class Bounds:
    """Bounds on the time, connections and memory of callers."""

    own_addresses: tuple[str, ...] = ("127.", "::1", "::ffff:127.")
    """Beginnings of the addresses of this machine."""
    look_s: float = 2.0
    """Seconds between two checks of all connections."""
    connections: int = field(default_factory=connections_max)
    handshake_s: float = 10.0
    """For TLS, from the connection to its first request: two round trips, sent again a few times on a bad line."""
    head_s: float = 10.0
    """For the head of a request: one packet, sent again a few times on a bad line."""
    idle_s: float = 75.0
    """Between two requests of a connection: longer than proxies keep theirs."""
    grace_s: float = 30.0
    bytes_per_s: float = 8 * KIB
    """A body may take the grace and the time that its size needs at this rate: a tenth of the slowest lines at homes.
    An answer that waits to be read may do so, too."""
    unread_bytes: int = 256 * MIB
    """Answers that wait: a few times the largest files of the ledger and the board, for as many slow readers."""
    bodies_bytes: int = 256 * MIB
    """Thirty of the largest at once. A body is there twice while its pieces are put together."""
    listeners: int = 1000
    """Open streams; each costs a socket and a few kilobytes. Who comes then is told to ask again by itself."""


BOUNDS = web.AppKey("bounds", Bounds)
