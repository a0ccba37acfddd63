"""What the coordinator's own clients, learner and auditor, make of an answer that is none: wait and ask again, or end.

- Away is who does not answer, and who cannot now: HTTP 5xx, from the coordinator or from a proxy before it.
- A refusal would be the same the next time: it has its own name.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import httpx

from protocol.errors import ConfigInvalid, SwarmError, Unreachable
from protocol.wire import canonical

BUSY = {408, 425, 429}
"""What some proxies say in place of 5xx."""

_PAUSES_S = (0.5, 1.0, 2.0, 5.0, 10.0)


def pause_s(failures: int) -> float:
    """How long to wait while the coordinator is away, after so many attempts before this one."""
    return _PAUSES_S[min(failures, len(_PAUSES_S) - 1)]


@contextmanager
def named() -> Iterator[None]:
    """What goes wrong with a request within the block, by its name."""
    try:
        yield
    except (httpx.UnsupportedProtocol, httpx.LocalProtocolError) as error:
        raise ConfigInvalid(
            "The coordinator cannot be asked like this.",
            hint="Its address begins with http:// or https://; the operator's token is one line.",
        ) from error
    except httpx.HTTPError as error:
        raise Unreachable(f"The coordinator does not answer ({str(error) or type(error).__name__}).") from error


def refusal(status: int, said: bytes) -> SwarmError:
    """What was answered in place of what was asked for: by its name, or `Unreachable` if it need not stay so."""
    try:
        error = SwarmError.from_wire(canonical.decode(said))
    except SwarmError:  # of a proxy, or of somebody else altogether
        error = ConfigInvalid(f"The answer is HTTP {status}, in words that are no coordinator's.")
    if status >= 500 or status in BUSY:
        return Unreachable(f"The coordinator cannot answer now: {error}")
    return error
