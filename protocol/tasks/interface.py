"""What every task offers, and what a problem and a reward look like.

- A problem is a prompt, as text or as chat messages, with whatever its reward needs beside it.
- `ok` means that a completion could be judged, whether right or wrong; `invalid`, that it broke the form that was
  asked for. `verifier_error` says nothing of the completion: whoever should have judged it failed, and its score means
  nothing. It is never a reward of 0.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, Protocol, runtime_checkable

Split = Literal["train", "validation", "held_out"]
"""Problems to learn from, to steer training by, and to report on; no problem is in two of them."""

Status = Literal["ok", "invalid", "verifier_error"]


class ChatMessage(NamedTuple):
    """One message of a conversation."""

    role: str
    content: str


Prompt = str | tuple[ChatMessage, ...]
"""Text as it is, or messages, to which the policy's own chat template gives their form."""


@dataclass(frozen=True, slots=True)
class Problem:
    """Something to be answered."""

    prompt: Prompt
    answer: str = ""
    """What earns the reward, if that is known."""
    columns: Mapping[str, Any] = field(default_factory=dict)
    """Whatever else the reward is told."""


Spans = tuple[tuple[int, int], ...]
"""From which place up to before which other."""


@dataclass(frozen=True, slots=True)
class Reward:
    """What a completion earns, of which parts that is the sum, and how it is to be learned from."""

    score: float
    status: Status
    components: Mapping[str, float] = field(default_factory=dict)
    reason: str = ""
    """Why there is none: of a `verifier_error`."""
    weight: float = 1.0
    """What the sample's advantage is multiplied by; with 0 it only counts in the group's mean."""
    skip: Spans = ()
    """What of it is not trained on: characters of the completion; tokens, where it is stored."""


class Task(Protocol):
    """What the coordinator needs of any task. Nodes need none: they get prompts with their leases."""

    @property
    def name(self) -> str: ...

    def problem(self, index: int) -> Problem:
        """Problem `index` of the endless train split; one that ends begins again, in another order."""

    def problems(self, split: Literal["validation", "held_out"]) -> Sequence[Problem]:
        """All problems of a split that is not trained on."""


@runtime_checkable
class Judging(Protocol):
    """A task whose reward is pure, quick, and cannot hang: only code of this package may say so of itself."""

    def reward(self, problem: Problem, completion: str) -> Reward:
        """Judge a completion, given without its end token."""


@runtime_checkable
class Exact(Task, Protocol):
    """A task whose answers are the one right completion each, word for word."""

    @property
    def exact(self) -> Literal[True]: ...


@runtime_checkable
class Teaching(Task, Protocol):
    """A task with a teacher to imitate, who makes mistakes: what a policy without any skill can be warmed up with."""

    def demonstration(self, index: int) -> Problem:
        """A train problem with what the teacher says to it as its answer: item `index` of an endless corpus."""

    def demonstrated(self, problem: Problem) -> frozenset[str]:
        """All that the teacher may say to a problem."""
