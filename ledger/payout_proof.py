"""Payout proofs: files that prove a payee's share of a batch, for ever, to anybody who knows the round's id.

1. The checkpoint is signed by a ledger key of the round's chain of root documents.
2. The entries are in the log of that checkpoint: the batch, and then, if they exist, the payout of one of the owner's
   nodes, and its payment.
3. The address and the amount are a leaf, at this place, of the tree whose root the batch's entry names.

- Only the owner's own nodes get the file, because an address is private. The owner decides who sees it.
- The file does not show which nodes belong to the owner: the log names nodes, the batch names addresses.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Final, Literal

from pydantic import Field

from ledger import proof, tree
from ledger.checkpoint import Checkpoint, open_checkpoint
from ledger.entry import BATCH_MAX, DEPOSITS_MAX_MICROS, Entry, Paid, Payout, PayoutBatch, parse
from ledger.payees import leaf
from ledger.proof import Hashes, Proven, Roots, SignedNote
from protocol.errors import ProofInvalid
from protocol.people.owner import Address
from protocol.wire.message import Message

KIND: Final = "echo-swarm/payout"

Number = Annotated[int, Field(ge=1, le=BATCH_MAX)]


class PayoutProof(Message):
    """The proof of an owner's share of a batch."""

    kind: Literal["echo-swarm/payout"] = KIND
    roots: Roots
    checkpoint: SignedNote
    entries: Annotated[tuple[Proven, ...], Field(min_length=1, max_length=3)]
    place: int = Field(ge=0)
    address: Address
    amount_micros: int = Field(gt=0, le=DEPOSITS_MAX_MICROS)
    proof: Hashes


class PayoutRequest(Message):
    """A node's request for the proof of its owner's share of a batch."""

    batch: Number


class PayoutReply(Message):
    """The proof, if the batch pays the owner, and the current number of batches."""

    batches: int = Field(ge=0, le=BATCH_MAX)
    payout: PayoutProof | None


@dataclass(frozen=True)
class PayoutLine:
    """The share that a checked file proves."""

    checkpoint: Checkpoint
    batch: PayoutBatch
    share: Payout | None
    """The payout of one of the owner's nodes."""
    paid: Paid | None
    place: int
    address: str
    amount_micros: int
    proof: tuple[bytes, ...]

    @property
    def state(self) -> str:
        """Return the state of the payout: `published`, `paying` or `paid`."""
        return "paid" if self.paid else "paying" if self.share else "published"


def check(data: bytes, round_id: str) -> PayoutLine:
    """Check a payout proof; return the share that it proves."""
    shown = PayoutProof.from_bytes(data)
    checkpoint = open_checkpoint(shown.checkpoint, proof.ledger_keys(shown.roots, round_id))  # (1)
    for item in shown.entries:  # (2)
        tree.check_inclusion(item.entry, item.index, checkpoint.size, checkpoint.root, item.proof)
    batch, share, paid = _of_one_payout([parse(item.entry) for item in shown.entries])
    mine = leaf(shown.address, shown.amount_micros)
    root = bytes.fromhex(batch.payees_root)
    tree.check_inclusion(mine, shown.place, batch.payees, root, shown.proof)  # (3)
    return PayoutLine(checkpoint, batch, share, paid, shown.place, shown.address, shown.amount_micros, shown.proof)


def _of_one_payout(entries: Sequence[Entry]) -> tuple[PayoutBatch, Payout | None, Paid | None]:
    """Step 2: return the batch, and the payout and the payment of a node's share if the entries have them."""
    match entries:
        case [PayoutBatch() as batch]:
            return batch, None, None
        case [PayoutBatch() as batch, Payout() as share] if share.batch == batch.batch:
            return batch, share, None
        case [PayoutBatch() as batch, Payout() as share, Paid() as paid] if (
            share.batch == batch.batch and paid.claim_id == share.claim_id
        ):
            return batch, share, paid
    raise ProofInvalid("The entries are not a batch with one payout of this batch.")
