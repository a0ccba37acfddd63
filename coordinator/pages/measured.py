"""Evaluations on the pages: the quality of the model now beside its first evaluation, and samples of both.

- Of each problem, the samples are what the first version answered and the newest one. All versions between the two are
  in `/v1/evaluations/samples`.
- A round shows samples only if `eval.publish_samples` says so: prompts may be private.
- Nodes wrote the completions: they are escaped, and no character of them reorders or hides the text around it.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from coordinator.base.terminal import harmless
from coordinator.pages import charts, words
from coordinator.pages.charts import Caption
from coordinator.pages.layout import live
from coordinator.reports.curves import REWARD, Point, thinned
from protocol.text.html import Markup, el
from protocol.work.learning import EvaluationSample, EvaluationSamples


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


Answers = list[tuple[EvaluationSamples, EvaluationSample]]
"""The samples of one problem with their evaluations, the newest first."""


def samples_section(samples: Sequence[EvaluationSamples] | None) -> Markup | None:
    """Build the section from evaluations, the newest first; None if the round does not publish samples."""
    if samples is None:
        return None
    shown = [_problem(split, problem, answers) for (split, problem), answers in _by_problem(samples)]
    content = shown or el("p", "No samples yet: no evaluation has ended.", class_="soft")
    return live("samples", content, heading="Samples of evaluations")


def _by_problem(samples: Sequence[EvaluationSamples]) -> Iterator[tuple[tuple[str, int], Answers]]:
    """Yield the problems of the newest evaluation of each split, with all their answers."""
    answers: dict[tuple[str, int], Answers] = {}
    newest: dict[str, int] = {}
    for evaluation in samples:
        newest.setdefault(evaluation.split, evaluation.number)
        for sample in evaluation.samples:
            answers.setdefault((evaluation.split, sample.problem), []).append((evaluation, sample))
    for (split, problem), given in sorted(answers.items()):
        if given[0][0].number == newest[split]:
            yield (split, problem), given


def _problem(split: str, problem: int, answers: Answers) -> Markup:
    (_, now), (_, before) = answers[0], answers[-1]
    versions = [("Now", answers[0])]
    if len(answers) > 1:
        versions.append(("Before", answers[-1]))
    rewards = [words.figure(sample.reward) for sample in ((before, now) if len(answers) > 1 else (now,))]
    named = f"{split.replace('_', '-')} problem {problem}"
    return el(
        "details",
        el("summary", f"{named}: reward {' → '.join(rewards)}"),
        el("p", "Prompt"),
        _text(now.prompt, f"Prompt of {named}"),
        (
            (
                el("p", f"{when}: version {evaluation.version}, reward {words.figure(sample.reward)}"),
                _text(sample.completion, f"Completion of version {evaluation.version} for {named}"),
            )
            for when, (evaluation, sample) in versions
        ),
        id=f"sample-{split}-{problem}",
    )


def _text(text: str, label: str) -> Markup:
    """Build a block of untrusted text, which scrolls on its own."""
    return el("pre", el("bdi", harmless(text)), class_="wide", tabindex="0", role="region", aria_label=label)
