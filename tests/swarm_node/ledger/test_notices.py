"""An owner hears of a changed payout address once, also if the node was away when it changed."""

import copy
import logging
from collections import deque
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any

import pytest

from protocol.errors import ConfigInvalid
from protocol.people.owner import Delegation, Earnings, NodeEarnings, Revocation, seal_statement
from protocol.text.money import EarningPace
from protocol.wire.signing import NodeKey
from swarm_node.coordinator_api.client import Coordinator
from swarm_node.keys import delegation
from swarm_node.ledger.notices import EarnedToday, Notices, parse_rates

OWNER, NODE, OTHER = NodeKey(b"o" * 32), NodeKey(b"n" * 32), NodeKey(b"x" * 32)
DAY_MS = 86_400_000


def earnings(address: str = "", then: str = "", from_ms: int = 0) -> Earnings:
    nothing = {"pending_micros": 0, "payable_micros": 0, "paying_micros": 0, "paid_micros": 0}
    total = NodeEarnings(node_id=OWNER.node_id, name="", revoked=False, **nothing)
    return Earnings(
        owner=OWNER.node_id, nodes=(), total=total, address=address, next_address=then, next_from_ms=from_ms
    )


def told(caplog: pytest.LogCaptureFixture, folder: Path, news: Earnings) -> str:
    """Return what a node that starts now says of the news."""
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        Notices(Coordinator("http://127.0.0.1:1", "a" * 64, NODE), folder).announce(news)
    return caplog.text


def test_thief_cannot_change_the_address_quietly(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    assert "paid to text:mine" in told(caplog, tmp_path, earnings("text:mine"))
    assert told(caplog, tmp_path, earnings("text:mine")) == ""
    warned = told(caplog, tmp_path, earnings("text:mine", "text:thief", 3 * DAY_MS))
    assert "changes to text:thief on 1970-01-04 00:00 UTC" in warned
    assert "text:other" in told(caplog, tmp_path, earnings("text:mine", "text:other", 4 * DAY_MS))
    assert told(caplog, tmp_path, earnings("text:mine", "text:other", 4 * DAY_MS)) == ""


SATURDAY, SUNDAY, TUESDAY = date(2026, 11, 28), date(2026, 11, 29), date(2026, 12, 1)


def test_credit_of_today_begins_at_midnight_and_survives_restarts(tmp_path: Path) -> None:
    file, days = tmp_path / "today.json", deque([SATURDAY, SATURDAY, SATURDAY, SUNDAY, SUNDAY, TUESDAY])

    def restarted() -> EarnedToday:
        return EarnedToday(file, days.popleft)

    assert restarted().update(1000) == 0, "what was earned before the first look is not known to be of today"
    assert restarted().update(1400) == 400
    assert restarted().update(1390) == 390, "a part was voided"
    running = restarted()
    assert running.update(1500) == 110, "since the last look of the day before"
    assert running.update(1700) == 310
    assert running.update(1700) == 0
    assert not days


@pytest.mark.parametrize("damaged", [b"", b"{", b"[1, 2]", b'{"day": 1}', b"[null, null, null]"])
def test_a_damaged_count_of_today_begins_anew(tmp_path: Path, damaged: bytes) -> None:
    file = tmp_path / "today.json"
    file.write_bytes(damaged)
    assert EarnedToday(file, lambda: SATURDAY).update(500) == 0
    assert EarnedToday(file, lambda: SATURDAY).update(600) == 100


def test_nothing_is_said_where_nothing_is_set(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    assert told(caplog, tmp_path, earnings()) == ""


def test_a_delegation_is_kept_from_the_first_join_on(tmp_path: Path) -> None:
    home, file = tmp_path / "home", tmp_path / "word"
    file.write_bytes(seal_statement(OWNER, Delegation(node_id=NODE.node_id, number=1)))
    assert delegation.kept(home, NODE.node_id) is None
    assert delegation.kept(home, NODE.node_id, file) == file.read_bytes()
    file.unlink()
    kept = delegation.kept(home, NODE.node_id)
    assert kept
    assert delegation.owner_of(kept, NODE.node_id)[0] == OWNER.node_id


@pytest.mark.parametrize(
    "word",
    [
        b"",
        b"garbage",
        seal_statement(OWNER, Delegation(node_id=OTHER.node_id, number=1)),
        seal_statement(OWNER, Revocation(node_id=NODE.node_id, number=1)),
    ],
    ids=["nothing", "garbage", "another node's", "no delegation"],
)
def test_what_is_no_delegation_to_this_node_is_not_kept(tmp_path: Path, word: bytes) -> None:
    file = tmp_path / "word"
    file.write_bytes(word)
    with pytest.raises(ConfigInvalid):
        delegation.kept(tmp_path, NODE.node_id, file)
    assert not (tmp_path / delegation.FILE).exists()


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
        "minimum_micros": 10, "owner": "",
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
