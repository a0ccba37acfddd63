"""How much throughput keeps the learner busy, for a staleness bound S and an interval κ between publications; pure.

R rollouts make an update, which takes T seconds (`train_s`); a version takes T_b seconds (`broadcast_s`) from
publication until it is sampled from; one rollout takes ℓ seconds (`rollout_s`); the pool gives μ accepted rollouts a
second, so x = R/μ seconds for one update's worth. P is the time from one publication to the next, κT at best, and the
learner's bubble ratio is 1 - κT/P.

- `Overlap` is ECHO-2's own rule. Nodes sample only while no version is under way:

      P = max(κT, T_b + κx)            μ_min = κR / (κT - T_b), none if κT ≤ T_b
      Δ ≤ κ + ⌈(T_b + x)/T⌉ - 1,       which with the overlap condition is κ + ⌈(1 - 1/κ)·T_b/T⌉

- `Visible` is ours: nodes sample on while a version comes, and admission (`coordinator.rules.lease_allowance`) stops
  them short of what would be too old. So Δ ≤ S always, and what may cost time is the loop: a version is published,
  comes to the nodes, the first groups that only it admits are sampled, and the learner goes on from them to a later
  publication. It has m = S + 1 - κ updates to work on meanwhile, and meets q = ⌊m/κ⌋ + 1 publications. With x' = max(x,
  ℓ) the longest of four loops decides:

      P = max(κT, κx, κT + (T_b + x' - mT)/q, κx + (T_b + x' - x + T - mx)/q)
      μ_min = R / min(T, mT - T_b),    none if mT - T_b < ℓ or is not positive

- S = 0, κ = 1 gives P = T + T_b + x: one after the other, as the synchronous loop.
- κ is the largest whose promise holds: of `Overlap` that Δ ≤ S; of `Visible` that μ_min is the least there is, R/T.
"""

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass

ROUNDING = 1e-9
"""Quotients this close to a whole number are meant to be one."""


@dataclass(frozen=True)
class PoolLoad:
    """What a round asks of its pool."""

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
        """r = T_b/T."""
        return self.broadcast_s / self.train_s

    @property
    def steps_per_rollout(self) -> float:
        """How many updates the learner makes while one rollout is sampled."""
        return self.rollout_s / self.train_s


class AdmissionRule(ABC):
    """How sampling is admitted, and what follows from it for a load."""

    @abstractmethod
    def period_s(self, load: PoolLoad, kappa: int, rate: float) -> float:
        """P: seconds from one publication to the next, when the pool gives `rate` rollouts a second."""

    @abstractmethod
    def min_rate(self, load: PoolLoad, kappa: int) -> float:
        """μ_min: the least throughput at which the learner never waits; infinite if none is enough."""

    @abstractmethod
    def holds(self, load: PoolLoad, kappa: int) -> bool:
        """Whether publishing every `kappa` updates keeps the rule's promise."""

    def bubble(self, load: PoolLoad, kappa: int, rate: float) -> float:
        """The share of its time that the learner waits."""
        return 1.0 - kappa * load.train_s / self.period_s(load, kappa, rate)

    def kappa(self, load: PoolLoad) -> int:
        """The largest interval whose promise holds; 1 if none does, which then costs the least."""
        return next((kappa for kappa in range(load.staleness + 1, 1, -1) if self.holds(load, kappa)), 1)


class Overlap(AdmissionRule):
    """ECHO-2's rule: a broadcast and the sampling of κ updates' worth fit into the κ updates before."""

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
        """From a version's arrival until the learner needs the first groups that only this version admits."""
        return (load.staleness + 1 - kappa) * load.train_s - load.broadcast_s


OVERLAP, VISIBLE = Overlap(), Visible()


def staleness_bound(load: PoolLoad, kappa: int, rate: float | None = None) -> int:
    """How old what `Overlap` trains on can be: with a pool of that throughput, or with any that meets μ_min."""
    steps = load.steps_per_broadcast
    if rate is None:
        return kappa + _ceil((1 - 1 / kappa) * steps)
    return kappa + _ceil(steps + _worth_s(load, rate) / load.train_s) - 1


def least_staleness(load: PoolLoad, kappa: int = 1) -> int:
    """The smallest S at which publishing every `kappa` updates costs the learner nothing, by `Visible`."""
    steps = load.steps_per_broadcast + max(1.0, load.steps_per_rollout) * (1 - ROUNDING)  # as `Visible.holds` rounds
    return kappa - 1 + math.ceil(steps)


def _worth_s(load: PoolLoad, rate: float) -> float:
    """x: how long the pool takes for one update's rollouts."""
    if rate > 0:
        return load.rollouts_per_update / rate
    return math.inf if load.rollouts_per_update else 0.0


def _ceil(value: float) -> int:
    return math.ceil(value - ROUNDING)
