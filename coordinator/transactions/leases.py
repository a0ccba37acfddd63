"""The lease table: changes of leases and of their groups, as effects.

- A group is `open` (nobody works on it), `leased`, `accepted` or `trained`; or on `trial`: only a newcomer works on it,
  and nothing waits for it (`coordinator.transactions.newcomers`); or at a `turn`: its episodes go on, and the next turn
  waits for a node (`coordinator.transactions.turns`).
- A lease that ends without acceptance opens its group again, so no prompt is lost; the next node of the group continues
  from its fragments, if that costs no more than a new start (`coordinator.transactions.partial_rollouts`).
- A node may hold as many leases as it has shown to finish (`coordinator.rules.lease_allowance`).
- While the coordinator is down, the time of leases does not run: nobody could answer.
- Every change of a lease goes through `protocol.work.lease.TRANSITIONS`, compared and set in one statement.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol

import sqlalchemy as sa

from coordinator.config import Config
from coordinator.rules import lease_allowance
from coordinator.rules.lifecycle import UNFINISHED, GroupState, RolloutState, groups_before, is_for_learner
from coordinator.rules.selection import OFF, SelectionRules
from coordinator.store.facts import Fact, get_fact, set_fact
from coordinator.store.rows import read_rows
from coordinator.store.tables import IS_OPEN, batches, groups, is_for_training, leases, nodes, rollouts, versions
from coordinator.transactions import api_keys, partial_rollouts, staleness_bound, tally
from ledger.entry import amount
from ledger.prepared import Prepared
from protocol.ids import NodeId
from protocol.text.money import CREDITS, Unit
from protocol.work.lease import OPEN, TRANSITIONS, Lease, LeaseEvent, LeaseState, Prefix
from protocol.work.messages import ReturnLeases

LEASES_HELD_FACTOR = 2
"""Open leases per node, in requests: one in the engine and one on its way; so no node can hold all the work."""

BACK = Fact("back_ms", 0)
"""The fact of the time when the coordinator was last back after a downtime."""

AT_WORK = (LeaseState.ACCEPTED, LeaseState.REJECTED, LeaseState.EXPIRED)
"""Final states of leases that took the node's time; a skipped or cancelled one may have taken none."""


class OpenLease(NamedTuple):
    """An open lease, as far as its end needs it."""

    lease_id: str
    group_no: int
    surplus: bool


class GroupToLease(NamedTuple):
    """A group for a node, the ended lease that it continues, and the version of that lease."""

    group_no: int
    begun: str | None = None
    begun_version: int | None = None


class LeaseWithAllowance(NamedTuple):
    """A lease, and the leases that its node may hold."""

    lease_id: str
    state: str
    node_id: str
    max_cost_micros: int
    lease_allowance: int | None


class MovableLease(Protocol):
    """The columns of a lease that its next state depends on; rows have more."""

    @property
    def lease_id(self) -> str: ...
    @property
    def state(self) -> str: ...
    @property
    def node_id(self) -> str: ...
    @property
    def max_cost_micros(self) -> int: ...
    @property
    def lease_allowance(self) -> int | None: ...


# Built once: making a statement costs more than running it, and these run for every lease.
_over = Prepared(
    sa.select(leases.c.lease_id, leases.c.group_no, leases.c.surplus).where(
        IS_OPEN, leases.c.expires_ms <= sa.bindparam("now")
    ),
    OpenLease,
)
_where = Prepared(
    sa.select(leases.c.lease_id, leases.c.state, leases.c.node_id, leases.c.max_cost_micros, nodes.c.lease_allowance)
    .outerjoin_from(leases, nodes, nodes.c.node_id == leases.c.node_id)
    .where(leases.c.lease_id == sa.bindparam("lease")),
    LeaseWithAllowance,
)
_move = Prepared(
    sa.update(leases)
    .where(leases.c.lease_id == sa.bindparam("lease"), leases.c.state == sa.bindparam("before"))
    .values(state=sa.bindparam("after"), ended_ms=sa.bindparam("ended"))
)
_this = groups.c.group_no == sa.bindparam("group")
_moves = {
    (to, counted): Prepared(sa.update(groups).where(_this, groups.c.state.in_(before)).values(state=to.value))
    for to in GroupState
    for counted in (True, False)
    if (before := [state.value for state in groups_before(to) if (state in UNFINISHED) == counted])
}
"""Moves of a group to a state, from those that the tally counts as unfinished and from those that it does not."""
_leave_to = Prepared(
    sa.update(groups)
    .where(_this)
    .values(begun=sa.bindparam("by"), begun_version=sa.bindparam("of_version"), waits_until_ms=sa.bindparam("until_ms"))
)
_offer_of = Prepared(sa.select(leases.c.offer).where(leases.c.lease_id == sa.bindparam("lease")))
_others = (leases.c.group_no == sa.bindparam("group")) & (leases.c.lease_id != sa.bindparam("lease"))
_in_vain = Prepared(sa.update(leases).where(_others, IS_OPEN).values(surplus=sa.true()))
_allow = Prepared(
    sa.update(nodes).where(nodes.c.node_id == sa.bindparam("node")).values(lease_allowance=sa.bindparam("leases"))
)
_expired = Prepared(
    sa.select(leases.c.ended_ms)
    .where(leases.c.node_id == sa.bindparam("node"), leases.c.state == LeaseState.EXPIRED.value)
    .order_by(leases.c.ended_ms.desc())
    .limit(1)
)
_latest_batch = Prepared(sa.select(sa.func.max(batches.c.batch)))
_last_batch = Prepared(sa.select(batches.c.reported_ms).order_by(batches.c.batch.desc()).limit(1))
_published = Prepared(sa.select(versions.c.published_ms).order_by(versions.c.version.desc()).limit(1))
_for_learner = is_for_training(rollouts.c.group_no)
_unscored = Prepared(
    sa.select(rollouts.c.claim_id).where(rollouts.c.state == RolloutState.UNSCORED.value, _for_learner).limit(1)
)
_last_came = Prepared(
    sa.select(sa.func.max(rollouts.c.accepted_ms)).where(rollouts.c.state == RolloutState.BUFFERED.value, _for_learner)
)


@dataclass(frozen=True)
class LeaseTerms:
    """The terms of leases, from the configuration."""

    staleness: int
    """S; if it adapts, the operator's maximum, which holds for intake and batches."""
    groups_per_update: int
    groups_per_request: int
    samples_per_group: int
    max_new_tokens: int
    timeout_ms: int
    newcomer_leases: int
    """Leases that a node may hold before it has answered any."""
    over_issue: int
    """The most groups that are given to second nodes, when a batch waits for no more than these."""
    budget_micros_per_hour: int = 0
    """The most micro-units that may be spent in any hour; 0 is no limit."""
    max_owner_share: float = 1.0
    """The largest share of one owner in a batch, and in the groups that may be under way."""
    lookahead: int = 0
    """Open groups from which those that suit a node's pace are chosen; 0: the oldest."""
    selection: SelectionRules = OFF
    """The rules that say which prompts are worth a group."""
    adapts: staleness_bound.StalenessRules | None = None
    """The limits within which the bound for new leases moves; None if it is fixed."""
    buffered_max: int = 0
    """Groups, in updates, that may be under way or wait; 0: admission counts visible versions, not the buffer."""
    classes: tuple[str, ...] = ()
    """Classes that nodes may compute with; empty allows all."""
    tolerance: str = ""
    """The class that all nodes are judged as, if no classes are named; empty: each node as the class it reports."""
    probes: frozenset[str] = frozenset()
    """The operator's own nodes, on which classes are calibrated."""
    evaluation_share: float = 0.25
    """The share of the nodes at work that measure while others sample for the learner."""
    audit_backlog_max: int = 512
    """Claims that wait for an auditor before no more work is offered."""
    turn_tokens_max: int = 0
    """The most tokens of a turn, if the samples are episodes; else 0."""
    trains: bool = True
    """True if the round's own learner trains; else there are no groups for it, only queries and evaluations."""
    context_share: float = 0.0
    """The payment for a token of the context, as a share of the price of a drawn token."""
    exact_bonus: float = 0.0
    """The addition to the price of a node whose class an auditor repeats to the bit, as a share of it."""
    unit: Unit = CREDITS
    """The round's unit, for messages to people."""

    def offered(self, remembered: Mapping[str, Any] | None) -> "LeaseTerms":
        """Return the terms of new leases, with the bound in force; `remembered` is its stored fact."""
        if self.adapts is None:
            return self
        return replace(self, staleness=staleness_bound.bound_of(remembered, self.adapts))

    @property
    def judges_alike(self) -> bool:
        """Return True if all nodes are judged as one class."""
        return bool(self.tolerance) and not self.classes

    @property
    def window_max(self) -> int:
        """Return the most groups that may be under way or wait at once."""
        return (self.buffered_max or self.staleness + 1) * self.groups_per_update

    @property
    def held_max(self) -> int:
        """Return the most leases that any node may hold."""
        return LEASES_HELD_FACTOR * self.groups_per_request

    def max_cost_micros(self, price: int, samples: int = 0, tokens_max: int = 0) -> int:
        """Return the cost of the dearest honest answer to one lease; 0 stands for the samples and tokens of a group."""
        longest = min(self.max_new_tokens, tokens_max or self.turn_tokens_max or self.max_new_tokens)
        return amount((samples or self.samples_per_group) * longest, price)

    def context_tokens_paid(self, prompt: bytes, prefixes: Sequence[Prefix]) -> int:
        """Return the tokens that are paid for computing the context of a lease."""
        each = [len(prefix.tokens) for prefix in prefixes if not prefix.finish]
        computed = len(each) * len(prompt) + sum(each) if each else len(prompt)
        return int(self.context_share * computed) // 4


def move(connection: sa.Connection, lease_id: str, event: LeaseEvent, terms: LeaseTerms | None, now_ms: int) -> bool:
    """Move a lease by one event; return False if its state does not allow that.

    Without `terms`, the allowance of its node does not change.
    """
    row = _where(connection, lease=lease_id).first()
    return row is not None and advance(connection, row, event, terms, now_ms)


def advance(
    connection: sa.Connection, row: MovableLease, event: LeaseEvent, terms: LeaseTerms | None, now_ms: int
) -> bool:
    """Do the same as `move` for a lease that was read before, with the allowance of its node."""
    after = TRANSITIONS.get((LeaseState(row.state), event))
    if after is None:
        return False
    ended_ms = None if after in OPEN else now_ms
    if not _move(connection, lease=row.lease_id, before=row.state, after=after.value, ended=ended_ms).rowcount:
        return False
    if after not in OPEN:
        tally.change(connection, micros=-row.max_cost_micros)
        if terms is not None:
            _learn(connection, row, event, terms)
    return True


def terms_of(config: Config, *, turn_tokens_max: int = 0) -> LeaseTerms:
    """Return the terms of leases that the configuration sets; `turn_tokens_max` is above 0 if answers are turns."""
    return LeaseTerms(
        staleness=config.staleness.max_updates,
        groups_per_update=config.learner.groups_per_update,
        groups_per_request=config.leases.groups_per_request,
        samples_per_group=config.sampling.samples_per_group,
        max_new_tokens=config.sampling.max_new_tokens,
        turn_tokens_max=turn_tokens_max,
        timeout_ms=int(1000 * config.leases.lease_s(turn_tokens_max or config.sampling.max_new_tokens)),
        newcomer_leases=config.leases.newcomer_leases,
        over_issue=config.leases.over_issue,
        budget_micros_per_hour=config.fleet.budget_micros_per_hour,
        max_owner_share=config.audit.max_owner_share,
        classes=config.audit.classes,
        tolerance=config.audit.tolerance,
        audit_backlog_max=config.audit.backlog_max,
        lookahead=config.leases.lookahead,
        adapts=staleness_bound.rules_of(config.staleness),
        buffered_max=config.staleness.buffered_max if config.staleness.admission == "buffer" else 0,
        evaluation_share=config.eval.share,
        selection=rules_of(config),
        trains=not config.learner.external,
        context_share=config.market.context_share,
        exact_bonus=config.market.exact_bonus,
        unit=config.round.money,
    )


def rules_of(config: Config) -> SelectionRules:
    """Return the rules for the choice of prompts."""
    return SelectionRules(**config.selection.model_dump(), solved=config.eval.solved)


def extend_after_downtime(
    connection: sa.Connection, *, alive_ms: int, timeout_ms: int, back_ms: int, now_ms: int
) -> int:
    """Extend open leases after a downtime since `alive_ms`: the time left then, plus `back_ms` for the answer.

    No lease has more time than a new one, however often that happens. Return how many leases were extended.
    """
    left = leases.c.expires_ms - alive_ms
    expires = sa.case((left > timeout_ms, sa.literal(timeout_ms, sa.BigInteger)), else_=left) + (now_ms + back_ms)
    set_fact(connection, BACK, now_ms)
    stmt = sa.update(leases).where(IS_OPEN, left > 0)
    return connection.execute(stmt.values(expires_ms=expires)).rowcount


def expire(connection: sa.Connection, *, terms: LeaseTerms, now_ms: int) -> int:
    """End the leases whose time is over and open their groups again."""
    over = _over(connection, now=now_ms)
    for row in over:
        end_unanswered(connection, row, LeaseEvent.EXPIRE, terms, now_ms)
    return len(over)


def give_back(connection: sa.Connection, node: NodeId, message: ReturnLeases, *, terms: LeaseTerms, now_ms: int) -> int:
    """Skip leases that a node returns; other nodes' and finished leases do not change. Return how many were skipped."""
    mine = IS_OPEN & (leases.c.node_id == node) & leases.c.lease_id.in_(message.lease_ids)
    columns = (leases.c.lease_id, leases.c.group_no, leases.c.surplus)
    rows = {row.lease_id: row for row in read_rows(connection, sa.select(*columns).where(mine), OpenLease)}
    held = [rows[lease_id] for lease_id in dict.fromkeys(message.lease_ids) if lease_id in rows]
    return sum(end_unanswered(connection, row, LeaseEvent.SKIP, terms, now_ms) for row in held)


def end_unanswered(
    connection: sa.Connection, row: OpenLease, event: LeaseEvent, terms: LeaseTerms | None, now_ms: int
) -> bool:
    """End a lease without an answer, and offer its group again if nobody else works on it; cancel a surplus one."""
    if row.surplus:
        return cancel(connection, row, terms, now_ms)
    if not move(connection, row.lease_id, event, terms, now_ms):
        return False
    others = sa.select(leases.c.lease_id).where(leases.c.group_no == row.group_no, IS_OPEN).limit(1)
    if connection.execute(others).first() is None:
        sound = event is not LeaseEvent.REJECT
        until_ms = now_ms + (terms.timeout_ms if terms else 0)
        left = partial_rollouts.left_by(connection, row.lease_id, sound=sound)
        reopen(connection, row.group_no, left, until_ms=until_ms)
    elif not is_for_learner(row.group_no):  # only a newcomer and a second node share a group of an evaluation
        set_group(connection, row.group_no, GroupState.TRIAL)
    return True


def cancel(connection: sa.Connection, row: OpenLease, terms: LeaseTerms | None, now_ms: int) -> bool:
    """Cancel a surplus lease, which may be the last one for a query that was withdrawn."""
    if not move(connection, row.lease_id, LeaseEvent.CANCEL, terms, now_ms):
        return False
    if not is_for_learner(row.group_no):
        api_keys.release_left(connection, row.group_no, now_ms)
    return True


def take_away(connection: sa.Connection, whose: sa.ColumnElement[bool], code: str, now_ms: int) -> None:
    """End the open leases of nodes that may not work any more, without their fragments."""
    columns = (leases.c.lease_id, leases.c.group_no, leases.c.surplus)
    for row in read_rows(connection, sa.select(*columns).where(IS_OPEN, whose), OpenLease):
        if end_unanswered(connection, row, LeaseEvent.REJECT, None, now_ms):
            connection.execute(sa.update(leases).where(leases.c.lease_id == row.lease_id).values(code=code))


def answered(connection: sa.Connection, lease_id: str, group_no: int, *, is_shared: bool) -> None:
    """Mark the group of a lease as accepted, and the group's other leases, if it is shared, as surplus."""
    if is_shared:
        _in_vain(connection, group=group_no, lease=lease_id)
    set_group(connection, group_no, GroupState.ACCEPTED)


def reopen(connection: sa.Connection, group_no: int, begun: str | None = None, *, until_ms: int = 0) -> None:
    """Offer a group again, to be continued from the ended lease `begun`, or from the start if it is None.

    If it is the next turn of an episode, it waits until `until_ms` for a node with the same version.
    """
    offer = None if begun is None else _offer_of(connection, lease=begun).scalar()
    lease = Lease.from_bytes(offer) if offer else None
    is_turn = lease is not None and lease.turn_tokens_max > 0
    set_group(connection, group_no, GroupState.TURN if is_turn else GroupState.OPEN)
    _leave_to(
        connection,
        group=group_no,
        by=begun,
        of_version=lease.version if lease else None,
        until_ms=until_ms if is_turn else None,
    )


def set_group(connection: sa.Connection, group_no: int, state: GroupState) -> bool:
    """Move a group to a state; return False, and change nothing, if it may not move there from where it is."""
    likely = state is not GroupState.LEASED  # most groups are leased from `open`
    for counted in (likely, not likely):
        move_group = _moves.get((state, counted))
        if move_group is not None and move_group(connection, group=group_no).rowcount:
            more = (state in UNFINISHED) - counted
            if more and is_for_learner(group_no):
                tally.change(connection, groups=more)
            return True
    return False


def latest_batch(connection: sa.Connection) -> int:
    """Return the update that the newest batch leads to: the one that the learner has reached or is about to reach."""
    return _latest_batch(connection).scalar() or 0


def last_expired_ms(connection: sa.Connection, node: NodeId) -> int:
    """Return when a lease of the node last expired; 0 if none ever did."""
    return _expired(connection, node=node).scalar() or 0


def oldest_in_vain(connection: sa.Connection) -> int | None:
    """Return the oldest version of open leases whose groups others have answered; their answers may still come."""
    offers = connection.execute(sa.select(leases.c.offer).where(IS_OPEN, leases.c.surplus)).scalars()
    return min((Lease.from_bytes(offer).version for offer in offers), default=None)


def is_held_up(connection: sa.Connection, terms: LeaseTerms, now_ms: int) -> bool:
    """Return True if the learner waits, nodes could work, and no usable group came for as long as a lease lasts."""
    since_ms = now_ms - terms.timeout_ms
    batch = _last_batch(connection).first()
    if batch is not None and (batch[0] is None or batch[0] > since_ms):  # it trains, or just did
        return False
    if max(get_fact(connection, BACK), _published(connection).scalar() or 0) > since_ms:
        return False
    if _unscored(connection).first() is not None:  # the learner waits for the task processes, not for nodes
        return False
    came_ms = _last_came(connection).scalar()
    return came_ms is not None and bool(came_ms <= since_ms)


def _learn(connection: sa.Connection, row: MovableLease, event: LeaseEvent, terms: LeaseTerms) -> None:
    """Update how many leases a node may hold after one of them ended."""
    before = terms.newcomer_leases if row.lease_allowance is None else row.lease_allowance
    after = lease_allowance.allowance_after(before, event, most=terms.held_max)
    if after != row.lease_allowance:
        _allow(connection, node=row.node_id, leases=after)
