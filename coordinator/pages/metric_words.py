"""The learner's metrics in words: the question that each one answers, its title, and a line that explains it.

- A metric without words here is shown under its own name, with the question of its family or else with `HEALTHY`.
- docs/reference/metrics.md lists them, with the definitions in the learner's docstrings.
"""

from coordinator.pages.charts import Caption

LEARNING, HEALTHY, FAST = "learning", "health", "pace"

_WORDS = {
    "reward/mean": (LEARNING, "Reward", "Average reward of the answers in an update. It should rise."),
    "reward/std": (LEARNING, "Spread of the rewards", "Without any spread there is nothing to learn from."),
    "reward/signal": (LEARNING, "Groups that teach", "Share of groups whose answers got different rewards."),
    "reward/taught": (LEARNING, "Answers that teach", "Share of answers that are better or worse than their group."),
    "reward/invalid": (LEARNING, "Answers without the right form", "Share that the reward could not even read."),
    "entropy": (LEARNING, "Variety of the answers", "Entropy of the policy. Close to 0 it always answers alike."),
    "length/mean": (LEARNING, "Length of the answers", "Tokens of an answer, on average."),
    "length/max": (LEARNING, "Longest answer", "Tokens of the longest answer of an update."),
    "length/truncated": (LEARNING, "Answers that were cut", "Share that reached the token limit before their end."),
    "loss": (HEALTHY, "Loss", "The objective of an update. It stays near 0 and need not fall."),
    "kl/k1": (
        HEALTHY,
        "Distance from the samplers, simple",
        "Signed estimate of the same divergence; it may be noisy.",
    ),
    "kl/k3": (HEALTHY, "Distance from the samplers", "How far the model has moved since the answers were sampled."),
    "kl/ref": (HEALTHY, "Distance from the start", "How far the model has moved from the starting policy."),
    "is/ratio_mean": (HEALTHY, "Importance ratio, mean", "Answers of older versions are weighted; the mean is near 1."),
    "is/ratio_p01": (HEALTHY, "Importance ratio, 1st percentile", "One token in a hundred is below it."),
    "is/ratio_p99": (HEALTHY, "Importance ratio, 99th percentile", "One token in a hundred is above it."),
    "is/ratio_min": (HEALTHY, "Importance ratio, smallest", "The token whose probability fell the most."),
    "is/ratio_max": (HEALTHY, "Importance ratio, largest", "The token whose probability rose the most."),
    "is/ess": (HEALTHY, "Worth of old answers", "Effective share of the tokens. 1 is as good as new answers."),
    "is/chi2": (HEALTHY, "Variance of the weights", "Small as long as old answers are close to the model."),
    "is/masked_frac": (HEALTHY, "Dropped tokens", "Share of tokens too far from the model to train on."),
    "clip/low": (HEALTHY, "Clipped from below", "Share of tokens whose change was limited downwards."),
    "clip/high": (HEALTHY, "Clipped from above", "Share of tokens whose change was limited upwards."),
    "learner/grad_norm": (HEALTHY, "Size of the gradient", "Peaks are clipped; a lasting rise is a warning."),
    "learner/learning_rate": (HEALTHY, "Learning rate", "Step size of the optimizer."),
    "learner/skipped": (HEALTHY, "Skipped updates", "1 where the gradient was not finite and nothing changed."),
    "learner/empty": (HEALTHY, "Empty steps", "Steps without a gradient: no sample taught anything."),
    "staleness/mean": (HEALTHY, "Age of the answers, mean", "In updates. Older answers teach less."),
    "staleness/max": (HEALTHY, "Age of the answers, oldest", "In updates; the round has a bound for it."),
    "learner/outgoing_s": (FAST, "Time to hand over a version", "Seconds in which the learner stood still for it."),
    "learner/wait_s": (FAST, "Wait for the answers", "Seconds in which the learner waited for an update's answers."),
    "learner/train_s": (FAST, "Time of training", "Seconds that the learner trained on an update's answers."),
    "learner/tokens_per_s": (FAST, "Speed of training", "Tokens of answers per second of training."),
    "tokens": (FAST, "Tokens per update", "Tokens of the answers that an update learned from."),
    "samples": (FAST, "Answers per update", "Number of answers that an update learned from."),
    "cost": (FAST, "Credit per update, by the learner", "Credit of the answers, in the operator's unit."),
}

KNOWN = frozenset(_WORDS)
"""The metrics with words of their own: those of every learner."""

_SECONDARY = frozenset(
    ("reward/std", "reward/taught", "kl/k1", "is/ratio_mean", "is/ratio_min", "is/ratio_max", "is/ratio_p01",
     "is/ratio_p99", "is/chi2", "clip/low", "clip/high", "length/max", "learner/learning_rate", "staleness/mean",
     "cost")
)  # fmt: skip
"""Metrics that only experts read: they are folded."""

_FAMILIES = {"reward": LEARNING, "eval": LEARNING, "length": LEARNING, "learner": HEALTHY}


def question(name: str) -> str:
    """Return the question that the metric `name` helps to answer."""
    known = _WORDS.get(name)
    return known[0] if known else _FAMILIES.get(name.partition("/")[0], HEALTHY)


def is_secondary(name: str) -> bool:
    """Return True if the chart of the metric `name` is folded."""
    return name in _SECONDARY


def caption(name: str) -> Caption:
    """Return the title of the metric `name` in words, with its raw name."""
    known = _WORDS.get(name)
    return Caption(known[1], name, known[2]) if known else Caption(name.replace("_", " "), name)
