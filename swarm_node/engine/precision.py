"""Choice of the engine and the precision for a round's model on this machine, before the node registers.

- The published description of the model gives its size and the engines that support it; the weights are not needed. An
  engine child reads its config.json (`child`), not the agent.
- An engine computes in the first of its precisions that the round admits and that fits into memory. If the free memory
  or the model's size is unknown, nothing is refused.
- vLLM joins cards if no precision fits on one: the fewest that hold the model, unless the owner set their number.
- An engine or precision that the owner set is used as it is, or refused with the figures.
- No I/O, except `describe_model` and the checks of `choose`.
"""

import json
import logging
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from protocol.errors import ConfigInvalid, EngineFailed
from protocol.limits import GB
from protocol.work.lease import EXACT, is_exact
from swarm_node.engine.choose import AUTO, ENGINES, NONE_HERE, EngineOptions, HostMachine, choose
from swarm_node.engine.vllm.command import INSTALL, JOINED

log = logging.getLogger(__name__)


DESCRIBED_S = 60.0
"""Time-out of a child that imports numpy and reads a few kilobytes."""

OVERHEAD_BYTES = 512 * 1024 * 1024
"""Memory of CUDA itself and a cache for a few samples; on the CPU, torch and a cache."""

JOINED_BYTES = 512 * 1024 * 1024
"""Memory of each joined card for the buffers of NCCL, through which the cards exchange their parts."""

ROOM = 1.25
"""Factor for weights plus the key-value cache of a node's batch; with less memory it samples fewer at once."""

BYTES = {"float32": 4.0, "exact": 4.0, "float16": 2.0, "bfloat16": 2.0, "q8_0": 34 / 32, "fp8": 1.25}
"""Bytes of one parameter; in fp8, embeddings and output layer stay in bf16: a seventh to a quarter of a small model."""

SHORT = {"float32": "fp32", "exact": "fp32", "float16": "fp16", "bfloat16": "bf16", "q8_0": "q8_0", "fp8": "fp8"}
"""Names of precisions in classes of numerics."""


NONE_FOR_MODEL = "No engine on this machine can run this round's model."
HINT = (
    "Join a round with another model, free memory, or choose another `--engine`; `swarm-node doctor` shows what works."
)


class Model(NamedTuple):
    """Published description of a round's model."""

    weights_bytes: int
    dtype: str = "float32"
    """Precision of the published weights."""
    refused: Mapping[str, str] = {}
    """Engines that do not support its architecture, with the reason."""
    halved: tuple[str, ...] = ()
    """Engines that compute a part of it in float16 when its weights are float32."""
    splits: tuple[int, ...] = ()
    """Numbers of cards over which vLLM can split it."""

    @property
    def parameters(self) -> int:
        """Return the number of parameters."""
        return int(self.weights_bytes / BYTES[self.dtype])


def describe_model(weights_bytes: int, config: bytes | None) -> Model:
    """Return the engine child's description of a config.json; the size alone if there is none."""
    if config is None:
        return Model(weights_bytes)
    command = [str(Path(sys.executable).with_name("swarm-node")), "engine", "--describe"]
    try:
        done = subprocess.run(  # in a process group of its own, which Ctrl-C at the terminal does not reach
            command, input=config, capture_output=True, timeout=DESCRIBED_S, check=True, process_group=0
        )
        description = json.loads(done.stdout)
        refused = {name: _shown(description["refused"][name]) for name in ENGINES if name in description["refused"]}
        dtype = description["dtype"] if description["dtype"] in BYTES else "float32"
        halved = tuple(name for name in ENGINES if name in description["halved"])
        return Model(weights_bytes, dtype, refused, halved, tuple(n for n in JOINED if n in description["splits"]))
    except (OSError, subprocess.SubprocessError, ValueError, LookupError, TypeError) as error:
        log.info("the model's configuration cannot be described: %s", _shown(str(error)))
        return Model(weights_bytes)


def _shown(text: str) -> str:
    """Return a text from an untrusted source, safe to print on a terminal."""
    return "".join(letter if letter.isprintable() else "?" for letter in text[:300])


class Memory(NamedTuple):
    """Free memory in bytes; None if unknown."""

    card: int | None
    """Free memory of the graphics card that has the most."""
    processor: int | None
    joined: Mapping[int, int | None] = {}
    """Free memory of each card of an engine, by the number of its joined cards."""


class Chosen(NamedTuple):
    """The chosen engine and precision, with one line about them."""

    engine: str
    dtype: str
    """`auto` if the engine chooses it by itself and has no option for it."""
    line: str
    unfit: Mapping[str, str] = {}
    """Preferred engines that cannot be used, with the reason."""
    device: str = "cpu"
    need_bytes: int = 0
    """Memory of the device for sampling the model; 0 if the owner put a part of the layers on the card."""
    cards: int = 1
    """Cards of one engine, of which each needs `need_bytes`."""
    cards_line: str = ""
    """A sentence about the number of cards; empty if no cards could be joined."""


def needed_bytes(parameters: int, dtype: str, cards: int = 1) -> int:
    """Return the memory for sampling a model with `parameters` parameters, on each of the cards that share it."""
    return part_bytes(parameters * BYTES[dtype], cards)


def part_bytes(weights_bytes: float, cards: int = 1) -> int:
    """Return the memory for sampling with weights of this size, on each of the cards that share them."""
    return int(weights_bytes * ROOM / cards) + OVERHEAD_BYTES + JOINED_BYTES * (cards > 1)


def choose_precision(
    wanted: str, options: EngineOptions, machine: HostMachine, model: Model, memory: Memory, classes: Sequence[str] = ()
) -> Chosen:
    """Return the engine and the precision for a model; raise an error with the figures if none fits."""
    unfit: dict[str, str] = {}
    while True:
        try:
            choice = choose(wanted, options, machine, unfit)
        except ConfigInvalid as error:
            if not unfit:
                raise
            hint = HINT if "vllm" in unfit else _hint_to_join(model, memory) or HINT
            raise EngineFailed(error.message.replace(NONE_HERE, NONE_FOR_MODEL), hint=hint) from None
        if reason := model.refused.get(choice.name):
            unfit[choice.name] = reason
            continue
        result = _fitting(choice.name, options, machine, model, memory, classes)
        if isinstance(result, Chosen):
            dtype = result.dtype if result.dtype in ENGINES[choice.name].dtypes else AUTO
            return result._replace(dtype=dtype, unfit=unfit)
        unfit[choice.name] = result


def _fitting(
    engine: str, options: EngineOptions, machine: HostMachine, model: Model, memory: Memory, classes: Sequence[str]
) -> Chosen | str:
    """Return the first precision that the round admits and that fits, or the reason why there is none."""
    device = device_of(engine, options, machine)
    tried = [options.dtype] if options.dtype != AUTO else _precisions(engine, device, model.dtype)
    computed = {dtype: f"{engine}/{_short(engine, dtype, model)}/{device}" for dtype in tried}
    admitted = [dtype for dtype, numerics in computed.items() if not classes or _admits(classes, dtype, numerics)]
    if not admitted:
        return f"the round admits {', '.join(classes)}, and this machine computes {', '.join(computed.values())}"
    where = "memory" if device == "cpu" else "memory of the graphics card"
    counts = _card_counts(engine, device, options, model, memory)
    if isinstance(counts, str):
        return counts
    cards, free = 1, memory.card
    for cards in counts:
        free = memory.processor if device == "cpu" else memory.card if cards == 1 else memory.joined[cards]
        each = where if cards == 1 else f"memory of each of {cards} cards"
        for dtype in admitted:
            need = needed_bytes(model.parameters, dtype, cards)
            size = f"{engine} in {dtype}: {_count(model.parameters)} parameters, about {need / GB:.1f} GB"
            if free is None or options.gpu_layers > 0:  # the owner put a part of the layers on the card
                said, need = f"{size}; free {each} is not known", 0
            elif need <= free:
                said = f"{size} of {free / GB:.1f} GB {each}"
            else:
                continue
            line = _cards_line(cards, options, memory, needed_bytes(model.parameters, dtype))
            return Chosen(engine, dtype, said, device=device, need_bytes=need, cards=cards, cards_line=line)
    return _too_large(model, admitted[-1], cards, free, where)


def _too_large(model: Model, dtype: str, cards: int, free: int | None, where: str) -> str:
    """Return why a model does not fit, with the figures."""
    need = needed_bytes(model.parameters, dtype, cards)
    split = f" on each of {cards} cards" if cards > 1 else ""
    return (
        f"{_count(model.parameters)} parameters take about {need / GB:.1f} GB in {dtype}{split}, "
        f"and {(free or 0) / GB:.1f} GB of {where} are free"
    )


def _card_counts(engine: str, device: str, options: EngineOptions, model: Model, memory: Memory) -> Sequence[int] | str:
    """Return the numbers of cards of one engine to try, in this order, or why the owner's number cannot be."""
    wanted = options.cards_per_engine
    if wanted == 1 or engine != "vllm" or device == "cpu":
        return (1,)
    if not wanted:
        return (1, *(cards for cards in model.splits if cards in memory.joined))
    if wanted not in memory.joined:
        return f"this machine has no {wanted} graphics cards of one kind"
    if wanted not in model.splits:
        return f"vLLM cannot split this model over {wanted} cards: they must divide its heads and widths"
    return (wanted,)


def _cards_line(cards: int, options: EngineOptions, memory: Memory, need: int) -> str:
    """Return the number of cards of each engine, and the reason; empty if the machine has no cards to join."""
    if not memory.joined:
        return ""
    named = f"{cards} card{'s' * (cards > 1)} per engine"
    if options.cards_per_engine:
        return f"{named}, as set for this node"
    needs = f"the model needs about {need / GB:.1f} GB"
    if memory.card is None:
        return f"{named}: the free memory of the cards is not known"
    if cards == 1:
        return f"{named}: {needs}, and one card has {memory.card / GB:.1f} GB free"
    return f"{named}: {needs}, one card has {memory.card / GB:.1f} GB free"


def _hint_to_join(model: Model, memory: Memory) -> str:
    """Return the next step if vLLM could join cards for a model; empty if not."""
    for cards in model.splits:
        free = memory.joined.get(cards)
        if free and needed_bytes(model.parameters, "bfloat16", cards) <= free:
            return f"vLLM can join {cards} cards for this model: `--engine vllm` takes {INSTALL}."
    return ""


def _count(parameters: int) -> str:
    """Return a number of parameters as text: below 10 million, two decimals of a billion would show none."""
    return f"{parameters / 1e9:.2f} billion" if parameters >= 1e7 else f"{parameters / 1e6:.2f} million"


def _admits(classes: Sequence[str], dtype: str, numerics: str) -> bool:
    """Return True if a class is admitted; an exact one may be: only the loaded engine knows its probe."""
    return numerics in classes or (dtype == EXACT and any(is_exact(name) for name in classes))


def device_of(engine: str, options: EngineOptions, machine: HostMachine) -> str:
    """Return the device of an engine, as classes of numerics name it: cpu, or that of the graphics card."""
    if options.device == "cpu":
        return "cpu"
    if engine == "llama":
        return "gpu" if machine.llama_offloads and options.gpu_layers != 0 else "cpu"
    if engine == "vllm":
        installation = machine.find_vllm(options.vllm_python)
        return "cpu" if isinstance(installation, str) else installation.device
    return machine.torch_device


def _precisions(engine: str, device: str, published: str) -> list[str]:
    """Return the precisions of an engine: its default first, then those closest to the learner's."""
    if engine == "llama":
        return ["float32", "float16", "q8_0"]
    if engine == "torch" and device == "cpu":
        return ["float32", "bfloat16"]
    # On a card, both use the policy's type; vLLM computes float16 policies in bfloat16 if requested.
    return list(dict.fromkeys([published, "bfloat16"]))


def _short(engine: str, dtype: str, model: Model) -> str:
    """Return the precision's name in classes of numerics."""
    return "fp16" if dtype == "float32" and engine in model.halved else SHORT[dtype]
