"""Lengths: the groups with the longest expected samples go to the fastest nodes, the shortest to the slowest. Pure.

- The expected length of a prompt is that of its own groups lately; for a prompt that was never seen, that of similar
  prompts: those of about as many tokens.
- A node gets groups from a window of the next groups, sorted by length, the longest first. A node that is s times as
  fast as nodes were lately begins at the place 1 / (1 + s) of it: the fastest at the front, the slowest at the end.
- No group is passed over for ever: a group that many newer ones overtook goes first, to any node.
- If all lengths are about the same, or none is known, the oldest groups go first.
"""

from collections.abc import Sequence
from dataclasses import dataclass

ALIKE = 1.2
"""The factor below which lengths count as the same: their order is worth nothing then."""

OVERTAKEN_MAX = 4
"""The number of windows of newer groups after which a group goes first."""

REMEMBERED = 16
"""The number of groups over which a mean is taken: answers change as the policy learns."""

EXACT_MAX = 32
"""The tokens up to which only prompts of the same length are similar."""


@dataclass(frozen=True)
class WaitingGroup:
    """A group that nobody works on, and the expected tokens of its longest sample; 0 if nothing is known."""

    group_no: int
    expected: float
    begun: str | None = None
    """The ended lease from which its next node may continue."""
    begun_version: int | None = None


@dataclass(frozen=True)
class LengthStatistics:
    """The mean length of groups, and their number."""

    mean: float = 0.0
    groups: int = 0

    def after(self, tokens: float) -> "LengthStatistics":
        """Return the statistics with one more group, whose longest sample has `tokens` tokens."""
        groups = min(REMEMBERED, self.groups + 1)
        return LengthStatistics(self.mean + (tokens - self.mean) / groups, groups)


def neighbourhood(prompt_tokens: int) -> str:
    """Return the name that prompts of about this length share."""
    step = max(1, 1 << max(0, prompt_tokens.bit_length() - EXACT_MAX.bit_length() + 2))
    return f"about {prompt_tokens // step * step} tokens"


def expected(own: LengthStatistics | None, neighbours: LengthStatistics | None) -> float:
    """Return the expected length of a prompt, by its own groups or else by similar prompts; 0 if unknown."""
    return next((seen.mean for seen in (own, neighbours) if seen is not None and seen.groups), 0.0)


def pick(waiting: Sequence[WaitingGroup], count: int, *, speed: float, window: int) -> list[int]:
    """Return `count` groups for a node of relative speed `speed`; `waiting` has the oldest group first."""
    if not waiting or count <= 0:
        return []
    newest = max(group.group_no for group in waiting)
    overdue = [group.group_no for group in waiting if newest - group.group_no > OVERTAKEN_MAX * window][:count]
    rest = [group for group in waiting if group.group_no not in set(overdue)]
    return overdue + _of_window(rest[:window] if window > count else rest, count - len(overdue), speed)


def _of_window(window: Sequence[WaitingGroup], count: int, speed: float) -> list[int]:
    known = [group.expected for group in window if group.expected > 0]
    if not known or max(known) <= ALIKE * min(known):
        return [group.group_no for group in window[:count]]
    typical = sum(known) / len(known)
    longest_first = sorted(window, key=lambda group: (-(group.expected or typical), group.group_no))
    first = int(len(window) / (1 + max(0.0, speed)))
    first = max(0, min(first, len(window) - count))
    return [group.group_no for group in longest_first[first : first + count]]
