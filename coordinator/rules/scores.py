"""The scores of an evaluation: avg@k and pass@k over its problems, with an interval. Pure.

With k samples of each of n problems, of which c_i samples of problem i were right:

    avg@k   mean over problems of the mean score of their samples
    pass@j  mean over problems of 1 − C(k − c_i, j) / C(k, j): unbiased for the chance that one of j samples is right

- The interval of a figure contains the true one 95 times in 100, over problems drawn like these; the samples of one
  problem are not independent tries. A figure between 0 and 1 varies no more than a coin toss does, so its interval is
  Wilson's for n tosses: correct also if there are few problems or all are solved, and too wide rather than too narrow.
  Scores below 0 or above 1 have the normal interval of their spread.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import comb, fsum, sqrt

Z95 = 1.959964

Interval = tuple[float, float]


@dataclass(frozen=True)
class Result:
    """The figures of one evaluation."""

    average: float
    interval: Interval
    passed: dict[int, float]
    """pass@j by j: 1, 2, 4 … and k."""
    problems: int
    samples: int
    """k, the number of samples of each problem."""


def result(scores: Sequence[Sequence[float]], *, solved: float) -> Result | None:
    """Return the figures for each problem's scores; a score of `solved` or more is right. None without any problem."""
    if not scores:
        return None
    samples = min(map(len, scores))
    means = [fsum(own) / len(own) for own in scores]
    right = [sum(score >= solved for score in own) for own in scores]
    passed = {
        j: fsum(pass_at(len(own), count, j) for own, count in zip(scores, right, strict=True)) / len(scores)
        for j in _powers(samples)
    }
    average = fsum(means) / len(means)
    return Result(average, interval(means), passed, len(scores), samples)


def pass_at(samples: int, right: int, j: int) -> float:
    """Return the chance that at least one of j samples, drawn without replacement, is right."""
    return 1.0 - comb(samples - right, j) / comb(samples, j)


def interval(means: Sequence[float]) -> Interval:
    """Return the interval that contains the mean of the means 95 times in 100."""
    count, mean = len(means), fsum(means) / len(means)
    if all(0.0 <= value <= 1.0 for value in means) and (bounds := wilson(mean * count, count)):
        return bounds
    spread = sqrt(fsum((value - mean) ** 2 for value in means) / max(1, count - 1) / count)
    return mean - Z95 * spread, mean + Z95 * spread


def wilson(successes: float, tries: int) -> Interval | None:
    """Return Wilson's interval for a share, which is correct also for few tries, or only successes."""
    if not tries:
        return None
    z2 = Z95**2
    middle = (successes + z2 / 2) / (tries + z2)
    half = Z95 / (tries + z2) * sqrt(successes * (tries - successes) / tries + z2 / 4)
    return max(0.0, middle - half), min(1.0, middle + half)


def _powers(most: int) -> list[int]:
    """Return 1, 2, 4 … and the largest number itself."""
    return sorted({1 << place for place in range(most.bit_length())} | {most})
