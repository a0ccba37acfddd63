"""Checks of proof files, for `swarm-node ledger check`: a sentence for people, and rows for programs."""

from collections import defaultdict
from collections.abc import Mapping
from typing import Any, NamedTuple

from ledger import payees, payout_proof, proof
from ledger.entry import Entry, Pending
from ledger.payout_proof import PayoutLine
from ledger.proof import Settlement
from protocol.errors import ProofInvalid
from protocol.policy.root_document import unit_of
from protocol.text.money import Unit
from protocol.text.plain import counted, one_line


class FileProof(NamedTuple):
    """The result of a proof file: what it proves."""

    said: str
    rows: list[dict[str, Any]]


def prove(data: bytes, round_id: str, file: str) -> FileProof:
    """Check the bytes of `file` and return what they prove about a round; raise an error if they prove nothing.

    The first root document in the file, which the round id pins, has the unit of the amounts.
    """
    kind = proof.kind_of(data)
    if kind == proof.RECEIPTS:
        receipts = proof.LedgerReceipts.from_bytes(data)
        return _claims(proof.check_claims(receipts, round_id), unit_of(receipts.roots[0]))
    if kind == payout_proof.KIND:
        line = payout_proof.check(data, round_id)
        unit = unit_of(payout_proof.PayoutProof.from_bytes(data).roots[0])
        said = f"Verified: the signed root of {line.checkpoint.size:,} entries contains {payout_text(line, unit)}."
        return FileProof(said, [payout_row(round_id, line)])
    if kind == proof.FORK:
        earlier, later = proof.check_fork(data, round_id)
        said = f"Verified fork: the ledger's key signed two histories, of {earlier.size:,} and {later.size:,} entries."
        return FileProof(said, [{"kind": "fork", "earlier_size": earlier.size, "later_size": later.size}])
    if kind == proof.RECEIPT:
        checkpoint, entries = proof.check_receipt(data, round_id)
        unit = unit_of(proof.LedgerReceipt.from_bytes(data).roots[0])
        said = f"Verified: the signed root of {checkpoint.size:,} entries contains {_entries(entries, unit)}."
        return FileProof(said, [entry.model_dump() for entry in entries])
    raise ProofInvalid(
        f"{file} is not a receipt or a proof of a payout or a fork.", hint="They are in rounds/ of a node's home."
    )


def payout_text(line: PayoutLine, unit: Unit) -> str:
    """Return a payout on one line."""
    how = f"paid, reference {one_line(line.paid.reference)}" if line.paid else line.state
    return f"payout {line.batch.batch}: {unit.exact(line.amount_micros)} to {one_line(line.address)}, {how}"


def payout_row(round_id: str, line: PayoutLine) -> dict[str, Any]:
    """Return a payout line for programs and contracts: the batch's `key`, the place in it, and the proof."""
    return {
        "batch": line.batch.batch,
        "key": payees.key(round_id, line.batch.batch).hex(),
        "root": line.batch.payees_root,
        "payees": line.batch.payees,
        "place": line.place,
        "address": line.address,
        "amount_micros": line.amount_micros,
        "proof": [item.hex() for item in line.proof],
        "state": line.state,
        "reference": line.paid.reference if line.paid else None,
    }


def _claims(claims: Mapping[str, tuple[Pending, Settlement | None]], unit: Unit) -> FileProof:
    amounts = defaultdict[str, list[int]](list)
    rows = []
    for claim_id, (pending, settlement) in claims.items():
        state = {"post": "posted", "void": "voided"}.get(kind := settlement.kind if settlement else "pending", kind)
        amounts[state].append(pending.amount_micros)
        rows.append(
            {"claim_id": claim_id, "state": kind, "amount_micros": pending.amount_micros, "node_id": pending.node_id}
        )
    sums = "; ".join(f"{len(each):,} {state}, {unit.exact(sum(each))}" for state, each in sorted(amounts.items()))
    return FileProof(f"Verified: the signed log contains {counted(len(claims), 'claim')}{sums and f': {sums}'}.", rows)


def _entries(entries: list[Entry], unit: Unit) -> str:
    pending = next((entry for entry in entries if isinstance(entry, Pending)), None)
    if pending is None:
        return ", ".join(entry.kind for entry in entries)
    states = ", ".join(entry.kind for entry in entries)
    return (
        f"claim {pending.claim_id[:12]}… ({states}): {unit.exact(pending.amount_micros)} for {pending.tokens:,} tokens"
    )
