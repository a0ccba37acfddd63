"""Which prompts are worth a group: difficulty filters, and a choice by what was measured. Pure.

- A prompt whose groups came out all alike, so many times in a row, teaches nothing at the moment: it is left out.
- Of a window of prompts the best share is taken: those whose rewards vary, and those that were seldom seen.
- Nothing is left out for ever: of so many times that a prompt comes up in a row, one at least it is taken, before all
  others. A policy that learns or forgets makes a prompt worth something again.
- A window always gives something: of nothing but left-out prompts, the one that was left out most often.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import ceil, isfinite, log, sqrt
from typing import Literal, NamedTuple

REMEMBERED = 16
"""Groups by which the variance follows a prompt: the policy that they were sampled from moves."""

Reason = Literal["always_right", "always_wrong", "passed_over"]


@dataclass(frozen=True)
class SelectionRules:
    """How prompts are chosen; these leave none out."""

    filter_after: int = 0
    """Groups in a row whose samples all earned the same, after which a prompt is left out; 0: never."""
    probe_every: int = 4
    """Of so many times that a prompt comes up, it is taken once at least."""
    window: int = 64
    """Prompts that are looked at together."""
    share: float = 1.0
    """Of a window that is taken."""
    exploration: float = 0.5
    """What it is worth, in units of reward, that a prompt was seldom seen."""
    refill: float = 0.0
    """Groups whose samples all earned the same that others replace, for each batch, in parts of its size."""
    solved: float = 1.0
    """The score from which a sample is right: tells the two ends of difficulty apart, and decides nothing."""

    @property
    def chooses(self) -> bool:
        """Whether there is anything to choose by."""
        return bool(self.filter_after) or self.share < 1


OFF = SelectionRules()


@dataclass(frozen=True)
class PromptOutcome:
    """What the groups of a prompt came to."""

    groups: int = 0
    mean: float = 0.0
    """Of the last one."""
    variance: float = 0.0
    """Within its groups."""
    alike: int = 0
    """The last so many had samples that all earned the same."""
    left_out: int = 0
    """It came up so many times since it was taken last."""

    def after(self, rewards: Sequence[float]) -> "PromptOutcome":
        """With one group more."""
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
    """A prompt that has come up: its place in the train split, its name, and what is known of it."""

    place: int
    prompt: str
    outcome: PromptOutcome


def worth(outcome: PromptOutcome, total: int, rules: SelectionRules) -> float:
    """What a group of this prompt promises, beside so many groups of all prompts."""
    return sqrt(outcome.variance) + rules.exploration * sqrt(log(1 + total) / (1 + outcome.groups))


def choose(window: Sequence[PromptCandidate], total: int, rules: SelectionRules) -> tuple[list[int], dict[int, Reason]]:
    """The places to take, in this order, and why the others are left out."""
    if not rules.chooses:
        return [one.place for one in window], {}
    due = [one for one in window if one.outcome.left_out >= rules.probe_every - 1]
    left = {one.place: why for one in window if one not in due and (why := _filtered(one.outcome, rules))}
    rest = [one for one in window if one not in due and one.place not in left]
    if rules.share < 1:
        rest.sort(key=lambda one: (-worth(one.outcome, total, rules), one.place))
        most = max(0, ceil(rules.share * (len(due) + len(rest))) - len(due))
        left |= dict.fromkeys((one.place for one in rest[most:]), "passed_over")
        taken = [one.place for one in (*due, *rest[:most])]
    else:
        taken = [one.place for one in window if one.place not in left]
    if not taken and window:
        taken = [max(window, key=lambda one: (one.outcome.left_out, -one.place)).place]
        del left[taken[0]]
    return taken, left


def _filtered(outcome: PromptOutcome, rules: SelectionRules) -> Reason | None:
    if not rules.filter_after or outcome.alike < rules.filter_after:
        return None
    return "always_right" if outcome.mean >= rules.solved else "always_wrong"
