"""Cells of the bench: number of workers, source, links, payload size; and the lower bound of each.

- Rates are those of the links, headers included: TCP over Ethernet leaves 95.6 % of them for the payload, and that
  share is not taken off the bound.
- A cell is written `WORKERS:SOURCE:LINKS`, as in `8:3:mixed`: 8 workers, a source of 3 times a worker's link. A number
  behind it, as in `16:3:mixed:32`, is its payload in MiB.
- `nat` behind it puts half of the workers behind routers that let nobody in; `nat75` puts 75 % of them there. They can
  feed each other all the same, so that the bound stays as it is.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Self

MBIT = 1_000_000
MIB = 2**20

PAYLOAD_SHARE = 0.956
"""The share of a link that is payload, with TCP over Ethernet."""

NAT_PERCENT = 50
"""The share of workers behind NAT in a cell that does not say how many."""

MIXED_UPLINKS = (0.5, 1.0, 2.0)
"""Factors on a worker's nominal rate, in turns; every downlink of a mixed cell is twice the nominal rate."""


@dataclass(frozen=True)
class Link:
    """The upload and download rates of a party, in bits per second."""

    up_bit_s: float
    down_bit_s: float


@dataclass(frozen=True)
class Cell:
    """A setting in which all contenders are compared."""

    workers: int
    source_factor: float
    links: str
    worker_mbit_s: float
    size_bytes: int
    nat_percent: int = 0
    """Workers that nobody can dial."""

    @property
    def name(self) -> str:
        behind = {0: "", NAT_PERCENT: ":nat"}.get(self.nat_percent, f":nat{self.nat_percent}")
        return f"{self.workers}:{self.source_factor:g}:{self.links}{behind}"

    def is_behind_nat(self, number: int) -> bool:
        """Return True if the worker of this number, from 1, cannot be dialled; they are spread over all."""
        return number * self.nat_percent // 100 > (number - 1) * self.nat_percent // 100

    @property
    def source_link(self) -> Link:
        rate = self.source_factor * self.worker_mbit_s * MBIT
        return Link(rate, rate)

    @property
    def worker_links(self) -> list[Link]:
        rate = self.worker_mbit_s * MBIT
        if self.links == "uniform":
            return [Link(rate, rate)] * self.workers
        uplinks = (MIXED_UPLINKS[number % len(MIXED_UPLINKS)] for number in range(self.workers))
        return [Link(factor * rate, 2 * rate) for factor in uplinks]

    @property
    def together_mbit_s(self) -> float:
        """Return the rate at which all workers together receive at the bound, in Mbit/s."""
        return self.workers * 8 * self.size_bytes / self.bound_s / MBIT

    def within(self, together_mbit_s: float) -> Self:
        """Return the cell with slower links, so that all workers together receive no more than this."""
        slower = min(1.0, together_mbit_s / self.together_mbit_s)
        return replace(self, worker_mbit_s=slower * self.worker_mbit_s)

    @property
    def bound_s(self) -> float:
        """Return the seconds in which the best scheme brings the payload to all workers."""
        return fluid_bound_s(8 * self.size_bytes, self.source_link, self.worker_links)


def fluid_bound_s(size_bit: float, source: Link, workers: Sequence[Link]) -> float:
    """The source sends everything once, the slowest receives all of it, and all uplinks together carry it N times."""
    uplinks = source.up_bit_s + sum(worker.up_bit_s for worker in workers)
    return max(
        size_bit / source.up_bit_s,
        size_bit / min(worker.down_bit_s for worker in workers),
        len(workers) * size_bit / uplinks,
    )


def parse(text: str, *, worker_mbit_s: float, size_bytes: int) -> Cell:
    """A cell from `WORKERS:SOURCE:LINKS[:nat[PERCENT]][:MIB]`, of that payload unless it names its own."""
    try:
        workers, factor, links, *more = text.split(":")
        behind = more.pop(0) if more and more[0].startswith("nat") else "nat0"
        size_bytes = round(float(*more) * MIB) if more else size_bytes
        percent = int(behind.removeprefix("nat") or NAT_PERCENT)
        cell = Cell(int(workers), float(factor), links, worker_mbit_s, size_bytes, percent)
    except (ValueError, TypeError, OverflowError):
        raise ValueError(f"{text!r} is no cell; write WORKERS:SOURCE:LINKS, as in 8:3:mixed, or 8:3:mixed:32") from None
    is_fit = 1 <= cell.workers <= 200 and cell.source_factor > 0 < size_bytes and 0 <= percent <= 100
    if not is_fit or links not in ("uniform", "mixed"):
        raise ValueError(f"{text!r}: 1 to 200 workers, a positive source and payload, and links uniform or mixed")
    return cell
