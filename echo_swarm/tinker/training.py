"""Training of the models: a loss and its gradient, a step of AdamW, and states on the disk. One thread runs all of it.

- Gradients of several requests add up until the next step, as Tinker's do.
- If a request fails, a part of a batch is missing: the next step is refused. No step is made with a part of what was
  asked for, or with a gradient that is not finite.
- Every step clears the gradient, also one that is refused: what follows is a new batch.
"""

import json
import math
import os
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from echo_swarm.tinker import losses
from echo_swarm.tinker.calls import AdamParams
from echo_swarm.tinker.forms import ForwardBackward, TrainingExample, read_examples
from echo_swarm.tinker.lora import LoraMatrices, LoraShape, SharedBase
from protocol import limits
from protocol.errors import ConfigInvalid, FieldRefused, MessageTooLarge, NonFiniteNumber, NotFound, OutOfOrder

STATE, ABOUT = "state.safetensors", "about.json"


class TinkerModel:
    """One adapter in training, with its optimizer and the gradient so far."""

    def __init__(self, base: SharedBase, shape: LoraShape) -> None:
        self._base = base
        self.matrices = LoraMatrices(shape, base.layers)
        self._parameters = list(self.matrices.named().values())
        self._optimizer = torch.optim.AdamW(self._parameters)
        self._is_partial = False
        """True if a request since the last step failed: the gradient lacks its part."""
        self._has_gradient = False
        self.steps = 0

    def forward_backward(self, request: ForwardBackward) -> tuple[list[np.ndarray[Any, Any]], float]:
        """Return the log-probabilities of each example's targets, and the loss; add its gradient, if one is wanted."""
        try:
            examples = read_examples(request.data)
            settings = losses.read_settings(request.loss, request.settings)
            self._require_usable(request.loss, examples)
            logprobs, loss = self._computed(request, examples, settings)
        except Exception:  # raised again; whatever it was, the gradient is not whole
            if not request.forward_only:
                self._is_partial = True
            raise
        if not request.forward_only:
            self._has_gradient = True
        return logprobs, loss

    def discard(self) -> None:
        """Note that a request was lost, so that the gradient lacks its part."""
        self._is_partial = True

    def clear(self) -> None:
        """Begin a new gradient."""
        self._optimizer.zero_grad(set_to_none=True)
        self._is_partial = self._has_gradient = False

    def step(self, params: AdamParams) -> dict[str, float]:
        """Make one step with the gradient so far, and return its metrics; the gradient is cleared in any case."""
        try:
            metrics = self._step(params)
        finally:
            self.clear()
        self.steps += 1
        return metrics

    def _step(self, params: AdamParams) -> dict[str, float]:
        if self._is_partial:
            raise OutOfOrder(
                "A forward_backward before this optim_step failed, so its gradient lacks a part. No step was made, and "
                "the gradient was cleared.",
                hint="Send the whole batch again, then optim_step.",
            )
        if not self._has_gradient:
            raise OutOfOrder(
                "There is no gradient: no forward_backward came since the last optim_step.",
                hint="Send forward_backward first.",
            )
        _require_step(params)
        norm = _norm(self._parameters)
        if not math.isfinite(norm):
            raise NonFiniteNumber("The gradient is infinite or NaN. No step was made, and the gradient was cleared.")
        if params.grad_clip_norm > 0:
            torch.nn.utils.clip_grad_norm_(self._parameters, params.grad_clip_norm)
        for group in self._optimizer.param_groups:
            group |= {"lr": params.learning_rate, "betas": (params.beta1, params.beta2)}
            group |= {"eps": params.eps, "weight_decay": params.weight_decay}
        self._optimizer.step()
        return {"grad_norm:mean": norm}

    def save(self, folder: Path) -> None:
        """Write adapter and optimizer; the folder appears when it is complete."""
        tensors = {name: part.detach().cpu().contiguous() for name, part in self.matrices.named().items()}
        for name, part in self.matrices.named().items():
            kept = self._optimizer.state.get(part, {})
            tensors |= {f"{key}.{name}": value.detach().cpu().clone() for key, value in kept.items()}
        about = {"shape": asdict(self.matrices.shape), "steps": self.steps}
        made = folder.with_name(f".{folder.name}.new")
        shutil.rmtree(made, ignore_errors=True)
        made.mkdir(parents=True)
        save_file(tensors, made / STATE)
        (made / ABOUT).write_text(json.dumps(about))
        for path in (made / STATE, made / ABOUT, made):
            _sync(path)
        shutil.rmtree(folder, ignore_errors=True)
        made.rename(folder)
        _sync(folder.parent)

    def load(self, folder: Path, *, with_optimizer: bool) -> None:
        """Continue from a saved state of the same shape."""
        tensors = _read_state(folder)
        mine = self.matrices.named()
        if any(name not in tensors or tensors[name].shape != part.shape for name, part in mine.items()):
            raise ConfigInvalid("The state was saved from another policy or with another rank.")
        with torch.no_grad():
            for name, part in mine.items():
                part.copy_(tensors[name])
        self._optimizer.state.clear()
        self.clear()
        if not with_optimizer:
            return
        self.steps = read_about(folder)["steps"]
        for name, part in mine.items():
            kept = {key: tensors.get(f"{key}.{name}") for key in ("step", "exp_avg", "exp_avg_sq")}
            if all(value is not None for value in kept.values()):
                self._optimizer.state[part] = {
                    key: value if key == "step" else value.to(part.device)
                    for key, value in kept.items()
                    if value is not None
                }

    def _require_usable(self, loss: str, examples: Sequence[TrainingExample]) -> None:
        config = self._base.model.config.get_text_config()
        longest, words = int(config.max_position_embeddings), int(config.vocab_size)
        for number, example in enumerate(examples):
            place = f"data[{number}]"
            losses.require_inputs(loss, place, frozenset(example.inputs))
            if len(example.tokens) > longest:
                raise MessageTooLarge(f"{place} has {len(example.tokens):,} tokens; the model takes {longest:,}.")
            for name, values in [("model_input", example.tokens), *example.inputs.items()]:
                if name in ("model_input", "target_tokens"):
                    _require_tokens(f"{place}.{name}", values, words)
                elif not np.isfinite(values).all():
                    raise NonFiniteNumber(f"{place}.{name} has NaN or infinite numbers.")

    def _computed(
        self, request: ForwardBackward, examples: Sequence[TrainingExample], settings: dict[str, float]
    ) -> tuple[list[np.ndarray[Any, Any]], float]:
        compute = losses.find_loss(request.loss).compute
        logprobs, total = dict[int, np.ndarray[Any, Any]](), 0.0
        with self._base.adapted(self.matrices) as model, torch.set_grad_enabled(not request.forward_only):
            for chosen in _micro_batches(examples):
                batch = _padded([examples[number] for number in chosen], model.device)
                current = _logprobs(model, batch)
                loss = compute(current, batch, settings)
                if not torch.isfinite(loss):
                    raise NonFiniteNumber(
                        "The loss is infinite or NaN.", hint="Check logprobs and advantages: a ratio may be too large."
                    )
                if not request.forward_only:
                    torch.autograd.backward(loss)
                total += float(loss.detach())
                for row, number in enumerate(chosen):
                    logprobs[number] = current[row, : len(examples[number].tokens)].detach().cpu().numpy()
        return [logprobs[number] for number in range(len(examples))], total


def read_about(folder: Path) -> dict[str, Any]:
    """Return the description of a saved state."""
    try:
        about = json.loads((folder / ABOUT).read_text())
        return {"shape": LoraShape(**about["shape"]), "steps": int(about["steps"])}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise NotFound(f"There is no usable state {folder.name}: {type(error).__name__}.") from error


def _read_state(folder: Path) -> dict[str, torch.Tensor]:
    if not (folder / STATE).is_file():
        raise NotFound(f"There is no state {folder.name}.")
    with safe_open(folder / STATE, framework="pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  # a safetensors file is not a mapping


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _require_tokens(place: str, values: np.ndarray[Any, Any], words: int) -> None:
    if values.dtype != np.int64:
        raise FieldRefused(f"{place} must be int64.")
    if values.min() < 0 or values.max() >= words:
        raise FieldRefused(f"{place} has a token outside the vocabulary of {words:,}.")


def _require_step(params: AdamParams) -> None:
    for name, value in params.model_dump().items():
        if not math.isfinite(value) or value < 0:
            raise NonFiniteNumber(f"adam_params.{name} is {value}; it must be a number that is 0 or above.")
    for name in ("beta1", "beta2"):
        if getattr(params, name) >= 1:
            raise FieldRefused(f"adam_params.{name} must be below 1.")


def _norm(parameters: Sequence[torch.nn.Parameter]) -> float:
    parts = [part.grad.detach().float().norm() for part in parameters if part.grad is not None]
    return float(torch.stack(parts).norm()) if parts else 0.0


def _micro_batches(examples: Sequence[TrainingExample]) -> Iterator[list[int]]:
    """Yield the numbers of examples that are computed together, the longest first: padding stays small."""
    order = sorted(range(len(examples)), key=lambda number: -len(examples[number].tokens))
    start = 0
    while start < len(order):
        longest = len(examples[order[start]].tokens)
        count = max(1, limits.TINKER_MICRO_BATCH_TOKENS // longest)
        yield order[start : start + count]
        start += count


def _padded(examples: Sequence[TrainingExample], device: torch.device) -> dict[str, torch.Tensor]:
    """Return the examples as tensors [N, T], with zeros behind their ends."""
    width = max(len(example.tokens) for example in examples)

    def table(rows: Sequence[np.ndarray[Any, Any]], dtype: torch.dtype) -> torch.Tensor:
        made = torch.zeros(len(rows), width, dtype=dtype)
        for number, row in enumerate(rows):
            made[number, : len(row)] = torch.from_numpy(row.copy())
        return made.to(device)

    batch = {"tokens": table([example.tokens for example in examples], torch.long)}
    batch["inside"] = table([np.ones(len(example.tokens), np.float32) for example in examples], torch.float32)
    names = {name for example in examples for name in example.inputs}
    for name in names:
        dtype = torch.long if name == "target_tokens" else torch.float32
        default = np.ones if name == "weights" else np.zeros
        batch[name] = table(
            [example.inputs.get(name, default(len(example.tokens), np.float32)) for example in examples], dtype
        )
    return batch


def _logprobs(model: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Return the log-probability of each target [N, T], in float32."""
    logits: torch.Tensor = model(input_ids=batch["tokens"], use_cache=False).logits.float()
    chosen = logits.gather(-1, batch["target_tokens"][..., None]).squeeze(-1)
    return chosen - torch.logsumexp(logits, -1)
