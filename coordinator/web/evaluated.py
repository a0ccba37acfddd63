"""What versions were worth on held-out problems: a curve for each split, and every evaluation with all its axes."""

from collections.abc import Mapping, Sequence
from itertools import groupby
from operator import itemgetter
from typing import Any

from coordinator.figures.curves import thinned
from coordinator.web import charts, words
from coordinator.web.html import el
from coordinator.web.layout import Column, Screen, table

ROWS_MAX = 100
"""The last so many are listed; the curve has all of them."""

COLUMNS = (
    Column("version"),
    Column("update", screen=Screen.TABLET),
    Column("samples", "trained on until then", screen=Screen.DESKTOP),
    Column("tokens", "trained on until then", screen=Screen.DESKTOP),
    Column("seconds", "since the round began", screen=Screen.DESKTOP),
    Column("cost", "credited for what was trained on until then", screen=Screen.TABLET),
    Column("split", is_text=True),
    Column("average", "mean score of the samples, over problems"),
    Column("95 %", "the interval holds the true average 95 times in 100", is_text=True),
    Column("pass@k", "the chance that one of k samples is right", is_text=True, screen=Screen.TABLET),
    Column("state", is_text=True),
)


def shown(rows: Sequence[Mapping[str, Any]]) -> Any:
    """Curves by split, then the table, the newest first."""
    made = [
        _curve(number, split, list(of_split))
        for number, (split, of_split) in enumerate(groupby(sorted(rows, key=itemgetter("split")), itemgetter("split")))
    ]
    listed = [_row(row) for row in reversed(rows[-ROWS_MAX:])]
    return el("div", made, class_="charts"), table("Evaluations", COLUMNS, listed, empty="Nothing was evaluated yet.")


def _curve(number: int, split: str, rows: Sequence[Mapping[str, Any]]) -> Any:
    done = sorted((row for row in rows if row["result"]), key=itemgetter("update"))
    low, high = ([(row["update"], row["result"]["interval"][place]) for row in done] for place in (0, 1))
    curves = {"average": [(row["update"], row["result"]["average"]) for row in done], "low": low, "high": high}
    drawn = {name: thinned(points) for name, points in curves.items()} if done else {}
    return charts.lines(
        f"eval-{number}",
        f"{split.replace('_', '-')} average, and its interval of 95 %",
        "update",
        drawn,
        from_zero=True,
        interval=("low", "high"),
    )


def _row(row: Mapping[str, Any]) -> list[Any]:
    result = row["result"]
    figures = [words.DASH] * 3
    if result:
        low, high = result["interval"]
        passed = (f"@{j} {words.figure(share)}" for j, share in result["passed"].items())
        figures = [words.figure(result["average"]), f"{words.figure(low)} to {words.figure(high)}", ", ".join(passed)]
    state = row["state"] if row["state"] == "done" else f"{row['state']}, {row['answered']} of {row['problems']}"
    return [
        words.whole(row["version"]),
        words.whole(row["update"]),
        words.whole(int(row["samples"])),
        words.whole(int(row["tokens"])),
        words.figure(row["seconds"]),
        words.figure(row["cost"]),
        row["split"].replace("_", "-"),
        *figures,
        state,
    ]
