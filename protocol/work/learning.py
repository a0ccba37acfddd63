"""What the learner and the coordinator say to each other: a batch in, a report and a new version out.

- The learner is a client like any other, with the operator's credential instead of a node key.
- Batch n leads from update n - 1 to update n; asking twice gives the same batch.
"""

from pydantic import Field

from protocol import limits
from protocol.ids import Hex64
from protocol.policy.manifest import FileName
from protocol.wire.message import Message


class TrainingSample(Message):
    """One completion with the coordinator's reward."""

    tokens: bytes
    logprobs: bytes
    reward: float
    sampled: bytes = b""
    """Of an episode: for each token 1 if the policy drew it, 0 if the environment said it. Empty: all were drawn."""
    weight: float = Field(1.0, ge=0, le=limits.WEIGHT_MAX)
    """What its advantage is multiplied by."""
    skip: tuple[tuple[int, int], ...] = Field((), max_length=limits.SKIPPED_SPANS_MAX)
    """Tokens that are not trained on."""


class Earlier(Message):
    """A claim of which only the beginnings of samples were used."""

    claim_id: Hex64
    ends: tuple[int, ...]
    """Up to which token each sample is this claim's, or an earlier one's."""


class TrainingGroup(Message):
    """One prompt and its samples, as one node drew them from one version, or several in turn."""

    claim_id: Hex64
    prompt: bytes
    policy_update: int
    samples: tuple[TrainingSample, ...]
    earlier: tuple[Earlier, ...] = ()
    """Whose work `claim_id` finished, in the order in which they worked."""


class TrainingBatch(Message):
    """The groups of one update."""

    number: int = Field(ge=1)
    groups: tuple[TrainingGroup, ...]
    credit_micros: int = Field(0, ge=0)
    """What all who worked on these groups were credited with."""


class UpdateReport(Message):
    """What the learner did with a batch."""

    number: int = Field(ge=1)
    mismatched: tuple[Hex64, ...]
    """Claims whose log-probabilities are far from what the policy gives the same tokens."""
    metrics: dict[str, float]
    idle_s: float = Field(ge=0)
    """Seconds the learner waited for this batch."""
    busy_s: float = Field(ge=0)
    """Seconds from the batch before to asking for this one: the last update and what followed, publishing included."""


class LearnerProgress(Message):
    """What the learner is doing, for whoever watches."""

    phase: str = Field(max_length=40)
    fraction: float = Field(ge=0, le=1)
    detail: str = Field(max_length=200)
    accuracy_before: float | None = None
    accuracy_after: float | None = None


class UploadedFile(Message):
    """A file of a policy folder as the learner sent it."""

    path: FileName
    digest: Hex64


class KnownUploads(Message):
    """Files that the coordinator has from the version before: if they are the same, they need not be sent again."""

    files: tuple[UploadedFile, ...] = Field(max_length=limits.MANIFEST_MAX_FILES)


class Publication(Message):
    """A version whose files were uploaded: publish it."""

    version: int = Field(ge=1, le=limits.VERSION_MAX)
    update: int = Field(ge=0, le=limits.VERSION_MAX)
    files: tuple[UploadedFile, ...] = Field(min_length=1, max_length=limits.MANIFEST_MAX_FILES)


class Evaluated(Message):
    """What an evaluation came to."""

    number: int = Field(ge=1)
    update: int = Field(ge=0)
    """That of the version which was measured."""
    figures: dict[str, float]


class LearnerState(Message):
    """Where the round stands, for a learner that starts or comes back."""

    round_id: Hex64
    newest_version: int
    newest_update: int
    publish_every: int
    """Updates from one version to the next, by what is measured or as the operator set it."""
    ledger_size: int = Field(ge=0)
    ledger_head: bytes = Field(max_length=16 * limits.KIB)
    """The last signed checkpoint of the ledger; nothing before the first."""
    finished: bool
    evaluating: bool = False
    """The nodes still measure the last version."""
    evaluated: tuple[Evaluated, ...] = Field((), max_length=limits.EVALUATIONS_TOLD_MAX)
    """The last evaluations that ended, the oldest first."""
    replacement: int = Field(0, ge=0)
    """The last version that the operator put in the place of the learner's, which goes on from it; 0: none."""
