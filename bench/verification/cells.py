"""Cells of the bench: rollouts of one kind, replayed and judged alone, as groups, and in tens of groups."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from bench.verification.model import Text
from bench.verification.sampler import Group, sample
from coordinator.audit.check import look_closer
from coordinator.audit.scorer import VersionScorer
from coordinator.rules.calibration import Tolerance
from coordinator.rules.replay import Prefill, ReplayMeasurement, joined, measure
from coordinator.rules.verdict import AuditOutcome, AuditReport, judge
from protocol.work.rollout import Completion

GROUPS_AT_ONCE = 16
POOL = 10

Said = list[tuple[Completion, ...]]
Mask = list[list[bool]]


@dataclass(frozen=True)
class Cell:
    """The results of one kind of rollouts."""

    name: str
    rollouts: int
    groups: int
    alone: Mapping[AuditOutcome, int]
    grouped: Mapping[AuditOutcome, int]
    pooled: Mapping[AuditOutcome, int]
    rules: Mapping[str, int] = field(default_factory=dict)
    """Rule → groups in which it alone would have been a hard fail."""

    @property
    def pools(self) -> int:
        return sum(self.pooled.values())

    def hard(self, of: Mapping[AuditOutcome, int]) -> float:
        return of.get(AuditOutcome.HARD, 0) / max(1, sum(of.values()))

    @property
    def groups_to_95(self) -> float:
        """Audited groups until a hard fail is 95 % likely; infinite where none was seen."""
        rate = self.hard(self.grouped)
        return 1.0 if rate >= 0.95 else math.ceil(math.log(0.05) / math.log1p(-rate)) if rate > 0 else math.inf


def load(folder: Path, dtype: torch.dtype = torch.float32) -> Any:
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    return model.eval()


def generate(model: Any, groups: Sequence[Group], text: Text, **how: float) -> Said:
    """Completions of all groups, as many at once as fit well."""
    parts = [groups[start : start + GROUPS_AT_ONCE] for start in range(0, len(groups), GROUPS_AT_ONCE)]
    return [said for part in parts for said in sample(model, part, text.bounds, **how)]


def replayed(scorer: VersionScorer, groups: Sequence[Group], said: Said) -> list[ReplayMeasurement]:
    """Replay completions under a version."""
    scored = scorer.score([prefill(group, completions) for group, completions in zip(groups, said, strict=True)])
    return [measure(completions, score) for completions, score in zip(said, scored, strict=True)]


def prefill(group: Group, completions: Sequence[Completion]) -> Prefill:
    return Prefill(np.array(group.prompt, np.uint32), [said.tokens for said in completions], group.seed, 1.0)


def judged(
    name: str,
    measured: Sequence[ReplayMeasurement],
    tolerance: Tolerance,
    neighbours: Mapping[int, Sequence[ReplayMeasurement]] | None = None,
    cheats: Mask | None = None,
) -> Cell:
    """The verdicts on a cell; `cheats` says which rollouts of a group are none of the seed's, by default all.

    The first neighbour is the nearest.
    """
    others = neighbours or {}
    alone: list[AuditOutcome] = []
    for place, group in enumerate(measured):
        for number in np.unique(group.sample):
            if cheats is None or cheats[place][int(number)]:
                replays_of_sample = {version: only(replays[place], int(number)) for version, replays in others.items()}
                alone.append(verdict(only(group, int(number)), tolerance, replays_of_sample).outcome)
    reports = [
        verdict(group, tolerance, {version: replays[place] for version, replays in others.items()})
        for place, group in enumerate(measured)
        if cheats is None or any(cheats[place])
    ]
    rules = [finding.rule for report in reports for finding in report.findings if finding.outcome is AuditOutcome.HARD]
    pools = [range(start, start + POOL) for start in range(0, len(measured) - POOL + 1, POOL)]
    pooled = [
        verdict(
            joined([measured[place] for place in pool]),
            tolerance,
            {version: joined([replays[place] for place in pool]) for version, replays in others.items()},
        ).outcome
        for pool in pools
    ]
    grouped = [report.outcome for report in reports]
    return Cell(name, len(alone), len(reports), _count(alone), _count(grouped), _count(pooled), _count(rules))


def verdict(measured: ReplayMeasurement, tolerance: Tolerance, others: Mapping[int, ReplayMeasurement]) -> AuditReport:
    """Return the verdict in the way of an auditor."""

    def compare(_: Sequence[int], versions: Sequence[int]) -> list[AuditReport]:
        return [judge(measured, tolerance, 1, {version: others[version] for version in versions})]

    return look_closer(1, list(others), compare)[0]


def prefilled(measured: ReplayMeasurement) -> ReplayMeasurement:
    """The best disguise: true log-probabilities, from a prefill under the claimed version. Only tokens betray it."""
    return replace(measured, claimed_logprobs=measured.logprobs.astype(np.float32).astype(np.float64))


def only(measured: ReplayMeasurement, number: int) -> ReplayMeasurement:
    """Return the measurement of one sample of a group."""
    mask = measured.sample == number
    return ReplayMeasurement(**{name: getattr(measured, name)[mask] for name in ReplayMeasurement.__dataclass_fields__})


def _count(values: Sequence[Any]) -> dict[Any, int]:
    return {value: values.count(value) for value in sorted(set(values))}
