"""Policies that play games: the supervised start that teaches them the words of a game, and the exact evaluation.

- The start imitates a player who knows the words and plays badly: a policy without meaningful words would never get a
  reward. Only the player's words are learned, not the environment's answers.
- A policy's *strategy* in Kuhn or Leduc poker is the chance of each legal action's word and the end token after it, in
  each situation, normalised over the legal actions. Its exploitability follows exactly.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from coordinator.config import Config
from coordinator.environments.games.betting import situations
from coordinator.environments.games.episodes import GAMES, Game, open_game, seed_of
from coordinator.environments.games.exploitability import exploitability
from coordinator.environments.games.limit_poker import SPOKEN, LimitPoker, transcript
from coordinator.learner.warmstart import (
    LEARNING_RATE,
    NOT_JUDGED,
    RAMP_STEPS,
    Lesson,
    Progress,
    imitate,
    lesson,
    scored,
)
from coordinator.tasks.task_text import Coder
from protocol.tasks import ChatMessage, Problem, Prompt
from protocol.work.rollout import unpack_tokens

STEPS = 80
"""The steps of imitation: after these, 99 of 100 actions in Leduc are legal."""

SETTLING_STEPS = 30
TOKENS_PER_STEP = 1000
"""A step takes a third of a second on a processor core that is not shared."""

FIRST_GAME = 2**40
"""The first train game used, so that RL uses the games in another order."""


@dataclass(frozen=True)
class GameText:
    """A game in the tokens of a policy."""

    name: str
    game: Game
    coder: Coder
    chat: bool
    """True if its texts are messages in the policy's chat template."""
    end: int
    """The token that ends a turn."""

    def opening(self, text: str) -> list[int]:
        """Return the tokens before the first turn."""
        return self.coder.encode(self._prompt(text))

    def turn(self, text: str) -> list[int]:
        """Return the tokens of a turn."""
        return [*self.coder.codec.encode(text), self.end]

    def answer(self, text: str) -> list[int]:
        """Return the tokens after a turn that its end token has ended."""
        problem = Problem(self._prompt(""))
        packed = self.coder.observed(problem, text, [self.end], frozenset({self.end}))
        return [*map(int, unpack_tokens(packed))]

    def _prompt(self, text: str) -> Prompt:
        return (ChatMessage("user", text),) if self.chat else text


def game_of(config: Config) -> Game | None:
    """Return the game of a round; None if its task is something else."""
    name, parameters = config.task.name, config.task.parameters
    return open_game(name, parameters) if name in GAMES else None  # type: ignore[arg-type]  # it checks the types


def warm_start(model: Any, text: GameText, progress: Progress, *, steps: int = STEPS) -> None:
    """Imitate the player of a game for `steps` steps."""
    imitate_player(model, _lessons(text), progress, steps=steps)


def imitate_player(model: Any, lessons: Iterator[Lesson], progress: Progress, *, steps: int) -> None:
    """Imitate a player of any environment, whose episodes are the lessons, for `steps` steps."""
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), weight_decay=0.01, fused=True)
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = LEARNING_RATE * min(1.0, (step + 1) / RAMP_STEPS, (steps - step) / SETTLING_STEPS)
        taken, tokens = list[Lesson](), 0
        while tokens < TOKENS_PER_STEP:
            taken.append(next(lessons))
            tokens += len(taken[-1][0])
        loss = imitate(model, optimizer, taken)
        progress((step + 1) / steps, f"imitates a player who knows the words, loss {loss:.2f}")


def evaluated(model: Any, text: GameText) -> dict[str, float]:
    """Return the exact scores of a policy; none if the game is not a small poker."""
    if not isinstance(text.game, LimitPoker):
        return {}
    strategy = strategy_of(model, text.game, text)
    return {"eval/exploitability": exploitability(text.game.game, strategy.__getitem__)}


def strategy_of(model: Any, game: LimitPoker, text: GameText) -> dict[str, Sequence[float]]:
    """Return the chance of each legal action in each situation, normalised over the legal actions."""
    sayings, places = list[Lesson](), list[tuple[str, int]]()
    for name, table in situations(game.game):
        known = name.partition(":")[0]
        opening, turns = transcript(known[0], known[1:], table.history, table.actor, game.game)
        read = text.opening(game.explained() + opening)
        for turn, then in turns:
            read += [*text.turn(turn), *text.answer(then)]
        for number, action in enumerate(table.legal):
            sayings.append(lesson(read, text.turn(SPOKEN[action])))
            places.append((name, number))
    by_situation: dict[str, list[float]] = {}
    for (name, _), chance in zip(places, _chances(model, sayings), strict=True):
        by_situation.setdefault(name, []).append(chance)
    return {name: chances if sum(chances) > 0 else [1.0] * len(chances) for name, chances in by_situation.items()}


def _lessons(text: GameText) -> Iterator[Lesson]:
    """Yield games of the player, without end."""
    number = FIRST_GAME
    while True:
        seed = seed_of(text.name, text.game, "train", 0, number)
        number += 1
        play = text.game.reset(seed)
        tokens = text.opening(play.opening)
        judged = [False] * len(tokens)
        for turn in text.game.demonstration(seed):
            said = text.turn(turn)
            tokens, judged = tokens + said, judged + [True] * len(said)
            answer = play.step(turn)
            if answer is None:
                break
            read = text.answer(answer)
            tokens, judged = tokens + read, judged + [False] * len(read)
        then = [token if mine else NOT_JUDGED for token, mine in zip(tokens[1:], judged[1:], strict=True)]
        yield tokens[:-1], then


def _chances(model: Any, sayings: Sequence[Lesson]) -> list[float]:
    """Return the probability that the model says all judged tokens, for each lesson."""
    chances = list[float]()
    for logits, targets in scored(model, sayings):
        scores = torch.log_softmax(logits.float(), dim=-1)
        own = scores.gather(2, targets.clamp(min=0)[:, :, None])[:, :, 0]  # [n, L]
        chances += own.masked_fill(targets == NOT_JUDGED, 0.0).sum(1).exp().tolist()
    return chances
