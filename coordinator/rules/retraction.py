"""The plan of a retraction: the state from which updates are made again without some owners' groups, and its cost.

    updates      1 ─ … ─ 40 ─ … ─ 57 ─────────── … ─ 90        57 has the first group to leave out
    kept states  0 ────── 40 ─────── 60 ──────── … ─ 90        40 is the last clean one: 41 to 90 are made again

- A state is *clean* if none of the groups to leave out was trained on before it, or an earlier retraction, which the
  state comes after, has left them out already.
- What an earlier retraction left out stays out: a replay from a state before it leaves out those groups, too.
- Behind a version of the operator's choice no replay leads: which groups its weights come from is not known.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from protocol import limits
from protocol.errors import ConfigInvalid


@dataclass(frozen=True)
class KeptState:
    """A state of training that can be loaded."""

    update: int
    version: int = 0
    """The last version that the learner had loaded in place of its own state; 0: none."""
    is_start: bool = False
    """True for the starting policy, without a checkpoint."""


@dataclass(frozen=True)
class EarlierRetraction:
    """A retraction in the log: batches up to `last` were trained on without the groups of these owners."""

    version: int
    last: int
    owners: frozenset[str]


@dataclass(frozen=True)
class OwnedGroup:
    """A group that was trained on, and those of the owners in question who worked on it."""

    batch: int
    claim_id: str
    owners: frozenset[str]


@dataclass(frozen=True)
class RetractionPlan:
    """The start of a replay, and the groups that it leaves out."""

    start: KeptState | None
    """The last clean state; None if none is kept."""
    first_trained: int
    """The first update that trained on a group to leave out, and still does."""
    last: int
    """The newest batch."""
    left_out: tuple[OwnedGroup, ...]
    """The groups to leave out, in the order of the batches from `start` on."""
    emptied: tuple[int, ...]
    """Updates that have no other groups, and are not made again."""

    @property
    def updates(self) -> int:
        """Return the number of updates to make again."""
        return self.last - self.start.update - len(self.emptied) if self.start else 0


def named_owners(groups: Sequence[OwnedGroup]) -> list[str]:
    """Return the owners of groups to leave out, sorted; refuse more than an entry of the log can name."""
    owners = sorted({owner for group in groups for owner in group.owners})
    if len(owners) > limits.RETRACTED_OWNERS_MAX:
        first = min(group.batch for group in groups)
        raise ConfigInvalid(
            f"The groups of {len(owners)} owners would be left out, and a retraction in the log can name "
            f"{limits.RETRACTED_OWNERS_MAX}.",
            hint=f"Go back to a version from before update {first:,} with `policy rollback`.",
        )
    return owners


def to_leave_out(
    groups: Iterable[OwnedGroup], owners: Collection[str], earlier: Sequence[EarlierRetraction]
) -> list[OwnedGroup]:
    """Return the groups of `owners`, and those that earlier retractions left out."""
    return [
        group
        for group in groups
        if not group.owners.isdisjoint(owners) or any(_left_out(group, each) for each in earlier)
    ]


def is_clean(state: KeptState, left_out: Iterable[OwnedGroup], earlier: Sequence[EarlierRetraction]) -> bool:
    """Return True if none of the groups to leave out has had an effect on a state."""
    before = [each for each in earlier if each.version <= state.version]
    return all(any(_left_out(group, each) for each in before) for group in left_out if group.batch <= state.update)


def plan(
    left_out: Sequence[OwnedGroup],
    states: Iterable[KeptState],
    earlier: Sequence[EarlierRetraction],
    *,
    sizes: Mapping[int, int],
    version: int,
    chosen: int,
) -> RetractionPlan | None:
    """Return the plan; None if the present state is clean.

    `sizes` has the number of groups of each batch. `version` is the last version that was loaded in place of the
    learner's state, and `chosen` the last one of these that was no result of a retraction.
    """
    last = max(sizes, default=0)
    if is_clean(KeptState(last, version), left_out, earlier):
        return None
    usable = [each for each in states if each.version >= chosen and is_clean(each, left_out, earlier)]
    start = max(usable, key=lambda each: (each.update, each.version, not each.is_start), default=None)
    done = [each for each in earlier if each.version <= version]
    present = [group.batch for group in left_out if not any(_left_out(group, each) for each in done)]
    after = tuple(sorted((group for group in left_out if start and group.batch > start.update), key=_place))
    counts = Counter(group.batch for group in after)
    emptied = tuple(batch for batch in sorted(counts) if counts[batch] == sizes[batch])
    return RetractionPlan(start, min(present), last, after, emptied)


def _place(group: OwnedGroup) -> int:
    return group.batch


def _left_out(group: OwnedGroup, earlier: EarlierRetraction) -> bool:
    """Return True if an earlier retraction left a group out."""
    return group.batch <= earlier.last and not group.owners.isdisjoint(earlier.owners)
