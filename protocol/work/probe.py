"""Messages with which a machine measures its own network connection before it joins a round.

- `/v1/probe/upload` receives bytes, discards them and returns their number: the sender measures its uplink.
- `/v1/probe/dial` makes the coordinator dial the address that the request came from, and no other, at a port; the
  listener must send the `word` of the request. So a machine can test only its own listener, and cannot scan others.
"""

from pydantic import Field

from protocol import limits
from protocol.ids import Hex32
from protocol.wire.message import Message

DIAL_S = 3.0
"""Seconds that a dial without an answer takes; a refused dial is reported no sooner, so its speed reveals nothing."""


class Uploaded(Message):
    """The number of bytes that arrived."""

    size_bytes: int = Field(ge=0, le=limits.PROBE_MAX_BYTES)


class Dial(Message):
    """A request to dial the sender at a port."""

    port: int = Field(ge=1, le=65535)
    word: Hex32


class Dialled(Message):
    """The result of a dial."""

    reached: bool
    proxied: bool
    """True if the request came through a proxy, so that there was no address to dial."""
