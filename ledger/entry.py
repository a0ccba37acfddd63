"""The kinds of entries, their canonical bytes, and the amount of a claim.

- An entry's bytes are canonical MessagePack with its `kind` inside; its content hash is their BLAKE3 hash.
- `effect` names the part that may happen only once. Post and Void of a claim share one: a claim is settled once.
- A Pending has tokens, price *and* amount, and is rejected if they do not match: anybody can check the amount.
- An entry has no time and no randomness, so a retry makes the same bytes. A secret is drawn before its entry is made.
- A signed statement of an owner or a node is stored as its digest: the holder of the signed bytes can prove that they
  are in the log, and neither an address nor a person's text can be guessed from it.
"""

from functools import cached_property
from typing import Annotated, Literal, Self

from pydantic import AfterValidator, Field, StringConstraints, model_validator

from protocol import ids, limits
from protocol.errors import MalformedMessage
from protocol.ids import Digest, Hex32, Hex64, NodeId
from protocol.policy import chunks
from protocol.wire import canonical
from protocol.wire.message import Message

ENTRY_MAX_BYTES = 65_535
"""The size of an entry: the most that a static log tile can hold (two length bytes)."""

CLAIM_MAX_TOKENS = limits.SAMPLES_MAX * limits.TOKENS_MAX
"""Tokens of one claim: a whole group of the longest samples; multiplied by the highest price it stays below 2^63."""

BATCH_MAX = 10**9
"""Payout batches of a round: one per second for thirty years."""

DEPOSITS_MAX_MICROS = 2**62
"""The sum of all deposits: no other balance can exceed it, and it fits into 63 bits."""

GIFT = "gift/"
"""The beginning of the reference of a deposit that somebody else than the operator gave."""

UPDATE_MAX = limits.VERSION_MAX
"""Updates of a round, and entries of one update."""

EPOCH_MAX = 2**40
"""Epochs of audits; no round comes near this number."""

MTOK = 1_000_000
"""Prices are per million tokens."""


def amount(tokens: int, price_micros_per_mtok: int) -> int:
    """Return the micro-units for `tokens` at a price, rounded down."""
    if not 0 <= tokens <= CLAIM_MAX_TOKENS:
        raise ValueError(f"A claim has 0 to {CLAIM_MAX_TOKENS} tokens, not {tokens}")
    if not 0 <= price_micros_per_mtok <= limits.PRICE_MAX_MICROS_PER_MTOK:
        raise ValueError(
            f"A price is 0 to {limits.PRICE_MAX_MICROS_PER_MTOK} micros per million tokens, not {price_micros_per_mtok}"
        )
    return tokens * price_micros_per_mtok // MTOK


def with_bonus(price_micros_per_mtok: int, share: float) -> int:
    """Return a price with an addition, a share of it, in millionths, rounded down to whole micros."""
    raised = price_micros_per_mtok + price_micros_per_mtok * round(share * 1_000_000) // 1_000_000
    return min(raised, limits.PRICE_MAX_MICROS_PER_MTOK)


def _named(node: NodeId) -> NodeId:
    ids.public_key(node)
    return node


NamedNode = Annotated[NodeId, AfterValidator(_named)]
Reference = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9._/-]{1,100}$")]
Validator = Annotated[str, StringConstraints(pattern=r"^[a-z]{1,20}/[0-9]{1,6}$")]
ReasonCode = Annotated[str, StringConstraints(pattern=r"^[a-z][a-z0-9_]{0,63}$")]


class _Hashed(Message):
    """A message with a content hash."""

    @cached_property
    def body(self) -> bytes:
        """The logged bytes."""
        return self.to_bytes()

    @cached_property
    def content_hash(self) -> Digest:
        return chunks.digest(self.body)


class Deposit(_Hashed):
    """A deposit of the operator, or a gift of somebody else: outside → budget."""

    kind: Literal["deposit"] = "deposit"
    reference: Reference
    amount_micros: int = Field(gt=0, le=DEPOSITS_MAX_MICROS)

    @property
    def is_gift(self) -> bool:
        return self.reference.startswith(GIFT)

    @property
    def effect(self) -> str:
        return f"deposit:{self.reference}"


class Pending(_Hashed):
    """The credit for an accepted rollout, until it is settled: budget → pending."""

    kind: Literal["pending"] = "pending"
    claim_id: Hex64
    lease_id: Hex32
    node_id: NamedNode
    tokens: int = Field(gt=0, le=CLAIM_MAX_TOKENS)
    price_micros_per_mtok: int = Field(ge=0, le=limits.PRICE_MAX_MICROS_PER_MTOK)
    amount_micros: int

    @model_validator(mode="after")
    def _amount_follows(self) -> Self:
        if self.amount_micros != amount(self.tokens, self.price_micros_per_mtok):
            raise ValueError("amount_micros is not tokens times price, rounded down")
        return self

    @property
    def effect(self) -> str:
        return f"pending:{self.claim_id}"


class _Settlement(_Hashed):
    """The only settlement of a pending claim."""

    claim_id: Hex64

    @property
    def effect(self) -> str:
        return f"settle:{self.claim_id}"


class Post(_Settlement):
    """The posting of a validated claim: pending → payable."""

    kind: Literal["post"] = "post"


class Void(_Settlement):
    """The voiding of a pending claim, with a reason: pending → budget."""

    kind: Literal["void"] = "void"
    reason_code: ReasonCode


class Version(_Hashed):
    """The publication of a policy version, with its manifest's digest; moves nothing."""

    kind: Literal["version"] = "version"
    version: int = Field(gt=0, le=limits.VERSION_MAX)
    manifest_digest: Hex64

    @property
    def effect(self) -> str:
        return f"version:{self.version}"


class Root(_Hashed):
    """A root document with the round's keys, the ledger's among them, by its digest; moves nothing."""

    kind: Literal["root"] = "root"
    version: int = Field(gt=0, le=limits.VERSION_MAX)
    root_digest: Hex64

    @property
    def effect(self) -> str:
        return f"root:{self.version}"

    @classmethod
    def from_document(cls, version: int, document: bytes) -> Self:
        """Return the entry of a root document from its served bytes."""
        return cls(version=version, root_digest=chunks.digest(document))


class Commitment(_Hashed):
    """The coordinator's commitment to the secret of an epoch's audits, made before the epoch's first claim."""

    kind: Literal["commitment"] = "commitment"
    epoch: int = Field(ge=1, le=EPOCH_MAX)
    secret_digest: Hex64

    @property
    def effect(self) -> str:
        return f"commitment:{self.epoch}"


class Reveal(_Hashed):
    """The secret of an ended epoch, and the digest of its draws: anybody can repeat the draw."""

    kind: Literal["reveal"] = "reveal"
    epoch: int = Field(ge=1, le=EPOCH_MAX)
    secret: bytes = Field(min_length=32, max_length=32)
    draws_digest: Hex64

    @property
    def effect(self) -> str:
        return f"reveal:{self.epoch}"

    @property
    def commitment(self) -> Commitment:
        """The commitment that must be in the log before."""
        return Commitment(epoch=self.epoch, secret_digest=chunks.digest(self.secret))


class VerdictEntry(_Hashed):
    """The finding of an audit of a claim, and the digest of the stored evidence; moves nothing."""

    kind: Literal["verdict"] = "verdict"
    claim_id: Hex64
    outcome: Literal["pass", "soft", "hard", "pardon"]
    validator: Validator
    evidence_digest: Hex64

    @property
    def effect(self) -> str:
        return f"verdict:{self.claim_id}"


class AppealEntry(_Hashed):
    """An appeal of a node or its owner against a fault or a ban, stored by its digest; moves nothing."""

    kind: Literal["appeal"] = "appeal"
    claim_id: Hex64
    statement_digest: Hex64

    @property
    def effect(self) -> str:
        return f"appeal:{self.claim_id}"


class RulingEntry(_Hashed):
    """The operator's ruling on an appeal, with its reason; moves nothing by itself."""

    kind: Literal["ruling"] = "ruling"
    claim_id: Hex64
    outcome: Literal["granted", "denied"]
    reason_code: ReasonCode

    @property
    def effect(self) -> str:
        return f"ruling:{self.claim_id}"

    @property
    def appealed(self) -> str:
        """The effect that must have come before."""
        return f"appeal:{self.claim_id}"


class Reinstate(_Hashed):
    """The credit of a voided claim after a ruling that granted an appeal: budget → payable."""

    kind: Literal["reinstate"] = "reinstate"
    claim_id: Hex64
    appealed_claim_id: Hex64
    reason_code: ReasonCode

    @property
    def effect(self) -> str:
        return f"reinstate:{self.claim_id}"

    @property
    def ruling(self) -> RulingEntry:
        """The ruling that must be in the log before."""
        return RulingEntry(claim_id=self.appealed_claim_id, outcome="granted", reason_code=self.reason_code)


class OwnerAct(_Hashed):
    """An owner's signed statement, valid from this entry on, stored as its digest; moves nothing."""

    kind: Literal["owner"] = "owner"
    owner: NamedNode
    number: int = Field(gt=0, le=limits.STATEMENT_NUMBER_MAX)
    act: Literal["delegation", "revocation", "address"]
    node_id: NamedNode | None
    statement_digest: Hex64

    @property
    def effect(self) -> str:
        return f"owner:{self.owner}:{self.number}"


class PayoutBatch(_Hashed):
    """A batch of payouts, with the root of the tree of its payees; moves nothing."""

    kind: Literal["payout_batch"] = "payout_batch"
    batch: int = Field(gt=0, le=BATCH_MAX)
    payees_root: Hex64
    payees: int = Field(gt=0)
    amount_micros: int = Field(gt=0, le=DEPOSITS_MAX_MICROS)

    @property
    def effect(self) -> str:
        return f"payout_batch:{self.batch}"


class FormedBatch(_Hashed):
    """The groups of a batch, with their rewards, as they were before the learner trained on them; moves nothing."""

    kind: Literal["batch"] = "batch"
    number: int = Field(gt=0, le=UPDATE_MAX)
    groups: int = Field(gt=0)
    groups_root: Hex64

    @property
    def effect(self) -> str:
        return f"batch:{self.number}"


class UpdateEntry(_Hashed):
    """The learner's commitment to an update: the state before and after it, and all that it depends on; moves nothing.

    `attempt` counts the entries of this update. `replaced_by` is the version that the operator put in the place of the
    state after the update before; 0: none.
    """

    kind: Literal["update"] = "update"
    update: int = Field(gt=0, le=UPDATE_MAX)
    attempt: int = Field(gt=0, le=UPDATE_MAX)
    before: Hex64
    after: Hex64
    groups_root: Hex64
    settings_digest: Hex64
    seed: int
    steps: int = Field(ge=0)
    replaced_by: int = Field(ge=0, le=limits.VERSION_MAX)

    @property
    def effect(self) -> str:
        return f"update:{self.update}:{self.attempt}"


class RetractionEntry(_Hashed):
    """Updates that were made again without the groups of some owners, and the version with the result; moves nothing.

    `before` is the state before update `first`, `after` the state once batches `first` to `last` were trained on again.
    `left_out_root` is the root of the claim ids of the groups that were left out, in the order of the batches.
    """

    kind: Literal["retraction"] = "retraction"
    version: int = Field(gt=0, le=limits.VERSION_MAX)
    owners: tuple[NamedNode, ...] = Field(min_length=1, max_length=limits.RETRACTED_OWNERS_MAX)
    first: int = Field(gt=0, le=UPDATE_MAX)
    last: int = Field(gt=0, le=UPDATE_MAX)
    before: Hex64
    after: Hex64
    left_out: int = Field(gt=0)
    left_out_root: Hex64

    @property
    def effect(self) -> str:
        return f"retraction:{self.version}"


class _OfPayout(_Hashed):
    """An entry about a node's share of a batch; the book stores it among the claims."""

    batch: int = Field(gt=0, le=BATCH_MAX)
    node_id: NamedNode

    @property
    def claim_id(self) -> str:
        return f"{self.batch}:{self.node_id}"

    @property
    def batch_effect(self) -> str:
        """The effect that must have come before."""
        return f"payout_batch:{self.batch}"


class Payout(_OfPayout):
    """A node's share of a batch: payable → paying."""

    kind: Literal["payout"] = "payout"
    amount_micros: int = Field(gt=0, le=DEPOSITS_MAX_MICROS)

    @property
    def effect(self) -> str:
        return f"payout:{self.claim_id}"


class Paid(_OfPayout):
    """The payment of a node's share, with the payer's reference: paying → paid."""

    kind: Literal["paid"] = "paid"
    reference: Reference

    @property
    def effect(self) -> str:
        return f"paid:{self.claim_id}"


OnceEntry = (
    Deposit
    | Version
    | Root
    | Commitment
    | Reveal
    | VerdictEntry
    | AppealEntry
    | RulingEntry
    | OwnerAct
    | PayoutBatch
    | FormedBatch
    | UpdateEntry
    | RetractionEntry
)
"""Entries without a claim."""

PayoutEntry = Payout | Paid
ClaimEntry = Pending | Post | Void | Reinstate | PayoutEntry
Entry = OnceEntry | ClaimEntry

CLAIM_KINDS = frozenset({"pending", "post", "void", "reinstate", "payout", "paid"})
"""The kinds of `ClaimEntry`; in a batch, comparing kinds is faster than comparing classes."""

PAYOUT_KINDS = frozenset({"payout", "paid"})

KINDS: dict[str, type[Entry]] = {
    "deposit": Deposit,
    "version": Version,
    "root": Root,
    "commitment": Commitment,
    "reveal": Reveal,
    "verdict": VerdictEntry,
    "appeal": AppealEntry,
    "ruling": RulingEntry,
    "owner": OwnerAct,
    "payout_batch": PayoutBatch,
    "batch": FormedBatch,
    "update": UpdateEntry,
    "retraction": RetractionEntry,
    "pending": Pending,
    "post": Post,
    "void": Void,
    "reinstate": Reinstate,
    "payout": Payout,
    "paid": Paid,
}
"""Kind on the wire → model."""


def parse(data: bytes) -> Entry:
    """Return the entry of canonical bytes."""
    value = canonical.decode(data, max_bytes=ENTRY_MAX_BYTES)
    kind = value.get("kind") if isinstance(value, dict) else None
    model = KINDS.get(kind) if isinstance(kind, str) else None
    if model is None:
        raise MalformedMessage(f"{str(kind)[:40]!r} is not a kind of ledger entry.")
    return model.from_value(value)
