"""Encoding of prompts and decoding of completions with the published policy's tokenizer, chat template and bounds.

- A prompt is encoded once, for its lease, and a completion is decoded only to be judged.
"""

import json
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache, partial

from coordinator.tasks.chat import PLAIN_CHAT, Chat, ChatTemplate
from coordinator.transactions.prompts import TRAIN, PromptRef, problem_of
from protocol.errors import ConfigInvalid
from protocol.policy.codec import PolicyCodec
from protocol.tasks import ChatMessage, Episodes, Game, Judging, Problem, Prompt, Reward, Task
from protocol.work.episode import PLAIN, Episode, Framing
from protocol.work.rollout import PolicyBounds, end_tokens

ReadFile = Callable[[str], bytes]
"""A file of the policy by its name; raises if there is none."""

PROBLEMS_KEPT = 64


class Coder:
    """The encoder and decoder between text and a policy's tokens."""

    def __init__(self, read_file: ReadFile, chat: Chat = PLAIN_CHAT) -> None:
        self.codec = PolicyCodec(read_file("tokenizer.json").decode())
        self._template = ChatTemplate(read_file, chat)

    def encode(self, prompt: Prompt) -> list[int]:
        """Encode text as it is, and messages with the policy's template; no tokens are added."""
        return self.codec.encode(prompt if isinstance(prompt, str) else self._template.render(prompt))

    def decode(self, tokens: Sequence[int]) -> str:
        return self.codec.decode(tokens)


class TaskText(Coder):
    """The problems of one round in the tokens of its policy."""

    def __init__(self, read_file: ReadFile, task: Task, max_new_tokens: int, chat: Chat = PLAIN_CHAT) -> None:
        super().__init__(read_file, chat)
        self._task = task
        # Checked once: in Python, the check takes longer than the judging itself.
        self._judging = task if isinstance(task, Judging) else None
        self.problem: Callable[[PromptRef], Problem] = lru_cache(PROBLEMS_KEPT)(partial(problem_of, task))
        """The cached lookup of a problem; each sample of a group is judged with the same problem."""
        self.bounds = replace(policy_bounds(read_file, max_new_tokens), codec=self.codec)

    @property
    def judges(self) -> bool:
        """Return True if the task judges in this process, which only built-in tasks may."""
        return self._judging is not None

    def prompt(self, source: PromptRef) -> list[int]:
        """Return the tokens of a problem's prompt."""
        return self.encode(self.problem(source).prompt)

    @property
    def environment(self) -> str:
        """Return the environment of a game; "" if the task is no game."""
        return self._task.name if isinstance(self._task, Episodes) else ""

    def episode(self, source: PromptRef) -> Episode | None:
        """Return the episode that the samples of a group play; None if the task is no game."""
        if not isinstance(self._task, Episodes):
            return None
        if source.split == TRAIN:
            return self.framed(self._task.game(source.number))
        return self.framed(self._task.games(source.split)[source.number])

    def framed(self, game: Game) -> Episode:
        """Return a game of the task with the framing of this policy."""
        assert isinstance(self._task, Episodes)
        return Episode(
            environment=game.environment,
            parameters=dict(game.parameters),
            seed=game.seed,
            turn_tokens_max=game.turn_tokens_max,
            framing=self._framing() if self._task.chat else PLAIN,
        )

    def reward(self, source: PromptRef, completion: Sequence[int]) -> Reward:
        """Judge a completion of a problem by its tokens."""
        return self.judge(self.problem(source), completion)

    def judge(self, problem: Problem, completion: Sequence[int]) -> Reward:
        """Judge a completion of any problem of the task."""
        assert self._judging, "the operator's rewards run in coordinator.rewards"
        return self.in_tokens(self._judging.reward(problem, self.judged_text(completion)), completion)

    def in_tokens(self, reward: Reward, completion: Sequence[int]) -> Reward:
        """Return the reward with its skipped spans in tokens: every token with a character of a span is skipped."""
        if not reward.skip:
            return reward
        ends = range(len(completion) + 1)

        def size(tokens: int) -> int:
            return len(self.decode(completion[:tokens]))

        spans = [
            (max(0, bisect_right(ends, start, key=size) - 1), min(len(completion), bisect_left(ends, end, key=size)))
            for start, end in reward.skip
        ]
        return replace(reward, skip=tuple(spans))

    def judged_text(self, completion: Sequence[int]) -> str:
        """Return the text to judge: all before the end token, or the whole completion if it did not end."""
        return self.decode(completion[:-1] if completion[-1] in self.bounds.end_tokens else completion)

    def _framing(self) -> Framing:
        """Return the text that the template puts around messages, found by rendering words that are in no template."""
        said, answer, then = "\ufdd0said\ufdd0", "\ufdd0answer\ufdd0", "\ufdd0then\ufdd0"
        asked = self._template.render((ChatMessage("user", said),))
        whole = self._template.render(
            (ChatMessage("user", said), ChatMessage("assistant", answer), ChatMessage("user", then))
        )
        opening, _, after = asked.partition(said)
        before, _, _ = whole.partition(answer)[2].partition(then)
        if not (asked.count(said) == whole.count(answer) == whole.count(then) == 1 and whole.endswith(after)):
            raise ConfigInvalid(
                "The policy's chat template does not treat all messages alike.",
                hint="Play with task.parameters.chat off.",
            )
        for end in sorted(self.bounds.end_tokens):  # a turn contains its own end token
            before = before.removeprefix(self.decode([end]))
        return Framing(opening=opening, before=before, after=after)


def policy_bounds(read_file: ReadFile, max_new_tokens: int) -> PolicyBounds:
    """Return the bounds of a policy's tokens, read from its files."""
    config = json.loads(read_file("config.json"))
    generation = json.loads(read_file("generation_config.json"))
    return PolicyBounds(int(config["vocab_size"]), end_tokens(config, generation), max_new_tokens)
