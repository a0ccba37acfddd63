"""Checks of the engines: each engine's child must start, load a tiny model and sample from it.

- A missing engine is no failure as long as another one works; without any, a node cannot sample.
- The next step for a missing engine is given once: for all of them if none works, for vLLM if there is an NVIDIA card.
- The model has a few kilobytes of random weights; only the existence of its answers matters.
"""

import json
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import trio
from safetensors.numpy import save_file

from protocol.errors import ConfigInvalid, SwarmError
from protocol.work.rollout import pack_tokens
from swarm_node.doctor.report import CheckResult, CheckState, fail, ok, skip
from swarm_node.engine.choose import (
    ENGINES,
    NONE_HERE,
    EngineOptions,
    HostMachine,
    choose,
    how_to_install,
    threads_of,
)
from swarm_node.engine.client import open_engine
from swarm_node.engine.messages import GroupFailed, SampleRequest
from swarm_node.machine import use

VOCABULARY, HIDDEN, HEADS, HEAD, INTERMEDIATE, LAYERS = 256, 64, 2, 32, 96, 1

CONFIG = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": VOCABULARY,
    "hidden_size": HIDDEN,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": HEADS,
    "head_dim": HEAD,
    "intermediate_size": INTERMEDIATE,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10_000.0,
    "hidden_act": "silu",
    "attention_bias": False,
    "tie_word_embeddings": True,
    "eos_token_id": 0,
    "pad_token_id": 0,
    "dtype": "float32",
}


def make_tiny_model(folder: Path) -> Path:
    """Write the tiny model into a new folder."""
    chance = np.random.default_rng(1)
    shapes = {"model.embed_tokens.weight": (VOCABULARY, HIDDEN), "model.norm.weight": (HIDDEN,)}
    for layer in range(LAYERS):
        at = f"model.layers.{layer}"
        shapes |= {f"{at}.self_attn.{name}_proj.weight": (HEADS * HEAD, HIDDEN) for name in "qkv"}
        shapes |= {f"{at}.self_attn.o_proj.weight": (HIDDEN, HEADS * HEAD)}
        shapes |= {f"{at}.self_attn.{name}_norm.weight": (HEAD,) for name in "qk"}
        shapes |= {f"{at}.mlp.{name}_proj.weight": (INTERMEDIATE, HIDDEN) for name in ("gate", "up")}
        shapes |= {f"{at}.mlp.down_proj.weight": (HIDDEN, INTERMEDIATE)}
        shapes |= {f"{at}.{name}_layernorm.weight": (HIDDEN,) for name in ("input", "post_attention")}
    folder.mkdir(parents=True)
    tensors = {
        name: np.ones(shape, np.float32) if len(shape) == 1 else chance.normal(0, 0.1, shape).astype(np.float32)
        for name, shape in shapes.items()
    }
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return folder


TRIED_S = 120.0
"""Time-out of one engine: imports take 15 s on a good machine."""

TOKENS = 8

REQUEST = SampleRequest(
    request_id="tiny",
    version=1,
    prompt=pack_tokens([3, 5, 7]),
    seed=1,
    samples=2,
    max_new_tokens=TOKENS,
    temperature=1.0,
)


async def engines(options: EngineOptions, machine: Callable[[], HostMachine]) -> list[CheckResult]:
    """Check all engines, and that any of them works."""
    host = await trio.to_thread.run_sync(machine)
    with tempfile.TemporaryDirectory(prefix="echo-swarm-doctor-") as folder:
        model = await trio.to_thread.run_sync(partial(make_tiny_model, Path(folder) / "model"))
        findings = [await engine(name, options, host, model) for name in ENGINES]
    if not any(finding.state is CheckState.OK for finding in findings):
        step = f"{how_to_install(list(ENGINES), host)} docs/join.md explains the GPU builds."
        return [*findings, fail("engine", "No engine works here, so this node cannot sample.", "", step)]
    return findings


def processor(options: EngineOptions, machine: HostMachine) -> CheckResult:
    """Report the number of CPU threads of an engine."""
    count = threads_of(options, machine)
    said = f"An engine uses {count} CPU thread{'s' * (count != 1)}."
    whose = "set with `--threads`" if options.threads else "change it with `--threads`"
    return ok("cpu", said, f"{use.usable_cores()} cores, {whose}")


async def engine(name: str, options: EngineOptions, machine: HostMachine, model: Path) -> CheckResult:
    """Check one engine."""
    check = f"engine {name}"
    try:
        choice = choose(name, options, machine)
    except ConfigInvalid as error:
        step = error.hint if name == "vllm" and machine.nvidia else ""
        return skip(check, _without_name(error.message.removeprefix(f"{NONE_HERE} "), name), step)
    try:
        with trio.fail_after(TRIED_S):
            return ok(
                check,
                "The engine starts, loads a tiny model and samples from it.",
                await _sample(choice.command, model),
            )
    except trio.TooSlowError:
        said = f"The engine did not load and sample a tiny model within {TRIED_S:.0f} s."
        return fail(check, said, choice.why, "The machine may be busy. Try again, or choose another --engine.")
    except SwarmError as error:
        return fail(check, error.message, choice.why, error.hint or "Reinstall it, or choose another --engine.")


async def _sample(command: list[str], model: Path) -> str:
    async with open_engine(command) as child:
        loaded = await child.load(model, 1)
        await child.submit([REQUEST])
        while (group := await child.finished()) is not None:
            if isinstance(group, GroupFailed):
                raise SwarmError.from_wire(group.model_dump())
    took = f"{loaded.seconds:.1f} s" if loaded.seconds >= 0.05 else "less than 0.1 s"
    return f"{loaded.numerics}, loaded in {took}"


def _without_name(said: str, name: str) -> str:
    """Return a reason without the engine's name before it, which stands in the column of names."""
    reason = said.removeprefix(f"{name}: ")
    return f"{reason[0].upper()}{reason[1:]}"
