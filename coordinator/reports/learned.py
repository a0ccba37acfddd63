"""Figures of what the last updates taught, their pace, and alarms for updates that are paid for and teach little.

- A figure is the mean over the last `UPDATES` updates. An alarm needs that many updates with the figure.
- The time left assumes that updates go on at the pace of the last `PACE_UPDATES` and `PACE_VERSIONS`, waiting included.
  Times that are far longer than usual are pauses, such as a night without nodes, and do not count.
- A batch in which all samples of each group earn the same has no gradient: no other figure of the round shows it. That
  is not true of an objective that compares the samples of different groups, so it raises no such alarm.
- Calls of tools and those that failed are components of the rewards: those of `coordinator.environments.with_tools`, of
  TRL's convention, and of servers with tools.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from statistics import fmean

import sqlalchemy as sa

from coordinator.store.tables import batches, versions

UPDATES = 8
PACE_UPDATES, PACE_VERSIONS = 32, 4

USUAL, PAUSE_FACTOR = 0.9, 4.0
"""A pause is longer than nine in ten times between updates, and four times as long as these. The share is larger where
more than five updates are made of a version: one of them waits long for its batch, which is the pace."""

SIGNAL_MIN = 0.05
"""The least share of groups whose rewards differ: below it, 19 of 20 groups are paid for and teach nothing."""

CUT_MAX = 0.5
"""The largest share of answers that do not end by themselves: beyond it, most rewards judge half an answer."""

TOOL_CALLS, TOOL_ERRORS = "reward/component/tool_calls", "reward/component/tool_errors"
TOOL_ERRORS_MAX = 0.5
TOOL_CALLS_MIN = 0.05
"""The calls for each sample below which nothing can be said of the tools."""

NAMES = {
    "reward": "reward/mean",
    "signal": "reward/signal",
    "entropy": "entropy",
    "length": "length/mean",
    "cut": "length/truncated",
    "dropped": "is/masked_frac",
    "kl": "kl/k3",
    "tokens_per_s": "learner/tokens_per_s",
    "train_s": "learner/train_s",
}
"""The figures by their short names, and the learner's metrics that they are means of."""


def figures(lately: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return the means of the figures that the last updates reported; `lately` has their metrics, the newest first."""
    return {name: fmean(values) for name, metric in NAMES.items() if (values := _values(lately, metric))}


def _values(lately: Sequence[Mapping[str, float]], metric: str) -> list[float]:
    """Return a metric of each of the last updates that reported it."""
    return [float(metrics[metric]) for metrics in lately[:UPDATES] if metric in metrics]


def update_interval_s(connection: sa.Connection) -> float | None:
    """Return the mean time from one update to the next, without pauses; None before it is known."""
    per_version = _updates_per_version(connection)
    most = max(PACE_UPDATES, math.ceil(PACE_VERSIONS * per_version))
    lately = sa.select(batches.c.idle_s + batches.c.busy_s).where(batches.c.busy_s > 0).order_by(batches.c.batch.desc())
    times = list(connection.execute(lately.limit(most)).scalars())
    if not times:
        return None
    share = max(USUAL, 1 - 0.5 / per_version)
    usual = sorted(times)[int(share * (len(times) - 1))]
    return fmean(time for time in times if time <= PAUSE_FACTOR * usual)


def _updates_per_version(connection: sa.Connection) -> float:
    """Return the mean number of updates between the last versions; 1 before it is known."""
    newest = sa.select(versions.c.policy_update).order_by(versions.c.version.desc()).limit(PACE_VERSIONS + 1)
    updates = list(connection.execute(newest).scalars())
    return max(1.0, (updates[0] - updates[-1]) / (len(updates) - 1)) if len(updates) > 1 else 1.0


def alarms(lately: Sequence[Mapping[str, float]], *, compares_groups: bool) -> Iterator[tuple[str, str]]:
    """Yield alarms as pairs of code and text; `compares_groups` is a property of the round's objective."""
    found = figures(lately)
    if text := tools_alarm(lately):
        yield "tools_fail", text
    if compares_groups and found.get("signal", 1.0) < SIGNAL_MIN and _are_enough(lately, NAMES["signal"]):
        yield (
            "nothing_learned",
            f"In {1 - found['signal']:.0%} of the groups of the last {UPDATES} updates all samples earned the same "
            f"(mean reward {found.get('reward', 0.0):.3f}), so the policy learns next to nothing from work that is "
            "paid. If they are wrong, check the reward (`swarm-coordinator samples show`) or use easier problems; if "
            "they are right, use harder ones or end the round. selection.filter_after leaves such prompts out.",
        )
    if found.get("cut", 0.0) > CUT_MAX and _are_enough(lately, NAMES["cut"]):
        yield (
            "answers_cut",
            f"{found['cut']:.0%} of the answers of the last {UPDATES} updates did not end by themselves, so their "
            "rewards judge half an answer. In a task of several turns, raise episode.turn_tokens_max. "
            "sampling.max_new_tokens cannot change after the first launch: begin a round with a larger one, or let "
            "objective.overlong_buffer teach shorter answers.",
        )


def tools_alarm(lately: Sequence[Mapping[str, float]]) -> str:
    """Return the alarm for tools most of whose calls fail; "" if they work, or if nothing calls them."""
    if not _are_enough(lately, TOOL_CALLS):
        return ""
    calls, errors = fmean(_values(lately, TOOL_CALLS)), fmean(_values(lately, TOOL_ERRORS) or [0.0])
    tried = max(calls, errors)  # a call that cannot be read is an error, and no call
    if tried < TOOL_CALLS_MIN or errors <= TOOL_ERRORS_MAX * tried:
        return ""
    return (
        f"{errors / tried:.0%} of the tool calls of the last {UPDATES} updates failed ({tried:.3g} calls for each "
        "sample). Either a tool raises errors or takes too long, or the policy writes calls that are wrong: "
        "`swarm-coordinator samples show` has what each call returned. Fix the tool: on its server, or in the "
        "task's file, and launch again."
    )


def _are_enough(lately: Sequence[Mapping[str, float]], metric: str) -> bool:
    return len(_values(lately, metric)) == UPDATES
