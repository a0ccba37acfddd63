"""The audit of cases: form first, then one replay of all of them under each version that any of them names.

- The caller brings the model: `Score` says what a version makes of some prefills. So this needs no torch, and an
  auditor may keep versions loaded, or farm them out.
- A case that its lease does not allow never reaches the model.
- What others sampled before is given, as the prompt is: it is fed to the model, and the claim is not judged by it.
  Samples to which the claim adds nothing are not even fed.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

from coordinator.audit.case import Case
from coordinator.rules.calibration import Calibration
from coordinator.rules.replay import Prefill, ReplayMeasurement, Scored, measure
from coordinator.rules.verdict import AuditOutcome, AuditReport, judge, malformed
from protocol.errors import SwarmError, TokensInvalid
from protocol.work.rollout import Completion, unpack_tokens, whole_tokens

Score = Callable[[int, Sequence[Prefill]], list[list[Scored]]]
"""(version, claims) → for every claim, its completions under that version."""

Compare = Callable[[Sequence[int], Sequence[int]], list[AuditReport]]
"""(places of claims, other versions) → a report on each of these claims, compared with those versions."""

Replay = dict[int, ReplayMeasurement]
"""What the claimed version and each neighbour make of one claim."""


def audit(cases: Sequence[Case], score: Score, calibration: Calibration, tolerance: str) -> list[AuditReport]:
    """A report on each case, in their order, by the class of its lease, or else by this one."""
    return [
        report_on(case, found, calibration, tolerance) for case, found in zip(cases, replay(cases, score), strict=True)
    ]


def report_on(case: Case, found: "Replay | SwarmError", calibration: Calibration, tolerance: str) -> AuditReport:
    """The report on what a replay of a case measured; provisional where its class has no numbers of this policy."""
    allowed, is_measured = calibration.judging(case.lease.judged_as or tolerance, case.round_id)
    if isinstance(found, SwarmError):
        return malformed(found, allowed, calibration.version)
    neighbours = {version: measured for version, measured in found.items() if version != case.lease.version}
    report = judge(found[case.lease.version], allowed, calibration.version, neighbours)
    return replace(report, provisional=not is_measured)


def look_closer(claims: int, others: Sequence[int], compare: Compare) -> list[AuditReport]:
    """A report on so many claims: compared with the first of the other versions, and what fails softly with all.

    Each version costs a prefill, and hardly any honest claim comes to those farther back.
    """
    reports = compare(range(claims), others[:1])
    unsure = [place for place, report in enumerate(reports) if report.outcome is AuditOutcome.SOFT]
    if unsure and others[1:]:
        for place, report in zip(unsure, compare(unsure, others), strict=True):
            reports[place] = report
    return reports


def replay(cases: Sequence[Case], score: Score) -> list[Replay | SwarmError]:
    """Each case under every version it names, or what is wrong with its form."""
    found: list[Replay | SwarmError] = []
    sound: dict[int, tuple[Completion, ...]] = {}
    for number, case in enumerate(cases):
        try:
            sound[number] = _own(case)
            found.append({})
        except SwarmError as error:
            found.append(error)
    for version in sorted({version for number in sound for version in _versions(cases[number])}):
        named = {number: said for number, said in sound.items() if version in _versions(cases[number])}
        scored = score(version, [_prefill(cases[number], said) for number, said in named.items()])
        for (number, said), replayed in zip(named.items(), scored, strict=True):
            measured = found[number]
            assert not isinstance(measured, SwarmError)
            own = [rows.since(completion.start) for rows, completion in zip(replayed, said, strict=True)]
            lease = cases[number].lease
            measured[version] = measure(said, own, lease.seed, whole=whole_tokens(lease, said))
    return found


def _versions(case: Case) -> tuple[int, ...]:
    return (case.lease.version, *case.neighbours)


def _own(case: Case) -> tuple[Completion, ...]:
    completions = case.completions()
    if not any(len(said.tokens) for said in completions):
        raise TokensInvalid("The claim adds no token to what was done before.")
    return completions


def _prefill(case: Case, completions: Sequence[Completion]) -> Prefill:
    whole = whole_tokens(case.lease, completions)
    fed = [tokens if len(said.tokens) else said.tokens for tokens, said in zip(whole, completions, strict=True)]
    return Prefill(unpack_tokens(case.lease.prompt), fed, case.lease.seed, case.sampler.temperature)
