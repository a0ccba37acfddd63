"""Foresight: stored lengths of prompts and of similar prompts, and the pace of nodes; as effects.

- A group's length is that of its longest sample: a node that samples all of them together waits for it.
- The expected length of a group is stored when it is made, and does not change: an order that moves on its own would
  starve some groups.
- A node's pace is the time from lease to answer per token of its last answers, relative to the last answers of all.
"""

from collections.abc import Iterable
from typing import NamedTuple

import sqlalchemy as sa

from coordinator.rules.lease_allowance import MEASURED_MAX
from coordinator.rules.lengths import OVERTAKEN_MAX, LengthStatistics, WaitingGroup, expected, neighbourhood
from coordinator.rules.lifecycle import GroupState
from coordinator.rules.prompt_refs import TRAIN, PromptRef
from coordinator.rules.selection import SelectionRules
from coordinator.store.tables import groups, is_for_training, leases, lengths, rollouts
from coordinator.transactions import curriculum
from coordinator.transactions.curriculum import Prompt
from ledger.prepared import Prepared
from protocol.ids import NodeId
from protocol.policy import chunks
from protocol.work.lease import LeaseState
from protocol.work.rollout import pack_tokens


class LengthRow(NamedTuple):
    """The mean length of a prompt's groups, or of similar prompts' groups."""

    prompts: str
    mean: float
    groups: int


class OpenGroup(NamedTuple):
    """A group that nobody works on."""

    group_no: int
    expected: float | None
    begun: str | None
    begun_version: int | None


class Paces(NamedTuple):
    """The time and the tokens of the last accepted answers of all nodes, and of one; None without any answer."""

    ms: int | None
    tokens: int | None
    own_ms: int | None
    own_tokens: int | None


# Built once: making a statement costs more than running it, and these run for every lease.
_known = Prepared(sa.select(lengths).where(lengths.c.prompts.in_(sa.bindparam("names", expanding=True))), LengthRow)
_made = groups.alias("made")
_newest = sa.select(sa.func.max(_made.c.group_no)).where(is_for_training(_made.c.group_no)).scalar_subquery()
_unbegun = Prepared(
    sa.select(groups.c.group_no, groups.c.expected, groups.c.begun, groups.c.begun_version)
    .where(
        groups.c.state == GroupState.OPEN.value,
        is_for_training(groups.c.group_no),
        groups.c.begun.is_(None) | (groups.c.group_no < _newest - sa.bindparam("newer", type_=sa.Integer)),
    )
    .order_by(groups.c.group_no)
    .limit(sa.bindparam("count", type_=sa.Integer)),
    OpenGroup,
)
_change = Prepared(
    sa.update(lengths)
    .where(lengths.c.prompts == sa.bindparam("name"))
    .values(mean=sa.bindparam("new_mean"), groups=sa.bindparam("new_groups"))
)
_begin = Prepared(sa.insert(lengths))
_make = Prepared(sa.insert(groups))


def _lately(*of: sa.ColumnElement[bool]) -> sa.Subquery:
    """Build the query for the milliseconds and tokens of the last accepted answers."""
    last = (
        sa.select((leases.c.ended_ms - leases.c.issued_ms).label("ms"), rollouts.c.tokens)
        .join_from(leases, rollouts, rollouts.c.lease_id == leases.c.lease_id)
        .where(
            leases.c.ended_ms.is_not(None),
            leases.c.state == LeaseState.ACCEPTED.value,
            is_for_training(leases.c.group_no),
            *of,
        )
        .order_by(leases.c.ended_ms.desc())
        .limit(MEASURED_MAX)
        .subquery()
    )
    return sa.select(sa.func.sum(last.c.ms).label("ms"), sa.func.sum(last.c.tokens).label("tokens")).subquery()


_of_all, _of_one = _lately(), _lately(leases.c.node_id == sa.bindparam("node"))
_own = (_of_one.c.ms.label("own_ms"), _of_one.c.tokens.label("own_tokens"))
_paces = Prepared(sa.select(_of_all, *_own).join_from(_of_all, _of_one, sa.true()), Paces)


def record_lengths(connection: sa.Connection, prompt: bytes, longest: int) -> None:
    """Record that a group of this prompt was sampled, with the tokens of its longest sample."""
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
    """Return the expected length of a group of this prompt, in tokens; None if nothing is known."""
    names = _names(prompt)
    known = _seen(connection, names)
    return expected(known.get(names[0]), known.get(names[1])) or None


def window_of(connection: sa.Connection, least: int, rules: SelectionRules, prompt: Prompt) -> list[WaitingGroup]:
    """Return at least `least` groups that nobody works on, the oldest first; make new ones if there are too few.

    A group that a node has begun is left for nodes that can continue it, until many newer groups have overtaken it.
    """
    unbegun = _unbegun(connection, newer=OVERTAKEN_MAX * least, count=least)
    waiting = [WaitingGroup(row.group_no, row.expected or 0.0, row.begun, row.begun_version) for row in unbegun]
    if len(waiting) >= least:
        return waiting
    fresh = curriculum.next_places(connection, least - len(waiting), rules, prompt)
    lasts = [foreseen(connection, pack_tokens(prompt(PromptRef(TRAIN, place)))) for _, place in fresh]
    rows = [
        {"group_no": number, "state": GroupState.OPEN.value, "split": TRAIN, "prompt": place, "expected": tokens}
        for (number, place), tokens in zip(fresh, lasts, strict=True)
    ]
    _make.each(connection, rows)
    return waiting + [WaitingGroup(number, tokens or 0.0) for (number, _), tokens in zip(fresh, lasts, strict=True)]


def speed(connection: sa.Connection, node: NodeId) -> float:
    """Return the node's speed relative to that of all nodes lately; 1 before anything is known."""
    took_ms, tokens, own_ms, own_tokens = map(
        float, (count or 0 for count in _paces(connection, node=node).single_row())
    )
    return (took_ms / tokens) / (own_ms / own_tokens) if took_ms and tokens and own_ms and own_tokens else 1.0


def _names(prompt: bytes) -> tuple[str, str]:
    """Return the names under which the lengths of the prompt and of similar prompts are stored."""
    return chunks.digest(prompt), neighbourhood(len(prompt) // 4)


def _seen(connection: sa.Connection, names: Iterable[str]) -> dict[str, LengthStatistics]:
    return {row.prompts: LengthStatistics(row.mean, row.groups) for row in _known(connection, names=list(names))}
