"""Automatic calibration: classes are measured on the operator's own nodes only.

1. Only groups of *probes* count: nodes that `launch` starts, and those whose ids the operator names. Groups of other
   nodes change no tolerance, so no attacker can widen one until false work passes.
2. A class is calibrated as soon as one of its probes has sampled `POSITIONS_MIN` positions, and again after every
   `POSITIONS_MIN` more, from its newest `KEPT_POSITIONS`: the policy changes, and its noise with it.
3. Several probes of one class widen it: the widest value of each limit counts.
4. A group that fails hard by measurements of this policy does not count, and no renewal widens a limit beyond `WIDEST`
   times the first calibration. So a stolen probe can widen it no farther. `swarm-coordinator calibrate` may.
5. A group with a temperature of its own does not count: tolerances are those of the version's temperature.
6. The floor of torch's float32 needs no probe, and classes that nodes did not name themselves get none.

Pure: measured groups in, tolerances out.
"""

from collections import OrderedDict, defaultdict

from coordinator.rules.calibration import POSITIONS_MIN, Calibration, Limit, Tolerance, derive
from coordinator.rules.replay import ReplayMeasurement

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
