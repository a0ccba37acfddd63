"""Gifts raise the budget once, are deposits that anybody can add up, and their givers can be erased."""

from pathlib import Path
from typing import Any

import pytest

from coordinator.store import tables
from coordinator.transactions import gifts
from ledger import store
from ledger.entry import Deposit
from protocol.errors import ConfigInvalid, NotFound
from tests.coordinator.world import World


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path, budget_micros=1_000)


def give(world: World, giver: str = "Anna", micros: int = 500, reference: str = "booking 1") -> gifts.RecordedGift:
    made: gifts.RecordedGift = world.run(gifts.record, giver, micros, reference, now_ms=world.now_ms)
    return made


def deposits(world: World) -> list[Deposit]:
    recorded = world.run(store.entries, 0, 100)
    return [one.entry for one in recorded if isinstance(one.entry, Deposit) and one.entry.is_gift]


def test_a_gift_raises_the_budget_and_pays_for_work(world: World) -> None:
    made = give(world)
    assert (made.number, made.is_new, world.budget()) == (1, True, 1_500)
    [entry] = deposits(world)
    assert (entry.reference, entry.amount_micros) == (made.entry_reference, 500)
    assert "Anna" not in entry.reference
    assert not world.audit()
    node = world.join(1)
    world.publish(1, 0)
    world.earn(node)
    assert world.budget() < 1_500


def test_a_payment_is_recorded_once_however_often_it_is_told(world: World) -> None:
    assert give(world) == give(world)._replace(is_new=True)
    assert (world.budget(), len(deposits(world))) == (1_500, 1)
    with pytest.raises(ConfigInvalid, match="another amount"):
        give(world, micros=501)
    assert give(world, reference="booking 2").number == 2
    assert world.budget() == 2_000


@pytest.mark.parametrize(
    ("giver", "micros", "reference"),
    [("", 1, "a"), ("\x1b[2J", 1, "a"), ("a\nb", 1, "a"), ("x" * 81, 1, "a"), ("Anna", 0, "a"), ("Anna", -1, "a"),
     ("Anna", 2**63, "a"), ("Anna", 1, ""), ("Anna", 1, "a\nb"), ("Anna", 1, "x" * 101)],
)  # fmt: skip
def test_a_gift_that_cannot_be_shown_or_booked_is_refused(
    world: World, giver: str, micros: int, reference: str
) -> None:
    with pytest.raises(ConfigInvalid):
        give(world, giver, micros, reference)
    assert (world.budget(), world.rows(tables.gifts)) == (1_000, [])


def test_more_than_the_ledger_can_hold_is_refused_and_leaves_no_row(world: World) -> None:
    with pytest.raises(ConfigInvalid, match="deposit_limit"):
        give(world, micros=2**62)
    assert world.rows(tables.gifts) == []


def test_a_giver_is_erased_and_the_entry_stays(world: World) -> None:
    give(world)
    before = deposits(world)
    world.run(gifts.forget_giver, 1)
    [row] = world.run(gifts.list_gifts)
    assert (row["given_by"], row["salt"], row["amount_micros"]) == ("", "", 500)
    assert deposits(world) == before
    assert give(world).entry_reference == before[0].reference, "a retry names the entry that stays"
    with pytest.raises(NotFound):
        world.run(gifts.forget_giver, 2)


def test_the_public_summary_names_the_newest_and_no_payment(world: World) -> None:
    assert world.run(gifts.summary) == {"count": 0, "micros": 0, "newest": []}
    for number in range(gifts.SHOWN + 2):
        give(world, f"giver {number}", 10, f"booking {number}")
    told: dict[str, Any] = world.run(gifts.summary)
    assert (told["count"], told["micros"]) == (gifts.SHOWN + 2, 10 * (gifts.SHOWN + 2))
    assert [gift["given_by"] for gift in told["newest"]] == [f"giver {number}" for number in range(6, 1, -1)]
    assert "booking" not in str(told)
