"""Reports of a run: a line per lap, the samples of every lap, and plots."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean, median

from bench.broadcast.cells import Cell
from bench.broadcast.contender import SOURCE
from bench.broadcast.race import Lap, links_of
from bench.broadcast.timeline import shares
from coordinator.sim.report import bars, lines

Laps = Mapping[Cell, Sequence[Lap]]


def case(cell: Cell, name: str) -> str:
    """Return the name of a measurement in a cell, as in the record."""
    return f"{cell.name} {name}"


def summary(cell: Cell, lap: Lap) -> str:
    """Return a lap as one line: its duration, the use of the links, and the load of the cores."""
    links = lap.use.links
    up, down = (fmean(links[party][side] for party in links if party != SOURCE) for side in (0, 1))
    seconds = lap.outcome.completion_s
    return (
        f"{case(cell, lap.contender)}: {seconds:.2f} s, {seconds / cell.bound_s:.2f} × bound; "
        f"used: source up {links[SOURCE][0]:.0%}, workers up {up:.0%}, down {down:.0%}, cores {lap.use.cores:.0%}; "
        f"received {received(cell, lap):.2f} × the payload; {dict(lap.outcome.bytes_from)}"
    )


def received(cell: Cell, lap: Lap) -> float:
    """Return the bytes that a worker received on its link, in payloads: up to 1.05 is overhead, more came twice."""
    links = links_of(cell)
    rates = (lap.use.links[party][1] * link.down_bit_s for party, link in links.items() if party != SOURCE)
    return fmean(rates) * lap.outcome.completion_s / (8 * cell.size_bytes)


def write_timelines(laps: Laps, path: Path) -> None:
    """Write per lap the seconds of each worker and the shares of the links over time."""
    record = [
        {
            "cell": cell.name,
            "contender": lap.contender,
            "seconds": dict(lap.outcome.seconds),
            "at_s, source up, workers up, workers down": [
                [round(figure, 3) for figure in moment]
                for moment in shares(lap.samples, lap.outcome.began_at_s, links_of(cell), SOURCE)
            ],
        }
        for cell, of_cell in laps.items()
        for lap in of_cell
    ]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record) + "\n")


def write_plots(laps: Laps, folder: Path) -> None:
    """Completion by cell, and the downlinks of each cell over time."""
    folder.mkdir(parents=True, exist_ok=True)
    ratios = {cell.name: _ratios(cell, of_cell) for cell, of_cell in laps.items()}
    title = "Time until every worker has the version ÷ fluid bound (line: 1)"
    (folder / "broadcast.svg").write_text(bars(title, ratios, bound=1.0, top=3.0))
    for cell, of_cell in laps.items():
        curves = {}
        for lap in of_cell:  # the last lap of each contender
            moments = shares(lap.samples, lap.outcome.began_at_s, links_of(cell), SOURCE)
            curves[lap.contender] = [(at_s, down) for at_s, _, _, down in moments if at_s >= 0]
        title = f"{cell.name}: share of the workers' downlinks in use, over seconds since the announcement"
        image = lines(title, curves, right=2 * cell.bound_s, top=1.1)
        (folder / f"broadcast-{cell.name.replace(':', '-')}.svg").write_text(image)


def _ratios(cell: Cell, laps: Sequence[Lap]) -> dict[str, float]:
    """Contender → median completion as a multiple of the bound."""
    names = dict.fromkeys(lap.contender for lap in laps)
    return {
        name: median(lap.outcome.completion_s for lap in laps if lap.contender == name) / cell.bound_s for name in names
    }
