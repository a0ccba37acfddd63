"""The results of a simulation run."""

import hashlib
from collections import Counter, defaultdict
from dataclasses import dataclass, field

from coordinator.rules.fleet_choice import Change


@dataclass(frozen=True)
class SimulatedUpdate:
    """An update: the time at which its batch was formed, the learner's wait, and the ages of its groups."""

    update: int
    formed_s: float
    waited_s: float
    ages: Counter[int]
    working: int
    spent: float
    discarded: float
    """The wasted groups since the beginning."""


@dataclass
class SimulationOutcome:
    """All counters of a run."""

    steps: list[SimulatedUpdate] = field(default_factory=list)
    discarded: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    """Wasted groups, or parts of them, by the reason."""
    continued: int = 0
    """Groups that another node continued."""
    helped: int = 0
    """Late groups that were leased to a second node."""
    forged: int = 0
    """Forged groups that were accepted."""
    trained_forged: int = 0
    """Forged groups that were trained on."""
    banned: int = 0
    spreads_s: list[float] = field(default_factory=list)
    """The time from each publication until half of the nodes could sample from it."""
    changes: list[tuple[float, Change]] = field(default_factory=list)
    events: int = 0
    ended_s: float = 0.0
    spent: float = 0.0
    trace: str = ""
    """A hash of all events in their order: equal runs have equal hashes."""


class Trace:
    """The hash of a run's events so far."""

    def __init__(self) -> None:
        self._hash = hashlib.blake2b(digest_size=16)

    def add(self, moment_s: float, what: str) -> None:
        self._hash.update(f"{moment_s!r} {what}\n".encode())

    def __str__(self) -> str:
        return self._hash.hexdigest()
