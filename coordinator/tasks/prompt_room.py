"""Room for answers: the longest prompts of a task against the positions of the policy.

- A prompt and everything after it share the policy's positions. In an episode these are all turns and observations, and
  `sampling.max_new_tokens` bounds them together. So a prompt may have `positions - sampling.max_new_tokens` tokens.
- The `LONGEST_KEPT` prompts with the most bytes are encoded. Of a round's copy, the import has listed them. Of a
  built-in task, which has no end, they are the longest of the first `FIRST_PROBLEMS` train problems.
- At most `ENCODED_MAX_BYTES` are encoded, the longest prompts first. So the check takes seconds for any task.
"""

import json
from collections.abc import Iterator
from heapq import nlargest
from typing import Any, NamedTuple

from coordinator.config import Config
from coordinator.tasks.chat import Chat
from coordinator.tasks.importing import LONGEST_KEPT, longest_problems, needs_data, prompt_bytes
from coordinator.tasks.kinds import environment_of
from coordinator.tasks.task_text import Coder, ReadFile
from protocol.policy.model_config import positions_of
from protocol.tasks import Problem, Prompt, Task

FIRST_PROBLEMS = 2000

ENCODED_MAX_BYTES = 8 * 2**20
"""A tokenizer encodes a few MB in a second."""

SHOWN_CHARS = 40


class PromptTooLong(NamedTuple):
    """A prompt that leaves no room for an answer of the allowed length."""

    place: str
    message: str
    next_step: str


class _Measured(NamedTuple):
    tokens: int
    place: str
    prompt: Prompt


def prompt_too_long(config: Config, task: Task, read_file: ReadFile) -> PromptTooLong | None:
    """Return the longest prompt if it leaves too little room; None if it fits, or if the policy states no limit.

    Raises `ConfigInvalid` if the policy's chat template refuses a prompt.
    """
    positions = positions_of(json.loads(read_file("config.json")))
    if not positions:
        return None
    coder = Coder(read_file, Chat.from_config(config.data))
    longest = max(_measured(config, task, coder), key=lambda measured: measured.tokens)
    most = config.sampling.max_new_tokens
    room = positions - most
    if longest.tokens <= room:
        return None
    episode = ", which bounds a whole episode" if environment_of(config) else ""
    ways = (
        [f"set sampling.max_new_tokens to {positions - longest.tokens} or less"] if longest.tokens < positions else []
    )
    ways += ["remove or shorten such prompts", "choose a model with more positions (model.path)"]
    hint = f"{', '.join(ways[:-1])}, or {ways[-1]}."
    return PromptTooLong(
        f"{longest.place}: {_shown(longest.prompt)!r}",
        f"The prompt has {longest.tokens} tokens, and at most {max(0, room)} are allowed: "
        f"the model's {positions} positions minus sampling.max_new_tokens = {most}{episode}.",
        hint[0].upper() + hint[1:],
    )


def _measured(config: Config, task: Task, coder: Coder) -> Iterator[_Measured]:
    """Yield the length of each prompt that is looked at."""
    encoded_bytes = 0
    for place, problem in _looked_at(config, task):
        tools: Any = problem.columns.get("tools") or ()
        yield _Measured(len(coder.encode(problem.prompt, tools)), place, problem.prompt)
        encoded_bytes += prompt_bytes(problem)
        if encoded_bytes > ENCODED_MAX_BYTES:
            break


def _looked_at(config: Config, task: Task) -> Iterator[tuple[str, Problem]]:
    """Yield problems with their places, the longest first."""
    if needs_data(config):
        yield from longest_problems(config)
        return
    first = ((f"train problem {number}", task.problem(number)) for number in range(FIRST_PROBLEMS))
    yield from nlargest(LONGEST_KEPT, first, key=lambda each: prompt_bytes(each[1]))


def _shown(prompt: Prompt) -> str:
    text = prompt if isinstance(prompt, str) else prompt[-1].content
    return text if len(text) <= SHOWN_CHARS else f"{text[:SHOWN_CHARS]}…"
