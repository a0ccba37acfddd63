"""Settings of the learner: its algorithm, and overrides of it."""

from typing import Annotated, Literal

from pydantic import Field, StringConstraints, model_validator

from coordinator.config.section import Device, Section
from protocol import limits

AlgorithmName = Literal["grpo", "dapo", "dr_grpo", "rloo", "reinforce_pp", "gspo", "cispo", "echo2"]

ProjectName = Annotated[str, StringConstraints(pattern=r"^[\w.-]*$", max_length=128)]
"""A name at a tracker. A pattern with the bound, `{0,128}`, takes 13 ms to compile, at every start of a command."""


class LearnerSection(Section):
    """Settings of the learner: algorithm, optimizer, memory and devices."""

    external: bool = Field(
        False,
        description="no training here: trainers with a key publish the versions and query the nodes (docs/trainers.md)",
    )
    algorithm: AlgorithmName = Field(
        "grpo", description="grpo, dapo, dr_grpo, rloo, reinforce_pp, gspo, cispo or echo2 (docs/learning.md)"
    )
    learning_rate: float = Field(1e-6, gt=0, le=1, description="learning rate of AdamW after the warm-up")
    schedule: Literal["constant", "linear", "cosine"] = Field(
        "constant", description="learning-rate schedule until the last update: constant, linear or cosine"
    )
    warmup_updates: int = Field(
        20, ge=0, description="updates over which the learning rate rises from 0; repeated after a rollback"
    )
    betas: tuple[Annotated[float, Field(ge=0, lt=1)], Annotated[float, Field(ge=0, lt=1)]] = Field(
        (0.9, 0.95), description="AdamW's decay rates of the first and second moment"
    )
    eps: float = Field(1e-8, gt=0, description="AdamW's epsilon, added to the denominator")
    weight_decay: float = Field(0.0, ge=0, description="weight decay of AdamW")
    decayed: Literal["matrices", "all"] = Field(
        "matrices", description="weights with weight decay: matrices (without embeddings) or all"
    )
    optimizer_dtype: Literal["float32", "bfloat16"] = Field(
        "float32", description="type of AdamW's moments: float32 or bfloat16; bfloat16 needs processes = 1"
    )
    optimizer_offload: bool = Field(False, description="keep AdamW's moments in host memory; needs processes = 1")
    max_grad_norm: float = Field(1.0, gt=0, description="maximum gradient norm; larger gradients are clipped")
    groups_per_update: int = Field(16, ge=1, le=512, description="B: prompts in one update")
    num_iterations: int = Field(1, ge=1, description="passes over one batch, each of objective.minibatches steps")
    micro_batch_tokens: int = Field(
        16384, ge=0, description="maximum tokens of a micro-batch, including prompts; 0: no limit"
    )
    gradient_checkpointing: bool = Field(False, description="recompute activations in the backward pass to save memory")
    dtype: Literal["float32", "bfloat16"] = Field(
        "float32", description="type of matrix products: float32 or bfloat16; the trained weights are float32"
    )
    device: Device = Field("cpu", description="device of the learner: cpu, cuda or cuda:N")
    threads: int = Field(1, ge=1, description="CPU threads of the learner")
    processes: int = Field(1, ge=1, le=64, description="training processes (ranks) on this machine, one GPU each")
    watchdog_s: float = Field(
        1800.0, ge=0, description="the learner exits if a step makes no progress for this long; 0: never"
    )
    kept_one_in: int = Field(
        0,
        ge=0,
        description="keep and publish what a replay of 1 in N updates needs: 12 bytes per trained parameter each, and "
        "the batches; not for a learner on another machine; 0: none",
    )
    kept_checkpoints: int = Field(
        0,
        ge=0,
        le=10_000,
        description="keep so many of the newest checkpoints, and ever fewer older ones, for `retract`: at most "
        "about N + 2 log2(checkpoints so far), 12 bytes per trained parameter each; 0: only the newest",
    )
    lora_rank: int = Field(0, ge=0, le=1024, description="rank of LoRA adapters; 0 trains all weights")
    lora_alpha: float = Field(32.0, gt=0, description="LoRA's alpha; the adapter's output is scaled by alpha / rank")
    lora_targets: tuple[str, ...] = Field(
        (), description="names of the linear layers with adapters; empty: those of the Llama family and Phi-3"
    )
    lora_coverage_min: float = Field(
        0.5,
        ge=0,
        le=1,
        description="minimum share of the model's matrices with adapters; below it, the round does not start",
    )
    publish_adapters: bool = Field(
        True, description="publish only the adapters, beside an unchanged base; false: publish merged weights"
    )
    tensorboard: bool = Field(False, description="also write metrics for TensorBoard to learner/tensorboard")
    wandb: ProjectName = Field("", description="Weights & Biases project that also receives metrics; empty: none")
    mlflow: ProjectName = Field("", description="MLflow experiment that also receives metrics; empty: none")
    trackio: ProjectName = Field("", description="Trackio project that also receives metrics; empty: none")
    tracked_samples: int = Field(
        0,
        ge=0,
        le=limits.EVALUATION_SAMPLES_MAX,
        description="problems of each evaluation whose first sample the trackers receive, with prompt and completion; "
        "0: none",
    )

    @model_validator(mode="after")
    def _publishes_by_one_process(self) -> "LearnerSection":
        if self.external and self.processes > 1:
            raise ValueError("external needs processes = 1: this machine trains nothing")
        return self

    @model_validator(mode="after")
    def _has_small_moments_on_one_card(self) -> "LearnerSection":
        if self.processes > 1 and (self.optimizer_offload or self.optimizer_dtype != "float32"):
            raise ValueError(
                "optimizer_dtype and optimizer_offload need processes = 1; with more, the moments are sharded"
            )
        return self


class ObjectiveSection(Section):
    """Overrides of `learner.algorithm`; a missing key has the algorithm's default."""

    baseline: Literal["group", "leave_one_out", "batch", "none"] | None = Field(
        None, description="mean that is subtracted from a reward: group, leave_one_out, batch or none"
    )
    scale_rewards: Literal["group", "batch", "none"] | None = Field(
        None, description="standard deviation that an advantage is divided by: group, batch or none"
    )
    importance_sampling_level: Literal["token", "sequence", "product"] | None = Field(
        None, description="level of the importance ratio: token, sequence (geometric mean) or product"
    )
    clip: Literal["ppo", "cispo"] | None = Field(
        None, description="clipping: ppo (the ratio) or cispo (a token's weight)"
    )
    epsilon: float | None = Field(
        None, ge=0, le=1, description="lower clipping bound: a ratio below 1 - epsilon is clipped"
    )
    epsilon_high: float | None = Field(
        None, ge=0, description="upper clipping bound: 1 + epsilon_high; cispo: maximum weight"
    )
    delta: float | None = Field(None, ge=0, description="maximum ratio for negative advantages; 0: no limit")
    minibatches: int | None = Field(None, ge=1, le=512, description="optimizer steps per pass over a batch")
    loss_aggregation: Literal["sequence", "token", "constant"] | None = Field(
        None, description="unit that the loss is averaged over: sequence, token or constant"
    )
    beta: float | None = Field(None, ge=0, description="weight of the KL divergence from the initial policy")
    entropy_bonus: float | None = Field(None, ge=0, description="weight of the entropy bonus in the objective")
    filter_zero_variance: bool | None = Field(None, description="do not train on groups whose raw scores are all equal")
    mask_truncated_completions: bool | None = Field(
        None, description="do not train on samples that reached the token limit"
    )
    overlong_buffer: int | None = Field(
        None, ge=0, description="tokens before the maximum length at which the length penalty begins"
    )
    overlong_penalty: float | None = Field(None, ge=0, description="maximum length penalty")
    trajectories: Literal["all", "pairs", "weighted"] | None = Field(
        None, description="samples to train on: all, pairs (best and worst) or weighted (drawn by advantage)"
    )
    trajectory_share: float | None = Field(None, gt=0, le=1, description="share of these pairs or samples that is used")


class CorrectionSection(Section):
    """Correction for stale samples; a missing key has the algorithm's default."""

    mode: Literal["decoupled", "bypass", "none"] | None = Field(
        None, description="correction for stale samples: decoupled (weights), bypass (clipping) or none"
    )
    level: Literal["token", "sequence"] | None = Field(
        None, description="level of the correction weight: token or sequence (product over the sample)"
    )
    token_cap: float | None = Field(None, gt=0, description="maximum weight of a token")
    token_low: float | None = Field(None, ge=0, description="minimum ratio of a token; tokens below it are ignored")
    token_high: float | None = Field(
        None, ge=0, description="maximum ratio of a token; tokens above it are ignored; 0: no limit"
    )
    sequence_low: float | None = Field(
        None, ge=0, description="minimum geometric mean ratio of a sample; others are ignored"
    )
    sequence_high: float | None = Field(
        None, gt=0, description="maximum geometric mean ratio of a sample; others are ignored"
    )
    veto: float | None = Field(
        None, ge=0, lt=1, description="ignore a sample with any token ratio below this; 0: never"
    )
