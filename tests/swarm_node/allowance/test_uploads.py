"""The month's volume: kept over restarts and kills, never exceeded, and begun anew with the month."""

from datetime import UTC, datetime
from pathlib import Path

import pytest
import trio

from protocol import limits
from swarm_node.allowance.governor import FILE, PORTION_BYTES, UploadCounter

pytestmark = pytest.mark.trio


class Clock:
    """A calendar that a test turns."""

    def __init__(self) -> None:
        self.now = datetime(2026, 11, 30, 23, 59, tzinfo=UTC)

    def __call__(self) -> datetime:
        return self.now


async def test_what_was_counted_outlives_a_restart_to_the_byte(tmp_path: Path) -> None:
    uploads = UploadCounter(tmp_path, Clock())
    assert await uploads.count(1000)
    uploads.close()
    assert UploadCounter(tmp_path, Clock()).this_month() == 1000


async def test_a_kill_counts_too_much_and_never_too_little(tmp_path: Path) -> None:
    uploads = UploadCounter(tmp_path, Clock())
    for _ in range(20):
        assert await uploads.count(limits.MIB)
        found = UploadCounter(tmp_path, Clock()).this_month()  # as after a kill
        assert uploads.bytes <= found <= uploads.bytes + PORTION_BYTES


async def test_the_cap_holds_and_a_node_at_it_shares_no_more(tmp_path: Path) -> None:
    uploads = UploadCounter(tmp_path, Clock())
    uploads.cap_bytes = 10 * limits.MIB
    taken = [await uploads.count(4 * limits.MIB) for _ in range(4)]
    assert taken == [True, True, False, False]
    assert uploads.used_up
    assert uploads.this_month() <= uploads.cap_bytes


async def test_many_at_once_do_not_pass_the_cap(tmp_path: Path) -> None:
    uploads, taken = UploadCounter(tmp_path, Clock()), list[bool]()
    uploads.cap_bytes = 40 * limits.MIB

    async def send() -> None:
        taken.append(await uploads.count(4 * limits.MIB))

    async with trio.open_nursery() as nursery:
        for _ in range(20):
            nursery.start_soon(send)
    assert taken.count(True) == 10
    assert UploadCounter(tmp_path, Clock()).this_month() >= 40 * limits.MIB


async def test_a_new_month_begins_at_zero(tmp_path: Path) -> None:
    clock = Clock()
    uploads = UploadCounter(tmp_path, clock)
    uploads.cap_bytes = 8 * limits.MIB
    assert await uploads.count(8 * limits.MIB)
    assert uploads.used_up
    clock.now = datetime(2026, 12, 1, tzinfo=UTC)
    assert not uploads.used_up
    assert await uploads.count(1)
    uploads.close()
    assert UploadCounter(tmp_path, clock).this_month() == 1


@pytest.mark.parametrize("junk", [b"", b"{", b"[]", b'{"month": "2026-11"}', b'{"month": "2026-11", "bytes": "many"}'])
async def test_a_counter_that_cannot_be_read_is_taken_for_used_up(tmp_path: Path, junk: bytes) -> None:
    (tmp_path / FILE).write_bytes(junk)
    uploads = UploadCounter(tmp_path, Clock())
    uploads.cap_bytes = 10**12
    assert uploads.used_up
    assert not await uploads.count(1)
