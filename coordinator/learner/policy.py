"""The policy in training: weights, optimizer, one update at a time.

- The weights in training are float32, whatever the policy came in; it is published in what it came in. So an update too
  small for a bf16 weight is not lost, but shows once enough of them have come together.
- An update is computed in pieces whose gradients add up to that of the whole. Samples that teach nothing, since their
  advantage is zero, are scored without a gradient.
- After a restore the next update is bit for bit the one that would have followed.
"""

import copy
import json
import shutil
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from coordinator.learner import checkpoint
from coordinator.learner.advantages import advantages, overlong_penalty, varied
from coordinator.learner.batch import Tensors, collate, pieces
from coordinator.learner.forward import completion_logprobs, prepare
from coordinator.learner.lora import Adapters
from coordinator.learner.objective import Metrics, Terms, policy_loss, shares
from coordinator.learner.settings import TrainSettings
from protocol import canary
from protocol.errors import ConfigInvalid
from protocol.learning import TrainingGroup


@dataclass(frozen=True, slots=True)
class Step:
    """What one update did."""

    metrics: Metrics
    distances: dict[str, float]
    """Claim id → mean |log π/μ| over its tokens: large where the claimed log-probabilities cannot be true."""


class Policy:
    """A model from a hub-format folder, and the optimizer that changes it."""

    def __init__(self, folder: Path, settings: TrainSettings) -> None:
        self._folder = folder
        self._settings = settings
        self._published_dtype: torch.dtype = (
            AutoConfig.from_pretrained(folder, local_files_only=True).dtype or torch.float32
        )
        self.model = self._load()
        self._reference = self._load().requires_grad_(False) if settings.algorithm.beta else None
        self._adapters = Adapters(self.model, settings.lora_rank, settings.lora_alpha) if settings.lora_rank else None
        self._trained = [weight for weight in (self._adapters or self.model).parameters() if weight.requires_grad]
        self._optimizer = torch.optim.AdamW(
            self._trained,
            lr=settings.learning_rate,
            betas=settings.betas,
            weight_decay=settings.weight_decay,
            fused=True,
        )
        ends = self.model.generation_config.eos_token_id or self.model.config.eos_token_id
        self.ends: list[int] = [ends] if isinstance(ends, int) else list(ends or ())
        """Tokens that end a completion."""
        self.update = 0
        """Updates made so far."""

    def _load(self) -> Any:
        model: Any = AutoModelForCausalLM.from_pretrained(self._folder, dtype=torch.float32, local_files_only=True)
        model.to(self._settings.device)
        prepare(model, self._settings)
        return model

    def train_step(self, groups: Sequence[TrainingGroup]) -> Step:
        """One update on these groups."""
        data = collate(groups)
        terms = self._terms(data)
        entropy = torch.zeros_like(data.mask)
        before = table = torch.zeros_like(data.mask)  # [N, T] log π_old, log π_θ
        rate = self._settings.rate(self.update)
        norm = 0.0
        for iteration in range(self._settings.num_iterations):
            self._optimizer.zero_grad()
            table = self._gradient(data, terms, entropy if iteration == 0 else None)
            if iteration == 0:
                before = table
                terms = replace(terms, old=before)
            norm = float(torch.nn.utils.clip_grad_norm_(self._trained, self._settings.max_grad_norm))
            for parameters in self._optimizer.param_groups:
                parameters["lr"] = rate
            self._optimizer.step()
        self.update += 1
        _, metrics = policy_loss(table, terms, self._settings.algorithm)
        metrics |= {
            "gradient_norm": norm,
            "learning_rate": rate,
            "entropy": float((entropy * data.mask).sum() / data.mask.sum()),
            "reward_mean": float(data.rewards.mean()),
            "groups_with_signal": float(varied(data.rewards, data.owners, len(groups)).float().mean()),
            "samples": float(len(data.rewards)),
            "tokens": float(data.mask.sum()),
        }
        return Step(metrics, _distances(groups, data, before))

    def _terms(self, data: Tensors) -> Terms:
        """What the loss is made of, before the policy has said anything."""
        algorithm, longest = self._settings.algorithm, self._settings.max_completion_length
        judged = torch.ones(len(data.rewards), dtype=torch.bool)
        if algorithm.mask_truncated_completions:
            last = data.tokens.gather(1, (data.lengths[:, None] - 1).clamp(min=0))[:, 0]
            judged &= torch.isin(last, torch.tensor(self.ends))
        if algorithm.filter_zero_variance:
            judged &= varied(data.rewards, data.owners, len(data.prompts))[data.owners]
        shaped = data.rewards + overlong_penalty(data.lengths.float(), longest, algorithm)
        mask = data.mask * judged[:, None]
        return Terms(
            behaviour=data.behaviour,
            mask=mask,
            shares=shares(mask, algorithm, longest=longest),
            advantages=advantages(shaped, data.owners, len(data.prompts), algorithm) * judged,
            reference=self._of_reference(data),
        )

    def _of_reference(self, data: Tensors) -> torch.Tensor | None:
        if self._reference is None:
            return None
        table = torch.zeros_like(data.mask)
        with torch.no_grad():
            for piece in pieces(data, torch.arange(len(data.mask)), self._settings.micro_batch_tokens):
                logprobs, _ = completion_logprobs(self._reference, data, piece, self._settings)
                table[piece, : logprobs.shape[1]] = logprobs.cpu()
        return table

    def _gradient(self, data: Tensors, terms: Terms, entropy: torch.Tensor | None) -> torch.Tensor:
        """Add up the gradients of all pieces: → [N, T] log π_θ. The entropy is filled in where one is wanted."""
        settings, table = self._settings, torch.zeros_like(data.mask)
        teaches = (terms.advantages != 0) | (terms.reference is not None)
        for learning, rows in ((True, teaches), (False, ~teaches)):
            with torch.set_grad_enabled(learning):
                for piece in pieces(data, rows.nonzero()[:, 0], settings.micro_batch_tokens):
                    logprobs, spread = completion_logprobs(self.model, data, piece, settings)
                    logprobs, width = logprobs.cpu(), logprobs.shape[1]
                    if learning:
                        loss, _ = policy_loss(logprobs, terms.rows(piece, width), settings.algorithm)
                        loss.backward()  # type: ignore[no-untyped-call]  # torch leaves it unannotated
                    table[piece, :width] = logprobs.detach()
                    if entropy is not None:
                        entropy[piece, :width] = spread.cpu()
        return table

    def save_hub(self, folder: Path) -> None:
        """Write the policy as a hub-format folder: its weights now, in the dtype it came in, tokenizer and canary."""
        published = _cast(self._weights(), self._published_dtype)
        self.model.save_pretrained(folder, state_dict=published)
        (folder / canary.FILE_NAME).write_text(json.dumps(self._canary(published).model_dump()))
        config = copy.copy(self.model.config)
        config.dtype = self._published_dtype  # transformers writes that of the weights in training
        config.save_pretrained(folder)
        for source in self._folder.iterdir():
            if source.name.startswith(("tokenizer", "special_tokens", "chat_template")):
                shutil.copyfile(source, folder / source.name)

    def _weights(self) -> dict[str, torch.Tensor]:
        state: dict[str, torch.Tensor] = self.model.state_dict()
        return self._adapters.merged(state) if self._adapters else state

    def _canary(self, published: dict[str, torch.Tensor]) -> canary.Canary:
        """What these weights say to the canary's text, whatever their dtype, in the arithmetic of float32."""
        text = canary.text(self.model.config.get_text_config().vocab_size)
        tokens = torch.tensor(text, device=self.model.device)
        with torch.inference_mode(), self._adapters.silent() if self._adapters else nullcontext():
            weights = _cast(published, torch.float32)
            logits = torch.func.functional_call(self.model, weights, (tokens[None],)).logits[0, :-1]
            scores = torch.log_softmax(logits.float(), dim=-1).gather(1, tokens[1:, None])
        return canary.Canary(tokens=text, logprobs=tuple(scores[:, 0].tolist()))

    def save(self, path: Path, **beside: Any) -> None:
        """A checkpoint: everything that the next update depends on, and what else the caller wants to find again."""
        state = {
            "update": self.update,
            "weights": (self._adapters or self.model).state_dict(),
            "optimizer": self._optimizer.state_dict(),
            "random": torch.get_rng_state(),
        }
        checkpoint.write(path, beside | state)

    def restore(self, path: Path) -> dict[str, Any]:
        """Continue from a checkpoint of the same model; what it holds is returned."""
        state = checkpoint.read(path)
        try:
            (self._adapters or self.model).load_state_dict(state["weights"])
            self._optimizer.load_state_dict(state["optimizer"])
            torch.set_rng_state(state["random"])
            self.update = int(state["update"])
        except (KeyError, RuntimeError, ValueError) as error:
            raise ConfigInvalid(
                f"{path} is no checkpoint of this policy: {error}.",
                hint="model.path and learner.lora_rank must stay what they were when the round began.",
            ) from error
        return state


def _cast(state: dict[str, torch.Tensor], dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """The floats of a state in another type; tensors that share their memory still do."""
    made: dict[int, torch.Tensor] = {}
    for tensor in state.values():
        if tensor.data_ptr() not in made:
            made[tensor.data_ptr()] = tensor.to(dtype) if tensor.is_floating_point() else tensor
    return {name: made[tensor.data_ptr()] for name, tensor in state.items()}


def _distances(groups: Sequence[TrainingGroup], data: Tensors, current: torch.Tensor) -> dict[str, float]:
    gap = (current - data.behaviour).abs() * data.mask  # [N, T]
    places = torch.arange(gap.shape[1])
    found: dict[str, float] = {}
    for number, group in enumerate(groups):
        rows = data.owners == number
        start = torch.zeros(len(group.samples), 1)
        for claim_id, ends in [(one.claim_id, one.ends) for one in group.earlier] + [(group.claim_id, None)]:
            end = torch.tensor(ends or [gap.shape[1]] * len(group.samples))[:, None]
            own = data.mask[rows] * ((places >= start) & (places < end))  # [samples, T]
            found[claim_id] = float((gap[rows] * own).sum() / own.sum().clamp(min=1))
            start = end
    return found
