"""Contenders that sample: our engines, `generate` of transformers, and a batched loop on llama.cpp alone.

- Each runs in a process of its own: `python -m bench.real.samplers KIND DTYPE FOLDER THREADS`. Work goes in: a list of
  [prompt, samples, tokens]; out come the seconds and how many of the tokens that were asked for it has drawn.
- No end token cuts a completion short: the folder names one that no policy draws (`endless`).
- Our engines return the log-probability of each token. The others are not asked for it, which is in their favour.
"""

import json
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from bench.harness import serve
from protocol.work.rollout import pack_tokens
from swarm_node.engine.engine import Engine
from swarm_node.engine.messages import GroupDone, SampleRequest

NO_TOKEN = 10**9
"""An end token that no vocabulary has."""

CONTEXT_STEP = 256
"""llama.cpp rounds a sequence's room up to this."""


class Asked(NamedTuple):
    """A group of samples."""

    prompt: list[int]
    samples: int
    tokens: int
    """Length of each sample."""


Sampler = Callable[[Sequence[Asked]], int]
"""Draws what is asked, and returns the number of tokens."""


def endless(source: Path, folder: Path) -> Path:
    """A copy of a policy with an end token that it never draws."""
    shutil.copytree(source, folder)
    for name in ("config.json", "generation_config.json"):
        changed = json.loads((source / name).read_text()) | {"eos_token_id": NO_TOKEN}
        (folder / name).write_text(json.dumps(changed))
    return folder


def with_engine(engine: Engine, folder: Path) -> Sampler:
    """Return a sampler with one of our engines."""
    engine.load(folder, 1)

    def sample(work: Sequence[Asked]) -> int:
        requests = [
            SampleRequest(
                request_id=str(number),
                version=1,
                prompt=pack_tokens(asked.prompt),
                seed=number,
                samples=asked.samples,
                max_new_tokens=asked.tokens,
                temperature=1.0,
            )
            for number, asked in enumerate(work)
        ]
        done: list[GroupDone] = []
        engine.generate(requests, done.append)
        return sum(len(drawn.tokens) // 4 for group in done for drawn in group.samples)

    return sample


def with_torch(folder: Path, dtype: str, threads: int) -> Sampler:
    """Sample with our engine on torch."""
    import torch

    from swarm_node.engine.torch.engine import TorchEngine

    torch.set_num_threads(threads)
    return with_engine(TorchEngine(device="cpu", dtype=dtype), folder)


def with_llama(folder: Path, dtype: str, threads: int) -> Sampler:
    """Sample with our engine on llama.cpp."""
    from swarm_node.engine.llama.engine import LlamaEngine

    return with_engine(LlamaEngine(dtype=dtype, threads=threads, gpu_layers=0), folder)


def with_generate(folder: Path, dtype: str, threads: int) -> Sampler:
    """`generate` of transformers: all samples in one batch, padded on the left, which ends with its longest row."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(threads)
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype), local_files_only=True)
    model.generation_config.eos_token_id = None

    def sample(work: Sequence[Asked]) -> int:
        prompts = [asked.prompt for asked in work for _ in range(asked.samples)]
        width = max(map(len, prompts))
        with torch.inference_mode():
            model.generate(
                torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in prompts]),
                attention_mask=torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts]),
                max_new_tokens=max(asked.tokens for asked in work),
                do_sample=True,
                temperature=1.0,
                top_k=0,
                top_p=1.0,
                eos_token_id=None,
                pad_token_id=0,
            )
        return sum(asked.samples * asked.tokens for asked in work)

    return sample


class LlamaLoop:
    """A loop over `llama_decode`, as llama.cpp's own `examples/batched` has it: one sequence for each sample.

    Prompts are computed once and copied, rows leave when they are done, and llama.cpp's own sampler draws. Cache and
    attention are those of our engine in the same precision; for float16 they are llama.cpp's defaults.
    """

    def __init__(self, folder: Path, dtype: str, threads: int) -> None:
        import llama_cpp

        from swarm_node.engine.llama import weights
        from swarm_node.engine.llama.engine import TYPES
        from swarm_node.engine.llama.recipes import recipe_of
        from swarm_node.engine.policy_files import read_config

        self._llama, self._exact, self._threads = llama_cpp, dtype == "float32", threads
        recipe, config = recipe_of(read_config(folder))
        given = weights.sources(folder)
        places = weights.places(recipe, config, TYPES[dtype], given)
        llama_cpp.llama_backend_init()
        with tempfile.TemporaryDirectory() as scratch:
            file = Path(scratch) / "policy.gguf"
            weights.write_gguf(file, recipe, config, places, given)
            parameters = llama_cpp.llama_model_default_params()
            parameters.load_mode = llama_cpp.LLAMA_LOAD_MODE_NONE
            parameters.n_gpu_layers = 0
            self._model = llama_cpp.llama_model_load_from_file(bytes(file), parameters)
        assert self._model
        self._sampler = llama_cpp.llama_sampler_init_dist(1)
        self._context: Any = None
        self._room = (0, 0)

    def __call__(self, work: Sequence[Asked]) -> int:
        """Draw what is asked."""
        llama, rows = self._llama, sum(asked.samples for asked in work)
        context = self._opened(rows, max(len(asked.prompt) + asked.tokens for asked in work))
        batch = llama.llama_batch_init(max(rows, sum(len(asked.prompt) for asked in work)), 0, 1)
        memory = llama.llama_get_memory(context)
        llama.llama_memory_clear(memory, False)
        last, first, ends = list[int](), 0, list[int]()
        batch.n_tokens = 0
        for asked in work:
            for place, token in enumerate(asked.prompt):
                self._append(batch, token, place, first, wanted=place == len(asked.prompt) - 1)
            last += [batch.n_tokens - 1] * asked.samples
            ends += [len(asked.prompt) + asked.tokens] * asked.samples
            first += asked.samples
        self._decode(context, batch)
        drawn = [llama.llama_sampler_sample(self._sampler, context, place) for place in last]
        first = 0
        for asked in work:
            for row in range(first + 1, first + asked.samples):
                llama.llama_memory_seq_cp(memory, first, row, -1, -1)
            first += asked.samples
        places = [len(asked.prompt) for asked in work for _ in range(asked.samples)]
        running, total = [row for row in range(rows) if places[row] + 1 < ends[row]], rows
        while running:
            batch.n_tokens = 0
            for row in running:
                self._append(batch, drawn[row], places[row], row, wanted=True)
                places[row] += 1
            self._decode(context, batch)
            for index, row in enumerate(running):
                drawn[row] = llama.llama_sampler_sample(self._sampler, context, index)
            total += len(running)
            running = [row for row in running if places[row] + 1 < ends[row]]
        llama.llama_batch_free(batch)
        return total

    def _opened(self, rows: int, width: int) -> Any:
        """A context with that much room; it stays for the next batch of the same size."""
        llama, width = self._llama, -(-width // CONTEXT_STEP) * CONTEXT_STEP
        if self._room == (rows, width):
            return self._context
        if self._context:
            llama.llama_free(self._context)
        parameters = llama.llama_context_default_params()
        parameters.n_ctx, parameters.n_seq_max = rows * width, rows
        parameters.n_outputs_max = rows
        parameters.n_threads = parameters.n_threads_batch = self._threads
        parameters.kv_unified = False
        if self._exact:
            parameters.flash_attn_type = llama.LLAMA_FLASH_ATTN_TYPE_DISABLED
            parameters.type_k = parameters.type_v = 0  # float32
        self._context, self._room = llama.llama_init_from_model(self._model, parameters), (rows, width)
        assert self._context
        return self._context

    def _append(self, batch: Any, token: int, place: int, row: int, *, wanted: bool) -> None:
        number = batch.n_tokens
        batch.token[number], batch.pos[number], batch.logits[number] = token, place, wanted
        batch.n_seq_id[number] = 1
        batch.seq_id[number][0] = row
        batch.n_tokens = number + 1

    def _decode(self, context: Any, batch: Any) -> None:
        if result := self._llama.llama_decode(context, batch):
            raise RuntimeError(f"llama_decode returned {result}")


KINDS: dict[str, Callable[[Path, str, int], Sampler]] = {
    "torch": with_torch,
    "generate": with_generate,
    "llama": with_llama,
    "llama.cpp": LlamaLoop,
}


def main(kind: str, dtype: str, folder: str, threads: str) -> None:
    """Answer with seconds and tokens, work by work."""
    sampler = KINDS[kind](Path(folder), dtype, int(threads))

    def work(asked: list[list[Any]]) -> dict[str, float]:
        began = time.perf_counter()
        tokens = sampler([Asked(*request) for request in asked])
        return {"seconds": time.perf_counter() - began, "tokens": tokens}

    serve(work)


def command(kind: str, dtype: str, folder: Path, threads: int) -> list[str]:
    """The process of a contender."""
    return [sys.executable, "-P", "-m", "bench.real.samplers", kind, dtype, str(folder), str(threads)]


if __name__ == "__main__":
    main(*sys.argv[1:])
