"""When a node looks for news of the policy by itself."""

from datetime import UTC, datetime, timedelta

import pytest

from swarm_node.policies import REFRESH_S, RETRY_S, refresh_in_s

NOW = datetime(2026, 1, 1, tzinfo=UTC)


@pytest.mark.parametrize("lifetime_s", [4.0, 8.0, 30.0])
def test_short_proof_is_renewed_while_half_of_it_is_left(lifetime_s: float) -> None:
    """A coordinator renews its word four times in a lifetime, so each look finds one that ends later."""
    assert refresh_in_s(NOW + timedelta(seconds=lifetime_s), NOW) == lifetime_s / 2


def test_long_proof_is_looked_at_in_time_to_see_withheld_versions() -> None:
    assert refresh_in_s(NOW + timedelta(hours=1), NOW) == REFRESH_S
    assert refresh_in_s(None, NOW) == REFRESH_S


def test_proof_that_is_ending_is_not_asked_for_without_pause() -> None:
    assert refresh_in_s(NOW + timedelta(seconds=0.1), NOW) == RETRY_S
    assert refresh_in_s(NOW - timedelta(seconds=5), NOW) == RETRY_S
