"""The paper's setting: what it states, and what its tables imply where it is silent.

- Stated: S = 3, prices, times of an update and of a broadcast, 128 prompts of 16 samples.
- Implied by Table 2: κ = 2; what nine and ten machines give (from the waits), what they cost (from the costs per step).
"""

from coordinator.rules.capacity import PoolLoad
from coordinator.rules.fleet_choice import FleetCandidate

HOUR_S = 3600.0
ROLLOUTS = 128 * 16
STALENESS = 3
GAMMA = 1.1

TRAIN_S = 1631.2
"""Seconds of one update, at S = 3."""

BROADCAST_S = 1437.0
MODEL_MB = 16_380.0
"""8.19 billion parameters in bf16."""

LOAD_S = BROADCAST_S - 8 * MODEL_MB / 100
"""The rest of T_bcast when the bytes have passed a link of 100 Mbit/s."""

LEARNER_PER_HOUR = 4 * 3.06
CENTRAL_PER_HOUR = 8 * 3.06
WORKER_PER_HOUR = 0.35

WORKER_RATE = 2.618 / 9
"""Rollouts a second of a machine, from the wait of nine without peers."""

_CHEAP = [FleetCandidate(f"cheap-{number}", WORKER_RATE, (0.5858 + 0.01 * number) / HOUR_S) for number in range(9)]
_TENTH = [FleetCandidate("tenth", 0.160, 0.695 / HOUR_S)]
_DEAR = [FleetCandidate(f"dear-{number}", WORKER_RATE, (1.2666 + 0.01 * number) / HOUR_S) for number in range(8)]

MACHINES = [*_CHEAP, *_TENTH, *_DEAR]
"""The pool of mixed prices."""


def load(broadcast_s: float = BROADCAST_S, staleness: int = STALENESS, train_s: float = TRAIN_S) -> PoolLoad:
    """The capacity model's view, in rollouts."""
    return PoolLoad(staleness, ROLLOUTS, train_s, broadcast_s)
