"""The side branch of a retraction: batches trained on again without some groups, while the learner trains or rests.

    learner/retracting/   begun.json · checkpoints/      the work, which a kill interrupts anywhere
    learner/retracted/    <root>/<update>/               the state that the learner goes on from

- It begins with a second name of one of the learner's checkpoints, or with the starting policy, which it warm-starts as
  the learner did. It trains with the learner's own code and settings, and saves its state again and again; after a kill
  it continues from there.
- An update without a group that is left is not made: the policy stays as it is.
- The result has two parts: a policy folder for the order that publishes it, and a checkpoint with the optimizer, under
  the root of its state. The learner loads that in place of its own.
"""

import json
import shutil
import time
from contextlib import suppress
from pathlib import Path

import torch

from coordinator.base.files import link_or_copy, sync, write_durably
from coordinator.config import Config
from coordinator.learner import checkpoint
from coordinator.learner.crew import Crew
from coordinator.learner.ranks import Ranks
from coordinator.learner.start import EMBEDDED
from coordinator.rules.retraction import KeptState
from protocol.errors import ConfigInvalid, NotFound
from protocol.work.learning import TrainingGroup

WORK, RESULTS = "retracting", "retracted"

BEGUN = "begun.json"

SAVE_EVERY_S = 60.0
"""Seconds between two checkpoints: the most that a kill costs, beside one update."""

SHORT_SAVE_S = 6.0
"""The time of a save up to which checkpoints are made so often; the longer saves are, the rarer they get."""

ROOT_CHARS = 16
"""Digits of the root in a result's name."""

Groups = tuple[TrainingGroup, ...]


def kept_states(learner_folder: Path) -> list[KeptState]:
    """Return the learner's checkpoints and its starting policy, as states to begin with."""
    found = []
    for path in sorted((learner_folder / "checkpoints").glob("*")):
        if path.name.isdigit():
            with suppress(ConfigInvalid):  # it was just removed
                beside = checkpoint.read_beside(path)
                found.append(KeptState(beside["update"], int(beside.get("taken", 0))))
    start = KeptState(0, is_start=True)
    return [*([start] if (learner_folder / "start").is_dir() else []), *found]


def begun(learner_folder: Path, owners: tuple[str, ...]) -> KeptState | None:
    """Return the state with which interrupted work without these owners began; None if there is none."""
    try:
        values = json.loads((learner_folder / WORK / BEGUN).read_bytes())
    except FileNotFoundError:
        return None
    return KeptState(*values["start"]) if values["owners"] == sorted(owners) else None


def remove_done(learner_folder: Path, owners: tuple[str, ...]) -> None:
    """Remove the work without these owners, whose result was published before the process was killed."""
    if begun(learner_folder, owners) is not None:
        _remove(learner_folder / WORK)


def _remove(work: Path) -> None:
    """Remove the work, first the file that says that it was begun: what a kill leaves of the rest is not continued."""
    (work / BEGUN).unlink(missing_ok=True)
    if work.is_dir():
        sync(work)
        shutil.rmtree(work)


def result(learner_folder: Path, root: str) -> Path:
    """Return the checkpoint with the result of a retraction, by the root of its state."""
    found = checkpoint.newest(learner_folder / RESULTS / root[:ROOT_CHARS])
    if found is None:
        raise ConfigInvalid(
            f"The state {root[:ROOT_CHARS]}… of the last retraction is not in {learner_folder / RESULTS}.",
            hint="Restore the learner's folder and the round from the same backup.",
        )
    return found


def _silent(_fraction: float, _text: str) -> None:
    """Report nothing of a warm start."""


def follow(config: Config, ranks: Ranks) -> None:
    """Do what the side branch on rank 0 does, on every other rank, until its result is published."""
    torch.set_num_threads(config.learner.threads)
    Crew(config, ranks, config.round.directory / "learner" / WORK / "checkpoints").follow()
    ranks.leave()


class SideBranch:
    """Training made again from a kept state, in a folder of its own."""

    def __init__(self, config: Config, ranks: Ranks, start: KeptState, owners: tuple[str, ...]) -> None:
        self._learner = config.round.directory / "learner"
        self._folder = self._learner / WORK
        self.continues = begun(self._learner, owners) == start
        """True if the work was begun earlier with the same owners and from the same state."""
        if not self.continues:
            self._begin(start, owners)
        torch.set_num_threads(config.learner.threads)
        self._crew = Crew(config, ranks, self._folder / "checkpoints")
        if self._crew.resumed is None and config.model.path == EMBEDDED:
            self._crew.warm_start(_silent)
        self.before = str((self._crew.resumed or {}).get("before", "")) or self._crew.rooting()()
        """The root of the state that it began with."""
        self._saved_s = time.monotonic()
        self.last_save_s = 0.0
        """The time of the last save."""
        self.longest_s = 0.0
        """The longest time of an update so far."""

    @property
    def update(self) -> int:
        """Return the last update that was made."""
        return self._crew.policy.update

    def train(self, groups: Groups, *, save_every_s: float = SAVE_EVERY_S) -> None:
        """Make the next update with these groups; without any, only count it."""
        began = time.monotonic()
        if groups:
            self._crew.train(groups)
        else:
            self._crew.pass_over()
        self.longest_s = max(self.longest_s, time.monotonic() - began)
        if time.monotonic() - self._saved_s >= save_every_s * max(1.0, self.last_save_s / SHORT_SAVE_S):
            self.save()

    def save(self) -> None:
        """Write a checkpoint, from which a later process continues."""
        began = time.monotonic()
        self._crew.save(before=self.before)
        self._saved_s = time.monotonic()
        self.last_save_s = self._saved_s - began

    def finish(self, policy_folder: Path, *, in_use: str = "") -> str:
        """Write the policy to a folder and the state beside the learner's; return the root of the state.

        Results of earlier retractions are removed, except the one with the root `in_use`.
        """
        self.save()
        root = self._crew.rooting()()
        self._crew.publish(policy_folder)
        results = self._learner / RESULTS
        for path in results.glob("*"):
            if path.name not in (in_use[:ROOT_CHARS], root[:ROOT_CHARS]):
                shutil.rmtree(path)
        target = results / root[:ROOT_CHARS]
        target.mkdir(parents=True, exist_ok=True)
        _second_name(self._folder / "checkpoints" / f"{self.update:09d}", target)
        sync(results)
        return root

    def remove(self) -> None:
        """Remove the work, once its result is published, and end the other ranks."""
        _remove(self._folder)
        self._crew.over()

    def _begin(self, start: KeptState, owners: tuple[str, ...]) -> None:
        _remove(self._folder)
        (self._folder / "checkpoints").mkdir(parents=True)
        if not start.is_start:
            _second_name(self._learner / "checkpoints" / f"{start.update:09d}", self._folder / "checkpoints")
        values = {"owners": sorted(owners), "start": [start.update, start.version, start.is_start]}
        write_durably(self._folder / BEGUN, json.dumps(values).encode())


def _second_name(source: Path, folder: Path) -> None:
    """Give a checkpoint a second name in a folder, or copy it where hard links are not supported."""
    target = folder / source.name
    if target.is_dir():
        return
    draft = target.with_suffix(".new")
    shutil.rmtree(draft, ignore_errors=True)
    draft.mkdir()
    try:
        for file in sorted(source.iterdir()):
            link_or_copy(file, draft / file.name)
    except FileNotFoundError as error:
        raise NotFound(f"The checkpoint {source} was just removed.", hint="Repeat the command.") from error
    draft.rename(target)
    sync(folder)
