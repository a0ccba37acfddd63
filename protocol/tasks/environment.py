"""Environments: games of several turns, as deterministic state machines of text.

    play = environment("leduc", {"opponent": "rule"}).reset(seed)
    play.opening                      what the policy reads first
    play.step("raise")                what it reads next, or None at the end
    play.reward()                     of the episode as it stands

- All chance is a function of the seed and of what was said: whoever replays the same actions gets the same episode, on
  any machine. So no global randomness, no clock, and no float that decides anything.
- An action is whatever text the policy said. One that means nothing has a defined effect: nothing a policy says raises.
- What an environment says is never made of what the policy said, so nobody can put a special token into it.
- An episode has a bounded number of turns. One that was cut off is judged as if its player had given up.
"""

from collections.abc import Mapping
from typing import Protocol

from protocol.tasks.interface import Reward

Parameters = Mapping[str, int | str]


class Play(Protocol):
    """One episode on its way."""

    @property
    def opening(self) -> str:
        """What the policy reads before its first turn."""

    def step(self, action: str) -> str | None:
        """Take a turn; what the policy reads before its next one, or None if that was the last."""

    def reward(self) -> Reward:
        """What the whole episode earns, with its named components."""


class Environment(Protocol):
    """A game with its parameters."""

    @property
    def words(self) -> tuple[str, ...]:
        """Pieces of its text that a small tokenizer should know whole."""

    @property
    def distinct(self) -> bool:
        """Whether an opening stands for its problem, so that train and held-out openings must not meet."""

    def reset(self, seed: int) -> Play:
        """The episode of a seed, which is any integer of 63 bits."""

    def demonstration(self, seed: int) -> tuple[str, ...]:
        """The turns of somebody who knows how one speaks here, and plays badly."""
