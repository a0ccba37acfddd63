"""Intake: from a node's signed bytes to an accepted, credited rollout, or a rejection with a name.

Cheap before costly, and each step has its own error:

1. size and form of the envelope, 2. signature, 3. the lease exists and is the signer's, 4. not answered before,
5. still open and in time, 6. not too stale, 7. the claim repeats the lease, 8. tokens and log-probabilities are
possible, 9. the reward, computed here from the tokens alone, where the task is built in. An episode is played again in
step 8, and step 9 is what its environment says. The operator's own rewards may hang or fail: these are computed after
acceptance (`coordinator.work.scoring`), which is what a node is paid for.

- Acceptance is one transaction: rollout, lease, group, Pending entry and the draw of its audit are stored together, or
  not at all.
- The same rollout again is `already_accepted`, with what it earned the first time; nothing is counted twice.
- A rejection ends the lease and is stored with its code: there is no silent punishment.
- A rollout for another's lease is refused without touching that lease.
"""

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from math import isfinite
from typing import Any, Literal

import sqlalchemy as sa

from coordinator.audit.lottery import AuditTerms
from coordinator.money import escrow
from coordinator.store.tables import IS_OPEN, leases, rejections, rollouts, versions
from coordinator.work import continuation, curriculum, evaluations, foresight, marks, prompts
from coordinator.work import leases as lease_table
from coordinator.work.continuation import Told
from coordinator.work.dispatch import is_stale
from coordinator.work.leases import Terms
from coordinator.work.prompts import Source
from ledger import store
from ledger.accounts import BUDGET
from ledger.entry import Pending, amount
from ledger.prepared import Prepared
from protocol import chunks
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
from protocol.lease import OPEN, Event, Lease
from protocol.messages import LeaseProgress, LeaseProgressReply, Verdict
from protocol.rollout import Completion, PolicyBounds, RolloutClaim, Tokens, check_claim, whole_tokens
from protocol.signing import open_envelope
from protocol.tasks import Reward


@dataclass(frozen=True)
class Judge:
    """How answers are checked and scored in this round."""

    round_id: str
    terms: Terms
    bounds: PolicyBounds
    reward: Callable[[Source, list[int]], Reward] | None
    """Of a problem and the tokens of a completion; None where that takes a process, after acceptance."""
    audits: AuditTerms


# Built once: making a statement costs more than running it, and these run for every rollout.
_lease = Prepared(sa.select(leases).where(leases.c.lease_id == sa.bindparam("lease")))
_answer = Prepared(
    sa.select(rollouts.c.claim_id, rollouts.c.tokens, rollouts.c.credit_micros).where(
        rollouts.c.lease_id == sa.bindparam("lease")
    )
)
_accepted = Prepared(sa.insert(rollouts))
_policy_update = Prepared(sa.select(versions.c.policy_update).where(versions.c.version == sa.bindparam("version")))


def take(connection: sa.Connection, sender: NodeId, envelope: bytes, *, judge: Judge, now_ms: int) -> Verdict:
    """Accept or reject one submitted rollout."""
    lease_id = ""
    try:
        signed = open_envelope("rollout", envelope)  # (1) (2)
        claim = RolloutClaim.from_bytes(signed.payload)
        lease_id = claim.lease_id
        if signed.signer != sender:
            raise LeaseOfAnother("The rollout is signed by another node than the one that sends it.")
        claim_id = ClaimId(chunks.digest(signed.payload))
        return _accept(connection, sender, claim_id, claim, envelope, judge, now_ms)
    except SwarmError as error:
        _reject(connection, sender, lease_id, error, judge, now_ms)
        return Verdict(lease_id=lease_id, outcome="rejected", code=error.code, message=str(error))


def _accept(
    connection: sa.Connection,
    node: NodeId,
    claim_id: ClaimId,
    claim: RolloutClaim,
    envelope: bytes,
    judge: Judge,
    now_ms: int,
) -> Verdict:
    row = _lease(connection, lease=claim.lease_id).first()
    if row is None:
        raise UnknownLease("No such lease was given out in this round.")
    if row.node_id != node:  # (3)
        raise LeaseOfAnother("This lease belongs to another node.")
    before = _answer(connection, lease=claim.lease_id).first()
    if before is not None:  # (4)
        if before.claim_id != claim_id:
            raise LeaseConflict("This lease was already answered, with another rollout.")
        return _verdict("already_accepted", claim.lease_id, before.tokens, before.credit_micros)
    if row.state not in OPEN or row.expires_ms <= now_ms:  # (5)
        raise LeaseClosed(
            "This lease has ended; its prompt went to another node.", hint="Answer within the lease's time."
        )
    lease = Lease.from_bytes(row.offer)
    policy_update = _policy_update(connection, version=lease.version).scalar_one()
    learner_update = lease_table.latest_batch(connection)
    bound = judge.terms.staleness
    is_extra = row.surplus or row.group_no < 0  # the learner does not wait for it
    late = is_stale(staleness=bound, policy_update=policy_update, learner_update=learner_update)
    if late and not is_extra:  # (6)
        raise StaleVersion(
            f"Version {lease.version} is {learner_update - policy_update} updates old; {bound} are allowed.",
            hint="Sample faster or take smaller leases.",
        )
    completions = check_claim(claim, lease, judge.round_id, judge.bounds)  # (7) (8)
    whole, source = whole_tokens(lease, completions), prompts.source_of(connection, row.group_no)
    rewards = _rewards(completions, whole, source, judge)  # (9)
    tokens = sum(item.paid_tokens for item in completions)
    told = continuation.chain(connection, row.continues)
    credit = _credit(connection, node, claim_id, lease, tokens, told, now_ms)
    accepted = {
        "claim_id": claim_id,
        "version": lease.version,
        "policy_update": policy_update,
        "tokens": tokens,
        "credit_micros": credit,
        "sampled": b"".join(item.sampled.tobytes() for item in completions) if lease.episode else None,
        **rewards,
        "envelope": envelope,
        "accepted_ms": now_ms,
    }
    _store(connection, row, accepted, judge, now_ms)
    _remember(connection, lease, whole, [] if is_extra else marks.scores(rewards), judge.terms)
    _enter(connection, node, claim_id, lease, credit, told, judge, now_ms)
    if is_extra:
        escrow.used(connection, [claim_id], terms=judge.audits, now_ms=now_ms)
    if row.group_no < 0:
        evaluations.note(connection, row.group_no, now_ms)
    return _verdict("accepted", claim.lease_id, tokens, credit)


def _rewards(
    completions: Sequence[Completion], whole: Sequence[Tokens], source: Source, judge: Judge
) -> dict[str, Any]:
    """What each sample earns: what its episode came to, or what the task says of its tokens, if that is built in."""
    rewards = []
    for said, tokens in zip(completions, whole, strict=True):
        if said.transcript:
            rewards.append(said.transcript.reward)
        elif judge.reward:
            rewards.append(judge.reward(source, tokens.tolist()))
        else:
            return marks.unknown(len(whole))  # `coordinator.work.scoring` has them judged
    return marks.stored(rewards)


def _store(connection: sa.Connection, lease: Any, accepted: dict[str, Any], judge: Judge, now_ms: int) -> None:
    """Keep a rollout for the learner; one whose group was answered by another before is only paid."""
    surplus, lease_id = lease.surplus, lease.lease_id
    place = {"lease_id": lease_id, "group_no": lease.group_no, "node_id": lease.node_id}
    scored = evaluations.MEASURED if lease.group_no < 0 else "buffered"
    state = "surplus" if surplus else scored if judge.reward else marks.UNSCORED
    _accepted(connection, state=state, **place, **accepted)
    lease_table.move(connection, lease_id, Event.ACCEPT, judge.terms, now_ms)
    continuation.forget(connection, [lease_id])
    if not surplus:
        lease_table.answered(connection, lease_id, lease.group_no)


def _remember(
    connection: sa.Connection, lease: Lease, whole: Sequence[Tokens], scores: Sequence[float], terms: Terms
) -> None:
    """How the group of a prompt came out, for whoever chooses among prompts; rewards that come later say it then."""
    if terms.lookahead:
        foresight.note(connection, lease.prompt, max(len(sample) for sample in whole))
    if terms.selection.chooses and all(map(isfinite, scores)):
        curriculum.note(connection, lease.prompt, scores)


def _enter(
    connection: sa.Connection,
    node: NodeId,
    claim_id: ClaimId,
    lease: Lease,
    credit_micros: int,
    told: Sequence[Told],
    judge: Judge,
    now_ms: int,
) -> None:
    """Into escrow with a rollout, and with the parts that it went on from."""
    common: dict[str, Any] = {"terms": judge.audits, "now_ms": now_ms}
    escrow.admit(connection, node, claim_id, lease, worth_micros=credit_micros, **common)
    for one in told:
        worth = one.pending.amount_micros
        escrow.admit(connection, one.node_id, one.claim_id, one.lease, worth_micros=worth, groups=0, **common)
    escrow.bar(connection, [one.node_id for one in told], terms=judge.audits, now_ms=now_ms)


def take_progress(
    connection: sa.Connection, node: NodeId, message: LeaseProgress, *, judge: Judge, now_ms: int
) -> LeaseProgressReply:
    """Note what a node says of the leases that it has, and keep what it has sampled for whoever may have to go on.

    Of each lease one fragment is taken at a time: to check it, those before it are read again.
    """
    held = sa.select(leases.c.lease_id, leases.c.surplus).where(leases.c.node_id == node, IS_OPEN)
    open_ids = set()
    for lease_id, surplus in connection.execute(held).all():
        if surplus:
            lease_table.move(connection, lease_id, Event.CANCEL, judge.terms, now_ms)
        else:
            open_ids.add(lease_id)
    for lease_id in open_ids.intersection(message.held):
        lease_table.move(connection, lease_id, Event.HOLD, judge.terms, now_ms)
    words: dict[str, continuation.Word] = {}
    for envelope in message.fragments:
        with suppress(SwarmError):
            word = continuation.read(node, envelope)
            words.setdefault(word.fragment.lease_id, word)
    taken = []
    for word in words.values():
        with suppress(SwarmError):
            lease_id = continuation.take(connection, node, word, round_id=judge.round_id, bounds=judge.bounds)
            lease_table.move(connection, lease_id, Event.BEGIN, judge.terms, now_ms)
            taken.append(lease_id)
    return LeaseProgressReply(gone=tuple(sorted(set(message.held) - open_ids)), taken=tuple(taken))


def _credit(
    connection: sa.Connection,
    node: NodeId,
    claim_id: ClaimId,
    lease: Lease,
    tokens: int,
    told: Sequence[Told],
    now_ms: int,
) -> int:
    """Put what the tokens are worth on the node's pending account, and on those of whom it went on from."""
    credit = amount(tokens, lease.price_micros_per_mtok)
    pending = Pending(
        claim_id=claim_id,
        lease_id=LeaseId(lease.lease_id),
        node_id=node,
        tokens=tokens,
        price_micros_per_mtok=lease.price_micros_per_mtok,
        amount_micros=credit,
    )
    owed = credit + sum(one.pending.amount_micros for one in told)
    if store.balance(connection, BUDGET) < owed:
        raise BudgetExhausted("The round's budget does not cover this rollout.")
    store.append(connection, pending, now_ms)
    continuation.credit(connection, claim_id, told, now_ms)
    return credit


def _reject(
    connection: sa.Connection, node: NodeId, lease_id: str, error: SwarmError, judge: Judge, now_ms: int
) -> None:
    """Store the rejection, and end the lease if it is the sender's and still open."""
    said = str(error)[:500].replace("\0", "")  # it may quote the sender, and PostgreSQL keeps no NUL
    last = {"last_lease_id": lease_id, "last_message": said, "last_ms": now_ms}
    here = (rejections.c.node_id == node) & (rejections.c.code == error.code)
    if not connection.execute(sa.update(rejections).where(here).values(count=rejections.c.count + 1, **last)).rowcount:
        connection.execute(sa.insert(rejections).values(node_id=node, code=error.code, count=1, **last))
    mine = (leases.c.lease_id == lease_id) & (leases.c.node_id == node)
    row = connection.execute(sa.select(leases.c.lease_id, leases.c.group_no, leases.c.surplus).where(mine)).first()
    if row is not None and lease_table.end_unanswered(connection, row, Event.REJECT, judge.terms, now_ms):
        connection.execute(sa.update(leases).where(mine).values(code=error.code, said=str(error)[:500]))


def _verdict(
    outcome: Literal["accepted", "already_accepted"], lease_id: str, tokens: int, credit_micros: int
) -> Verdict:
    return Verdict(lease_id=lease_id, outcome=outcome, tokens=tokens, credit_micros=credit_micros)
