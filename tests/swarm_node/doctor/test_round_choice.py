"""The choice among rounds: what this machine can work for, and in which order."""

from pathlib import Path
from typing import Any

import pytest

from ledger.directory import KnownRound
from protocol.errors import ConfigInvalid
from swarm_node.doctor.forecast import Forecast
from swarm_node.doctor.round_choice import RoundOption, matching, paid_line, ranked, reasons, why_unfit
from swarm_node.engine.capacity import Capacity
from swarm_node.engine.precision import Memory
from tests.swarm_node.listed_world import NOW_MS, ListedLog

ROOMY = Memory(None, 64 * 10**9)


@pytest.fixture(scope="module")
def rivers(tmp_path_factory: pytest.TempPathFactory) -> ListedLog:
    return ListedLog(tmp_path_factory.mktemp("rivers"))


def known(log: ListedLog, title: str = "Rivers", purpose: str = "", **changes: Any) -> KnownRound:
    about = log.signed()["description"] | {"title": title, "purpose": purpose}
    return KnownRound(log.open(description=about, **changes))


@pytest.mark.parametrize(
    ("changes", "memory", "said"),
    [
        ({}, ROOMY, ""),
        ({}, Memory(None, None), ""),
        ({"finished": True}, ROOMY, "it is finished"),
        ({"expires_ms": NOW_MS + 1}, ROOMY, "its listing has expired"),
        ({"prices": {"lowest": 0, "highest": 0, "maximum": 1}}, ROOMY, "it pays at most 0.000001 EUR per million"),
        ({"budget_micros": 0}, ROOMY, "its budget is used up"),
        ({}, Memory(10**9, 64 * 10**9), "its model needs about 1.8 GB, and 1.0 GB of GPU memory are free"),
        ({"model": {"name": "", "architecture": "", "weights_bytes": 0}}, Memory(1, 1), ""),
    ],
)  # fmt: skip
def test_why_a_round_does_not_fit(rivers: ListedLog, changes: dict[str, Any], memory: Memory, said: str) -> None:
    capacity = Capacity(memory, on_card=memory.card is not None)
    reason = why_unfit(known(rivers, **changes), capacity, 1_000_000, NOW_MS + 1)
    assert reason.removesuffix(" tokens") == said


def test_earnings_are_ranked_by_the_expected_credit_and_unknown_ones_come_last(rivers: ListedLog) -> None:
    much, little = Forecast(100, 300, "measured"), Forecast(50, 60, "measured")
    options = [
        RoundOption(known(rivers, "unknown, waits", waiting_permille=900)),
        RoundOption(known(rivers, "little"), little),
        RoundOption(known(rivers, "unknown", waiting_permille=100)),
        RoundOption(known(rivers, "much"), much),
    ]
    order = [option.known.listing.title for option in ranked(options, "earnings")]
    assert order == ["much", "little", "unknown, waits", "unknown"]


def test_a_cause_is_ranked_by_need_among_those_that_name_all_words(rivers: ListedLog) -> None:
    options = [
        RoundOption(known(rivers, "A", "clean Water for all", waiting_permille=100, nodes=1)),
        RoundOption(known(rivers, "B", "water for plants", waiting_permille=100, nodes=0)),
        RoundOption(known(rivers, "C", "poems", waiting_permille=999)),
        RoundOption(known(rivers, "D", "for WATER maps", waiting_permille=200)),
    ]
    named = matching([option.known for option in options], "for water")
    order = [option.known.listing.title for option in ranked([RoundOption(known) for known in named], "cause")]
    assert order == ["D", "B", "A"]
    assert len(ranked(options, "cause")) == 4


def test_amounts_of_different_units_are_not_compared(rivers: ListedLog, tmp_path: Path) -> None:
    points = ListedLog(tmp_path, "Points", unit="points")
    options = [RoundOption(known(rivers), Forecast(1, 1, "x")), RoundOption(known(points), Forecast(9, 9, "x"))]
    with pytest.raises(ConfigInvalid, match="EUR, points"):
        ranked(options, "earnings")
    [in_euros] = matching([option.known for option in options], unit="EUR")
    assert in_euros.listing.unit.name == "EUR"
    assert len(ranked(options, "cause")) == 2


def test_the_reasons_name_demand_earnings_and_payouts(rivers: ListedLog) -> None:
    option = RoundOption(known(rivers, purpose="maps"), Forecast(1_000_000, 2_000_000, "measured"))
    said = "\n".join(reasons(option, "cause", NOW_MS))
    assert "Purpose: maps" in said
    assert "waits for samples 25% of the time; 2 nodes work for it" in said
    assert "about 1.00 to 2.00 EUR per hour" in said
    assert paid_line(option.known, NOW_MS) in said
    assert "0.00015 EUR in the last 30 days" in said
