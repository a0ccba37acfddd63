"""Bodies of Tinker's calls in JSON. Other fields are refused by name: they might change its meaning."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from protocol import limits
from protocol.errors import FieldRefused

Number = Annotated[int, Field(ge=0, le=2**62)]


class TinkerCall(BaseModel):
    """A call. `type` and metadata are read by nobody."""

    model_config = ConfigDict(extra="forbid", protected_namespaces=())

    type: str = ""
    user_metadata: dict[str, Any] | None = None


class LoraChoice(TinkerCall):
    """The adapter that a client asks for."""

    rank: int
    seed: Annotated[int, Field(ge=0, lt=2**63)] | None = None
    train_unembed: bool = True
    """The output layer is not adapted, whatever this says: it is on by default."""
    train_mlp: bool = True
    train_attn: bool = True


class OptimizerChoice(BaseModel):
    """The optimizer of a model."""

    model_config = ConfigDict(extra="forbid")

    type: Literal["adamw"] = "adamw"


class CreateModel(TinkerCall):
    """A model to train."""

    session_id: str
    model_seq_id: Number
    base_model: str
    lora_config: LoraChoice
    optimizer_config: OptimizerChoice = OptimizerChoice()


class LoadWeights(TinkerCall):
    """A state to continue from."""

    path: str
    optimizer: bool
    session_id: str | None = None
    model_seq_id: Number | None = None
    model_id: str | None = None
    seq_id: Number | None = None
    base_model: str | None = None
    optimizer_config: OptimizerChoice | None = None


class AdamParams(BaseModel):
    """The parameters of a step, with Tinker's defaults."""

    model_config = ConfigDict(extra="forbid")

    learning_rate: float = 1e-4
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-12
    weight_decay: float = 0.0
    grad_clip_norm: float = 0.0
    """The largest norm of the gradient; 0: any."""


class OptimStep(TinkerCall):
    """A step of AdamW."""

    model_id: str
    seq_id: Number
    adam_params: AdamParams


class SaveWeights(TinkerCall):
    """A state to save. States do not expire: `ttl_seconds` is read by nobody."""

    model_id: str
    seq_id: Number
    path: str
    overwrite: bool = False
    ttl_seconds: int | None = None


class SaveForSampler(TinkerCall):
    """Weights to publish, under a name or for a sampler. Versions expire as the round says, not by `ttl_seconds`."""

    model_id: str
    seq_id: Number
    path: str | None = None
    sampling_session_seq_id: Number | None = None
    kind: Literal["snapshot"] = "snapshot"
    ttl_seconds: int | None = None


class CreateSampler(TinkerCall):
    """A sampler of saved weights, or of the base."""

    session_id: str
    sampling_session_seq_id: Number
    model_path: str | None = None
    base_model: str | None = None


class PromptChunk(BaseModel):
    """A piece of a prompt."""

    model_config = ConfigDict(extra="forbid")

    type: Literal["encoded_text"] = "encoded_text"
    tokens: Annotated[list[int], Field(max_length=limits.TOKENS_MAX)]


class Prompt(BaseModel):
    """A prompt in pieces."""

    model_config = ConfigDict(extra="forbid")

    chunks: Annotated[list[PromptChunk], Field(min_length=1, max_length=limits.QUERY_MESSAGES_MAX)]


class SamplingChoice(BaseModel):
    """The parameters of sampling."""

    model_config = ConfigDict(extra="forbid")

    max_tokens: int | None = None
    seed: int | None = None
    stop: str | list[str] | list[int] | None = None
    temperature: float = 1.0
    top_k: Literal[-1] = -1
    top_p: float = Field(1.0, ge=1.0, le=1.0)

    def stop_texts(self) -> list[str]:
        """Return the texts that end a sample."""
        stops = [self.stop] if isinstance(self.stop, str) else self.stop or []
        return [stop for stop in stops if isinstance(stop, str)]

    def stop_tokens(self) -> frozenset[int]:
        """Return the tokens that end a sample."""
        return frozenset(stop for stop in self.stop or () if isinstance(stop, int))


class SampleCall(TinkerCall):
    """A prompt to sample from."""

    sampling_session_id: str
    seq_id: Number
    num_samples: Annotated[int, Field(ge=1, le=limits.SAMPLES_MAX)] = 1
    prompt: Prompt
    sampling_params: SamplingChoice
    prompt_logprobs: Literal[False] | None = None
    topk_prompt_logprobs: Literal[0] = 0
    topk_sample_logprobs: Literal[0] = 0
    prompt_alt_tokens_k: Literal[0] = 0
    record_stability_info: Literal[False] | None = None

    def prompt_tokens(self) -> list[int]:
        """Return the prompt as token ids."""
        return [token for chunk in self.prompt.chunks for token in chunk.tokens]

    def require_offered(self) -> None:
        """Refuse what pydantic does not find."""
        if self.sampling_params.stop == []:
            raise FieldRefused(
                "sampling_params.stop is an empty list, which would sample beyond the policy's end token.",
                hint="Nodes always stop at the end token: leave stop out.",
            )


class NumberedCall(BaseModel):
    """The model and the number of a call whose other fields are refused."""

    model_config = ConfigDict(extra="ignore", protected_namespaces=())

    model_id: str
    seq_id: Number


class ModelCall(TinkerCall):
    """A call about a model."""

    model_id: str


class SessionCall(TinkerCall):
    """A call about a session."""

    session_id: str


class ReplyCall(TinkerCall):
    """A call about a request."""

    request_id: str
    allow_metadata_only: bool = False
