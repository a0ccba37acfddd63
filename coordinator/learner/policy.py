"""The policy in training: weights, optimizer, one update at a time, and checkpoints that survive any crash.

- The weights in training are float32, whatever the policy came in; it is published in what it came in. So an update too
  small for a bf16 weight is not lost, but shows once enough of them have come together.
- A prompt is computed once and its cache shared by the group's samples, in training as in sampling.
- A checkpoint is written beside the old one, fsynced and renamed over it: at any moment one whole checkpoint exists.
- After a restore the next update is bit for bit the one that would have followed.
"""

import copy
import json
import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from coordinator.learner.batch import Tensors, collate
from coordinator.learner.grpo import LossSettings, Metrics, group_advantages, policy_loss, token_logprobs
from protocol import canary
from protocol.learning import TrainingGroup


@dataclass(frozen=True, slots=True)
class TrainSettings:
    """How an update is made."""

    learning_rate: float
    ramp_updates: int = 20
    """The first updates are smaller: until Adam has seen some gradients, it takes each for a typical one."""
    temperature: float = 1.0
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = 0.0
    gradient_norm_max: float = 1.0
    loss: LossSettings = field(default_factory=LossSettings)


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
        self.model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, local_files_only=True)
        self._optimizer = torch.optim.AdamW(
            self.model.parameters(),
            lr=settings.learning_rate,
            betas=settings.betas,
            weight_decay=settings.weight_decay,
        )
        self.update = 0
        """Optimizer updates made so far."""

    def train_step(self, groups: Sequence[TrainingGroup]) -> Step:
        """One optimizer update on these groups."""
        data = collate(groups)
        logits = completion_logits(self.model, data)  # [N, T, V]
        current, entropy = token_logprobs(logits, data.tokens, self._settings.temperature)  # [N, T] each
        advantages = group_advantages(data.rewards, data.owners, len(groups))  # [N]
        loss, metrics = policy_loss(current, data.behaviour, advantages, data.mask, self._settings.loss)

        self._optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]  # torch leaves it unannotated
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), self._settings.gradient_norm_max)
        for parameters in self._optimizer.param_groups:
            parameters["lr"] = self._settings.learning_rate * min(1.0, (self.update + 1) / self._settings.ramp_updates)
        self._optimizer.step()
        self.update += 1

        metrics["gradient_norm"] = float(norm)
        metrics["entropy"] = float((entropy * data.mask).sum() / data.mask.sum())
        metrics["reward_mean"] = float(data.rewards.mean())
        metrics["groups_with_signal"] = len(set(data.owners[advantages != 0].tolist())) / len(groups)
        return Step(metrics, _distances(groups, data, current.detach()))

    def save_hub(self, folder: Path) -> None:
        """Write the policy as a hub-format folder: its weights now, in the dtype it came in, tokenizer and canary."""
        published = _cast(self.model.state_dict(), self._published_dtype)
        self.model.save_pretrained(folder, state_dict=published)
        (folder / canary.FILE_NAME).write_text(json.dumps(self._canary(published).model_dump()))
        config = copy.copy(self.model.config)
        config.dtype = self._published_dtype  # transformers writes that of the weights in training
        config.save_pretrained(folder)
        for source in self._folder.iterdir():
            if source.name.startswith(("tokenizer", "special_tokens", "chat_template")):
                shutil.copyfile(source, folder / source.name)

    def _canary(self, published: dict[str, torch.Tensor]) -> canary.Canary:
        """What these weights say to the canary's text, whatever their dtype, in the arithmetic of float32."""
        text = canary.text(self.model.config.get_text_config().vocab_size)
        with torch.inference_mode():
            weights = _cast(published, torch.float32)
            logits = torch.func.functional_call(self.model, weights, (torch.tensor([text]),)).logits[0, :-1]
            scores = torch.log_softmax(logits.float(), dim=-1).gather(1, torch.tensor(text[1:])[:, None])
        return canary.Canary(tokens=text, logprobs=tuple(scores[:, 0].tolist()))

    def save_checkpoint(self, path: Path) -> None:
        """Everything that the next update depends on."""
        state = {
            "update": self.update,
            "model": self.model.state_dict(),
            "optimizer": self._optimizer.state_dict(),
            "random": torch.get_rng_state(),
        }
        beside = path.with_name(path.name + ".new")
        with beside.open("wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())
        beside.replace(path)
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)  # the rename itself must survive a power cut
        finally:
            os.close(folder)

    def restore_checkpoint(self, path: Path) -> None:
        """Continue from a checkpoint of the same model."""
        state = torch.load(path, weights_only=True)
        self.model.load_state_dict(state["model"])
        self._optimizer.load_state_dict(state["optimizer"])
        torch.set_rng_state(state["random"])
        self.update = int(state["update"])


def _cast(state: dict[str, torch.Tensor], dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """The floats of a state in another type; tensors that share their memory still do."""
    made: dict[int, torch.Tensor] = {}
    for tensor in state.values():
        if tensor.data_ptr() not in made:
            made[tensor.data_ptr()] = tensor.to(dtype) if tensor.is_floating_point() else tensor
    return {name: made[tensor.data_ptr()] for name, tensor in state.items()}


def completion_logits(model: Any, data: Tensors) -> torch.Tensor:
    """The logits that every completion token was drawn from, with gradient: [N, T, V]."""
    prefix = model(
        input_ids=data.prompts,
        attention_mask=data.prompt_mask,
        position_ids=(data.prompt_mask.cumsum(1) - 1).clamp(min=0),
        use_cache=True,
        logits_to_keep=1,
    )
    first: torch.Tensor = prefix.logits[data.owners]  # [N, 1, V]
    fed = data.tokens[:, :-1]  # the last token is predicted, never fed
    if fed.shape[1] == 0:
        return first
    cache = prefix.past_key_values
    cache.batch_select_indices(data.owners)
    lengths = data.prompt_mask.sum(1)[data.owners]  # [N]
    rest = model(
        input_ids=fed,
        attention_mask=torch.cat([data.prompt_mask[data.owners], torch.ones_like(fed)], dim=1),
        position_ids=lengths[:, None] + torch.arange(fed.shape[1]),
        past_key_values=cache,
        use_cache=True,
    )
    return torch.cat([first, rest.logits], dim=1)


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
