"""Leases of evaluations: the nodes that measure a version and how many groups each gets, as effects.

A node that asks for work is given groups of an evaluation of the version that it holds:

1. before any other, while nothing could be trained on (`evaluations.FIRST`);
2. else, if the learner needs no more groups of this version;
3. else, if it is one of the nodes that measure: a share of the nodes at work, one at least. It *stays* with its version
   until that is measured, however new the versions of others are;
4. else, if it is the only node: a share of the groups that it requests.

- So an evaluation never takes more of the fleet than its share while the learner has a use for it.
"""

from dataclasses import dataclass
from typing import NamedTuple

import sqlalchemy as sa

from coordinator.rules.lifecycle import GroupState
from coordinator.store.rows import read_rows
from coordinator.store.tables import IS_OPEN, evaluations, groups, leases, nodes
from coordinator.transactions import standings
from coordinator.transactions.admission import NOT_NEEDED, Admitted
from coordinator.transactions.evaluations import FIRST
from coordinator.transactions.leases import GroupToLease, set_group
from ledger.prepared import Prepared
from protocol.ids import NodeId


class RunningEvaluation(NamedTuple):
    """An evaluation that is not over."""

    number: int
    problems: int
    samples: int
    why: str


class MeasuringNodes(NamedTuple):
    """The nodes that sample or are between two turns, and those of them that measure."""

    at_work: set[str]
    measuring: set[str]


_is_left = groups.c.state.in_(sa.bindparam("states", expanding=True))
_open_ones = sa.select(groups.c.group_no).where(groups.c.evaluation == evaluations.c.number, _is_left)
# Built once: making a statement costs more than running it, and this runs for every lease.
_running = Prepared(
    sa.select(evaluations.c.number, evaluations.c.problems, evaluations.c.samples, evaluations.c.why)
    .where(evaluations.c.state == "running", evaluations.c.version == sa.bindparam("version"), _open_ones.exists())
    .order_by(evaluations.c.why.not_in(FIRST), evaluations.c.number)
    .limit(1),
    RunningEvaluation,
)


@dataclass(frozen=True)
class EvaluationPart:
    """The groups of one evaluation that a node may measure: at most `most`, of `samples` samples each."""

    evaluation: int
    problems: int
    samples: int
    most: int
    alone: bool
    """True if it gets no other groups."""
    stays: bool
    """True if it keeps its version as long as there are more."""


def part(
    connection: sa.Connection,
    node: NodeId,
    version: int,
    asked: int,
    share: float,
    admitted: Admitted,
    *,
    plays: bool = False,
) -> EvaluationPart | None:
    """Return the node's part in an evaluation of its version, when it requests `asked` groups; None if it has none.

    `plays` is True in a round of episodes.
    """
    running = _running(connection, version=version, states=_left_for(admitted.on_trial)).first()
    if running is None:
        return None
    at_work, measuring = _at_work(connection, proven_only=admitted.others_ask, plays=plays)
    busy = len(at_work | {node})
    chosen = busy > 1 and (node in measuring or len(measuring) < max(1, int(share * busy)))
    if running.why in FIRST or admitted.reason in NOT_NEEDED or chosen:
        stays = chosen or running.why in FIRST
        return EvaluationPart(running.number, running.problems, running.samples, asked, alone=chosen, stays=stays)
    if busy == 1:
        most = max(1, int(share * asked))
        most = 0 if measuring else most
        return EvaluationPart(running.number, running.problems, running.samples, most, alone=False, stays=False)
    return None


def lease_evaluation_groups(
    connection: sa.Connection, number: int, count: int, version: int | None, *, on_trial: bool
) -> list[GroupToLease]:
    """Lease up to `count` groups of an evaluation; return each with the lease that left work on it and that version.

    Groups that nobody works on come first. Then, if the node is no newcomer, those that only newcomers work on.
    """
    fits = sa.case((groups.c.begun_version == version, 0), (groups.c.begun.is_(None), 1), else_=2)
    left = [state for state in _left_for(on_trial) if version is not None or state != GroupState.TURN.value]
    waiting = (
        sa.select(groups.c.group_no, groups.c.begun, groups.c.begun_version)
        .where(groups.c.evaluation == number, groups.c.state.in_(left))
        .order_by(groups.c.state == GroupState.TRIAL.value, fits, groups.c.group_no.desc())
        .limit(count)
    )
    taken = read_rows(connection, waiting, GroupToLease)
    for group in taken:
        set_group(connection, group.group_no, GroupState.TRIAL if on_trial else GroupState.LEASED)
    return taken


def is_left(connection: sa.Connection, number: int, *, on_trial: bool) -> bool:
    """Return True if there is more to measure."""
    left = groups.c.state.in_(_left_for(on_trial))
    waiting = sa.select(groups.c.group_no).where(groups.c.evaluation == number, left).limit(1)
    return connection.execute(waiting).first() is not None


def _left_for(on_trial: bool) -> list[str]:
    """Return the states of groups that a node may be given."""
    left = [GroupState.TURN.value, GroupState.OPEN.value]
    return left if on_trial else [*left, GroupState.TRIAL.value]


def _at_work(connection: sa.Connection, *, proven_only: bool, plays: bool) -> MeasuringNodes:
    """Return the nodes that sample or are between two turns, and those of them that measure.

    With `proven_only`, newcomers are not among them. In a round of episodes (`plays`), a node whose environment has not
    answered yet is between two turns.
    """
    leased = sa.select(leases.c.node_id, leases.c.group_no).where(IS_OPEN)
    held = sa.union_all(leased, standings.LAST_TURNS, *([standings.UNSCORED] if plays else [])).subquery()
    measured = sa.select(held.c.node_id, sa.func.max(groups.c.evaluation)).group_by(held.c.node_id)
    measured = measured.join_from(held, groups, groups.c.group_no == held.c.group_no)
    if proven_only:
        measured = measured.join(nodes, nodes.c.node_id == held.c.node_id).where(standings.IS_KNOWN)
    measures = {node: evaluation is not None for node, evaluation in connection.execute(measured)}
    return MeasuringNodes(set(measures), {node for node, does in measures.items() if does})
