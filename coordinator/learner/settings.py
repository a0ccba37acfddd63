"""The settings of an update, from the operator's file. This module imports no torch."""

from dataclasses import dataclass, field, replace
from math import cos, inf, pi
from typing import Literal

from coordinator.config import Config
from coordinator.learner.algorithm import PRESETS, Algorithm
from coordinator.model.products import Products

NOT_OF_AN_UPDATE = {
    "external",
    "algorithm",
    "groups_per_update",
    "threads",
    "tensorboard",
    "wandb",
    "mlflow",
    "trackio",
    "tracked_samples",
    "processes",
    "watchdog_s",
    "publish_adapters",
    "kept_one_in",
    "kept_checkpoints",
}
"""The settings of the learner that do not change the result of an update."""

Schedule = Literal["constant", "linear", "cosine"]


@dataclass(frozen=True, slots=True)
class TrainSettings:
    """All inputs of an update except the policy and its data."""

    learning_rate: float
    warmup_updates: int = 20
    """The first updates of an optimizer are smaller: Adam's moments are not reliable after few gradients."""
    schedule: Schedule = "constant"
    max_updates: int = 1000
    """The update at which a falling schedule reaches zero."""
    temperature: float = 1.0
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.0
    decayed: Literal["matrices", "all"] = "matrices"
    """`matrices`: weight decay excludes norms, biases and embeddings."""
    optimizer_dtype: Literal["float32", "bfloat16"] = "float32"
    optimizer_offload: bool = False
    max_grad_norm: float = 1.0
    num_iterations: int = 1
    """Passes over one batch; from the second optimizer step on, the ratio to π_old leaves 1."""
    micro_batch_tokens: int = 0
    """The most tokens computed at once, prompts included; 0: no limit."""
    gradient_checkpointing: bool = False
    dtype: Literal["float32", "bfloat16"] = "float32"
    """The type of the products; weights and optimizer are float32."""
    device: str = "cpu"
    lora_rank: int = 0
    """0 trains all weights."""
    lora_alpha: float = 32.0
    lora_targets: tuple[str, ...] = ()
    """The names of the linear layers with adapters; if empty, those of the usual model families."""
    lora_coverage_min: float = 0.0
    """The smallest share of the model's matrices that adapters must cover."""
    max_completion_length: int = 1
    seed: int = 0
    """The random draws of an update depend on it and the update's number."""
    algorithm: Algorithm = field(default_factory=Algorithm)

    @property
    def products(self) -> Products:
        """Return the settings with which an update computes log-probabilities."""
        return Products(self.dtype, self.temperature, self.algorithm.entropy_bonus > 0)

    def rate(self, update: int, steps: int) -> float:
        """Return the learning rate of the update after `update`, by an optimizer that has made `steps` steps."""
        of_update = self.num_iterations * self.algorithm.minibatches
        warm = min(1.0, (steps // of_update + 1) / max(1, self.warmup_updates))
        done = min(1.0, update / self.max_updates)
        fall = {"constant": 1.0, "linear": 1.0 - done, "cosine": 0.5 + 0.5 * cos(pi * done)}[self.schedule]
        return self.learning_rate * warm * fall


def train_settings(config: Config) -> TrainSettings:
    """Return the settings of the sections learner, objective and correction."""
    learner = config.learner
    return TrainSettings(
        **learner.model_dump(exclude=NOT_OF_AN_UPDATE),
        max_updates=config.round.max_updates,
        temperature=config.sampling.temperature,
        max_completion_length=config.sampling.max_new_tokens,
        seed=config.round.seed,
        algorithm=algorithm(config),
    )


def algorithm(config: Config) -> Algorithm:
    """Return the preset with the changes that the file makes."""
    preset = PRESETS[config.learner.algorithm]
    bounds = config.correction.model_dump(exclude_none=True)
    if "token_high" in bounds:
        bounds["token_high"] = bounds["token_high"] or inf
    correction = replace(preset.correction, **bounds)
    changes = config.objective.model_dump(exclude_none=True)
    if "delta" in changes:
        changes["delta"] = changes["delta"] or inf
    changes["minibatches"] = min(changes.get("minibatches", preset.minibatches), config.learner.groups_per_update)
    return replace(preset, correction=correction, **changes)
