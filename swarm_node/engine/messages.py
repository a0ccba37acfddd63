"""What the agent and its engine child say to each other.

    Load      → Loaded                               one answer
    Generate  → GroupDone | GroupFailed | Cancelled  one for each request, as it ends, in any order
              + GroupGrown                           any number before that, if the request asks for them
    Cancel    → nothing; each named request that was still unanswered is answered with Cancelled
    Measure   → Measured                             one answer
    Encode    → Encoded                              one answer

- The child says `Ready` once, when its libraries are imported.
- Requests may be added at any time: the child lets them in as slots become free, and never waits for a batch to end.
- Commands are obeyed in the order in which they came, but for `CancelRequests`, which is obeyed at once. The other
  commands wait until every request before them is answered, and what comes after them waits for them. So a request that
  runs is never touched by a swap; whoever does not want to wait for it cancels it first.
- A request names the version it is for. If another is loaded, it fails; nothing is ever sampled from the wrong one.
- `CommandFailed` answers `LoadVersion`, `Measure`, `Encode` or what is no command at all; the child is then ready for
  the next one. After a failed `LoadVersion` no version is loaded: no mixture of two, and not the old one either.
- A request that fails takes no other with it.
- A frame is a 4-byte big-endian length and that many bytes of canonical MessagePack.
"""

from typing import Annotated, Literal

from pydantic import Field

from protocol import limits
from protocol.errors import SwarmError
from protocol.policy.manifest import Sampler
from protocol.wire.message import Message
from protocol.work.episode import Episode
from protocol.work.fragment import FragmentPart
from protocol.work.lease import Lease, Prefix
from protocol.work.rollout import Sample

LENGTH_BYTES = 4

RequestId = Annotated[str, Field(max_length=64)]


class SampleRequest(Message):
    """One group to sample: what of a lease the engine needs to know."""

    request_id: RequestId
    version: int = Field(ge=0, le=limits.VERSION_MAX)
    prompt: bytes = Field(min_length=4, max_length=4 * limits.TOKENS_MAX)
    """Token ids, 32-bit little-endian."""
    seed: int = Field(ge=0, lt=2**64)
    samples: int = Field(ge=1, le=limits.SAMPLES_MAX)
    max_new_tokens: int = Field(ge=1, le=limits.TOKENS_MAX)
    """Of a whole sample, its prefix included."""
    temperature: float = Field(gt=0)
    prefixes: tuple[Prefix, ...] = Field((), max_length=limits.SAMPLES_MAX)
    """Where to go on, for each sample, or none at all; only for an engine that says it `continues`."""
    episode: Episode | None = None
    """The game that the samples play; only for an engine that says it `plays`, and never with prefixes."""
    tell_every_s: float = Field(0.0, ge=0)
    """How often to say what the group has grown by; 0: not at all. An engine that cannot says nothing."""

    @classmethod
    def from_lease(cls, lease: Lease, sampler: Sampler, *, tell_every_s: float) -> "SampleRequest":
        """What a lease asks of a version with this sampler."""
        return cls(
            request_id=lease.lease_id,
            version=lease.version,
            prompt=lease.prompt,
            seed=lease.seed,
            samples=lease.samples,
            max_new_tokens=sampler.max_new_tokens,
            temperature=sampler.temperature,
            prefixes=lease.prefixes,
            episode=lease.episode,
            tell_every_s=0.0 if lease.episode else tell_every_s,  # episodes are not handed on
        )


class LoadVersion(Message):
    """Take the weights of this policy folder; from then on they are this version."""

    kind: Literal["load"] = "load"
    folder: str
    version: int = Field(ge=0, le=limits.VERSION_MAX)
    memory_max_bytes: int = Field(0, ge=0)
    """The most private memory that the child may have from now on; 0: no limit of its own."""


class Generate(Message):
    """Sample these groups."""

    kind: Literal["generate"] = "generate"
    requests: tuple[SampleRequest, ...] = Field(min_length=1, max_length=limits.LEASES_PER_REQUEST_MAX)


class CancelRequests(Message):
    """Give these requests up; one that was answered already stays answered."""

    kind: Literal["cancel"] = "cancel"
    request_ids: tuple[RequestId, ...] = Field(max_length=4 * limits.LEASES_PER_REQUEST_MAX)


class Measure(Message):
    """Say how fast the requests since the last `Measure` were sampled."""

    kind: Literal["measure"] = "measure"


class Encode(Message):
    """Make tokens of these texts, with the tokenizer of the policy that is loaded."""

    kind: Literal["encode"] = "encode"
    texts: tuple[str, ...] = Field(min_length=1, max_length=limits.LEASES_PER_REQUEST_MAX)


class Ready(Message):
    """The child is up."""

    kind: Literal["ready"] = "ready"


class Loaded(Message):
    """The weights are in place, and give what the canary expects."""

    kind: Literal["loaded"] = "loaded"
    parameters: int
    numerics: str
    """What they are computed with: engine/dtype/device."""
    rebuilt: bool
    """False when weights were swapped into the model that was there."""
    seconds: float
    continues: bool = False
    """Whether requests may have prefixes."""
    plays: bool = False
    """Whether requests may have episodes."""


class GroupGrown(Message):
    """What the samples of a request have grown by since this was last said."""

    kind: Literal["group_grown"] = "group_grown"
    request_id: RequestId
    parts: tuple[FragmentPart, ...]


class EngineProgress(Message):
    """The engine has taken steps since it last said anything: it samples, and has nothing to hand over yet."""

    kind: Literal["progress"] = "progress"


class GroupDone(Message):
    """All samples of one request, without their prefixes; of an episode with what the environment said."""

    kind: Literal["group_done"] = "group_done"
    request_id: RequestId
    samples: tuple[Sample, ...]
    first_token_ago_s: float = Field(ge=0)
    """Since the first token of this group."""


class GroupFailed(Message):
    """A request that came to nothing: an error of `protocol.errors`, by its code."""

    kind: Literal["group_failed"] = "group_failed"
    request_id: RequestId
    code: str
    message: str
    hint: str

    @staticmethod
    def from_error(request_id: str, error: SwarmError) -> "GroupFailed":
        return GroupFailed(request_id=request_id, code=error.code, message=error.message, hint=error.hint)


class Cancelled(Message):
    """A request that was given up before its end."""

    kind: Literal["cancelled"] = "cancelled"
    request_id: RequestId


class SamplingStats(Message):
    """What was sampled, and what it took."""

    kind: Literal["measured"] = "measured"
    prompt_tokens: int
    """Each prompt counts once, however many samples it has."""
    first_tokens: int
    """Drawn right after a prompt."""
    prefill_s: float
    later_tokens: int
    """Drawn after another; what an environment said is not counted."""
    decode_s: float


class Encoded(Message):
    """The tokens of each text, packed."""

    kind: Literal["encoded"] = "encoded"
    prompts: tuple[bytes, ...]


class CommandFailed(Message):
    """The command came to nothing: an error of `protocol.errors`, by its code."""

    kind: Literal["failed"] = "failed"
    code: str
    message: str
    hint: str

    @staticmethod
    def from_error(error: SwarmError) -> "CommandFailed":
        return CommandFailed(code=error.code, message=error.message, hint=error.hint)


class Command(Message):
    """A frame to the child."""

    body: Annotated[LoadVersion | Generate | CancelRequests | Measure | Encode, Field(discriminator="kind")]


Ended = GroupDone | GroupFailed | Cancelled
Reply = Ready | Loaded | SamplingStats | Encoded | CommandFailed
Said = GroupGrown | EngineProgress | Ended | Reply


class Answer(Message):
    """A frame from the child."""

    body: Annotated[Said, Field(discriminator="kind")]


def frame(message: Command | Answer) -> bytes:
    """The bytes of a message on the pipe."""
    body = message.to_bytes()
    return len(body).to_bytes(LENGTH_BYTES) + body
