"""The learner: its algorithm, and what differs from it."""

from typing import Annotated, Literal

from pydantic import Field, model_validator

from coordinator.config.section import Section

AlgorithmName = Literal["grpo", "dapo", "dr_grpo", "rloo", "reinforce_pp", "gspo", "cispo", "echo2"]


class LearnerSection(Section):
    """The objective by name, and how it is followed."""

    algorithm: AlgorithmName = Field(
        "grpo", description="grpo, dapo, dr_grpo, rloo, reinforce_pp, gspo, cispo or echo2 (docs/learning.md)"
    )
    learning_rate: float = Field(1e-6, gt=0, description="of AdamW, after the warm-up")
    schedule: Literal["constant", "linear", "cosine"] = Field(
        "constant", description="constant, linear or cosine: how the rate falls towards the last update"
    )
    warmup_updates: int = Field(
        20, ge=0, description="updates over which the rate rises from nothing, after a rollback again"
    )
    betas: tuple[Annotated[float, Field(ge=0, lt=1)], Annotated[float, Field(ge=0, lt=1)]] = Field(
        (0.9, 0.95), description="of AdamW: how long it remembers gradients, and their squares"
    )
    eps: float = Field(1e-8, gt=0, description="of AdamW: what is added to the root of the squares")
    weight_decay: float = Field(0.0, ge=0, description="of AdamW")
    decayed: Literal["matrices", "all"] = Field(
        "matrices", description="matrices or all: what weight_decay shrinks; embeddings are no matrices here"
    )
    optimizer_dtype: Literal["float32", "bfloat16"] = Field(
        "float32", description="float32 or bfloat16: of AdamW's two moments; for a single card"
    )
    optimizer_offload: bool = Field(
        False, description="keep these moments in the memory of the host; for a single card"
    )
    max_grad_norm: float = Field(1.0, gt=0, description="longer gradients are cut to this length")
    groups_per_update: int = Field(16, ge=1, le=512, description="B: prompts in one update")
    num_iterations: int = Field(1, ge=1, description="passes over one batch, each of objective.minibatches steps")
    micro_batch_tokens: int = Field(
        16384, ge=0, description="most tokens computed at once, prompts included; 0 is no limit"
    )
    gradient_checkpointing: bool = Field(False, description="compute layers twice instead of remembering them")
    dtype: Literal["float32", "bfloat16"] = Field(
        "float32", description="float32 or bfloat16: of the products; weights in training are float32"
    )
    device: str = Field("cpu", pattern=r"^(cpu|cuda(:\d+)?)$", description="cpu, cuda or cuda:N")
    threads: int = Field(1, ge=1, description="CPU threads of the learner")
    processes: int = Field(1, ge=1, le=64, description="ranks that train together on this machine, a GPU for each")
    watchdog_s: float = Field(
        1800.0, ge=0, description="seconds in which nothing moves in a step until the learner ends itself; 0: never"
    )
    lora_rank: int = Field(0, ge=0, le=1024, description="rank of LoRA adapters; 0 trains all weights")
    lora_alpha: float = Field(32.0, gt=0, description="LoRA's alpha: what is learned counts alpha / rank")
    lora_targets: tuple[str, ...] = Field(
        (), description="names of the linear layers that are adapted; those of the Llama family and Phi-3 if empty"
    )
    lora_coverage_min: float = Field(
        0.5, ge=0, le=1, description="least share of the model's matrices that adapters cover, or the round is refused"
    )
    publish_adapters: bool = Field(
        True, description="publish adapters beside a base that never changes; else the weights with them in"
    )
    tensorboard: bool = Field(False, description="write metrics for TensorBoard, too, into learner/tensorboard")
    wandb: str = Field(
        "", pattern=r"^[\w.-]{0,128}$", description="project of Weights & Biases that is told, too; empty tells nobody"
    )

    @model_validator(mode="after")
    def _has_small_moments_on_one_card(self) -> "LearnerSection":
        if self.processes > 1 and (self.optimizer_offload or self.optimizer_dtype != "float32"):
            raise ValueError("optimizer_dtype and optimizer_offload are for processes = 1; more share the moments out")
        return self


class ObjectiveSection(Section):
    """What differs from `learner.algorithm`; a key that is left out is as the algorithm says."""

    baseline: Literal["group", "leave_one_out", "batch", "none"] | None = Field(
        None, description="group, leave_one_out, batch or none: the mean that is taken from a reward"
    )
    scale_rewards: Literal["group", "batch", "none"] | None = Field(
        None, description="group, batch or none: the deviation that it is divided by"
    )
    importance_sampling_level: Literal["token", "sequence", "product"] | None = Field(
        None, description="token, sequence (geometric mean) or product: what has a ratio of its own"
    )
    clip: Literal["ppo", "cispo"] | None = Field(None, description="ppo bounds the ratio, cispo the weight of a token")
    epsilon: float | None = Field(None, ge=0, le=1, description="how far a ratio may fall")
    epsilon_high: float | None = Field(None, ge=0, description="how far it may rise; cispo: the largest weight")
    delta: float | None = Field(None, ge=0, description="largest ratio where the advantage is negative; 0 is no bound")
    minibatches: int | None = Field(
        None, ge=1, le=512, description="optimizer steps that the groups of a batch are split into"
    )
    loss_aggregation: Literal["sequence", "token", "constant"] | None = Field(
        None, description="sequence, token or constant: what the loss is a mean of"
    )
    beta: float | None = Field(None, ge=0, description="weight of the divergence from the starting policy")
    entropy_bonus: float | None = Field(None, ge=0, description="weight of the entropy, which the objective raises")
    filter_zero_variance: bool | None = Field(None, description="leave out groups of equal raw scores")
    mask_truncated_completions: bool | None = Field(None, description="leave out samples without an end")
    overlong_buffer: int | None = Field(None, ge=0, description="tokens before the longest length that cost reward")
    overlong_penalty: float | None = Field(None, ge=0, description="what they cost at most")
    trajectories: Literal["all", "pairs", "weighted"] | None = Field(
        None, description="all, pairs (best beside worst) or weighted (drawn by advantage): the samples trained on"
    )
    trajectory_share: float | None = Field(None, gt=0, le=1, description="how many of these pairs or samples")


class CorrectionSection(Section):
    """What is done about stale samples; a key that is left out is as the algorithm says."""

    mode: Literal["decoupled", "bypass", "none"] | None = Field(
        None, description="decoupled weighs by the distance, bypass clips it, none ignores it"
    )
    level: Literal["token", "sequence"] | None = Field(
        None, description="token or sequence: a weight for each token, or the product of all for the sample"
    )
    token_cap: float | None = Field(None, gt=0, description="largest weight of a token")
    token_low: float | None = Field(None, ge=0, description="least ratio of a token that counts")
    token_high: float | None = Field(None, ge=0, description="largest ratio of a token that counts; 0 is no bound")
    sequence_low: float | None = Field(None, ge=0, description="least geometric mean ratio of a sample that counts")
    sequence_high: float | None = Field(None, gt=0, description="largest geometric mean ratio of a sample that counts")
    veto: float | None = Field(None, ge=0, lt=1, description="a token's ratio below it drops the sample; 0 never")
