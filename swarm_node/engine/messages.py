"""What the agent and its engine child say to each other: one command at a time, answered in order.

    Load      → Loaded
    Generate  → GroupDone, once per request as it finishes … Finished
    Measure   → Measured

- The child says `Ready` once, when its libraries are imported.
- `Failed` may stand in place of any answer and ends the command; the child is then ready for the next one.
- A frame is a 4-byte big-endian length and that many bytes of canonical MessagePack.
"""

from typing import Annotated, Literal

from pydantic import Field

from protocol import limits
from protocol.message import Message
from protocol.rollout import Sample

LENGTH_BYTES = 4


class Request(Message):
    """One group to sample: what of a lease the engine needs to know."""

    request_id: str = Field(max_length=64)
    prompt: bytes = Field(min_length=4, max_length=4 * limits.TOKENS_MAX)
    """Token ids, 32-bit little-endian."""
    seed: int = Field(ge=0, lt=2**64)
    samples: int = Field(ge=1, le=limits.SAMPLES_MAX)
    max_new_tokens: int = Field(ge=1, le=limits.TOKENS_MAX)
    temperature: float = Field(gt=0)


class Load(Message):
    """Take the weights of this policy folder."""

    kind: Literal["load"] = "load"
    folder: str


class Generate(Message):
    """Sample these groups."""

    kind: Literal["generate"] = "generate"
    requests: tuple[Request, ...] = Field(min_length=1, max_length=limits.LEASES_PER_REQUEST_MAX)


class Measure(Message):
    """Decode so many rows for so many tokens, and count."""

    kind: Literal["measure"] = "measure"
    rows: int = Field(ge=1, le=1024)
    new_tokens: int = Field(ge=1, le=1024)


class Ready(Message):
    """The child is up."""

    kind: Literal["ready"] = "ready"


class Loaded(Message):
    """The weights are in place."""

    kind: Literal["loaded"] = "loaded"
    parameters: int
    rebuilt: bool
    """False when weights were swapped into the model that was there."""
    seconds: float


class GroupDone(Message):
    """All samples of one request."""

    kind: Literal["group_done"] = "group_done"
    request_id: str
    samples: tuple[Sample, ...]
    first_token_ago_s: float = Field(ge=0)
    """Since the first token of the groups that are sampled together with this one."""


class Finished(Message):
    """Every group of the command was sent."""

    kind: Literal["finished"] = "finished"


class Measured(Message):
    """What `Measure` took."""

    kind: Literal["measured"] = "measured"
    tokens: int
    seconds: float


class Failed(Message):
    """The command came to nothing: an error of `protocol.errors`, by its code."""

    kind: Literal["failed"] = "failed"
    code: str
    message: str
    hint: str


class Command(Message):
    """A frame to the child."""

    body: Annotated[Load | Generate | Measure, Field(discriminator="kind")]


class Answer(Message):
    """A frame from the child."""

    body: Annotated[Ready | Loaded | GroupDone | Finished | Measured | Failed, Field(discriminator="kind")]


def frame(message: Command | Answer) -> bytes:
    """The bytes of a message on the pipe."""
    body = message.to_bytes()
    return len(body).to_bytes(LENGTH_BYTES) + body
