"""Speed of our engine: sampling, swapping weights and drawing tokens.

- Sampling: 64 prompts, completions of 16 to 128 tokens, none of which an end token cuts short: by our engine, and by
  the `generate` of transformers in one batch, which ends with its longest row. Only tokens that were asked for count.
- Swap: another version of the same shape into the loaded model, canary included, against what it replaces: a new child
  that starts, imports and loads.
- Sampler: decoding steps at a vocabulary of 150k with our seed-bound draw, and with `torch.multinomial` in its place;
  both give the token and its log-probability.
- Threads: a batch of 128 samples by one thread and by two. What counts is the first one's CPU time, since the second
  works beside it: a machine that does nothing else takes as long by the clock. What all of them take is the price.
- All else runs on one thread. Everything goes in turns and is timed in CPU seconds, so other work on the machine counts
  less; `make` has threads sleep while they wait for each other, so that waiting does not count.
"""

import json
import resource
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import trio
from transformers import AutoModelForCausalLM
from transformers.utils import logging as transformers_logging

from bench.harness import Bench, Input, no_options, quick_from_environment
from coordinator.learner.embedded import DEFAULT_SHAPE, EmbeddedShape, make_model, make_policy, make_tokenizer
from coordinator.learner.policy import TrainedPolicy
from coordinator.learner.settings import TrainSettings
from protocol.work.rollout import pack_tokens, unpack_tokens
from swarm_exact import drawing
from swarm_node.engine.choose import ENGINES, EngineOptions
from swarm_node.engine.client import open_engine
from swarm_node.engine.messages import GroupDone, SampleRequest
from swarm_node.engine.policy_files import read_config
from swarm_node.engine.torch.engine import TorchEngine
from swarm_node.engine.torch.qwen3 import Qwen3

LARGE = EmbeddedShape(hidden=512, layers=6, heads=8, intermediate=1536)
SHAPES = {"demo's 1.1 M": DEFAULT_SHAPE, "21 M": LARGE}
LARGER = EmbeddedShape(hidden=1024, layers=6, heads=16, intermediate=3072)
LENGTHS = (16, 32, 48, 64, 80, 96, 112, 128)
PROMPTS = 64
LARGE_VOCABULARY = 151_936


def requests(version: int) -> list[SampleRequest]:
    """Return a request of one sample for each prompt, with mixed lengths."""
    return [
        SampleRequest(
            request_id=str(number),
            version=version,
            prompt=pack_tokens([20 + number, *range(5, 17)]),
            seed=number,
            samples=1,
            max_new_tokens=LENGTHS[number % len(LENGTHS)],
            temperature=1.0,
        )
        for number in range(PROMPTS)
    ]


def make_version(folder: Path, seed: int, shape: EmbeddedShape) -> Path:
    """A policy with random weights and its canary, whose end token is never drawn."""
    start = folder.with_name(f"{folder.name}-start")  # a policy's own folder has numbers and text alone
    make_policy(start, seed=seed, shape=shape)
    TrainedPolicy(start, TrainSettings(learning_rate=1e-3)).writer.save_hub(folder)
    for name in ("config.json", "generation_config.json"):
        file = folder / name
        file.write_text(json.dumps(json.loads(file.read_text()) | {"eos_token_id": 10**9}))
    return folder


def make_large_vocabulary(folder: Path) -> Path:
    """A small model with the vocabulary of a real one."""
    model = make_model(make_tokenizer(), seed=1, shape=LARGE)
    model.resize_token_embeddings(LARGE_VOCABULARY, mean_resizing=False)
    model.save_pretrained(folder)
    return folder


def ours(engine: TorchEngine) -> float:
    """Useful tokens per second."""
    groups: list[GroupDone] = []
    started = time.process_time()
    engine.generate(requests(1), groups.append)
    seconds = time.process_time() - started
    return sum(len(sample.tokens) // 4 for group in groups for sample in group.samples) / seconds


def hugging_face(model: Any) -> float:
    """Return the rate of `generate` at the same work."""
    wanted = requests(1)
    prompts = torch.tensor([unpack_tokens(request.prompt).tolist() for request in wanted])
    started = time.process_time()
    with torch.inference_mode():
        model.generate(
            prompts,
            attention_mask=torch.ones_like(prompts),
            max_new_tokens=max(LENGTHS),
            do_sample=True,
            top_k=0,
            top_p=1.0,
            eos_token_id=None,
            pad_token_id=0,
            output_logits=True,
            return_dict_in_generate=True,
        )
    return sum(request.max_new_tokens for request in wanted) / (time.process_time() - started)


def measure_sampling(bench: Bench, name: str, folder: Path, rounds: int) -> None:
    """Measure our engine and `generate` in turns."""
    engine = TorchEngine()
    engine.load(folder, 1)
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model.generation_config.eos_token_id = None
    for _ in range(rounds):
        bench.measure(f"{name}: ours", ours(engine), unit="tokens per CPU s")
        bench.measure(f"{name}: generate", hugging_face(model), unit="tokens per CPU s")
    ratio = bench.ratio(f"{name}: ours / generate", f"{name}: ours", f"{name}: generate")
    bench.goal(f"{name}: at least twice as fast as generate", ratio, at_least=2.0)


def measure_swap(bench: Bench, name: str, folders: list[Path], rounds: int) -> None:
    """Measure swaps in place, rebuilt in the same process, and in a new child."""
    engine = TorchEngine()
    engine.load(folders[0], 0)
    for number in range(rounds):
        started = time.process_time()
        if engine.load(folders[1 - number % 2], 1).rebuilt:
            raise RuntimeError("the swap built a new model")
        bench.measure(f"{name}: swap", 1000 * (time.process_time() - started), unit="CPU ms")
        started = time.process_time()
        TorchEngine().load(folders[0], 1)
        bench.measure(f"{name}: built anew", 1000 * (time.process_time() - started), unit="CPU ms")
        seconds = cold_load_s(ENGINES["torch"].command(EngineOptions()), folders[0])
        bench.measure(f"{name}: cold load", 1000 * seconds, unit="CPU ms")
    ratio = bench.ratio(f"{name}: swap / cold load", f"{name}: swap", f"{name}: cold load")
    bench.goal(f"{name}: a swap takes at most a fifth of a cold load", ratio, at_most=0.2)


def measure_threads(bench: Bench, name: str, folder: Path, rounds: int) -> float:
    """Measure a batch by one thread and by two; return the share of the time that the second leaves."""
    engine = TorchEngine()
    engine.load(folder, 1)
    batch = [request.model_copy(update={"samples": 16, "max_new_tokens": 8}) for request in requests(1)[:8]]
    for number in range(rounds + 1):
        for count in (1, 2):
            torch.set_num_threads(count)
            started, started_all = time.thread_time(), time.process_time()
            engine.generate(batch, lambda _group: None)
            first, every = time.thread_time() - started, time.process_time() - started_all
            if number:  # the first round warms up
                bench.measure(f"{name}: {_threads(count)}, the first", 1000 * first, unit="CPU ms")
                bench.measure(f"{name}: {_threads(count)}, all", 1000 * every, unit="CPU ms")
    torch.set_num_threads(1)
    bench.ratio(f"{name}: all of 2 threads / 1", f"{name}: 2 threads, all", f"{name}: 1 thread, all")
    return bench.ratio(f"{name}: 2 threads / 1", f"{name}: 2 threads, the first", f"{name}: 1 thread, the first")


def _threads(count: int) -> str:
    return f"{count} thread{'s' * (count > 1)}"


def measure_sampler(bench: Bench, folder: Path, rounds: int, steps: int) -> None:
    """A decoding step with either sampler."""
    with torch.inference_mode():
        decoder = Qwen3(folder, read_config(folder), torch.device("cpu"), torch.float32)
        for _ in range(rounds):
            for case, draw in (("seed-bound", drawing.draw), ("multinomial", multinomial)):
                bench.measure(
                    f"150k vocabulary: {case}", steps * PROMPTS / _decode(decoder, draw, steps), unit="tokens per CPU s"
                )
    ratio = bench.ratio("seed-bound / multinomial", "150k vocabulary: seed-bound", "150k vocabulary: multinomial")
    bench.goal("at 150k the seed-bound sampler costs at most a tenth of the throughput", ratio, at_least=0.9)


Draw = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]


def _decode(decoder: Qwen3, draw: Draw, steps: int) -> float:
    """Seconds for so many steps of all rows."""
    decoder.clear()
    logits = decoder.prefill([[5, 6, 7]], [PROMPTS])
    ones, uniforms = torch.ones(PROMPTS), torch.rand(PROMPTS, dtype=torch.float64)
    started = time.process_time()
    for _ in range(steps):
        tokens, _ = draw(logits.values, ones, uniforms)
        logits = decoder.decode(tokens.tolist())
    return time.process_time() - started


def multinomial(
    logits: torch.Tensor, temperatures: torch.Tensor, _uniforms: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw tokens without bound seeds, as other engines do."""
    scores = torch.log_softmax(logits / temperatures[:, None], dim=-1)
    tokens = torch.multinomial(scores.exp(), 1)
    return tokens[:, 0], scores.gather(1, tokens)[:, 0]


def cold_load_s(command: list[str], folder: Path) -> float:
    """CPU seconds of an engine child that starts, imports, loads a policy, and ends."""

    async def load() -> None:
        async with open_engine(command) as child:
            await child.load(folder, 1)

    started = _children_s()
    trio.run(load)
    return _children_s() - started


def _children_s() -> float:
    """CPU seconds of all children that have ended."""
    spent = resource.getrusage(resource.RUSAGE_CHILDREN)
    return spent.ru_utime + spent.ru_stime


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
        "lengths": LENGTHS,
        "rounds": rounds,
        "large_vocabulary": LARGE_VOCABULARY,
    }
    bench = Bench("engines", inputs=inputs, quick=quick)
    with tempfile.TemporaryDirectory() as scratch:
        for name, shape in SHAPES.items():
            folders = [make_version(Path(scratch) / f"{shape.hidden}-{seed}", seed, shape) for seed in (1, 2)]
            measure_sampling(bench, name, folders[0], rounds)
            measure_swap(bench, name, folders, rounds)
            measure_threads(bench, name, folders[0], rounds)
        ratio = measure_threads(bench, "82 M", make_version(Path(scratch) / "larger", 1, LARGER), rounds)
        bench.goal("82 M: two threads take at most seven tenths of the time", ratio, at_most=0.7)
        measure_sampler(bench, make_large_vocabulary(Path(scratch) / "large"), rounds, steps=4)
    return bench.finish()


if __name__ == "__main__":
    raise SystemExit(main())
