"""The operator's one TOML file, strict: an unknown key is refused with the nearest name.

- Every key has a default that works; units are in the names.
- `--set section.key=value` changes one key from the command line, with the same checks.
- The resolved configuration is stored with the round, so that a restart runs what was started.
"""

import difflib
import tomllib
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from protocol import limits
from protocol.errors import ConfigInvalid
from protocol.origin import OriginUrl

UPLOAD = r"^$|^s3://[a-z0-9][a-z0-9.-]{1,61}[a-z0-9](/[A-Za-z0-9_~][A-Za-z0-9._~-]*)*$"
"""No character that a signed address would have to escape."""

STORE = r"^$|^postgresql(\+psycopg)?://"


class Section(BaseModel):
    """A table of the file: frozen, strict about names, and its field descriptions are its manual."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class RoundSection(Section):
    """What is trained, for how long, and where its state lives."""

    directory: Path = Field(Path("round"), description="keys, state, checkpoints and published versions")
    listen: str = Field("127.0.0.1:8700", description="address of the HTTP API and the leaderboard")
    public_url: str = Field("", description="how nodes reach it, if not by the listen address")
    seeder: str = Field("127.0.0.1:8701", description="address on which the seeder serves chunks over libp2p")
    seeder_public: str = Field("", description="host:port at which nodes reach the seeder, if not as it listens")
    seed: int = Field(0, ge=0, description="decides the embedded model, the prompts and their order")
    max_updates: int = Field(1000, ge=1, description="learner updates until the round is finished")


class ModelSection(Section):
    """Which policy the round starts from."""

    path: str = Field(
        "embedded", description="a folder in hub format, hf://owner/name, or 'embedded' for the tiny built-in one"
    )
    revision: str = Field("", description="branch, tag or commit on the hub; its main branch if there is none")


class TaskSection(Section):
    """Where prompts and rewards come from."""

    name: str = Field("arithmetic", description="a built-in task")


class SamplingSection(Section):
    """How nodes sample."""

    temperature: float = Field(1.0, gt=0, le=10, description="of the distribution tokens are drawn from")
    max_new_tokens: int = Field(8, ge=1, le=limits.TOKENS_MAX, description="longest completion")
    samples_per_group: int = Field(16, ge=2, le=limits.SAMPLES_MAX, description="completions of one prompt")

    @model_validator(mode="after")
    def _fits_into_a_message(self) -> "SamplingSection":
        if 8 * self.samples_per_group * self.max_new_tokens > limits.MESSAGE_MAX_BYTES // 2:
            raise ValueError(
                f"{self.samples_per_group} samples of {self.max_new_tokens} tokens do not fit into one message; "
                f"samples_per_group x max_new_tokens may be {limits.MESSAGE_MAX_BYTES // 16} at most"
            )
        return self


class StalenessSection(Section):
    """The bound S, and how often a version is published."""

    max_updates: int = Field(4, ge=0, description="S: how many updates a rollout may lie behind the learner")
    publish_every: int = Field(0, ge=0, description="kappa: updates between versions; 0 follows what is measured")

    @property
    def kappa(self) -> int:
        """As it is set; else, before anything is measured, the paper's S - 1."""
        return self.publish_every or max(1, self.max_updates - 1)

    @model_validator(mode="after")
    def _publishes_within_the_bound(self) -> "StalenessSection":
        if self.kappa > self.max_updates + 1:
            raise ValueError(
                f"publish_every = {self.kappa} leaves the learner without fresh rollouts: the last version would be "
                f"{self.kappa - 1} updates old, and max_updates is {self.max_updates}"
            )
        return self


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
    warmup_updates: int = Field(20, ge=0, description="updates over which the rate rises from nothing")
    weight_decay: float = Field(0.0, ge=0, description="of AdamW")
    max_grad_norm: float = Field(1.0, gt=0, description="longer gradients are cut to this length")
    groups_per_update: int = Field(16, ge=1, le=512, description="B: prompts in one update")
    num_iterations: int = Field(1, ge=1, description="optimizer steps on one batch")
    micro_batch_tokens: int = Field(
        16384, ge=0, description="most tokens computed at once, prompts included; 0 is no limit"
    )
    gradient_checkpointing: bool = Field(False, description="compute layers twice instead of remembering them")
    dtype: Literal["float32", "bfloat16"] = Field(
        "float32", description="float32 or bfloat16: of the products; weights in training are float32"
    )
    device: str = Field("cpu", pattern=r"^(cpu|cuda(:\d+)?)$", description="cpu, cuda or cuda:N")
    threads: int = Field(1, ge=1, description="CPU threads of the learner")
    lora_rank: int = Field(0, ge=0, le=1024, description="rank of LoRA adapters; 0 trains all weights")
    lora_alpha: float = Field(32.0, gt=0, description="LoRA's alpha: what is learned counts alpha / rank")
    tensorboard: bool = Field(False, description="write metrics for TensorBoard, too, into learner/tensorboard")


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
    loss_aggregation: Literal["sequence", "token", "constant"] | None = Field(
        None, description="sequence, token or constant: what the loss is a mean of"
    )
    beta: float | None = Field(None, ge=0, description="weight of the divergence from the starting policy")
    filter_zero_variance: bool | None = Field(None, description="leave out groups of equal raw scores")
    mask_truncated_completions: bool | None = Field(None, description="leave out samples without an end")
    overlong_buffer: int | None = Field(None, ge=0, description="tokens before the longest length that cost reward")
    overlong_penalty: float | None = Field(None, ge=0, description="what they cost at most")


class CorrectionSection(Section):
    """What is done about stale samples; a key that is left out is as the algorithm says."""

    mode: Literal["decoupled", "bypass", "none"] | None = Field(
        None, description="decoupled weighs by the distance, bypass clips it, none ignores it"
    )
    token_cap: float | None = Field(None, gt=0, description="largest weight of a token")
    sequence_low: float | None = Field(None, ge=0, description="least geometric mean ratio of a sample that counts")
    sequence_high: float | None = Field(None, gt=0, description="largest geometric mean ratio of a sample that counts")
    veto: float | None = Field(None, ge=0, lt=1, description="a token's ratio below it drops the sample; 0 never")


class MarketSection(Section):
    """What the round pays; amounts are millionths of the operator's unit."""

    budget_micros: int = Field(1_000_000_000, ge=0, description="deposited when the round is made")
    max_price_micros_per_mtok: int = Field(5_000_000, ge=0, description="dearest price accepted, per million tokens")


class PayoutsSection(Section):
    """How owners get what their nodes have earned."""

    rail: str = Field("manual", description="who moves the money: manual, evm, or module:function of a plug-in")
    minimum_micros: int = Field(1_000_000, gt=0, description="an owner who is owed less waits for the next batch")
    address_delay_h: float = Field(72.0, ge=0, description="hours until a new payout address counts")
    evm_rpc: str = Field("", description="JSON-RPC URL of a node of the chain, for rail evm")
    evm_contract: str = Field("", description="address of the payouts contract, for rail evm")
    evm_key: Path = Field(Path("evm.key"), description="file with the operator's private key in hex, for rail evm")
    evm_confirmations: int = Field(12, ge=0, description="blocks above a transaction until it is done, for rail evm")


class FleetSection(Section):
    """Who works and who stands by."""

    gamma: float = Field(0.0, ge=0, description="throughput to keep, times what the learner needs; 0: everybody works")
    budget_micros_per_hour: int = Field(0, ge=0, description="most that is spent in an hour; 0 is no limit")
    window_s: float = Field(60.0, ge=0, description="how long too little or too dear must last to be changed")
    margin: float = Field(0.1, ge=0, description="how much cheaper another fleet must be")
    dwell_s: float = Field(300.0, ge=0, description="how long a node works or stands by before it is moved to save")
    half_life_s: float = Field(600.0, gt=0, description="after this an answer says half as much of a node's rate")


class LeasesSection(Section):
    """How work is handed out."""

    timeout_s: float = Field(60.0, gt=0, description="after this an unanswered lease goes to somebody else")
    groups_per_request: int = Field(8, ge=1, le=limits.LEASES_PER_REQUEST_MAX, description="most groups given at once")
    newcomer_leases: int = Field(4, ge=1, description="leases that a node may hold before it has answered one")
    over_issue: int = Field(2, ge=0, description="late groups that a second node gets when a batch waits only for them")
    heartbeat_s: float = Field(2.0, gt=0, description="how often nodes report; plans name no node that missed three")


class AuditSection(Section):
    """How much is audited, and how it is judged."""

    tolerance: str = Field("torch/bf16/cpu", description="class of tolerances that all nodes are judged by")
    neighbours: int = Field(1, ge=0, le=16, description="how many earlier versions a claim is compared with")
    first_groups: int = Field(10, ge=0, description="an owner's groups that are all audited; then this many in n")
    floor: float = Field(0.05, ge=0, le=1, description="share that is always audited; 0 with first_groups = 0: none")
    trusted_groups: int = Field(1000, ge=1, description="validated groups until trusted_floor holds")
    trusted_floor: float = Field(0.02, ge=0, le=1, description="share that is audited of a long-standing owner")
    escrow_factor: float = Field(1.0, ge=0, description="unaudited groups kept unpaid, times (1 - rate) / rate")
    epoch_groups: int = Field(256, ge=1, description="claims that one secret draws from before it is revealed")
    timeout_s: float = Field(120.0, gt=0, description="after this an auditor's unanswered cases go to another")
    backlog_max: int = Field(512, ge=1, description="claims that wait for an auditor until no more work is offered")
    max_owner_share: float = Field(
        0.5, gt=0, le=1, description="most of a batch that is one owner's, once 2 / share owners are at work"
    )


class StoreSection(Section):
    """Where the round's state lives."""

    url: str = Field("", pattern=STORE, description="postgresql://user@host/name; empty is SQLite in round.directory")


class PublishSection(Section):
    """How versions travel."""

    chunk_size_bytes: int = Field(
        0,
        ge=0,
        le=limits.CHUNK_MAX_BYTES,
        description="size of a chunk; 0 takes what fits the version, 64 KiB to 4 MiB",
    )
    patches: bool = Field(True, description="publish what changed in place of whole files, where that is smaller")
    timestamp_lifetime_s: float = Field(600.0, gt=0, description="how long nodes may work without fresh proof")
    origins: tuple[OriginUrl, ...] = Field(
        (),
        max_length=limits.ORIGINS_MAX,
        description="URLs that hold copies of public/; nodes ask them before this one",
    )
    upload: str = Field(
        "", pattern=UPLOAD, description="s3://bucket/prefix to copy public/ to; keys from AWS_* variables"
    )
    upload_patience_s: float = Field(60.0, ge=0, description="how long a new version waits for its upload at most")

    @field_validator("chunk_size_bytes")
    @classmethod
    def _is_worth_a_frame(cls, size_bytes: int) -> int:
        if 0 < size_bytes < limits.KIB:
            raise ValueError("a chunk has at least 1024 bytes; 0 takes what fits the version")
        return size_bytes


class Config(Section):
    """The whole file."""

    round: RoundSection = RoundSection()
    model: ModelSection = ModelSection()
    task: TaskSection = TaskSection()
    sampling: SamplingSection = SamplingSection()
    staleness: StalenessSection = StalenessSection()
    learner: LearnerSection = LearnerSection()
    objective: ObjectiveSection = ObjectiveSection()
    correction: CorrectionSection = CorrectionSection()
    market: MarketSection = MarketSection()
    payouts: PayoutsSection = PayoutsSection()
    fleet: FleetSection = FleetSection()
    leases: LeasesSection = LeasesSection()
    audit: AuditSection = AuditSection()
    publish: PublishSection = PublishSection()
    store: StoreSection = StoreSection()

    @property
    def state(self) -> Path | str:
        """What `coordinator.state.Database` opens."""
        return self.store.url or self.round.directory / "state.db"

    def with_absolute_folder(self) -> "Config":
        """The same with a folder that child processes find wherever they start."""
        place = self.round.model_copy(update={"directory": self.round.directory.absolute()})
        return self.model_copy(update={"round": place})


def load(path: Path | None, settings: list[str]) -> Config:
    """The configuration of a file (or all defaults) with `section.key=value` settings on top."""
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8")) if path else {}
    except OSError as error:
        raise ConfigInvalid(f"Cannot read {path}: {error.strerror}.") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigInvalid(f"{path} is not TOML: {error}.") from error
    for setting in settings:
        _apply(table, setting)
    return parse(table)


def parse(table: dict[str, Any]) -> Config:
    """Check a table as a whole; the first mistake is told with its place."""
    try:
        return Config.model_validate(table).with_absolute_folder()
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        keys = [str(part) for part in first["loc"]]
        if first["type"] == "extra_forbidden":
            raise ConfigInvalid(f"There is no setting {'.'.join(keys)}.", hint=_nearest(keys)) from None
        raise ConfigInvalid(f"{'.'.join(keys)}: {first['msg']}.") from None


def _apply(table: dict[str, Any], setting: str) -> None:
    """Put one `section.key=value` into the table; the value is TOML, or plain text."""
    name, equals, text = setting.partition("=")
    section, dot, key = name.partition(".")
    if not (equals and dot and section and key):
        raise ConfigInvalid(f"{setting!r} is not a setting.", hint="Write section.key=value.")
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        value = text
    keys = table.setdefault(section, {})
    if not isinstance(keys, dict):
        raise ConfigInvalid(f"{section} is no section of the file, but a value.", hint=f"Write [{section}] above keys.")
    keys[key] = value


def _nearest(keys: list[str]) -> str:
    """Which existing setting was probably meant."""
    if len(keys) == 1:
        close = difflib.get_close_matches(keys[0], Config.model_fields, n=1, cutoff=0.5)
        return f"Did you mean {close[0]}?" if close else f"Sections: {', '.join(Config.model_fields)}."
    names = [f"{section}.{key}" for section, field in Config.model_fields.items() for key in _keys(field.annotation)]
    close = difflib.get_close_matches(".".join(keys), names, n=1, cutoff=0.5)
    return f"Did you mean {close[0]}?" if close else f"Sections: {', '.join(Config.model_fields)}."


def _keys(section: object) -> list[str]:
    assert isinstance(section, type)
    assert issubclass(section, Section)
    return list(section.model_fields)
