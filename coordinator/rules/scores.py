"""What an evaluation comes to: avg@k and pass@k over its problems, with an interval. Pure.

With k samples of each of n problems, of which c_i samples of problem i were right:

    avg@k   mean over problems of the mean score of their samples
    pass@j  mean over problems of 1 − C(k − c_i, j) / C(k, j): unbiased for the chance that one of j samples is right

- The interval of a figure holds the true one 95 times in 100, over problems drawn like these; the samples of one
  problem are no independent tries. A figure between 0 and 1 varies no more than a coin does, so its interval is
  Wilson's for n tosses: honest where there are few problems or all are solved, and rather too wide than too narrow.
  Scores beyond 0 and 1 have the normal interval of their spread.
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
    """k: of each problem."""


def result(scores: Sequence[Sequence[float]], *, solved: float) -> Result | None:
    """Of the scores of each problem's samples; right is who has at least `solved`. None without any problem."""
    if not scores:
        return None
    samples = min(map(len, scores))
    means = [fsum(of_one) / len(of_one) for of_one in scores]
    right = [sum(score >= solved for score in of_one) for of_one in scores]
    passed = {
        j: fsum(pass_at(len(of_one), count, j) for of_one, count in zip(scores, right, strict=True)) / len(scores)
        for j in _powers(samples)
    }
    average = fsum(means) / len(means)
    return Result(average, interval(means), passed, len(scores), samples)


def pass_at(samples: int, right: int, j: int) -> float:
    """The chance that j of the samples, drawn without putting back, have a right one among them."""
    return 1.0 - comb(samples - right, j) / comb(samples, j)


def interval(means: Sequence[float]) -> Interval:
    """Where the mean of the means lies, 95 times in 100."""
    count, mean = len(means), fsum(means) / len(means)
    if all(0.0 <= one <= 1.0 for one in means) and (found := wilson(mean * count, count)):
        return found
    spread = sqrt(fsum((one - mean) ** 2 for one in means) / max(1, count - 1) / count)
    return mean - Z95 * spread, mean + Z95 * spread


def wilson(successes: float, tries: int) -> Interval | None:
    """Wilson's interval for a share: honest where there are few tries, or only successes."""
    if not tries:
        return None
    z2 = Z95**2
    middle = (successes + z2 / 2) / (tries + z2)
    half = Z95 / (tries + z2) * sqrt(successes * (tries - successes) / tries + z2 / 4)
    return max(0.0, middle - half), min(1.0, middle + half)


def _powers(most: int) -> list[int]:
    """1, 2, 4 … and the largest number itself."""
    return sorted({1 << place for place in range(most.bit_length())} | {most})
