"""Policies that play: the supervised start that teaches them how one speaks in a game, and how much of a game they are.

- The start imitates a player who knows the words and plays badly: a policy that says nothing that means anything is
  rewarded for nothing. Only what the player said is learned, not what the environment answered.
- A policy's *strategy* in Kuhn or Leduc poker is what it would say in each situation: the chance of each legal action's
  word and the end token after it, normalised over the legal ones. Its exploitability follows exactly.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from coordinator.learner.evaluate import NOT_JUDGED, Lesson, lesson, scored
from coordinator.learner.warmstart import LEARNING_RATE, RAMP_STEPS, Progress, imitate
from protocol.policy.codec import PolicyCodec
from protocol.tasks import Episodes
from protocol.tasks.limit_poker import SPOKEN, LimitPoker, transcript
from protocol.tasks.poker_solver import exploitability, situations
from protocol.work.episode import Episode

STEPS = 80
"""Afterwards 99 of a hundred actions in Leduc are legal ones."""

SETTLING_STEPS = 30
TOKENS_PER_STEP = 1000
"""A third of a second of a processor core that is not shared."""

FIRST_GAME = 2**40
"""Train games from here on, so that RL meets them in another order."""


def warm_start(
    model: Any, task: Episodes, frame: Episode, codec: PolicyCodec, end: int, progress: Progress, *, steps: int = STEPS
) -> None:
    """Imitate for so many steps."""
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), weight_decay=0.01, fused=True)
    lessons = _lessons(task, frame, codec, end)
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = LEARNING_RATE * min(1.0, (step + 1) / RAMP_STEPS, (steps - step) / SETTLING_STEPS)
        taken, tokens = list[Lesson](), 0
        while tokens < TOKENS_PER_STEP:
            taken.append(next(lessons))
            tokens += len(taken[-1][0])
        loss = imitate(model, optimizer, taken)
        progress((step + 1) / steps, f"imitates a player who knows the words, loss {loss:.2f}")


def evaluated(model: Any, task: Episodes, frame: Episode, codec: PolicyCodec, end: int) -> dict[str, float]:
    """What can be said of a policy exactly; nothing where the game is not a small poker."""
    if not isinstance(task.environment, LimitPoker):
        return {}
    strategy = strategy_of(model, task.environment, frame, codec, end)
    return {"eval/exploitability": exploitability(task.environment.game, strategy.__getitem__)}


def strategy_of(
    model: Any, game: LimitPoker, frame: Episode, codec: PolicyCodec, end: int
) -> dict[str, Sequence[float]]:
    """Situation → the chance of each legal action, of those that are legal."""
    sayings, places = list[Lesson](), list[tuple[str, int]]()
    for name, table in situations(game.game):
        known = name.partition(":")[0]
        opening, turns = transcript(known[0], known[1:], table.history, table.actor, game.game)
        read = codec.encode(frame.opening(game.explained() + opening))
        for turn, then in turns:
            read += [*codec.encode(turn), end, *codec.encode(frame.observation(then))]
        for number, action in enumerate(table.legal):
            sayings.append(lesson(read, [*codec.encode(SPOKEN[action]), end]))
            places.append((name, number))
    found: dict[str, list[float]] = {}
    for (name, _), chance in zip(places, _chances(model, sayings), strict=True):
        found.setdefault(name, []).append(chance)
    return {name: chances if sum(chances) > 0 else [1.0] * len(chances) for name, chances in found.items()}


def _lessons(task: Episodes, frame: Episode, codec: PolicyCodec, end: int) -> Iterator[Lesson]:
    """Games as the player plays them, for ever."""
    number = FIRST_GAME
    while True:
        seed = task.game(number).seed
        number += 1
        play = task.environment.reset(seed)
        tokens = codec.encode(frame.opening(play.opening))
        judged = [False] * len(tokens)
        for turn in task.environment.demonstration(seed):
            said = [*codec.encode(turn), end]
            tokens, judged = tokens + said, judged + [True] * len(said)
            answer = play.step(turn)
            if answer is None:
                break
            read = codec.encode(frame.observation(answer))
            tokens, judged = tokens + read, judged + [False] * len(read)
        then = [token if mine else NOT_JUDGED for token, mine in zip(tokens[1:], judged[1:], strict=True)]
        yield tokens[:-1], then


def _chances(model: Any, sayings: Sequence[Lesson]) -> list[float]:
    """How likely it is that all is said which is judged."""
    found = list[float]()
    for logits, targets in scored(model, sayings):
        scores = torch.log_softmax(logits.float(), dim=-1)
        own = scores.gather(2, targets.clamp(min=0)[:, :, None])[:, :, 0]  # [n, L]
        found += own.masked_fill(targets == NOT_JUDGED, 0.0).sum(1).exp().tolist()
    return found
