"""Listings and directories: what verifies from any mirror, and what is refused by name."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from coordinator.publishing import rotation
from coordinator.publishing.signed_metadata import LEDGER, RoleKeys, SignedMetadata
from ledger.directory import (
    DIRECTORY_MAX_BYTES,
    SIGHTINGS_MAX,
    KnownRound,
    ListedRound,
    RefusedRound,
    Sighting,
    look_alikes,
    merge,
    open_directory,
    thinned,
)
from ledger.gaps import Gap
from ledger.listing import LIFETIME_MS, PAYMENTS_MAX, open_listing
from protocol.errors import (
    BadSignature,
    MalformedMessage,
    MessageTooLarge,
    MetadataExpired,
    ProofInvalid,
    RolledBack,
    SwarmError,
    UntrustedMetadata,
    UntrustedRoot,
)
from protocol.limits import DAY_MS
from protocol.text.money import Unit
from protocol.wire.signing import NodeKey
from tests.ledger.values import credit
from tests.swarm_node.listed_world import CURATOR, NOW_MS, ListedLog, directory
from tests.swarm_node.log_world import NOW


@pytest.fixture
def rivers(tmp_path: Path) -> ListedLog:
    return ListedLog(tmp_path / "rivers")


@pytest.fixture
def lakes(tmp_path: Path) -> ListedLog:
    return ListedLog(tmp_path / "lakes", "Lakes")


def opened(data: bytes, now_ms: int = NOW_MS) -> Any:
    return open_directory(data, CURATOR.node_id, now_ms=now_ms)


class TestListings:
    """Listings verify from any place, and a changed one is refused."""

    def test_a_listing_verifies_without_a_network(self, rivers: ListedLog) -> None:
        said = open_listing(json.loads(json.dumps(rivers.listing())))
        assert (said.name, said.unit) == (f"Rivers ({rivers.round_id[:8]})", Unit("EUR", 2))
        assert said.join_string == f"http://rivers.example:8700#{rivers.round_id}"
        assert said.checkpoint == rivers.checkpoint()

    def test_an_entry_copied_under_another_title_is_refused(self, rivers: ListedLog) -> None:
        listing = rivers.listing()
        listing["signed"]["description"]["title"] = "Lakes"
        with pytest.raises(BadSignature):
            open_listing(listing)

    def test_an_entry_copied_to_another_round_is_refused(self, rivers: ListedLog, lakes: ListedLog) -> None:
        stolen = rivers.listing(description=lakes.signed()["description"])
        with pytest.raises(UntrustedRoot):
            open_listing(stolen)
        grafted = stolen | {"roots": lakes.listing()["roots"]}
        with pytest.raises(BadSignature):
            open_listing(grafted)

    def test_the_checkpoint_of_another_round_is_refused(self, rivers: ListedLog, lakes: ListedLog) -> None:
        with pytest.raises(SwarmError, match="has not signed this checkpoint"):
            open_listing(rivers.listing(checkpoint=lakes.signed()["checkpoint"]))

    def test_a_signature_of_a_checkpoint_is_none_of_a_listing(self, rivers: ListedLog) -> None:
        listing = rivers.listing()
        text = rivers.checkpoint().text.encode()
        listing["signature"] = rivers.metadata.sign_for_ledger(text).hex()
        with pytest.raises(BadSignature):
            open_listing(listing)

    @pytest.mark.parametrize("title", ["\x1b[2Jgone", "two\nlines", "a\u202egnirts", "\u200bspace", "x" * 81, " a"])
    def test_terminal_escapes_and_invisible_characters_in_a_title_are_refused(
        self, rivers: ListedLog, title: str
    ) -> None:
        about = rivers.signed()["description"] | {"title": title}
        with pytest.raises(MalformedMessage):
            open_listing(rivers.listing(description=about))

    @pytest.mark.parametrize(
        "url", ["file:///etc/passwd", "http://a b", "https://x#y", "http://\u0440ivers.example", "http://x\x1b[2J"]
    )
    def test_an_address_that_is_no_plain_url_is_refused(self, rivers: ListedLog, url: str) -> None:
        with pytest.raises(MalformedMessage):
            open_listing(rivers.listing(url=url))

    @pytest.mark.parametrize(
        "change",
        [
            {"kind": "echo-swarm/directory"},
            {"update": 1.0},
            {"update": True},
            {"budget_micros": -1},
            {"extra": 1},
            {"nodes": "2"},
            {"expires_ms": NOW_MS},
            {"expires_ms": NOW_MS + LIFETIME_MS + 1},
            {"payments": [{"size": 8, "ms": NOW_MS + 1, "paid_micros": 150}]},
            {"payments": [{"size": 900, "ms": NOW_MS, "paid_micros": 150}]},
            {"payments": [{"size": 8, "ms": NOW_MS, "paid_micros": 151}]},
            {"payments": [{"size": 8, "ms": NOW_MS, "paid_micros": 1}] * (PAYMENTS_MAX + 1)},
        ],
    )
    def test_a_listing_that_contradicts_itself_or_its_bounds_is_refused(
        self, rivers: ListedLog, change: dict[str, Any]
    ) -> None:
        with pytest.raises(SwarmError):
            open_listing(rivers.listing(**change))

    @pytest.mark.parametrize(
        "spoil",
        [
            lambda doc: doc.pop("signature"),
            lambda doc: doc.update(signature="zz" * 64),
            lambda doc: doc.update(signature=doc["signature"][:-2]),
            lambda doc: doc.update(roots=[]),
            lambda doc: doc.update(roots=[1]),
            lambda doc: doc.update(roots=["{}"]),
            lambda doc: doc.update(signed=[]),
            lambda doc: doc["signed"].update(task="\ud800"),
        ],
    )
    def test_a_document_without_its_parts_is_refused(
        self, rivers: ListedLog, spoil: Callable[[dict[str, Any]], object]
    ) -> None:
        listing = rivers.listing()
        spoil(listing)
        with pytest.raises(SwarmError):
            open_listing(listing)

    def test_an_address_that_no_client_can_parse_is_refused(self, rivers: ListedLog) -> None:
        """Else one round could end every command that reads its directory."""
        wrong = ("[", "]", "[::1]x", "[v1.x]", "[1]", "", "/a", ":80", "a:b", "a:0", "a:65536", "::::", "a..b", ".")
        for host in (*wrong, "~", f"{'a' * 64}.example", "me@a", "a?b", "a\n", "-a.b", "a.b-", "a-.b:80"):
            with pytest.raises(SwarmError):
                rivers.open(url=f"http://{host}")
        for host in ("[2001:db8::1]:8700", "swarm.example.org/a/b", "10.0.0.1:1", "my_host"):
            assert rivers.open(url=f"https://{host}").listing.url == f"https://{host}"

    def test_what_was_paid_lately_goes_by_the_payments(self, rivers: ListedLog) -> None:
        old = {"size": 3, "ms": NOW_MS - 40 * DAY_MS, "paid_micros": 100}
        new = {"size": 9, "ms": NOW_MS - DAY_MS, "paid_micros": 150}
        said = rivers.open(payments=[old, new])
        assert [said.paid_since(NOW_MS - days * DAY_MS) for days in (0, 30, 50)] == [0, 50, 150]


class TestDirectories:
    """A curator's file, from whatever mirror."""

    def test_a_directory_verifies_and_a_wrong_entry_costs_only_itself(
        self, rivers: ListedLog, lakes: ListedLog
    ) -> None:
        copied = rivers.listing()
        copied["signed"]["description"]["title"] = "Lakes"
        found = opened(directory(copied, lakes.listing(), {"signed": {"form": "of a later version"}}))
        assert [known.listing.title for known in found.rounds] == ["Lakes"]
        assert [(wrong.title, wrong.round_id[:8]) for wrong in found.invalid] == [
            ("Lakes", rivers.round_id[:8]),
            ("", "00000000"),
        ]
        assert found.refused == (), "nobody signed what is wrong there: it says nothing about the round"

    def test_a_directory_of_another_key_is_refused(self, rivers: ListedLog) -> None:
        other = NodeKey(bytes(31) + b"\x09")
        with pytest.raises(UntrustedMetadata):
            opened(directory(rivers.listing(), key=other))
        posing = json.loads(directory(rivers.listing(), key=other)) | {"signer": CURATOR.node_id}
        with pytest.raises(BadSignature):
            opened(json.dumps(posing).encode())

    @pytest.mark.parametrize("data", [b"", b"[]", b"{", b"[" * 100_000, b"null", b'{"signer": 1}', b"\xff"])
    def test_bytes_that_are_no_directory_are_refused(self, data: bytes) -> None:
        with pytest.raises(SwarmError):
            opened(data)

    def test_a_huge_file_is_refused_before_it_is_parsed(self) -> None:
        with pytest.raises(MessageTooLarge):
            opened(b"x" * (DIRECTORY_MAX_BYTES + 1))

    def test_two_entries_for_one_round_are_refused(self, rivers: ListedLog) -> None:
        with pytest.raises(MalformedMessage, match="twice"):
            opened(directory(rivers.listing(), rivers.listing(nodes=3)))

    def test_an_expired_directory_and_one_of_the_future_are_refused(self, rivers: ListedLog) -> None:
        data = directory(rivers.listing())
        assert opened(data, NOW_MS + 7 * DAY_MS - 1).rounds
        for now_ms in (NOW_MS + 7 * DAY_MS, NOW_MS - DAY_MS):
            with pytest.raises(MetadataExpired):
                opened(data, now_ms)
        with pytest.raises(MalformedMessage):
            opened(directory(rivers.listing(), expires_ms=NOW_MS + 32 * DAY_MS))

    def test_a_curators_refusals_are_shown_with_safe_texts(self, rivers: ListedLog) -> None:
        wrong = RefusedRound(round_id=rivers.round_id, title="Rivers", reason="lies about its payouts", ms=NOW_MS)
        assert opened(directory(refused=(wrong,))).refused == (wrong,)
        with pytest.raises(ValueError, match="visible"):
            RefusedRound(round_id=rivers.round_id, title="\x1b[2J", reason="", ms=NOW_MS)

    @pytest.mark.parametrize(
        ("change", "said"),
        [
            ({"root": "0" * 64}, "another log"),
            ({"paid_micros": 0}, "more than its curator saw"),
            ({"ms": NOW_MS - 2 * DAY_MS}, "later time"),
            ({"size": 5, "ms": NOW_MS}, "did not have it yet"),
        ],
    )
    def test_a_listing_that_contradicts_what_the_curator_saw_is_a_lie(
        self, rivers: ListedLog, change: dict[str, Any], said: str
    ) -> None:
        entry = ListedRound(listing=rivers.listing(), sightings=(rivers.sighting(**change),))
        found = opened(directory(rounds=(entry,)))
        assert found.rounds == ()
        assert said in found.refused[0].reason

    def test_honest_sightings_contradict_nothing(self, rivers: ListedLog) -> None:
        before = rivers.sighting(size=5, root="0" * 64, paid_micros=0, ms=NOW_MS - 2 * DAY_MS)
        entry = ListedRound(listing=rivers.listing(), sightings=(before, rivers.sighting()))
        assert len(opened(directory(rounds=(entry,))).rounds) == 1

    def test_of_two_directories_the_newest_listing_counts_and_a_fork_refuses_the_round(
        self, rivers: ListedLog, lakes: ListedLog, tmp_path: Path
    ) -> None:
        old, new = rivers.known(), type(rivers.known())(rivers.open(made_ms=NOW_MS + 1, nodes=9))
        kept, wrong = merge([new, lakes.known(), old])
        assert {known.listing.listing.nodes for known in kept if known.listing.title == "Rivers"} == {9}
        assert not wrong
        rivers.sign(rivers.checkpoint().size, bytes(32))
        forked = rivers.lies["ledger/checkpoint"]
        assert isinstance(forked, bytes)
        other = type(old)(rivers.open(checkpoint=forked.decode()))
        kept, [(refused, error)] = merge([old, other, lakes.known()])
        assert [known.listing.title for known in kept] == ["Lakes"]
        assert refused.listing.title == "Rivers"
        assert "fork" in error.message
        gap = Gap(2, size=3, root=bytes(32), lost_size=other.listing.checkpoint.size)
        resumed = type(old)(replace(other.listing, gaps=(gap,)))
        assert not merge([old, resumed])[1], "the root keys have signed that the log goes on without these entries"

    def test_a_listing_of_the_future_is_not_listed_since_it_would_never_expire(self, rivers: ListedLog) -> None:
        later_ms = NOW_MS + 2 * 3_600_000
        found = opened(directory(rivers.listing(made_ms=later_ms, expires_ms=later_ms + 1)))
        assert (found.rounds, found.refused) == ((), ())
        assert "in the future" in found.invalid[0].reason
        with pytest.raises(MetadataExpired):
            rivers.open().require_valid_at(NOW_MS + LIFETIME_MS)

    def test_a_thief_of_a_replaced_key_neither_accuses_a_round_nor_replaces_its_listing(
        self, rivers: ListedLog, tmp_path: Path
    ) -> None:
        payments = [payment | {"paid_micros": 100} for payment in rivers.signed()["payments"]]
        thief = KnownRound(rivers.open(url="http://thief.example", payments=payments, made_ms=NOW_MS + 5))
        folder = tmp_path / "rivers"
        rivers.metadata, keys = SignedMetadata(folder / "keys", folder / "metadata", 600.0), RoleKeys(folder / "keys")
        rotation.install(rivers.metadata, keys, rotation.prepare(rivers.metadata, keys, LEDGER, 1, 1, NOW), NOW)
        rivers.add([credit(9)])
        honest = rivers.known()
        for rounds in ([honest, thief], [thief, honest]):
            assert merge(rounds) == ([honest], [])
        with pytest.raises(RolledBack, match="root 2 was seen before"):
            thief.listing.require_no_older_than(honest.listing)

    def test_titles_that_look_alike_are_found(self, rivers: ListedLog, lakes: ListedLog, tmp_path: Path) -> None:
        copy = ListedLog(tmp_path / "copy", "R\u0456vers")
        [pair] = look_alikes([rivers.open(), lakes.open(), copy.open()])
        assert {listing.round_id for listing in pair} == {rivers.round_id, copy.round_id}

    def test_of_the_sightings_one_a_day_is_kept(self, rivers: ListedLog) -> None:
        kept: tuple[Sighting, ...] = ()
        for hour in range(24 * 50):
            kept = thinned(kept, rivers.sighting(ms=NOW_MS + hour * 3_600_000))
        assert len(kept) == SIGHTINGS_MAX
        assert len({sighting.ms // DAY_MS for sighting in kept}) == SIGHTINGS_MAX


def test_a_listing_that_is_possible_needs_its_log(rivers: ListedLog) -> None:
    with pytest.raises(ProofInvalid):
        open_listing(rivers.listing(payments=[{"size": 9, "ms": NOW_MS, "paid_micros": 200}]))
    assert open_listing(rivers.boast(10**6)).listing.totals.paid_micros == 10**6
