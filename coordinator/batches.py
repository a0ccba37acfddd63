"""Batches: which accepted groups the learner trains on, and what became of them, as effects.

- Batch n leads to update n. It is formed once and stored: asking for it again, after a crash, gives the same groups.
- It takes the oldest policy versions first. A group past the staleness bound never enters one: it is marked stale,
  its prompt is offered again, and its node, which did its work in time, is paid.
- The learner's report settles the claims of its batch: Post, or Void where the claimed log-probabilities are not those
  of the tokens.
"""

from typing import Any

import numpy as np
import sqlalchemy as sa

from coordinator import continuation
from coordinator import leases as lease_table
from coordinator.tables import batches, leases, rollouts
from ledger import store
from ledger.entry import Post, Void
from protocol.errors import OutOfOrder
from protocol.ids import ClaimId
from protocol.learning import Batch, Earlier, Report, TrainingGroup, TrainingSample
from protocol.lease import Lease
from protocol.rollout import RolloutClaim
from protocol.signing import open_envelope


def get(connection: sa.Connection, number: int, *, size: int, staleness: int, now_ms: int) -> Batch | None:
    """The batch that leads to update `number`, formed now if it can be; None while groups are missing."""
    newest = lease_table.latest_batch(connection)
    if number > newest + 1 or number < 1:
        raise OutOfOrder(f"Batch {number} does not follow batch {newest}.")
    if number == newest + 1 and not _form(connection, number, size, staleness, now_ms):
        return None
    chosen = connection.execute(
        sa.select(rollouts, leases.c.offer, leases.c.continues)
        .join_from(rollouts, leases, rollouts.c.lease_id == leases.c.lease_id)
        .where(rollouts.c.batch == number)
        .order_by(rollouts.c.group_no)
    ).mappings()
    return Batch(number=number, groups=tuple(_group(connection, row) for row in chosen.all()))


def report(connection: sa.Connection, message: Report, *, now_ms: int) -> bool:
    """Settle a trained batch; False if it was settled before."""
    row = connection.execute(sa.select(batches.c.reported_ms).where(batches.c.batch == message.number)).first()
    if row is None:
        raise OutOfOrder(f"Batch {message.number} was never formed.")
    if row[0] is not None:
        return False
    in_batch = connection.execute(sa.select(rollouts.c.claim_id).where(rollouts.c.batch == message.number)).scalars()
    for claim_id in continuation.with_parts(connection, in_batch.all()):
        settle(connection, claim_id, claim_id in message.mismatched, now_ms)
    connection.execute(
        sa.update(batches)
        .where(batches.c.batch == message.number)
        .values(reported_ms=now_ms, idle_s=message.idle_s, busy_s=message.busy_s, metrics=dict(message.metrics))
    )
    return True


def settle(connection: sa.Connection, claim_id: ClaimId, mismatched: bool, now_ms: int) -> None:
    """End a claim's wait: posted, or voided if its log-probabilities cannot be true."""
    entry = Void(claim_id=claim_id, reason_code="logprob_mismatch") if mismatched else Post(claim_id=claim_id)
    store.append(connection, entry, now_ms)


def settle_leftovers(connection: sa.Connection, *, now_ms: int) -> int:
    """At the end of the round: rollouts that were accepted and are no longer needed are paid."""
    left = connection.execute(sa.select(rollouts.c.claim_id).where(rollouts.c.state == "buffered")).scalars().all()
    for claim_id in continuation.with_parts(connection, left):
        settle(connection, claim_id, False, now_ms)
    connection.execute(sa.update(rollouts).where(rollouts.c.state == "buffered").values(state="unused"))
    return len(left)


def _form(connection: sa.Connection, number: int, size: int, staleness: int, now_ms: int) -> bool:
    """Choose the groups of a new batch, after dropping those past the bound."""
    learner_update = number - 1
    _drop_stale(connection, learner_update - staleness, now_ms)
    chosen = connection.execute(
        sa.select(rollouts.c.claim_id, rollouts.c.group_no, rollouts.c.policy_update)
        .where(rollouts.c.state == "buffered")
        .order_by(rollouts.c.policy_update, rollouts.c.accepted_ms, rollouts.c.group_no)
        .limit(size)
    ).all()
    if len(chosen) < size:
        return False
    for claim_id, group_no, _ in chosen:
        connection.execute(
            sa.update(rollouts).where(rollouts.c.claim_id == claim_id).values(state="batched", batch=number)
        )
        lease_table.set_group(connection, group_no, "trained")
    oldest = learner_update - min(policy_update for _, _, policy_update in chosen)
    connection.execute(sa.insert(batches).values(batch=number, formed_ms=now_ms, max_staleness=oldest))
    return True


def _drop_stale(connection: sa.Connection, oldest_update: int, now_ms: int) -> None:
    """Take groups out of the buffer whose policy is older than the oldest update allowed."""
    stale = connection.execute(
        sa.select(rollouts.c.claim_id, rollouts.c.group_no).where(
            rollouts.c.state == "buffered", rollouts.c.policy_update < oldest_update
        )
    ).all()
    for claim_id, group_no in stale:
        connection.execute(sa.update(rollouts).where(rollouts.c.claim_id == claim_id).values(state="stale"))
        lease_table.reopen(connection, group_no)
        for one in continuation.with_parts(connection, [claim_id]):
            settle(connection, one, False, now_ms)


def _group(connection: sa.Connection, row: Any) -> TrainingGroup:
    """A stored rollout as the learner needs it, with what it went on from."""
    lease = Lease.from_bytes(row["offer"])
    claim = RolloutClaim.from_bytes(open_envelope("rollout", row["envelope"]).payload)
    rewards = np.frombuffer(row["rewards"], dtype="<f4").tolist()
    told = continuation.chain(connection, row["continues"])
    samples = tuple(
        TrainingSample(
            tokens=b"".join(part.tokens for part in (*begun, sample)),
            logprobs=b"".join(part.logprobs for part in (*begun, sample)),
            reward=reward,
        )
        for *begun, sample, reward in zip(*(one.samples for one in told), claim.samples, rewards, strict=True)
    )
    earlier = tuple(
        Earlier(claim_id=one.claim_id, ends=tuple(len(prefix.tokens) // 4 for prefix in one.prefixes)) for one in told
    )
    return TrainingGroup(
        claim_id=row["claim_id"],
        prompt=lease.prompt,
        policy_update=row["policy_update"],
        samples=samples,
        earlier=earlier,
    )
