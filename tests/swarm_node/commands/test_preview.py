"""The preview of a round before it is joined: a range by those who work there, or that nobody knows."""

from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from coordinator.config.round import RoundSection
from protocol.errors import Unreachable
from protocol.wire.signing import NodeKey
from swarm_node.cli import app
from swarm_node.commands.preview import forecast, lines, understood
from swarm_node.coordinator_api.client import Coordinator
from swarm_node.doctor.examine import told
from swarm_node.doctor.line import RoundAnswer

NOW_MS = 1_000_000_000
STATUS: dict[str, Any] = {
    "as_of_ms": NOW_MS,
    "max_price_micros_per_mtok": 5_000_000,
    "budget_micros": 10**9,
    "finished": False,
    "nodes_alive": 4,
    "update": 3,
    "max_updates": 100,
    "learner_idle_share_lately": 0.25,
    "fleet": [],
}


def row(tokens_per_s: float, *, phase: str = "generating", silent_ms: int = 0) -> dict[str, Any]:
    return {"tokens_per_s": tokens_per_s, "phase": phase, "last_seen_ms": NOW_MS - silent_ms}


def test_the_range_goes_from_the_slow_quarter_as_busy_as_now_to_the_fast_quarter() -> None:
    rows = [row(100), row(200), row(300, phase="idle"), row(400, phase="idle"), row(1e9, silent_ms=61_000), row(0)]
    found = forecast(STATUS, rows, price=1_000_000)
    assert found == (int(175 * 0.5 * 3600), (325 * 3600), "")


def test_nobody_is_promised_more_than_the_budget_has() -> None:
    found = forecast(STATUS | {"budget_micros": 500}, [row(100), row(200)], price=1_000_000)
    assert (found.low, found.high) == (500, 500)


@pytest.mark.parametrize(
    ("changes", "rows", "price", "why"),
    [
        ({}, [], 1, "0 nodes work here"),
        ({}, [row(10)], 1, "1 node works here"),
        ({"finished": True}, [row(1), row(2)], 1, "finished"),
        ({}, [row(1), row(2)], 5_000_001, "pays at most 5000000"),
    ],
)
def test_what_nobody_knows_is_called_unknown(
    changes: dict[str, Any], rows: list[dict[str, Any]], price: int, why: str
) -> None:
    found = forecast(STATUS | changes, rows, price=price)
    assert why in found.unknown
    assert f"Earnings: unknown: {found.unknown}" in list(lines(STATUS | changes, rows, price=price))


def test_demand_tells_who_is_wanted_and_who_stands_by() -> None:
    fleet = [{"works": True}, {"works": True}, {"works": False}]
    said = "\n".join(lines(STATUS | {"fleet": fleet}, [row(1), row(2)], price=1))
    assert "2 selected for work, 1 on standby" in said
    assert "waits for samples 25% of the time" in said


@pytest.mark.parametrize(
    ("changes", "said"),
    [({"nodes_alive": 0}, "Round: 0 active nodes;"), ({"finished": True}, "Round: finished;")],
)
def test_where_nobody_works_nobody_is_said_to_be_wanted(changes: dict[str, Any], said: str) -> None:
    told = next(iter(lines(STATUS | changes, [], price=1)))
    assert told.startswith(said)
    assert "wanted" not in told


@pytest.mark.parametrize(
    ("status", "rows"),
    [
        ({}, []),
        (STATUS | {"fleet": [1]}, []),
        (STATUS | {"max_price_micros_per_mtok": "all"}, []),
        (STATUS | {"budget_micros": float("inf")}, [row(1), row(2)]),
        (STATUS, [row(1), {}]),
        (STATUS, "rows"),
    ],
)
def test_a_coordinator_that_talks_nonsense_is_not_understood(status: dict[str, Any], rows: Any) -> None:
    (said,) = understood(status, rows, price=1)
    assert "unknown" in said


def test_a_dry_run_that_learns_nothing_fails(tmp_path: Path) -> None:
    words = ("join", f"http://127.0.0.1:9#{'a' * 64}", "--dry-run", "--engine", "torch", "--home", str(tmp_path))
    found = CliRunner().invoke(app, words)
    assert isinstance(found.exception, Unreachable), found.output


def test_a_coordinator_does_not_write_to_the_terminal() -> None:
    said = understood(STATUS | {"update": "\x1b]0;owned\x07\n"}, [], price=1)
    assert said[0].endswith("update ?]0;owned?? of 100")


def test_what_the_operator_signed_is_shown_without_empty_texts() -> None:
    said = RoundSection(title="Sums for all", licence="CC0-1.0").describe("ab" * 32)
    answer = RoundAnswer(Coordinator("http://127.0.0.1:9", "ab" * 32, NodeKey(b"1" * 32)), None, said)
    assert told(answer) == {"title": "Sums for all", "licence": "CC0-1.0"}
    assert told(answer._replace(description=None)) == {}
