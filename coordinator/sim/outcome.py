"""What happened in a run."""

import hashlib
from collections import Counter, defaultdict
from dataclasses import dataclass, field

from coordinator.rules.fleet_choice import Change


@dataclass(frozen=True)
class SimulatedUpdate:
    """One update: when its batch was formed, how long the learner had waited, how old the groups were."""

    update: int
    formed_s: float
    waited_s: float
    ages: Counter[int]
    working: int
    spent: float
    discarded: float
    """In groups, since the beginning."""


@dataclass
class SimulationOutcome:
    """Everything that is counted."""

    steps: list[SimulatedUpdate] = field(default_factory=list)
    discarded: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    """Groups, or parts of them, that were wasted samples, by what became of them."""
    continued: int = 0
    """Groups that were gone on with."""
    helped: int = 0
    """Late groups that a second node was given."""
    forged: int = 0
    """Forgeries that were accepted,"""
    trained_forged: int = 0
    """and those of them that were trained on."""
    banned: int = 0
    spreads_s: list[float] = field(default_factory=list)
    """From each publication until half of the nodes could sample from it."""
    changes: list[tuple[float, Change]] = field(default_factory=list)
    events: int = 0
    ended_s: float = 0.0
    spent: float = 0.0
    trace: str = ""
    """A hash of all events in their order: equal runs have equal ones."""


class Trace:
    """The hash of a run's events so far."""

    def __init__(self) -> None:
        self._hash = hashlib.blake2b(digest_size=16)

    def add(self, moment_s: float, what: str) -> None:
        self._hash.update(f"{moment_s!r} {what}\n".encode())

    def __str__(self) -> str:
        return self._hash.hexdigest()
