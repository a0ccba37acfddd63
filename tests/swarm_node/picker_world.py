"""A picker with a few sources of each kind, and what it has asked of them."""

from random import Random

from protocol.ids import ChunkId
from protocol.policy.chunks import chunk_id
from swarm_node.picker.picker import Ask, Picker, TakeBack
from swarm_node.picker.sources import ORIGIN, ChunkSource, PickerRules, PlanPace

PEER_A, PEER_C = ChunkSource("a-peer", "peer", (0,)), ChunkSource("c-peer", "peer", (1,))
SEEDER, HTTP = ChunkSource("seeder", "seeder", (2,)), ChunkSource(ORIGIN, "origin")
CHUNKS = [chunk_id(bytes([number])) for number in range(12)]
RULES = PickerRules()
STRIPES = 3


def picker_for(
    *sources: ChunkSource,
    chunks: list[ChunkId] = CHUNKS,
    rules: PickerRules = RULES,
    pace: PlanPace | None = None,
    blames: dict[str, int] | None = None,
) -> Picker:
    return Picker(
        chunks, chunks, sources, stripes=STRIPES, rng=Random(1), now=0.0, rules=rules, pace=pace, blames=blames
    )


def asked_of(orders: list[Ask | TakeBack], source: ChunkSource) -> list[ChunkId]:
    return [order.chunk for order in orders if isinstance(order, Ask) and order.source == source.name]


def taken_back_from(orders: list[Ask | TakeBack], source: ChunkSource) -> list[ChunkId]:
    return [order.chunk for order in orders if isinstance(order, TakeBack) and order.source == source.name]
