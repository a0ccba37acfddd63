"""Calibration that goes on by itself: probes of the operator's measure their class, and nobody else moves it."""

from datetime import date

import numpy as np
import pytest

from coordinator.audit.rounding import WIDEST, Probes
from coordinator.rules.calibration import POSITIONS_MIN, SHIPPED, Calibration, Tolerance, read
from coordinator.rules.replay import ReplayMeasurement
from coordinator.rules.verdict import AuditOutcome, judge
from protocol.errors import AuditFailed
from tests.coordinator.audit.claims import drawn, honest, logits, replayed

ROUND, CLASS = "a" * 64, "torch/bf16/cuda"
NOISE, LENGTH, LONG = 1e-2, 600, 3_000
GROUPS = POSITIONS_MIN // LENGTH + 1


class Field:
    """A round's tolerances, and the probes that they come from."""

    def __init__(self) -> None:
        self.made = read(SHIPPED)
        self.probes = Probes(ROUND)
        self._claims = 0

    def bring(self, group: ReplayMeasurement, node: str = "probe", name: str = CLASS) -> None:
        """Have an auditor replay a group of a probe, as `Auditor` does."""
        self._claims += 1
        if self.outcome(group) is not AuditOutcome.HARD:
            self.probes.add(name, node, str(self._claims), group)
        for tolerance in self.probes.due(self.made):
            self.made = self.made.with_class(tolerance, made=date(2026, 11, 25), model="m")

    def bring_many(self, noise: float, *, node: str = "probe", first: int = 0, groups: int = GROUPS) -> None:
        for seed in range(first, first + groups):
            self.bring(honest(LENGTH, noise=noise, seed=seed), node)

    def outcome(self, group: ReplayMeasurement) -> AuditOutcome:
        allowed, is_measured = self.made.judging(CLASS, ROUND)
        return judge(group, allowed, 1).outcome if is_measured else AuditOutcome.HELD

    @property
    def tolerance(self) -> Tolerance:
        allowed, is_measured = self.made.judging(CLASS, ROUND)
        assert is_measured
        return allowed


def test_a_class_is_calibrated_as_soon_as_a_probe_has_brought_enough() -> None:
    field = Field()
    field.bring_many(NOISE, groups=GROUPS - 1)
    assert CLASS not in field.made.measured_on(ROUND)
    field.bring_many(NOISE, first=GROUPS, groups=1)
    assert CLASS in field.made.measured_on(ROUND)
    assert field.tolerance.first == field.tolerance.limits
    for seed in range(100, 120):
        assert field.outcome(honest(LENGTH, noise=NOISE, seed=seed)) is AuditOutcome.PASS
    assert field.outcome(honest(LENGTH, noise=10 * NOISE)) is AuditOutcome.HARD


def test_the_same_group_counts_once() -> None:
    probes, group = Probes(ROUND), honest(LENGTH, noise=NOISE)
    for _ in range(10 * GROUPS):
        probes.add(CLASS, "probe", "the same claim", group)
    assert probes.due(read(SHIPPED)) == []


def test_floats_of_32_bits_keep_their_floor_and_a_class_that_no_node_named_gets_none() -> None:
    field = Field()
    for name in ("torch/fp32/cpu", ""):
        for seed in range(2 * GROUPS):
            field.probes.add(name, "probe", f"{name} {seed}", honest(LENGTH, noise=NOISE, seed=seed))
    assert field.probes.due(field.made) == []


def test_a_renewal_follows_the_policy_both_ways() -> None:
    field = Field()
    field.bring_many(NOISE)
    first = field.tolerance
    for turn in range(1, 8):
        field.bring_many(1.5 * NOISE, first=100 * turn)
    wider = field.tolerance
    for turn in range(8, 16):
        field.bring_many(0.5 * NOISE, first=100 * turn)
    assert first.margin.tolerance < wider.margin.tolerance
    assert field.tolerance.margin.tolerance < first.margin.tolerance


def test_another_card_of_the_class_widens_it() -> None:
    field = Field()
    field.bring_many(NOISE)
    alone = field.tolerance
    field.bring_many(1.8 * NOISE, node="another card", first=100)
    both = field.tolerance
    assert all(one <= other for one, other in zip(alone.limits, both.limits, strict=True))
    assert both.error.tolerance > 1.5 * alone.error.tolerance
    for seed in range(200, 210):
        assert field.outcome(honest(LENGTH, noise=1.8 * NOISE, seed=seed)) is AuditOutcome.PASS


def test_a_card_with_five_times_the_outliers_of_the_probe_fails_not_even_softly() -> None:
    """Seven of ten thousand positions are ten times as far off on the probe, and 35 on the other card."""
    field = Field()
    for seed in range(GROUPS * 4):
        field.bring(with_outliers(7e-4, seed))
    outcomes = {field.outcome(with_outliers(35e-4, 1_000 + seed, LONG)) for seed in range(20)}
    assert outcomes == {AuditOutcome.PASS}
    assert field.outcome(with_outliers(0.05, 1, LONG)) is AuditOutcome.HARD


def with_outliers(rate: float, seed: int, length: int = LENGTH) -> ReplayMeasurement:
    chance = np.random.Generator(np.random.Philox(seed))
    table = logits(length, seed=seed)
    rough = NOISE * chance.normal(0, 1, table.shape)
    rough[chance.random(length) < rate] *= 10
    return replayed(table, drawn(table + rough, seed), seed)


def test_a_probe_that_was_taken_over_cannot_widen_its_class_until_a_cheat_passes() -> None:
    """The probe stays just within its tolerance: each renewal is wider, until the bound stops it at the eighth."""
    field = Field()
    field.bring_many(NOISE)
    first, noise = field.tolerance, NOISE
    for turn in range(1, 16):
        grown = 1.2 * noise
        if field.outcome(honest(LENGTH, noise=grown, seed=7)) is AuditOutcome.PASS:
            noise = grown
        field.bring_many(noise, first=100 * turn, groups=3 * GROUPS)
    assert noise > WIDEST * NOISE, "it did poison"
    for value, most in zip(field.tolerance.limits, first.limits, strict=True):
        assert value <= WIDEST * most
    for seed in range(20):
        assert field.outcome(honest(LENGTH, noise=20 * NOISE, seed=seed)) is AuditOutcome.HARD


def test_hard_failures_of_a_probe_do_not_count() -> None:
    field = Field()
    field.bring_many(NOISE)
    before = field.made
    field.bring_many(30 * NOISE, first=100, groups=5 * GROUPS)
    assert field.made == before


def test_what_is_no_rounding_is_no_calibration() -> None:
    field = Field()
    with pytest.raises(AuditFailed, match="rounding does not explain that"):
        field.bring_many(5.0)
    assert isinstance(field.made, Calibration)
    assert CLASS not in field.made.measured_on(ROUND)
