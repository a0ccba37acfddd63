"""Verdicts: from measured positions to *pass*, *soft fail* or *hard fail* with evidence, or *held*: no verdict yet.

| rule | soft fail | hard fail |
|---|---|---|
| `form` | | the claim is not one that its lease allows: tokens, lengths, ends |
| `token` | | a position whose margin is far |
| `tokens` | more contexts with a margin out of tolerance than chance gives in 10³ groups | in 10⁶ groups |
| `logprob` | | a position whose log-probability is far |
| `logprobs` | more contexts with an error out of tolerance than chance gives in 10³ groups | in 10⁶ groups |
| `mean` | the mean error of 64 or more contexts is above tolerance | above twice that |
| `version` | 64 or more positions lean to another version by 5 standard errors | by 10 |
| | or lie nearer to it than chance gives in 10³ groups | in 10⁶ groups |

- A report is *provisional* if the tolerances were measured on another policy. A claim that fails then, except by
  `form`, is held: it is judged once its class is calibrated on this policy.
- A soft fail is a reason to audit more, not to punish; a hard fail is a result that honest work of the class never had.
- Counts and means use each context once: samples of a group that repeat tokens repeat their rounding, too, so a trained
  policy's hundred positions may be eight observations.
- The end of a sample needs no rule of its own: an end token that was not due, or one that was due and left out, has a
  margin like any other token. A token after an end breaks `form`.
- A neighbour must have been scored by the same arithmetic as the claimed version, or the claim leans to the arithmetic;
  and in float32, whose roundings do not coincide by chance as the few of bf16 do.
- If two versions differ by less than the rounding of a replay, honest claims lean half-way: the rounding of the claimed
  version is in every error and in every distance. So a lean from half-way to 1 counts from 0 to all standard errors.
- A lean finds a step in larger noise, over many contexts. If a claim *is* another version's, except for rounding, a few
  contexts are enough. However large honest errors are: if they are symmetric, and less likely the larger they are, an
  honest claim comes within a part ρ of the distance to that version in at most ρ / (1 − ρ) of contexts, since the
  density at x is at most 1 / 2x. Fisher's test joins the contexts.
- The same inputs give the same report on every machine: `VALIDATOR` changes whenever a rule does.

Three functions compute how likely an audit's observations are if the claim is honest:

- `tail` for a count, `fisher` for independent chances together, `normal_of_t` for standard errors from few contexts.
- They are written out, since a library of statistics would be larger than the auditor.
"""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from enum import IntEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from coordinator.rules.calibration import GROUP_CONTEXTS_MIN, Limit, Tolerance
from coordinator.rules.replay import Floats, ReplayMeasurement
from protocol.errors import SwarmError


def tail(count: int, of: int, rate: float) -> float:
    """Return the chance of `count` or more successes among `of` tries, each at `rate`."""
    if count <= of * rate:
        return 1.0
    total = 0.0
    for successes in range(count, of + 1):  # terms only fall from here on
        ways = math.lgamma(of + 1) - math.lgamma(successes + 1) - math.lgamma(of - successes + 1)
        term = math.exp(ways + successes * math.log(rate) + (of - successes) * math.log1p(-rate))
        total += term
        if term <= total * 1e-12:
            break
    return min(1.0, total)


def fisher(chances: Floats) -> float:
    """Return the chance that independent chances are as small together (Fisher 1932): tail of χ², 2 degrees each."""
    half = float(-np.log(chances).sum())
    if half <= 0:
        return 1.0
    terms = np.arange(len(chances)) * math.log(half) - np.cumsum([0.0, *np.log(np.arange(1, len(chances)))])
    return min(1.0, float(np.exp(terms - half).sum()))


def normal_of_t(t: float, freedom: float) -> float:
    """Return the standard errors of a normal distribution that are as rare as `t` of Student's t (Wallace 1959)."""
    if freedom <= 0:
        return 0.0
    size = (8 * freedom + 1) / (8 * freedom + 3) * math.sqrt(freedom * math.log1p(t * t / freedom))
    return math.copysign(size, t)


VALIDATOR = "replay/7"

SOFT_CHANCE, HARD_CHANCE = 1e-3, 1e-6
MEAN_HARD = 2.0
HALF_WAY = 0.5
"""The lean above which a claim is nearer to the other version than to the claimed one."""
LEAN_SOFT, LEAN_HARD = 5.0, 10.0
"""Standard errors, over many contexts or as rare with few: see `WIDE`."""
WIDE = 2.0
"""The factor on standard errors, which are too small: errors of different contexts share causes, too."""

RESOLUTION_NATS = 2.0**-24
"""The resolution of claims, which are float32: values that repeat to the last bit are no more exact than that."""

GROUP_POSITIONS_MIN = 64
"""The fewest positions that show a version, however many contexts they have."""

REPLAY_NATS = 3e-5
"""The difference of engines in float32 (`calibration.FLOOR_NATS`): no claim is nearer to a version than that."""
DISTANT = 10.0
"""A context counts if versions differ in it by this multiple of `REPLAY_NATS`."""
CONTEXT_CHANCE = 1e-3
"""The smallest chance of one context: one is no finding, two are a soft fail, three are a hard fail."""

REPEATED_CONTEXTS_MIN = 20
"""Contexts whose log-probabilities are another version's to the bit and not the claimed one's: a likely token's can be
one of two values, and chance gives 20 such coincidences in 10⁶ groups."""

EVIDENCE_MAX = 8
"""Positions shown for one finding, the worst first."""


class AuditOutcome(IntEnum):
    """The outcome of an audit or of one finding, from best to worst."""

    PASS = 0
    SOFT = 1
    HARD = 2
    HELD = 3
    """No verdict yet; only a whole report has this outcome."""

    @property
    def words(self) -> str:
        return ("pass", "soft fail", "hard fail", "held")[self]


@dataclass(frozen=True)
class PositionEvidence:
    """A position that is shown as evidence."""

    sample: int
    position: int
    claimed: int
    dictated: int
    margin: float
    claimed_logprob: float
    logprob: float


@dataclass(frozen=True)
class AuditFinding:
    """A rule that was broken."""

    rule: str
    outcome: AuditOutcome
    expected: str
    observed: str
    positions: tuple[PositionEvidence, ...] = ()


@dataclass(frozen=True)
class VersionFit:
    """The fit of the claim to a neighbouring version, compared with the claimed one."""

    version: int
    lean: float
    """0: the claimed log-probabilities are those of the claimed version; 1: those of this one."""
    standard_errors: float
    """The lean's distance from 0, in standard errors."""
    chance: float
    """The chance that an honest claim is as near to this version in as many contexts."""
    by_tokens: float
    """Standard errors by which contexts have more tokens of this version than of the claimed one."""
    only_here: int
    """Positions with the dictated token under this version and not under the claimed one."""
    only_there: int


@dataclass(frozen=True)
class Summary:
    """The numbers of a replay, whatever the verdict."""

    positions: int = 0
    dictated_share: float = 0.0
    out_share: float = 0.0
    error_mean: float = 0.0
    error_p99: float = 0.0
    error_max: float = 0.0


@dataclass(frozen=True)
class AuditReport:
    """The report of an audit of one claim."""

    tolerance: str
    calibration: int
    summary: Summary = field(default_factory=Summary)
    findings: tuple[AuditFinding, ...] = ()
    fits: tuple[VersionFit, ...] = ()
    validator: str = VALIDATOR
    provisional: bool = False
    """True if the tolerances were measured on another policy: a claim that fails only by them is no fault."""
    note: str = ""
    """A sentence for the node's owner about how the claim was judged."""

    @property
    def outcome(self) -> AuditOutcome:
        worst = max((finding.outcome for finding in self.findings), default=AuditOutcome.PASS)
        return AuditOutcome.HELD if self.provisional and worst is not AuditOutcome.PASS else worst

    def to_json(self) -> dict[str, Any]:
        """Return the report for `json.dumps`; every number in it is finite."""
        report = asdict(self)
        for finding in report["findings"]:
            finding["outcome"] = AuditOutcome(finding["outcome"]).words
        return {"outcome": self.outcome.words, **report}


def malformed(error: SwarmError, tolerance: Tolerance, calibration: int) -> AuditReport:
    """Return the report on a claim that is refused without a model."""
    finding = AuditFinding(
        "form", AuditOutcome.HARD, "a claim that its lease allows", f"{error.message} [{error.code}]"
    )
    return AuditReport(tolerance.name, calibration, findings=(finding,))


def judge(
    measured: ReplayMeasurement,
    tolerance: Tolerance,
    calibration: int,
    neighbours: Mapping[int, ReplayMeasurement] | None = None,
) -> AuditReport:
    """Return the report on some positions of a claim; `neighbours` are replays under neighbouring versions."""
    fits = tuple(_fit(version, measured, other) for version, other in (neighbours or {}).items())
    errors = np.abs(measured.errors)
    findings = [
        _far("token", measured, measured.margins, tolerance.margin),
        _many("tokens", measured, measured.margins, tolerance.margin),
        _far("logprob", measured, errors, tolerance.error),
        _many("logprobs", measured, errors, tolerance.error),
        _mean(measured, errors, tolerance),
        *(_other_version(fit) for fit in fits if len(measured) >= GROUP_POSITIONS_MIN),
    ]
    return AuditReport(
        tolerance.name,
        calibration,
        _summary(measured, tolerance),
        tuple(finding for finding in findings if finding is not None),
        fits,
    )


def judge_exactly(
    measured: ReplayMeasurement,
    tolerance: Tolerance,
    calibration: int,
    neighbours: Mapping[int, ReplayMeasurement] | None = None,
) -> AuditReport:
    """Return the report on a claim of an exact class, replayed by an auditor of the same class.

    Every token is the dictated one, or the claim fails hard. A log-probability with other bits is a soft failure: a
    question. It fails hard beyond the tolerances of the float class, or if all are those of a neighbouring version and
    differ in enough contexts.
    """
    report = judge(measured, tolerance, calibration, neighbours)
    wrong, off = (measured.claimed != measured.dictated).astype(float), np.abs(measured.errors)
    findings = list(report.findings)
    if wrong.any():
        observed = f"{int(wrong.sum())} of {len(measured)} tokens are others"
        places = _worst(measured, wrong, 0.0)
        findings.append(AuditFinding("exact", AuditOutcome.HARD, "the tokens of version and seed", observed, places))
    if off.any():
        observed = f"{int((off > 0).sum())} of {len(measured)} log-probabilities have other bits"
        expected, outcome = "log-probabilities equal to the bit", AuditOutcome.SOFT
        for version, other in (neighbours or {}).items():
            if not other.errors.any():
                observed = f"all log-probabilities are those of version {version}"
                if int((measured.sums(off) > 0).sum()) >= REPEATED_CONTEXTS_MIN:
                    outcome = AuditOutcome.HARD
        findings.append(AuditFinding("exact", outcome, expected, observed, _worst(measured, off, 0.0)))
    return replace(report, findings=tuple(findings))


def _summary(measured: ReplayMeasurement, tolerance: Tolerance) -> Summary:
    errors = np.abs(measured.errors)
    return Summary(
        positions=len(measured),
        dictated_share=float((measured.claimed == measured.dictated).mean()),
        out_share=float((measured.margins > tolerance.margin.tolerance).mean()),
        error_mean=float(errors.mean()),
        error_p99=float(np.quantile(errors, 0.99)),
        error_max=float(errors.max()),
    )


def _far(rule: str, measured: ReplayMeasurement, values: Floats, limit: Limit) -> AuditFinding | None:
    worst = float(values.max())
    if worst <= limit.far:
        return None
    expected, observed = f"at most {limit.far:.3g} nats anywhere", f"{worst:.3g} nats"
    return AuditFinding(rule, AuditOutcome.HARD, expected, observed, _worst(measured, values, limit.far))


def _many(rule: str, measured: ReplayMeasurement, values: Floats, limit: Limit) -> AuditFinding | None:
    """Return a finding if too many contexts have positions out of tolerance.

    A context is out if any of its positions is, so its chance is the sum of theirs; for n positions, an n-th of that:
    correlated or not, their mean number out is the same (Markov's inequality). Each n is one test.
    """
    outside = measured.sums((values > limit.tolerance).astype(float))
    of, most = len(outside), int(measured.sums(np.ones_like(values)).max())
    counts = [1 << power for power in range(most.bit_length())]

    def chance_of(least: int) -> tuple[float, int, int, float]:
        out, rate = int((outside >= least).sum()), min(1.0, limit.rate * len(values) / (of * least))
        return len(counts) * tail(out, of, rate), least, out, rate

    chance, least, out, rate = min(map(chance_of, counts))
    if chance >= SOFT_CHANCE:
        return None
    times = f", {least} times or oftener" if least > 1 else ""
    expected = f"{rate:.2g} of {of} contexts beyond {limit.tolerance:.3g} nats{times}"
    observed = f"{out} of them; chance gives as many in {chance:.1g} of honest claims"
    outcome = AuditOutcome.HARD if chance < HARD_CHANCE else AuditOutcome.SOFT
    return AuditFinding(rule, outcome, expected, observed, _worst(measured, values, limit.tolerance))


def _mean(measured: ReplayMeasurement, errors: Floats, tolerance: Tolerance) -> AuditFinding | None:
    means = measured.means(errors)
    mean = float(means.mean())
    if len(means) < GROUP_CONTEXTS_MIN or mean <= tolerance.mean_error:
        return None
    outcome = AuditOutcome.HARD if mean > MEAN_HARD * tolerance.mean_error else AuditOutcome.SOFT
    return AuditFinding("mean", outcome, f"a mean error of at most {tolerance.mean_error:.3g} nats", f"{mean:.3g} nats")


def _other_version(fit: VersionFit) -> AuditFinding | None:
    by_logprobs = 0.0
    if fit.lean > HALF_WAY:
        by_logprobs = fit.standard_errors * min(1.0, (1 - HALF_WAY / fit.lean) / (1 - HALF_WAY))
    strength = max(by_logprobs, fit.by_tokens)
    if strength < LEAN_SOFT and fit.chance >= SOFT_CHANCE:
        return None
    expected = f"less than {LEAN_SOFT:g} standard errors, and nothing that chance gives less than once in 1,000 claims"
    observed = (
        f"nearer to version {fit.version}: lean {fit.lean:.2f}, {fit.only_here} tokens are dictated by it alone and "
        f"{fit.only_there} by the claimed version alone; {strength:.1f} standard errors; chance brings "
        f"{fit.chance:.1g} of honest claims as near"
    )
    outcome = AuditOutcome.HARD if strength >= LEAN_HARD or fit.chance < HARD_CHANCE else AuditOutcome.SOFT
    return AuditFinding("version", outcome, expected, observed)


def _fit(version: int, measured: ReplayMeasurement, other: ReplayMeasurement) -> VersionFit:
    """Regress the errors on the differences to the other version, with standard errors robust to unequal variances."""
    distance = other.logprobs - measured.logprobs
    powers = measured.sums(distance**2)
    power = float(powers.sum())
    lean = standard_errors = 0.0
    if power > 0:
        lean = float((measured.errors * distance).sum()) / power
        pulls = measured.sums((measured.errors - lean * distance) * distance)
        unsure = RESOLUTION_NATS * measured.sums(np.abs(distance))
        # How far each context moves a lean computed without it (CR3, a jackknife): else a context that outweighs
        # the others explains itself, and the lean seems certain.
        moves = np.hypot(pulls, unsure) / np.maximum(power - powers, 1e-9 * power)
        freedom = power**2 / float((powers**2).sum()) - 1  # contexts that weigh as much as these, less the lean itself
        t = lean / math.sqrt(float((moves**2).sum()))
        standard_errors = WIDE * normal_of_t(t / WIDE, freedom)
    by_other, by_claimed = (scored.claimed == scored.dictated for scored in (other, measured))
    net = measured.sums(by_other.astype(float) - by_claimed)
    return VersionFit(
        version=version,
        lean=lean,
        standard_errors=standard_errors,
        chance=_chance_to_be_near(measured, distance),
        by_tokens=float(net.sum() / max(1.0, math.sqrt(float((net**2).sum())))),
        only_here=int((by_other & ~by_claimed).sum()),
        only_there=int((by_claimed & ~by_other).sum()),
    )


def _chance_to_be_near(measured: ReplayMeasurement, distance: Floats) -> float:
    """Return the chance that an honest claim is as near to the other version, over contexts where versions differ."""
    far = measured.means(np.abs(distance))
    near = np.maximum(measured.means(np.abs(measured.errors - distance)), REPLAY_NATS)
    tells = far > DISTANT * REPLAY_NATS
    parts = near[tells] / far[tells]
    return fisher(np.clip(parts / np.maximum(1 - parts, parts), CONTEXT_CHANCE, 1.0))


def _worst(measured: ReplayMeasurement, values: Floats, above: float) -> tuple[PositionEvidence, ...]:
    order: NDArray[np.intp] = np.argsort(-values, kind="stable")[:EVIDENCE_MAX]
    return tuple(_position(measured, int(place)) for place in order if values[place] > above)


def _position(measured: ReplayMeasurement, place: int) -> PositionEvidence:
    return PositionEvidence(
        sample=int(measured.sample[place]),
        position=int(measured.position[place]),
        claimed=int(measured.claimed[place]),
        dictated=int(measured.dictated[place]),
        margin=float(measured.margins[place]),
        claimed_logprob=float(measured.claimed_logprobs[place]),
        logprob=float(measured.logprobs[place]),
    )
