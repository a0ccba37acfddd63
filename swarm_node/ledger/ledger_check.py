"""Check that the public log agrees with what the coordinator reported to this node about a claim.

A coordinator could report one thing to this node and another to others.

1. The claim's receipt, from this home or else from the coordinator, proves the position of its credit, and that it is
   a credit of this node for the reported lease.
2. The newest checkpoint continues the one that this home saw last (`log_watch`), and covers the receipt's.
3. The entries from the credit on are read in bundles, each proved completely under the checkpoint: no entry can be
   added or omitted for this node alone.
4. The claim's verdict in the log has the reported finding, and the digest of the reported evidence.
5. The claim is settled in the log as reported, and without an audit for the reported reason.

- A verdict precedes the settlement that it leads to: a claim that is settled without a verdict had none.
- A missing entry is no contradiction: a checkpoint comes every few seconds. Without a receipt nothing is compared.
- A hard finding may come after another void; so its code is not compared, but its verdict is.
- Of the auditor's own report (`ReportedAudit`), every field that is printed or used is validated first. Otherwise an
  invalid report would end `why` before it could print the log's entry. Other fields, as in the report of a later
  auditor version, are kept for scripts.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from ledger import proof, tree
from ledger.checkpoint import Checkpoint
from ledger.entry import Pending, Post, Reinstate, VerdictEntry, Void, parse
from ledger.proof import LedgerReceipt, Proven
from ledger.tiles import TILE_HASHES, Tile, tile_of
from ledger.tree import leaf_hash
from protocol import limits
from protocol.errors import NotFound, ProofInvalid
from protocol.ids import NodeId
from protocol.policy import chunks
from protocol.work.auditing import Explanation
from swarm_node.ledger.log_reader import LogReader
from swarm_node.ledger.log_watch import LogWatch
from swarm_node.ledger.receipts import kept_receipt

Count = Annotated[int, Field(ge=0, lt=2**63)]


class Reported(BaseModel):
    """Base of the parts of a report; unlike a message it may have additional fields."""

    model_config = ConfigDict(frozen=True, extra="allow", strict=True, allow_inf_nan=False)


class ReportedPosition(Reported):
    """A token position: the claimed values, and those of the audit."""

    sample: Count
    position: Count
    claimed: Count
    dictated: Count
    margin: float
    claimed_logprob: float
    logprob: float


class ReportedFinding(Reported):
    """A rule that the claim broke."""

    rule: str
    outcome: str
    expected: str
    observed: str
    positions: tuple[ReportedPosition, ...]


class ReportedFit(Reported):
    """Another version that the audit compared the claim with."""

    version: Count


class ReportedAudit(Reported):
    """Result of an audit of one claim, or the reason why it has no result; empty without an audit."""

    findings: tuple[ReportedFinding, ...] = ()
    fits: tuple[ReportedFit, ...] | None = None
    validator: str = ""
    tolerance: str = ""
    calibration: Count = 0
    error: str = ""
    note: str = ""


def read_report(report: bytes) -> ReportedAudit | None:
    """Parse a report; None if it is not a valid auditor's report."""
    if len(report) > limits.AUDIT_REPORT_MAX_BYTES:
        return None
    try:
        return ReportedAudit.model_validate_json(report or b"{}")
    except ValidationError:
        return None


TOLD = ("pass", "soft", "hard", "pardon")
"""Findings that have a verdict in the log."""

SETTLED = ("posted", "voided")
"""States that have an entry in the log."""

SHOW = "The coordinator's report contradicts the log: publish both, and mention it if you appeal."


class Logged(NamedTuple):
    """Result of the check: the entry that agrees with the report, or the reason why there is none."""

    state: Literal["logged", "not_yet", "nothing_told", "not_compared", "contradicted", "not_asked"]
    entry: int | None = None
    """Index of the verdict; of the settlement if no verdict was reported."""
    size: int = 0
    """Number of entries that the checkpoint covers."""


async def find_entry(
    reader: LogReader, watch: LogWatch, round_id: str, me: NodeId, reported: Explanation, receipts: Path
) -> Logged:
    """Find the log entry that agrees with the report; raise an error if the log contradicts it.

    `receipts` is this home's folder of receipts.
    """
    if reported.finding not in TOLD and reported.state not in SETTLED:
        return Logged("nothing_told")
    if not re.fullmatch("[0-9a-f]{64}", reported.claim_id):
        raise ProofInvalid(f"The coordinator reports lease {reported.lease_id} as settled but names no claim.")
    receipt, checkpoint = await _receipt_and_checkpoint(reader, watch, reported.claim_id, receipts)
    credit = _credit(receipt, round_id, me, reported, checkpoint)
    verdict, is_void = None, False
    for bundle in _bundles(credit.index, checkpoint.size):
        bodies = await _proved(reader, bundle, checkpoint)
        for index, entry in _entries_about(reported.claim_id, credit, bundle.first, bodies):
            if isinstance(entry, VerdictEntry):
                _compare(entry, index, reported)
                verdict = index
                if reported.state not in SETTLED:
                    return Logged("logged", index, checkpoint.size)
                continue
            if reported.finding in TOLD and verdict is None:
                raise ProofInvalid(
                    f"The coordinator reported the verdict {reported.finding}, but entry {index} of the log "
                    "(verified) settles the claim without a verdict.",
                    hint=SHOW,
                )
            if _is_as_reported(entry, index, reported):
                return Logged("logged", index if verdict is None else verdict, checkpoint.size)
            is_void = True
    if is_void and reported.appeal != "granted":
        raise ProofInvalid(
            f"The coordinator reported claim {reported.claim_id} as posted, but it is void in the log.", hint=SHOW
        )
    return Logged("not_yet", None, checkpoint.size)


async def _receipt_and_checkpoint(
    reader: LogReader, watch: LogWatch, claim_id: str, receipts: Path
) -> tuple[bytes, Checkpoint]:
    """Return the claim's receipt, from this home or else from the coordinator, and the newest checkpoint (1, 2)."""
    try:
        # Fetched before the checkpoint, which must cover it.
        receipt = kept_receipt(receipts, claim_id) or await reader.receipt(claim_id)
    except NotFound:
        receipt = b""
    _, checkpoint = await watch.refresh()
    if not receipt:
        raise NotFound(
            f"The coordinator shows no receipt for claim {claim_id[:16]}….",
            hint="It has one a few seconds after the credit; if it stays so, ask the operator and others.",
        )
    return receipt, checkpoint


def _credit(receipt: bytes, round_id: str, me: NodeId, reported: Explanation, checkpoint: Checkpoint) -> Proven:
    """Return this node's credit for the lease, proved by its receipt (1, 2)."""
    under, (credit, *_) = proof.check_receipt(receipt, round_id)
    if not isinstance(credit, Pending) or credit.claim_id != reported.claim_id:
        raise ProofInvalid(f"The receipt of claim {reported.claim_id[:16]}… is for another entry.", hint=SHOW)
    if (credit.lease_id, credit.node_id) != (reported.lease_id, me):
        raise ProofInvalid(
            f"The coordinator reported claim {reported.claim_id} for this node's lease {reported.lease_id}, but in the "
            f"log it belongs to node {credit.node_id} and lease {credit.lease_id}.",
            hint=SHOW,
        )
    if under.size > checkpoint.size:
        raise ProofInvalid(
            f"The receipt covers {under.size} entries, but the checkpoint only {checkpoint.size}.", hint=SHOW
        )
    return LedgerReceipt.from_bytes(receipt).entries[0]


def _bundles(start: int, size: int) -> Iterator[Tile]:
    """Yield the bundles with the entries of a log of `size` entries from index `start` on (3)."""
    for number in range(start // TILE_HASHES, -(-size // TILE_HASHES)):
        yield tile_of(Tile.BUNDLE, number, size)


async def _proved(reader: LogReader, bundle: Tile, checkpoint: Checkpoint) -> list[bytes]:
    """Return the entries of a bundle, proved under the checkpoint.

    One proof covers all: the siblings of the first entry inside the bundle are computed from the other entries.
    """
    bodies = await reader.entries(bundle.number, checkpoint.size)
    ranges = tree.inclusion_ranges(bundle.first, checkpoint.size)
    nodes = [node for leaves in ranges for node in tree.nodes_of(leaves)]
    own = {replace(bundle, level=0): b"".join(map(leaf_hash, bodies))}
    proof = tree.prove(ranges, await reader.hashes(nodes, checkpoint.size, own))
    tree.check_inclusion(bodies[0], bundle.first, checkpoint.size, checkpoint.root, proof)
    return bodies


def _entries_about(
    claim_id: str, credit: Proven, first: int, bodies: Sequence[bytes]
) -> Iterator[tuple[int, VerdictEntry | Post | Void | Reinstate]]:
    """Yield the verdicts and settlements of a claim after its credit, with their indexes; `bodies` begin at `first`."""
    for index, body in enumerate(bodies, first):
        if index == credit.index and body != credit.entry:
            raise ProofInvalid(f"The receipt of claim {claim_id[:16]}… points at another entry: {index}.")
        if index <= credit.index or claim_id.encode() not in body:
            continue
        entry = parse(body)
        if isinstance(entry, VerdictEntry | Post | Void | Reinstate) and entry.claim_id == claim_id:
            yield index, entry


def _compare(entry: VerdictEntry, index: int, reported: Explanation) -> None:
    """Require that the log's verdict has the reported finding and evidence (4)."""
    evidence = chunks.digest(reported.report)
    if (entry.outcome, entry.evidence_digest) != (reported.finding, evidence):
        raise ProofInvalid(
            f"Entry {index} of the log (verified) has the verdict {entry.outcome} with evidence "
            f"{entry.evidence_digest}; the coordinator reported {reported.finding} with evidence {evidence}.",
            hint=SHOW,
        )


def _is_as_reported(entry: Post | Void | Reinstate, index: int, reported: Explanation) -> bool:
    """Return True if the settlement is the reported one (5); False if an appeal may have reversed it since."""
    match entry:
        case Void() if reported.state == "posted":
            return False
        case Void() if reported.finding != "hard" and entry.reason_code != reported.code:
            words = f"void for {entry.reason_code}; the coordinator reported {reported.code or 'no reason'}"
        case Post() if reported.state == "voided":
            words = "posted; the coordinator reported it as void"
        case _:
            return True
    raise ProofInvalid(
        f"By entry {index} of the log (verified), claim {reported.claim_id[:16]}… is {words}.", hint=SHOW
    )
