"""Choice of the engine and the precision for a round's model on this machine, before the node registers.

- The published description of the model gives its size and the engines that support it; the weights are not needed. An
  engine child reads its config.json (`described`), not the agent.
- An engine computes in the first of its precisions that the round admits and that fits into memory. If the free memory
  or the model's size is unknown, nothing is refused.
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
from protocol.work.lease import EXACT, is_exact
from swarm_node.engine.choose import AUTO, ENGINES, NONE_HERE, EngineOptions, HostMachine, choose

log = logging.getLogger(__name__)

GB = 10**9

DESCRIBED_S = 60.0
"""Time-out of a child that imports numpy and reads a few kilobytes."""

OVERHEAD_BYTES = 512 * 1024 * 1024
"""Memory of CUDA itself and a cache for a few samples; on the CPU, torch and a cache."""

ROOM = 1.25
"""Factor for weights plus the key-value cache of a node's batch; with less memory it samples fewer at once."""

BYTES = {"float32": 4.0, "exact": 4.0, "float16": 2.0, "bfloat16": 2.0, "q8_0": 34 / 32}
"""Bytes of one parameter."""

SHORT = {"float32": "fp32", "exact": "fp32", "float16": "fp16", "bfloat16": "bf16", "q8_0": "q8_0"}
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
        return Model(weights_bytes, dtype, refused, tuple(name for name in ENGINES if name in description["halved"]))
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


def needed_bytes(parameters: int, dtype: str) -> int:
    """Return the memory for sampling a model with `parameters` parameters."""
    return int(parameters * BYTES[dtype] * ROOM) + OVERHEAD_BYTES


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
            raise EngineFailed(error.message.replace(NONE_HERE, NONE_FOR_MODEL), hint=HINT) from None
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
    free = memory.processor if device == "cpu" else memory.card
    tried = [options.dtype] if options.dtype != AUTO else _precisions(engine, device, model.dtype)
    computed = {dtype: f"{engine}/{_short(engine, dtype, model)}/{device}" for dtype in tried}
    admitted = [dtype for dtype, numerics in computed.items() if not classes or _admits(classes, dtype, numerics)]
    if not admitted:
        return f"the round admits {', '.join(classes)}, and this machine computes {', '.join(computed.values())}"
    where = "memory" if device == "cpu" else "memory of the graphics card"
    for dtype in admitted:
        need = needed_bytes(model.parameters, dtype)
        size = f"{engine} in {dtype}: {_count(model.parameters)} parameters, about {need / GB:.1f} GB"
        if free is None or options.gpu_layers > 0:  # the owner put a part of the layers on the card
            return Chosen(engine, dtype, f"{size}; free {where} is not known", device=device)
        if need <= free:
            return Chosen(engine, dtype, f"{size} of {free / GB:.1f} GB {where}", device=device, need_bytes=need)
    least = admitted[-1]
    need = needed_bytes(model.parameters, least)
    return (
        f"{_count(model.parameters)} parameters take about {need / GB:.1f} GB in {least}, "
        f"and {(free or 0) / GB:.1f} GB of {where} are free"
    )


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
