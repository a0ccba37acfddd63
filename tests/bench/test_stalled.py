"""A worker that stops in mid-broadcast costs the others next to nothing; who is far away or busy is not taken for one.

- Virtual time, the shipped planner and picker, the cells of `bench-broadcast`.
"""

from collections.abc import Iterator
from dataclasses import replace
from random import Random

import pytest

from bench.broadcast import paper
from bench.broadcast.cells import MIB, Cell, parse
from bench.simulation.world import Outcome, Simulation
from protocol.policy.chunks import fitting_size
from swarm_node.picker.sources import PickerRules

DISTURBED_MAX = 1.3
SMALL_MAX = 1.45
"""The bound with 4 MiB, where it stops before some got anything from it, or when the rest takes less than a silence."""

RULES = (PickerRules(), replace(PickerRules(), silence_s=1e9))
"""The usual ones, and those of a node to which silence means nothing."""

SEEDS = 3
HALTED_S, BETWEEN_S = (0.5, 2.0), (0.2, 1.0)


def cell_of(name: str, mib: int) -> Cell:
    return parse(name, worker_mbit_s=20.0, size_bytes=mib * MIB).within(80.0)


def others_done_s(cell: Cell, seed: int, stopped_at: float | None = None) -> float:
    """Return when all but the last worker have everything, if that one stops at a share of the bound."""
    world, victim = paper.world(cell, seed=seed), f"w{cell.workers}"
    if stopped_at is not None:
        world.run(limit_s=stopped_at * cell.bound_s)
        world.freeze(victim)
    outcome = world.run(limit_s=20 * cell.bound_s)
    done_s = [at_s for name, at_s in outcome.done_s.items() if name != victim]
    assert len(done_s) == cell.workers - 1
    return max(done_s)


@pytest.mark.parametrize("stopped_at", [0.2, 0.4, 0.8])
@pytest.mark.parametrize("mib", [4, 16])
@pytest.mark.parametrize("name", ["4:3:uniform", "8:3:uniform"])
def test_a_stalled_parent_costs_the_others_little_whatever_the_size(name: str, mib: int, stopped_at: float) -> None:
    cell = cell_of(name, mib)
    at_most = SMALL_MAX if mib == 4 and stopped_at != 0.4 else DISTURBED_MAX
    for seed in range(2):
        assert others_done_s(cell, seed, stopped_at) <= at_most * others_done_s(cell, seed)


def halts(seed: int, workers: int) -> Iterator[tuple[float, str, float]]:
    """Yield when which worker halts, and for how long: always somebody or other."""
    chance, at_s = Random(seed), 0.0
    while True:
        at_s += chance.uniform(*BETWEEN_S)
        yield at_s, f"w{chance.randint(1, workers)}", chance.uniform(*HALTED_S)


def played_by_halting(world: Simulation, cell: Cell, seed: int) -> Outcome:
    for at_s, name, seconds in halts(seed, cell.workers):
        outcome = world.run(limit_s=at_s)
        if len(outcome.done_s) == cell.workers:
            return outcome
        world.halt(name, seconds)
    raise AssertionError("halts never end")


@pytest.mark.parametrize(("latency_s", "jitter_s"), [(0.025, 0.0), (0.2, 0.0), (0.2, 0.2)])
@pytest.mark.parametrize("mib", [4, 16])
def test_nobody_loses_its_turn_for_a_long_link(mib: int, latency_s: float, jitter_s: float) -> None:
    """Compared with nodes to which silence means nothing, hardly a chunk is asked for again, or comes twice."""
    cell = cell_of("4:3:uniform", mib)
    needless = twice = chunks = 0.0
    for seed in range(SEEDS):
        outcome, deaf = (
            paper.world(cell, seed=seed, latency_s=latency_s, jitter_s=jitter_s, rules=rules).run() for rules in RULES
        )
        needless += outcome.asked_again - deaf.asked_again
        twice += (outcome.duplicate_bytes - deaf.duplicate_bytes) / fitting_size(cell.size_bytes)
        chunks += cell.workers * cell.size_bytes / fitting_size(cell.size_bytes)
    assert needless <= 0.01 * chunks
    assert twice <= 0.005 * chunks


@pytest.mark.parametrize(("latency_s", "jitter_s"), [(0.025, 0.0), (0.2, 0.1)])
def test_on_busy_machines_little_comes_twice_and_nobody_is_done_later(latency_s: float, jitter_s: float) -> None:
    """Processes halt in turns, for half a second to two; what arrives meanwhile comes in one lump afterwards."""
    cell = cell_of("4:3:uniform", 16)
    took_s = took_if_deaf_s = twice_bytes = 0.0
    for seed in range(SEEDS):
        outcome, deaf = (
            played_by_halting(
                paper.world(cell, seed=seed, latency_s=latency_s, jitter_s=jitter_s, rules=rules), cell, seed
            )
            for rules in RULES
        )
        took_s, took_if_deaf_s = took_s + outcome.completion_s, took_if_deaf_s + deaf.completion_s
        twice_bytes += outcome.duplicate_bytes
    assert took_s <= 1.05 * took_if_deaf_s
    assert twice_bytes <= 0.01 * SEEDS * cell.workers * cell.size_bytes
