"""A listing is compared with the log of its round: what is said and not proved is refused, with the round's name."""

from pathlib import Path
from typing import Any

import pytest
import trio

from ledger.listing import OpenListing, open_listing
from protocol.errors import NotFound, ProofInvalid, RolledBack, UntrustedMetadata
from swarm_node.ledger.listing_check import check_listing
from swarm_node.ledger.log_reader import LogReader
from tests.ledger.values import credit
from tests.swarm_node.listed_world import PAYING, ListedLog


@pytest.fixture
def rivers(tmp_path: Path) -> ListedLog:
    return ListedLog(tmp_path)


def check(log: ListedLog, said: OpenListing, *sightings: Any) -> None:
    trio.run(check_listing, LogReader(log), said, sightings)


def test_a_true_listing_is_proved_also_when_the_log_has_grown(rivers: ListedLog) -> None:
    said, seen = rivers.open(), rivers.sighting()
    check(rivers, said, seen)
    rivers.add([credit(number) for number in range(10, 600)])
    check(rivers, said, seen)
    check(rivers, rivers.open(), seen, rivers.sighting())


@pytest.mark.parametrize("what", ["paid", "owed", "gifts", "deposited"])
def test_a_round_that_lies_about_a_total_is_refused_by_name(rivers: ListedLog, what: str) -> None:
    totals = rivers.signed()["totals"]
    totals[f"{what}_micros"] += 10**6
    with pytest.raises(ProofInvalid, match=r"^Rivers \(.{8}\) says .* its own log say"):
        check(rivers, rivers.open(totals=totals))


def test_a_round_that_lies_about_one_payment_is_refused(rivers: ListedLog) -> None:
    payments = [payment | {"size": payment["size"] - 1} for payment in rivers.signed()["payments"]]
    with pytest.raises(ProofInvalid, match=r"has paid 0\.00015 EUR.* say 0\.00 EUR"):
        check(rivers, rivers.open(payments=payments))


def test_entries_that_were_changed_on_the_way_leave_a_listing_unproved(rivers: ListedLog, tmp_path: Path) -> None:
    said = rivers.open()
    other = ListedLog(tmp_path / "other", entries=[*PAYING[:-1], credit(7)])
    rivers.engine = other.engine
    rivers.sign(said.checkpoint.size, bytes(32))
    with pytest.raises(UntrustedMetadata, match="are not those that its ledger's key has signed"):
        check(rivers, said)


def test_a_log_that_contradicts_the_curator_is_refused(rivers: ListedLog) -> None:
    with pytest.raises(UntrustedMetadata, match="than its curator saw"):
        check(rivers, rivers.open(), rivers.sighting(size=3, root="0" * 64))


def test_an_invalid_log_and_a_withheld_one_prove_nothing(rivers: ListedLog) -> None:
    said = rivers.open()
    bundle = f"ledger/tile/entries/000.p/{said.checkpoint.size}"
    rivers.lies[bundle] = b"\x00\x01x" * said.checkpoint.size
    with pytest.raises(UntrustedMetadata, match="is not valid"):
        check(rivers, said)
    rivers.lies |= {bundle: None, "ledger/tile/entries/000": None}
    with pytest.raises(NotFound):
        check(rivers, said)


@pytest.mark.parametrize("served", [None, b"", b"\x00", b"\xff\xff" + bytes(300)])
def test_half_a_file_of_a_long_log_does_not_make_its_round_a_liar(rivers: ListedLog, served: bytes | None) -> None:
    rivers.add([credit(number) for number in range(10, 600)])
    said = rivers.open()
    rivers.lies["ledger/tile/entries/000"] = served
    with pytest.raises(UntrustedMetadata, match="is not valid"):
        check(rivers, said)


def test_a_log_that_is_shorter_than_the_listing_says_is_no_proof(rivers: ListedLog, tmp_path: Path) -> None:
    said = rivers.open()
    rivers.engine = ListedLog(tmp_path / "short", entries=PAYING[:3]).engine
    rivers.sign(3, bytes(32))
    with pytest.raises(RolledBack):
        check(rivers, said)
    assert open_listing(said.document).round_id == rivers.round_id
