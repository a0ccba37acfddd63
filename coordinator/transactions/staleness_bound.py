"""The staleness bound in force, where it adapts: S between the operator's least and most, by what the learner measures.

- Each reported update gives the share of tokens that the correction dropped, and the effective sample size.
- S begins at its least and moves by one. It rises once `patience` updates are judged and the last of them were calm on
  the mean, and falls when the last few drop too much or weigh too little. Between the two it stays.
- Each fall doubles the patience: a bound that was too large is tried again ever more rarely.
- After a change nothing is judged until all groups that were leased under the bound before must have been trained on.
- It decides over new leases alone. Intake and batches go by the operator's maximum: work that was leased under a larger
  bound counts as it would have then.
- The state is a fact of the store, written with the report that it follows from; a restart changes nothing.

`after` is pure; the rest are effects.
"""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

import sqlalchemy as sa

from coordinator.config.work import StalenessSection
from coordinator.store.state import get_fact, set_fact

BOUND = "staleness_bound"
"""The fact of the state."""

MASKED, EFFECTIVE = "is/masked_frac", "is/ess"
"""Names of what the learner reports."""

IN_FORCE = "staleness/bound"
"""Name of the bound among an update's figures."""

MASKED_MAX = 0.05
"""More of the tokens dropped than this, and S falls."""
MASKED_CALM = 0.02
EFFECTIVE_MIN = 0.8
"""Less of the tokens' worth left than this by their unequal weights, and S falls."""
EFFECTIVE_CALM = 0.9

LOUD_UPDATES = 4
"""Updates over whose mean S falls: few, since what is dropped was paid for."""
CALM_UPDATES = 8
PATIENCE_MAX = 64


@dataclass(frozen=True)
class StalenessRules:
    """The bounds of S."""

    least: int
    most: int


@dataclass(frozen=True)
class UpdateFigures:
    """One update's figures."""

    masked: float
    effective: float


@dataclass(frozen=True)
class BoundState:
    """The bound, and what was seen under it."""

    bound: int
    judged_from: int = 1
    """The first update that trains on nothing that was leased under the bound before."""
    patience: int = CALM_UPDATES
    seen: tuple[UpdateFigures, ...] = ()
    """The last updates since then."""
    calm: int = 0
    """Updates judged since then, or since the bound might have risen."""


def after(state: BoundState, update: int, seen: UpdateFigures, rules: StalenessRules) -> BoundState:
    """Return the state once this update was reported."""
    state = replace(state, bound=min(max(state.bound, rules.least), rules.most))
    if update < state.judged_from:
        return state
    state = replace(state, seen=(*state.seen, seen)[-CALM_UPDATES:], calm=state.calm + 1)
    if state.bound > rules.least and _is_loud(state.seen[-LOUD_UPDATES:]):
        return _moved(state, update, state.bound - 1, min(2 * state.patience, PATIENCE_MAX))
    if state.calm < state.patience or state.bound == rules.most or not _is_calm(state.seen):
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
    return sum(one.masked for one in seen) / len(seen)


def _mean_effective(seen: tuple[UpdateFigures, ...]) -> float:
    return sum(one.effective for one in seen) / len(seen)


def rules_of(section: StalenessSection) -> StalenessRules | None:
    """Return what S may be, or None if it does not adapt."""
    return StalenessRules(section.least, section.max_updates) if section.adaptive else None


def bound_of(remembered: Mapping[str, Any] | None, rules: StalenessRules) -> int:
    """Return the bound that such a fact puts in force; the least before there is one."""
    bound = int(remembered["bound"]) if remembered else rules.least
    return min(max(bound, rules.least), rules.most)


def in_force(connection: sa.Connection, section: StalenessSection) -> int:
    """Return S as leases are offered by it now."""
    rules = rules_of(section)
    return section.max_updates if rules is None else bound_of(get_fact(connection, BOUND), rules)


def follow(connection: sa.Connection, update: int, metrics: Mapping[str, float], rules: StalenessRules) -> int:
    """Move the bound by what an update reports; an update without these figures says nothing. Return the bound."""
    remembered = get_fact(connection, BOUND)
    seen = UpdateFigures(metrics.get(MASKED, math.nan), metrics.get(EFFECTIVE, math.nan))
    if math.isfinite(seen.masked) and math.isfinite(seen.effective):
        remembered = asdict(after(_state(remembered, rules), update, seen, rules))
        set_fact(connection, BOUND, remembered)
    return bound_of(remembered, rules)


def _state(remembered: Mapping[str, Any] | None, rules: StalenessRules) -> BoundState:
    if not remembered:
        return BoundState(rules.least)
    return BoundState(**(dict(remembered) | {"seen": tuple(UpdateFigures(**one) for one in remembered["seen"])}))
