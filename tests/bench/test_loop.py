"""Results of bench/loop from the moments at which updates ended."""

import pytest

from bench.loop import UNCOUNTED, rate

BEGINNING = [0.1 * number for number in range(UNCOUNTED)]


def test_only_what_comes_after_the_beginning_counts() -> None:
    assert rate([*BEGINNING, 10.0, 10.5, 11.0]) == pytest.approx(2.0)


@pytest.mark.parametrize("ended", [[], BEGINNING, [*BEGINNING, 10.0], [*BEGINNING, 10.0, 10.0], [*BEGINNING, 2.0, 1.0]])
def test_too_few_updates_and_clocks_that_stand_still_give_no_rate(ended: list[float]) -> None:
    with pytest.raises(ValueError, match="No rate follows"):
        rate(ended)
