"""The staleness bound in force, if it adapts: S between the operator's least and most, by the learner's measurements.

- Each reported update gives the share of tokens that the correction dropped, and the effective sample size.
- S begins at its least and moves by one. It rises once `patience` updates are judged and the mean of the last of them
  is calm, and falls when the last few drop too many tokens or have too small an effective sample size. Else it stays.
- Each fall doubles the patience: a bound that was too large is tried again more and more rarely.
- After a change nothing is judged until all groups that were leased under the earlier bound must have been trained on.
- The bound applies to new leases only. Intake and batches use the operator's maximum: work that was leased under a
  larger bound counts as it would have then.
- The state is a fact of the store, written with the report that it follows from; a restart changes nothing.

`after` is pure; the rest are effects.
"""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

import sqlalchemy as sa

from coordinator.config.work import StalenessSection
from coordinator.store.facts import Fact, get_fact, set_fact

BOUND = Fact[Mapping[str, Any] | None]("staleness_bound", None)
"""The fact of the state."""

MASKED, EFFECTIVE = "is/masked_frac", "is/ess"
"""Names of the learner's figures."""

IN_FORCE = "staleness/bound"
"""The name of the bound among an update's figures."""

MASKED_MAX = 0.05
"""The share of dropped tokens above which S falls."""
MASKED_CALM = 0.02
EFFECTIVE_MIN = 0.8
"""The effective sample size, as a share, below which S falls."""
EFFECTIVE_CALM = 0.9

LOUD_UPDATES = 4
"""Updates over whose mean S falls: few, since dropped tokens were paid for."""
CALM_UPDATES = 8
PATIENCE_MAX = 64


@dataclass(frozen=True)
class StalenessRules:
    """The bounds of S."""

    min_updates: int
    max_updates: int


@dataclass(frozen=True)
class UpdateFigures:
    """The figures of an update that move the bound."""

    masked: float
    effective: float


@dataclass(frozen=True)
class BoundState:
    """The bound, and the figures seen under it."""

    bound: int
    judged_from: int = 1
    """The first update that trains on nothing that was leased under the bound before."""
    patience: int = CALM_UPDATES
    seen: tuple[UpdateFigures, ...] = ()
    """The figures of the last updates since then."""
    calm: int = 0
    """Updates judged since then, or since the bound might have risen."""


def after(state: BoundState, update: int, seen: UpdateFigures, rules: StalenessRules) -> BoundState:
    """Return the state once this update was reported."""
    state = replace(state, bound=min(max(state.bound, rules.min_updates), rules.max_updates))
    if update < state.judged_from:
        return state
    state = replace(state, seen=(*state.seen, seen)[-CALM_UPDATES:], calm=state.calm + 1)
    if state.bound > rules.min_updates and _is_loud(state.seen[-LOUD_UPDATES:]):
        return _moved(state, update, state.bound - 1, min(2 * state.patience, PATIENCE_MAX))
    if state.calm < state.patience or state.bound == rules.max_updates or not _is_calm(state.seen):
        return state
    return _moved(state, update, state.bound + 1, state.patience)


def _moved(state: BoundState, update: int, bound: int, patience: int) -> BoundState:
    return BoundState(bound, update + max(state.bound, bound) + 2, patience)


def _is_loud(seen: tuple[UpdateFigures, ...]) -> bool:
    if len(seen) < LOUD_UPDATES:
        return False
    return _mean_masked(seen) > MASKED_MAX or _mean_effective(seen) < EFFECTIVE_MIN


def _is_calm(seen: tuple[UpdateFigures, ...]) -> bool:
    return _mean_masked(seen) <= MASKED_CALM and _mean_effective(seen) >= EFFECTIVE_CALM


def _mean_masked(seen: tuple[UpdateFigures, ...]) -> float:
    return sum(update.masked for update in seen) / len(seen)


def _mean_effective(seen: tuple[UpdateFigures, ...]) -> float:
    return sum(update.effective for update in seen) / len(seen)


def rules_of(section: StalenessSection) -> StalenessRules | None:
    """Return the limits of S, or None if it does not adapt."""
    return StalenessRules(section.least, section.max_updates) if section.adaptive else None


def bound_of(remembered: Mapping[str, Any] | None, rules: StalenessRules) -> int:
    """Return the bound in force by its stored fact `remembered`; the least before there is one."""
    bound = int(remembered["bound"]) if remembered else rules.min_updates
    return min(max(bound, rules.min_updates), rules.max_updates)


def in_force(connection: sa.Connection, section: StalenessSection) -> int:
    """Return S for new leases now."""
    rules = rules_of(section)
    return section.max_updates if rules is None else bound_of(get_fact(connection, BOUND), rules)


def follow(connection: sa.Connection, update: int, metrics: Mapping[str, float], rules: StalenessRules) -> int:
    """Move the bound by an update's figures, if it has them, and return the bound."""
    remembered = get_fact(connection, BOUND)
    seen = UpdateFigures(metrics.get(MASKED, math.nan), metrics.get(EFFECTIVE, math.nan))
    if math.isfinite(seen.masked) and math.isfinite(seen.effective):
        remembered = asdict(after(_state(remembered, rules), update, seen, rules))
        set_fact(connection, BOUND, remembered)
    return bound_of(remembered, rules)


def _state(remembered: Mapping[str, Any] | None, rules: StalenessRules) -> BoundState:
    if not remembered:
        return BoundState(rules.min_updates)
    return BoundState(
        **(dict(remembered) | {"seen": tuple(UpdateFigures(**figures) for figures in remembered["seen"])})
    )
