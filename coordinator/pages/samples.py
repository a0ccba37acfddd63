"""Samples of evaluations on the training page: of each problem, what the first version answered and the newest one.

- A round shows them only if `eval.publish_samples` says so: prompts may be private.
- Nodes wrote the completions: they are escaped, and no character of them reorders or hides the text around it.
- All versions between the two are in `/v1/evaluations/samples`.
"""

from collections.abc import Iterator, Sequence

from coordinator.base.terminal import harmless
from coordinator.pages import words
from coordinator.pages.layout import live
from protocol.text.html import Markup, el
from protocol.work.learning import EvaluationSample, EvaluationSamples

Answers = list[tuple[EvaluationSamples, EvaluationSample]]
"""The samples of one problem with their evaluations, the newest first."""


def section(samples: Sequence[EvaluationSamples] | None) -> Markup | None:
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
