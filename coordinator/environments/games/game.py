"""The interface of our games: deterministic state machines of text.

    play = open_game("leduc", {"opponent": "rule"}).reset(seed)
    play.opening                      the text before the policy's first turn
    play.step("raise")                the text before its next turn, or None at the end
    play.reward()                     the reward of the game so far

- All chance is a function of the seed and of the actions: a replay of the same actions gives the same game on any
  machine. So there is no global randomness, no clock, and no decision by a float.
- An action is any text of the policy. A meaningless one has a defined effect; no text raises an exception.
- The texts of a game never contain text of the policy, so nobody can put a special token into them.
- A game has a bounded number of turns. One that was cut off is judged as if its player had given up.
"""

from collections.abc import Mapping
from typing import Protocol

from protocol.tasks import Reward

Parameters = Mapping[str, int | str]


class Play(Protocol):
    """A game in progress."""

    @property
    def opening(self) -> str:
        """Return the text that the policy reads before its first turn."""

    def step(self, action: str) -> str | None:
        """Take a turn; return the text before the next turn, or None if this turn was the last."""

    def reward(self) -> Reward:
        """Return the reward of the whole game, with its named components."""


class Game(Protocol):
    """A game with its parameters."""

    @property
    def words(self) -> tuple[str, ...]:
        """Return pieces of its text that a small tokenizer should have as single tokens."""

    @property
    def distinct(self) -> bool:
        """Return True if an opening identifies its problem, so that train and held-out openings must differ."""

    def reset(self, seed: int) -> Play:
        """Return the game of a seed, which is any integer of 63 bits."""

    def demonstration(self, seed: int) -> tuple[str, ...]:
        """Return the turns of a player that uses the right format, and plays badly."""
