"""Samples of evaluations as text: what a version answered to held-out problems, and what it earned.

- Evaluations of a round have the same problems, so the first answered problems of each are the same, too, unless some
  were not answered. Of each problem the first sample is shown: nobody chose it.
- Texts are cut in the middle to `EVALUATION_TEXT_MAX_CHARS`: a completion's end often has its answer.
- Nodes wrote the completions; whoever shows them must escape them.
- Decoding costs more than reading, so the samples of an evaluation are kept until an audit retracts one of them.
"""

from collections.abc import Callable, Sequence
from math import isfinite
from typing import NamedTuple

import numpy as np
import sqlalchemy as sa

from coordinator.rules.lifecycle import RolloutState
from coordinator.store.rows import find_row, read_rows
from coordinator.store.tables import evaluations, groups, leases, rollouts
from coordinator.transactions import scoring
from protocol import limits
from protocol.errors import NotFound
from protocol.work.learning import EvaluationSample, EvaluationSamples
from protocol.work.lease import Lease
from protocol.work.rollout import unpack_tokens

Decode = Callable[[Sequence[int]], str]

SHOWN_MAX = 8
"""Evaluations of a split whose samples are shown: the first, and the newest."""

CUT = " […] "
"""The place of the characters that were left out."""


class EvaluationRow(NamedTuple):
    """An evaluation, and the version that it measured."""

    number: int
    version: int
    policy_update: int
    split: str


class MeasuredRow(NamedTuple):
    """An answered problem of an evaluation."""

    prompt: int
    envelope: bytes
    rewards: bytes
    offer: bytes


_columns = [evaluations.c[name] for name in EvaluationRow._fields]


def of_evaluation(connection: sa.Connection, number: int, count: int, decode: Decode) -> EvaluationSamples:
    """Return the first samples of an evaluation: of `count` problems, those with the lowest numbers."""
    row = find_row(connection, sa.select(*_columns).where(evaluations.c.number == number), EvaluationRow)
    if row is None:
        raise NotFound(f"There is no evaluation {number}.", hint="`swarm-coordinator eval list` names them.")
    return _decoded(connection, row, _claims(connection, number, count), decode)


class SampleArchive:
    """The samples of the evaluations that people read, each decoded once."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._kept: dict[int, tuple[tuple[str, ...], EvaluationSamples]] = {}

    def read(self, connection: sa.Connection, decode: Decode) -> list[EvaluationSamples]:
        """Return the samples of the first and the newest evaluations of each split, the newest first."""
        ended = sa.select(*_columns).where(evaluations.c.state.in_(("done", "partial")))
        rows = read_rows(connection, ended.order_by(evaluations.c.number.desc()), EvaluationRow)
        by_split: dict[str, list[EvaluationRow]] = {}
        for row in rows:
            by_split.setdefault(row.split, []).append(row)
        shown = [row for split in by_split.values() for row in (split[: SHOWN_MAX - 1] + split[SHOWN_MAX - 1 :][-1:])]
        self._kept = {row.number: self._samples(connection, row, decode) for row in shown}
        return [self._kept[number][1] for number in sorted(self._kept, reverse=True)]

    def _samples(
        self, connection: sa.Connection, row: EvaluationRow, decode: Decode
    ) -> tuple[tuple[str, ...], EvaluationSamples]:
        claims = _claims(connection, row.number, self._count)
        known = self._kept.get(row.number)
        if known is not None and known[0] == claims:
            return known
        return claims, _decoded(connection, row, claims, decode)


def _claims(connection: sa.Connection, number: int, count: int) -> tuple[str, ...]:
    """Return the claims that answered the first problems of an evaluation."""
    query = (
        sa.select(rollouts.c.claim_id)
        .join_from(groups, rollouts, rollouts.c.group_no == groups.c.group_no)
        .where(groups.c.evaluation == number, rollouts.c.state == RolloutState.MEASURED.value)
        .order_by(groups.c.prompt)
        .limit(count)
    )
    return tuple(connection.execute(query).scalars())


def _decoded(connection: sa.Connection, row: EvaluationRow, claims: Sequence[str], decode: Decode) -> EvaluationSamples:
    query = (
        sa.select(groups.c.prompt, rollouts.c.envelope, rollouts.c.rewards, leases.c.offer)
        .join_from(rollouts, groups, groups.c.group_no == rollouts.c.group_no)
        .join(leases, leases.c.lease_id == rollouts.c.lease_id)
        .where(rollouts.c.claim_id.in_(claims))
        .order_by(groups.c.prompt)
    )
    return EvaluationSamples(
        number=row.number,
        version=row.version,
        update=row.policy_update,
        split=row.split,
        samples=tuple(_sample(answer, decode) for answer in read_rows(connection, query, MeasuredRow)),
    )


def _sample(answer: MeasuredRow, decode: Decode) -> EvaluationSample:
    reward = float(np.frombuffer(answer.rewards, "<f4")[0])
    return EvaluationSample(
        problem=answer.prompt,
        prompt=shortened(decode(unpack_tokens(Lease.from_bytes(answer.offer).prompt).tolist())),
        completion=shortened(decode(scoring.completions(answer.envelope, answer.offer)[0])),
        reward=reward if isfinite(reward) else 0.0,
    )


def shortened(text: str) -> str:
    """Return a text without its middle, if it is too long, and without halves of characters."""
    whole = text.encode(errors="replace").decode()
    if len(whole) <= limits.EVALUATION_TEXT_MAX_CHARS:
        return whole
    room = limits.EVALUATION_TEXT_MAX_CHARS - len(CUT)
    return whole[: room // 2] + CUT + whole[-(room - room // 2) :]
