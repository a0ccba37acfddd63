"""Failed requests of the learner and the auditor to the coordinator: they wait and ask again, or end.

- The coordinator is away if it does not answer, or cannot now: HTTP 5xx, from it or from a proxy in front of it.
- A refusal would be the same the next time: it has its own error.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import httpx

from protocol.errors import ConfigInvalid, SwarmError, Unreachable
from protocol.wire import canonical

BUSY = {408, 425, 429}
"""Status codes that some proxies send in place of 5xx."""


@contextmanager
def named() -> Iterator[None]:
    """Raise an error of ours for a request that fails within the block."""
    try:
        yield
    except (httpx.UnsupportedProtocol, httpx.LocalProtocolError) as error:
        raise ConfigInvalid(
            "The request to the coordinator is not valid.",
            hint="The address must begin with http:// or https://, and the operator's token must be one line.",
        ) from error
    except httpx.HTTPError as error:
        raise Unreachable(f"The coordinator does not answer ({str(error) or type(error).__name__}).") from error


def refusal(status: int, said: bytes) -> SwarmError:
    """Return the error of an answer: the one that it names, or `Unreachable` if a later request may succeed."""
    try:
        error = SwarmError.from_wire(canonical.decode(said))
    except SwarmError:  # from a proxy or another server
        error = ConfigInvalid(f"The answer is HTTP {status}, and not from a coordinator.")
    if status >= 500 or status in BUSY:
        return Unreachable(f"The coordinator cannot answer now: {error}")
    return error
