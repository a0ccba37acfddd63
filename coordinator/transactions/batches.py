"""Batches: the accepted groups that the learner trains on, and what became of them, as effects.

- Batch n leads to update n. It is formed once and stored: asking for it again, after a crash, gives the same groups.
  The root of its groups, rewards included, is an entry of the ledger in the same transaction.
- It has the groups of the oldest policy versions first. Where many owners are at work, no owner has more than a set
  share of it; a group counts for everybody who worked on it. If nobody works any more and no place is free, groups
  beyond a share are dropped to make place for others. If no usable group came for as long as a lease lasts, shares do
  not apply.
- With `selection.refill`, groups whose samples all earned the same are replaced by others, as nothing can be learned
  from them: at most `refill` times a batch's size for each batch so far. They are paid. If no usable group came for as
  long as a lease lasts, they stay.
- A group past the staleness bound never enters a batch. It is marked stale, and one that is dropped for its owner's
  share is marked surplus: the prompt is offered again, and the nodes, which worked in time, are paid.
- A report moves the staleness bound of new leases, where it adapts (`coordinator.transactions.staleness_bound`).
- While a retraction is completed, no batch is formed (`hold`): its result must have been trained on the newest one.
  The hold ends by itself if nobody prolongs it.
- The learner reports that the claims of its batch are used, and which of them are suspect: their claimed
  log-probabilities are not those of the tokens. `coordinator.transactions.escrow` decides about them.
"""

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import sqlalchemy as sa

from coordinator.rules.lifecycle import GroupState, RolloutState
from coordinator.store.facts import Fact, get_fact, set_fact
from coordinator.store.rows import read_rows
from coordinator.store.tables import batches, groups, is_for_training, leases, nodes, parts, rollouts
from coordinator.transactions import (
    admission,
    escrow,
    newcomers,
    partial_rollouts,
    reward_columns,
    staleness_bound,
    standings,
    turns,
)
from coordinator.transactions import leases as lease_table
from coordinator.transactions.leases import LeaseTerms
from coordinator.transactions.lottery import AuditTerms
from coordinator.transactions.rollouts import move
from coordinator.transactions.turns import WholeSample
from ledger import store
from ledger.entry import FormedBatch
from ledger.training import groups_root
from protocol.errors import OutOfOrder
from protocol.wire.signing import open_envelope
from protocol.work.learning import Earlier, TrainingBatch, TrainingGroup, TrainingSample, UpdateReport
from protocol.work.lease import Lease
from protocol.work.rollout import RolloutClaim

SET_ASIDE = Fact("set_aside", 0)
"""The fact with the number of rollouts that were replaced by others, since all their rewards are equal."""


HELD = Fact("batches_held_until_ms", 0)
"""The fact with the time until which no batch is formed."""


class GroupOfClaim(NamedTuple):
    """A claim, and its group."""

    claim_id: str
    group_no: int


class BufferedGroup(NamedTuple):
    """A group that waits for a batch."""

    claim_id: str
    group_no: int
    policy_update: int
    owner: str


class StoredRollout(NamedTuple):
    """A rollout as it was accepted, and its lease."""

    claim_id: str
    lease_id: str
    policy_update: int
    rewards: bytes
    marks: Mapping[str, Any]
    envelope: bytes
    offer: bytes
    continues: str | None

    @classmethod
    def from_mapping(cls, row: Mapping[str, Any]) -> "StoredRollout":
        """Return the rollout in a row that has more columns."""
        return cls(**{name: row[name] for name in cls._fields})


class WholeGroup(NamedTuple):
    """The samples of a rollout with what it continued, and the claims of earlier nodes or turns."""

    samples: list[WholeSample]
    earlier: tuple[Earlier, ...]


class BatchChoice(NamedTuple):
    """The groups of a batch, and those that the share of their owners excluded."""

    chosen: list[BufferedGroup]
    beyond: list[BufferedGroup]


def hold(connection: sa.Connection, for_s: float, now_ms: int) -> int:
    """Form no batch for some seconds; return the number of the newest."""
    set_fact(connection, HELD, now_ms + int(1000 * for_s))
    return lease_table.latest_batch(connection)


def release(connection: sa.Connection) -> None:
    """Form batches again."""
    set_fact(connection, HELD, 0)


def get(
    connection: sa.Connection, number: int, *, terms: LeaseTerms, audits: AuditTerms, now_ms: int
) -> TrainingBatch | None:
    """Return the batch that leads to update `number`, formed now if it can be; None while groups are missing."""
    newest = lease_table.latest_batch(connection)
    if number > newest + 1 or number < 1:
        raise OutOfOrder(f"Batch {number} does not follow batch {newest}.")
    is_new = number == newest + 1
    if is_new and (get_fact(connection, HELD) > now_ms or not _form(connection, number, terms, audits, now_ms)):
        return None
    chosen = groups_of(connection, number)
    if is_new:
        root = groups_root(each.to_bytes() for each in chosen)
        store.append(connection, FormedBatch(number=number, groups=len(chosen), groups_root=root), now_ms)
    return TrainingBatch(
        number=number,
        groups=chosen,
        credit_micros=_credit_micros(connection, number),
        rewards=_reward_figures(connection, number),
    )


def groups_of(connection: sa.Connection, number: int) -> tuple[TrainingGroup, ...]:
    """Return the groups of a batch that was formed."""
    columns = [leases.c[name] if name in ("offer", "continues") else rollouts.c[name] for name in StoredRollout._fields]
    chosen = (
        sa.select(*columns)
        .join_from(rollouts, leases, rollouts.c.lease_id == leases.c.lease_id)
        .where(rollouts.c.batch == number)
        .order_by(rollouts.c.group_no)
    )
    return tuple(group(connection, row) for row in read_rows(connection, chosen, StoredRollout))


def report(
    connection: sa.Connection,
    message: UpdateReport,
    *,
    audits: AuditTerms,
    adapts: staleness_bound.StalenessRules | None = None,
    now_ms: int,
) -> bool:
    """Record that a batch was trained on, so that its claims are used; return False if that was reported before."""
    row = connection.execute(sa.select(batches.c.reported_ms).where(batches.c.batch == message.number)).first()
    if row is None:
        raise OutOfOrder(f"Batch {message.number} was never formed.")
    if row[0] is not None:
        return False
    in_batch = connection.execute(sa.select(rollouts.c.claim_id).where(rollouts.c.batch == message.number)).scalars()
    used = list(in_batch)
    escrow.used(connection, used, suspects=message.mismatched, terms=audits, now_ms=now_ms)
    metrics = dict(message.metrics)
    if adapts:
        metrics[staleness_bound.IN_FORCE] = staleness_bound.follow(connection, message.number, metrics, adapts)
    connection.execute(
        sa.update(batches)
        .where(batches.c.batch == message.number)
        .values(reported_ms=now_ms, idle_s=message.idle_s, busy_s=message.busy_s, metrics=metrics)
    )
    return True


def release_leftovers(connection: sa.Connection, *, audits: AuditTerms, now_ms: int) -> int:
    """Count accepted rollouts that are not needed any more as used, at the end of the round; return their number."""
    left = [row.claim_id for row in move(connection, sa.true(), RolloutState.UNUSED)]
    escrow.used(connection, left, terms=audits, now_ms=now_ms)
    return len(left)


def _form(connection: sa.Connection, number: int, terms: LeaseTerms, audits: AuditTerms, now_ms: int) -> bool:
    """Drop the groups past the bound, and form a batch of others; return False if there are too few."""
    learner_update, size = number - 1, terms.groups_per_update
    _drop_stale(connection, learner_update - terms.staleness, audits, now_ms)
    _set_aside(connection, number, terms, audits, now_ms)
    proven_only = newcomers.is_fresh(get_fact(connection, newcomers.OTHERS), terms, now_ms)
    most = standings.share_of(connection, size, terms.max_owner_share, proven_only=proven_only)
    chosen, beyond = _choose(connection, size, most)
    if len(chosen) < size and beyond and lease_table.is_held_up(connection, terms, now_ms):
        chosen, beyond = _choose(connection, size, size)
    if len(chosen) < size:
        lacking = size - len(chosen) - admission.room(connection, terms)
        if lacking > 0 and not _is_under_way(connection):
            _drop(
                connection,
                [GroupOfClaim(row.claim_id, row.group_no) for row in beyond[-lacking:]],
                RolloutState.SURPLUS,
                audits,
                now_ms,
            )
        return False
    for row in chosen:
        move(connection, rollouts.c.claim_id == row.claim_id, RolloutState.BATCHED, batch=number)
        lease_table.set_group(connection, row.group_no, GroupState.TRAINED)
    oldest = learner_update - min(row.policy_update for row in chosen)
    connection.execute(sa.insert(batches).values(batch=number, formed_ms=now_ms, max_staleness=oldest))
    return True


def _choose(connection: sa.Connection, size: int, most: int) -> BatchChoice:
    """Return the oldest groups, at most `most` of each owner, and those that this excluded, in the same order."""
    waiting = (
        sa.select(rollouts.c.claim_id, rollouts.c.group_no, rollouts.c.policy_update, nodes.c.owner)
        .join_from(rollouts, nodes, nodes.c.node_id == rollouts.c.node_id)
        .where(rollouts.c.state == RolloutState.BUFFERED.value)
        .order_by(rollouts.c.policy_update, rollouts.c.accepted_ms, rollouts.c.group_no)
    )
    began = _beginners(connection)
    chosen, beyond, of_owner = list[BufferedGroup](), list[BufferedGroup](), Counter[str]()
    for row in read_rows(connection, waiting, BufferedGroup):
        everybody = {row.owner, *began[row.claim_id]}
        if any(of_owner[owner] >= most for owner in everybody):
            beyond.append(row)
        elif len(chosen) < size:
            of_owner.update(everybody)
            chosen.append(row)
    return BatchChoice(chosen, beyond)


def _beginners(connection: sa.Connection) -> dict[str, set[str]]:
    """Return, for each group that waits, the owners whose nodes began it and left it to others."""
    parts_waiting = (
        sa.select(parts.c.whole, nodes.c.owner)
        .join_from(rollouts, parts, parts.c.whole == rollouts.c.claim_id)
        .join(nodes, nodes.c.node_id == parts.c.node_id)
        .where(rollouts.c.state == RolloutState.BUFFERED.value)
    )
    beginners: dict[str, set[str]] = defaultdict(set)
    for whole, owner in connection.execute(parts_waiting):
        beginners[whole].add(owner)
    return beginners


def _is_under_way(connection: sa.Connection) -> bool:
    """Return True if a node that is no newcomer works on a group for the learner, or a group waits for its rewards."""
    leased = sa.select(groups.c.group_no).where(
        groups.c.state.in_((GroupState.LEASED.value, GroupState.TURN.value)), is_for_training(groups.c.group_no)
    )
    unscored = sa.select(rollouts.c.claim_id).where(rollouts.c.state == RolloutState.UNSCORED.value)
    return any(connection.execute(query.limit(1)).first() for query in (leased, unscored))


def _credit_micros(connection: sa.Connection, number: int) -> int:
    """Return the micro-units credited for the groups of a batch, parts included."""
    wholes = sa.select(rollouts.c.claim_id).where(rollouts.c.batch == number)
    credited = (
        sa.select(sa.func.sum(rollouts.c.credit_micros)).where(rollouts.c.batch == number),
        sa.select(sa.func.sum(parts.c.credit_micros)).where(parts.c.whole.in_(wholes)),
    )
    return sum(int(connection.execute(query).scalar() or 0) for query in credited)


def _reward_figures(connection: sa.Connection, number: int) -> dict[str, float]:
    """Return figures of the rewards in a batch that its groups do not have."""
    query = sa.select(rollouts.c.rewards, rollouts.c.marks).where(rollouts.c.batch == number)
    rows = connection.execute(query.order_by(rollouts.c.group_no)).mappings()
    return reward_columns.figures([dict(row) for row in rows])


def _set_aside(connection: sa.Connection, number: int, terms: LeaseTerms, audits: AuditTerms, now_ms: int) -> None:
    """Remove groups whose samples all earned the same from the buffer, as many as others may replace."""
    done = get_fact(connection, SET_ASIDE) if terms.selection.refill else 0
    left = int(terms.selection.refill * terms.groups_per_update * number) - done
    if left <= 0 or lease_table.is_held_up(connection, terms, now_ms):
        return
    columns = (rollouts.c.claim_id, rollouts.c.group_no, rollouts.c.rewards)
    waiting = (
        sa.select(*columns).where(rollouts.c.state == RolloutState.BUFFERED.value).order_by(rollouts.c.accepted_ms)
    )
    alike = [row for row in connection.execute(waiting).mappings() if len(set(reward_columns.scores(dict(row)))) == 1][
        :left
    ]
    for row in alike:
        move(connection, rollouts.c.claim_id == row["claim_id"], RolloutState.ALIKE)
        lease_table.set_group(connection, row["group_no"], GroupState.TRAINED)
    if alike:
        set_fact(connection, SET_ASIDE, done + len(alike))
        escrow.used(connection, [row["claim_id"] for row in alike], terms=audits, now_ms=now_ms)


def _drop_stale(connection: sa.Connection, oldest_update: int, audits: AuditTerms, now_ms: int) -> None:
    """Remove the groups from the buffer whose policy is older than the oldest update allowed."""
    past = (rollouts.c.state == RolloutState.BUFFERED.value) & (rollouts.c.policy_update < oldest_update)
    stale = read_rows(connection, sa.select(rollouts.c.claim_id, rollouts.c.group_no).where(past), GroupOfClaim)
    _drop(connection, stale, RolloutState.STALE, audits, now_ms)


def _drop(
    connection: sa.Connection, rows: Sequence[GroupOfClaim], state: RolloutState, audits: AuditTerms, now_ms: int
) -> None:
    """Remove groups from the buffer, and offer their prompts again."""
    for row in rows:
        move(connection, rollouts.c.claim_id == row.claim_id, state)
        lease_table.reopen(connection, row.group_no)
    escrow.used(connection, [row.claim_id for row in rows], terms=audits, now_ms=now_ms)


def group(connection: sa.Connection, row: StoredRollout) -> TrainingGroup:
    """Return a stored rollout in the form that the learner reads, with the turns or parts that it continued."""
    lease = Lease.from_bytes(row.offer)
    rewards = np.frombuffer(row.rewards, dtype="<f4").tolist()
    lessons = reward_columns.learned(row.marks, len(rewards))
    wholes, earlier = whole_samples(connection, row)
    samples = tuple(
        TrainingSample(tokens=tokens, logprobs=logprobs, reward=reward, sampled=sampled, weight=weight, skip=skip)
        for (tokens, logprobs, sampled), reward, (weight, skip) in zip(wholes, rewards, lessons, strict=True)
    )
    return TrainingGroup(
        claim_id=row.claim_id,
        prompt=lease.prompt,
        policy_update=row.policy_update,
        samples=samples,
        earlier=earlier,
    )


def whole_samples(connection: sa.Connection, row: StoredRollout) -> WholeGroup:
    """Return the samples of a stored rollout with what it continued, and the claims of earlier nodes or turns."""
    is_turn = Lease.from_bytes(row.offer).turn_tokens_max > 0
    return _of_turns(connection, row) if is_turn else _of_parts(connection, row)


def _of_turns(connection: sa.Connection, row: StoredRollout) -> WholeGroup:
    """Return the samples of episodes, and the claims of the turns before the last."""
    played = turns.chain(connection, row.lease_id)
    earlier = tuple(Earlier(claim_id=turn.claim_id, ends=turn.ends) for turn in played[:-1])
    return WholeGroup(turns.whole_samples(played), earlier)


def _of_parts(connection: sa.Connection, row: StoredRollout) -> WholeGroup:
    """Return the samples of completions, and the claims of the nodes that began them."""
    claim = RolloutClaim.from_bytes(open_envelope("rollout", row.envelope).payload)
    partials = partial_rollouts.chain(connection, row.continues)
    earlier = tuple(
        Earlier(claim_id=partial.claim_id, ends=tuple(len(prefix.tokens) // 4 for prefix in partial.prefixes))
        for partial in partials
    )
    wholes = [
        WholeSample(b"".join(part.tokens for part in parts_of), b"".join(part.logprobs for part in parts_of), b"")
        for parts_of in zip(*(partial.samples for partial in partials), claim.samples, strict=True)
    ]
    return WholeGroup(wholes, earlier)
