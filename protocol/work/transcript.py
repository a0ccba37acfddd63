"""Transcripts: the tokens of an episode, turns that were sampled and observations that were inserted.

    turn · observation · turn · observation · … · turn

- A turn ends with an end token, or at the longest turn. Its text is the action for the environment.
- The environment's answer, encoded by the policy's own tokenizer, is inserted after it. The next turn follows.
- The episode stops when the environment has ended (`stop`); or at the longest completion, or where the next observation
  would leave no room for a turn (`length`). So a transcript always ends with a sampled token.
- The sampled positions follow from playing the episode again over the tokens alone. The sampling node and every checker
  use the same `Player`: it receives tokens and returns the tokens to insert.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from protocol.breach import Breach
from protocol.errors import EnvironmentFailed, EpisodeCutShort, EpisodeOverrun, ObservationForged, SwarmError
from protocol.tasks.environments import environment
from protocol.tasks.interface import Reward
from protocol.work.episode import Episode

Sampled = NDArray[np.bool_]


class Codec(Protocol):
    """The policy's own tokenizer."""

    def encode(self, text: str) -> list[int]:
        """Return the tokens of a text, without special tokens that the text does not contain."""

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of tokens, with every special token visible."""


@dataclass(frozen=True)
class Transcript:
    """The result of playing an episode again over its tokens."""

    sampled: Sampled
    """True for tokens of the policy, False for tokens of the environment."""
    finish: Literal["stop", "length"]
    reward: Reward


class Player:
    """An episode in progress."""

    def __init__(self, episode: Episode, codec: Codec, *, end_tokens: frozenset[int], tokens_max: int) -> None:
        self._episode, self._codec = episode, codec
        self._end_tokens, self._tokens_max = end_tokens, tokens_max
        game = environment(episode.environment, episode.parameters)
        with _our_fault():
            self._play = game.reset(episode.seed)
        self._turn: list[int] = []
        self._count = 0
        self.finish: Literal["", "stop", "length"] = ""

    def append(self, token: int) -> list[int]:
        """Append a sampled token; return the tokens to insert after it."""
        assert not self.finish, "the episode is over"
        self._count += 1
        ended = token in self._end_tokens
        if not ended:
            self._turn.append(token)
        if ended or len(self._turn) == self._episode.turn_tokens_max:
            return self._answer()
        if self._count == self._tokens_max:
            self.finish = "length"
        return []

    def reward(self) -> Reward:
        """Return the reward of the episode so far."""
        with _our_fault():
            return self._play.reward()

    def _answer(self) -> list[int]:
        turn, self._turn = self._turn, []
        with _our_fault():
            said = self._play.step(self._codec.decode(turn))
        if said is None:
            self.finish = "stop"
            return []
        inserted = self._codec.encode(self._episode.observation(said))
        if self._count + len(inserted) >= self._tokens_max:
            self.finish = "length"
            return []
        self._count += len(inserted)
        return inserted


def prompt(episode: Episode, codec: Codec) -> list[int]:
    """Return the tokens before the first turn."""
    with _our_fault():
        opening = environment(episode.environment, episode.parameters).reset(episode.seed).opening
    return codec.encode(episode.opening(opening))


def replay(player: Player, tokens: Sequence[int], *, number: int = 0) -> Transcript:
    """Play the tokens of sample `number` as one whole episode; return the transcript or raise the error."""
    sampled, place = np.zeros(len(tokens), bool), 0
    while place < len(tokens):
        if player.finish:
            raise EpisodeOverrun(
                f"Sample {number} continues after token {place}, the end of its episode.",
                breach=Breach(_tokens(number), f"{place} tokens", f"{len(tokens)} tokens", ((number, place),)),
            )
        inserted = player.append(int(tokens[place]))
        sampled[place] = True
        place += 1
        claimed = list(tokens[place : place + len(inserted)])
        if claimed != inserted[: len(claimed)]:
            wrong = next(at for at, pair in enumerate(zip(claimed, inserted, strict=False)) if pair[0] != pair[1])
            raise ObservationForged(
                f"Sample {number} does not have the environment's answer at token {place}.",
                breach=Breach(
                    _tokens(number), f"token {inserted[wrong]}", f"token {claimed[wrong]}", ((number, place + wrong),)
                ),
            )
        place += len(inserted)
    if not player.finish or place > len(tokens):
        last = ((number, len(tokens) - 1),)
        raise EpisodeCutShort(
            f"Sample {number} stops at {len(tokens)} tokens, before the end of its episode.",
            breach=Breach(_tokens(number), "more tokens, up to the end of the episode", f"{len(tokens)} tokens", last),
        )
    return Transcript(sampled, player.finish, player.reward())


def _tokens(number: int) -> str:
    return f"samples.{number}.tokens"


@contextmanager
def _our_fault() -> Iterator[None]:
    """Convert any exception of an environment to an error of ours, not of the node."""
    try:
        yield
    except SwarmError:
        raise
    except Exception as error:  # a defect in an environment can raise any exception
        raise EnvironmentFailed(f"An environment failed: {error!r}"[:500]) from error
