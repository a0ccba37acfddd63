"""Admission: the number of groups that a node may take now, or the reason why it may take none; as effects.

- The staleness bound is applied to the version that the node holds (`coordinator.rules.lease_allowance`). The bound in
  force may be lower than the operator's (`coordinator.transactions.staleness_bound`).
- A lease is given out only if the free budget covers the dearest answer to it and to every open lease, and if what is
  left of the hourly budget covers them, too.
- Newcomers get few leases, and nothing waits for these (`coordinator.transactions.newcomers`): keys are free.
- An owner with `limits.HELD_CLAIMS_MAX` claims that are held until their class is calibrated gets no more leases.
- A node on standby (`coordinator.transactions.fleet`) gets none. While auditors are too far behind, nobody gets any.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import sqlalchemy as sa

from coordinator.rules import lease_allowance
from coordinator.rules.lease_allowance import admissible_groups, is_stale, room_in_buffer
from coordinator.store.facts import FINISHED, get_fact
from coordinator.store.tables import IS_OPEN, QUERY_WAITS, batches, leases, nodes, parts, rollouts, versions
from coordinator.store.tables import tally as tally_table
from coordinator.transactions import newcomers, staleness_bound, standings, tally
from coordinator.transactions.leases import LeaseTerms, is_held_up, last_expired_ms, latest_batch
from coordinator.transactions.registry import WorkerRow
from ledger.accounts import BUDGET
from ledger.prepared import Prepared
from ledger.tables import balances_table
from protocol import limits
from protocol.ids import NodeId
from protocol.limits import HOUR_MS
from protocol.work.lease import LeaseState, float_class
from protocol.work.messages import LeaseRequest, Reason

NOT_NEEDED: tuple[Reason, ...] = ("ahead", "old_version")
"""The reasons why the learner needs no more groups of a version."""


class RoundState(NamedTuple):
    """The state of the round, for a node that holds one version."""

    finished: bool | None
    others_asked_ms: int | None
    trials_until_ms: Mapping[str, float] | None
    trials_line: Mapping[str, list[int]] | None
    backlog: int
    """Claims that wait for an auditor."""
    staleness_bound: Mapping[str, Any] | None
    newest: int | None
    """The newest version."""
    visible_update: int | None
    """The update of the version that the node holds; None if there is no such version."""
    learner_update: int | None
    trainer_update: int | None
    unfinished: int | None
    """Groups under way, by `Tally`; None before it was counted."""
    queries_wait: bool


class LeaseRoom(NamedTuple):
    """The leases that a node may hold, and those that it holds."""

    lease_allowance: int | None
    held: int


class FreeMoney(NamedTuple):
    """The free budget, and the part of it that is reserved for open leases; None before any was recorded."""

    free_micros: int | None
    reserved_micros: int | None


class LeaseTimes(NamedTuple):
    """The begin and end of a lease."""

    issued_ms: int
    ended_ms: int


class RoomLeft(NamedTuple):
    """The untrained groups that there may be in all, and how many more may start now."""

    window: int
    left: int


# Built once: making a statement costs more than running it, and these run for every lease. Values that can be read
# together are read by one statement: each costs a round trip to PostgreSQL, and more CPU time than the values in it.
_free_micros = sa.select(balances_table.c.micros).where(balances_table.c.account == str(BUDGET)).scalar_subquery()
_stands = Prepared(
    sa.select(
        FINISHED.column,
        newcomers.OTHERS.column,
        newcomers.TRIALS.column,
        newcomers.LINE.column,
        standings.BACKLOG.scalar_subquery().label("backlog"),
        staleness_bound.BOUND.column,
        sa.select(sa.func.max(versions.c.version)).scalar_subquery().label("newest"),
        sa.select(versions.c.policy_update)
        .where(versions.c.version == sa.bindparam("version"))
        .scalar_subquery()
        .label("visible_update"),
        sa.select(sa.func.max(batches.c.batch)).scalar_subquery().label("learner_update"),
        sa.select(sa.func.max(versions.c.policy_update)).scalar_subquery().label("trainer_update"),
        sa.select(tally_table.c.unfinished).scalar_subquery().label("unfinished"),
        QUERY_WAITS.label("queries_wait"),
    ),
    RoundState,
)
_newest_update = Prepared(sa.select(versions.c.policy_update).order_by(versions.c.version.desc()).limit(1))
_hands = Prepared(
    sa.select(
        nodes.c.lease_allowance,
        sa.select(sa.func.count())
        .select_from(leases)
        .where(IS_OPEN, leases.c.node_id == nodes.c.node_id)
        .scalar_subquery()
        .label("held"),
    ).where(nodes.c.node_id == sa.bindparam("node")),
    LeaseRoom,
)
_money = Prepared(
    sa.select(
        _free_micros.label("free_micros"),
        sa.select(tally_table.c.reserved_micros).scalar_subquery().label("reserved_micros"),
    ),
    FreeMoney,
)
_lately = Prepared(
    sa.select(leases.c.issued_ms, leases.c.ended_ms)
    .where(leases.c.node_id == sa.bindparam("node"), leases.c.state == LeaseState.ACCEPTED.value)
    .order_by(leases.c.ended_ms.desc())
    .limit(lease_allowance.MEASURED_MAX),
    LeaseTimes,
)


class Admitted(NamedTuple):
    """The groups that a node may be given now."""

    groups: int
    """Groups for the learner."""
    reason: Reason
    """The reason why it may be given none; empty if it may be given some."""
    newest: int
    """The newest version."""
    others_ask: bool = False
    """True if nodes that are no newcomers ask for work; this node may be one of them."""
    on_trial: bool = False
    """True if it gets only trials, as a newcomer; it may begin `trials` of them."""
    trials: int = 0
    queries_wait: bool = False
    """True if queries of the endpoint wait for a node."""


def how_many(
    connection: sa.Connection, worker: WorkerRow, message: LeaseRequest, terms: LeaseTerms, place: str, now_ms: int
) -> Admitted:
    """Return what a node that called from network group `place` may be given now, or why it may be given nothing."""
    stands = _stands(connection, version=message.version).single_row()
    terms = terms.offered(stands.staleness_bound)
    reason = _refusal(stands, worker, message, terms)
    if reason not in ("", *NOT_NEEDED):
        return Admitted(0, reason, stands.newest or 0)
    others_ask = newcomers.do_others_ask(connection, worker, stands.others_asked_ms, terms, now_ms)
    window, left = RoomLeft(0, 0) if reason else _room_for(connection, stands, terms)
    is_due = others_ask or (not left and newcomers.is_hoarded(connection, terms, now_ms))
    on_trial = is_due and worker.node_id not in terms.probes and newcomers.is_newcomer(connection, worker, terms)
    trials = 0
    if on_trial:
        budget = newcomers.NewcomerBudget(stands.trials_until_ms or {}, stands.trials_line or {})
        trials = left = newcomers.may_begin(connection, worker, budget, place, terms, now_ms)
    count = 0
    if not reason:
        admissible = min(left, _share_left(connection, worker.owner, window, terms, now_ms, proven_only=others_ask))
        count, reason = _for_learner(connection, stands, worker, message, admissible, terms, now_ms)
    return Admitted(count, reason, stands.newest or 0, others_ask, on_trial, trials, bool(stands.queries_wait))


def _room_for(connection: sa.Connection, stands: RoundState, terms: LeaseTerms) -> RoomLeft:
    """Return how many more groups of the version that a node holds may start now."""
    if not terms.trains or stands.visible_update is None:
        return RoomLeft(0, 0)
    updates = (stands.visible_update, stands.learner_update or 0)
    unfinished = tally.read(connection).unfinished if stands.unfinished is None else stands.unfinished
    return RoomLeft(_window(terms, *updates, 0), _window(terms, *updates, unfinished))


def _for_learner(
    connection: sa.Connection,
    stands: RoundState,
    worker: WorkerRow,
    message: LeaseRequest,
    admissible: int,
    terms: LeaseTerms,
    now_ms: int,
) -> tuple[int, Reason]:
    """Return how many of `admissible` groups a node may take now, or why it may take none."""
    if not admissible:
        return 0, "ahead" if message.version >= (stands.newest or 0) else "old_version"
    hands = free_hands(connection, NodeId(worker.node_id), terms, now_ms)
    if not hands:
        return 0, "busy"
    payable = affordable(connection, terms, terms.max_cost_micros(worker.price_micros_per_mtok), now_ms)
    if not payable:
        return 0, "budget"
    return min(message.groups, terms.groups_per_request, admissible, payable, hands), ""


def _refusal(stands: RoundState, worker: WorkerRow, message: LeaseRequest, terms: LeaseTerms) -> Reason:
    """Return the reason why a node gets nothing, however few groups are under way; empty if it may get some."""
    if stands.finished:
        return "finished"
    if terms.classes and not {message.numerics, float_class(message.numerics)} & set(terms.classes):
        return "numerics"
    if worker.held_claims >= limits.HELD_CLAIMS_MAX and worker.node_id not in terms.probes:
        return "numerics"
    if worker.paused_ms is not None:
        return "paused"
    if not worker.works:
        return "standby"
    if stands.backlog >= terms.audit_backlog_max:
        return "audits"
    learner_update = _reached_update(stands, terms)
    if stands.visible_update is None or is_stale(
        staleness=terms.staleness, policy_update=stands.visible_update, learner_update=learner_update
    ):
        return "old_version"
    return ""


def room(connection: sa.Connection, terms: LeaseTerms) -> int:
    """Return how many more groups may start for a node that holds the newest version."""
    newest = _newest_update(connection).scalar()
    if newest is None or not terms.trains:
        return 0
    return _window(_offered(connection, terms), newest, latest_batch(connection), tally.read(connection).unfinished)


def is_past(connection: sa.Connection, version: int, terms: LeaseTerms) -> bool:
    """Return True if a version is past the staleness bound for new leases."""
    stands = _stands(connection, version=version).single_row()
    terms = terms.offered(stands.staleness_bound)
    return stands.visible_update is None or is_stale(
        staleness=terms.staleness,
        policy_update=stands.visible_update,
        learner_update=_reached_update(stands, terms),
    )


def _reached_update(stands: RoundState, terms: LeaseTerms) -> int:
    """Return the update that training has reached: of the newest batch, or of a trainer's newest version."""
    return int((stands.learner_update if terms.trains else stands.trainer_update) or 0)


def has_room(connection: sa.Connection, terms: LeaseTerms, visible_update: int, learner_update: int) -> bool:
    """Return True if a group of a version of that update may be one more of those under way."""
    offered = _offered(connection, terms)
    return _window(offered, visible_update, learner_update, tally.read(connection).unfinished) > 0


def _offered(connection: sa.Connection, terms: LeaseTerms) -> LeaseTerms:
    return terms.offered(get_fact(connection, staleness_bound.BOUND)) if terms.adapts else terms


def _window(terms: LeaseTerms, visible_update: int, learner_update: int, unfinished: int) -> int:
    """Return how many groups may start while `unfinished` groups are under way or wait."""
    if terms.buffered_max:
        return room_in_buffer(
            buffered_max=terms.buffered_max, groups_per_update=terms.groups_per_update, unfinished_groups=unfinished
        )
    return admissible_groups(
        staleness=terms.staleness,
        groups_per_update=terms.groups_per_update,
        visible_update=visible_update,
        issued_groups=learner_update * terms.groups_per_update + unfinished,
    )


def free_hands(connection: sa.Connection, node: NodeId, terms: LeaseTerms, now_ms: int) -> int:
    """Return how many more leases the node may hold, as its earlier leases ended."""
    allowance, held = _hands(connection, node=node).single_row()
    return max(0, _may_hold(connection, node, allowance, terms, now_ms) - int(held))


def _may_hold(connection: sa.Connection, node: NodeId, allowance: int | None, terms: LeaseTerms, now_ms: int) -> int:
    if allowance is not None and allowance < 1:
        wait_ms = lease_allowance.wait_ms(-allowance, timeout_ms=terms.timeout_ms)
        return int(not wait_ms or last_expired_ms(connection, node) <= now_ms - wait_ms)
    in_time = lease_allowance.groups_in_time(_lately(connection, node=node), timeout_ms=terms.timeout_ms)
    return min(
        terms.held_max,
        terms.newcomer_leases if allowance is None else allowance,
        terms.held_max if in_time is None else in_time,
    )


def _share_left(
    connection: sa.Connection, owner: str, window: int, terms: LeaseTerms, now_ms: int, *, proven_only: bool
) -> int:
    """Return how many more groups the owner may have under way; `window` while the learner waits in vain for others."""
    if terms.max_owner_share >= 1:
        return window
    most = standings.share_of(connection, window, terms.max_owner_share, proven_only=proven_only)
    left = max(0, most - standings.at_work(connection, owner))
    return left or (window if is_held_up(connection, terms, now_ms) else 0)


def affordable(connection: sa.Connection, terms: LeaseTerms, max_cost: int, now_ms: int) -> int:
    """Return how many more leases the free budget, and what is left of the hourly budget, cover at their dearest."""
    if not max_cost:
        return 2**31
    free, reserved = _money(connection).single_row()
    free, reserved = free or 0, tally.read(connection).reserved_micros if reserved is None else reserved
    if terms.budget_micros_per_hour:
        free = min(free, terms.budget_micros_per_hour - _spent_since(connection, now_ms - HOUR_MS))
    # Below zero after a restart with dearer terms; a negative count would take every open group.
    return max(0, (free - reserved) // max_cost)


def _spent_since(connection: sa.Connection, since_ms: int) -> int:
    """Return the micro-units credited for answers since `since_ms`, whether voided later or not."""
    ended = sa.select(leases.c.lease_id).where(leases.c.ended_ms > since_ms, leases.c.state == LeaseState.ACCEPTED)
    spent = sa.select(sa.func.coalesce(sa.func.sum(rollouts.c.credit_micros), 0)).where(rollouts.c.lease_id.in_(ended))
    left = parts.c.lease_id.not_in(ended)  # a turn is counted as a rollout
    for_parts = sa.select(sa.func.coalesce(sa.func.sum(parts.c.credit_micros), 0)).where(
        parts.c.credited_ms > since_ms, left
    )
    return int(connection.execute(spent).scalar_one()) + int(connection.execute(for_parts).scalar_one())
