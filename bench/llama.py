"""Speed of the llama engine: against llama-cpp-python's own loop, against torch, and for a swap.

- Sampling: the 64 prompts of bench-engines, completions of 16 to 128 tokens, with the log-probability of each token. By
  our engine in float16 and float32, by our torch engine, and by `Llama.generate`, which does one after the other; its
  log-probabilities are made as its `create_completion` makes them.
- Few samples: the first 8 of these prompts, as a node with little work has them.
- Swap: another version of the same shape into the loaded model, canary included, against a new child that loads it.
- Sampler: decoding steps at a vocabulary of 150k with our seed-bound draw, which also gives log-probabilities, and with
  llama.cpp's own sampler, which does not.
- Everything runs on one thread, in turns, and is timed in CPU seconds, so other work on the machine counts less.
"""

import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np
import torch
from transformers.utils import logging as transformers_logging

from bench.engines import (
    LARGE_VOCABULARY,
    LENGTHS,
    PROMPTS,
    SHAPES,
    cold_load_s,
    make_large_vocabulary,
    make_version,
    requests,
)
from bench.harness import Bench, Input, no_options, quick_from_environment
from protocol.work.rollout import unpack_tokens
from swarm_node.engine.choose import ENGINES, EngineOptions
from swarm_node.engine.engine import Engine
from swarm_node.engine.llama import weights
from swarm_node.engine.llama.engine import LlamaContext, LlamaEngine, NumpyLogits
from swarm_node.engine.llama.ggml import Type
from swarm_node.engine.llama.recipes import recipe_of
from swarm_node.engine.llama.weights import LlamaModel
from swarm_node.engine.messages import GroupDone
from swarm_node.engine.policy_files import read_config
from swarm_node.engine.torch.engine import TorchEngine

FEW = 8
UNIT = "tokens per CPU s"


def ours(engine: Engine, count: int) -> float:
    """Useful tokens per second, over the first so many requests."""
    groups: list[GroupDone] = []
    started = time.process_time()
    engine.generate(requests(1)[:count], groups.append)
    seconds = time.process_time() - started
    return sum(len(sample.tokens) // 4 for group in groups for sample in group.samples) / seconds


def theirs(model: llama_cpp.Llama, count: int) -> float:
    """Return the rate of llama-cpp-python's loop at the same work."""
    wanted = requests(1)[:count]
    started = time.process_time()
    for request in wanted:
        prompt = unpack_tokens(request.prompt).tolist()
        drawn = model.generate(prompt, top_k=0, top_p=1.0, min_p=0.0, temp=1.0, repeat_penalty=1.0)
        for _, token in zip(range(request.max_new_tokens), drawn, strict=False):
            float(llama_cpp.Llama.logits_to_logprobs(model.scores[model.n_tokens - 1])[token])
    return sum(request.max_new_tokens for request in wanted) / (time.process_time() - started)


def own_loop(folder: Path, file: Path) -> llama_cpp.Llama:
    """The policy in llama-cpp-python, in float16."""
    recipe, config = recipe_of(read_config(folder))
    given = weights.sources(folder)
    wanted = weights.places(recipe, config, Type.F16, given)
    weights.write_gguf(file, recipe, config, wanted, given)
    return llama_cpp.Llama(
        str(file), n_ctx=256, n_threads=1, n_threads_batch=1, logits_all=True, flash_attn=True, verbose=False
    )


def measure_sampling(bench: Bench, name: str, folder: Path, scratch: Path, rounds: int) -> None:
    """All contenders in turns."""
    engines: dict[str, Engine] = {
        "llama float16": LlamaEngine(dtype="float16"),
        "llama float32": LlamaEngine(dtype="float32"),
        "torch float32": TorchEngine(),
    }
    for engine in engines.values():
        engine.load(folder, 1)
    loop = own_loop(folder, scratch / "loop.gguf")
    for _ in range(rounds):
        for count in (PROMPTS, FEW):
            for kind, engine in engines.items():
                bench.measure(f"{name}, {count} at once: {kind}", ours(engine, count), unit=UNIT)
        bench.measure(f"{name}: Llama.generate, one by one", theirs(loop, FEW), unit=UNIT)
    ratio = bench.ratio(
        f"{name}: ours / Llama.generate",
        f"{name}, {PROMPTS} at once: llama float16",
        f"{name}: Llama.generate, one by one",
    )
    bench.goal(f"{name}: at least three times as fast as Llama.generate", ratio, at_least=3.0)
    for count in (PROMPTS, FEW):
        for kind in ("float16", "float32"):
            of = f"{name}, {count} at once: llama {kind}"
            bench.ratio(f"{name}, {count} at once: llama {kind} / torch", of, f"{name}, {count} at once: torch float32")


def measure_swap(bench: Bench, name: str, folders: list[Path], rounds: int) -> None:
    """Measure swaps in place, and in a new child."""
    engine = LlamaEngine(dtype="float16")
    engine.load(folders[0], 0)
    for number in range(rounds):
        started = time.process_time()
        if engine.load(folders[1 - number % 2], 1).rebuilt:
            raise RuntimeError("the swap built a new model")
        bench.measure(f"{name}: swap", 1000 * (time.process_time() - started), unit="CPU ms")
        seconds = cold_load_s(ENGINES["llama"].command(EngineOptions()), folders[0])
        bench.measure(f"{name}: cold load", 1000 * seconds, unit="CPU ms")
    ratio = bench.ratio(f"{name}: swap / cold load", f"{name}: swap", f"{name}: cold load")
    bench.goal(f"{name}: a swap takes at most a fifth of a cold load", ratio, at_most=0.2)


def measure_sampler(bench: Bench, folder: Path, rounds: int, steps: int) -> None:
    """Decoding steps with either sampler."""
    model = LlamaModel(folder, read_config(folder), Type.F16, gpu_layers=0)
    context = LlamaContext(model, exact=False, rows=PROMPTS, width=64, threads=1)
    sampler = llama_cpp.llama_sampler_init_dist(1)

    def seed_bound(logits: Any) -> list[int]:
        tokens, _ = NumpyLogits(logits).draw([1.0] * PROMPTS, np.random.default_rng(1).random(PROMPTS).tolist())
        return tokens

    def llamas_own(_logits: Any) -> list[int]:
        return [llama_cpp.llama_sampler_sample(sampler, context.pointer, row) for row in range(PROMPTS)]

    for _ in range(rounds):
        for case, draw in (("seed-bound", seed_bound), ("llama.cpp's own", llamas_own)):
            bench.measure(f"150k vocabulary: {case}", steps * PROMPTS / _decode(context, draw, steps), unit=UNIT)
    ratio = bench.ratio(
        "seed-bound / llama.cpp's own", "150k vocabulary: seed-bound", "150k vocabulary: llama.cpp's own"
    )
    bench.goal("at 150k the seed-bound sampler costs at most a tenth of the throughput", ratio, at_least=0.9)


def _decode(context: LlamaContext, draw: Callable[[Any], list[int]], steps: int) -> float:
    """Seconds for so many steps of all rows."""
    context.clear()
    rows = np.arange(PROMPTS)
    logits = context.step(np.full(PROMPTS, 5), np.zeros(PROMPTS, int), rows)
    started = time.process_time()
    for position in range(1, steps + 1):
        logits = context.step(np.array(draw(logits)), np.full(PROMPTS, position), rows)
    return time.process_time() - started


def main() -> int:
    """Measure, print and judge."""
    no_options(__doc__)
    quick = quick_from_environment()
    rounds = 1 if quick else 3
    torch.set_num_threads(1)
    transformers_logging.set_verbosity_error()  # type: ignore[no-untyped-call]  # transformers annotates half
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]  # transformers annotates half
    inputs: dict[str, Input] = {
        "prompts": PROMPTS,
        "few": FEW,
        "lengths": LENGTHS,
        "rounds": rounds,
        "large_vocabulary": LARGE_VOCABULARY,
    }
    bench = Bench("llama", inputs=inputs, quick=quick)
    with tempfile.TemporaryDirectory() as name:
        scratch = Path(name)
        for kind, shape in SHAPES.items():
            folders = [make_version(scratch / f"{shape.hidden}-{seed}", seed, shape) for seed in (1, 2)]
            measure_sampling(bench, kind, folders[0], scratch, rounds)
            measure_swap(bench, kind, folders, rounds)
        large = make_large_vocabulary(scratch / "large")
        measure_sampler(bench, large, rounds, steps=4)
    return bench.finish()


if __name__ == "__main__":
    raise SystemExit(main())
