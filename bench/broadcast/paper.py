"""A cell on paper: the shipped planner and picker in virtual time, over what TCP leaves of the links."""

from bench.broadcast.cells import PAYLOAD_SHARE, Cell
from bench.broadcast.net import QUEUE_MS
from bench.simulation.world import Simulation
from coordinator.rules.topology import NodeLinks
from protocol.policy import chunks
from swarm_node.picker.sources import PickerRules

TICK = 0.5
"""The tick as a share of a chunk's time on a downlink: comes out as finer ones do, in seconds instead of minutes."""

AGREES_WITHIN = 0.15


def completion_s(cell: Cell, seed: int = 0) -> float:
    """Return the time at which the last worker has everything, with links known to the planner and free processors."""
    return world(cell, seed=seed).run().completion_s


def world(
    cell: Cell,
    *,
    seed: int,
    latency_s: float = QUEUE_MS / 2000,  # queues are half full on average
    jitter_s: float = 0.0,
    rules: PickerRules | None = None,
) -> Simulation:
    """The workers of a cell, named as in a real lap, before anything was sent."""
    chunk_bytes = chunks.fitting_size(cell.size_bytes)
    share = PAYLOAD_SHARE / 8
    nodes = [
        NodeLinks(
            f"w{number}",
            share * link.up_bit_s,
            share * link.down_bit_s,
            dialable=not cell.is_behind_nat(number),
            punchable=cell.is_behind_nat(number),
        )
        for number, link in enumerate(cell.worker_links, 1)
    ]
    return Simulation(
        share * cell.source_link.up_bit_s,
        nodes,
        chunks=-(-cell.size_bytes // chunk_bytes),
        chunk_bytes=chunk_bytes,
        latency_s=latency_s,
        jitter_s=jitter_s,
        tick=TICK,
        seed=seed,
        rules=rules,
    )
