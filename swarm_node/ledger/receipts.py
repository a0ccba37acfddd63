"""A node's claims and payouts, and the proofs in its home that they are in the ledger permanently.

- A claim is recorded and synced when its rollout was accepted, before the rollout is deleted.
- Each line begins with a newline, so that a line cut short by a crash does not damage the next.
- A receipt is checked before it is kept, also that it credits this node; a receipt without a settlement, or with a void
  that an appeal may reverse, is fetched again next time, and must then have the same credit.
- Receipts are fetched many at a time and kept in one file per thousand claims, in the claims' order: `LedgerReceipts`.

The proof of a payout is one file per batch.

- A file is checked before it is kept. A file without a payment is fetched again next time, and must then have the same
  address and amount.
- A batch that pays this owner nothing leaves no file.
"""

import os
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path

import trio

from ledger import payout_proof, proof
from ledger.entry import Pending, Void
from ledger.payout_proof import PayoutLine, PayoutReply
from protocol import limits
from protocol.errors import NotFound, ProofInvalid, SwarmError
from protocol.ids import NodeId
from protocol.policy import chunks
from protocol.wire.signing import Envelope
from swarm_node.base.disk import disk_named, write_durably
from swarm_node.ledger.log_reader import LogReader

RECEIPTS = "receipts"
"""Folder of the kept receipts, below the round's folder."""

SUFFIX = ".receipts"
"""The end of the name of a file with the receipts of many claims."""

CLAIM_ID_CHARS = 64
"""Digits of a claim's id, which is a digest."""

NEWEST_FILES = 2
"""Files that have the receipts of the last thousand claims: the newest may have just begun."""


class Claims:
    """Ids of a node's accepted claims, one per line."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def add(self, envelopes: Iterable[bytes]) -> list[str]:
        """Record the claims of accepted rollouts, and return their ids; a repetition is harmless."""
        names = [str(chunks.digest(Envelope.from_bytes(envelope).payload)) for envelope in envelopes]
        if not names:
            return []
        with disk_named(self._path.parent), self._path.open("a") as file:
            file.write("".join(f"\n{name}" for name in names))
            file.flush()
            os.fsync(file.fileno())
        return names

    def __iter__(self) -> Iterator[str]:
        """Iterate over the claims, each once, the oldest first; lines cut short by a crash are skipped."""
        lines = self._path.read_text().splitlines() if self._path.exists() else []
        return iter(dict.fromkeys(line for line in lines if len(line) == CLAIM_ID_CHARS))


@dataclass(frozen=True)
class ClaimReceipt:
    """Checked receipt of one claim."""

    claim_id: str
    pending: Pending
    settlement: proof.Settlement | None
    path: Path

    @property
    def state(self) -> str:
        return _STATES[self.settlement.kind] if self.settlement else "pending"

    @property
    def is_final(self) -> bool:
        return self.settlement is not None and not isinstance(self.settlement, Void)


_STATES = {"post": "posted", "void": "voided", "reinstate": "reinstated"}


class ReceiptFile:
    """The receipts of up to a thousand claims, in one file.

    Receipts of single claims, which earlier releases kept in files of their own, move into it when it is written.
    """

    def __init__(self, path: Path, round_id: str, node_id: NodeId) -> None:
        self._path, self._round_id, self._node_id = path, round_id, node_id
        self._roots: tuple[bytes, ...] = ()
        self._proofs: dict[str, tuple[bytes, proof.ClaimProof]] = {}
        self._single_files: list[Path] = []
        self.receipts: dict[str, ClaimReceipt] = {}

    def load(self, claims: Iterable[str]) -> None:
        """Read and check the receipts of these claims that are kept."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        if self._path.exists():
            self._store(proof.LedgerReceipts.from_bytes(self._path.read_bytes()), self._path)
        for claim_id in claims:
            single = self._path.parent / f"{claim_id}.receipt"
            if single.exists():
                self._single_files.append(single)
                if claim_id not in self.receipts:
                    self._store(_as_many(claim_id, single.read_bytes()), single)

    def wanted(self, claims: Iterable[str]) -> list[str]:
        """Return the claims whose settlement is not kept, or may still change."""
        return [claim_id for claim_id in claims if not (kept := self.receipts.get(claim_id)) or not kept.is_final]

    def add(self, data: bytes, asked: Collection[str]) -> None:
        """Check fetched receipts and take them; raise an error if one contradicts a kept one."""
        fetched = proof.LedgerReceipts.from_bytes(data)
        if others := {claim.claim_id for claim in fetched.claims}.difference(asked):
            raise ProofInvalid(f"The coordinator sent receipts of {len(others)} claims that nobody asked for.")
        self._store(fetched, self._path)

    def add_single(self, claim_id: str, data: bytes) -> None:
        """Check one claim's fetched receipt and take it."""
        self._store(_as_many(claim_id, data), self._path)

    def save(self) -> None:
        """Write the file, synced, then remove the files of single claims that are in it."""
        notes = {note: number for number, note in enumerate(dict.fromkeys(note for note, _ in self._proofs.values()))}
        claims = [claim.model_copy(update={"checkpoint": notes[note]}) for note, claim in self._proofs.values()]
        made = proof.LedgerReceipts(roots=self._roots, checkpoints=tuple(notes), claims=tuple(claims))
        write_durably(self._path, made.to_bytes(), temp_folder=self._path.parent)
        for single in self._single_files:
            single.unlink(missing_ok=True)
        self._single_files.clear()

    @property
    def is_worth_saving(self) -> bool:
        return bool(self._proofs)

    def _store(self, receipts: proof.LedgerReceipts, path: Path) -> None:
        found = proof.check_claims(receipts, self._round_id)
        for claim_id, (pending, _) in found.items():
            if pending.node_id != self._node_id:
                raise ProofInvalid(f"The ledger credits claim {claim_id[:16]}… of this node to another node.")
            kept = self.receipts.get(claim_id)
            if kept is not None and kept.pending != pending:
                raise ProofInvalid(
                    f"The ledger's receipt of claim {claim_id[:16]}… contradicts {kept.path}.",
                    hint="Keep the file and publish it.",
                )
        self._roots = _longer(self._roots, receipts.roots)
        for claim in receipts.claims:
            if claim.claim_id in found:
                self.receipts[claim.claim_id] = ClaimReceipt(claim.claim_id, *found[claim.claim_id], path)
                self._proofs[claim.claim_id] = (receipts.checkpoints[claim.checkpoint], claim)


async def fetch(
    reader: LogReader | None,
    round_id: str,
    node_id: NodeId,
    claims: Iterable[str],
    folder: Path,
    on_progress: Callable[[int], None] = lambda _count: None,
) -> AsyncIterator[tuple[str, ClaimReceipt | None]]:
    """Yield each claim with its checked receipt, from the folder or the reader; None if there is none.

    `on_progress` gets the number of claims that are done. What is fetched is kept after each request.
    """
    for number, part in enumerate(_parts(claims, limits.RECEIPTS_FILE_MAX)):
        file = ReceiptFile(folder / f"{number:06}{SUFFIX}", round_id, node_id)
        await trio.to_thread.run_sync(file.load, part)
        wanted = file.wanted(part) if reader is not None else []
        on_progress(len(part) - len(wanted))
        for asked in _parts(wanted, limits.RECEIPTS_MAX):
            assert reader is not None
            await _fetch_into(file, reader, asked)
            if file.is_worth_saving:
                await trio.to_thread.run_sync(file.save)
            on_progress(len(asked))
        for claim_id in part:
            yield claim_id, file.receipts.get(claim_id)


async def _fetch_into(file: ReceiptFile, reader: LogReader, asked: list[str]) -> None:
    """Fetch receipts by one request; by one for each claim from a coordinator of an earlier release."""
    data = await reader.receipts(asked)
    if data is not None:
        await trio.to_thread.run_sync(file.add, data, asked)
        return
    for claim_id in asked:
        with suppress(NotFound):
            single = await reader.receipt(claim_id)
            await trio.to_thread.run_sync(file.add_single, claim_id, single)


def kept_receipt(folder: Path, claim_id: str) -> bytes | None:
    """Return the receipt of one claim that this home keeps, unchecked; None if it keeps none."""
    single = folder / f"{claim_id}.receipt"
    if single.exists():
        return single.read_bytes()
    for path in sorted(folder.glob(f"*{SUFFIX}"), reverse=True):
        data = path.read_bytes()
        if claim_id.encode() in data:
            receipts = proof.LedgerReceipts.from_bytes(data)
            for claim in receipts.claims:
                if claim.claim_id == claim_id:
                    return receipts.of_claim(claim).to_bytes()
    return None


def kept_among(folder: Path, claims: Collection[str]) -> set[str]:
    """Return which of these recent claims have a receipt in this home; only the newest files are read."""
    newest = sorted(folder.glob(f"*{SUFFIX}"))[-NEWEST_FILES:]
    texts = [path.read_bytes() for path in newest]
    return {claim_id for claim_id in claims if any(claim_id.encode() in text for text in texts)}


def _as_many(claim_id: str, data: bytes) -> proof.LedgerReceipts:
    """Return the receipt of one claim in the form for many."""
    receipt = proof.LedgerReceipt.from_bytes(data)
    entries = tuple(map(proof.PackedProof.pack, receipt.entries))
    claim = proof.ClaimProof(claim_id=claim_id, checkpoint=0, entries=entries)
    return proof.LedgerReceipts(roots=receipt.roots, checkpoints=(receipt.checkpoint,), claims=(claim,))


def _longer(kept: tuple[bytes, ...], fetched: tuple[bytes, ...]) -> tuple[bytes, ...]:
    """Return the longer of two chains of roots, which must begin with the other one."""
    short, long = sorted((kept, fetched), key=len)
    if long[: len(short)] != short:
        raise ProofInvalid(
            "The coordinator shows other root documents than before.", hint="Keep the files as evidence."
        )
    return long


def _parts(claims: Iterable[str], size: int) -> Iterator[list[str]]:
    """Yield the claims in lists of `size`; the last one may be shorter."""
    rest = iter(claims)
    while part := list(islice(rest, size)):
        yield part


PAYOUTS = "payouts"
"""Folder of the kept proofs, below the round's folder."""

AskPayout = Callable[[int], Awaitable[PayoutReply]]
"""Requests the proof of a batch from the coordinator."""


async def fetch_payouts(
    ask: AskPayout | None, round_id: str, folder: Path
) -> AsyncIterator[tuple[int, PayoutLine | None]]:
    """Yield the line of every batch that pays this node's owner, kept or fetched; None if not published yet."""
    kept = await trio.to_thread.run_sync(_kept_payouts, folder, round_id)
    known = max(kept, default=0)
    number, batches = 0, known if ask is None else known + 1
    while number < batches:
        number += 1
        line = kept.get(number)
        if ask is not None and (line is None or line.paid is None):
            try:
                reply = await ask(number)
            except NotFound:
                yield number, line
                return  # later batches are not published either
            batches = max(known, reply.batches)
            if reply.payout is not None:
                line = await _keep_payout(reply.payout.to_bytes(), folder, number, round_id, line)
        if line is not None:
            yield number, line


async def _keep_payout(data: bytes, folder: Path, number: int, round_id: str, before: PayoutLine | None) -> PayoutLine:
    """Check and keep a proof; it must be of this batch and agree with the earlier proof."""
    line = payout_proof.check(data, round_id)
    if line.batch.batch != number:
        raise ProofInvalid(f"The proof is of batch {line.batch.batch}, but batch {number} was asked for.")
    path = _payout_path(folder, number)
    if before is not None and _terms_of_payout(line) != _terms_of_payout(before):
        raise ProofInvalid(f"The coordinator's proof contradicts {path}.", hint="Keep the file and publish it.")
    await trio.to_thread.run_sync(partial(write_durably, path, data, temp_folder=folder))
    return line


def _terms_of_payout(line: PayoutLine) -> tuple[object, ...]:
    return line.batch, line.place, line.address, line.amount_micros


def _kept_payouts(folder: Path, round_id: str) -> dict[int, PayoutLine]:
    folder.mkdir(parents=True, exist_ok=True)
    lines = [_checked_payout(path, round_id) for path in folder.glob("*.payout")]
    return {line.batch.batch: line for line in lines}


def _checked_payout(path: Path, round_id: str) -> PayoutLine:
    try:
        return payout_proof.check(path.read_bytes(), round_id)
    except SwarmError as error:
        raise ProofInvalid(
            f"{path} is not a valid proof: {error.message}", hint="Move the file away; it is downloaded again."
        ) from error


def _payout_path(folder: Path, number: int) -> Path:
    return folder / f"batch-{number:06}.payout"
