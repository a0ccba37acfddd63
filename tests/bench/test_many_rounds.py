"""The times that the bench of many rounds reads from a node's record."""

import json
from pathlib import Path

import pytest

from bench.many_rounds import switches

FIRST, SECOND, THIRD = "http://first", "http://second", "http://third"


def lease(url: str, *ids: str) -> dict[str, object]:
    return {"kind": "lease", "began": 0.0, "ended": 0.0, "leases": len(ids), "ids": ids, "url": url}


def group(name: str, began: float, ended: float) -> dict[str, object]:
    return {"kind": "group", "lease": name, "began": began, "ended": ended}


@pytest.mark.parametrize(
    ("events", "expected"),
    [
        ([group("a1", 1, 2), group("b1", 3, 4)], [1]),
        ([group("a1", 1, 2), group("a2", 1, 2.5), group("b1", 3, 4), group("b2", 4, 5)], [0.5]),  # from the last one
        ([group("a2", 1.5, 2), group("a1", 1, 2.5), group("b1", 3, 4)], [0.5]),  # in the order of the first tokens
        ([group("a1", 1, 2), group("c1", 3, 4), group("b1", 9, 9)], [1]),  # the third round was first
        ([group("b1", 1, 2), group("a1", 3, 4)], []),  # the way back
        (
            [group("warm-up", 1, 2), group("a1", 3, 4), group("b1", 5, 6), group("a2", 7, 8), group("b2", 8.5, 9)],
            [1, 0.5],
        ),
    ],
)
def test_a_switch_lasts_from_the_last_group_of_one_round_to_the_first_token_of_another(
    tmp_path: Path, events: list[dict[str, object]], expected: list[float]
) -> None:
    asked = [lease(FIRST, "a1", "a2"), lease(SECOND, "b1"), lease(SECOND), lease(SECOND, "b2"), lease(THIRD, "c1")]
    record = tmp_path / "node.jsonl"
    record.write_text("".join(json.dumps(event) + "\n" for event in [*asked, *events]))
    assert switches(record, FIRST) == pytest.approx(expected)
