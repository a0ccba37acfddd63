"""Rates and payouts as an unsigned answer: what has another form is not known, and is no error."""

import copy
from collections.abc import Callable
from typing import Any

import pytest

from protocol.text.money import EarningPace
from swarm_node.ledger.owner_rates import parse_rates

PACE = {"hour_micros": 1, "day_micros": 24, "earning_s": 90.0}
ANSWER: dict[str, Any] = {
    "owner": "o",
    "nodes": [{"node_id": "n", **PACE}],
    "total": PACE,
    "paid": {"paid_micros": 5, "under_way_micros": 6, "payouts": 1, "last_ms": 7},
    "payouts": {"paid_micros": 9, "batches": 1, "last_ms": 7, "next_ms": 8, "minimum_micros": 10},
}


def test_an_answer_is_read() -> None:
    found = parse_rates(ANSWER)
    assert found is not None
    assert found.nodes == {"n": EarningPace(1, 24, 90.0)}
    assert found.to_json("n") == {
        "rate": PACE, "paid_micros": 5, "under_way_micros": 6, "payouts": 1, "last_ms": 7, "next_ms": 8,
        "minimum_micros": 10,
    }  # fmt: skip
    assert found.to_json("another")["rate"] == EarningPace()._asdict()
    assert found.to_json()["rate"] == PACE


def _without(name: str) -> Callable[[dict[str, Any]], object]:
    return lambda answer: answer.pop(name)


@pytest.mark.parametrize(
    "spoil",
    [
        *map(_without, ("nodes", "total", "paid", "payouts")),
        lambda answer: answer.update(nodes=5),
        lambda answer: answer.update(nodes=[5]),
        lambda answer: answer.update(total="x"),
        lambda answer: answer["paid"].update(paid_micros=-1),
        lambda answer: answer["paid"].update(paid_micros="\x1b[31m"),
        lambda answer: answer["paid"].update(payouts=2**80),
        lambda answer: answer["payouts"].update(next_ms="soon"),
        lambda answer: answer.update(paid=[]),
    ],
)
def test_an_answer_of_another_form_is_not_known(spoil: Callable[[dict[str, Any]], object]) -> None:
    answer = copy.deepcopy(ANSWER)
    spoil(answer)
    assert parse_rates(answer) is None
