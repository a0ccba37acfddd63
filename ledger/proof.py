"""Files that prove facts about the log, for ever and offline, to anybody who knows the round's id.

- A `LedgerReceipt` proves that entries are in the log, at these places, under this signed checkpoint.
- `LedgerReceipts` prove the same for many claims: a coordinator's answer, and a file that a node keeps. Claims that
  were fetched at different times stand under different checkpoints.
- A `Fork` has two signed checkpoints that contradict each other. Its proof gives the later one's root, and another root
  at the earlier one's size than the earlier one has; for equal sizes two different roots are enough.
- Each has the round's chain of root documents: the id in the join string names the first, each signs the next, and they
  name the ledger's keys (`protocol.policy.trust`). So a file stays valid without the coordinator and its keys.
- Any ledger key of the chain counts. A thief of a key can make files that are valid until its replacement is known;
  compare with the newest root where that matters.
"""

from typing import Annotated, Final, Literal

from pydantic import Field

from ledger import tree
from ledger.checkpoint import Checkpoint, ledger_key, open_checkpoint
from ledger.entry import ENTRY_MAX_BYTES, Entry, Pending, Post, Reinstate, Void, parse
from ledger.gaps import Keys
from ledger.note import NOTE_MAX_BYTES, NoteKey
from ledger.tree import HASH_BYTES, TREE_SIZE_MAX
from protocol import limits
from protocol.errors import ProofInvalid, SwarmError
from protocol.ids import Hex64
from protocol.wire import canonical
from protocol.wire.message import Message

RECEIPT: Final = "echo-swarm/receipt"
RECEIPTS: Final = "echo-swarm/receipts"
FORK: Final = "echo-swarm/fork"

PROOF_MAX_HASHES = 64
"""Hashes of a proof: one for each level of the largest tree, and the seed."""

RECEIPT_MAX_ENTRIES = 16
"""Entries of a receipt; a claim has three at most."""

Settlement = Post | Void | Reinstate
"""The settlement of a claim; the last one if there are several."""

Hashes = Annotated[
    tuple[Annotated[bytes, Field(min_length=HASH_BYTES, max_length=HASH_BYTES)], ...],
    Field(max_length=PROOF_MAX_HASHES),
]
SignedNote = Annotated[bytes, Field(max_length=NOTE_MAX_BYTES)]
Roots = Annotated[tuple[bytes, ...], Field(min_length=1, max_length=limits.ROOT_ROTATIONS_MAX)]


class Proven(Message):
    """An entry with its place in the log and the proof."""

    index: int = Field(ge=0, lt=TREE_SIZE_MAX)
    entry: Annotated[bytes, Field(max_length=ENTRY_MAX_BYTES)]
    proof: Hashes


class LedgerReceipt(Message):
    """A proof that entries are in the log."""

    kind: Literal["echo-swarm/receipt"] = RECEIPT
    roots: Roots
    checkpoint: SignedNote
    entries: Annotated[tuple[Proven, ...], Field(min_length=1, max_length=RECEIPT_MAX_ENTRIES)]


class PackedProof(Message):
    """An entry with its place in the log and the hashes of its proof in one string, since a file has thousands."""

    index: int = Field(ge=0, lt=TREE_SIZE_MAX)
    entry: Annotated[bytes, Field(max_length=ENTRY_MAX_BYTES)]
    proof: Annotated[bytes, Field(max_length=PROOF_MAX_HASHES * HASH_BYTES)]

    @staticmethod
    def pack(proven: Proven) -> "PackedProof":
        """Return the same proof in packed form."""
        return PackedProof(index=proven.index, entry=proven.entry, proof=b"".join(proven.proof))

    def unpack(self) -> Proven:
        """Return the proof as a receipt of one claim has it."""
        if len(self.proof) % HASH_BYTES:
            raise ProofInvalid("A proof is not made of whole hashes.")
        starts = range(0, len(self.proof), HASH_BYTES)
        hashes = tuple(self.proof[start : start + HASH_BYTES] for start in starts)
        return Proven(index=self.index, entry=self.entry, proof=hashes)


class ClaimProof(Message):
    """The entries of one claim with their proofs, under one of the checkpoints beside it."""

    claim_id: Hex64
    checkpoint: int = Field(ge=0, lt=limits.RECEIPTS_FILE_MAX)
    entries: Annotated[tuple[PackedProof, ...], Field(max_length=RECEIPT_MAX_ENTRIES)]
    """Empty in an answer about a claim that is not published yet."""


class ReceiptsRequest(Message):
    """A request for the receipts of many claims."""

    claims: Annotated[tuple[Hex64, ...], Field(min_length=1, max_length=limits.RECEIPTS_MAX)]


class LedgerReceipts(Message):
    """Proofs that entries of many claims are in the log."""

    kind: Literal["echo-swarm/receipts"] = RECEIPTS
    roots: Roots
    checkpoints: Annotated[tuple[SignedNote, ...], Field(max_length=limits.RECEIPTS_FILE_MAX)]
    claims: Annotated[tuple[ClaimProof, ...], Field(max_length=limits.RECEIPTS_FILE_MAX)]

    def of_claim(self, claim: ClaimProof) -> LedgerReceipt:
        """Return one claim's proofs as a receipt of its own."""
        if claim.checkpoint >= len(self.checkpoints):
            raise ProofInvalid(f"The checkpoint of claim {claim.claim_id[:16]}… is missing.")
        entries = tuple(packed.unpack() for packed in claim.entries)
        return LedgerReceipt(roots=self.roots, checkpoint=self.checkpoints[claim.checkpoint], entries=entries)


class Fork(Message):
    """A proof that two checkpoints contradict each other."""

    kind: Literal["echo-swarm/fork"] = FORK
    roots: Roots
    earlier: SignedNote
    later: SignedNote
    proof: Hashes


def ledger_keys(roots: tuple[bytes, ...], round_id: str) -> list[NoteKey]:
    """Return every key that a round's chain of roots names for its ledger, the newest first."""
    from protocol.policy import trust

    return [ledger_key(round_id, public) for public in reversed(trust.ledger_keys(roots, round_id))]


def check_receipt(data: bytes, round_id: str) -> tuple[Checkpoint, list[Entry]]:
    """Check a receipt; return its checkpoint and the entries that it proves."""
    receipt = LedgerReceipt.from_bytes(data)
    checkpoint = open_checkpoint(receipt.checkpoint, ledger_keys(receipt.roots, round_id))
    for item in receipt.entries:
        tree.check_inclusion(item.entry, item.index, checkpoint.size, checkpoint.root, item.proof)
    return checkpoint, [parse(item.entry) for item in receipt.entries]


def check_claims(receipts: LedgerReceipts, round_id: str) -> dict[str, tuple[Pending, Settlement | None]]:
    """Check the receipts of many claims; return the credit and the settlement of each that has entries.

    A checkpoint, which many claims share, is checked once.
    """
    keys = ledger_keys(receipts.roots, round_id)
    checkpoints = [open_checkpoint(note, keys) for note in receipts.checkpoints]
    found: dict[str, tuple[Pending, Settlement | None]] = {}
    for claim in receipts.claims:
        if not claim.entries:
            continue
        if claim.checkpoint >= len(checkpoints):
            raise ProofInvalid(f"The checkpoint of claim {claim.claim_id[:16]}… is missing.")
        checkpoint = checkpoints[claim.checkpoint]
        for packed in claim.entries:
            proof = packed.unpack().proof
            tree.check_inclusion(packed.entry, packed.index, checkpoint.size, checkpoint.root, proof)
        if claim.claim_id in found:
            raise ProofInvalid(f"Claim {claim.claim_id[:16]}… is there twice.")
        found[claim.claim_id] = _claim_of([parse(packed.entry) for packed in claim.entries], claim.claim_id)
    return found


def _claim_of(entries: list[Entry], claim_id: str) -> tuple[Pending, Settlement | None]:
    """Return the credit and the settlement that the entries of a receipt are; raise an error if they are not."""
    match entries:
        case [Pending() as pending] if pending.claim_id == claim_id:
            return pending, None
        case [Pending() as pending, (Post() | Void()) as settlement] if (
            pending.claim_id == settlement.claim_id == claim_id
        ):
            return pending, settlement
        case [Pending() as pending, Void() as void, Reinstate() as reinstated] if (
            pending.claim_id == void.claim_id == reinstated.claim_id == claim_id
        ):
            return pending, reinstated
    raise ProofInvalid(f"The receipt is not about claim {claim_id[:16]}….")


def kind_of(data: bytes) -> str:
    """Return the kind that a file names; empty if it names none."""
    try:
        value = canonical.decode(data, max_bytes=limits.MESSAGE_MAX_BYTES)
    except SwarmError:
        return ""
    kind = value.get("kind") if isinstance(value, dict) else None
    return kind if isinstance(kind, str) else ""


def check_fork(data: bytes, round_id: str) -> tuple[Checkpoint, Checkpoint]:
    """Check that two checkpoints of a file contradict each other and no gap lies between them; return both."""
    claimed = Fork.from_bytes(data)
    keys = Keys(claimed.roots, round_id)
    (earlier, signer), (later, other) = keys.signed(claimed.earlier), keys.signed(claimed.later)
    if (gap := keys.between(signer, other)) and min(earlier.size, later.size) > gap.size:
        raise ProofInvalid(f"These two checkpoints are on different sides of a gap: {gap}.")
    if earlier.size == later.size:
        proved = earlier.root != later.root and not claimed.proof
    else:
        old_root, new_root = tree.roots_by_consistency(earlier.size, later.size, claimed.proof)
        proved = new_root == later.root and old_root != earlier.root
    if not proved:
        raise ProofInvalid("This file does not prove that the two checkpoints contradict each other.")
    return earlier, later
