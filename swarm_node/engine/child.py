"""The engine child: reads commands from stdin, answers on stdout, and ends with its parent.

- Only frames may reach stdout: file descriptor 1 is redirected to stderr before any library is imported.
- Reading and writing run in their own threads: sampling waits neither for a command nor for an agent that reads slowly.
- When stdin ends, the process exits at once, even during generation: no reader is left.

With `--describe` it describes a model instead: config.json on standard input, one line of JSON on standard output.

- The agent never parses a policy's own files. It runs this child before it registers, with a time limit.
- A configuration that cannot be read is described as unknown: then the model is judged by its size alone.
"""

import argparse
import json
import os
import queue
import signal
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from typing import Any, BinaryIO, NamedTuple, NoReturn

from protocol import limits
from protocol.errors import EngineFailed, EngineNotStarted, MalformedMessage
from protocol.policy import model_config
from protocol.start import quick_imports
from swarm_node.engine.memory import limit_private
from swarm_node.engine.messages import LENGTH_BYTES, Answer, CommandFailed, Ready, Said, frame
from swarm_node.engine.session import AnyEngine, Session
from swarm_node.engine.turn_cache import TURNS_MIB
from swarm_node.engine.vllm.command import JOINED, OFFLINE, environment

HEADS = ("num_attention_heads", "n_head", "n_heads")
"""The names of the number of attention heads in the config.json of different architectures."""

WIDTHS = (
    "intermediate_size",
    "moe_intermediate_size",
    "shared_expert_intermediate_size",
    "linear_num_key_heads",
    "linear_num_value_heads",
)
"""Further sizes that vLLM divides by the number of cards."""


def splits(config: Mapping[str, Any]) -> list[int]:
    """Return the numbers of cards over which vLLM can split the model; none if its heads are not known.

    Each card has as many attention heads; of fewer key-value heads than cards, each card has a copy of one.
    """
    text = config.get("text_config")
    values = {**config, **(text if isinstance(text, Mapping) else {})}
    sizes = {name: value for name, value in values.items() if isinstance(value, int) and value > 0}
    heads = next((sizes[name] for name in HEADS if name in sizes), 0)
    if not heads:
        return []
    shared = sizes.get("num_key_value_heads", heads)
    wholes = [heads, *(sizes[name] for name in WIDTHS if name in sizes)]
    return [
        cards
        for cards in JOINED
        if not any(whole % cards for whole in wholes) and (shared % cards == 0 or cards % shared == 0)
    ]


def describe(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the type of the weights, and what each engine makes of the architecture.

    `refused` says why engines cannot sample it, `halved` names those that compute float32 in half precision, and
    `splits` are the numbers of cards over which vLLM can split it.
    """
    every, refused, halved = model_config.reason_to_refuse(config), dict[str, str](), list[str]()
    if every:
        refused = dict.fromkeys(("vllm", "llama", "torch"), every)
    elif find_spec("gguf"):
        from swarm_node.engine.llama.recipes import recipe_of

        try:
            recipe, _ = recipe_of(config)
            halved = [] if recipe.is_exact else ["llama"]
        except EngineFailed as error:
            refused["llama"] = error.message.rstrip(".")
    dtype = config.get("dtype") or config.get("torch_dtype") or "float32"
    return {"dtype": str(dtype), "refused": refused, "halved": halved, "splits": splits(config)}


def describe_model() -> int:
    """Describe the configuration on stdin; return exit code 1 if it is invalid."""
    try:
        config = json.loads(sys.stdin.buffer.read(limits.POLICY_CONFIG_MAX_BYTES))
        print(json.dumps(describe(config)))
    except (ValueError, TypeError, AttributeError, KeyError, RecursionError) as error:
        print(f"not a configuration: {error!r}"[:300], file=sys.stderr)
        return 1
    return 0


COMMANDS_WAITING_MAX = 16
"""Commands read ahead; they are handled between two steps."""

ANSWERS_WAITING_MAX = 4 * limits.LEASES_PER_REQUEST_MAX
"""Groups that the agent has not read yet; beyond this number, sampling waits for the agent."""


class Made(NamedTuple):
    """An engine, and the device it computes on."""

    engine: AnyEngine
    on_processor: bool
    """True if the engine uses main memory: it survives an allocation that the kernel refuses."""


def main(arguments: Sequence[str]) -> NoReturn:
    """Run the child until stdin ends."""
    parser = argparse.ArgumentParser(prog="swarm-node engine", description="Internal: the sampling engine's process.")
    parser.add_argument("--engine", default="torch", choices=tuple(ENGINES))
    parser.add_argument("--threads", type=int, default=1, help="threads of one matrix product")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda, xpu or mps")
    parser.add_argument("--dtype", default="auto", help="auto, or what this engine computes in")
    parser.add_argument("--gpu-layers", type=int, default=-1, help="llama: layers on the GPU; negative: all")
    parser.add_argument("--vram-share", type=float, default=1.0, help="share of the GPU's memory to take at the most")
    parser.add_argument("--turns-mib", type=int, default=TURNS_MIB, help="torch, llama: memory for finished turns")
    parser.add_argument("--cards", type=int, default=1, help="vllm: graphics cards that hold the model together")
    parser.add_argument("--describe", action="store_true", help="describe the config.json on standard input, and end")
    options = parser.parse_args(arguments)
    if options.describe:
        sys.exit(describe_model())
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a service manager may signal every process; this one ends with stdin
    pipe = claim_stdout()
    commands: queue.Queue[bytes] = queue.Queue(COMMANDS_WAITING_MAX)
    answers: queue.Queue[bytes] = queue.Queue(ANSWERS_WAITING_MAX)
    threading.Thread(target=_read_until_end, args=(sys.stdin.buffer, commands), daemon=True).start()
    try:
        made = ENGINES[options.engine](options)  # libraries are imported only now: stdin is already being read
    except Exception as error:  # a broken installation may raise anything
        missing = EngineNotStarted(
            f"The engine {options.engine} cannot start: {error}",
            hint="Reinstall it, or choose another `--engine`.",
        )
        pipe.write(frame(Answer(body=CommandFailed.from_error(missing))))
        pipe.flush()
        os._exit(1)  # the other thread holds stdin, and would end the interpreter with a crash
    threading.Thread(target=_write, args=(pipe, answers), daemon=True).start()
    _serve(made, commands, lambda body: answers.put(frame(Answer(body=body))))


def _serve(made: Made, commands: "queue.Queue[bytes]", answer: Callable[[Said], None]) -> NoReturn:
    """Handle commands until the process ends."""
    session = Session(made.engine, answer, limit_private if made.on_processor else _unlimited)
    answer(Ready())
    while True:
        if session.idle:
            session.handle(commands.get())
        while not commands.empty():
            session.handle(commands.get())
        session.go_on()


def claim_stdout() -> BinaryIO:
    """Return the stdout pipe for frames; anything printed to standard output from now on goes to the log."""
    sys.stdout.flush()
    pipe = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    return pipe


def _read_until_end(pipe: BinaryIO, commands: "queue.Queue[bytes]") -> None:
    """Queue every frame; end the process at the end of the input, or at an invalid frame."""
    try:
        while header := pipe.read(LENGTH_BYTES):
            size_bytes = int.from_bytes(header)
            if size_bytes > limits.MESSAGE_MAX_BYTES:
                raise MalformedMessage(f"A frame of {size_bytes} bytes.")
            body = pipe.read(size_bytes)
            if len(body) < size_bytes:
                break
            commands.put(body)
    finally:
        os._exit(0)  # the main thread may be deep in a matrix product


def _write(pipe: BinaryIO, answers: "queue.Queue[bytes]") -> None:
    """Write every answer; end the process when the pipe is closed."""
    try:
        while True:
            pipe.write(answers.get())
            pipe.flush()
    finally:
        os._exit(0)


def stay_offline() -> None:
    """Keep transformers offline; must be called before it is imported."""
    os.environ.update(OFFLINE)


def _unlimited(_size_bytes: int) -> None:
    """Set no limit, the agent's watch enforces it: a graphics driver reserves memory that it never uses."""


def _torch(options: argparse.Namespace) -> Made:
    stay_offline()
    with quick_imports():
        import torch

        from swarm_node.engine.torch.engine import TorchEngine, default_device

    torch.set_num_threads(options.threads)
    torch.set_num_interop_threads(1)
    device = default_device() if options.device == "auto" else options.device
    on_processor = device == "cpu"
    if options.vram_share < 1 and not on_processor:
        limits_of = {"cuda": torch.cuda, "xpu": torch.xpu.memory, "mps": torch.mps}
        limits_of[device].set_per_process_memory_fraction(options.vram_share)
    turns_max_bytes = options.turns_mib * limits.MIB
    return Made(TorchEngine(device=device, dtype=options.dtype, turns_max_bytes=turns_max_bytes), on_processor)


def _llama(options: argparse.Namespace) -> Made:
    with quick_imports():
        from llama_cpp import llama_supports_gpu_offload

        from swarm_node.engine.llama.engine import LlamaEngine

    layers = 0 if options.device == "cpu" else options.gpu_layers
    on_processor = layers == 0 or not llama_supports_gpu_offload()
    engine = LlamaEngine(
        dtype=options.dtype,
        threads=options.threads,
        gpu_layers=layers,
        turns_max_bytes=options.turns_mib * limits.MIB,
    )
    return Made(engine, on_processor)


def _vllm(options: argparse.Namespace) -> Made:
    """Build the vLLM engine, in the environment of `swarm_node.engine.vllm.command`; vLLM's build fixes the device."""
    os.environ.update(environment(options.threads))
    from swarm_node.engine.vllm.engine import VllmEngine

    engine = VllmEngine(dtype=options.dtype, vram_share=options.vram_share, cards=options.cards)
    return Made(engine, on_processor=False)


ENGINES: dict[str, Callable[[argparse.Namespace], Made]] = {"torch": _torch, "llama": _llama, "vllm": _vllm}
