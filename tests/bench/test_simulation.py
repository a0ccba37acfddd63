"""The simulated swarm: everybody finishes, near the bound, and the same seed gives the same run."""

import math
import os
import subprocess
import sys
from dataclasses import replace

import pytest

from bench.simulation.links import Links
from bench.simulation.swarms import LINK_BYTES_PER_S, swarm
from bench.simulation.world import TICK, Outcome, Simulation
from coordinator.rules import topology
from coordinator.rules.topology import NodeLinks, fluid_bound_s
from protocol.limits import KIB

CHUNKS, CHUNK_BYTES = 128, 128 * KIB
CHUNK_S = CHUNK_BYTES / LINK_BYTES_PER_S


def run(
    nodes: list[NodeLinks], *, seed: int = 1, killed: str | None = None, latency_s: float = 0.0, tick: float = TICK
) -> Outcome:
    world = Simulation(
        3 * LINK_BYTES_PER_S,
        nodes,
        chunks=CHUNKS,
        chunk_bytes=CHUNK_BYTES,
        seed=seed,
        latency_s=latency_s,
        tick=tick,
    )
    if killed is not None:
        world.kill(killed)
    return world.run(limit_s=200)


def test_everybody_finishes_near_the_bound() -> None:
    nodes = swarm(8, "uniform")
    outcome = run(nodes)
    assert outcome.done_s.keys() == {node.name for node in nodes}
    bound_s = fluid_bound_s(CHUNKS * CHUNK_BYTES, 3 * LINK_BYTES_PER_S, nodes)
    assert bound_s <= outcome.completion_s <= 1.25 * bound_s


def test_the_same_seed_is_the_same_run_whatever_the_order_of_sets() -> None:
    play = "from tests.bench.test_simulation import run, swarm; print(run(swarm(8, 'mixed'), latency_s=0.02))"
    played = [
        subprocess.run(
            [sys.executable, "-P", "-c", play],
            env={**os.environ, "PYTHONHASHSEED": hash_seed},
            check=True,
            capture_output=True,
            text=True,
        ).stdout
        for hash_seed in ("1", "2")
    ]
    assert played[0] == played[1] != ""


def test_a_node_that_dies_costs_the_others_little() -> None:
    nodes = swarm(8, "uniform")
    outcome = run(nodes, killed=nodes[0].name)
    assert outcome.done_s.keys() == {node.name for node in nodes[1:]}
    assert outcome.completion_s <= 1.3 * run(nodes).completion_s


@pytest.mark.parametrize("share", [0.0, 0.5, 0.9])
def test_a_node_that_falls_silent_in_mid_broadcast_costs_the_others_seconds_not_the_version(share: float) -> None:
    nodes, chunk_bytes = swarm(8, "uniform"), 1024 * KIB
    world = Simulation(3 * LINK_BYTES_PER_S, nodes, chunks=CHUNKS, chunk_bytes=chunk_bytes, seed=1, latency_s=0.05)
    bound_s = fluid_bound_s(CHUNKS * chunk_bytes, 3 * LINK_BYTES_PER_S, nodes)
    world.run(limit_s=share * bound_s)
    world.freeze(nodes[0].name)
    outcome = world.run(limit_s=1000)
    assert outcome.done_s.keys() == {node.name for node in nodes[1:]}
    without_s = fluid_bound_s(CHUNKS * chunk_bytes, 3 * LINK_BYTES_PER_S, nodes[1:])
    assert outcome.completion_s <= 1.1 * max(bound_s, without_s) + 5


@pytest.mark.parametrize("count", [1, 2])
def test_the_smallest_swarms_finish_too(count: int) -> None:
    assert len(run(swarm(count, "mixed")).done_s) == count


def test_a_coarser_tick_tells_nearly_the_same() -> None:
    nodes = swarm(8, "uniform")
    fine, coarse = run(nodes, tick=1 / 16), run(nodes, tick=1 / 2)
    assert coarse.completion_s == pytest.approx(fine.completion_s, rel=0.05)
    assert coarse.decisions < fine.decisions


def test_a_node_decides_at_most_once_per_tick() -> None:
    nodes = swarm(8, "uniform")
    outcome = run(nodes, tick=1 / 2)
    assert outcome.decisions <= len(nodes) * math.ceil(outcome.completion_s / (CHUNK_S / 2))


def test_frames_that_travel_longer_make_the_broadcast_longer() -> None:
    nodes = swarm(5, "uniform")
    assert run(nodes, latency_s=0.3).completion_s > run(nodes).completion_s + 0.3


@pytest.mark.parametrize("links", ["uniform", "mixed"])
def test_queues_on_the_way_do_not_leave_wide_links_idle(links: str) -> None:
    """A WANT takes as long as several chunks; with two of them open, the mixed swarm takes three times the bound."""
    nodes, source_up = swarm(4, links), 8 * LINK_BYTES_PER_S
    world = Simulation(source_up, nodes, chunks=512, chunk_bytes=64 * KIB, seed=1, latency_s=0.05, tick=1 / 2)
    bound_s = fluid_bound_s(512 * 64 * KIB, source_up, nodes)
    assert world.run(limit_s=200).completion_s <= 1.25 * bound_s


def test_a_source_that_is_wider_than_the_plan_believes_is_used_all_the_same() -> None:
    nodes, source_up = swarm(8, "mixed"), 8 * LINK_BYTES_PER_S
    believed = [replace(node, up=0.8 * node.up) for node in nodes]
    world = Simulation(
        source_up,
        nodes,
        plan=topology.plan(0.45 * source_up, believed),
        chunks=512,
        chunk_bytes=64 * KIB,
        seed=1,
        tick=1 / 2,
    )
    assert world.run(limit_s=200).completion_s <= 1.2 * fluid_bound_s(512 * 64 * KIB, source_up, nodes)


@pytest.mark.parametrize(("count", "at_most"), [(4, 1.16), (8, 1.1)])
def test_unequal_nodes_that_the_planner_takes_for_equal_are_near_the_bound(count: int, at_most: float) -> None:
    """1.26 and 1.22 while all asked the source for the same, and links were shared equally to the end."""
    nodes, source_up = swarm(count, "mixed"), 3 * LINK_BYTES_PER_S
    world = Simulation(
        source_up,
        nodes,
        plan=topology.plan(source_up, [replace(node, up=LINK_BYTES_PER_S) for node in nodes]),
        chunks=512,
        chunk_bytes=64 * KIB,
        seed=1,
        latency_s=0.025,
        tick=1 / 2,
    )
    assert world.run(limit_s=200).completion_s <= at_most * fluid_bound_s(512 * 64 * KIB, source_up, nodes)


def test_streams_share_a_link_and_one_that_is_slow_elsewhere_leaves_its_share_to_the_other() -> None:
    links = Links([100.0, 1.0, 1.0], [1.0, 80.0, 10.0], [(0, 1), (0, 2)])
    links.begin(0, 80.0)
    links.begin(1, 10.0)
    assert links.flow(0.5) == []
    assert sorted(stream for stream, _ in links.flow(0.51)) == [0, 1]


def test_what_a_stream_could_have_sent_beyond_its_chunk_is_told() -> None:
    links = Links([10.0, 1.0], [1.0, 10.0], [(0, 1)])
    links.begin(0, 15.0)
    assert links.flow(1.0) == []
    [(stream, beyond_bytes)] = links.flow(1.0)
    assert stream == 0
    assert beyond_bytes == pytest.approx(5.0)
    assert links.flow(1.0) == []
