"""The engine and the precision that sample a round's model on this machine: decided before a node registers.

- What is published of the model says how large it is and whether an engine knows it; nothing of its weights is needed.
  Its config.json is read by an engine child (`described`), not by the agent.
- An engine computes in the first of its precisions that the round admits and that fits. Without figures on the memory
  that is free, or on the model, nothing is refused.
- What the owner named is taken as it is, or refused with the figures.
- Pure, but for `describe_model` and what `choose` looks at.
"""

import json
import logging
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from protocol.errors import ConfigInvalid, EngineFailed
from swarm_node.engine.choose import AUTO, ENGINES, NONE_HERE, EngineOptions, HostMachine, choose

log = logging.getLogger(__name__)

GB = 10**9

DESCRIBED_S = 60.0
"""Patience with a child that imports numpy and reads a few kilobytes."""

OVERHEAD_BYTES = 512 * 1024 * 1024
"""Memory of CUDA itself and a cache for a few samples; on a processor, torch and a cache."""

ROOM = 1.25
"""Weights and the cache of keys and values, for the batch that a node has; less makes it sample fewer at once."""

BYTES = {"float32": 4.0, "float16": 2.0, "bfloat16": 2.0, "q8_0": 34 / 32}
"""Bytes of one parameter."""

SHORT = {"float32": "fp32", "float16": "fp16", "bfloat16": "bf16", "q8_0": "q8_0"}
"""Names of precisions in classes of numerics."""


NONE_FOR_MODEL = "No engine on this machine can run this round's model."
HINT = (
    "Join a round with another model, free memory, or choose another `--engine`; `swarm-node doctor` shows what works."
)


class Model(NamedTuple):
    """A description of its model that a round publishes."""

    weights_bytes: int
    dtype: str = "float32"
    """The precision in which its weights are published."""
    refused: Mapping[str, str] = {}
    """Engines that do not know its architecture, and why."""
    halved: tuple[str, ...] = ()
    """Engines that compute a part of it in float16 where its weights are float32."""

    @property
    def parameters(self) -> int:
        """Return how many numbers its weights are."""
        return int(self.weights_bytes / BYTES[self.dtype])


def describe_model(weights_bytes: int, config: bytes | None) -> Model:
    """Return what the engine child makes of a config.json; the size alone where it makes nothing of it."""
    if config is None:
        return Model(weights_bytes)
    command = [str(Path(sys.executable).with_name("swarm-node")), "engine", "--describe"]
    try:
        done = subprocess.run(command, input=config, capture_output=True, timeout=DESCRIBED_S, check=True)
        found = json.loads(done.stdout)
        refused = {name: _shown(found["refused"][name]) for name in ENGINES if name in found["refused"]}
        dtype = found["dtype"] if found["dtype"] in BYTES else "float32"
        return Model(weights_bytes, dtype, refused, tuple(name for name in ENGINES if name in found["halved"]))
    except (OSError, subprocess.SubprocessError, ValueError, LookupError, TypeError) as error:
        log.info("the model's configuration cannot be described: %s", _shown(str(error)))
        return Model(weights_bytes)


def _shown(text: str) -> str:
    """Return a text that may have a stranger's values in it, as a terminal may show it."""
    return "".join(letter if letter.isprintable() else "?" for letter in text[:300])


class Memory(NamedTuple):
    """Return how many bytes are free, where the system says so."""

    card: int | None
    """Return the bytes that are free on the graphics card that has the most."""
    processor: int | None


class Chosen(NamedTuple):
    """An engine, its precision, and one line on both."""

    engine: str
    dtype: str
    """`auto` where the engine takes it by itself and knows no option for it."""
    line: str
    unfit: Mapping[str, str] = {}
    """Engines that come before it, and why each is not taken."""


def needed_bytes(parameters: int, dtype: str) -> int:
    """Return the memory that sampling a model of this size takes."""
    return int(parameters * BYTES[dtype] * ROOM) + OVERHEAD_BYTES


def choose_precision(
    wanted: str, options: EngineOptions, machine: HostMachine, model: Model, memory: Memory, classes: Sequence[str] = ()
) -> Chosen:
    """Return the engine and the precision for a model; raise with the reason and figures where none is fit."""
    unfit: dict[str, str] = {}
    while True:
        try:
            choice = choose(wanted, options, machine, unfit)
        except ConfigInvalid as error:
            if not unfit:
                raise
            raise EngineFailed(error.message.replace(NONE_HERE, NONE_FOR_MODEL), hint=HINT) from None
        if reason := model.refused.get(choice.name):
            unfit[choice.name] = reason
            continue
        found = _fitting(choice.name, options, machine, model, memory, classes)
        if isinstance(found, Chosen):
            dtype = found.dtype if found.dtype in ENGINES[choice.name].dtypes else AUTO
            return found._replace(dtype=dtype, unfit=unfit)
        unfit[choice.name] = found


def _fitting(
    engine: str, options: EngineOptions, machine: HostMachine, model: Model, memory: Memory, classes: Sequence[str]
) -> Chosen | str:
    """Return the first precision that the round admits and that fits, or why there is none."""
    device = _device(engine, options, machine)
    free = memory.processor if device == "cpu" else memory.card
    tried = [options.dtype] if options.dtype != AUTO else _precisions(engine, device, model.dtype)
    computed = {dtype: f"{engine}/{_short(engine, dtype, model)}/{device}" for dtype in tried}
    admitted = [dtype for dtype, numerics in computed.items() if not classes or numerics in classes]
    if not admitted:
        return f"the round admits {', '.join(classes)}, and this machine computes {', '.join(computed.values())}"
    where = "memory" if device == "cpu" else "memory of the graphics card"
    for dtype in admitted:
        need = needed_bytes(model.parameters, dtype)
        size = f"{engine} in {dtype}: {model.parameters / GB:.2f} billion parameters, about {need / GB:.1f} GB"
        if free is None or options.gpu_layers > 0:  # a part on the card, as its owner says
            return Chosen(engine, dtype, f"{size}; free {where} is not known")
        if need <= free:
            return Chosen(engine, dtype, f"{size} of {free / GB:.1f} GB {where}")
    least = admitted[-1]
    need = needed_bytes(model.parameters, least)
    return (
        f"{model.parameters / GB:.2f} billion parameters take about {need / GB:.1f} GB in {least}, "
        f"and {(free or 0) / GB:.1f} GB of {where} are free"
    )


def _device(engine: str, options: EngineOptions, machine: HostMachine) -> str:
    if options.device == "cpu":
        return "cpu"
    if engine == "llama":
        return "gpu" if machine.llama_offloads and options.gpu_layers != 0 else "cpu"
    if engine == "vllm":
        found = machine.find_vllm(options.vllm_python)
        return "cpu" if isinstance(found, str) else found.device
    return "cuda" if machine.torch_on_cuda else "cpu"


def _precisions(engine: str, device: str, published: str) -> list[str]:
    """Return what an engine computes in, as near to the learner as may be first; what it would take by itself leads."""
    if engine == "llama":
        return ["float32", "float16", "q8_0"]
    if engine == "torch" and device == "cpu":
        return ["float32", "bfloat16"]
    # Both take the type of the policy on a card; vLLM computes float16 policies in bfloat16 where that is asked for.
    return list(dict.fromkeys([published, "bfloat16"]))


def _short(engine: str, dtype: str, model: Model) -> str:
    """Return the precision as classes of numerics have it."""
    return "fp16" if dtype == "float32" and engine in model.halved else SHORT[dtype]
