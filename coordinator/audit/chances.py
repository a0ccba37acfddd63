"""How rare what an audit saw is, if the claim is honest: pure functions of counts and chances.

- `tail` of a count, `fisher` of independent chances together, `normal_of_t` of standard errors that few gave.
- Written out here: a library of statistics would be larger than the auditor.
"""

import math

import numpy as np

from coordinator.audit.replay import Floats


def tail(count: int, of: int, rate: float) -> float:
    """The chance of `count` or more successes among so many, at this rate each."""
    if count <= of * rate:
        return 1.0
    total = 0.0
    for successes in range(count, of + 1):  # terms only fall from here on
        ways = math.lgamma(of + 1) - math.lgamma(successes + 1) - math.lgamma(of - successes + 1)
        term = math.exp(ways + successes * math.log(rate) + (of - successes) * math.log1p(-rate))
        total += term
        if term <= total * 1e-12:
            break
    return min(1.0, total)


def fisher(chances: Floats) -> float:
    """How rarely independent chances are as small together (Fisher 1932): the tail of χ² with two degrees each."""
    half = float(-np.log(chances).sum())
    if half <= 0:
        return 1.0
    terms = np.arange(len(chances)) * math.log(half) - np.cumsum([0.0, *np.log(np.arange(1, len(chances)))])
    return min(1.0, float(np.exp(terms - half).sum()))


def normal_of_t(t: float, freedom: float) -> float:
    """As many standard errors of a normal distribution as are as rare as these of Student's t (Wallace 1959)."""
    if freedom <= 0:
        return 0.0
    size = (8 * freedom + 1) / (8 * freedom + 3) * math.sqrt(freedom * math.log1p(t * t / freedom))
    return math.copysign(size, t)
