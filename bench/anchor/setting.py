"""The measured and simulated setting: six unequal machines behind slow links, a waiting learner, two admissions.

- The machines are those that the simulator itself would draw; the real nodes then take their speeds, links and prices.
- Times are long against what two busy cores add: seconds of sleep, not of computing.
- `visible` loses time, since S = 1 is small for broadcasts that take longer than an update; `buffer` loses groups.
"""

from dataclasses import dataclass, replace
from pathlib import Path
from random import Random

from bench.broadcast.cells import MBIT, PAYLOAD_SHARE, Link
from bench.broadcast.contender import SOURCE
from coordinator.config import Config, parse
from coordinator.sim.machines import SimulatedNode, make_node
from coordinator.sim.scenario import Admission, Links, Scenario, SimulatedPool, around, scenario_of

MACHINES = 4
"""The seed of the pool."""

NODES, AT_ONCE = 6, 2
TRAIN_S = 11.0
"""Seconds of the learner's sleep; what it adds by saving and publishing is measured."""

BYTE_BITS = 8

ADMISSIONS: tuple[Admission, ...] = ("visible", "buffer")

POOL = SimulatedPool(
    nodes=NODES,
    group_s=9.0,
    at_once=AT_ONCE,
    speed_spread=0.3,
    length_spread=0.3,
    price_per_hour=0.35,
    price_spread=0.3,
)

LINKS = Links(size_mb=4.4, source_mbit=6.0, node_mbit=6.0, node_up_mbit=3.0, spread=0.2)


@dataclass(frozen=True)
class Case:
    """A round: the admission of groups, and the number of updates."""

    admission: Admission
    updates: int

    def settings(self, folder: Path, policy: Path, address: str) -> dict[str, dict[str, object]]:
        """The operator's file."""
        return {
            "round": {
                "directory": str(folder),
                "listen": f"{address}:8700",
                "seeder": f"{address}:8701",
                "max_updates": self.updates,
            },
            "model": {"path": str(policy)},
            "sampling": {"samples_per_group": 4, "max_new_tokens": 4},
            "staleness": {"max_updates": 1, "publish_every": 1, "admission": self.admission},
            "learner": {"groups_per_update": 12, "learning_rate": 1e-5, "warmup_updates": 0},
            "leases": {"groups_per_request": AT_ONCE, "timeout_s": 120.0},
            "publish": {"patches": False},
            "audit": {"first_groups": 0, "floor": 0.0, "trusted_floor": 0.0, "max_owner_share": 1.0},
        }

    def config(self) -> Config:
        return parse(self.settings(Path("round"), Path("policy"), "127.0.0.1"))

    def scenario(self) -> Scenario:
        """Return the simulator's scenario, fixed before any measurement."""
        return scenario_of(self.config(), POOL, updates=self.updates, train_s=TRAIN_S, links=payload(LINKS))


def payload(links: Links) -> Links:
    """Return the share of the capped links that carries bytes of a version."""
    shares = {name: PAYLOAD_SHARE * getattr(links, name) for name in ("source_mbit", "node_mbit", "node_up_mbit")}
    return replace(links, **shares)


def machines(answer_s: float = 0.0) -> list[SimulatedNode]:
    """New each time, since playing a round changes them; always the same ones, with this added to each group."""
    chance = Random(MACHINES)
    scenario = replace(Scenario(), pool=POOL, links=payload(LINKS))
    drawn = [make_node(number, scenario, chance) for number in range(NODES)]
    for node in drawn:
        node.rate = node.hands / (group_s(node) + answer_s)
    return drawn


def group_s(node: SimulatedNode) -> float:
    """Return the seconds that a machine needs for a group of mean length."""
    return node.hands / node.rate


def paced_s(seed: int, mean_s: float) -> float:
    """Return the seconds of the paced engine for the group of a lease with this seed."""
    return around(Random(seed), mean_s, POOL.length_spread)


def links() -> dict[str, Link]:
    """The parties of the real swarm, as namespaces cap them."""
    source = Link(LINKS.source_mbit * MBIT, LINKS.source_mbit * MBIT)
    bits = BYTE_BITS / PAYLOAD_SHARE
    nodes = {node.name: Link(bits * node.links.up, bits * node.links.down) for node in machines()}
    return {SOURCE: source, **nodes}
