"""Answers of queries, as they are stored: the tokens of all nodes that worked on each, with their signatures.

- `read_answers` reads whole answers, `read_growth` what nodes have reported of those that are still sampled.
- A reader of growth follows the lease that was issued last. Its node may continue, or begin anew, what another node
  has begun, so each part of a sample says where it starts.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import sqlalchemy as sa

from coordinator.rules.lifecycle import RolloutState
from coordinator.store.tables import IN_NO_BATCH, fragments, leases, queries, rollouts
from coordinator.transactions import batches
from ledger.prepared import Prepared
from protocol import limits
from protocol.ids import ClaimId
from protocol.wire.signing import Envelope
from protocol.work.fragment import Fragment
from protocol.work.lease import Lease
from protocol.work.rollout import RolloutClaim


class AnsweredQuery(NamedTuple):
    """A query, and the rollout that answers it with its lease."""

    number: int
    version: int
    claim_id: ClaimId
    lease_id: str
    policy_update: int
    rewards: bytes
    marks: Mapping[str, Any]
    envelope: bytes
    offer: bytes
    continues: str | None


# Built once: making a statement costs more than running it, and this one runs while callers wait.
_answered = Prepared(
    sa.select(queries.c.number, *[rollouts.c[name] for name in AnsweredQuery._fields[1:-2]])
    .add_columns(leases.c.offer, leases.c.continues)
    .join_from(queries, rollouts, rollouts.c.group_no == queries.c.group_no)
    .join(leases, leases.c.lease_id == rollouts.c.lease_id)
    .where(queries.c.number.in_(sa.bindparam("numbers", expanding=True)), queries.c.state == "answered", IN_NO_BATCH)
    .where(rollouts.c.state.in_((RolloutState.SERVED.value, RolloutState.RETRACTED.value)))
    .order_by(rollouts.c.accepted_ms),
    AnsweredQuery,
)


class ReportedFragment(NamedTuple):
    """A fragment of a query's lease."""

    number: int
    lease_id: str
    issued_ms: int
    offer: bytes
    place: int
    envelope: bytes


# A query and the place of a fragment as one number: a statement has one list of them, and not one of pairs.
_reported = Prepared(
    sa.select(queries.c.number, leases.c.lease_id, leases.c.issued_ms, leases.c.offer)
    .add_columns(fragments.c.number.label("place"), fragments.c.envelope)
    .join_from(queries, leases, leases.c.group_no == queries.c.group_no)
    .join(fragments, fragments.c.lease_id == leases.c.lease_id)
    .where(queries.c.number.in_(sa.bindparam("numbers", expanding=True)))
    .where(
        (sa.cast(queries.c.number, sa.BigInteger) * limits.FRAGMENTS_MAX + fragments.c.number).in_(
            sa.bindparam("next_ones", expanding=True)
        )
    )
    .order_by(leases.c.issued_ms, leases.c.lease_id),
    ReportedFragment,
)


@dataclass(frozen=True)
class SampledAnswer:
    """A completion of a query's prompt."""

    tokens: bytes
    """Token ids, 32-bit little-endian."""
    logprobs: bytes
    """32-bit little-endian floats."""
    finish: Literal["", "stop", "length"]


@dataclass(frozen=True)
class QueryAnswer:
    """The answer to a query."""

    samples: tuple[SampledAnswer, ...]
    version: int
    claims: tuple[ClaimId, ...]
    """The claims of all nodes that worked on it; the last one's is of the rollout that answers it."""


@dataclass(frozen=True)
class ReadUntil:
    """The fragments of a query that its reader has: those of a lease, up to one of them."""

    issued_ms: int = 0
    lease_id: str = ""
    fragments: int = 0

    @property
    def next_places(self) -> set[int]:
        """Return the places of the fragments that may be next: of this lease, and of another one."""
        return {place for place in (self.fragments, 0) if place < limits.FRAGMENTS_MAX}

    def follows(self, issued_ms: int, lease_id: str, number: int) -> bool:
        """Return True if this fragment of a lease is the next to read."""
        if lease_id == self.lease_id:
            return number == self.fragments
        return number == 0 and (issued_ms, lease_id) > (self.issued_ms, self.lease_id)


@dataclass(frozen=True)
class GrownSample:
    """New tokens of one sample of a query."""

    sample: int
    start: int
    """The number of tokens before these, with those of other nodes."""
    tokens: bytes
    logprobs: bytes


@dataclass(frozen=True)
class Growth:
    """New tokens of a query's samples, as a node has reported them."""

    version: int
    samples: tuple[GrownSample, ...]
    until: ReadUntil


def read_growth(connection: sa.Connection, known: Mapping[int, ReadUntil]) -> dict[int, Growth]:
    """Return the next fragment of each of these queries that has one."""
    if not known:
        return {}
    next_ones = {
        limits.FRAGMENTS_MAX * number + place for number, until in known.items() for place in until.next_places
    }
    found: dict[int, Growth] = {}
    for row in _reported(connection, numbers=known, next_ones=next_ones):
        if known[row.number].follows(row.issued_ms, row.lease_id, row.place):
            lease, fragment = Lease.from_bytes(row.offer), Fragment.from_bytes(_payload(row.envelope))
            if lease.report_every_ms:
                until = ReadUntil(row.issued_ms, row.lease_id, row.place + 1)
                found[row.number] = Growth(lease.version, _grown_samples(lease, fragment), until)
    return found


def _grown_samples(lease: Lease, fragment: Fragment) -> tuple[GrownSample, ...]:
    before = [len(prefix.tokens) // 4 for prefix in lease.prefixes] or [0] * lease.samples
    return tuple(
        GrownSample(part.sample, before[part.sample] + part.start, part.tokens, part.logprobs)
        for part in fragment.parts
    )


def _payload(envelope: bytes) -> bytes:
    """Return what an envelope signs; its signature was checked at intake."""
    return Envelope.from_bytes(envelope).payload


def read_answers(connection: sa.Connection, numbers: Sequence[int]) -> dict[int, QueryAnswer]:
    """Return the answers to those of these queries that are answered."""
    answers: dict[int, QueryAnswer] = {}
    for row in _answered(connection, numbers=numbers):
        if row.number in answers:
            continue
        claim = RolloutClaim.from_bytes(_payload(row.envelope))
        wholes, earlier = batches.whole_samples(connection, batches.StoredRollout.from_mapping(row._asdict()))
        samples = tuple(
            SampledAnswer(tokens, logprobs, said.finish)
            for (tokens, logprobs, _), said in zip(wholes, claim.samples, strict=True)
        )
        claims = (*(ClaimId(part.claim_id) for part in earlier), row.claim_id)
        answers[row.number] = QueryAnswer(samples, row.version, claims)
    return answers
