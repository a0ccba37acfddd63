"""A node's claims, and the receipts that prove their entries in the ledger permanently.

- A claim is recorded and synced when its rollout was accepted, before the rollout is deleted.
- Each line begins with a newline, so that a line cut short by a crash does not damage the next.
- A receipt is checked before it is kept, also that it credits this node; a receipt without a settlement, or with a void
  that an appeal may reverse, is fetched again next time, and must then have the same credit.
"""

import os
from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import trio

from ledger import proof
from ledger.entry import Pending, Void
from protocol.errors import NotFound, ProofInvalid
from protocol.ids import NodeId
from protocol.policy import chunks
from protocol.wire.signing import Envelope
from swarm_node.base.disk import disk_named, write_durably
from swarm_node.ledger.log_reader import LogReader

RECEIPTS = "receipts"
"""Folder of the kept receipts, below the round's folder."""


class Claims:
    """Ids of a node's accepted claims, one per line."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def add(self, envelopes: Iterable[bytes]) -> None:
        """Record the claims of accepted rollouts; a repetition is harmless."""
        names = [chunks.digest(Envelope.from_bytes(envelope).payload) for envelope in envelopes]
        if not names:
            return
        with disk_named(self._path.parent), self._path.open("a") as file:
            file.write("".join(f"\n{name}" for name in names))
            file.flush()
            os.fsync(file.fileno())

    def __iter__(self) -> Iterator[str]:
        """Iterate over the claims, each once, the oldest first; lines cut short by a crash are skipped."""
        lines = self._path.read_text().splitlines() if self._path.exists() else []
        return iter(dict.fromkeys(line for line in lines if len(line) == 64))


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


async def fetch(
    reader: LogReader | None, round_id: str, node_id: NodeId, claims: Iterable[str], folder: Path
) -> AsyncIterator[tuple[str, ClaimReceipt | None]]:
    """Yield each claim with its checked receipt, from the folder or the reader; None if there is none."""
    for claim_id in claims:
        path = folder / f"{claim_id}.receipt"
        receipt = await trio.to_thread.run_sync(_kept, path, round_id, node_id)
        if reader is not None and (receipt is None or not receipt.is_final):
            with suppress(NotFound):
                data = await reader.receipt(claim_id)
                fetched = _checked(path, data, round_id, node_id)
                if receipt is not None and fetched.pending != receipt.pending:
                    raise ProofInvalid(
                        f"The ledger's receipt contradicts {path}.", hint="Keep the file and publish it."
                    )
                receipt = fetched
                await trio.to_thread.run_sync(partial(write_durably, path, data, temp_folder=folder))
        yield claim_id, receipt


def _kept(path: Path, round_id: str, node_id: NodeId) -> ClaimReceipt | None:
    path.parent.mkdir(parents=True, exist_ok=True)
    return _checked(path, path.read_bytes(), round_id, node_id) if path.exists() else None


def _checked(path: Path, data: bytes, round_id: str, node_id: NodeId) -> ClaimReceipt:
    pending, settlement = proof.check_claim(data, round_id, path.stem)
    if pending.node_id != node_id:
        raise ProofInvalid(f"The ledger credits claim {path.stem[:16]}… of this node to another node.")
    return ClaimReceipt(path.stem, pending, settlement, path)
