"""The page of the log's entries: it shows every kind that there is."""

import re

import pytest

from coordinator.pages import entries
from coordinator.pages.site import Site
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


def test_an_update_that_was_made_again_or_from_a_version_says_so() -> None:
    (update,) = (each for each in ONE_OF_EACH if isinstance(each, UpdateEntry))
    shown = page(update.model_copy(update={"attempt": 2, "replaced_by": 3}))
    assert "attempt 2" in shown
    assert "from version 3" in shown
