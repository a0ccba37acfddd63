"""A race in one cell: every contender brings the same payloads to the same hosts over the same links, in turns."""

import os
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from bench.broadcast.cells import Cell, Link
from bench.broadcast.contender import SOURCE, Contender, Outcome, make_payload
from bench.broadcast.http_star import HttpStar
from bench.broadcast.nat import Nat
from bench.broadcast.net import PREFIX, Net, left_behind
from bench.broadcast.ours import Ours
from bench.broadcast.timeline import Sample, Timeline, Use
from bench.broadcast.torrent import Torrent

CONTENDERS: dict[str, Callable[[Net, Path], Contender]] = {
    "ours": Ours,
    "ours, star": lambda net, folder: Ours(net, folder, share=False),
    "HTTP star": HttpStar,
    "libtorrent": Torrent,
}

MEMORY = Path("/dev/shm")
"""The folder in memory. Where it exists, all contenders write into it: the links are to be the limit, not the disk."""


@dataclass(frozen=True)
class Lap:
    """A broadcast of a contender."""

    contender: str
    outcome: Outcome
    use: Use
    samples: list[Sample]


def race(cell: Cell, names: Sequence[str], rounds: int, done: Mapping[str, int] | None = None) -> Iterator[Lap]:
    """All laps of a cell, the contenders taking turns; `done` says how many of its laps a contender has run before."""
    laps_done = Counter(done)
    names = [name for name in names if laps_done[name] < rounds]
    if not names:
        return
    with Net(links_of(cell), nat_of(cell)) as net, scratch() as folder, ExitStack() as running:
        contenders = []
        for number, name in enumerate(names):
            contender = CONTENDERS[name](net, folder / str(number))
            running.callback(contender.close)
            contender.start()
            contenders.append(contender)
        for turn in range(min(laps_done[name] for name in names), rounds):
            payload = make_payload(folder / f"payload-{turn}", cell.size_bytes)
            for name, contender in zip(names, contenders, strict=True):
                if turn >= laps_done[name]:
                    yield lap(net, cell, contender, payload)
            shutil.rmtree(payload.parent)


def lap(net: Net, cell: Cell, contender: Contender, payload: Path) -> Lap:
    """Run and measure a broadcast."""
    with Timeline(net) as timeline:
        outcome = contender.broadcast(payload, within_s=patience_s(cell))
    use = timeline.use(outcome.began_at_s, outcome.began_at_s + outcome.completion_s, links_of(cell))
    return Lap(contender.name, outcome, use, timeline.samples)


def links_of(cell: Cell) -> dict[str, Link]:
    """The parties of a cell and their links."""
    return {SOURCE: cell.source_link, **{f"w{number}": link for number, link in enumerate(cell.worker_links, 1)}}


def nat_of(cell: Cell) -> dict[str, Nat]:
    """The workers of a cell that are behind NAT, each behind a router of its own."""
    return {f"w{number}": "restricted" for number in range(1, cell.workers + 1) if cell.is_behind_nat(number)}


def patience_s(cell: Cell) -> float:
    """Longer than the worst contender needs: a star of one uplink, with room for a busy machine."""
    star_s = 8 * cell.size_bytes * cell.workers / cell.source_link.up_bit_s
    return 60 + 4 * max(star_s, cell.bound_s)


@contextmanager
def scratch() -> Iterator[Path]:
    """A folder for everything that the contenders write."""
    place = MEMORY if MEMORY.is_dir() else Path(tempfile.gettempdir())
    for path in left_behind(place):
        shutil.rmtree(path, ignore_errors=True)
    prefix = f"{PREFIX}-{os.getpid()}-"
    with tempfile.TemporaryDirectory(prefix=prefix, dir=place, ignore_cleanup_errors=True) as folder:
        yield Path(folder)
