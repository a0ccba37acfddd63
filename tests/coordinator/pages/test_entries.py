"""The page of the log's entries: it shows every kind that there is."""

import pytest

from coordinator.pages import entries
from coordinator.pages.site import Site
from ledger.entry import Entry, UpdateEntry
from ledger.store import Recorded
from protocol.policy.description import RoundDescription
from protocol.text.money import CREDITS
from tests.ledger.test_entry import ONE_OF_EACH

DESCRIPTION = RoundDescription.model_construct(
    round_id="a" * 64, title="", description="", purpose="", licence="", operator="", contact=""
)
SITE = Site("", DESCRIPTION, "")


def page(entry: Entry) -> str:
    return entries.render(7, [Recorded(7, entry, entry.content_hash, 0)], 8, SITE, CREDITS)


@pytest.mark.parametrize("entry", ONE_OF_EACH, ids=lambda entry: entry.kind)
def test_every_kind_has_its_line(entry: Entry) -> None:
    assert f">{entry.kind}<" in page(entry)


def test_an_update_that_was_made_again_or_from_a_version_says_so() -> None:
    (update,) = (each for each in ONE_OF_EACH if isinstance(each, UpdateEntry))
    shown = page(update.model_copy(update={"attempt": 2, "replaced_by": 3}))
    assert "attempt 2" in shown
    assert "from version 3" in shown
