"""Figures of what the last updates taught, their pace, and alarms for updates that are paid for and teach little.

- A figure is the mean over the last `UPDATES` updates. An alarm needs that many updates with the figure.
- The time left assumes that updates go on at the pace of the last `PACE_UPDATES`, waiting included.
  Times that are far longer than usual are pauses, such as a night without nodes, and do not count.
- A batch in which all samples of each group earn the same has no gradient: no other figure of the round shows it. That
  is not true of an objective that compares the samples of different groups, so it raises no such alarm.
"""

from collections.abc import Iterator, Mapping, Sequence
from statistics import fmean

import sqlalchemy as sa

from coordinator.store.tables import batches

UPDATES = 8
PACE_UPDATES = 32

USUAL, PAUSE_FACTOR = 0.9, 4.0
"""A pause is longer than nine in ten times between updates, and four times as long as these: where versions come every
few updates, one in a few waits long for its batch, which is the pace."""

SIGNAL_MIN = 0.05
"""The least share of groups whose rewards differ: below it, 19 of 20 groups are paid for and teach nothing."""

CUT_MAX = 0.5
"""The largest share of answers that do not end by themselves: beyond it, most rewards judge half an answer."""

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
    found = {}
    for name, metric in NAMES.items():
        values = [float(metrics[metric]) for metrics in lately[:UPDATES] if metric in metrics]
        if values:
            found[name] = fmean(values)
    return found


def update_interval_s(connection: sa.Connection) -> float | None:
    """Return the mean time from one update to the next, without pauses; None before it is known."""
    lately = sa.select(batches.c.idle_s + batches.c.busy_s).where(batches.c.busy_s > 0).order_by(batches.c.batch.desc())
    times = list(connection.execute(lately.limit(PACE_UPDATES)).scalars())
    if not times:
        return None
    usual = sorted(times)[int(USUAL * (len(times) - 1))]
    return fmean(time for time in times if time <= PAUSE_FACTOR * usual)


def alarms(lately: Sequence[Mapping[str, float]], *, compares_groups: bool) -> Iterator[tuple[str, str]]:
    """Yield alarms as pairs of code and text; `compares_groups` is a property of the round's objective."""
    found = figures(lately)
    if compares_groups and found.get("signal", 1.0) < SIGNAL_MIN and _are_enough(lately, "signal"):
        yield (
            "nothing_learned",
            f"In {1 - found['signal']:.0%} of the groups of the last {UPDATES} updates all samples earned the same "
            f"(mean reward {found.get('reward', 0.0):.3f}), so the policy learns next to nothing from work that is "
            "paid. If they are wrong, check the reward (`swarm-coordinator samples show`) or use easier problems; if "
            "they are right, use harder ones or end the round. selection.filter_after leaves such prompts out.",
        )
    if found.get("cut", 0.0) > CUT_MAX and _are_enough(lately, "cut"):
        yield (
            "answers_cut",
            f"{found['cut']:.0%} of the answers of the last {UPDATES} updates did not end by themselves, so their "
            "rewards judge half an answer. In a task of several turns, raise episode.turn_tokens_max. "
            "sampling.max_new_tokens cannot change after the first launch: begin a round with a larger one, or let "
            "objective.overlong_buffer teach shorter answers.",
        )


def _are_enough(lately: Sequence[Mapping[str, float]], name: str) -> bool:
    return sum(NAMES[name] in metrics for metrics in lately[:UPDATES]) == UPDATES
