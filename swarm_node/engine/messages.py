"""Messages between the agent and its engine child.

    Load      → Loaded                               one answer
    Generate  → GroupDone | GroupFailed | Cancelled  one for each request, as it ends, in any order
              + GroupGrown                           any number before that, if the request asks for them
    Cancel    → no answer of its own; each named request that was still unanswered is answered with Cancelled
    Measure   → Measured                             one answer
    Encode    → Encoded                              one answer

- The child sends `Ready` once, when its libraries are imported.
- Requests may be added at any time: the child admits them as slots become free, and never waits for a batch to end.
- Commands run in order of arrival, except `CancelRequests`, which runs at once. The other commands wait until every
  request before them is answered, and later commands wait for them. So a swap never touches a running request; to
  avoid the wait, cancel the request first.
- A request names its version. If another version is loaded, the request fails; no sample ever comes from the wrong one.
- `CommandFailed` answers `LoadVersion`, `Measure`, `Encode` or an invalid command; the child is then ready for the
  next one. After a failed `LoadVersion` no version is loaded: neither a mixture of two nor the old one.
- A failed request does not affect other requests.
- A frame is a 4-byte big-endian length and that many bytes of canonical MessagePack.
"""

from typing import Annotated, Literal

from pydantic import Field

from protocol import limits
from protocol.errors import SwarmError
from protocol.policy.manifest import Sampler
from protocol.wire.message import Message
from protocol.work.fragment import FragmentPart
from protocol.work.lease import Lease, OwnTemperature, Prefix, length_max
from protocol.work.rollout import Sample

LENGTH_BYTES = 4

RequestId = Annotated[str, Field(max_length=64)]


class SampleRequest(Message):
    """A group to sample: the part of a lease that the engine needs."""

    request_id: RequestId
    version: int = Field(ge=0, le=limits.VERSION_MAX)
    prompt: bytes = Field(min_length=4, max_length=4 * limits.TOKENS_MAX)
    """Token ids, 32-bit little-endian."""
    seed: int = Field(ge=0, lt=2**64)
    samples: int = Field(ge=1, le=limits.SAMPLES_MAX)
    max_new_tokens: int = Field(ge=1, le=limits.TOKENS_MAX)
    """Limit for a whole sample, including its prefix."""
    temperature: float = Field(gt=0)
    """The version's temperature, at which log-probabilities are reported."""
    own_temperature: OwnTemperature = None
    """The temperature at which tokens are drawn; None: `temperature`."""
    prefixes: tuple[Prefix, ...] = Field((), max_length=limits.SAMPLES_MAX)
    """Start of each sample, or empty; only for an engine that reports `continues`."""
    turn_tokens_max: int = Field(0, ge=0, le=limits.TOKENS_MAX)
    """The most new tokens of a sample, which is one turn of an episode; 0: only `max_new_tokens` limits them."""
    report_every_s: float = Field(0.0, ge=0)
    """Interval of `GroupGrown` reports in seconds; 0 means none."""
    is_read: bool = False
    """True if a caller reads the tokens as they come. vLLM, where reports cost time, reports only these groups."""

    @classmethod
    def from_lease(cls, lease: Lease, sampler: Sampler, *, report_every_s: float) -> "SampleRequest":
        """Return the request for a lease, with the sampler of its version.

        The lease's own interval of reports replaces `report_every_s`. A turn of an episode has no fragments.
        """
        return cls(
            request_id=lease.lease_id,
            version=lease.version,
            prompt=lease.prompt,
            seed=lease.seed,
            samples=lease.samples,
            max_new_tokens=lease.completion_max(sampler.max_new_tokens),
            temperature=sampler.temperature,
            own_temperature=lease.temperature,
            prefixes=lease.prefixes,
            turn_tokens_max=lease.turn_tokens_max,
            report_every_s=0.0 if lease.turn_tokens_max else lease.report_every_s or report_every_s,
            is_read=lease.report_every_s > 0,
        )

    def is_report_due(self, now: float, *, first_token_at: float | None, reported_at: float | None) -> bool:
        """Return True if new tokens are to be reported: the first ones at once if a caller reads them."""
        if not self.report_every_s or first_token_at is None:
            return False
        if reported_at is None and self.is_read:
            return True
        return now - (reported_at or first_token_at) >= self.report_every_s

    def length_max(self, start: int) -> int:
        """Return the length at which a sample with a prefix of `start` tokens stops by `length`."""
        return length_max(start, self.turn_tokens_max, self.max_new_tokens)


class LoadVersion(Message):
    """Command: load the weights of this policy folder, as `version`."""

    kind: Literal["load"] = "load"
    folder: str
    version: int = Field(ge=0, le=limits.VERSION_MAX)
    memory_max_bytes: int = Field(0, ge=0)
    """Limit of the child's private memory from now on; 0 means no limit of its own."""


class Generate(Message):
    """Command: sample these groups."""

    kind: Literal["generate"] = "generate"
    requests: tuple[SampleRequest, ...] = Field(min_length=1, max_length=limits.LEASES_PER_REQUEST_MAX)


class CancelRequests(Message):
    """Command: cancel these requests; a request that was already answered stays answered."""

    kind: Literal["cancel"] = "cancel"
    request_ids: tuple[RequestId, ...] = Field(max_length=4 * limits.LEASES_PER_REQUEST_MAX)


class Measure(Message):
    """Command: report the sampling statistics since the last `Measure`."""

    kind: Literal["measure"] = "measure"


class Encode(Message):
    """Command: encode these texts, with the tokenizer of the loaded policy."""

    kind: Literal["encode"] = "encode"
    texts: tuple[str, ...] = Field(min_length=1, max_length=limits.LEASES_PER_REQUEST_MAX)


class Ready(Message):
    """The child is ready for commands."""

    kind: Literal["ready"] = "ready"


class Loaded(Message):
    """The weights are loaded and have passed the canary."""

    kind: Literal["loaded"] = "loaded"
    parameters: int
    numerics: str
    """Class of numerics: engine/dtype/device."""
    rebuilt: bool
    """False when the weights were swapped into the existing model."""
    seconds: float
    continues: bool = False
    """True if requests may have prefixes."""


class GroupGrown(Message):
    """New tokens of a request's samples since the last report."""

    kind: Literal["group_grown"] = "group_grown"
    request_id: RequestId
    parts: tuple[FragmentPart, ...]


class EngineProgress(Message):
    """The engine has taken steps since its last answer, but has no result yet."""

    kind: Literal["progress"] = "progress"


class GroupDone(Message):
    """All samples of one request, without their prefixes."""

    kind: Literal["group_done"] = "group_done"
    request_id: RequestId
    samples: tuple[Sample, ...]
    first_token_ago_s: float = Field(ge=0)
    """Seconds since the first token of this group."""


class GroupFailed(Message):
    """A failed request: an error of `protocol.errors`, by its code."""

    kind: Literal["group_failed"] = "group_failed"
    request_id: RequestId
    code: str
    message: str
    hint: str

    @staticmethod
    def from_error(request_id: str, error: SwarmError) -> "GroupFailed":
        return GroupFailed(request_id=request_id, code=error.code, message=error.message, hint=error.hint)


class Cancelled(Message):
    """A request that was cancelled before its end."""

    kind: Literal["cancelled"] = "cancelled"
    request_id: RequestId


class SamplingStats(Message):
    """Sampled tokens and the time they took."""

    kind: Literal["measured"] = "measured"
    prompt_tokens: int
    """Tokens that were computed before the first draw: each prompt once for any number of samples, each prefix without
    what the engine kept of it."""
    first_tokens: int
    """Tokens drawn right after a prompt."""
    prefill_s: float
    later_tokens: int
    """Tokens drawn after another token."""
    decode_s: float


class Encoded(Message):
    """The tokens of each text, packed."""

    kind: Literal["encoded"] = "encoded"
    prompts: tuple[bytes, ...]


class CommandFailed(Message):
    """The command failed: an error of `protocol.errors`, by its code."""

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
    """Return the bytes of a message on the pipe."""
    body = message.to_bytes()
    return len(body).to_bytes(LENGTH_BYTES) + body
