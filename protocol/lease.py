"""A lease: one group offered to one node, and the states it can be in.

- A lease ends in exactly one of `accepted`, `rejected`, `expired` or `returned`.
- Only `open` leases can be answered; the group of one that ended without acceptance is offered again.
- The price is locked when the lease is given out.
"""

from enum import StrEnum

from pydantic import Field

from protocol import limits
from protocol.ids import Hex32
from protocol.message import Message


class Lease(Message):
    """What a node is asked to do, and what it will be paid for it."""

    lease_id: Hex32
    version: int = Field(ge=1, le=limits.VERSION_MAX)
    seed: int = Field(ge=0, lt=2**63)
    samples: int = Field(ge=1, le=limits.SAMPLES_MAX)
    prompt: bytes = Field(min_length=4, max_length=4 * limits.TOKENS_MAX)
    """Token ids, 32-bit little-endian."""
    price_micros_per_mtok: int = Field(ge=0, le=limits.PRICE_MAX_MICROS_PER_MTOK)
    expires_ms: int


class State(StrEnum):
    """Where a lease stands."""

    OPEN = "open"
    ACCEPTED = "accepted"
    REJECTED = "rejected"
    EXPIRED = "expired"
    RETURNED = "returned"


class Event(StrEnum):
    """What can happen to a lease."""

    ACCEPT = "accept"
    REJECT = "reject"
    EXPIRE = "expire"
    RETURN = "return"


TRANSITIONS: dict[tuple[State, Event], State] = {
    (State.OPEN, Event.ACCEPT): State.ACCEPTED,
    (State.OPEN, Event.REJECT): State.REJECTED,
    (State.OPEN, Event.EXPIRE): State.EXPIRED,
    (State.OPEN, Event.RETURN): State.RETURNED,
}
"""A pair that is not listed cannot happen; the four ends have no way out."""
