"""Turns: the claims of an episode, one after the other, and what its environment answered between them, as effects.

    unscored ──the environment goes on──▶ turn ──the last turn is judged──▶ part
            └──all episodes are over───▶ buffered, with the tokens of all turns

- The samples of a group play together: each lease asks for one turn of every sample whose episode is not over.
- A turn is accepted, credited and drawn for audit like any rollout. What the environment answered is stored beside it;
  the next lease has it in its prefixes, after the turn. So each prompt begins with the turn before it, to the token.
- The next turn is sampled with the same version and seed. A node that holds this version takes it; only after the time
  of a lease may a node with another version begin the group again.
- When the last turn is judged, the earlier ones become its parts: they are used, and stand and fall, with it.
- A group whose episodes cannot go on is abandoned: its turns are paid as if they were used.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import sqlalchemy as sa

from coordinator.rules.lifecycle import RolloutState, rollouts_before
from coordinator.store.tables import IS_OPEN, audits, groups, leases, parts, rollouts
from coordinator.transactions import reward_columns
from coordinator.transactions.rollouts import move
from ledger.prepared import Prepared
from protocol import limits
from protocol.ids import NodeId
from protocol.tasks import Reward
from protocol.wire.message import Message
from protocol.wire.signing import open_envelope
from protocol.work.lease import Lease, Prefix
from protocol.work.rollout import RolloutClaim, Sample


class TurnRow(NamedTuple):
    """A rollout of a turn, with its lease."""

    offer: bytes
    continues: str | None
    claim_id: str
    node_id: str
    envelope: bytes
    inserted: bytes | None
    state: str
    rewards: bytes
    marks: dict[str, Any]


_turn = Prepared(
    sa.select(
        *(leases.c.offer, leases.c.continues),
        *(rollouts.c.claim_id, rollouts.c.node_id, rollouts.c.envelope, rollouts.c.inserted, rollouts.c.state),
        *(rollouts.c.rewards, rollouts.c.marks),
    )
    .join_from(leases, rollouts, rollouts.c.lease_id == leases.c.lease_id)
    .where(leases.c.lease_id == sa.bindparam("lease")),
    TurnRow,
)
_goes_on = Prepared(
    sa.update(rollouts)
    .where(
        rollouts.c.claim_id == sa.bindparam("claim"),
        rollouts.c.state.in_([state.value for state in rollouts_before(RolloutState.TURN)]),
    )
    .values(
        state=RolloutState.TURN.value,
        inserted=sa.bindparam("answer"),
        rewards=sa.bindparam("known_rewards"),
        marks=sa.bindparam("known_marks"),
    )
)
_open_of = Prepared(sa.select(leases.c.lease_id).where(IS_OPEN, leases.c.node_id == sa.bindparam("node")).limit(1))
_waits_for = Prepared(
    sa.select(rollouts.c.claim_id)
    .join_from(rollouts, groups, groups.c.group_no == rollouts.c.group_no)
    .where(rollouts.c.node_id == sa.bindparam("node"), rollouts.c.version == sa.bindparam("version"))
    .where(
        (rollouts.c.state == RolloutState.UNSCORED.value)
        | ((rollouts.c.state == RolloutState.TURN.value) & (groups.c.begun == rollouts.c.lease_id))
    )
    .limit(1)
)


class WholeSample(NamedTuple):
    """A sample of all turns together."""

    tokens: bytes
    logprobs: bytes
    drawn: bytes
    """1 for each token that was drawn; empty if all were."""


class EnvironmentAnswer(Message):
    """An environment's answer to a turn of a group, for each sample."""

    samples: tuple[Prefix, ...]
    """The tokens to insert after the turn; a `finish` if the episode is over."""


@dataclass(frozen=True)
class AcceptedTurn:
    """An accepted turn of a group."""

    claim_id: str
    node_id: NodeId
    lease: Lease
    samples: tuple[Sample, ...]
    answer: tuple[Prefix, ...]
    """The environment's answer; empty while it is not known, and for the last turn."""
    rewards: list[Reward | None]
    """The rewards of the samples whose episodes ended with this turn."""

    @property
    def prefixes(self) -> tuple[Prefix, ...]:
        """Return the prefixes of the next turn's lease."""
        return tuple(
            before if before.finish else Prefix(tokens=before.tokens + said.tokens + then.tokens, finish=then.finish)
            for before, said, then in zip(begun(self.lease), self.samples, self.answer, strict=True)
        )

    @property
    def ends(self) -> tuple[int, ...]:
        """Return the end (exclusive) of the turn in each sample."""
        before = begun(self.lease)
        return tuple((len(at.tokens) + len(said.tokens)) // 4 for at, said in zip(before, self.samples, strict=True))


def begun(lease: Lease) -> tuple[Prefix, ...]:
    """Return the prefixes of a lease: empty ones for a first turn."""
    return lease.prefixes or (Prefix(tokens=b"", finish=""),) * lease.samples


def chain(connection: sa.Connection, lease_id: str | None) -> list[AcceptedTurn]:
    """Return the turns of a group up to and including the one that answered this lease, the first turn first."""
    turns = list[AcceptedTurn]()
    while lease_id is not None and len(turns) <= limits.TURNS_MAX:
        row = _turn(connection, lease=lease_id).first()
        if row is None:
            return []  # fragments, which are no turns
        turns.append(_read(row))
        lease_id = row.continues
    return turns[::-1]


def _read(row: TurnRow) -> AcceptedTurn:
    claim = RolloutClaim.from_bytes(open_envelope("rollout", row.envelope).payload)
    answer = EnvironmentAnswer.from_bytes(row.inserted).samples if row.inserted else ()
    rewards = reward_columns.read_known({"rewards": row.rewards, "marks": row.marks})
    return AcceptedTurn(row.claim_id, NodeId(row.node_id), Lease.from_bytes(row.offer), claim.samples, answer, rewards)


def last(connection: sa.Connection, lease_id: str | None) -> AcceptedTurn | None:
    """Return the turn that answered a lease, if its episode goes on."""
    row = None if lease_id is None else _turn(connection, lease=lease_id).first()
    return _read(row) if row is not None and row.state == RolloutState.TURN else None


def is_waited_for(connection: sa.Connection, node: NodeId, version: int) -> bool:
    """Return True if the node may soon have a next turn of this version: it samples one, or an answer is due.

    A request for work may overtake the answer to a lease.
    """
    if _open_of(connection, node=node).first() is not None:
        return True
    return _waits_for(connection, node=node, version=version).first() is not None


def record_answer(
    connection: sa.Connection, claim_id: str, answer: Sequence[Prefix], rewards: Sequence[Reward | None]
) -> bool:
    """Store what the environment answered to a turn after which episodes go on; return False if nobody waits for it."""
    inserted = EnvironmentAnswer(samples=tuple(answer)).to_bytes()
    known = reward_columns.stored([reward or reward_columns.UNKNOWN for reward in rewards])
    columns = {f"known_{name}": value for name, value in known.items()}
    return bool(_goes_on(connection, claim=claim_id, answer=inserted, **columns).rowcount)


def join_parts(connection: sa.Connection, whole: str, earlier: Sequence[AcceptedTurn], now_ms: int) -> None:
    """Make the earlier turns of a group parts of its last turn."""
    claims = [turn.claim_id for turn in earlier]
    move(connection, rollouts.c.claim_id.in_(claims), RolloutState.PART)
    columns = sa.select(rollouts.c.claim_id, rollouts.c.tokens, rollouts.c.credit_micros)
    counted = {row.claim_id: row for row in connection.execute(columns.where(rollouts.c.claim_id.in_(claims)))}
    rows = [
        {
            "claim_id": turn.claim_id,
            "whole": whole,
            "lease_id": turn.lease.lease_id,
            "node_id": turn.node_id,
            "tokens": counted[turn.claim_id].tokens,
            "credit_micros": counted[turn.claim_id].credit_micros,
            "credited_ms": now_ms,
        }
        for turn in earlier
    ]
    if rows:
        connection.execute(sa.insert(parts), rows)


def abandon(connection: sa.Connection, group_no: int, *, but: str = "") -> None:
    """End the episodes of a group that cannot go on; its turns, except claim `but`, count as used.

    Leases that are still open for the group are surplus: an answer is only paid.
    """
    waits = rollouts.c.state.in_((RolloutState.TURN, RolloutState.UNSCORED)) & (rollouts.c.claim_id != but)
    ended = [row.claim_id for row in move(connection, (rollouts.c.group_no == group_no) & waits, RolloutState.UNUSED)]
    if ended:
        connection.execute(sa.update(leases).where(leases.c.group_no == group_no, IS_OPEN).values(surplus=sa.true()))
        connection.execute(sa.update(audits).where(audits.c.claim_id.in_(ended)).values(used=True))


def whole_samples(turns: Sequence[AcceptedTurn]) -> list[WholeSample]:
    """Return each sample of a group with all its turns and observations; nobody drew the observations."""
    wholes = list[WholeSample]()
    for number in range(turns[-1].lease.samples):
        tokens = logprobs = b""
        drawn = list[np.ndarray]()
        for turn in turns:
            said = turn.samples[number]
            then = turn.answer[number].tokens if turn.answer else b""
            tokens += said.tokens + then
            logprobs += said.logprobs + bytes(len(then))
            drawn.append(np.repeat([True, False], [len(said.tokens) // 4, len(then) // 4]))
        wholes.append(WholeSample(tokens, logprobs, np.concatenate(drawn).tobytes()))
    return wholes
