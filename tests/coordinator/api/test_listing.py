"""`/v1/listing`: what a round says of itself to strangers verifies, and says what its ledger proves."""

from pathlib import Path

import pytest

from coordinator.base.clock import now_ms
from ledger import store
from ledger.book import Folding
from ledger.directory import LISTING_MAX_BYTES
from ledger.entry import Deposit, Entry
from ledger.listing import LogTotals, OpenListing, open_listing
from protocol.text.money import Unit
from protocol.wire.signing import read_object
from tests.coordinator.served import Served, serve
from tests.ledger.values import batch, credit, paid, payout, post

ABOUT = ["round.title=Rivers", "round.purpose=maps of rivers", "round.licence=Apache-2.0", "round.unit=EUR"]


async def listed(served: Served) -> OpenListing:
    """Return the listing as a stranger gets it."""
    response = await served.client.get("/v1/listing")
    assert response.status == 200, await response.text()
    return open_listing(read_object(await response.read(), LISTING_MAX_BYTES))


async def book(served: Served, *entries: Entry) -> None:
    outcomes = await served.round.database.run(store.append_all, list(entries), now_ms())
    assert set(outcomes) == {"applied"}, outcomes


async def prove(served: Served, said: OpenListing) -> None:
    """Compare the listing with the log, as a reader of the public files does."""
    recorded = await served.round.database.read(store.entries, 0, said.checkpoint.size)
    totals, folding = LogTotals(said), Folding()
    for number, entry in enumerate((one.entry for one in recorded), 1):
        folding.add(entry)
        totals.add(entry)
        if number in totals.sizes:
            totals.reach(number, folding.state)
    totals.finish(await served.round.database.read(store.root_at, said.checkpoint.size))


@pytest.mark.asyncio
async def test_a_round_lists_itself_and_its_log_proves_what_it_says(tmp_path: Path) -> None:
    async with serve(tmp_path, *ABOUT) as served:
        await served.publish()
        await served.join()
        await served.round.publish_checkpoint()
        said = await listed(served)
        assert (said.title, said.unit, said.listing.description.licence) == ("Rivers", Unit("EUR"), "Apache-2.0")
        assert said.listing.model.weights_bytes == len(b"weights")
        assert said.listing.prices.model_dump() == {"lowest": 1_000_000, "highest": 1_000_000, "maximum": 5_000_000}
        assert (said.listing.payments, said.listing.totals.paid_micros) == ((), 0)
        await prove(served, said)


@pytest.mark.asyncio
async def test_payouts_and_gifts_are_listed_as_far_as_the_checkpoint_covers_them(tmp_path: Path) -> None:
    async with serve(tmp_path, *ABOUT) as served:
        await book(served, credit(1, price=10**6), credit(2, of=2, price=10**6), post(1), post(2))
        await book(served, batch(1, payees=2, micros=150), payout(1, micros=100), payout(1, of=2, micros=50))
        await book(served, paid(1), paid(1, of=2), Deposit(reference="gift/1", amount_micros=7_000))
        await served.round.publish_checkpoint()
        await book(served, batch(2, micros=50), payout(2, of=2, micros=50), paid(2, of=2))
        await book(served, credit(3, price=10**6), post(3), Deposit(reference="gift/2", amount_micros=1))
        said = await listed(served)
        assert [payment.paid_micros for payment in said.listing.payments] == [150], "the second is not published yet"
        totals = said.listing.totals
        assert (totals.paid_micros, totals.owed_micros, totals.gifts_micros) == (150, 50, 7_000)
        assert (said.paid_since(0), said.paid_since(said.listing.made_ms + 1)) == (150, 0)
        await prove(served, said)
    async with serve(tmp_path, *ABOUT) as served:
        await served.round.publish_checkpoint()
        later = await listed(served)
        assert [payment.paid_micros for payment in later.listing.payments] == [150, 200]
        assert (later.listing.totals.owed_micros, later.listing.totals.gifts_micros) == (100, 7_001)
        await prove(served, later)


@pytest.mark.asyncio
async def test_before_the_first_checkpoint_there_is_no_listing(tmp_path: Path) -> None:
    async with serve(tmp_path) as served:
        assert (await served.client.get("/v1/listing")).status == 404
