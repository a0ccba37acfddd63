"""Answers of queries, as they are stored: the tokens of all nodes that worked on each, with their signatures."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import sqlalchemy as sa

from coordinator.rules.lifecycle import RolloutState
from coordinator.store.tables import leases, queries, rollouts
from coordinator.transactions import batches
from protocol.ids import ClaimId
from protocol.wire.signing import open_envelope
from protocol.work.rollout import RolloutClaim


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


def read_answers(connection: sa.Connection, numbers: Sequence[int]) -> dict[int, QueryAnswer]:
    """Return the answers to those of these queries that are answered."""
    answered = (
        sa.select(rollouts, leases.c.offer, leases.c.continues, queries.c.number)
        .join_from(queries, rollouts, rollouts.c.group_no == queries.c.group_no)
        .join(leases, leases.c.lease_id == rollouts.c.lease_id)
        .where(queries.c.number.in_(numbers), queries.c.state == "answered")
        .where(rollouts.c.state.in_((RolloutState.SERVED.value, RolloutState.RETRACTED.value)))
        .order_by(rollouts.c.accepted_ms)
    )
    answers: dict[int, QueryAnswer] = {}
    for row in connection.execute(answered).mappings().all():
        if row["number"] in answers:
            continue
        claim = RolloutClaim.from_bytes(open_envelope("rollout", row["envelope"]).payload)
        wholes, earlier = batches.whole_samples(connection, row)
        samples = tuple(
            SampledAnswer(tokens, logprobs, said.finish)
            for (tokens, logprobs, _), said in zip(wholes, claim.samples, strict=True)
        )
        claims = (*(part.claim_id for part in earlier), row["claim_id"])
        answers[row["number"]] = QueryAnswer(samples, row["version"], claims)
    return answers
