"""The page of the log's entries: it shows every kind that there is."""

import dataclasses
import html
import re

import pytest

from coordinator.pages import entries
from coordinator.pages.layout import Site
from ledger.entry import Entry, Paid, Payout, Pending, UpdateEntry
from ledger.store import Recorded
from protocol.policy.description import RoundDescription
from protocol.text.money import CREDITS
from tests.ledger.test_entry import ONE_OF_EACH

DESCRIPTION = RoundDescription.model_construct(
    round_id="a" * 64, title="", description="", purpose="", licence="", operator="", contact=""
)
SITE = Site("", DESCRIPTION, "")


def page(entry: Entry) -> str:
    recorded = Recorded(7, entry, entry.content_hash, 0)
    names = dict.fromkeys(entries.node_ids([recorded]), "rig1@heron")
    return entries.render(entries.EntriesPage(7, [recorded], 8, names), SITE, CREDITS)


@pytest.mark.parametrize("entry", ONE_OF_EACH, ids=lambda entry: entry.kind)
def test_every_kind_has_its_line(entry: Entry) -> None:
    assert f">{entry.kind}<" in page(entry)


@pytest.mark.parametrize("kind", [Pending, Payout, Paid])
def test_a_node_has_the_name_that_other_pages_show(kind: type[Entry]) -> None:
    (entry,) = (each for each in ONE_OF_EACH if isinstance(each, kind))
    assert "<bdi>rig1@heron</bdi>" in page(entry)


def test_the_newest_entries_begin_with_the_newest() -> None:
    recorded = [Recorded(number, entry, entry.content_hash, 0) for number, entry in enumerate(ONE_OF_EACH)]
    said = entries.EntriesPage(0, recorded, len(recorded), {}, newest_first=True)
    shown = re.findall(r'<a href="/entries/(\d+)">\d', entries.render(said, SITE, CREDITS))
    assert shown == [str(number) for number in reversed(range(len(recorded)))]


def test_a_reader_who_runs_no_node_gets_the_whole_command_that_verifies() -> None:
    site = dataclasses.replace(SITE, join_string="http://127.0.0.1:8700#" + "a" * 64)
    said = entries.render(entries.EntriesPage(0, [], 0, {}), site, CREDITS)
    assert f'<code>swarm-node ledger verify "{site.join_string}"</code>' in html.unescape(said)


RECORDED = [Recorded(number, ONE_OF_EACH[0], ONE_OF_EACH[0].content_hash, 0) for number in range(3 * entries.SHOWN)]


@pytest.mark.parametrize("size", [0, 1, 50, 51, 99, 100, 101, 150])
def test_the_page_before_the_newest_repeats_none_of_its_rows_and_names_its_order(size: int) -> None:
    """50, 100 and 150 entries fill pages; the others leave one that is not full, or one short of it."""
    start = entries.newest_start(size)
    shown = RECORDED[start:size]
    assert min(size, entries.SHOWN) <= len(shown) <= 2 * entries.SHOWN
    said = entries.render(entries.EntriesPage(start, shown, size, {}, newest_first=True), SITE, CREDITS)
    assert (f"Entries {size - 1} to {start}, newest first" in said) == (size > 1)
    before = re.findall(r'href="/entries/(\d+)" rel="prev">← entries before these, oldest first<', said)
    assert bool(before) == (start > 0)
    for first in map(int, before):
        rows = RECORDED[first : first + entries.SHOWN]
        assert rows[-1].index == start - 1
        earlier = entries.render(entries.EntriesPage(first, rows, size, {}), SITE, CREDITS)
        assert f"Entries {first} to {start - 1}, oldest first" in earlier


def test_an_update_that_was_made_again_or_from_a_version_says_so() -> None:
    (update,) = (each for each in ONE_OF_EACH if isinstance(each, UpdateEntry))
    shown = page(update.model_copy(update={"attempt": 2, "replaced_by": 3}))
    assert "attempt 2" in shown
    assert "from version 3" in shown
