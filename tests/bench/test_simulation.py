"""The simulated swarm: everybody finishes, near the bound, and the same seed gives the same run."""

import pytest

from bench.simulation import Outcome, Simulation, swarm
from coordinator.topology import NodeLinks, fluid_bound_s
from protocol.limits import KIB

CHUNKS, CHUNK_BYTES, LINK = 128, 128 * KIB, 2.5e6


def run(nodes: list[NodeLinks], *, seed: int = 1, killed: str | None = None) -> Outcome:
    world = Simulation(3 * LINK, nodes, chunks=CHUNKS, chunk_bytes=CHUNK_BYTES, seed=seed)
    if killed is not None:
        world.kill(killed)
    return world.run(limit_s=200)


def test_everybody_finishes_near_the_bound() -> None:
    nodes = swarm(8, "uniform")
    outcome = run(nodes)
    assert outcome.done_s.keys() == {node.name for node in nodes}
    bound_s = fluid_bound_s(CHUNKS * CHUNK_BYTES, 3 * LINK, nodes)
    assert bound_s <= outcome.completion_s <= 1.25 * bound_s


def test_the_same_seed_is_the_same_run() -> None:
    assert run(swarm(5, "mixed"), seed=4) == run(swarm(5, "mixed"), seed=4)


def test_a_node_that_dies_costs_the_others_little() -> None:
    nodes = swarm(8, "uniform")
    outcome = run(nodes, killed=nodes[0].name)
    assert outcome.done_s.keys() == {node.name for node in nodes[1:]}
    assert outcome.completion_s <= 1.3 * run(nodes).completion_s


@pytest.mark.parametrize("count", [1, 2])
def test_the_smallest_swarms_finish_too(count: int) -> None:
    assert len(run(swarm(count, "mixed")).done_s) == count
