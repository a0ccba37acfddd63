"""The lottery: fair, repeatable by anybody after the reveal, and closed when its secret is missing."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coordinator.transactions.lottery import secret_of
from ledger import drawing
from ledger.drawing import ALL_PPM, LotteryDraw
from protocol.errors import ProofInvalid

SECRET = secret_of(bytes(32), 1)
CLAIMS = [f"{number:064x}" for number in range(4000)]


def share(secret: bytes | None, rate_ppm: int) -> float:
    return sum(drawing.is_drawn(secret, claim, rate_ppm) for claim in CLAIMS) / len(CLAIMS)


def test_without_the_secret_everything_is_audited() -> None:
    assert share(None, 0) == 1.0


@pytest.mark.parametrize("rate_ppm", [0, ALL_PPM])
def test_nothing_and_everything_are_exact(rate_ppm: int) -> None:
    assert share(SECRET, rate_ppm) == rate_ppm / ALL_PPM


@pytest.mark.parametrize("rate_ppm", [20_000, 50_000, 500_000])
def test_as_many_are_drawn_as_the_rate_says(rate_ppm: int) -> None:
    rate = rate_ppm / ALL_PPM
    assert abs(share(SECRET, rate_ppm) - rate) < 5 * (rate * (1 - rate) / len(CLAIMS)) ** 0.5


@settings(max_examples=50, deadline=None)
@given(claim=st.sampled_from(CLAIMS), low=st.integers(0, ALL_PPM), more=st.integers(0, ALL_PPM))
def test_a_higher_rate_never_lets_a_claim_go_that_a_lower_one_draws(claim: str, low: int, more: int) -> None:
    assert drawing.is_drawn(SECRET, claim, low) <= drawing.is_drawn(SECRET, claim, min(ALL_PPM, low + more))


def test_epochs_draw_apart_and_other_masters_make_other_secrets() -> None:
    drawn = [
        {claim for claim in CLAIMS if drawing.is_drawn(secret_of(master, epoch), claim, 50_000)}
        for master, epoch in ((bytes(32), 1), (bytes(32), 2), (b"\1" * 32, 1))
    ]
    assert all(len(one & other) < 40 for one in drawn for other in drawn if one is not other)


def test_whoever_has_the_secret_and_the_list_draws_the_same() -> None:
    draws = [LotteryDraw(claim, 50_000) for claim in CLAIMS]
    again = drawing.check(SECRET, drawing.draws_digest(draws), draws)
    assert again == [claim for claim in CLAIMS if drawing.is_drawn(SECRET, claim, 50_000)]


def test_a_list_with_one_rate_changed_is_not_the_one_in_the_log() -> None:
    draws = [LotteryDraw(claim, 50_000) for claim in CLAIMS[:3]]
    with pytest.raises(ProofInvalid):
        drawing.check(SECRET, drawing.draws_digest(draws), [LotteryDraw(CLAIMS[0], 1), *draws[1:]])
