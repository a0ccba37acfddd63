"""Intake: from a node's signed bytes to an accepted, credited rollout, or to a rejection with a code.

Cheap checks come before costly ones, and each step has its own error:

1. size and form of the envelope, 2. signature, 3. the lease exists and is the signer's, 4. not answered before,
5. still open and in time, 6. not too stale, 7. the claim repeats the lease, 8. tokens and log-probabilities are
possible, 9. the reward, computed here from the tokens alone, where the task is built in. The operator's own rewards and
environments may hang or fail: they answer after acceptance (`coordinator.transactions.scoring`), and a node is paid for
acceptance.

- Steps 1 and 2 happen before the writer's transaction (`coordinator.transactions.checked_rollouts`), which decodes no
  envelope. For a request with several envelopes, or a large one, the leases are looked up first: an envelope that
  cannot be an answer to its lease is not decoded.
- Acceptance is one transaction: rollout, lease, group, Pending entry and the draw of its audit are stored together, or
  not at all. All checks that can refuse a rollout come before the first write: a failure after that is our own fault,
  and fails the whole request instead of rejecting anybody.
- The same rollout again is `already_accepted`, with the credit of the first time; nothing is counted twice.
- A rejection ends the lease and is stored with its code: there is no silent punishment. Its evidence goes to the node.
  If the budget does not cover a correct rollout, the lease is cancelled, and nobody is blamed. A rollout that is only
  too late ends its lease as no answer does: its fragments stay, and another node continues from them.
- A rollout for another's lease is refused without touching that lease.
"""

from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass
from math import isfinite
from typing import Any, Literal, NamedTuple

import sqlalchemy as sa

from coordinator.rules.lease_allowance import is_stale
from coordinator.rules.lifecycle import GroupState, RolloutState, is_for_learner
from coordinator.rules.prompt_refs import QUERY, PromptRef
from coordinator.store.rows import find_row
from coordinator.store.tables import (
    IS_OPEN,
    batches,
    fragments,
    groups,
    leases,
    nodes,
    rejections,
    rollouts,
    versions,
)
from coordinator.transactions import (
    admission,
    curriculum,
    escrow,
    evaluations,
    foresight,
    partial_rollouts,
    queries,
    reward_columns,
    turns,
)
from coordinator.transactions import leases as lease_table
from coordinator.transactions.checked_rollouts import CheckedRollout, LeaseHolder, Unreadable
from coordinator.transactions.leases import LeaseTerms, OpenLease
from coordinator.transactions.lottery import AuditTerms
from coordinator.transactions.partial_rollouts import SignedFragment, Told
from ledger.accounts import BUDGET
from ledger.entry import Pending, amount
from ledger.prepared import Prepared
from ledger.tables import balances_table
from protocol.breach import Breach, different
from protocol.errors import (
    BudgetExhausted,
    LeaseClosed,
    LeaseConflict,
    LeaseOfAnother,
    StaleVersion,
    SwarmError,
    UnknownLease,
)
from protocol.ids import ClaimId, LeaseId, NodeId
from protocol.tasks import Reward, Split
from protocol.work import evidence
from protocol.work.lease import OPEN, Lease, LeaseEvent
from protocol.work.messages import LeaseProgressReply, Verdict
from protocol.work.rollout import PolicyBounds, RolloutClaim, Tokens, check_claim, whole_tokens


@dataclass(frozen=True)
class Judge:
    """The rules by which answers are checked and scored in this round."""

    round_id: str
    terms: LeaseTerms
    bounds: PolicyBounds
    reward: Callable[[PromptRef, list[int]], Reward] | None
    """Returns the reward for a problem and a completion's tokens; None where a process computes it after acceptance."""
    audits: AuditTerms


class AnsweredLease(NamedTuple):
    """A lease, its group's problem, its node's allowance, its answer if there is one, and who else works on the group.

    `claim_id`, `tokens` and `credit_micros` are None if there is no answer yet.
    """

    lease_id: str
    group_no: int
    node_id: str
    continues: str | None
    state: str
    surplus: bool
    max_cost_micros: int
    offer: bytes
    expires_ms: int
    split: Split | Literal["query"]
    prompt: int
    group_state: str
    lease_allowance: int | None
    claim_id: str | None
    tokens: int | None
    credit_micros: int | None
    is_shared: bool
    has_told: bool
    """True if there are fragments of it."""


class ClaimBasis(NamedTuple):
    """The update of a version, the update that the learner has reached, and the budget that is left."""

    policy_update: int
    learner_update: int
    free_micros: int | None


@dataclass(frozen=True)
class _Sound:
    """A rollout that has passed every check and is not stored yet."""

    lease: Lease
    row: AnsweredLease
    is_extra: bool
    """True if the learner does not wait for it."""
    is_surplus: bool
    """True if nobody waits for it: it is only paid."""
    whole: Sequence[Tokens]
    rewards: dict[str, Any]
    pending: Pending
    told: Sequence[Told]
    stored: dict[str, Any]


# Built once: making a statement costs more than running it, and these run for every rollout. Values that can be read
# together are read by one statement: each costs a round trip to PostgreSQL, and more CPU time than the values in it.
_own = ("lease_id", "group_no", "node_id", "continues", "state", "surplus", "max_cost_micros", "offer", "expires_ms")
_other = leases.alias("other")
_lease = Prepared(
    sa.select(
        *(leases.c[name] for name in _own),
        *(groups.c.split, groups.c.prompt, groups.c.state.label("group_state"), nodes.c.lease_allowance),
        *(rollouts.c.claim_id, rollouts.c.tokens, rollouts.c.credit_micros),
        sa.exists()
        .where(_other.c.group_no == leases.c.group_no, _other.c.lease_id != leases.c.lease_id)
        .where(_other.c.ended_ms.is_(None))
        .label("is_shared"),
        sa.exists().where(fragments.c.lease_id == leases.c.lease_id).label("has_told"),
    )
    .join_from(leases, groups, groups.c.group_no == leases.c.group_no)
    .join(nodes, nodes.c.node_id == leases.c.node_id)
    .outerjoin(rollouts, rollouts.c.lease_id == leases.c.lease_id)
    .where(leases.c.lease_id == sa.bindparam("lease")),
    AnsweredLease,
)
_stands = Prepared(
    sa.select(
        versions.c.policy_update,
        sa.select(sa.func.coalesce(sa.func.max(batches.c.batch), 0)).scalar_subquery().label("learner_update"),
        sa.select(balances_table.c.micros)
        .where(balances_table.c.account == str(BUDGET))
        .scalar_subquery()
        .label("free_micros"),
    ).where(versions.c.version == sa.bindparam("version")),
    ClaimBasis,
)
_accepted = Prepared(sa.insert(rollouts))
_held = Prepared(
    sa.select(leases.c.lease_id, leases.c.group_no, leases.c.surplus).where(
        leases.c.node_id == sa.bindparam("node"), IS_OPEN
    ),
    OpenLease,
)


def receive_rollouts(
    connection: sa.Connection,
    sender: NodeId,
    answers: Sequence[CheckedRollout | Unreadable],
    *,
    judge: Judge,
    now_ms: int,
) -> tuple[Verdict, ...]:
    """Accept or reject the rollouts of one request, which have passed steps 1 and 2."""
    refused: dict[str, list[tuple[str, SwarmError]]] = {}
    verdicts = []
    for answer in answers:
        try:
            if isinstance(answer, Unreadable):
                raise answer.error
            checked = _check(connection, sender, answer.claim_id, answer.claim, judge, now_ms)
        except SwarmError as error:
            _end_rejected(connection, sender, answer.lease_id, error, judge, now_ms)
            refused.setdefault(error.code, []).append((answer.lease_id, error))
            verdicts.append(_rejected(answer, error))
        else:
            if isinstance(checked, _Sound):
                checked = _accept(connection, checked, answer.envelope, judge, now_ms)
            verdicts.append(checked)
    for each in refused.values():
        _count_rejections(connection, sender, each, now_ms)
    return tuple(verdicts)


def _rejected(answer: CheckedRollout | Unreadable, error: SwarmError) -> Verdict:
    """Return the verdict on a rollout that this error refuses, with the evidence."""
    if isinstance(answer, Unreadable):
        seen = answer.evidence
    else:
        named = {"lease_id": answer.lease_id, "claim_id": answer.claim_id}
        seen = evidence.build_evidence(error, envelope=answer.envelope, **named)
    lease_id = answer.lease_id
    return Verdict(lease_id=lease_id, outcome="rejected", code=error.code, message=str(error), evidence=seen)


def _check(
    connection: sa.Connection, node: NodeId, claim_id: ClaimId, claim: RolloutClaim, judge: Judge, now_ms: int
) -> _Sound | Verdict:
    """Do steps 3 to 9, which only read; return the earlier verdict if the lease was answered before."""
    row = _own_lease(connection, node, claim.lease_id)  # (3)
    if row.claim_id is not None:  # (4)
        if row.claim_id != claim_id:
            seen = different("claim", f"claim {row.claim_id}", f"claim {claim_id}")
            raise LeaseConflict("This lease was already answered, with another rollout.", breach=seen)
        return _verdict("already_accepted", claim.lease_id, row.tokens or 0, row.credit_micros or 0)
    if row.state not in OPEN or row.expires_ms <= now_ms:  # (5)
        raise LeaseClosed(
            "This lease has ended; its prompt went to another node.",
            hint="Answer within the lease's time.",
            breach=different("lease_id", f"open, before {row.expires_ms} ms", f"{row.state}, at {now_ms} ms"),
        )
    lease = Lease.from_bytes(row.offer)
    policy_update, learner_update, free_micros = _stands(connection, version=lease.version).single_row()
    bound = judge.terms.staleness
    is_extra = row.surplus or not is_for_learner(row.group_no)  # the learner does not wait for it
    late = is_stale(staleness=bound, policy_update=policy_update, learner_update=learner_update)
    if late and not is_extra:  # (6)
        raise _stale(lease.version, policy_update, learner_update, bound)
    is_surplus = row.surplus or not (
        is_extra or _has_place(connection, row, policy_update, learner_update, judge.terms)
    )
    is_extra = is_extra or is_surplus
    completions = check_claim(claim, lease, judge.round_id, judge.bounds)  # (7) (8)
    whole, source = whole_tokens(lease, completions), PromptRef(row.split, row.prompt)
    rewards = _rewards(whole, source, judge)  # (9)
    partials = [] if lease.turn_tokens_max else partial_rollouts.chain(connection, row.continues)
    pending = _worth(node, claim_id, lease, sum(len(item.tokens) for item in completions))
    owed = pending.amount_micros + sum(partial.pending.amount_micros for partial in partials)
    if (left := free_micros or 0) < owed:
        seen = different("credit", f"at most {left} micro-units", owed)
        raise BudgetExhausted("The round's budget does not cover this rollout.", breach=seen)
    stored = {"policy_update": policy_update, **rewards}
    return _Sound(lease, row, is_extra, is_surplus, whole, rewards, pending, partials, stored)


def _has_place(
    connection: sa.Connection, row: AnsweredLease, policy_update: int, learner_update: int, terms: LeaseTerms
) -> bool:
    """Return True if the learner has a place for the group of a lease; only a trial may have none."""
    counts = row.group_state != GroupState.TRIAL
    return counts or admission.has_room(connection, terms, policy_update, learner_update)


def _accept(connection: sa.Connection, sound: _Sound, envelope: bytes, judge: Judge, now_ms: int) -> Verdict:
    """Credit and store a rollout, draw its audit, and return the verdict."""
    lease, row, pending = sound.lease, sound.row, sound.pending
    partial_rollouts.credit(connection, pending, sound.told, now_ms)
    accepted = {
        "claim_id": pending.claim_id,
        "version": lease.version,
        "tokens": pending.tokens,
        "credit_micros": pending.amount_micros,
        **sound.stored,
        "envelope": envelope,
        "accepted_ms": now_ms,
    }
    _store(connection, sound, accepted, judge, now_ms)
    _remember(
        connection, lease, sound.whole, [] if sound.is_extra else reward_columns.scores(sound.rewards), judge.terms
    )
    _enter(connection, sound, judge, now_ms)
    if sound.is_extra:
        escrow.used(connection, [pending.claim_id], terms=judge.audits, now_ms=now_ms)
        if row.split == QUERY:
            credited = [pending, *(partial.pending for partial in sound.told)]
            queries.record_answer(connection, row.prompt, credited, now_ms)
        elif not is_for_learner(row.group_no):
            evaluations.record_group(connection, row.group_no, now_ms)
    return _verdict("accepted", lease.lease_id, pending.tokens, pending.amount_micros)


def _own_lease(connection: sa.Connection, node: NodeId, lease_id: str) -> AnsweredLease:
    """Return the row of a lease that was given to this node."""
    row = _lease(connection, lease=lease_id).first()
    if row is None:
        seen = different("lease_id", "one that was given out in this round", lease_id)
        raise UnknownLease("No such lease was given out in this round.", breach=seen)
    if row.node_id != node:
        seen = different("signer", "the node that the lease was given to", node)
        raise LeaseOfAnother("This lease belongs to another node.", breach=seen)
    return row


def _stale(version: int, policy_update: int, learner_update: int, bound: int) -> StaleVersion:
    """Build the error for a version that is too old."""
    return StaleVersion(
        f"Version {version} is {learner_update - policy_update} updates old; {bound} are allowed.",
        hint="Sample faster or take smaller leases.",
        breach=Breach(
            "version",
            f"a version of update {learner_update - bound} or later",
            f"version {version}, of update {policy_update}",
            tolerance=f"{bound} updates",
        ),
    )


def _rewards(whole: Sequence[Tokens], source: PromptRef, judge: Judge) -> dict[str, Any]:
    """Return the samples' rewards if the task is built in; else unknown ones, which are known later."""
    if judge.reward is None or source.split == QUERY:
        return reward_columns.unknown(len(whole))
    return reward_columns.stored([judge.reward(source, tokens.tolist()) for tokens in whole])


def _store(connection: sa.Connection, sound: _Sound, accepted: dict[str, Any], judge: Judge, now_ms: int) -> None:
    """Store a rollout for the learner; a surplus one is only paid.

    Surplus are a rollout whose group another node has answered, and a trial without a place, whose prompt is offered
    again.
    """
    lease, surplus = sound.row, sound.is_surplus
    lease_id = lease.lease_id
    place = {"lease_id": lease_id, "group_no": lease.group_no, "node_id": lease.node_id}
    _accepted(connection, state=str(_first_state(sound, judge)), **place, **accepted)
    lease_table.advance(connection, lease, LeaseEvent.ACCEPT, judge.terms, now_ms)
    if lease.has_told:
        partial_rollouts.forget(connection, [lease_id])
    if not surplus:
        if sound.lease.turn_tokens_max and not sound.lease.prefixes:
            turns.abandon(connection, lease.group_no, but=accepted["claim_id"])
        lease_table.answered(connection, lease_id, lease.group_no, is_shared=lease.is_shared)
    elif not lease.surplus:
        lease_table.reopen(connection, lease.group_no)


def _first_state(sound: _Sound, judge: Judge) -> RolloutState:
    """Return the state in which a rollout is stored."""
    if sound.is_surplus:
        return RolloutState.SURPLUS
    if sound.row.split == QUERY:
        return RolloutState.SERVED
    if judge.reward is None:
        return RolloutState.UNSCORED
    return RolloutState.BUFFERED if is_for_learner(sound.row.group_no) else RolloutState.MEASURED


def _remember(
    connection: sa.Connection, lease: Lease, whole: Sequence[Tokens], scores: Sequence[float], terms: LeaseTerms
) -> None:
    """Record the lengths and scores of a prompt's group for the choice of prompts; later rewards are recorded later."""
    if terms.lookahead:
        foresight.record_lengths(connection, lease.prompt, max(len(sample) for sample in whole))
    if terms.selection.chooses and all(map(isfinite, scores)):
        curriculum.record_outcome(connection, lease.prompt, scores)


def _enter(connection: sa.Connection, sound: _Sound, judge: Judge, now_ms: int) -> None:
    """Put a rollout, and the parts that it continued, into escrow."""
    common: dict[str, Any] = {"terms": judge.audits, "now_ms": now_ms}
    own, counts = sound.pending, int(not sound.lease.turn_tokens_max or not sound.lease.prefixes)  # the first turn does
    escrow.admit(
        connection, own.node_id, own.claim_id, sound.lease, worth_micros=own.amount_micros, groups=counts, **common
    )
    for partial in sound.told:
        worth = partial.pending.amount_micros
        escrow.admit(
            connection, partial.node_id, partial.claim_id, partial.lease, worth_micros=worth, groups=0, **common
        )
    escrow.void_claims_of_banned_owners(
        connection, [partial.node_id for partial in sound.told], terms=judge.audits, now_ms=now_ms
    )


def take_progress(
    connection: sa.Connection,
    node: NodeId,
    held_ids: Sequence[str],
    words: Sequence[SignedFragment],
    *,
    judge: Judge,
    now_ms: int,
) -> LeaseProgressReply:
    """Record which leases a node holds, and store its fragments for the node that may have to continue.

    `words` has one fragment of each lease: to check it, the earlier ones are read again.
    """
    open_ids = set()
    for lease in _held(connection, node=node):
        if lease.surplus:
            lease_table.cancel(connection, lease, judge.terms, now_ms)
        else:
            open_ids.add(lease.lease_id)
    for lease_id in open_ids.intersection(held_ids):
        lease_table.move(connection, lease_id, LeaseEvent.HOLD, judge.terms, now_ms)
    taken = []
    for word in words:
        if word.fragment.lease_id not in open_ids:
            continue
        with suppress(SwarmError):
            lease_id = partial_rollouts.record_fragment(
                connection, node, word, round_id=judge.round_id, bounds=judge.bounds
            )
            lease_table.move(connection, lease_id, LeaseEvent.BEGIN, judge.terms, now_ms)
            taken.append(lease_id)
    return LeaseProgressReply(gone=tuple(sorted(set(held_ids) - open_ids)), taken=tuple(taken))


def owners_of(connection: sa.Connection, named: Collection[str]) -> dict[str, LeaseHolder]:
    """Return the node that each of these leases was given to, and its offer."""
    columns = (leases.c.lease_id, leases.c.node_id, leases.c.offer)
    rows = connection.execute(sa.select(*columns).where(leases.c.lease_id.in_(named)))
    return {row.lease_id: LeaseHolder(row.node_id, bytes(row.offer)) for row in rows}


def _worth(node: NodeId, claim_id: ClaimId, lease: Lease, tokens: int) -> Pending:
    """Return the pending credit of a claim: `tokens`, and those paid for the context, at its lease's price."""
    tokens += lease.context_tokens_paid
    return Pending(
        claim_id=claim_id,
        lease_id=LeaseId(lease.lease_id),
        node_id=node,
        tokens=tokens,
        price_micros_per_mtok=lease.price_micros_per_mtok,
        amount_micros=amount(tokens, lease.price_micros_per_mtok),
    )


def _count_rejections(
    connection: sa.Connection, node: NodeId, refused: Sequence[tuple[str, SwarmError]], now_ms: int
) -> None:
    """Store how many rollouts of a request were rejected with one code, and the last of them."""
    lease_id, error = refused[-1]
    said = str(error)[:500].replace("\0", "")  # it may quote the sender, and PostgreSQL keeps no NUL
    last = {"last_lease_id": lease_id, "last_message": said, "last_ms": now_ms}
    which = (rejections.c.node_id == node) & (rejections.c.code == error.code)
    more = rejections.c.count + len(refused)
    if not connection.execute(sa.update(rejections).where(which).values(count=more, **last)).rowcount:
        values = {"node_id": node, "code": error.code, "count": len(refused), **last}
        connection.execute(sa.insert(rejections).values(**values))


def _end_rejected(
    connection: sa.Connection, node: NodeId, lease_id: str, error: SwarmError, judge: Judge, now_ms: int
) -> None:
    """End the lease of a rejected rollout, if it is the sender's and still open."""
    if not lease_id:
        return
    said = str(error)[:500].replace("\0", "")
    mine = (leases.c.lease_id == lease_id) & (leases.c.node_id == node)
    columns = (leases.c.lease_id, leases.c.group_no, leases.c.surplus)
    row = find_row(connection, sa.select(*columns).where(mine), OpenLease)
    ours = isinstance(error, BudgetExhausted)  # the node has done its work
    late = isinstance(error, LeaseClosed)  # it costs no more than no answer, if the lease is still in the table
    event = LeaseEvent.CANCEL if ours else LeaseEvent.EXPIRE if late else LeaseEvent.REJECT
    if row is not None and lease_table.end_unanswered(connection, row, event, judge.terms, now_ms):
        connection.execute(sa.update(leases).where(mine).values(code=error.code, said=said))


def _verdict(
    outcome: Literal["accepted", "already_accepted"], lease_id: str, tokens: int, credit_micros: int
) -> Verdict:
    return Verdict(lease_id=lease_id, outcome=outcome, tokens=tokens, credit_micros=credit_micros)
