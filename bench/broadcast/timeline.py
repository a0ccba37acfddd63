"""Use of the links and the cores during a broadcast, sampled from the counters of the bridge's ports."""

import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from types import TracebackType

from bench.broadcast.cells import Link
from bench.broadcast.net import Net

PERIOD_S = 0.25


@dataclass(frozen=True)
class Sample:
    """The bytes moved up to a moment, and the idle time of the cores."""

    at_s: float
    moved: dict[str, tuple[int, int]]
    """Party → bytes sent, bytes received."""
    idle_s: float
    total_s: float


class Timeline:
    """Samples for the duration of a context."""

    def __init__(self, net: Net) -> None:
        self._net = net
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="timeline")
        self.samples: list[Sample] = []

    def __enter__(self) -> "Timeline":
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._ended.set()
        self._thread.join()

    def use(self, began_at_s: float, ended_at_s: float, links: dict[str, Link]) -> "Use":
        """Return the used share of every link between two moments."""
        during = [sample for sample in self.samples if began_at_s - PERIOD_S <= sample.at_s <= ended_at_s + PERIOD_S]
        first, last = during[0], during[-1]
        seconds = ended_at_s - began_at_s
        shares = {}
        for party, link in links.items():
            sent, received = (last.moved[party][side] - first.moved[party][side] for side in (0, 1))
            shares[party] = (8 * sent / seconds / link.up_bit_s, 8 * received / seconds / link.down_bit_s)
        cores = last.total_s - first.total_s
        return Use(shares, 1 - (last.idle_s - first.idle_s) / cores if cores else 0.0)

    def _run(self) -> None:
        while not self._ended.wait(PERIOD_S):
            self.samples.append(Sample(time.time(), self._net.moved(), *_cores()))


@dataclass(frozen=True)
class Use:
    """Shares of what was possible."""

    links: dict[str, tuple[float, float]]
    """Party → share of the uplink, share of the downlink."""
    cores: float


def shares(
    samples: Sequence[Sample], began_at_s: float, links: Mapping[str, Link], source: str
) -> list[tuple[float, float, float, float]]:
    """Return, between each two samples, the seconds since the beginning, and the used shares of the source's uplink, of
    the workers' uplinks and of their downlinks."""
    rows = []
    for before, after in pairwise(samples):
        seconds = after.at_s - before.at_s
        rates = {
            party: [8 * (after.moved[party][side] - before.moved[party][side]) / seconds for side in (0, 1)]
            for party in links
        }
        workers = [party for party in links if party != source]
        up = fmean(rates[party][0] / links[party].up_bit_s for party in workers)
        down = fmean(rates[party][1] / links[party].down_bit_s for party in workers)
        rows.append((after.at_s - began_at_s, rates[source][0] / links[source].up_bit_s, up, down))
    return rows


def _cores() -> tuple[float, float]:
    """Seconds that the cores were idle, and all their seconds, since the machine started."""
    ticks = [int(field) for field in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
    return (ticks[3] + ticks[4]) / 100, sum(ticks) / 100
