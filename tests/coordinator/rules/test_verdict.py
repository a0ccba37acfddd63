"""The rules: what honest noise passes, what each cheat trips, and reports that are evidence."""

import json
import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from coordinator.rules.calibration import SHIPPED, Tolerance, read
from coordinator.rules.replay import ReplayMeasurement, joined, score
from coordinator.rules.verdict import (
    EVIDENCE_MAX,
    AuditOutcome,
    AuditReport,
    fisher,
    judge,
    malformed,
    normal_of_t,
    tail,
)
from protocol.errors import TokensInvalid
from protocol.work.rollout import Completion
from protocol.work.sampling import uniforms
from tests.coordinator.audit.claims import EXACT, drawn, honest, logits, replayed


def outcome(measured: ReplayMeasurement, rule: str, tolerance: Tolerance = EXACT) -> AuditOutcome:
    """Return the outcome of one rule."""
    found = [finding.outcome for finding in judge(measured, tolerance, 1).findings if finding.rule == rule]
    return max(found, default=AuditOutcome.PASS)


def test_honest_work_passes() -> None:
    report = judge(honest(600), EXACT, 1)
    assert report.outcome is AuditOutcome.PASS
    assert report.findings == ()
    assert report.summary.dictated_share == 1


def test_an_edited_token_is_far_and_is_shown() -> None:
    table = logits(300)
    said = drawn(table, 1)
    tokens = said.tokens.copy()
    tokens[123] = table[123].argmin()
    (finding,) = [
        f for f in judge(replayed(table, replace(said, tokens=tokens), 1), EXACT, 1).findings if f.rule == "token"
    ]
    (place,) = finding.positions
    assert (place.position, place.claimed, place.dictated) == (123, tokens[123], said.tokens[123])
    assert finding.outcome is AuditOutcome.HARD


@pytest.mark.parametrize(("out", "expected"), [(1, AuditOutcome.PASS), (2, AuditOutcome.SOFT), (4, AuditOutcome.HARD)])
def test_single_positions_out_of_tolerance_are_chance_and_many_are_not(out: int, expected: AuditOutcome) -> None:
    measured = honest(400)
    margins = np.zeros(400)
    margins[:out] = 0.01
    assert outcome(replace(measured, margins=margins), "tokens") is expected
    wrong = measured.logprobs + margins
    assert outcome(replace(measured, claimed_logprobs=wrong), "logprobs") is expected


def test_small_errors_everywhere_move_the_mean() -> None:
    measured = honest(400)
    for error, expected in ((0.5e-4, AuditOutcome.PASS), (1.5e-4, AuditOutcome.SOFT), (3e-4, AuditOutcome.HARD)):
        assert outcome(replace(measured, claimed_logprobs=measured.logprobs + error), "mean") is expected
    few = honest(40)
    assert outcome(replace(few, claimed_logprobs=few.logprobs + 3e-4), "mean") is AuditOutcome.PASS


def test_an_older_version_in_noise_is_told_by_where_the_claim_leans() -> None:
    """Noise ten times the step: no tolerance sees the step, but its direction is known."""
    count = 16_000
    step = 0.003 * logits(count, seed=5)
    loose = EXACT.model_copy(
        update={name: EXACT.margin.model_copy(update={"tolerance": 0.3, "far": 9.0}) for name in ("margin", "error")}
        | {"mean_error": 1.0}
    )
    table = logits(count)
    for shift, expected in ((0 * step, AuditOutcome.PASS), (step, AuditOutcome.HARD)):
        said = drawn(table + shift + 0.03 * logits(count, seed=77), 1)
        claimed, neighbour = replayed(table, said, 1), replayed(table + step, said, 1)
        assert judge(claimed, loose, 1).outcome is AuditOutcome.PASS
        report = judge(claimed, loose, 1, {41: neighbour})
        assert report.outcome is expected
        assert report.fits[0].version == 41
        assert report.fits[0].lean == pytest.approx(float(shift is step), abs=0.3)


def test_a_neighbour_that_is_the_same_says_nothing() -> None:
    measured = honest(100)
    report = judge(measured, EXACT, 1, {4: measured})
    assert report.outcome is AuditOutcome.PASS
    assert (report.fits[0].lean, report.fits[0].only_here, report.fits[0].only_there) == (0, 0, 0)


@pytest.mark.parametrize("measured", [honest(5, noise=30.0), joined([honest(1)] * 3), honest(300, noise=3.0)])
def test_every_report_is_json_with_finite_numbers_and_bounded_evidence(measured: ReplayMeasurement) -> None:
    report = judge(measured, EXACT, 3, {2: honest(len(measured))})
    read = json.loads(json.dumps(report.to_json(), allow_nan=False))
    assert read["outcome"] == report.outcome.words
    assert read["calibration"] == 3
    assert all(len(finding["positions"]) <= EVIDENCE_MAX for finding in read["findings"])


def test_a_claim_that_its_lease_does_not_allow_fails_hard_without_a_model() -> None:
    report: AuditReport = malformed(TokensInvalid("Sample 3 continues after its end token."), EXACT, 1)
    assert report.outcome is AuditOutcome.HARD
    assert "tokens_invalid" in report.findings[0].observed


@pytest.mark.parametrize(("of", "rate"), [(1, 0.5), (10, 0.2), (60, 0.01)])
def test_the_tail_is_the_binomial_one(of: int, rate: float) -> None:
    chances = [math.comb(of, k) * rate**k * (1 - rate) ** (of - k) for k in range(of + 1)]
    for count in range(of + 1):
        if count > of * rate:
            assert tail(count, of, rate) == pytest.approx(sum(chances[count:]))
    assert tail(0, of, rate) == 1
    assert tail(10**5, 10**6, 0.01) < 1e-100


@pytest.mark.parametrize("count", [40, 400])
def test_one_rare_token_does_not_make_a_claim_lean(count: int) -> None:
    """The error of the token in noisy arithmetic may look like another version's, and it outweighs all others."""
    measured, distance = honest(count), np.full(count, 1e-4)
    distance[7] = 0.04
    rough = replace(measured, claimed_logprobs=measured.logprobs + np.where(distance > 0.01, distance, 0))
    report = judge(rough, EXACT, 1, {3: replace(measured, logprobs=measured.logprobs + distance)})
    assert report.fits[0].lean == pytest.approx(1, abs=0.1)
    assert [finding for finding in report.findings if finding.rule == "version"] == []


LOOSE = EXACT.model_copy(
    update={name: EXACT.margin.model_copy(update={"tolerance": 0.3, "far": 9.0}) for name in ("margin", "error")}
    | {"mean_error": 1.0}
)
"""Tolerances by which nothing but a neighbour betrays a claim."""
FREE = LOOSE.model_copy(update={"error": LOOSE.error.model_copy(update={"tolerance": 5.0, "far": 50.0})})
"""Tolerances by which nothing else does, however far off a log-probability is."""


def test_a_claim_of_another_versions_numbers_bit_for_bit_is_that_versions() -> None:
    """The cheater prefills with the auditor's own program under an older version: no noise is left."""
    table = logits(4000)
    older = table + 0.003 * logits(4000, seed=5)
    said = drawn(older, 1)
    claimed, neighbour = replayed(table, said, 1), replayed(older, said, 1)
    exact = replace(claimed, claimed_logprobs=neighbour.logprobs, dictated=claimed.claimed)
    (finding,) = judge(exact, LOOSE, 1, {41: neighbour}).findings
    assert (finding.rule, finding.outcome) == ("version", AuditOutcome.HARD)


@pytest.mark.parametrize("seed", range(12))
def test_versions_that_differ_by_less_than_rounding_accuse_nobody(seed: int) -> None:
    """The rounding of the claimed version's replay is in all errors and distances: honest claims lean half-way."""
    measured, chance = honest(4000), np.random.Generator(np.random.Philox(seed))
    by_node, by_claimed, by_other = (chance.normal(0, 3e-7, 4000) for _ in range(3))
    replay = replace(measured, claimed_logprobs=measured.logprobs + by_node, logprobs=measured.logprobs + by_claimed)
    neighbour = replace(measured, logprobs=measured.logprobs + by_other)
    report = judge(replay, EXACT, 1, {41: neighbour})
    assert report.fits[0].lean == pytest.approx(0.5, abs=0.05)
    assert report.fits[0].standard_errors > 20
    assert report.outcome is AuditOutcome.PASS


def repeating(
    seed: int, *, noise: float, step: float, contexts: int = 8, samples: int = 16
) -> tuple[ReplayMeasurement, ...]:
    """A trained policy's group, whose samples say the same few tokens: by the claimed version, and by another one."""
    chance = np.random.Generator(np.random.Philox(seed))
    measured = honest(contexts)
    by_node, by_claimed, by_other = (chance.normal(0, noise, contexts) for _ in range(3))
    apart = chance.normal(0, step, contexts)
    one = replace(measured, claimed_logprobs=measured.logprobs + by_node, logprobs=measured.logprobs + by_claimed)
    other = replace(measured, logprobs=measured.logprobs + by_other + apart)
    return tuple(together([each] * samples) for each in (one, other))


def together(parts: list[ReplayMeasurement]) -> ReplayMeasurement:
    """Samples that share all their contexts."""
    return replace(joined(parts), context=np.concatenate([part.context for part in parts]))


@pytest.mark.parametrize("step", [0.0, 1e-4, 1e-2])
def test_honest_groups_of_a_thousand_that_repeat_themselves_are_not_accused(step: float) -> None:
    """Eight roundings are eight observations, though there are 128 positions: noise by bf16, versions that near."""
    outcomes = []
    for seed in range(1000):
        claimed, neighbour = repeating(seed, noise=1e-2, step=step)
        outcomes.append(judge(claimed, LOOSE, 1, {41: neighbour}).outcome)
    assert outcomes.count(AuditOutcome.HARD) == 0
    assert outcomes.count(AuditOutcome.SOFT) <= 10


def test_one_rounding_that_all_samples_repeat_is_one_position_out_of_tolerance() -> None:
    measured = honest(400)
    errors, margins = np.zeros(400), np.zeros(400)
    errors[0] = margins[0] = 0.01
    one = replace(measured, logprobs=measured.logprobs + errors, margins=margins)
    assert outcome(together([one] * 16), "logprobs") is AuditOutcome.PASS
    assert outcome(together([one] * 16), "tokens") is AuditOutcome.PASS
    apart = joined([one] * 16)
    assert outcome(apart, "logprobs") is outcome(apart, "tokens") is AuditOutcome.HARD


@pytest.mark.parametrize(("out", "expected"), [(1, AuditOutcome.PASS), (3, AuditOutcome.SOFT), (5, AuditOutcome.HARD)])
def test_a_context_of_sixteen_draws_has_sixteen_times_the_chance_to_be_out(out: int, expected: AuditOutcome) -> None:
    measured = honest(20)
    clean = together([measured] * 16)
    margins = np.zeros(len(clean))
    margins[:out] = 0.01
    assert outcome(replace(clean, margins=margins), "tokens") is expected


@pytest.mark.parametrize("noise", [1e-6, 1e-4])
def test_who_repeats_another_versions_numbers_in_few_contexts_is_still_found(noise: float) -> None:
    """Eight contexts are enough, if little but rounding lies between the claim and that version."""
    claimed, neighbour = repeating(1, noise=1e-7, step=1e-2)
    rounding = np.random.Generator(np.random.Philox(5)).normal(0, noise, 8)
    stale = replace(claimed, claimed_logprobs=neighbour.logprobs + np.tile(rounding, 16))
    (finding,) = judge(stale, LOOSE, 1, {41: neighbour}).findings
    assert (finding.rule, finding.outcome) == ("version", AuditOutcome.HARD)


@pytest.mark.parametrize(
    ("count", "expected"), [(1, AuditOutcome.PASS), (2, AuditOutcome.SOFT), (3, AuditOutcome.HARD)]
)
def test_no_single_context_accuses_however_near(count: int, expected: AuditOutcome) -> None:
    """The other contexts of sixty-four show no difference between the two versions."""
    measured, distance = honest(64), np.zeros(64)
    distance[:count] = 0.5
    near = replace(measured, claimed_logprobs=measured.logprobs + distance)
    assert judge(near, FREE, 1, {41: replace(near, logprobs=near.claimed_logprobs)}).outcome is expected


@pytest.mark.parametrize("tails", [lambda chance: chance.normal(), lambda chance: chance.standard_cauchy()])
@pytest.mark.parametrize("noise", [1e-5, 1e-3, 1e-1])
def test_no_noise_brings_honest_claims_near_to_another_version(
    noise: float, tails: Callable[[np.random.Generator], float]
) -> None:
    """Noise of any size and tails, beside versions 1e-3 nats apart: what chance gives once in 100 is no more."""
    chance, measured, rare = np.random.Generator(np.random.Philox(7)), honest(20), 0
    other = replace(measured, logprobs=measured.logprobs + np.linspace(-1e-3, 1e-3, 20))
    for _ in range(2000):
        errors = np.array([noise * tails(chance) for _ in range(20)])
        claim = replace(measured, claimed_logprobs=measured.logprobs + errors)
        rare += (
            judge(claim, LOOSE, 1, {41: replace(other, claimed_logprobs=claim.claimed_logprobs)}).fits[0].chance < 0.01
        )
    assert rare <= 0.01 * 2000


@pytest.mark.parametrize("count", [1, 2, 30])
def test_fishers_tail_is_that_of_uniform_chances(count: int) -> None:
    chance = np.random.Generator(np.random.Philox(count))
    found = np.array([fisher(chance.random(count)) for _ in range(4000)])
    for level in (0.1, 0.5, 0.9):
        assert float((found <= level).mean()) == pytest.approx(level, abs=0.03)
    assert fisher(np.ones(3)) == 1
    assert fisher(np.full(3000, 0.1)) < 1e-100
    assert fisher(np.zeros(0)) == 1


def steered(contexts: int, *, of: int = 8, samples: int = 64, noise: float = 0.0, seed: int = 1) -> ReplayMeasurement:
    """Samples of few contexts; in some of them each takes the likeliest token wherever that is not far by bf16."""
    table = np.repeat(logits(of, seed=seed), samples, 0)
    rough = table + np.repeat(noise * logits(of, seed=10**6 + seed) / 2, samples, 0)
    chances, likeliest = uniforms(1, 0, len(table)), table.argmax(-1)
    some = samples * contexts
    misses = score(table[:some], chances[:some], likeliest[:some].tolist()).margins
    takes = np.append(misses < BF16.margin.far, np.zeros(len(table) - some, bool))
    tokens = np.where(takes, likeliest, drawn(rough, 1).tokens)
    logprobs = score(rough, chances, tokens.tolist()).logprobs
    said = Completion(tokens.astype(np.uint32), logprobs.astype(np.float32), "length")
    return replace(replayed(table, said, 1), context=np.repeat(np.arange(of), samples))


BF16 = read(SHIPPED).tolerances_of("torch/bf16/cpu")


def test_who_steers_many_samples_in_few_contexts_is_found() -> None:
    """A context that ten of its samples show to be out is ten times as rare as one that a single sample shows."""
    found = {
        contexts: [outcome(steered(contexts, seed=seed), "tokens", BF16) for seed in range(10)] for contexts in (3, 5)
    }
    assert found[3].count(AuditOutcome.PASS) <= 5
    assert found[5].count(AuditOutcome.HARD) >= 5
    assert AuditOutcome.PASS not in found[5]


def test_honest_samples_of_few_contexts_steer_nothing() -> None:
    outcomes = [outcome(steered(0, noise=0.03, seed=seed), "tokens", BF16) for seed in range(400)]
    assert outcomes.count(AuditOutcome.HARD) == 0
    assert outcomes.count(AuditOutcome.SOFT) <= 4


@pytest.mark.parametrize(("t", "freedom", "normal"), [(2.5706, 5, 1.96), (12.706, 1, 1.96), (6.8688, 5, 3.29)])
def test_students_t_counts_as_the_normal_errors_that_are_as_rare(t: float, freedom: float, normal: float) -> None:
    """Quantiles of any table: 97.5 % and 99.95 %; the approximation is off by a few hundredths, most at one degree."""
    assert normal_of_t(t, freedom) == pytest.approx(normal, rel=0.06)
    assert normal_of_t(-t, freedom) == -normal_of_t(t, freedom)
    assert normal_of_t(t, 0) == 0
