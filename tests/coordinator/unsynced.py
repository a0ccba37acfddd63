"""Stores that the tests' own process opens are not synced: no test cuts the power, and kills lose nothing written."""

from collections.abc import Iterator

import pytest

from coordinator.store import state

DURABLE = state.DURABLE
"""The pragmas of a round's store, which programs that tests start keep."""


@pytest.fixture(autouse=True, scope="session")
def unsynced_stores() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        # Most transactions here take less time than the sync of a disk: a quarter of the processor time, and half of
        # the time on the clock, of tests that fill a store.
        patch.setattr(state, "DURABLE", ("journal_mode=WAL", "synchronous=OFF"))
        yield
