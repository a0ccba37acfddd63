"""Quality of the model now: the newest evaluation, with the first one to compare it with."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from coordinator.pages import charts, words
from coordinator.pages.charts import Caption
from coordinator.reports.curves import REWARD, Point, thinned
from protocol.text.html import Markup


@dataclass(frozen=True)
class Quality:
    """The newest score on problems that the model never trains on, and the score before training."""

    newest: float | None = None
    first: float | None = None
    update: int = 0

    @property
    def text(self) -> str:
        """Return the newest score, and the first one before it; "" if nothing was measured."""
        if self.newest is None:
            return ""
        return score(self.newest) if self.first is None else f"{score(self.first)} → {score(self.newest)}"


def score(value: float) -> str:
    """Return a score: scores from 0 to 1 as percent, others as they are."""
    return words.percent(value) if 0.0 <= value <= 1.0 else words.figure(value)


def done(evaluations: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return the evaluations with a result on the split that was evaluated first, by update."""
    measured = [row for row in evaluations if row["result"]]
    split = measured[0]["split"] if measured else ""
    return sorted((row for row in measured if row["split"] == split), key=lambda row: row["update"])


def quality(status: Mapping[str, Any], evaluations: Sequence[Mapping[str, Any]]) -> Quality:
    """Return the newest score; one from before training is the first score only, and no result of it."""
    if rows := done(evaluations):
        first = float(rows[0]["result"]["average"]) if len(rows) > 1 else None
        return Quality(float(rows[-1]["result"]["average"]), first, int(rows[-1]["update"]))
    if status["accuracy_after"] is not None:
        return Quality(float(status["accuracy_after"]), status["accuracy_before"], int(status["update"]))
    return Quality()


def main_curve(
    evaluations: Sequence[Mapping[str, Any]], metrics: Mapping[str, Sequence[Point]], published: Mapping[float, str]
) -> Markup:
    """Draw the curve that shows best whether the round learns: its evaluations, or else the reward."""
    rows = done(evaluations)
    if len(rows) > 1:
        curves = {"score": [(float(row["update"]), float(row["result"]["average"])) for row in rows]}
        for place, name in enumerate(("low", "high")):
            curves[name] = [(float(row["update"]), float(row["result"]["interval"][place])) for row in rows]
        caption = Caption(
            "Score on problems it never trains on", about="The band is the 95 % confidence interval of each evaluation."
        )
        return charts.lines(
            "main", caption, "update", {name: thinned(points) for name, points in curves.items()},
            tell=_score_text, from_zero=True, interval=("low", "high"), marks=published,
        )  # fmt: skip
    caption = Caption("Reward", about="Average reward of the answers in each update. It rises as the model learns.")
    points = metrics.get(REWARD, ())
    return charts.lines(
        "main", caption, "update", {"reward": points} if points else {}, from_zero=True, marks=published
    )


def _score_text(value: float | None) -> str:
    return words.DASH if value is None else score(value)
