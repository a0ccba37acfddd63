"""Whether the public log has what this node was told of a claim: a coordinator may tell one story here, another there.

1. The claim's receipt, the one that this home keeps or else the coordinator's, proves where its credit stands, and that
   it is a credit of this node for the lease that was told.
2. The newest checkpoint continues the one that this home saw last (`log_watch`), and covers the receipt's.
3. The entries from the credit on are read by the bundle, each proved whole under the checkpoint: nothing can be put in
   or left out for this node alone.
4. The claim's verdict there has the finding that was told, and the digest of the evidence that was told.
5. The claim is settled there as was told, and where no audit took it, for the reason that was told.

- A verdict stands before the settlement that it leads to: a claim that is settled without one had none.
- What is not there yet is no lie: a checkpoint comes every few seconds. Without a receipt nothing is compared.
- A hard finding may come after another void; so its code is not compared, but its verdict is.
"""

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Literal, NamedTuple

from ledger import proof, tree
from ledger.checkpoint import Checkpoint
from ledger.entry import Pending, Post, Reinstate, VerdictEntry, Void, parse
from ledger.proof import LedgerReceipt, Proven
from ledger.tiles import TILE_HASHES, Tile, tile_of
from ledger.tree import leaf_hash
from protocol.errors import NotFound, ProofInvalid
from protocol.ids import NodeId
from protocol.policy import chunks
from protocol.work.auditing import Explanation
from swarm_node.ledger.log_reader import LogReader
from swarm_node.ledger.log_watch import LogWatch

TOLD = ("pass", "soft", "hard", "pardon")
"""Findings that a verdict in the log stands for."""

SETTLED = ("posted", "voided")
"""States that an entry of the log stands for."""

SHOW = "The coordinator tells you one story and the log another: show both to others, and say so if you appeal."


class Logged(NamedTuple):
    """Where the log has what was told, or why that is not known."""

    state: Literal["logged", "not_yet", "nothing_told", "not_compared", "contradicted", "not_asked"]
    entry: int | None = None
    """Of the verdict; of the settlement, where no verdict was told."""
    size: int = 0
    """Entries that the checkpoint covers."""


async def find_entry(
    reader: LogReader, watch: LogWatch, round_id: str, me: NodeId, told: Explanation, receipts: Path
) -> Logged:
    """Where the log has what was told; raises where it says another thing. `receipts` is this home's folder of them."""
    if told.finding not in TOLD and told.state not in SETTLED:
        return Logged("nothing_told")
    if not re.fullmatch("[0-9a-f]{64}", told.claim_id):
        raise ProofInvalid(f"The coordinator tells of lease {told.lease_id} that it is settled, and names no claim.")
    try:
        kept = receipts / f"{told.claim_id}.receipt"  # fetched before the checkpoint, which must cover it
        receipt = kept.read_bytes() if kept.exists() else await reader.receipt(told.claim_id)
    except NotFound:
        receipt = b""
    _, checkpoint = await watch.refresh()
    if not receipt:
        raise NotFound(
            f"The coordinator shows no receipt for claim {told.claim_id[:16]}….",
            hint="It has one a few seconds after the credit; if it stays so, ask the operator and others.",
        )
    credit = _credit(receipt, round_id, me, told, checkpoint)
    verdict, void = None, False
    for bundle in _bundles(credit.index, checkpoint.size):
        for index, body in enumerate(await _proved(reader, bundle, checkpoint), bundle.first):
            if index == credit.index and body != credit.entry:
                raise ProofInvalid(f"The receipt of claim {told.claim_id[:16]}… points at another entry: {index}.")
            if index <= credit.index or told.claim_id.encode() not in body:
                continue
            entry = parse(body)
            if isinstance(entry, VerdictEntry) and entry.claim_id == told.claim_id:
                _compare(entry, index, told)
                verdict = index
                if told.state not in SETTLED:
                    return Logged("logged", index, checkpoint.size)
            elif isinstance(entry, Post | Void | Reinstate) and entry.claim_id == told.claim_id:
                if told.finding in TOLD and verdict is None:
                    raise ProofInvalid(
                        f"This node was told of a verdict, {told.finding}, but the log has settled the claim by entry "
                        f"{index}, proved, without a verdict.",
                        hint=SHOW,
                    )
                if _is_as_told(entry, index, told):
                    return Logged("logged", index if verdict is None else verdict, checkpoint.size)
                void = True
    if void and told.appeal != "granted":
        raise ProofInvalid(
            f"This node was told that claim {told.claim_id} is posted; in the log it is void.", hint=SHOW
        )
    return Logged("not_yet", None, checkpoint.size)


def _credit(receipt: bytes, round_id: str, me: NodeId, told: Explanation, checkpoint: Checkpoint) -> Proven:
    """(1, 2) This node's credit for the lease."""
    under, (credit, *_) = proof.check_receipt(receipt, round_id)
    if not isinstance(credit, Pending) or credit.claim_id != told.claim_id:
        raise ProofInvalid(f"The receipt of claim {told.claim_id[:16]}… is one of another entry.", hint=SHOW)
    if (credit.lease_id, credit.node_id) != (told.lease_id, me):
        raise ProofInvalid(
            f"The coordinator tells of claim {told.claim_id} as this node's to lease {told.lease_id}; by the log it is "
            f"that of {credit.node_id} to lease {credit.lease_id}.",
            hint=SHOW,
        )
    if under.size > checkpoint.size:
        raise ProofInvalid(f"A receipt is of {under.size} entries, and only {checkpoint.size} are shown.", hint=SHOW)
    return LedgerReceipt.from_bytes(receipt).entries[0]


def _bundles(start: int, size: int) -> Iterator[Tile]:
    """(3) Those that hold the entries of a log of this size from one on."""
    for number in range(start // TILE_HASHES, -(-size // TILE_HASHES)):
        yield tile_of(Tile.BUNDLE, number, size)


async def _proved(reader: LogReader, bundle: Tile, checkpoint: Checkpoint) -> list[bytes]:
    """The entries of a bundle, found under the checkpoint.

    One proof will do for all: the siblings of the first, as far as they lie in the bundle, are made of the others.
    """
    bodies = await reader.entries(bundle.number, checkpoint.size)
    ranges = tree.inclusion_ranges(bundle.first, checkpoint.size)
    nodes = [node for leaves in ranges for node in tree.nodes_of(leaves)]
    own = {replace(bundle, level=0): b"".join(map(leaf_hash, bodies))}
    proof = tree.prove(ranges, await reader.hashes(nodes, checkpoint.size, own))
    tree.check_inclusion(bodies[0], bundle.first, checkpoint.size, checkpoint.root, proof)
    return bodies


def _compare(entry: VerdictEntry, index: int, told: Explanation) -> None:
    """(4) One finding, one evidence."""
    evidence = chunks.digest(told.report)
    if (entry.outcome, entry.evidence_digest) != (told.finding, evidence):
        raise ProofInvalid(
            f"The log's entry {index}, proved, has the verdict {entry.outcome} by evidence {entry.evidence_digest}; "
            f"this node was told {told.finding} by evidence {evidence}.",
            hint=SHOW,
        )


def _is_as_told(entry: Post | Void | Reinstate, index: int, told: Explanation) -> bool:
    """(5) Whether this is the end that was told; false where an appeal may have undone it since."""
    match entry:
        case Void() if told.state == "posted":
            return False
        case Void() if told.finding != "hard" and entry.reason_code != told.code:
            words = f"void for {entry.reason_code}; this node was told {told.code or 'no reason'}"
        case Post() if told.state == "voided":
            words = "posted; this node was told that it is void"
        case _:
            return True
    raise ProofInvalid(f"By the log's entry {index}, proved, claim {told.claim_id[:16]}… is {words}.", hint=SHOW)
