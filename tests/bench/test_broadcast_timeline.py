"""The timeline turns counters into shares of links."""

import pytest

from bench.broadcast.cells import Link
from bench.broadcast.timeline import Sample, shares

LINKS = {"source": Link(8_000, 8_000), "w1": Link(800, 1_600), "w2": Link(800, 1_600)}


def sample(at_s: float, source: int, w1: tuple[int, int], w2: tuple[int, int]) -> Sample:
    return Sample(at_s, {"source": (source, 0), "w1": w1, "w2": w2}, idle_s=0.0, total_s=0.0)


def test_shares_are_between_two_samples_and_the_mean_of_the_workers() -> None:
    samples = [
        sample(9.5, 7, (0, 0), (0, 0)),
        sample(10.5, 507, (50, 200), (0, 100)),
        sample(11, 507, (50, 200), (0, 100)),
    ]
    assert shares(samples, 10.0, LINKS, "source") == [
        pytest.approx((0.5, 0.5, 0.25, 0.75)),
        pytest.approx((1.0, 0.0, 0.0, 0.0)),
    ]
