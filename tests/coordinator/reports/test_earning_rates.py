"""Rates of nodes and payouts of owners: from the ledger's own times, through restarts and clocks that jump."""

from itertools import count
from pathlib import Path

import pytest

from coordinator.config import parse
from coordinator.reports import earning_rates
from coordinator.reports.earning_rates import BUCKET_MS, EarningRates, OwnerPayouts, RateFigures
from coordinator.transactions.payouts import PayoutTerms
from coordinator.transactions.rails.base import Status
from ledger import store
from ledger.book import EntryOutcome
from ledger.entry import AppealEntry, Pending, Reinstate, RulingEntry, Void, amount
from protocol.text.money import EarningPace
from protocol.wire.signing import NodeKey
from tests.coordinator.bank import Bank
from tests.coordinator.transactions.test_payouts import create, owe, owner, settle
from tests.coordinator.world import PRICE, World

HOUR_MS, DAY_MS = 3_600_000, 86_400_000
START_MS = 1_000_000 * BUCKET_MS
CONFIG = parse({})
_claims = count(1)


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path, budget_micros=10**12)


def credit(world: World, key: NodeKey, micros: int, at_ms: int) -> str:
    """Credit so much to a node at a time; return the claim."""
    number = 10**6 + next(_claims)
    claim = f"{number:064x}"
    entry = Pending(claim_id=claim, lease_id=f"{number:032x}", node_id=key.node_id, tokens=micros * 10**6 // PRICE,
                    price_micros_per_mtok=PRICE, amount_micros=amount(micros * 10**6 // PRICE, PRICE))  # fmt: skip
    assert world.run(store.append_all, [entry], at_ms) == [EntryOutcome.APPLIED]
    return claim


def pace(world: World, rates: EarningRates, key: NodeKey, now_ms: int) -> EarningPace:
    world.run(rates.read, now_ms)
    return rates.pace(key.node_id, now_ms)


def test_a_node_without_credit_has_no_rate(world: World) -> None:
    assert pace(world, EarningRates(), world.join(1), START_MS) == EarningPace()


def test_credit_counts_for_an_hour_and_for_a_day(world: World) -> None:
    key, rates = world.join(1), EarningRates()
    credit(world, key, 5_000, START_MS)
    credit(world, key, 7_000, START_MS + HOUR_MS)
    soon = pace(world, rates, key, START_MS + HOUR_MS + 1)
    assert soon.day_micros == 12_000
    assert soon.earning_s == pytest.approx(3600, abs=1)
    assert 7_000 <= soon.hour_micros <= 7_000 * 12 / 11, "the first credit is more than an hour old"
    assert pace(world, rates, key, START_MS + 3 * HOUR_MS) == EarningPace(0, 12_000, 3 * 3600.0)
    late = pace(world, rates, key, START_MS + DAY_MS + HOUR_MS - 1)
    assert (late.hour_micros, late.day_micros) == (0, 7_000)
    assert pace(world, rates, key, START_MS + DAY_MS + HOUR_MS + BUCKET_MS) == EarningPace()


def test_a_steady_node_has_a_steady_rate(world: World) -> None:
    key, rates = world.join(1), EarningRates()
    for minute in range(0, 26 * 60, 5):
        credit(world, key, 1_000, START_MS + minute * 60_000)
    steady = pace(world, rates, key, START_MS + 26 * HOUR_MS)
    assert steady.hour_micros == pytest.approx(12_000, rel=0.1)
    assert steady.day_micros == pytest.approx(24 * 12_000, rel=0.01)
    assert steady.trend == pytest.approx(0, abs=0.1)


def test_voided_credit_counts_against_its_hour_and_is_given_back(world: World) -> None:
    key, rates = world.join(1), EarningRates()
    claim = credit(world, key, 5_000, START_MS)
    world.run(store.append_all, [Void(claim_id=claim, reason_code="audit_failed")], START_MS + HOUR_MS)
    found = pace(world, rates, key, START_MS + HOUR_MS + 10 * BUCKET_MS)
    assert found.hour_micros == pytest.approx(-5_000, rel=0.1)
    assert found.day_micros == 0
    ruled = RulingEntry(claim_id=claim, outcome="granted", reason_code="fault_refuted")
    given = Reinstate(claim_id=claim, appealed_claim_id=claim, reason_code="fault_refuted")
    appeal = AppealEntry(claim_id=claim, statement_digest="0" * 64)
    outcomes = world.run(store.append_all, [appeal, ruled, given], START_MS + 2 * HOUR_MS)
    assert set(outcomes) == {EntryOutcome.APPLIED}
    assert pace(world, rates, key, START_MS + 2 * HOUR_MS + 1).day_micros == 5_000


def test_a_restart_reads_the_last_day_again_and_nothing_else(world: World) -> None:
    key, rates = world.join(1), EarningRates()
    for hours in (0, 10, 20, 30):
        credit(world, key, 1_000, START_MS + hours * HOUR_MS)
        pace(world, rates, key, START_MS + hours * HOUR_MS)
    now_ms = START_MS + 30 * HOUR_MS + 1
    before = pace(world, rates, key, now_ms)
    assert before.day_micros == 3_000
    assert pace(world, EarningRates(), key, now_ms) == before


@pytest.mark.parametrize("jump_ms", [-HOUR_MS, -2 * DAY_MS, HOUR_MS, 400 * DAY_MS])
def test_a_clock_that_jumps_and_comes_back_loses_no_rate(world: World, jump_ms: int) -> None:
    key, rates = world.join(1), EarningRates()
    credit(world, key, 4_000, START_MS)
    before = pace(world, rates, key, START_MS + 60_000)
    jumped = pace(world, rates, key, START_MS + 60_000 + jump_ms)
    assert 0 <= (jumped.earning_s or 0) <= DAY_MS / 1000
    assert jumped.day_micros in (0, 4_000)
    assert pace(world, rates, key, START_MS + 60_000) == before


def test_credit_under_a_clock_of_the_future_does_not_count(world: World) -> None:
    key, rates = world.join(1), EarningRates()
    credit(world, key, 4_000, START_MS + 40 * DAY_MS)
    assert pace(world, rates, key, START_MS) == EarningPace()


def look(world: World, config: object = CONFIG, now_ms: int = START_MS) -> RateFigures:
    figures: RateFigures = world.run(earning_rates.figures, EarningRates(), config, now_ms)
    return figures


def test_an_owner_sees_all_nodes_what_was_paid_and_when_the_next_batch_is_due(world: World, tmp_path: Path) -> None:
    first, second = owner(1, world, nodes=2)
    scheduled = parse({"payouts": {"every_d": 7.0}})
    boss = NodeKey((1_001).to_bytes(32)).node_id
    began = world.run(store.entries, 0, 1)[0].recorded_ms
    assert look(world, scheduled).payouts.next_ms == began + 7 * DAY_MS
    assert look(world).payouts.next_ms is None
    credit(world, first, 2_000, START_MS)
    credit(world, second, 3_000, START_MS)
    owe(world, first, 250)
    batch = create(world, PayoutTerms(rail="bank", scheme="", minimum_micros=100))
    assert look(world).paid[boss] == OwnerPayouts(under_way_micros=250)
    assert settle(world, batch, Bank(tmp_path / "book")) is Status.DONE
    shown = look(world, scheduled).to_json(boss)
    assert shown["paid"] == {"paid_micros": 250, "under_way_micros": 0, "payouts": 1, "last_ms": world.now_ms}
    assert shown["payouts"] | {"minimum_micros": 0} == {
        "paid_micros": 250,
        "batches": 1,
        "last_ms": world.now_ms,
        "next_ms": world.now_ms + 7 * DAY_MS,
        "minimum_micros": 0,
    }
    assert {node["node_id"]: node["day_micros"] for node in shown["nodes"]} == {
        first.node_id: 2_000,
        second.node_id: 3_000,
    }
    assert shown["total"]["day_micros"] == 5_000
    assert EarningPace.parse(shown["total"]) == EarningPace(5_000, 5_000, 0.0)
