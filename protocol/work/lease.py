"""A lease: one group offered to one node, and the states it can be in.

- It is `offered`, `held` once its node has said that it has it, and `generating` once its first token was drawn. A node
  may skip either word: what it says is shown, and nothing depends on it.
- It ends in exactly one of `accepted` or `rejected` (it was submitted, and is judged when it arrives), `expired` (no
  answer in time), `skipped` (its node will not answer it) or `cancelled` (the coordinator needs it no more, and nobody
  is blamed).
- Only an open lease can be answered. The group of one that ended without an answer is offered again.
- The price is locked when the lease is given out. Whoever answers signs the digest of all that the lease says.
- A lease may go on where another ended: its `prefixes` are what was sampled before, with the same seed and version. Its
  answer has only the tokens that come after them. A lease of an episode has none.
"""

from enum import StrEnum
from typing import Annotated, Literal

from pydantic import Field, StringConstraints

from protocol import limits
from protocol.ids import Digest, Hex32
from protocol.policy import chunks
from protocol.wire.message import Message
from protocol.work.episode import Episode

Numerics = Annotated[str, StringConstraints(pattern=r"^([a-z0-9_.-]{1,20}/[a-z0-9_.-]{1,20}/[a-z0-9_.-]{1,20})?$")]
"""What a node computes with, as engine/dtype/device; empty if it does not say."""


class Prefix(Message):
    """What one sample of a group has already; with a `finish` it is complete."""

    tokens: bytes = Field(max_length=4 * limits.TOKENS_MAX)
    """Token ids, 32-bit little-endian."""
    finish: Literal["", "stop", "length"]


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
    judged_as: Numerics = ""
    """The class whose tolerances its answer is judged by; empty: by those of the round."""
    prefixes: tuple[Prefix, ...] = Field((), max_length=limits.SAMPLES_MAX)
    """One for each sample, or none at all."""
    episode: Episode | None = None
    """The game that the samples play, of several turns; nothing where a sample is one completion."""

    @property
    def digest(self) -> Digest:
        """What stands for every word of it."""
        return chunks.digest(self.to_bytes())


def answer_max_bytes(samples: int, max_new_tokens: int) -> int:
    """Return the size of the largest envelope that can answer a lease, or tell a part of it."""
    return limits.ANSWER_HEAD_BYTES + samples * (limits.ANSWER_SAMPLE_BYTES + 8 * max_new_tokens)


def named_lease(payload: bytes) -> str:
    """Return the id of the lease that a claim or a fragment names, without decoding it; empty if it names none there.

    The keys are sorted, so that both begin with a map's header, `lease_digest` and `lease_id`, each of fixed length.
    """
    digest, lease_id = payload[1:16], payload[80:91]
    if (digest, lease_id) != (b"\xaclease_digest\xd9\x40", b"\xa8lease_id\xd9\x20"):
        return ""
    return payload[91:123].decode("ascii", errors="replace")


class LeaseState(StrEnum):
    """Where a lease stands."""

    OFFERED = "offered"
    HELD = "held"
    GENERATING = "generating"
    ACCEPTED = "accepted"
    REJECTED = "rejected"
    EXPIRED = "expired"
    SKIPPED = "skipped"
    CANCELLED = "cancelled"


class LeaseEvent(StrEnum):
    """What can happen to a lease."""

    HOLD = "hold"
    BEGIN = "begin"
    ACCEPT = "accept"
    REJECT = "reject"
    EXPIRE = "expire"
    SKIP = "skip"
    CANCEL = "cancel"


OPEN = (LeaseState.OFFERED, LeaseState.HELD, LeaseState.GENERATING)
"""What can still be answered."""

_ENDS = {
    LeaseEvent.ACCEPT: LeaseState.ACCEPTED,
    LeaseEvent.REJECT: LeaseState.REJECTED,
    LeaseEvent.EXPIRE: LeaseState.EXPIRED,
    LeaseEvent.SKIP: LeaseState.SKIPPED,
    LeaseEvent.CANCEL: LeaseState.CANCELLED,
}

TRANSITIONS: dict[tuple[LeaseState, LeaseEvent], LeaseState] = {
    (LeaseState.OFFERED, LeaseEvent.HOLD): LeaseState.HELD,
    (LeaseState.OFFERED, LeaseEvent.BEGIN): LeaseState.GENERATING,
    (LeaseState.HELD, LeaseEvent.BEGIN): LeaseState.GENERATING,
} | {(state, event): end for state in OPEN for event, end in _ENDS.items()}
"""A pair that is not listed cannot happen; the five ends have no way out."""
