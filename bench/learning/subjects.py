"""Tasks to learn: where each policy begins, and the figure that judges it.

- Settings are those of the examples, but smaller: a training takes a minute or two of one processor, and goes on after
  that in none of them.
- Each seed's trainings begin with the same policy, which imitated somebody careless and so is sometimes right.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from string import ascii_letters

from bench.learning.teacher import spells_carelessly, taught
from bench.learning.trial import Trial
from coordinator.learner.embedded import DEFAULT_SHAPE, EmbeddedShape

EXAMPLES = Path(__file__).parents[2] / "examples"

SMALL = EmbeddedShape(hidden=64, layers=2, heads=4, intermediate=256)
"""A tenth of the demo's: Leduc has 288 situations."""

MIDDLE = EmbeddedShape(hidden=96, layers=3, heads=4, intermediate=384)

SEEING_STEPS = 600
"""Steps of imitation. Up to the 200th a policy solves no more rooms than a walk about does: it does not see them yet,
and reward alone would have to teach it that.
"""

COUNTED = 500
"""Held-out problems that are decoded greedily: a standard error of two points at most."""

ROOMS = 200
"""Held-out rooms that are each tried once, drawn as in training: one of three points and a half."""


@dataclass(frozen=True)
class Subject:
    """A task to learn."""

    name: str
    example: str
    """The example whose settings it takes."""
    settings: tuple[str, ...]
    updates: int
    every: int
    """Updates from one measurement to the next."""
    figure: str
    unit: str
    top: float
    """The top of the plot."""
    measure: Callable[[Trial], float]
    gain_wanted: float
    """The gain of every seed that is wanted, where groups are fresh."""
    rises: bool = True
    """True if more of the figure is better."""
    shape: EmbeddedShape = DEFAULT_SHAPE
    words: tuple[str, ...] = ()
    """Words that the policy's tokenizer knows as tokens of their own, where the task does not say that itself."""
    template: str = ""
    """The policy's chat template, if prompts are messages."""
    begin: Callable[[Trial], object] = Trial.warm_start

    def gain(self, before: float, after: float) -> float:
        """Return the improvement."""
        return after - before if self.rises else before - after


def _right(trial: Trial) -> float:
    return 100 * trial.right(COUNTED)


def _exploitable(trial: Trial) -> float:
    return trial.crew.evaluate()["eval/exploitability"]


def _solved(trial: Trial) -> float:
    return 100 * fmean(reward.components["solved"] for reward in trial.held_out(ROOMS))


def _sees_rooms(trial: Trial) -> None:
    """Longer imitation than a round's, of somebody who knows the way three times in five."""
    trial.imitate_play(SEEING_STEPS)


SUBJECTS = (
    Subject(
        name="arithmetic",
        example="demo.toml",
        settings=(),
        updates=80,
        every=10,
        figure="held-out sums right, greedily",
        unit="%",
        top=100,
        measure=_right,
        gain_wanted=15,
    ),
    Subject(
        name="spell_backward",
        example="demo.toml",
        settings=(
            "task.name=reasoning-gym",
            'task.parameters={generator="spell_backward", min_word_len=4, max_word_len=5}',
            "sampling.max_new_tokens=8",
            "sampling.samples_per_group=16",
            "learner.groups_per_update=8",
            "learner.learning_rate=2e-4",
        ),
        updates=60,
        every=10,
        figure="held-out words right, greedily",
        unit="%",
        top=100,
        measure=_right,
        gain_wanted=15,
        words=("Spell this word backward (example: sun -> nus): ", *ascii_letters),
        begin=lambda trial: taught(trial, spells_carelessly),
    ),
    Subject(
        name="leduc",
        example="leduc.toml",
        settings=(
            "sampling.samples_per_group=16",
            "learner.learning_rate=1e-3",
            "learner.warmup_updates=5",
            "learner.schedule=linear",
            "objective.scale_rewards=batch",
            "objective.beta=0.1",
            'task.parameters={opponent="mixed"}',
            "episode.turn_tokens_max=4",
        ),
        updates=24,
        every=6,
        figure="exploitability",
        unit="chips per hand",
        top=2.5,
        measure=_exploitable,
        gain_wanted=0.2,
        rises=False,
        shape=SMALL,
    ),
    Subject(
        name="sokoban",
        example="sokoban.toml",
        settings=(
            "task.parameters={boxes=1, pulls=3, turns=2, moves=2}",
            "episode.turn_tokens_max=6",
            "sampling.max_new_tokens=60",
            "sampling.samples_per_group=16",
            "learner.learning_rate=1e-3",
            "learner.warmup_updates=5",
        ),
        updates=40,
        every=10,
        figure="held-out rooms solved",
        unit="%",
        top=100,
        measure=_solved,
        begin=_sees_rooms,
        shape=MIDDLE,
        gain_wanted=15,
    ),
)

BY_NAME = {subject.name: subject for subject in SUBJECTS}
