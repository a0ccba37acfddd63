"""Capacity: the throughput that keeps the learner busy, for a staleness bound S and a publication interval κ; pure.

R rollouts make an update, which takes T seconds (`train_s`); a version takes T_b seconds (`broadcast_s`) from
publication until nodes sample from it; one rollout takes ℓ seconds (`rollout_s`); the pool gives μ accepted rollouts
per second, so the rollouts of one update take x = R/μ seconds. P is the time from one publication to the next, κT at
best, and the learner's bubble ratio is 1 - κT/P.

- `Overlap` is the rule of ECHO-2. Nodes sample only while no broadcast is under way:

      P = max(κT, T_b + κx)            μ_min = κR / (κT - T_b), none if κT ≤ T_b
      Δ ≤ κ + ⌈(T_b + x)/T⌉ - 1,       which with the overlap condition is κ + ⌈(1 - 1/κ)·T_b/T⌉

- `Visible` is our rule: nodes go on sampling while they download a version, and admission
  (`coordinator.rules.lease_allowance`) stops them before their groups would be too old. So Δ ≤ S always, and only the
  loop may cost time: a version is published and reaches the nodes, the first groups that only this version admits are
  sampled, and the learner goes on from them to a later publication. Meanwhile it has m = S + 1 - κ updates to work on,
  and makes q = ⌊m/κ⌋ + 1 publications. With x' = max(x, ℓ) the longest of four loops decides:

      P = max(κT, κx, κT + (T_b + x' - mT)/q, κx + (T_b + x' - x + T - mx)/q)
      μ_min = R / min(T, mT - T_b),    none if mT - T_b < ℓ or is not positive

- S = 0, κ = 1 gives P = T + T_b + x: one after the other, as in the synchronous loop.
- κ is the largest interval for which the rule's promise holds: of `Overlap` that Δ ≤ S; of `Visible` that μ_min is the
  least possible, R/T.
"""

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass

ROUNDING = 1e-9
"""Quotients this close to a whole number count as that number."""


@dataclass(frozen=True)
class PoolLoad:
    """The demand of a round on its pool of nodes."""

    staleness: int
    rollouts_per_update: float
    train_s: float
    broadcast_s: float
    rollout_s: float = 0.0

    def __post_init__(self) -> None:
        durations = (self.broadcast_s, self.rollout_s, self.rollouts_per_update)
        if not (self.staleness >= 0 and 0 < self.train_s < math.inf and all(0 <= d < math.inf for d in durations)):
            raise ValueError(f"a load needs finite times, and an update that takes some: {self}")

    @property
    def steps_per_broadcast(self) -> float:
        """Return r = T_b/T."""
        return self.broadcast_s / self.train_s

    @property
    def steps_per_rollout(self) -> float:
        """Return how many updates the learner makes while one rollout is sampled."""
        return self.rollout_s / self.train_s


class AdmissionRule(ABC):
    """A rule by which sampling is admitted, and its consequences for a load."""

    @abstractmethod
    def period_s(self, load: PoolLoad, kappa: int, rate: float) -> float:
        """Return P: seconds from one publication to the next, when the pool gives `rate` rollouts per second."""

    @abstractmethod
    def min_rate(self, load: PoolLoad, kappa: int) -> float:
        """Return μ_min: the least throughput at which the learner never waits; infinite if none is enough."""

    @abstractmethod
    def holds(self, load: PoolLoad, kappa: int) -> bool:
        """Return True if publishing every `kappa` updates keeps the rule's promise."""

    def bubble(self, load: PoolLoad, kappa: int, rate: float) -> float:
        """Return the share of its time that the learner waits."""
        return 1.0 - kappa * load.train_s / self.period_s(load, kappa, rate)

    def kappa(self, load: PoolLoad) -> int:
        """Return the largest interval for which the promise holds; 1 if there is none, as 1 costs the least then."""
        return next((kappa for kappa in range(load.staleness + 1, 1, -1) if self.holds(load, kappa)), 1)


class Overlap(AdmissionRule):
    """The rule of ECHO-2: a broadcast and the sampling for κ updates fit into the κ updates before."""

    def period_s(self, load: PoolLoad, kappa: int, rate: float) -> float:
        return max(kappa * load.train_s, load.broadcast_s + kappa * _worth_s(load, rate))

    def min_rate(self, load: PoolLoad, kappa: int) -> float:
        sampling_s = kappa * load.train_s - load.broadcast_s
        return kappa * load.rollouts_per_update / sampling_s if sampling_s > 0 else math.inf

    def holds(self, load: PoolLoad, kappa: int) -> bool:
        return staleness_bound(load, kappa) <= load.staleness


class Visible(AdmissionRule):
    """Admission on the version that each node holds."""

    def period_s(self, load: PoolLoad, kappa: int, rate: float) -> float:
        ahead = load.staleness + 1 - kappa
        if ahead < 0:
            return math.inf
        worth_s = _worth_s(load, rate)
        if worth_s == math.inf:
            return math.inf
        first_s = max(worth_s, load.rollout_s)
        meets = ahead // kappa + 1
        return max(
            kappa * load.train_s,
            kappa * worth_s,
            kappa * load.train_s + (load.broadcast_s + first_s - ahead * load.train_s) / meets,
            kappa * worth_s + (load.broadcast_s + first_s - worth_s + load.train_s - ahead * worth_s) / meets,
        )

    def min_rate(self, load: PoolLoad, kappa: int) -> float:
        spare_s = self._spare_s(load, kappa)
        if spare_s <= 0 or spare_s < load.rollout_s:
            return math.inf
        return load.rollouts_per_update / min(load.train_s, spare_s)

    def holds(self, load: PoolLoad, kappa: int) -> bool:
        return self._spare_s(load, kappa) >= max(load.train_s, load.rollout_s) * (1 - ROUNDING)

    @staticmethod
    def _spare_s(load: PoolLoad, kappa: int) -> float:
        """Return the seconds from a version's arrival until the learner needs the first groups that only it admits."""
        return (load.staleness + 1 - kappa) * load.train_s - load.broadcast_s


OVERLAP, VISIBLE = Overlap(), Visible()


def staleness_bound(load: PoolLoad, kappa: int) -> int:
    """Return the staleness bound of `Overlap`, for any pool that meets μ_min."""
    return kappa + _ceil((1 - 1 / kappa) * load.steps_per_broadcast)


def least_staleness(load: PoolLoad, kappa: int = 1) -> int:
    """Return the smallest S at which publishing every `kappa` updates costs the learner no time, by `Visible`."""
    steps = load.steps_per_broadcast + max(1.0, load.steps_per_rollout) * (1 - ROUNDING)  # as `Visible.holds` rounds
    return kappa - 1 + math.ceil(steps)


def _worth_s(load: PoolLoad, rate: float) -> float:
    """Return x: how long the pool takes for the rollouts of one update."""
    if rate > 0:
        return load.rollouts_per_update / rate
    return math.inf if load.rollouts_per_update else 0.0


def _ceil(value: float) -> int:
    return math.ceil(value - ROUNDING)
