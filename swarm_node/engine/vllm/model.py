"""A vLLM engine with one policy: built from a folder; its weights can be swapped in place, samples added and aborted.

- vLLM runs inside this process: when the child ends, no other process keeps the GPU's memory. With several cards, it
  starts a worker process for each, which ends with the child (`foreign`).
- Several cards hold a part of every layer each, and exchange their parts through NCCL alone, which finds out what
  connects them: vLLM's own exchange wants NVLink or peer access.
- `of_platform` has the settings for a CPU or a GPU, `command` those that must be set before vLLM is imported.
- Custom sampling has a different form for each of vLLM's two model runners; `sampling` uses that of the first one.
- vLLM keeps its prefix cache when weights change: this module empties it.
"""

import gc
import math
import subprocess
import sys
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from vllm import EngineArgs, SamplingParams
from vllm.distributed.parallel_state import cleanup_dist_env_and_memory
from vllm.platforms import current_platform
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.llm_engine import LLMEngine

from swarm_exact.merging import without_adapter
from swarm_node.engine.canary import count_ahead
from swarm_node.engine.messages import SampleRequest
from swarm_node.engine.policy_files import read_adapter, read_config
from swarm_node.engine.torch.weights import SHORT_NAMES, mapped_tensors
from swarm_node.engine.vllm.command import FP8
from swarm_node.engine.vllm.sampling import SeedBound

ROWS_MAX = 256
"""Samples in one batch; vLLM itself admits fewer if its cache is too small."""

CPU_CACHE_BYTES = 2**30
"""Memory for keys and values on a CPU, where vLLM would take most of the free memory."""

GPU_SHARE = 0.9
"""Share of the free GPU memory: vLLM counts from the total, and refuses to start if a desktop uses some of it."""

FULLEST = """
import sys, torch
print(*min(map(torch.cuda.mem_get_info, range(int(sys.argv[1]))), key=lambda read: read[0] / read[1]))
"""
"""Program that prints the free and the total bytes of the card with the least free share."""

FULLEST_S = 120.0

QUANTIZED = "fp8_per_channel"
"""vLLM's name for what `--dtype fp8` does to the published weights while they are loaded.

Matrices of layers are in e4m3 with a scale for each output, activations with a scale for each token; embeddings and
output layer stay in bf16.
"""

CANARY = "canary"

Shapes = dict[str, tuple[int, ...]]


class NewTokens(NamedTuple):
    """New tokens of a sample since the last report."""

    sample_id: str
    tokens: Sequence[int]
    logprobs: Sequence[float]
    finished: bool
    cached: int = 0
    """Tokens of the sample's prompt that vLLM had in its prefix cache."""


class VllmModel:
    """A vLLM engine; `close` it before the next is built."""

    def __init__(self, folder: Path, dtype: str, *, rows: int, vram_share: float, cards: int) -> None:
        self._shapes, self.rows = _shapes(folder), rows
        with without_adapter(folder) as base:
            self._engine: Any = _start(base, dtype, rows, vram_share, cards)
        if read_adapter(folder) is not None:
            self._engine.collective_rpc("swap_policy", args=(str(folder),))
        config, self._eight_bit = self._engine.model_config, dtype == FP8
        self.vocab_size = int(config.get_vocab_size())
        self.positions_max = int(config.max_model_len)
        precision = FP8 if self._eight_bit else SHORT_NAMES[config.dtype]
        self.numerics = f"vllm/{precision}/{current_platform.device_type}"
        self.parameters = sum(map(math.prod, self._shapes.values()))

    @property
    def busy(self) -> bool:
        return bool(self._engine.has_unfinished_requests())

    def swap(self, folder: Path) -> bool:
        """Load the weights of another folder; return False, and load nothing, if its tensors differ, or in fp8.

        After an error the model must not be used.
        """
        if self._eight_bit or _shapes(folder) != self._shapes:
            return False  # weights in eight bits are transposed and scaled: nothing can be copied over them
        self._engine.collective_rpc("swap_policy", args=(str(folder),))
        self._engine.reset_prefix_cache()
        return True

    def add(
        self,
        request: SampleRequest,
        number: int,
        prompt: list[int],
        prefix: list[int],
        ends: Collection[int],
        *,
        stream: bool,
    ) -> str:
        """Queue one sample and return its id. With `stream` each of its tokens is reported, else only its end."""
        sample_id = f"{request.request_id}/{number}"
        wanted: dict[str, Any] = {
            "seed": request.seed,
            "sample": number,
            "temperature": request.temperature,
            "own_temperature": request.own_temperature,
            "start": len(prefix),
            "forced": [],
        }
        tokens_max = request.length_max(len(prefix)) - len(prefix)
        self._add(sample_id, [*prompt, *prefix], tokens_max, ends, wanted, stream=stream)
        return sample_id

    def step(self) -> list[NewTokens]:
        """Admit samples, and draw a token for every running sample; return the reported tokens."""
        return [_drawn(output) for output in self._engine.step()]

    def abort(self, sample_ids: Collection[str]) -> None:
        """Drop these samples."""
        self._engine.abort_request(list(sample_ids))

    def score(self, tokens: Sequence[int], lengths: Sequence[int]) -> NDArray[np.float64]:
        """Compute the canary's `Scores`: each prefix is a prompt, after which the next tokens are forced."""
        ahead = count_ahead(tokens, lengths)
        for length in lengths:
            forced = list(tokens[length : length + ahead])
            wanted = {"seed": 0, "sample": 0, "temperature": 1.0, "own_temperature": None, "start": 0, "forced": forced}
            self._add(f"{CANARY}/{length}", list(tokens[:length]), ahead, (), wanted, stream=False)
        scores = np.full((ahead, len(lengths)), np.nan)
        while self.busy:
            for drawn in self.step():
                length = int(drawn.sample_id.removeprefix(f"{CANARY}/"))
                scores[: len(drawn.logprobs), lengths.index(length)] = drawn.logprobs
        return scores

    def close(self) -> None:
        """Release everything that vLLM holds in this process."""
        self._engine.engine_core.shutdown()
        self._engine = None
        gc.collect()
        cleanup_dist_env_and_memory()

    def _add(
        self,
        sample_id: str,
        prompt: list[int],
        tokens_max: int,
        ends: Collection[int],
        wanted: dict[str, Any],
        *,
        stream: bool,
    ) -> None:
        parameters = SamplingParams(
            temperature=0.0,  # each masked row has one token left
            max_tokens=tokens_max,
            stop_token_ids=sorted(ends),
            ignore_eos=True,  # the policy's own end tokens are those that are named
            logprobs=0,  # of the drawn token only
            flat_logprobs=True,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA if stream else RequestOutputKind.FINAL_ONLY,
            extra_args=wanted,
        )
        self._engine.add_request(sample_id, {"prompt_token_ids": prompt}, parameters)


def _start(folder: Path, dtype: str, rows: int, vram_share: float, cards: int) -> Any:
    return LLMEngine.from_engine_args(
        EngineArgs(
            model=str(folder),
            dtype="bfloat16" if dtype == FP8 else _published(folder) if dtype == "auto" else dtype,
            quantization=QUANTIZED if dtype == FP8 else None,
            load_format="safetensors",
            use_tqdm_on_load=False,  # the child's standard error is the agent's log
            trust_remote_code=False,
            skip_tokenizer_init=True,
            generation_config="vllm",
            logits_processors=[SeedBound],
            logprobs_mode="processed_logits",
            worker_extension_cls="swarm_node.engine.vllm.worker.WorkerExtension",
            max_model_len=-1,  # the policy's own, or as much as memory allows
            max_num_seqs=rows,
            disable_log_stats=True,
            async_scheduling=False,
            enable_prefix_caching=True,  # a turn of an episode computes only what is new since the turn before
            seed=0,
            tensor_parallel_size=cards,
            distributed_executor_backend="mp" if cards > 1 else "uni",
            disable_custom_all_reduce=True,
            **of_platform(vram_share, cards),
        )
    )


def _drawn(output: Any) -> NewTokens:
    (sample,) = output.outputs
    logprobs, cached = sample.logprobs.logprobs, output.num_cached_tokens or 0
    return NewTokens(output.request_id, sample.token_ids, logprobs, output.finished, cached)


def _published(folder: Path) -> str:
    """Return the default precision: that of the published weights, and on a CPU always float32.

    By default, vLLM rounds float32 weights.
    """
    config = read_config(folder)
    named = config.get("dtype") or config.get("torch_dtype") or "float32"
    if named not in ("float32", "bfloat16"):
        raise ValueError(f"dtype {named} is neither float32 nor bfloat16")
    return "float32" if current_platform.is_cpu() else str(named)


def of_platform(vram_share: float = 1.0, cards: int = 1) -> dict[str, Any]:
    """Return the settings for a CPU or a GPU; `vram_share` is the owner's limit on GPU memory."""
    if not current_platform.is_cpu():
        free_bytes, total_bytes = torch.cuda.mem_get_info() if cards == 1 else _fullest(cards)
        return {"gpu_memory_utilization": min(vram_share, GPU_SHARE * free_bytes / total_bytes)}
    return {"enforce_eager": True, "kv_cache_memory_bytes": CPU_CACHE_BYTES // cards}


def _fullest(cards: int) -> tuple[int, int]:
    """Return the free and total bytes of the card with the least free share.

    A process of its own asks: in this one, which computes nothing itself, CUDA would keep memory of every card.
    """
    words = [sys.executable, "-P", "-c", FULLEST, str(cards)]
    done = subprocess.run(words, capture_output=True, text=True, check=True, timeout=FULLEST_S)
    free_bytes, total_bytes = map(int, done.stdout.split())
    return free_bytes, total_bytes


def _shapes(folder: Path) -> Shapes:
    with mapped_tensors(folder) as tensors:
        return {name: tuple(shape) for name, shape in tensors.shapes.items()}
