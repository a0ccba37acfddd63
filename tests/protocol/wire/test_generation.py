"""Both sides learn that the other speaks another generation of the protocol, with the step that mends it."""

import pytest

from protocol.errors import AgentTooOld
from protocol.wire import generation


def test_a_round_of_a_later_generation_asks_for_an_update_of_the_node() -> None:
    with pytest.raises(AgentTooOld, match=f"generation {generation.CURRENT + 1} .* node generation") as caught:
        generation.require_spoken(generation.CURRENT + 1)
    assert "install.sh" in caught.value.hint


def test_a_round_of_an_earlier_generation_waits_for_its_operator() -> None:
    with pytest.raises(AgentTooOld) as caught:
        generation.require_spoken(generation.CURRENT - 1)
    assert "operator" in caught.value.hint


@pytest.mark.parametrize("said", [None, "8", generation.CURRENT])
def test_a_round_of_this_generation_or_without_a_number_is_joined(said: object) -> None:
    generation.require_spoken(said)


def test_every_earlier_generation_has_the_day_of_its_end() -> None:
    assert list(generation.RETIRED) == list(range(generation.CURRENT))
    assert list(generation.RETIRED.values()) == sorted(generation.RETIRED.values())
