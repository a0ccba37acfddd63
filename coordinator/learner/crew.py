"""The actions of all ranks together, directed by rank 0: the policy of a round with its checkpoints and versions.

    rank 0         train, save, publish …: broadcasts the action to all, then does it, too
    the others     `follow`: wait for an action and do it, until the action is `OVER`

- So all ranks make the same steps in the same order. The loop on rank 0 is written for one process.
- A step without progress for `learner.watchdog_s` ends the process. Between steps no progress is needed: rank 0 waits
  for the coordinator.
"""

import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import torch

from coordinator.base.files import sync
from coordinator.config import Config
from coordinator.learner import checkpoint, playing
from coordinator.learner.outgoing import Job
from coordinator.learner.policy import TrainedPolicy, UpdateResult
from coordinator.learner.ranks import Machine, Ranks, machine_here
from coordinator.learner.settings import train_settings
from coordinator.learner.start import place, require_trained
from coordinator.learner.warmstart import Progress, accuracy, evenly_spaced, warm_start
from coordinator.tasks.chat import Chat
from coordinator.tasks.task import task_here
from coordinator.tasks.task_text import Coder
from protocol.tasks import Exact, Teaching
from protocol.work.learning import TrainingGroup

log = logging.getLogger(__name__)

OVER = "over"

OUT_OF_MEMORY = (
    "The graphics card has too little memory for %r. It will fail again at the same place: lower "
    "learner.micro_batch_tokens (now %d), set learner.gradient_checkpointing = true, or end other programs on the card."
)


def _silent(_fraction: float, _text: str) -> None:
    """Report nothing: only rank 0 reports progress."""


def _done() -> None:
    """Do nothing: the job is done already."""


class Crew:
    """The policy in the state of the last checkpoint, or in the starting state of the round.

    A replay beside the learner (`retracting`) has `checkpoints` of its own, and begins with the learner's `start`.
    """

    def __init__(self, config: Config, ranks: Ranks, checkpoints: Path | None = None) -> None:
        self._config, self._ranks = config, ranks
        self._task = task_here(config)
        self._folder = config.round.directory / "learner"
        self._checkpoints = checkpoints or self._folder / "checkpoints"
        self._progress: Progress = _silent
        with ranks.watchdog.watching():
            # Rank 0 alone: it may be removing what an earlier process left in this folder.
            last = ranks.broadcast(checkpoint.newest(self._checkpoints) if ranks.first else None)
            start = self._folder / "start"
            if last is None and ranks.first and checkpoints is None:
                game = playing.game_of(config)
                words = game.words if game else ()
                place(config.model, start, seed=config.round.seed, words=words)
            ranks.meet()
            self.policy = TrainedPolicy(start, train_settings(config), ranks)
            self.resumed = self.policy.restore(last) if last else None
            """The plain values of the checkpoint."""
        chat = Chat.from_config(config.data)
        self._coder = Coder(lambda name: (start / name).read_bytes(), chat)
        self._game: playing.GameText | None = None
        """The game in the policy's tokens, if the task is one of ours."""
        if (game := playing.game_of(config)) is not None:
            end = self.policy.ends[0]
            self._game = playing.GameText(config.task.name, game, self._coder, config.data.chat, end)

    def machines(self) -> list[Machine]:
        """Return the machine of each rank."""
        found: list[Machine] = self._together("machines")
        return found

    def train(self, groups: tuple[TrainingGroup, ...]) -> UpdateResult:
        """Make one update."""
        step: UpdateResult = self._together("train", groups)
        return step

    def pass_over(self) -> None:
        """Count an update without making it."""
        self._together("pass_over")

    def save(self, **beside: Any) -> None:
        """Write a checkpoint with these plain values."""
        self.saving(**beside)()()

    def saving(self, **beside: Any) -> Callable[[], Job]:
        """Return the job that writes a checkpoint of this moment; it must run before any weight changes.

        It returns the job that makes the checkpoint durable.
        """
        job: Callable[[], Job] = self._together("save", beside)
        return job

    def rooting(self) -> Callable[[], str]:
        """Return the job that computes the root of the present state; it must run before any weight changes."""
        job: Callable[[], str] = self._together("root")
        return job

    def continue_from(self, folder: Path) -> None:
        """Continue from the weights of a published version."""
        self._together("continue_from", folder)

    def restore(self, checkpoint_folder: Path) -> None:
        """Continue from a checkpoint: its update, weights and optimizer."""
        self._together("restore", checkpoint_folder)

    def publish(self, folder: Path) -> None:
        """Write the policy as a folder in hub format."""
        self.publishing(folder)()

    def publishing(self, folder: Path) -> Job:
        """Return the job that writes such a folder; it must run before any weight changes."""
        job: Job = self._together("publish", folder)
        return job

    def warm_start(self, progress: Progress) -> None:
        """Train the embedded policy on demonstrations for a short time, if the task has a teacher."""
        require_trained(self._config)
        self._progress = progress
        self._together("warm_start")

    def accuracy(self) -> float | None:
        """Return the share of held-out problems that are answered exactly; None if answers have many correct forms."""
        share: float | None = self._together("accuracy")
        return share

    def evaluate(self) -> dict[str, float]:
        """Return the exact scores of the policy by name: in a small poker, its exploitability."""
        scores: dict[str, float] = self._together("evaluate")
        return scores

    def over(self) -> None:
        """End the other ranks."""
        self._ranks.broadcast((OVER,))

    def follow(self) -> None:
        """Do the actions of rank 0 until the end of the round; called on every other rank."""
        while (command := self._ranks.broadcast((OVER,))) != (OVER,):
            self._do(*command)

    def _together(self, action: str, *values: Any) -> Any:
        return self._do(*self._ranks.broadcast((action, *values)))

    def _do(self, action: str, *values: Any) -> Any:
        with self._ranks.watchdog.watching():
            try:
                return self._ACTIONS[action](self, *values)
            except torch.OutOfMemoryError:
                log.error(OUT_OF_MEMORY, action, self._config.learner.micro_batch_tokens)
                raise

    def _train(self, groups: tuple[TrainingGroup, ...]) -> UpdateResult:
        return self.policy.train_step(groups)

    def _machines(self) -> list[Machine]:
        return self._ranks.gather_values(machine_here(str(self._ranks.device)))

    def _pass_over(self) -> None:
        self.policy.update += 1

    def _save(self, beside: dict[str, Any]) -> Callable[[], Job]:
        job = self.policy.saving(self._checkpoints, **beside)
        if self._ranks.size == 1:
            return job
        settle = job()
        return lambda: settle

    def _root(self) -> Callable[[], str]:
        job = self.policy.rooting()
        if self._ranks.size == 1:
            return job
        root = job()
        return lambda: root

    def _continue_from(self, folder: Path) -> None:
        self.policy.continue_from(folder)

    def _restore(self, checkpoint_folder: Path) -> None:
        self.policy.restore(checkpoint_folder)

    def _publish(self, folder: Path) -> Job:
        settings = self._config.learner
        if not (settings.lora_rank and settings.publish_adapters):
            return self._left(self.policy.writer.publishing(folder))
        base = self._base()
        if self._ranks.first:
            folder.mkdir()
            for path in base.iterdir():
                (folder / path.name).hardlink_to(path)
        self.policy.writer.save_adapter(folder, self._config.model.base_name)
        return _done

    def _left(self, job: Job) -> Job:
        """Return the job to do later, by rank 0 alone; several ranks do it at once, as it needs all of them."""
        if self._ranks.size == 1:
            return job
        job()
        return _done

    def _base(self) -> Path:
        """Return the folder that adapters are published beside; it is written once and never changed."""
        base = self._folder / "base"
        if not self._ranks.broadcast(base.exists()):
            draft = base.with_suffix(".new")
            if self._ranks.first:
                shutil.rmtree(draft, ignore_errors=True)
            self.policy.writer.save_base(draft)
            if self._ranks.first:
                for path in draft.iterdir():
                    sync(path)
                draft.rename(base)
        return base

    def _warm_start(self) -> None:
        def moved(fraction: float, text: str) -> None:
            self._ranks.watchdog.moved()
            self._progress(fraction, text)

        if self._game is not None:
            playing.warm_start(self.policy.model, self._game, moved)
        if isinstance(self._task, Teaching):
            warm_start(self.policy.model, self._task, self._coder.encode, self.policy.ends[0], moved)
        self.policy.start_here()

    def _accuracy(self) -> float | None:
        if not isinstance(self._task, Exact):
            return None
        problems, end = evenly_spaced(self._task.problems("held_out")), self.policy.ends[0]
        return accuracy(self.policy.model, problems, self._coder.encode, end, moved=self._ranks.watchdog.moved)

    def _evaluate(self) -> dict[str, float]:
        return playing.evaluated(self.policy.model, self._game) if self._game else {}

    _ACTIONS: ClassVar[dict[str, Callable[..., Any]]] = {
        "machines": _machines,
        "train": _train,
        "pass_over": _pass_over,
        "save": _save,
        "root": _root,
        "continue_from": _continue_from,
        "restore": _restore,
        "publish": _publish,
        "warm_start": _warm_start,
        "accuracy": _accuracy,
        "evaluate": _evaluate,
    }
