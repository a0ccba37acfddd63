"""Measurement of rounding by the auditor itself: the deviation of honest work in 16 bits on this policy.

1. Most GPU nodes sample in bf16. The deviation from float32 depends on the policy, so each round measures it before the
   first claim of such a node is judged, and again every `RENEW_VERSIONS` versions, since the policy changes.
2. The auditor acts as a node: it samples prompts of the round in that precision and replays its own answers like
   claims. Prompts are the coordinator's and seeds its own. No token comes from a node, so no node can widen a
   tolerance.
3. The measured class is the auditor's, such as torch/bf16/cpu. Claims of other engines and devices in the same
   precision are paid if they pass by its tolerances, and held if they fail (`Calibration.judging`). So naming another
   class of that precision gives no wider tolerance.

Pure: models are arguments.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import cycle, islice

from coordinator.rules.calibration import POSITIONS_MIN, Calibration
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
