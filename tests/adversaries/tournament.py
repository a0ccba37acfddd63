"""All attacks to be played, each once: several processes share them, and a run that was killed goes on.

- A folder holds the policies, and a file for each campaign that was played to its end.
- Whoever plays a campaign holds a lock on it, which ends with the process: what a killed one had begun is played again.
- A campaign's inputs are its name, so a row that was played under other inputs is another row.
"""

import fcntl
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from coordinator.audit.exact_scorer import own_class
from coordinator.base.files import write_durably
from tests.adversaries.arena import Stage
from tests.adversaries.campaign import Result, fight
from tests.adversaries.catalogue import AT_ONCE, OTHER_TOKENS, OTHER_WEIGHTS, PATIENT
from tests.adversaries.nodes import Adversary

STRICT = "torch/fp32/cpu"
"""The class of a round that admits no other arithmetic."""


@dataclass(frozen=True)
class Campaign:
    """An attack in a round of one class, with one secret of the lottery."""

    attack: type[Adversary]
    tolerance: str
    groups: int
    secret: int = 0

    @property
    def name(self) -> str:
        return f"{self.attack.__name__}-{self.tolerance.replace('/', '_')}-{self.groups}-{self.secret}"


def campaigns(stage: Stage, groups: int, secrets: int, only: Sequence[str]) -> list[Campaign]:
    """Each attack in a round of the shipped class, and those that arithmetic may hide in stricter ones, too."""
    exact = own_class(stage.policies[0])
    made = []
    for attack in (kind for kind in AT_ONCE if not only or kind.__name__ in only):
        classes = [stage.tolerance]
        classes += [STRICT] if attack in OTHER_WEIGHTS else []
        classes += [exact] if attack in (*OTHER_WEIGHTS, *OTHER_TOKENS) else []
        made += [Campaign(attack, tolerance, groups) for tolerance in classes]
    for patient in (kind for kind in PATIENT if not only or kind.__name__ in only):
        # One that waits is given as many groups again as it waits for.
        made += [Campaign(patient, stage.tolerance, groups + patient.sleeps, number) for number in range(secrets)]
    return made


def play(folder: Path, stage: Stage, waiting: Sequence[Campaign]) -> None:
    """Play what nobody has played, and nobody is playing."""
    for campaign in waiting:
        place = folder / f"{campaign.name}.json"
        with alone(place.with_suffix(".lock")) as mine:
            if mine and not place.exists():
                staged = replace(stage, tolerance=campaign.tolerance)
                result = fight(campaign.attack, staged, campaign.groups, secret=campaign.secret)[-1]
                write_durably(place, json.dumps(asdict(result)).encode())


def played(folder: Path, wanted: Sequence[Campaign]) -> Iterator[tuple[Campaign, Result]]:
    """Return the results of the campaigns that are done."""
    for campaign in wanted:
        place = folder / f"{campaign.name}.json"
        if place.exists():
            yield campaign, Result(**json.loads(place.read_text()))


@contextmanager
def alone(lock: Path) -> Iterator[bool]:
    """Return True if no other process holds this lock, so that this one does."""
    lock.parent.mkdir(parents=True, exist_ok=True)
    with lock.open("w") as held:
        try:
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            yield False
        else:
            yield True
