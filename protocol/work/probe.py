"""What a machine asks of a coordinator to know its own line, before it takes part.

- `/v1/probe/upload` takes bytes, throws them away and says how many: the line up is measured by the sender.
- `/v1/probe/dial` has the coordinator dial the address that the request came from, and no other, at a port; whoever
  listens there must say the word of the request. So it proves a listener to its owner, and scans for nobody.
"""

from pydantic import Field

from protocol import limits
from protocol.ids import Hex32
from protocol.wire.message import Message

DIAL_S = 3.0
"""As long as a dial takes where nobody answers; a refusal is told no sooner, and tells nothing by its speed."""


class Uploaded(Message):
    """What arrived."""

    size_bytes: int = Field(ge=0, le=limits.PROBE_MAX_BYTES)


class Dial(Message):
    """Dial me at this port."""

    port: int = Field(ge=1, le=65535)
    word: Hex32


class Dialled(Message):
    """What came of it."""

    reached: bool
    proxied: bool
    """The request came through a proxy: there was nobody to dial."""
