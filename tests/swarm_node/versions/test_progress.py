"""Progress of a download: what the log says, how often, and what is known before the first byte."""

import logging
from collections import Counter
from typing import Any

import pytest
import trio
import trio.testing
from rich.console import Console

from swarm_node.base.logs import DRAWN
from swarm_node.owner import live_view
from swarm_node.p2p.download import DownloadProgress, FetchReport
from swarm_node.versions.progress import LOG_EVERY_S, Download, progress_text

MB = 1_000_000


def arrived(**bytes_from: int) -> FetchReport:
    return FetchReport(bytes_from=Counter(bytes_from))


def at(done: int, size: int = 1000 * MB) -> DownloadProgress:
    return DownloadProgress(chunks_done=1, chunks=2, bytes_done=done, bytes=size)


@pytest.mark.trio
async def test_the_log_has_a_line_every_ten_seconds_and_none_of_a_short_download(
    autojump_clock: trio.testing.MockClock,
) -> None:
    download = Download(1, 1000 * MB, arrived())
    said = []
    for second in range(25):
        said.append(download.advance(at(second * MB), peers=2))
        await trio.sleep(1)
    assert [second for second, line in enumerate(said) if line] == [LOG_EVERY_S, 2 * LOG_EVERY_S]


@pytest.mark.trio
async def test_what_was_stored_before_counts_as_done_and_not_as_speed(autojump_clock: trio.testing.MockClock) -> None:
    download = Download(3, 1000 * MB, arrived(peer=75 * MB, seeder=25 * MB))
    download.advance(at(600 * MB), peers=3)
    await trio.sleep(4)
    assert progress_text(download.to_json()) == (
        "fetching version 3: 60% of 1 GB, 25.0 MB/s from 3 peers, about 16 s left, 75% of it from other nodes"
    )


@pytest.mark.trio
async def test_before_the_first_byte_nothing_is_estimated(autojump_clock: trio.testing.MockClock) -> None:
    text = progress_text(Download(1, 0, arrived()).to_json())
    assert text == "fetching version 1: 0% of 0 B, 0.0 MB/s from 0 peers"


@pytest.mark.trio
async def test_a_download_that_hardly_moves_has_no_absurd_estimate(autojump_clock: trio.testing.MockClock) -> None:
    download = Download(1, 10**15, arrived(origin=1))
    await trio.sleep(3600)
    assert "more than a week left" in progress_text(download.to_json())


def test_the_live_view_draws_progress_and_prints_no_line_of_it() -> None:
    root = logging.getLogger()
    before: list[Any] = root.handlers[:]
    console = Console(record=True, width=200)
    try:
        live_view.make(console)
        logging.getLogger("x").warning("forty percent", extra={DRAWN: True})
        logging.getLogger("x").warning("a problem")
    finally:
        root.handlers[:] = before
    printed = console.export_text()
    assert "a problem" in printed
    assert "forty percent" not in printed
