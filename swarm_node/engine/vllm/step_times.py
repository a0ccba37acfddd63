"""The time of vLLM's steps, divided between prompts and decoding by the tokens that were computed for each. Pure.

- vLLM does both in one step, and reports what it had of a prompt in its prefix cache only when the sample ends. So a
  step that computed prompts is divided when all their groups have ended.
- Tokens from the cache cost no time: counted as work, they would make prompts look cheap and decoding look fast.
- The groups that were cancelled are left out, and with the last of them the step.
"""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Protocol


class PrefilledGroup(Protocol):
    """A group whose prompts were computed in a step."""

    @property
    def complete(self) -> bool:
        """True if all samples have ended."""

    @property
    def computed_tokens(self) -> int:
        """Tokens before the first draw that were computed, over all samples; known when the group is complete."""


@dataclass
class _FirstStep:
    """A step in which groups drew their first tokens, and `decoded` other tokens were drawn."""

    seconds: float
    decoded: int
    groups: list[PrefilledGroup]


class StepTimes:
    """The seconds of prompts and of decoding since the last call of `take`."""

    def __init__(self) -> None:
        self._prefill_s = self._decode_s = 0.0
        self._open = list[_FirstStep]()

    def record(self, seconds: float, *, decoded: int, begun: Collection[PrefilledGroup]) -> None:
        """Count a step that drew `decoded` later tokens, and the first tokens of the groups `begun`."""
        if begun:
            self._open.append(_FirstStep(seconds, decoded, list(begun)))
        else:
            self._decode_s += seconds

    def settle(self) -> None:
        """Divide the steps whose groups have all ended."""
        for step in [step for step in self._open if all(group.complete for group in step.groups)]:
            self._open.remove(step)
            computed = sum(group.computed_tokens for group in step.groups)
            share = computed / (computed + step.decoded) if computed else 0.0
            self._prefill_s += share * step.seconds
            self._decode_s += (1 - share) * step.seconds

    def leave_out(self, gone: Collection[PrefilledGroup]) -> None:
        """Leave out groups that will not end."""
        for step in self._open:
            step.groups = [group for group in step.groups if not any(group is each for each in gone)]
        self._open = [step for step in self._open if step.groups]

    def take(self) -> tuple[float, float]:
        """Return the seconds of prompts and of decoding, and begin anew; open steps belong to a later call."""
        taken = self._prefill_s, self._decode_s
        self._prefill_s = self._decode_s = 0.0
        return taken
