"""Scoring: accepted rollouts that wait for their rewards or their environment, and their later states, as effects.

    unscored ──rewards──▶ buffered
            ├─ an environment goes on ─▶ turn: the next turn is offered (`coordinator.transactions.turns`)
            └─ given up ─▶ verifier_error: paid as if used, never trained on, its prompt is not offered again

- A node is paid for its tokens, so acceptance and credit do not wait for a reward. Until it is known, the rollout is in
  no batch; after any crash it still waits in the store.
- A second result changes nothing: the state is compared and set in one statement.
"""

import logging
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import sqlalchemy as sa

from coordinator.rules.lifecycle import GroupState, RolloutState, is_for_learner
from coordinator.rules.prompt_refs import PromptRef
from coordinator.rules.selection import OFF, SelectionRules
from coordinator.store.facts import Fact, get_fact, set_fact
from coordinator.store.tables import groups, leases, rollouts
from coordinator.transactions import curriculum, escrow, evaluations, reward_columns, turns
from coordinator.transactions import leases as lease_table
from coordinator.transactions.lottery import AuditTerms
from coordinator.transactions.rollouts import move
from coordinator.transactions.turns import AcceptedTurn
from ledger.prepared import Prepared, say
from protocol.tasks import Reward, Split
from protocol.wire.signing import open_envelope
from protocol.work.lease import Lease, Prefix
from protocol.work.rollout import RolloutClaim, unpack_tokens

log = logging.getLogger(__name__)

TROUBLE = Fact[Mapping[str, Any]]("verifier", {})
"""The fact of failed verification: how often, the last reason and next step, when, and whether nothing is judged."""


class UnscoredRow(NamedTuple):
    """A rollout that waits to be judged, its lease, and its group's problem."""

    claim_id: str
    group_no: int
    lease_id: str
    envelope: bytes
    offer: bytes
    split: Split | Literal["query"]
    prompt: int


class AnsweredClaim(NamedTuple):
    """The lease and the group of a claim."""

    lease_id: str
    group_no: int


# Built once: making a statement costs more than running it, and these run for every turn.
_waiting = Prepared(
    sa.select(
        *(rollouts.c.claim_id, rollouts.c.group_no, rollouts.c.lease_id, rollouts.c.envelope),
        *(leases.c.offer, groups.c.split, groups.c.prompt),
    )
    .join_from(rollouts, leases, rollouts.c.lease_id == leases.c.lease_id)
    .join(groups, groups.c.group_no == rollouts.c.group_no)
    .where(
        rollouts.c.state == RolloutState.UNSCORED.value,
        rollouts.c.claim_id.not_in(sa.bindparam("but", expanding=True)),
    )
    .order_by(rollouts.c.accepted_ms, rollouts.c.group_no)
    .limit(sa.bindparam("most", type_=sa.Integer)),
    UnscoredRow,
)
_answered = Prepared(
    sa.select(rollouts.c.lease_id, rollouts.c.group_no).where(rollouts.c.claim_id == sa.bindparam("claim")),
    AnsweredClaim,
)

Tokens = tuple[int, ...]


@dataclass(frozen=True)
class PlayedEpisode:
    """A sample's episode so far, which waits for its environment."""

    turns: tuple[Tokens, ...]
    read: tuple[bytes, ...]
    """The tokens that its environment answered to each turn but the last."""
    length: int
    """Tokens of its turns and answers together."""


@dataclass(frozen=True)
class Unscored:
    """A group whose completions or turns wait to be judged."""

    claim_id: str
    group_no: int
    source: PromptRef
    completions: tuple[Tokens, ...] = ()
    """The completions; none if the samples are episodes."""
    episodes: tuple[PlayedEpisode | None, ...] = ()
    """The episodes; None for those that ended with an earlier turn."""


def waiting(connection: sa.Connection, limit: int, *, but: Set[str] = frozenset()) -> list[Unscored]:
    """Return the oldest rollouts that wait, without the claims in `but`."""
    return [_unscored(connection, row) for row in _waiting(connection, but=sorted(but), most=limit)]


def _unscored(connection: sa.Connection, row: UnscoredRow) -> Unscored:
    source = PromptRef(row.split, row.prompt)
    if not Lease.from_bytes(row.offer).turn_tokens_max:
        return Unscored(row.claim_id, row.group_no, source, completions(row.envelope, row.offer))
    return Unscored(row.claim_id, row.group_no, source, episodes=episodes(turns.chain(connection, row.lease_id)))


def episodes(played: Sequence[AcceptedTurn]) -> tuple[PlayedEpisode | None, ...]:
    """Return the episodes of a group after its last turn."""
    last = played[-1]
    return tuple(
        None
        if before.finish
        else PlayedEpisode(
            tuple(tuple(unpack_tokens(turn.samples[number].tokens).tolist()) for turn in played),
            tuple(turn.answer[number].tokens for turn in played[:-1]),
            (len(before.tokens) + len(last.samples[number].tokens)) // 4,
        )
        for number, before in enumerate(turns.begun(last.lease))
    )


def answered(
    connection: sa.Connection,
    claim_id: str,
    answer: Sequence[Prefix],
    rewards: Sequence[Reward | None],
    *,
    rules: SelectionRules = OFF,
    timeout_ms: int,
    now_ms: int,
) -> bool:
    """Record what the environment answered to a turn; return False if the turn waits no more.

    `answer` has what to insert after each sample's turn, and `rewards` the rewards of the episodes that ended with it.
    """
    _recovered(connection)
    row = _answered(connection, claim=claim_id).single_row()
    if not all(each.finish for each in answer):
        if not turns.record_answer(connection, claim_id, answer, rewards):
            return False
        lease_table.reopen(connection, row.group_no, row.lease_id, until_ms=now_ms + timeout_ms)
        return True
    played = turns.chain(connection, row.lease_id)
    whole = [
        next(reward for reward in known if reward is not None)
        for known in zip(*(turn.rewards for turn in played[:-1]), rewards, strict=True)
    ]
    if not scored(connection, claim_id, whole, rules=rules, now_ms=now_ms):
        return False
    turns.join_parts(connection, claim_id, played[:-1], now_ms)
    return True


def answered_and_offered(
    connection: sa.Connection,
    claim_id: str,
    answer: Sequence[Prefix],
    rewards: Sequence[Reward | None],
    *,
    offer: Callable[[sa.Connection], tuple[Lease, ...]] | None,
    rules: SelectionRules = OFF,
    timeout_ms: int,
    now_ms: int,
) -> tuple[Lease, ...]:
    """Record what the environment answered to a turn, and return what `offer` then leases.

    An offer that fails leases nothing, and the answer stays.
    """
    answered(connection, claim_id, answer, rewards, rules=rules, timeout_ms=timeout_ms, now_ms=now_ms)
    if offer is None:
        return ()
    say(connection, "SAVEPOINT offer")
    leases: tuple[Lease, ...] = ()
    try:
        leases = offer(connection)
    except Exception:  # the request is answered without a next turn
        log.exception("no next turns could be leased")
        say(connection, "ROLLBACK TO SAVEPOINT offer")
    say(connection, "RELEASE SAVEPOINT offer")
    return leases


def scored(
    connection: sa.Connection, claim_id: str, rewards: list[Reward], *, rules: SelectionRules = OFF, now_ms: int
) -> bool:
    """Record a rollout's rewards, and move it to the buffer or to its evaluation; return False if it waits no more."""
    _recovered(connection)
    group_no = _group_of(connection, claim_id)
    state = RolloutState.BUFFERED if is_for_learner(group_no) else RolloutState.MEASURED
    if not move(connection, rollouts.c.claim_id == claim_id, state, **reward_columns.stored(rewards)):
        return False
    if not is_for_learner(group_no):
        evaluations.record_group(connection, group_no, now_ms)
    elif rules.chooses:
        offer = sa.select(leases.c.offer).join(rollouts, rollouts.c.lease_id == leases.c.lease_id)
        lease = Lease.from_bytes(connection.execute(offer.where(rollouts.c.claim_id == claim_id)).scalar_one())
        curriculum.record_outcome(connection, lease.prompt, reward_columns.scores(reward_columns.stored(rewards)))
    return True


def give_up(connection: sa.Connection, claim_id: str, reason: str, *, audits: AuditTerms, now_ms: int) -> bool:
    """Give up a rollout that cannot be judged by no fault of its node's; return False if it waits no more."""
    marks = {reward_columns.GIVEN_UP: reason}
    if not move(connection, rollouts.c.claim_id == claim_id, RolloutState.UNJUDGED, marks=marks):
        return False
    group_no = _group_of(connection, claim_id)
    turns.abandon(connection, group_no)
    lease_table.set_group(connection, group_no, GroupState.UNJUDGED)
    if not is_for_learner(group_no):
        evaluations.record_group(connection, group_no, now_ms)
    escrow.used(connection, [claim_id], terms=audits, now_ms=now_ms)
    _record_trouble(connection, reason, now_ms, groups=1, down=False)
    return True


def stand_still(connection: sa.Connection, reason: str, next_step: str = "", *, now_ms: int) -> None:
    """Record for the operator that nothing can be judged at the moment; it is tried again."""
    _record_trouble(connection, reason, now_ms, groups=0, down=True, next_step=next_step)


def trouble(connection: sa.Connection) -> Mapping[str, Any]:
    """Return the groups given up, the last reason, and whether nothing is judged; empty without any failure."""
    return get_fact(connection, TROUBLE)


def _recovered(connection: sa.Connection) -> None:
    """Record that answers come again."""
    if (before := get_fact(connection, TROUBLE)) and before["down"]:
        set_fact(connection, TROUBLE, {**before, "down": False})


def _record_trouble(
    connection: sa.Connection, reason: str, now_ms: int, *, groups: int, down: bool, next_step: str = ""
) -> None:
    before = trouble(connection)
    after = {"groups": before.get("groups", 0) + groups, "reason": reason, "ms": now_ms, "down": down}
    set_fact(connection, TROUBLE, after | ({"next_step": next_step} if next_step else {}))


def _group_of(connection: sa.Connection, claim_id: str) -> int:
    return int(connection.execute(sa.select(rollouts.c.group_no).where(rollouts.c.claim_id == claim_id)).scalar_one())


def completions(envelope: bytes, offer: bytes) -> tuple[tuple[int, ...], ...]:
    """Return the tokens of each sample of a stored rollout, with the prefix that it continued."""
    claim = RolloutClaim.from_bytes(open_envelope("rollout", envelope).payload)
    begun = [prefix.tokens for prefix in Lease.from_bytes(offer).prefixes] or [b""] * len(claim.samples)
    return tuple(
        (*unpack_tokens(before).tolist(), *unpack_tokens(sample.tokens).tolist())
        for before, sample in zip(begun, claim.samples, strict=True)
    )
