"""Samples groups from any causal model of `transformers`, in plain torch on the CPU.

- A prompt is prefilled once and its cache shared out among the group's samples.
- All groups of a wave decode together; rows that finish leave the batch at once, groups are handed out as they finish.
- Prompts are padded on the left, so the newest token of every row stands in the last column; the mask hides the padding
  and positions count from each prompt's own first token.
- Which token is drawn depends on (seed, sample, position) alone, see `protocol.sampling`.
- Log-probabilities are those of the distribution drawn from, that is at the request's temperature.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, GenerationConfig

from protocol.errors import EngineFailed
from protocol.rollout import Sample, pack_logprobs, pack_tokens, unpack_tokens
from protocol.sampling import uniform_table
from swarm_node.engine.messages import GroupDone, Loaded, Measured, Request

ROWS_MAX = 512
"""Samples decoded at once; tiny models are bound by the cost per step, so many rows are cheap."""


class TorchEngine:
    """Holds one policy and samples from it."""

    def __init__(self) -> None:
        self._model: Any = None
        self._config = b""
        self._end_tokens = torch.empty(0, dtype=torch.long)

    def load(self, folder: Path) -> Loaded:
        """Take a policy folder's weights, into the model that is there if the configuration is the same."""
        started = time.monotonic()
        try:
            config = (folder / "config.json").read_bytes()
            rebuilt = config != self._config or not self._swap(folder)
            if rebuilt:
                self._build(folder)
            self._config = config
            self._end_tokens = _end_tokens(folder, self._model)
        except (OSError, ValueError, RuntimeError, SafetensorError) as error:
            self._model, self._config = None, b""
            raise EngineFailed(f"The policy in {folder} cannot be loaded: {error}") from error
        parameters = sum(tensor.numel() for tensor in self._model.parameters())
        return Loaded(parameters=parameters, rebuilt=rebuilt, seconds=time.monotonic() - started)

    def generate(self, requests: Sequence[Request], on_group: Callable[[GroupDone], None]) -> None:
        """Sample every request; each group is handed over as soon as its last row finishes."""
        if self._model is None:
            raise EngineFailed("No policy is loaded.", hint="Load one before generating.")
        prompts = [[int(token) for token in unpack_tokens(request.prompt)] for request in requests]
        for request, prompt in zip(requests, prompts, strict=True):
            self._check(request, prompt)
        with torch.inference_mode():
            for wave in _waves(requests):
                batch = _Batch(self._model, requests[wave], prompts[wave])
                while batch.rows:
                    for group in batch.step(self._end_tokens):
                        on_group(group)

    def measure(self, rows: int, new_tokens: int) -> Measured:
        """Decode rows that never end, for the node's own throughput."""
        prompt = [0] * 8
        samples = min(rows, 8)
        alike: dict[str, Any] = {"request_id": "", "samples": samples, "max_new_tokens": new_tokens, "temperature": 1.0}
        requests = [Request(prompt=pack_tokens(prompt), seed=number, **alike) for number in range(-(-rows // samples))]
        if self._model is None:
            raise EngineFailed("No policy is loaded.", hint="Load one before measuring.")
        started = time.monotonic()
        never, tokens = torch.empty(0, dtype=torch.long), 0
        with torch.inference_mode():
            for wave in _waves(requests):
                batch = _Batch(self._model, requests[wave], [prompt] * len(requests[wave]))
                tokens += batch.rows * new_tokens
                while batch.rows:
                    batch.step(never)
        return Measured(tokens=tokens, seconds=time.monotonic() - started)

    def _build(self, folder: Path) -> None:
        # No network and no code from the folder, whatever its configuration says.
        self._model = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, local_files_only=True, trust_remote_code=False
        )
        self._model.eval().requires_grad_(False)

    def _swap(self, folder: Path) -> bool:
        """Copy the folder's tensors over the model's; false if they are not the same tensors."""
        ours = dict(self._model.named_parameters())
        theirs = {name: tensor for part in folder.glob("*.safetensors") for name, tensor in load_file(part).items()}
        if {name: tensor.shape for name, tensor in ours.items()} != {name: t.shape for name, t in theirs.items()}:
            return False
        for name, tensor in ours.items():
            tensor.copy_(theirs[name])
        return True

    def _check(self, request: Request, prompt: list[int]) -> None:
        config = self._model.config
        if max(prompt) >= config.vocab_size:
            raise EngineFailed(f"The prompt has token {max(prompt)}, the vocabulary only {config.vocab_size}.")
        if len(prompt) + request.max_new_tokens > config.max_position_embeddings:
            raise EngineFailed(
                f"A prompt of {len(prompt)} tokens and {request.max_new_tokens} new ones pass the model's "
                f"{config.max_position_embeddings} positions."
            )


class _Batch:
    """The rows of some requests that are still being decoded."""

    def __init__(self, model: Any, requests: Sequence[Request], prompts: Sequence[list[int]]) -> None:
        self._model, self._requests = model, requests
        owners = [number for number, request in enumerate(requests) for _ in range(request.samples)]
        samples = [sample for request in requests for sample in range(request.samples)]
        longest = max(request.max_new_tokens for request in requests)
        seeds = [requests[number].seed for number in owners]
        self.rows = len(owners)
        self._step = 0
        self._first_token_at = 0.0
        self._alive = torch.arange(self.rows)  # [live rows], as indices into the arrays of all rows
        self._owners = torch.tensor(owners)
        self._unfinished = [request.samples for request in requests]
        self._uniforms = torch.from_numpy(uniform_table(seeds, samples, longest))  # [rows, steps]
        self._temperatures = torch.tensor([requests[number].temperature for number in owners])
        self._limits = torch.tensor([requests[number].max_new_tokens for number in owners])
        self._tokens = torch.zeros(self.rows, longest, dtype=torch.long)
        self._logprobs = torch.zeros(self.rows, longest)
        self._lengths = torch.zeros(self.rows, dtype=torch.long)
        self._ended = torch.zeros(self.rows, dtype=torch.bool)
        self._prefill(prompts)

    def step(self, end_tokens: torch.Tensor) -> list[GroupDone]:
        """Draw one token for every live row; returns the groups that this completes."""
        if self._step:
            self._forward()
        alive, step = self._alive, self._step
        scores = torch.log_softmax(self._logits / self._temperatures[alive, None], dim=-1)  # [live, vocabulary]
        tokens = _pick(scores, self._uniforms[alive, step])
        if step == 0:
            self._first_token_at = time.monotonic()
        self._tokens[alive, step] = tokens
        self._logprobs[alive, step] = scores.gather(1, tokens[:, None])[:, 0]
        self._step += 1

        ended = torch.isin(tokens, end_tokens)
        finished = ended | (self._limits[alive] == self._step)
        if not finished.any():
            return []
        self._ended[alive[ended]] = True
        self._lengths[alive[finished]] = self._step
        return self._retire(finished)

    def _prefill(self, prompts: Sequence[list[int]]) -> None:
        width = max(map(len, prompts))
        mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
        tokens = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in prompts])  # [prompts, width]
        out = self._model(
            input_ids=tokens,
            attention_mask=mask,
            position_ids=(mask.cumsum(1) - 1).clamp(min=0),
            use_cache=True,
            logits_to_keep=1,
        )
        self._cache = out.past_key_values
        self._cache.batch_select_indices(self._owners)  # one row per sample from here on
        self._logits = out.logits[self._owners, -1].float()  # [rows, vocabulary]
        self._mask = mask[self._owners]
        self._positions = mask.sum(1)[self._owners]  # of the next token

    def _forward(self) -> None:
        self._mask = torch.nn.functional.pad(self._mask, (0, 1), value=1)
        out = self._model(
            input_ids=self._tokens[self._alive, self._step - 1][:, None],
            attention_mask=self._mask,
            position_ids=self._positions[:, None],
            past_key_values=self._cache,
            use_cache=True,
        )
        self._logits = out.logits[:, -1].float()
        self._positions = self._positions + 1

    def _retire(self, finished: torch.Tensor) -> list[GroupDone]:
        """Take finished rows out of the batch."""
        complete = []
        for owner in self._owners[self._alive[finished]].tolist():
            self._unfinished[owner] -= 1
            if self._unfinished[owner] == 0:
                complete.append(self._group(owner))
        kept = (~finished).nonzero()[:, 0]
        self._alive, self.rows = self._alive[kept], len(kept)
        self._mask, self._positions = self._mask[kept], self._positions[kept]
        self._cache.batch_select_indices(kept)
        return complete

    def _group(self, owner: int) -> GroupDone:
        rows = (self._owners == owner).nonzero()[:, 0].tolist()
        samples = tuple(self._sample(row, int(self._lengths[row])) for row in rows)
        return GroupDone(
            request_id=self._requests[owner].request_id,
            samples=samples,
            first_token_ago_s=time.monotonic() - self._first_token_at,
        )

    def _sample(self, row: int, length: int) -> Sample:
        return Sample(
            tokens=pack_tokens(self._tokens[row, :length].tolist()),
            logprobs=pack_logprobs(self._logprobs[row, :length].tolist()),
            finish="stop" if self._ended[row] else "length",
        )


def _pick(scores: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
    """`protocol.sampling.pick` for every row: scores [rows, vocabulary], uniforms [rows] → tokens [rows]."""
    cumulative = scores.exp().double().cumsum(-1)
    total = cumulative[:, -1]
    if not torch.isfinite(total).all():
        raise EngineFailed("The policy gives probabilities that are not numbers.", hint="Its weights are damaged.")
    below = torch.nextafter(total, torch.zeros_like(total))
    targets = torch.minimum(uniforms * total, below)
    return torch.searchsorted(cumulative, targets[:, None], right=True)[:, 0]


def _waves(requests: Sequence[Request]) -> Iterator[slice]:
    """Runs of requests with at most `ROWS_MAX` rows together."""
    start, rows = 0, 0
    for number, request in enumerate(requests):
        if rows and rows + request.samples > ROWS_MAX:
            yield slice(start, number)
            start, rows = number, 0
        rows += request.samples
    yield slice(start, len(requests))


def _end_tokens(folder: Path, model: Any) -> torch.Tensor:
    """The tokens that end a completion; a policy may have several, and may name them in either of two files."""
    named = model.config.eos_token_id
    if (folder / "generation_config.json").exists():
        named = GenerationConfig.from_pretrained(folder).eos_token_id or named
    if named is None:
        raise ValueError("neither config.json nor generation_config.json names an end token")
    return torch.tensor([named] if isinstance(named, int) else list(named))
