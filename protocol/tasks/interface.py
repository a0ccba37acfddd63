"""What every task offers, and what a reward looks like."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol


@dataclass(frozen=True, slots=True)
class Reward:
    """What a completion earns: `ok` means that it could be judged, whether right or wrong."""

    score: float
    status: Literal["ok", "invalid"]
    components: Mapping[str, float] = field(default_factory=dict)


class Task(Protocol):
    """What the coordinator, the learner and an auditor need of an environment."""

    @property
    def name(self) -> str: ...

    def prompt(self, index: int) -> str:
        """Prompt `index` of the endless train split."""

    def demonstration(self, index: int) -> tuple[str, str]:
        """A train prompt and what a teacher, who makes mistakes, says to it: item `index` of an endless corpus."""

    def demonstrated(self, prompt: str) -> frozenset[str]:
        """All that the teacher may say to a prompt."""

    def validation(self) -> Sequence[tuple[str, str]]:
        """(prompt, answer) pairs to steer training by; in no other split."""

    def held_out(self) -> Sequence[tuple[str, str]]:
        """(prompt, answer) pairs to report accuracy on; in no other split."""

    def answer(self, prompt: str) -> str:
        """The one right completion."""

    def reward(self, prompt: str, completion: str) -> Reward:
        """Judge a completion, given without its end token."""
