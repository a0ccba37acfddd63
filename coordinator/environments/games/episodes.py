"""Built-in environments as tasks: the games of the train, validation and held-out splits.

- Game i of a split has a seed that is a hash of the split and i. If the opening identifies a game, its hash must also
  give this split, so that two seeds of one game cannot be in two splits.
- The parameters are the environment's, and three more: `turn_tokens_max`, `chat` and `held_out`.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, Literal, TypeVar, overload

from protocol.errors import UnknownTask
from coordinator.environments.games import chance
from coordinator.environments.games.environment import Playable
from coordinator.environments.games.environments import environment
from protocol.tasks.interface import ChatMessage, Problem, Prompt, Reward, Split

SPLIT_PARTS = 10
"""A tenth of the games is held out, another tenth is for validation."""

HELD_OUT = 200
TURN_TOKENS_MAX = 64

_OF_PART: dict[int, Split] = {0: "held_out", 1: "validation"}


Item = TypeVar("Item")


@dataclass(frozen=True, slots=True)
class _Made(Sequence[Item], Generic[Item]):
    """Items that are built on access: to find one room of a split, about ten are built."""

    length: int
    make: Callable[[int], Item]

    def __len__(self) -> int:
        return self.length

    @overload
    def __getitem__(self, index: int) -> Item: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Item]: ...

    def __getitem__(self, index: int | slice) -> Item | Sequence[Item]:
        chosen = range(self.length)[index]
        return self.make(chosen) if isinstance(chosen, int) else [self.make(each) for each in chosen]


@dataclass(frozen=True, slots=True)
class Game:
    """A game without the framing of the policy's chat template."""

    environment: str
    parameters: Mapping[str, int | str]
    seed: int
    turn_tokens_max: int


@dataclass(frozen=True, slots=True)
class Episodes:
    """The task of an environment; the seed orders its train split."""

    seed: int
    name: str
    parameters: Mapping[str, int | str]
    environment: Playable
    turn_tokens_max: int
    chat: bool
    """True if prompts use the policy's chat template."""
    held_out: int
    """Games in each of the other splits."""

    def game(self, index: int) -> Game:
        """Return the game of problem `index`."""
        return self._game("train", index)

    def games(self, split: Literal["validation", "held_out"]) -> Sequence[Game]:
        """Return the games of a split that is not trained on."""
        return _Made(self.held_out, partial(self._game, split))

    def problem(self, index: int) -> Problem:
        return self._problem(self.game(index))

    def problems(self, split: Literal["validation", "held_out"]) -> Sequence[Problem]:
        games = self.games(split)
        return _Made(len(games), lambda index: self._problem(games[index]))

    def reward(self, problem: Problem, completion: str) -> Reward:
        """Return the reward of a game in which `completion` is the first turn and the player then gives up."""
        play = self.environment.reset(int(problem.columns["seed"]))
        play.step(completion)
        return play.reward()

    def _game(self, split: Split, index: int) -> Game:
        attempt = 0
        while True:
            seed = chance.word(self.name, split, self.seed if split == "train" else 0, index, attempt) >> 1
            if not self.environment.distinct or self._split(seed) == split:
                return Game(self.name, self.parameters, seed, self.turn_tokens_max)
            attempt += 1

    def _split(self, seed: int) -> Split:
        opening = self.environment.reset(seed).opening
        return _OF_PART.get(chance.below(SPLIT_PARTS, "split", self.name, opening), "train")

    def _problem(self, game: Game) -> Problem:
        opening = self.environment.reset(game.seed).opening
        prompt: Prompt = (ChatMessage("user", opening),) if self.chat else opening
        return Problem(prompt, columns={"seed": game.seed})


def episodes(
    name: str,
    seed: int,
    *,
    turn_tokens_max: int = TURN_TOKENS_MAX,
    chat: bool = False,
    held_out: int = HELD_OUT,
    **parameters: Any,
) -> Episodes:
    """Return the task of playing the environment `name`."""
    if turn_tokens_max < 1 or held_out < 1:
        raise UnknownTask(f"{name}: turn_tokens_max and held_out must be at least 1.")
    return Episodes(seed, name, parameters, environment(name, parameters), turn_tokens_max, chat, held_out)
