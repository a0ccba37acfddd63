"""Messages between the learner and the coordinator: a batch in, a report and a new version out.

- The learner is a client like any other, with the operator's credential instead of a node key; it may repeat all calls.
- It begins with `state`, gets `batches/<n>`, which may be larger than other messages, and settles it with `reports`.
- A call without a reply answers 204; so does one that was held open for a while: repeat it.
- Batch n leads from update n - 1 to update n; a repeated request gets the same batch.
- `commitments` takes an `UpdateCommitment`, which becomes an `update` of the ledger unless it breaks the chain.
- To publish, it sends each changed file by `PUT uploads/<version>/<file>?digest=<BLAKE3>`, then a `Publication` to
  `versions`. `GET uploads/<version>` has the files of the version before.
"""

from pydantic import Field

from protocol import limits
from protocol.ids import Hex64
from protocol.policy.manifest import FileName
from protocol.wire import canonical
from protocol.wire.message import Message


class TrainingSample(Message):
    """A completion with the coordinator's reward."""

    tokens: bytes
    logprobs: bytes
    reward: float
    sampled: bytes = b""
    """The origin of each token of an episode: 1 if the policy drew it, else 0. Empty: all were drawn."""
    weight: float = Field(1.0, ge=0, le=limits.WEIGHT_MAX)
    """The factor of its advantage."""
    skip: tuple[tuple[int, int], ...] = Field((), max_length=limits.SKIPPED_SPANS_MAX)
    """Tokens that are not trained on."""


class Earlier(Message):
    """An earlier claim, of which only the beginnings of samples were used."""

    claim_id: Hex64
    ends: tuple[int, ...]
    """The end (exclusive), in each sample, of the tokens of this claim and earlier ones."""


class TrainingGroup(Message):
    """A prompt and its samples, drawn from one version by a node, or by several in turn."""

    claim_id: Hex64
    prompt: bytes
    policy_update: int
    samples: tuple[TrainingSample, ...]
    earlier: tuple[Earlier, ...] = ()
    """The claims that `claim_id` continued, in the order of the work."""


class TrainingBatch(Message):
    """The groups of one update."""

    number: int = Field(ge=1)
    groups: tuple[TrainingGroup, ...]
    credit_micros: int = Field(0, ge=0)
    """The credit of all nodes that worked on these groups."""
    rewards: dict[str, float] = Field(default_factory=dict)
    """Figures that the groups lack: `invalid`, the share of samples that broke the form, and `component/NAME`, the mean
    of a component."""


class KeptBatch(Message):
    """A batch for whoever replays its update, with the signed rollout of each group."""

    number: int = Field(ge=1, le=limits.VERSION_MAX)
    groups: tuple[TrainingGroup, ...]
    rollouts: tuple[bytes, ...]
    """The envelope of each group's `claim_id`."""

    @classmethod
    def read(cls, data: bytes) -> "KeptBatch":
        """Return a batch from its bytes, which are more than those of other messages."""
        decoded = canonical.decode(data, max_bytes=limits.KEPT_BATCH_MAX_BYTES, max_items=limits.KEPT_BATCH_MAX_ITEMS)
        return cls.from_value(decoded)


class UpdateReport(Message):
    """The learner's report about a batch."""

    number: int = Field(ge=1)
    mismatched: tuple[Hex64, ...]
    """Claims whose log-probabilities differ much from the policy's own for the same tokens."""
    metrics: dict[str, float]
    idle_s: float = Field(ge=0)
    """Seconds the learner waited for this batch."""
    busy_s: float = Field(ge=0)
    """Seconds from the previous batch to the request for this one: the last update, publishing included."""


class UpdateCommitment(Message):
    """The learner's statement of an update for the log: the state before and after it, and all that it depends on."""

    update: int = Field(ge=1, le=limits.VERSION_MAX)
    before: Hex64
    after: Hex64
    groups_root: Hex64
    """The root of the groups that it trained on."""
    settings: bytes = Field(max_length=limits.TRAINING_SETTINGS_MAX_BYTES)
    """All settings that change the result, as JSON."""
    seed: int
    steps: int = Field(ge=0)
    """The optimizer's steps after it."""
    replaced_by: int = Field(0, ge=0, le=limits.VERSION_MAX)
    """The version that was loaded before it in place of the learner's own state; 0: none."""


class LearnerProgress(Message):
    """The learner's current activity, for display."""

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
    """Files of the previous version that the coordinator has: equal files need not be sent again."""

    files: tuple[UploadedFile, ...] = Field(max_length=limits.MANIFEST_MAX_FILES)


class Publication(Message):
    """A request to publish a version whose files were uploaded."""

    version: int = Field(ge=1, le=limits.VERSION_MAX)
    update: int = Field(ge=0, le=limits.VERSION_MAX)
    files: tuple[UploadedFile, ...] = Field(min_length=1, max_length=limits.MANIFEST_MAX_FILES)


class OfferedVersion(Message):
    """Weights that a trainer has sent, for the learner's process to check, complete and publish."""

    offer: str = Field(pattern=r"^[0-9a-f]{32}$")
    version: int = Field(ge=1, le=limits.VERSION_MAX)
    update: int = Field(ge=0, le=limits.VERSION_MAX)


class OfferOutcome(Message):
    """The learner's answer to an offer: the version that has the weights, or why they are refused."""

    offer: str = Field(pattern=r"^[0-9a-f]{32}$")
    version: int = Field(0, ge=0, le=limits.VERSION_MAX)
    code: str = Field("", max_length=40)
    """The code of the error; empty if the version is published."""
    message: str = Field("", max_length=1000)
    hint: str = Field("", max_length=1000)


class Evaluated(Message):
    """The result of an evaluation."""

    number: int = Field(ge=1)
    update: int = Field(ge=0)
    """The update of the measured version."""
    figures: dict[str, float]


class EvaluationSample(Message):
    """A sample of an evaluation as text, cut to a length that people read."""

    problem: int = Field(ge=0)
    """The place of its problem in the split."""
    prompt: str = Field(max_length=limits.EVALUATION_TEXT_MAX_CHARS)
    completion: str = Field(max_length=limits.EVALUATION_TEXT_MAX_CHARS)
    reward: float


class EvaluationSamples(Message):
    """The first sample of each of the first problems of an evaluation."""

    number: int = Field(ge=1)
    version: int = Field(ge=1, le=limits.VERSION_MAX)
    update: int = Field(ge=0)
    split: str = Field(max_length=40)
    samples: tuple[EvaluationSample, ...] = Field(max_length=limits.EVALUATION_SAMPLES_MAX)


class LearnerState(Message):
    """The state of the round, for a learner that starts or reconnects."""

    round_id: Hex64
    newest_version: int
    newest_update: int
    publish_every: int
    """Updates between two versions: measured, or set by the operator."""
    ledger_size: int = Field(ge=0)
    ledger_head: bytes = Field(max_length=16 * limits.KIB)
    """The last signed checkpoint of the ledger; empty before the first."""
    finished: bool
    evaluating: bool = False
    """True while the nodes still measure the last version."""
    evaluated: tuple[Evaluated, ...] = Field((), max_length=limits.EVALUATIONS_TOLD_MAX)
    """The last evaluations that ended, the oldest first."""
    replacement: int = Field(0, ge=0)
    """The last version with which the operator replaced the learner's; training continues from it. 0: none."""
    retracted: str = Field("", pattern=r"^([0-9a-f]{64})?$")
    """The root of the state that goes with `replacement`, if that is the result of a retraction."""
    kept: tuple[int, ...] = Field((), max_length=limits.KEPT_UPDATES_MAX)
    """The updates that were drawn: the checkpoint before each is kept."""
