"""Measurement of honest rounding, which gives tolerances: by the auditor itself, and by the operator's own nodes.

By the auditor itself, for work in 16 bits:

1. Most GPU nodes sample in bf16. The deviation from float32 depends on the policy, so each round measures it before the
   first claim of such a node is judged, and again every `RENEW_VERSIONS` versions, since the policy changes.
2. The auditor acts as a node: it samples prompts of the round in that precision and replays its own answers like
   claims. Prompts are the coordinator's and seeds its own. No token comes from a node, so no node can widen a
   tolerance.
3. The measured class is the auditor's, such as torch/bf16/cpu. Claims of other engines and devices in the same
   precision are paid if they pass by its tolerances, and held if they fail (`Calibration.judging`). So naming another
   class of that precision gives no wider tolerance.

By probes, for every class:

1. Only groups of *probes* count: nodes that `launch` starts, and those whose ids the operator names. Groups of other
   nodes change no tolerance, so no attacker can widen one until false work passes.
2. A class is calibrated as soon as one of its probes has sampled `POSITIONS_MIN` positions, and again after every
   `POSITIONS_MIN` more, from its newest `KEPT_POSITIONS`: the policy changes, and its noise with it.
3. Several probes of one class widen it: the widest value of each limit counts.
4. A group that fails hard by measurements of this policy does not count, and no renewal widens a limit beyond `WIDEST`
   times the first calibration. So a stolen probe can widen it no farther. `swarm-coordinator calibrate` may.
5. A group with a temperature of its own does not count: tolerances are those of the version's temperature.
6. The floor of torch's float32 needs no probe, and classes that nodes did not name themselves get none.

Pure: models are arguments; measured groups in, tolerances out.
"""

from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import cycle, islice

from coordinator.rules.calibration import POSITIONS_MIN, Calibration, Limit, Tolerance, derive
from coordinator.rules.replay import Prefill, ReplayMeasurement, Scored, measure
from protocol.work.rollout import Completion, Tokens

PRECISIONS = frozenset({"bf16", "fp16"})
"""The precisions that an auditor can sample in."""

RENEW_VERSIONS = 50
"""The versions after which a precision is measured again: it costs about as much as ten audits."""

LENGTH_MAX = 128
"""The most tokens of one completion: more prompts are more significant than longer answers."""

COUNT_MIN, COUNT_MAX = 8, 64
"""The completions of one prompt: a step for many takes little longer than for one."""

GROUP_POSITIONS = 1024
"""The tokens of one group, chosen so that several prompts count."""

GROUPS_MAX = 2_000
"""The most groups that are sampled if all answers are short."""


@dataclass(frozen=True)
class Drawing:
    """A group to sample: a prompt of the round, and a seed of the auditor's own."""

    prompt: Tokens
    seed: int
    count: int
    length: int
    temperature: float


Draw = Callable[[Drawing], list[Completion]]
Score = Callable[[Sequence[Prefill]], list[list[Scored]]]


class Rounding:
    """The last measurement of each precision."""

    def __init__(self, round_id: str) -> None:
        self._round_id = round_id
        self._last: dict[str, int] = {}
        """Precision → version of its last measurement."""

    def due(self, version: int, classes: Iterable[str], made: Calibration) -> list[str]:
        """Return the precisions to measure before claims of these classes are judged; they count as measured now."""
        wanted = {name.split("/")[1] for name in classes if name.count("/") == 2} & PRECISIONS
        due = [precision for precision in sorted(wanted) if self._is_due(precision, version, made)]
        self._last |= dict.fromkeys(due, version)
        return due

    def _is_due(self, precision: str, version: int, made: Calibration) -> bool:
        if precision not in self._last and made.has_precision(precision, self._round_id):
            self._last[precision] = version  # measured before this auditor started
        return version >= self._last.get(precision, version - RENEW_VERSIONS) + RENEW_VERSIONS


def drawings(prompts: Sequence[tuple[Tokens, int]], *, max_new_tokens: int, temperature: float) -> Iterator[Drawing]:
    """Yield groups of these (prompt, seed of its lease) in turn, each with a seed that no lease has."""
    length = min(max_new_tokens, LENGTH_MAX)
    count = min(max(GROUP_POSITIONS // length, COUNT_MIN), COUNT_MAX)
    for number, (prompt, seed) in enumerate(islice(cycle(prompts), GROUPS_MAX)):
        yield Drawing(prompt, (seed + number + 1) % 2**63, count, length, temperature)


def honest_groups(every: Iterable[Drawing], draw: Draw, score: Score) -> Iterator[ReplayMeasurement]:
    """Yield the measurements of replayed honest answers, until they are enough for a calibration."""
    positions = 0
    for drawing in every:
        said = draw(drawing)
        prefill = Prefill(drawing.prompt, [completion.tokens for completion in said], drawing.seed, drawing.temperature)
        group = measure(said, score([prefill])[0])
        positions += len(group)
        yield group
        if positions >= POSITIONS_MIN:
            return


KEPT_POSITIONS = 4 * POSITIONS_MIN
"""The positions kept of one probe: about 1 MB."""

WIDEST = 4.0
"""The largest factor by which renewals may widen a limit, compared with the first calibration."""

PROBES_KEPT = 64
"""The most probes of one class that are measured at a time."""


class Probes:
    """The groups of the probes of each class."""

    def __init__(self, round_id: str) -> None:
        self._round_id = round_id
        self._groups: defaultdict[str, OrderedDict[str, OrderedDict[str, ReplayMeasurement]]] = defaultdict(OrderedDict)
        """Class → node → claim → its positions, the newest last."""
        self._fresh: defaultdict[str, int] = defaultdict(int)
        """The positions of a class since its last calibration."""

    def add(self, name: str, node: str, claim_id: str, measured: ReplayMeasurement) -> None:
        """Count a group of a probe, once."""
        nodes = self._groups[name]
        groups = nodes.setdefault(node, OrderedDict())
        if claim_id in groups or not name:
            return
        groups[claim_id] = measured
        self._fresh[name] += len(measured)
        while sum(map(len, groups.values())) - len(next(iter(groups.values()))) >= KEPT_POSITIONS:
            groups.popitem(last=False)
        while len(nodes) > PROBES_KEPT:
            nodes.popitem(last=False)

    def positions(self) -> dict[str, int]:
        """Return the number of positions of each class since its last calibration."""
        return dict(self._fresh)

    def due(self, made: Calibration) -> list[Tolerance]:
        """Return the tolerances of the classes to be calibrated now, and start counting their positions again."""
        return [tolerance for name in self._groups if (tolerance := self._due(name, made)) is not None]

    def _due(self, name: str, made: Calibration) -> Tolerance | None:
        if self._fresh[name] < POSITIONS_MIN:
            return None
        before, is_measured = made.judging(name, self._round_id)
        if is_measured and not before.round_id:
            return None  # the floor of float32
        every = [list(groups.values()) for groups in self._groups[name].values()]
        enough = [groups for groups in every if sum(map(len, groups)) >= POSITIONS_MIN]
        if not enough:
            return None
        self._fresh[name] = 0
        tolerance = _widest([derive(name, groups, self._round_id) for groups in enough])
        if is_measured:
            return _bounded(tolerance, before.first or before.limits)
        return tolerance.model_copy(update={"first": tolerance.limits})


def _widest(several: list[Tolerance]) -> Tolerance:
    """Return the tolerances of a class that was measured on several machines."""
    limits = [max(values) for values in zip(*(tolerance.limits for tolerance in several), strict=True)]
    return _with(several[0], limits).model_copy(update={"positions": sum(tolerance.positions for tolerance in several)})


def _bounded(tolerance: Tolerance, first: tuple[float, ...]) -> Tolerance:
    """Return tolerances limited to the width that a renewal may give them."""
    limits = [min(value, WIDEST * most) for value, most in zip(tolerance.limits, first, strict=True)]
    return _with(tolerance, limits).model_copy(update={"first": first})


def _with(tolerance: Tolerance, limits: list[float]) -> Tolerance:
    margin, error = (
        Limit(**dict(zip(Limit.model_fields, values, strict=True))) for values in (limits[:3], limits[3:6])
    )
    return tolerance.model_copy(update={"margin": margin, "error": error, "mean_error": limits[6]})
