"""Encoding of prompts and decoding of completions with the published policy's tokenizer, chat template and bounds.

- A prompt is encoded once, for its lease, and a completion is decoded only to be judged.
"""

import json
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any

from coordinator.environments.interface import Observation
from coordinator.rules.prompt_refs import PromptRef, problem_of
from coordinator.tasks.chat import PLAIN_CHAT, Chat, ChatTemplate
from protocol.errors import VerifierFailed
from protocol.policy.codec import PolicyCodec
from protocol.policy.model_config import positions_of
from protocol.tasks import Judging, Problem, Prompt, Reward, Task
from protocol.work.rollout import PolicyBounds, end_tokens, pack_tokens

ReadFile = Callable[[str], bytes]
"""A file of the policy by its name; raises if there is none."""

PROBLEMS_KEPT = 64


class Coder:
    """The encoder and decoder between text and a policy's tokens."""

    def __init__(self, read_file: ReadFile, chat: Chat = PLAIN_CHAT) -> None:
        self.codec = PolicyCodec(read_file("tokenizer.json").decode())
        self._template = ChatTemplate(read_file, chat)

    def encode(self, prompt: Prompt, tools: Sequence[Any] = ()) -> list[int]:
        """Encode text as it is, and messages with the policy's template; no tokens are added."""
        return self.codec.encode(prompt if isinstance(prompt, str) else self._template.render(prompt, tools))

    def encode_messages(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Any] = ()) -> list[int]:
        """Encode a chat of any fields that the policy's template may read."""
        return self.codec.encode(self._template.render_fields(messages, tools))

    def observed(self, problem: Problem, observation: Observation, turn: Sequence[int], ends: frozenset[int]) -> bytes:
        """Return the packed tokens to add to an episode after a turn: what the policy reads before its next turn."""
        if isinstance(problem.prompt, str):
            if not isinstance(observation, str):
                raise VerifierFailed("The environment answers with messages, and its prompts are plain text.")
            return pack_tokens(self.codec.encode(observation))
        messages = [{"role": "user", "content": observation}] if isinstance(observation, str) else observation
        text = self._template.after_turn(messages, problem.columns.get("tools") or ())
        if turn[-1] in ends:  # the template's own end of a message, which the policy has drawn already
            text = text.removeprefix(self.decode(turn[-1:]))
        return pack_tokens(self.codec.encode(text))

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
        self.bounds = policy_bounds(read_file, max_new_tokens)
        self.positions = positions_of(json.loads(read_file("config.json")))
        """The most tokens of a prompt with its completion; 0 if the policy does not say."""

    @property
    def judges(self) -> bool:
        """Return True if the task judges in this process, which only built-in tasks may."""
        return self._judging is not None

    def prompt(self, source: PromptRef) -> list[int]:
        """Return the tokens of a problem's prompt."""
        problem = self.problem(source)
        return self.encode(problem.prompt, problem.columns.get("tools") or ())

    def reward(self, source: PromptRef, completion: Sequence[int]) -> Reward:
        """Judge a completion of a problem by its tokens."""
        return self.judge(self.problem(source), completion)

    def judge(self, problem: Problem, completion: Sequence[int]) -> Reward:
        """Judge a completion of any problem of the task."""
        assert self._judging, "the operator's rewards run in task processes"
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


def policy_bounds(read_file: ReadFile, max_new_tokens: int) -> PolicyBounds:
    """Return the bounds of a policy's tokens, read from its files."""
    config = json.loads(read_file("config.json"))
    generation = json.loads(read_file("generation_config.json"))
    return PolicyBounds(int(config["vocab_size"]), end_tokens(config, generation), max_new_tokens)
