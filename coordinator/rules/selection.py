"""The selection of prompts: difficulty filters, and a choice by measured rewards. Pure.

- A prompt is left out if the samples of each of its last `filter_after` groups all earned the same: the policy cannot
  learn from it at the moment.
- The best share of a window of prompts is taken: those whose rewards vary, and those that were seldom seen.
- No prompt is left out for ever: at least every `probe_every` times that it comes up, it is taken, before all others. A
  prompt may become useful again as the policy learns or forgets.
- A window always gives a prompt: if all are left out, the one that was left out most often.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import ceil, isfinite, log, sqrt
from typing import Literal, NamedTuple

REMEMBERED = 16
"""The number of groups over which a prompt's variance is taken: the policy that they were sampled from changes."""

Reason = Literal["always_right", "always_wrong", "passed_over"]


@dataclass(frozen=True)
class SelectionRules:
    """The rules by which prompts are chosen; the defaults leave none out."""

    filter_after: int = 0
    """Groups in a row whose samples all earned the same, after which a prompt is left out; 0: never."""
    probe_every: int = 4
    """A prompt is taken at least once in this many times that it comes up."""
    window: int = 64
    """Prompts that are compared together."""
    share: float = 1.0
    """The share of a window that is taken."""
    exploration: float = 0.5
    """The weight, in units of reward, of a prompt that was seldom seen."""
    refill: float = 0.0
    """The most groups with equal rewards that others replace, per batch, as a share of its size."""
    solved: float = 1.0
    """The score from which a sample is right: it names the reason why a prompt is left out, and decides nothing."""

    @property
    def chooses(self) -> bool:
        """Return True if these rules can leave prompts out."""
        return bool(self.filter_after) or self.share < 1


OFF = SelectionRules()


@dataclass(frozen=True)
class PromptOutcome:
    """The results of a prompt's groups."""

    groups: int = 0
    mean: float = 0.0
    """The mean reward of the last group."""
    variance: float = 0.0
    """The variance of rewards within its groups."""
    alike: int = 0
    """The number of last groups whose samples all earned the same."""
    left_out: int = 0
    """The number of times that it came up since it was taken last."""

    def after(self, rewards: Sequence[float]) -> "PromptOutcome":
        """Return the outcome with one more group, which earned `rewards`."""
        if not rewards or not all(map(isfinite, rewards)):
            return self
        same = min(rewards) == max(rewards)
        mean = rewards[0] if same else sum(rewards) / len(rewards)
        variance = 0.0 if same else sum((reward - mean) ** 2 for reward in rewards) / len(rewards)
        follow = 1 / min(REMEMBERED, self.groups + 1)
        return replace(
            self,
            groups=self.groups + 1,
            mean=mean,
            variance=self.variance + follow * (variance - self.variance),
            alike=self.alike + 1 if same else 0,
        )

    def taken(self) -> "PromptOutcome":
        return replace(self, left_out=0)

    def left(self) -> "PromptOutcome":
        return replace(self, left_out=self.left_out + 1)


class PromptCandidate(NamedTuple):
    """A prompt that has come up: its place in the train split, its name, and its outcome so far."""

    place: int
    prompt: str
    outcome: PromptOutcome


def worth(outcome: PromptOutcome, total: int, rules: SelectionRules) -> float:
    """Return the expected value of a group of this prompt, after `total` groups of all prompts."""
    return sqrt(outcome.variance) + rules.exploration * sqrt(log(1 + total) / (1 + outcome.groups))


def choose(window: Sequence[PromptCandidate], total: int, rules: SelectionRules) -> tuple[list[int], dict[int, Reason]]:
    """Return the places to take, in this order, and why the others are left out."""
    if not rules.chooses:
        return [candidate.place for candidate in window], {}
    due = [candidate for candidate in window if candidate.outcome.left_out >= rules.probe_every - 1]
    left = {
        candidate.place: why
        for candidate in window
        if candidate not in due and (why := _filtered(candidate.outcome, rules))
    }
    rest = [candidate for candidate in window if candidate not in due and candidate.place not in left]
    if rules.share < 1:
        rest.sort(key=lambda candidate: (-worth(candidate.outcome, total, rules), candidate.place))
        most = max(0, ceil(rules.share * (len(due) + len(rest))) - len(due))
        left |= dict.fromkeys((candidate.place for candidate in rest[most:]), "passed_over")
        taken = [candidate.place for candidate in (*due, *rest[:most])]
    else:
        taken = [candidate.place for candidate in window if candidate.place not in left]
    if not taken and window:
        taken = [max(window, key=lambda candidate: (candidate.outcome.left_out, -candidate.place)).place]
        del left[taken[0]]
    return taken, left


def _filtered(outcome: PromptOutcome, rules: SelectionRules) -> Reason | None:
    if not rules.filter_after or outcome.alike < rules.filter_after:
        return None
    return "always_right" if outcome.mean >= rules.solved else "always_wrong"
