"""Several rounds of one node whose models need unlike numbers of cards: the node has one number for all."""

from pathlib import Path
from typing import Any

import pytest

from protocol.errors import EngineFailed
from swarm_node.commands.join import FittingRound, alike
from swarm_node.coordinator_api.join_string import JoinString
from swarm_node.engine.cards import EngineCard
from swarm_node.member import MemberSettings

NEEDED = {"large": 2, "small": 1, "odd": 1}
SPLITS = {"large": (2,), "small": (1, 2), "odd": (1,)}


def member(name: str) -> MemberSettings:
    return MemberSettings(JoinString(f"http://{name}", "0" * 64), Path(), name, 1)


def fitting(me: MemberSettings, joined: int = 0) -> tuple[Any, tuple[EngineCard, ...]]:
    cards = joined or NEEDED[me.name]
    if cards not in SPLITS[me.name]:
        raise EngineFailed("vLLM cannot split this model")
    return None, (EngineCard(0, "Fake", others=(1,) * (cards > 1)),)


def decided(*names: str) -> list[tuple[str, int]]:
    fits = [FittingRound(member(name), *fitting(member(name)), "full" * (name == "small")) for name in names]
    found = alike(fits, fitting)
    assert all(fit.why_not == "full" * (fit.member.name == "small") for fit in found)
    return [(fit.member.name, len(fit.cards[0].numbers)) for fit in found]


def test_a_round_that_needs_joined_cards_decides_for_the_others(caplog: pytest.LogCaptureFixture) -> None:
    assert decided("small", "odd") == [("small", 1), ("odd", 1)]
    assert decided("small", "large") == [("small", 2), ("large", 2)]
    assert "left out" not in caplog.text
    assert decided("odd", "large") == [("large", 2)]
    assert "the round at http://odd is left out" in caplog.text
