"""The answer to what this machine can run, the same of `join`, `rounds`, `--best` and `doctor`.

- The engine is chosen first: it decides whether cards count or the memory of the machine, and whether cards are joined.
- With a round's description, `precision.choose_precision` decides by `memory`: engine, precision and number of cards.
- By the size of the weights alone, as a list of rounds has it, `why_too_large` can only say what surely does not fit.
- No I/O: the readings are arguments.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from protocol.errors import ConfigInvalid
from protocol.limits import GB
from swarm_node.engine.cards import free_bytes, free_on_joined, select_cards
from swarm_node.engine.choose import EngineOptions, HostMachine, choose
from swarm_node.engine.precision import Memory, device_of, part_bytes
from swarm_node.machine.gpu import GpuProbe


class Capacity(NamedTuple):
    """The engine of this machine, and the memory that it may use."""

    memory: Memory
    seen: GpuProbe = GpuProbe()
    """The cards to use; none if the engine computes on the CPU."""
    joins_cards: bool = False
    """True if several cards may hold one model together."""
    on_card: bool = False
    """True if the engine computes on a graphics card, also if nothing is known about it."""
    refused: str = ""
    """The reason why no engine can run here; empty if one can."""

    def why_too_large(self, weights_bytes: int) -> str:
        """Return why a model with weights of this size cannot be sampled here; empty if it may, or if nothing is known.

        Joined cards count for any model: only its configuration says over how many it can be split.
        """
        if self.refused:
            return self.refused
        free, need = self.memory.card if self.on_card else self.memory.processor, part_bytes(weights_bytes)
        joined = [(cards, each) for cards, each in self.memory.joined.items() if self.joins_cards and each is not None]
        parts = any(part_bytes(weights_bytes, cards) <= each for cards, each in joined)
        if not weights_bytes or free is None or need <= free or parts:
            return ""
        where = "GPU memory" if self.on_card else "memory"
        most = max((cards * each for cards, each in joined), default=0)
        together = f", {most / GB:.1f} GB on joined cards" if most else ""
        return f"its model needs about {need / GB:.1f} GB, and {free / GB:.1f} GB of {where} are free{together}"


class HostReadings(NamedTuple):
    """The readings of a machine from which its capacity follows."""

    machine: HostMachine
    probe: GpuProbe
    free_processor: int | None
    """Free bytes of the machine's memory, if known."""
    environment: Mapping[str, str]


def measure(wanted: str, options: EngineOptions, readings: HostReadings, cards: Sequence[int] = ()) -> Capacity:
    """Return the capacity for an engine; raise an error if none can run here."""
    machine, probe, free_processor, environment = readings
    engine = choose(wanted, options, machine).name
    on_card = device_of(engine, options, machine) != "cpu"
    seen = select_cards(probe if on_card else GpuProbe(), cards, environment, on_card=on_card)
    share = options.vram_share
    memory = Memory(free_bytes(seen, vram_share=share), free_processor, free_on_joined(seen, vram_share=share))
    return Capacity(memory, seen, engine == "vllm" and on_card and options.cards_per_engine != 1, on_card)


def measure_or_explain(
    wanted: str, options: EngineOptions, readings: HostReadings, cards: Sequence[int] = ()
) -> Capacity:
    """Return the capacity, or one that says why no engine can run here."""
    try:
        return measure(wanted, options, readings, cards)
    except ConfigInvalid as error:
        return Capacity(Memory(None, readings.free_processor), refused=error.message.rstrip("."))
