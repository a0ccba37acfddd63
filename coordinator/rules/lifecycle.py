"""The lifecycle of groups and rollouts: their states, and the moves between them. Pure.

- A group is a prompt that is worked on until there is a rollout of it: for the learner, for an evaluation, or for a
  query of the endpoint.
- A rollout is a claim that was accepted; the rollout that answers a group first is used, others are only paid.
- `coordinator.transactions.leases.set_group` moves groups, `coordinator.transactions.rollouts.move` moves rollouts.
  Both compare and set: a move that is not listed here changes nothing.
- The states of a lease are in `protocol.work.lease`, those of a claim's money in `ledger.book`.
"""

from collections.abc import Mapping
from enum import StrEnum


class GroupState(StrEnum):
    """The state of a group."""

    OPEN = "open"
    """Nobody works on it."""
    LEASED = "leased"
    TRIAL = "trial"
    """Leased to a newcomer alone; nothing waits for it."""
    ACCEPTED = "accepted"
    """A rollout of it was accepted."""
    TURN = "turn"
    """The episodes go on, and nobody works on the next turn."""
    TRAINED = "trained"
    """The rollout is in a batch, or was set aside because all rewards are equal."""
    UNJUDGED = "verifier_error"
    """The rollout could not be judged."""


class RolloutState(StrEnum):
    """The state of an accepted rollout."""

    UNSCORED = "unscored"
    """The rewards are not known yet."""
    TURN = "turn"
    """An accepted turn of a group whose episodes go on."""
    PART = "part"
    """An earlier turn of a group whose last turn was judged."""
    BUFFERED = "buffered"
    """The rollout waits for a batch."""
    MEASURED = "measured"
    """The rollout is part of an evaluation."""
    SERVED = "served"
    """The rollout answers a query of the endpoint."""
    BATCHED = "batched"
    STALE = "stale"
    """The rollout became older than the staleness bound before a batch took it."""
    SURPLUS = "surplus"
    """Another rollout answered the group first, or its owner's share of the batch was used up."""
    ALIKE = "alike"
    """All its rewards are equal, so it was set aside for another group."""
    UNUSED = "unused"
    """The round ended before a batch took it, or its episodes could not go on."""
    RETRACTED = "retracted"
    """An audit found a fault, or its owner was banned."""
    UNJUDGED = "verifier_error"
    """The rollout could not be judged: paid, and never trained on."""


def is_for_learner(group_no: int) -> bool:
    """Return True if the group was made for the learner; those of evaluations and queries have negative numbers."""
    return group_no >= 0


UNFINISHED = (GroupState.LEASED, GroupState.ACCEPTED, GroupState.TURN)
"""Groups that are under way or wait for the learner."""

UNANSWERED = (GroupState.OPEN, GroupState.LEASED, GroupState.TRIAL, GroupState.TURN)

WAITING = (RolloutState.BUFFERED, RolloutState.UNSCORED)
"""Rollouts that are still to be trained on."""

GROUP_MOVES: Mapping[GroupState, tuple[GroupState, ...]] = {
    GroupState.OPEN: (GroupState.LEASED, GroupState.TRIAL),
    GroupState.TRIAL: (GroupState.LEASED, GroupState.OPEN, GroupState.ACCEPTED, GroupState.TURN),
    GroupState.LEASED: (GroupState.ACCEPTED, GroupState.OPEN, GroupState.TRIAL, GroupState.TURN),
    GroupState.ACCEPTED: (GroupState.TRAINED, GroupState.OPEN, GroupState.UNJUDGED, GroupState.TURN),
    GroupState.TURN: (GroupState.LEASED, GroupState.TRIAL, GroupState.OPEN),
    GroupState.TRAINED: (),
    GroupState.UNJUDGED: (),
}
"""The states that may follow each state of a group."""

ROLLOUT_MOVES: Mapping[RolloutState, tuple[RolloutState, ...]] = {
    RolloutState.UNSCORED: (
        RolloutState.BUFFERED,
        RolloutState.MEASURED,
        RolloutState.TURN,
        RolloutState.UNJUDGED,
        RolloutState.UNUSED,
        RolloutState.RETRACTED,
    ),
    RolloutState.TURN: (RolloutState.PART, RolloutState.UNUSED, RolloutState.RETRACTED),
    RolloutState.PART: (),
    RolloutState.BUFFERED: (
        RolloutState.BATCHED,
        RolloutState.STALE,
        RolloutState.SURPLUS,
        RolloutState.ALIKE,
        RolloutState.UNUSED,
        RolloutState.RETRACTED,
    ),
    RolloutState.MEASURED: (RolloutState.RETRACTED,),
    RolloutState.SERVED: (RolloutState.RETRACTED,),
    RolloutState.BATCHED: (),
    RolloutState.STALE: (),
    RolloutState.SURPLUS: (),
    RolloutState.ALIKE: (),
    RolloutState.UNUSED: (),
    RolloutState.RETRACTED: (),
    RolloutState.UNJUDGED: (),
}
"""The states that may follow each state of a rollout.

The first state is unscored, buffered, measured, served or surplus.
"""


def groups_before(state: GroupState) -> list[GroupState]:
    """Return the states from which a group may move to this one."""
    return [before for before, after in GROUP_MOVES.items() if state in after]


def rollouts_before(state: RolloutState) -> list[RolloutState]:
    """Return the states from which a rollout may move to this one."""
    return [before for before, after in ROLLOUT_MOVES.items() if state in after]
