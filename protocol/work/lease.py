"""Leases: a group offered to a node, and the states of this offer.

- It is `offered`, `held` once its node has confirmed it, and `generating` once its first token was drawn. A node may
  skip either report: the state is only displayed.
- It ends in exactly one of `accepted` or `rejected` (it was submitted, and is judged on arrival), `expired` (no answer
  in time), `skipped` (its node will not answer it) or `cancelled` (the coordinator no longer needs it; no fault).
- Only an open lease can be answered. The group of a lease that ended without an answer is offered again.
- The price is locked when the lease is issued. The answer signs the digest of the whole lease.
- A lease may continue another: its `prefixes` are the tokens before, with the same seed, version and temperature. Its
  answer has only the tokens after them.
- An episode of several turns is a chain of leases. Each asks for one turn, of at most `turn_tokens_max` tokens; its
  prefixes are the earlier turns, each followed by what the environment answered. A sample whose episode is over has a
  `finish`.
- A lease may have a `temperature` of its own; else it has no such field, and its tokens are drawn at the temperature of
  its version. At 0 the likeliest token is drawn, and the seed plays no part.
- A lease may have a `tokens_max` of its own, below that of its version, and a `report_every_ms`, if a caller reads the
  tokens while they are sampled. Without them it has no such fields.
"""

from enum import StrEnum
from operator import not_
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, StringConstraints

from protocol import limits
from protocol.ids import Digest, Hex32
from protocol.policy import chunks
from protocol.wire.message import Message

Numerics = Annotated[str, StringConstraints(pattern=r"^([a-z0-9_.-]{1,20}/[a-z0-9_.-]{1,20}/[a-z0-9_.-]{1,20})?$")]
"""The class of a node, as engine/dtype/device; empty if it reports none."""

EXACT = "exact"
"""The engine in the name of an exact class, whose device ends with a probe: exact/fp32/cpu-0123456789ab."""


def is_exact(numerics: str) -> bool:
    """Return True for a class whose nodes give the same bits as an auditor of the class."""
    return numerics.startswith(f"{EXACT}/")


def float_class(numerics: str) -> str:
    """Return the class with tolerances to which a class belongs: that of torch on the same device for an exact one."""
    if not is_exact(numerics):
        return numerics
    _, precision, device = numerics.split("/")
    return f"torch/{precision}/{device.split('-')[0]}"


def _within_limits(temperature: float | None) -> float | None:
    if temperature and not limits.TEMPERATURE_MIN <= temperature <= limits.TEMPERATURE_MAX:
        raise ValueError(f"a temperature is 0, or from {limits.TEMPERATURE_MIN:g} to {limits.TEMPERATURE_MAX:g}")
    return temperature


OwnTemperature = Annotated[float | None, AfterValidator(_within_limits)]
"""A temperature that replaces the version's; None: the version's."""


class Prefix(Message):
    """The tokens that a sample of a group already has, an environment's included; with a `finish` it is complete."""

    tokens: bytes = Field(max_length=4 * limits.TOKENS_MAX)
    """Token ids, 32-bit little-endian."""
    finish: Literal["", "stop", "length"]


class Lease(Message):
    """A group to sample, and the price that is paid for it."""

    lease_id: Hex32
    version: int = Field(ge=1, le=limits.VERSION_MAX)
    seed: int = Field(ge=0, lt=2**63)
    samples: int = Field(ge=1, le=limits.SAMPLES_MAX)
    prompt: bytes = Field(min_length=4, max_length=4 * limits.TOKENS_MAX)
    """Token ids, 32-bit little-endian."""
    price_micros_per_mtok: int = Field(ge=0, le=limits.PRICE_MAX_MICROS_PER_MTOK)
    expires_ms: int
    judged_as: Numerics = ""
    """The class whose tolerances its answer is judged by; empty: the round's class."""
    prefixes: tuple[Prefix, ...] = Field((), max_length=limits.SAMPLES_MAX)
    """One prefix for each sample, or none at all."""
    turn_tokens_max: int = Field(0, ge=0, le=limits.TOKENS_MAX)
    """The most tokens of a sample's answer, which is one turn of its episode; 0: a sample is one completion."""
    context_tokens_paid: int = Field(0, ge=0, le=limits.CONTEXT_PAID_MAX)
    """Tokens that are paid for computing the prompt and the prefixes, beside the tokens that are drawn."""
    temperature: OwnTemperature = Field(None, exclude_if=lambda temperature: temperature is None)
    """The temperature at which tokens are drawn, with the digest of a lease without it unchanged if it is None."""
    tokens_max: int = Field(0, ge=0, le=limits.TOKENS_MAX, exclude_if=not_)
    """The most tokens of a completion with its prefix; 0: those of its version."""
    report_every_ms: int = Field(0, ge=0, le=limits.REPORT_EVERY_MAX_MS, exclude_if=not_)
    """The interval of the first fragments, which somebody reads as they come; 0: only a long group has fragments."""

    @property
    def digest(self) -> Digest:
        """Return the hash of all its fields."""
        return chunks.digest(self.to_bytes())

    def completion_max(self, max_new_tokens: int) -> int:
        """Return the most tokens of a completion, of at most `max_new_tokens` as its version allows."""
        return min(max_new_tokens, self.tokens_max or max_new_tokens)

    @property
    def report_every_s(self) -> float:
        """Return the interval of its first fragments in seconds; 0: nobody reads them as they come."""
        return max(self.report_every_ms, limits.REPORT_EVERY_MIN_MS) / 1000 if self.report_every_ms else 0.0


def length_max(start: int, turn_tokens_max: int, max_new_tokens: int) -> int:
    """Return the length at which a sample with `start` tokens before its answer stops by `length`."""
    return min(max_new_tokens, start + turn_tokens_max) if turn_tokens_max else max_new_tokens


def answer_max_bytes(samples: int, max_new_tokens: int) -> int:
    """Return the size in bytes of the largest envelope with a claim or a fragment for a lease."""
    return limits.ANSWER_HEAD_BYTES + samples * (limits.ANSWER_SAMPLE_BYTES + 8 * max_new_tokens)


def named_lease(payload: bytes) -> str:
    """Return the lease id in a claim or a fragment without decoding it; empty if there is none at its place.

    The keys are sorted, so both begin with a map's header, `lease_digest` and `lease_id`, each of fixed length.
    """
    digest, lease_id = payload[1:16], payload[80:91]
    if (digest, lease_id) != (b"\xaclease_digest\xd9\x40", b"\xa8lease_id\xd9\x20"):
        return ""
    return payload[91:123].decode("ascii", errors="replace")


class LeaseState(StrEnum):
    """States of a lease."""

    OFFERED = "offered"
    HELD = "held"
    GENERATING = "generating"
    ACCEPTED = "accepted"
    REJECTED = "rejected"
    EXPIRED = "expired"
    SKIPPED = "skipped"
    CANCELLED = "cancelled"


class LeaseEvent(StrEnum):
    """Events in the life of a lease."""

    HOLD = "hold"
    BEGIN = "begin"
    ACCEPT = "accept"
    REJECT = "reject"
    EXPIRE = "expire"
    SKIP = "skip"
    CANCEL = "cancel"


OPEN = (LeaseState.OFFERED, LeaseState.HELD, LeaseState.GENERATING)
"""States in which a lease can be answered."""

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
"""All possible transitions; the five end states have none."""
