"""The published policy's own tokenizer and token bounds: how the coordinator reads prompts and completions."""

import json
from collections.abc import Callable

from tokenizers import Tokenizer

from protocol.rollout import PolicyBounds, end_tokens
from protocol.tasks import Task


class PolicyText:
    """Text and tokens of one round, from the files every node gets too."""

    def __init__(self, read_file: Callable[[str], bytes], task: Task, max_new_tokens: int) -> None:
        self._tokenizer = Tokenizer.from_str(read_file("tokenizer.json").decode())
        self._task = task
        self.bounds = policy_bounds(read_file, max_new_tokens)

    def prompt(self, number: int) -> list[int]:
        """The tokens of a group's prompt."""
        return self.encode(self._task.prompt(number))

    def encode(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def reward(self, prompt: list[int], completion: list[int]) -> float:
        """Score a completion by its tokens; one that did not end is judged by what it says so far."""
        tokens = completion[:-1] if completion[-1] in self.bounds.end_tokens else completion
        return self._task.reward(self._decode(prompt), self._decode(tokens)).score

    def _decode(self, tokens: list[int]) -> str:
        # Special tokens stay visible: one inside an answer makes it wrong, it does not vanish.
        return self._tokenizer.decode(tokens, skip_special_tokens=False)


def policy_bounds(read_file: Callable[[str], bytes], max_new_tokens: int) -> PolicyBounds:
    """What a policy's files say about its tokens."""
    config = json.loads(read_file("config.json"))
    generation = json.loads(read_file("generation_config.json"))
    return PolicyBounds(int(config["vocab_size"]), end_tokens(config, generation), max_new_tokens)
