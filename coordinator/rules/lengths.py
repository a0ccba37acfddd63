"""Expected-longest groups go to the fastest nodes, the expected-shortest to the slowest. Pure.

- What is expected of a prompt is how long its own groups were lately; of one that was never seen, how long those of its
  neighbours were: prompts of about as many tokens.
- Nodes choose from a window of the groups that come next, the longest first in its order. A node that is s times as
  fast as nodes are lately begins at the place 1 / (1 + s) of it: the fastest at the front, the slowest at the end.
- Nothing is passed over for ever: a group that many newer ones overtook goes first, whoever asks.
- Where all are expected to be alike, or nothing is known, the oldest go first.
"""

from collections.abc import Sequence
from dataclasses import dataclass

ALIKE = 1.2
"""Lengths that differ by less are the same: the order is worth nothing then."""

OVERTAKEN_MAX = 4
"""Windows of newer groups after which a group is passed over no more."""

REMEMBERED = 16
"""Groups by which a mean follows its prompt: answers change as the policy learns."""

EXACT_MAX = 32
"""Prompts of up to so many tokens are neighbours only of the same length."""


@dataclass(frozen=True)
class WaitingGroup:
    """A group that nobody works on, and how long its longest sample is expected to be; 0 if nothing is known."""

    group_no: int
    expected: float
    begun: str | None = None
    """The ended lease from which its next node may go on."""
    begun_version: int | None = None


@dataclass(frozen=True)
class LengthStatistics:
    """How long groups were."""

    mean: float = 0.0
    groups: int = 0

    def after(self, tokens: float) -> "LengthStatistics":
        """With one group more."""
        groups = min(REMEMBERED, self.groups + 1)
        return LengthStatistics(self.mean + (tokens - self.mean) / groups, groups)


def neighbourhood(prompt_tokens: int) -> str:
    """The name that prompts of about this length share."""
    step = max(1, 1 << max(0, prompt_tokens.bit_length() - EXACT_MAX.bit_length() + 2))
    return f"about {prompt_tokens // step * step} tokens"


def expected(own: LengthStatistics | None, neighbours: LengthStatistics | None) -> float:
    """Of a prompt with this past."""
    return next((seen.mean for seen in (own, neighbours) if seen is not None and seen.groups), 0.0)


def pick(waiting: Sequence[WaitingGroup], count: int, *, speed: float, window: int) -> list[int]:
    """The groups for a node that is so many times as fast as nodes are lately; `waiting` is the oldest first."""
    if not waiting or count <= 0:
        return []
    newest = max(one.group_no for one in waiting)
    overdue = [one.group_no for one in waiting if newest - one.group_no > OVERTAKEN_MAX * window][:count]
    rest = [one for one in waiting if one.group_no not in set(overdue)]
    return overdue + _of_window(rest[:window] if window > count else rest, count - len(overdue), speed)


def _of_window(window: Sequence[WaitingGroup], count: int, speed: float) -> list[int]:
    known = [one.expected for one in window if one.expected > 0]
    if not known or max(known) <= ALIKE * min(known):
        return [one.group_no for one in window[:count]]
    typical = sum(known) / len(known)
    longest_first = sorted(window, key=lambda one: (-(one.expected or typical), one.group_no))
    first = int(len(window) / (1 + max(0.0, speed)))
    first = max(0, min(first, len(window) - count))
    return [one.group_no for one in longest_first[first : first + count]]
