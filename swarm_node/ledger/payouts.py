"""Proofs of a node owner's payouts, one file per batch.

- A file is checked before it is kept. A file without a payment is fetched again next time, and must then have the same
  address and amount.
- A batch that pays this owner nothing leaves no file.
"""

from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from pathlib import Path

import trio

from ledger import payout_proof
from ledger.payout_proof import PayoutLine, PayoutReply
from protocol.errors import NotFound, ProofInvalid, SwarmError
from swarm_node.base.disk import write_durably

PAYOUTS = "payouts"
"""Folder of the kept proofs, below the round's folder."""

Ask = Callable[[int], Awaitable[PayoutReply]]
"""Requests the proof of a batch from the coordinator."""


async def fetch(ask: Ask | None, round_id: str, folder: Path) -> AsyncIterator[tuple[int, PayoutLine | None]]:
    """Yield the line of every batch that pays this node's owner, kept or fetched; None if not published yet."""
    kept = await trio.to_thread.run_sync(_kept, folder, round_id)
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
                line = await _keep(reply.payout.to_bytes(), folder, number, round_id, line)
        if line is not None:
            yield number, line


async def _keep(data: bytes, folder: Path, number: int, round_id: str, before: PayoutLine | None) -> PayoutLine:
    """Check and keep a proof; it must be of this batch and agree with the earlier proof."""
    line = payout_proof.check(data, round_id)
    if line.batch.batch != number:
        raise ProofInvalid(f"The proof is of batch {line.batch.batch}, but batch {number} was asked for.")
    path = _path(folder, number)
    if before is not None and _terms(line) != _terms(before):
        raise ProofInvalid(f"The coordinator's proof contradicts {path}.", hint="Keep the file and publish it.")
    await trio.to_thread.run_sync(partial(write_durably, path, data, temp_folder=folder))
    return line


def _terms(line: PayoutLine) -> tuple[object, ...]:
    return line.batch, line.place, line.address, line.amount_micros


def _kept(folder: Path, round_id: str) -> dict[int, PayoutLine]:
    folder.mkdir(parents=True, exist_ok=True)
    lines = [_checked(path, round_id) for path in folder.glob("*.payout")]
    return {line.batch.batch: line for line in lines}


def _checked(path: Path, round_id: str) -> PayoutLine:
    try:
        return payout_proof.check(path.read_bytes(), round_id)
    except SwarmError as error:
        raise ProofInvalid(
            f"{path} is not a valid proof: {error.message}", hint="Move the file away; it is downloaded again."
        ) from error


def _path(folder: Path, number: int) -> Path:
    return folder / f"batch-{number:06}.payout"
