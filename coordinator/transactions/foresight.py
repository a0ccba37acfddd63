"""What the store knows of lengths: of prompts, of their neighbours, and of the pace of nodes; as effects.

- A group's length is that of its longest sample: it is what a node that samples all of them together waits for.
- What is expected of a group is noted when it comes up, and kept: an order that moves on its own would starve somebody.
- A node's pace is the time from lease to answer for each token of its last answers, beside that of everybody's last.
"""

from collections.abc import Iterable

import sqlalchemy as sa

from coordinator.rules.lease_allowance import MEASURED_MAX
from coordinator.rules.lengths import OVERTAKEN_MAX, LengthStatistics, WaitingGroup, expected, neighbourhood
from coordinator.rules.lifecycle import GroupState
from coordinator.rules.selection import SelectionRules
from coordinator.store.tables import groups, leases, lengths, rollouts
from coordinator.transactions import curriculum
from coordinator.transactions.curriculum import Prompt
from coordinator.transactions.prompts import TRAIN, PromptRef
from ledger.prepared import Prepared
from protocol.ids import NodeId
from protocol.policy import chunks
from protocol.work.lease import LeaseState
from protocol.work.rollout import pack_tokens

# Built once: making a statement costs more than running it, and these run for every lease.
_known = Prepared(sa.select(lengths).where(lengths.c.prompts.in_(sa.bindparam("names", expanding=True))))
_made = groups.alias("made")
_newest = sa.select(sa.func.max(_made.c.group_no)).where(_made.c.group_no >= 0).scalar_subquery()
_unbegun = Prepared(
    sa.select(groups.c.group_no, groups.c.expected, groups.c.begun, groups.c.begun_version)
    .where(
        groups.c.state == GroupState.OPEN.value,
        groups.c.group_no >= 0,
        groups.c.begun.is_(None) | (groups.c.group_no < _newest - sa.bindparam("newer", type_=sa.Integer)),
    )
    .order_by(groups.c.group_no)
    .limit(sa.bindparam("count", type_=sa.Integer))
)
_change = Prepared(
    sa.update(lengths)
    .where(lengths.c.prompts == sa.bindparam("name"))
    .values(mean=sa.bindparam("new_mean"), groups=sa.bindparam("new_groups"))
)
_begin = Prepared(sa.insert(lengths))
_make = Prepared(sa.insert(groups))


def _lately(*of: sa.ColumnElement[bool]) -> sa.Subquery:
    """How long the last accepted answers took, and their tokens."""
    last = (
        sa.select((leases.c.ended_ms - leases.c.issued_ms).label("ms"), rollouts.c.tokens)
        .join_from(leases, rollouts, rollouts.c.lease_id == leases.c.lease_id)
        .where(leases.c.ended_ms.is_not(None), leases.c.state == LeaseState.ACCEPTED.value, leases.c.group_no >= 0, *of)
        .order_by(leases.c.ended_ms.desc())
        .limit(MEASURED_MAX)
        .subquery()
    )
    return sa.select(sa.func.sum(last.c.ms).label("ms"), sa.func.sum(last.c.tokens).label("tokens")).subquery()


_of_all, _of_one = _lately(), _lately(leases.c.node_id == sa.bindparam("node"))
_paces = Prepared(sa.select(_of_all, _of_one.c.ms, _of_one.c.tokens).join_from(_of_all, _of_one, sa.true()))


def record_lengths(connection: sa.Connection, prompt: bytes, longest: int) -> None:
    """A group of this prompt was sampled."""
    names = _names(prompt)
    known = _seen(connection, names)
    after = {name: known.get(name, LengthStatistics()).after(longest) for name in names}
    changed = [
        {"name": name, "new_mean": seen.mean, "new_groups": seen.groups}
        for name, seen in after.items()
        if name in known
    ]
    _change.each(connection, changed)
    new = [{"prompts": name, "mean": seen.mean, "groups": seen.groups} for name, seen in after.items()]
    _begin.each(connection, [row for row in new if row["prompts"] not in known])


def foreseen(connection: sa.Connection, prompt: bytes) -> float | None:
    """How long a group of this prompt is expected to be; None if nothing is known."""
    names = _names(prompt)
    known = _seen(connection, names)
    return expected(known.get(names[0]), known.get(names[1])) or None


def window_of(connection: sa.Connection, least: int, rules: SelectionRules, prompt: Prompt) -> list[WaitingGroup]:
    """At least so many groups that nobody works on, the oldest first; new ones come up where there are too few.

    What one node has begun is left for whoever can go on, until many newer groups have overtaken it.
    """
    found = _unbegun(connection, newer=OVERTAKEN_MAX * least, count=least)
    waiting = [WaitingGroup(row.group_no, row.expected or 0.0, row.begun, row.begun_version) for row in found]
    if len(waiting) >= least:
        return waiting
    fresh = curriculum.come_up(connection, least - len(waiting), rules, prompt)
    lasts = [foreseen(connection, pack_tokens(prompt(PromptRef(TRAIN, place)))) for _, place in fresh]
    rows = [
        {"group_no": number, "state": GroupState.OPEN.value, "split": TRAIN, "prompt": place, "expected": tokens}
        for (number, place), tokens in zip(fresh, lasts, strict=True)
    ]
    _make.each(connection, rows)
    return waiting + [WaitingGroup(number, tokens or 0.0) for (number, _), tokens in zip(fresh, lasts, strict=True)]


def speed(connection: sa.Connection, node: NodeId) -> float:
    """How many times as fast as nodes are lately; 1 before anything is known."""
    took_ms, tokens, own_ms, own_tokens = map(
        float, (count or 0 for count in _paces(connection, node=node).single_row())
    )
    return (took_ms / tokens) / (own_ms / own_tokens) if took_ms and tokens and own_ms and own_tokens else 1.0


def _names(prompt: bytes) -> tuple[str, str]:
    """What is known of the prompt itself, and of its neighbours, is kept under these."""
    return chunks.digest(prompt), neighbourhood(len(prompt) // 4)


def _seen(connection: sa.Connection, names: Iterable[str]) -> dict[str, LengthStatistics]:
    return {row.prompts: LengthStatistics(row.mean, row.groups) for row in _known(connection, names=list(names))}
