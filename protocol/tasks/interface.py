"""Interfaces of tasks, and the types of problems and rewards.

- A problem is a prompt, as text or as chat messages, with the data that its reward needs.
- `ok` means that a completion could be judged, whether right or wrong; `invalid`, that it broke the required format.
  `verifier_error` means that the task process failed: it says nothing about the completion, and its score has no
  meaning. It is never a reward of 0.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, Protocol, runtime_checkable

Split = Literal["train", "validation", "held_out"]
"""Problems for training, for decisions during training, and for reports; no problem is in two of them."""

Status = Literal["ok", "invalid", "verifier_error"]


ROLES = ("system", "developer", "user", "assistant", "tool")
"""The roles of OpenAI's API; chat templates know each some of them."""


class ChatMessage(NamedTuple):
    """A message of a conversation."""

    role: str
    content: str


Prompt = str | tuple[ChatMessage, ...]
"""Plain text, or messages, which the policy's own chat template formats."""


@dataclass(frozen=True, slots=True)
class Problem:
    """A prompt with the data that its reward needs."""

    prompt: Prompt
    answer: str = ""
    """The answer that earns the reward, if it is known."""
    columns: Mapping[str, Any] = field(default_factory=dict)
    """Further data for the reward."""


Spans = tuple[tuple[int, int], ...]
"""Half-open ranges: start, and end (exclusive)."""


@dataclass(frozen=True, slots=True)
class Reward:
    """The reward of a completion: its score, the components of the score, and its weight in training."""

    score: float
    status: Status
    components: Mapping[str, float] = field(default_factory=dict)
    reason: str = ""
    """The reason of a `verifier_error`."""
    weight: float = 1.0
    """The factor of the sample's advantage; with 0 it only counts in the group's mean."""
    skip: Spans = ()
    """Spans that are not trained on: characters of the completion, or tokens once it is stored."""


class Task(Protocol):
    """The interface of every task, for the coordinator. Nodes need no task: they get prompts with their leases."""

    @property
    def name(self) -> str: ...

    def problem(self, index: int) -> Problem:
        """Return problem `index` of the endless train split; a finite split begins again, in another order."""

    def problems(self, split: Literal["validation", "held_out"]) -> Sequence[Problem]:
        """Return all problems of a split that is not trained on."""


@runtime_checkable
class Judging(Protocol):
    """A task whose reward is pure, fast, and cannot hang: only code of this package may implement it."""

    def reward(self, problem: Problem, completion: str) -> Reward:
        """Judge a completion, given without its end token."""


@runtime_checkable
class Exact(Task, Protocol):
    """A task in which each problem has exactly one right completion."""

    @property
    def exact(self) -> Literal[True]: ...


@runtime_checkable
class Teaching(Task, Protocol):
    """A task with an imperfect teacher, whose answers can warm up a policy without any skill."""

    def demonstration(self, index: int) -> Problem:
        """Return item `index` of an endless corpus: a train problem with the teacher's answer."""

    def demonstrated(self, problem: Problem) -> frozenset[str]:
        """Return all answers that the teacher may give to a problem."""
