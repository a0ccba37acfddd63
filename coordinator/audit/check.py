"""The audit of cases: form first, then one replay of all of them under each version that any of them names.

- The caller provides the model as `Score`, which scores prefills with a version. So this module needs no torch, and an
  auditor may keep versions loaded, or run them elsewhere.
- A case that violates its lease is not sent to the model.
- Tokens that other nodes sampled before are input like the prompt: the model reads them, and the claim is not judged by
  them. Samples to which the claim adds no token are left out.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import NamedTuple

from coordinator.audit.case import Case
from coordinator.rules.calibration import Calibration
from coordinator.rules.replay import Prefill, ReplayMeasurement, Scored, measure
from coordinator.rules.verdict import AuditOutcome, AuditReport, judge, judge_exactly, malformed
from protocol.errors import SwarmError, TokensInvalid
from protocol.work.lease import float_class, is_exact
from protocol.work.rollout import Completion, unpack_tokens, whole_tokens

Score = Callable[[int, Sequence[Prefill]], list[list[Scored]]]
"""(version, claims) → for every claim, the scores of its completions with that version."""

Compare = Callable[[Sequence[int], Sequence[int]], list[AuditReport]]
"""(places of claims, other versions) → a report on each of these claims, compared with those versions."""

Replay = dict[int, ReplayMeasurement]
"""The measurements of one claim with the claimed version and each neighbour, by version."""


class ExactReplay(NamedTuple):
    """The exact class of this auditor, and its replay to the bit."""

    numerics: str
    score: Score


def audit(
    cases: Sequence[Case], score: Score, calibration: Calibration, tolerance: str, exact: ExactReplay | None = None
) -> list[AuditReport]:
    """Return a report on each case, in their order, by the class of its lease, or by `tolerance` if it has none."""
    return [
        report_on(case, replayed, calibration, tolerance, exact.numerics if exact else "")
        for case, replayed in zip(cases, replay_by_class(cases, score, exact), strict=True)
    ]


def replay_by_class(cases: Sequence[Case], score: Score, exact: ExactReplay | None) -> list["Replay | SwarmError"]:
    """Replay the cases of the auditor's exact class to the bit, and the others as ever; return them in their order."""
    replays = dict[int, Replay | SwarmError]()
    for to_the_bit, chosen_score in ((False, score), *(((True, exact.score),) if exact else ())):
        places = [
            place
            for place, case in enumerate(cases)
            if (exact is not None and case.lease.judged_as == exact.numerics) is to_the_bit
        ]
        if places:
            replays |= zip(places, replay([cases[place] for place in places], chosen_score), strict=True)
    return [replays[place] for place in range(len(cases))]


def report_on(
    case: Case, replayed: "Replay | SwarmError", calibration: Calibration, tolerance: str, exact: str = ""
) -> AuditReport:
    """Return the report on the replay of a case; it is provisional if its class is not measured on this policy.

    `exact` is the exact class of this auditor, if it replayed exactly. A claim of another exact class is judged by the
    tolerances of its float class: this machine has other bits.
    """
    judged_as = case.lease.judged_as
    allowed, is_measured = calibration.judging(float_class(judged_as) or tolerance, case.round_id)
    if isinstance(replayed, SwarmError):
        return malformed(replayed, allowed, calibration.version)
    neighbours = {version: measured for version, measured in replayed.items() if version != case.lease.version}
    judges = judge_exactly if exact and judged_as == exact else judge
    report = judges(replayed[case.lease.version], allowed, calibration.version, neighbours)
    note = ""
    if judges is judge and is_exact(judged_as):
        note = (
            f"Judged by the tolerances of {allowed.name}, not to the bit: the auditor computes in another class than "
            f"{judged_as}. This is no fault."
        )
    return replace(report, provisional=not is_measured and judges is judge, note=note)


def look_closer(claims: int, others: Sequence[int], compare: Compare, exact: Collection[int] = ()) -> list[AuditReport]:
    """Return a report on each claim: compared with the first other version, and after a soft failure with all.

    Each version costs a prefill, and very few honest claims need the earlier ones. The claims at the places `exact` are
    judged to the bit: equal bits need no other version, and another token is a hard fail without one.
    """
    reports = dict[int, AuditReport]()
    for places, seen in (
        ([place for place in range(claims) if place not in exact], others[:1]),
        ([place for place in range(claims) if place in exact], others[:0]),
    ):
        if not places:
            continue
        first = dict(zip(places, compare(places, seen), strict=True))
        unsure = [place for place, report in first.items() if report.outcome is AuditOutcome.SOFT]
        if unsure and len(others) > len(seen):
            first |= zip(unsure, compare(unsure, others), strict=True)
        reports |= first
    return [reports[place] for place in range(claims)]


def replay(cases: Sequence[Case], score: Score) -> list[Replay | SwarmError]:
    """Return each case's measurements with every version that it names, or the error in its form."""
    replays: list[Replay | SwarmError] = []
    sound: dict[int, tuple[Completion, ...]] = {}
    for number, case in enumerate(cases):
        try:
            sound[number] = _own_completions(case)
            replays.append({})
        except SwarmError as error:
            replays.append(error)
    for version in sorted({version for number in sound for version in _versions(cases[number])}):
        named = {number: said for number, said in sound.items() if version in _versions(cases[number])}
        scored = score(version, [_prefill(cases[number], said) for number, said in named.items()])
        for (number, said), replayed in zip(named.items(), scored, strict=True):
            measured = replays[number]
            assert not isinstance(measured, SwarmError)
            own = [rows.since(completion.start) for rows, completion in zip(replayed, said, strict=True)]
            lease = cases[number].lease
            measured[version] = measure(said, own, whole=whole_tokens(lease, said))
    return replays


def _versions(case: Case) -> tuple[int, ...]:
    return (case.lease.version, *case.neighbours)


def _own_completions(case: Case) -> tuple[Completion, ...]:
    completions = case.completions()
    if not any(len(said.tokens) for said in completions):
        raise TokensInvalid("The claim adds no token to the work done before.")
    return completions


def _prefill(case: Case, completions: Sequence[Completion]) -> Prefill:
    whole = whole_tokens(case.lease, completions)
    fed = [tokens if len(said.tokens) else said.tokens for tokens, said in zip(whole, completions, strict=True)]
    lease, prompt = case.lease, unpack_tokens(case.lease.prompt)
    return Prefill(prompt, fed, lease.seed, case.sampler.temperature, lease.temperature)
