"""A round's log for the node's tests: a real store and real keys, its files as a coordinator names them, and lies."""

import json
from collections.abc import Sequence
from datetime import UTC, datetime

from sqlalchemy import Engine

from coordinator.publishing.signed_metadata import SignedMetadata
from ledger import store
from ledger.checkpoint import Checkpoint, ledger_key, open_checkpoint, sign
from ledger.entry import Entry, Root
from ledger.note import NoteKey
from ledger.proof import ClaimProof, LedgerReceipt, LedgerReceipts, PackedProof, ReceiptsRequest
from ledger.tiles import Tile
from protocol.errors import NotFound, SwarmError
from tests.ledger.engines import sqlite_memory
from tests.ledger.values import credit, deposit, post, version, void

NOW = datetime.now(UTC)
LIFE: list[Entry] = [deposit(10**9), version(1), credit(1), credit(2), credit(3, of=2), post(1), void(2)]
MORE: list[Entry] = [credit(number) for number in range(10, 600)]


def otherwise_signed(checkpoint: bytes) -> bytes:
    """Return the checkpoint with other last bits in its signature's base64."""
    return checkpoint[:-3] + (b"E" if checkpoint[-3:-2] == b"A" else b"A") + b"=\n"


class Log:
    """A round's public files, made anew from its store whenever they are asked for."""

    def __init__(self, metadata: SignedMetadata, *histories: Sequence[Entry]) -> None:
        self.metadata = metadata
        self.round_id = metadata.round_id
        self.lies: dict[str, bytes | SwarmError | None] = {}
        self.posts: list[str] = []
        self.refused: set[str] = set()
        """Claims whose receipts nobody may ask for."""
        self.engine: Engine = sqlite_memory()
        with self.engine.begin() as conn:
            store.create(conn)
        for history in histories:
            self.add(history)

    @property
    def key(self) -> NoteKey:
        return ledger_key(self.round_id, self.metadata.ledger_public())

    def add(self, entries: Sequence[Entry]) -> None:
        with self.engine.begin() as conn:
            store.append_all(conn, entries, 0)
            store.publish(conn, self.key, self.metadata.sign_for_ledger)

    def log_roots(self) -> None:
        """Do what a coordinator does at its start."""
        self.add([Root.from_document(number, document) for number, document in enumerate(self.metadata.roots(), 1)])

    def checkpoint(self) -> Checkpoint:
        """The newest one that is signed."""
        with self.engine.begin() as conn:
            return open_checkpoint(store.checkpoint(conn) or b"", [self.key])

    def sign(self, size: int, root: bytes) -> None:
        """Sign what is not so."""
        lie = Checkpoint(self.key.name, size, root)
        self.lies["ledger/checkpoint"] = sign(lie, self.key, self.metadata.sign_for_ledger)

    async def file(self, path: str, max_bytes: int) -> bytes | None:
        data = self.lies[path] if path in self.lies else self._honest(path)
        if isinstance(data, SwarmError):
            raise data
        assert data is None or len(data) <= max_bytes
        return data

    async def post(self, path: str, content: bytes, max_bytes: int) -> bytes | None:
        """Answer as a coordinator does; a lie replaces the answer."""
        self.posts.append(path)
        if path in self.lies:
            lie = self.lies[path]
            if isinstance(lie, SwarmError):
                raise lie
            return lie
        asked = ReceiptsRequest.from_bytes(content)
        assert not self.refused.intersection(asked.claims), "what is kept is not fetched again"
        with self.engine.begin() as conn:
            note, found = store.prove_claims(conn, asked.claims)
        claims = tuple(
            ClaimProof(claim_id=claim, checkpoint=0, entries=tuple(map(PackedProof.pack, proven)))
            for claim, proven in found.items()
        )
        return LedgerReceipts(roots=self.metadata.roots(), checkpoints=(note,), claims=claims).to_bytes()

    def _honest(self, path: str) -> bytes | None:
        shelf, _, name = path.partition("/")
        with self.engine.begin() as conn:
            if path == "ledger/checkpoint":
                return store.checkpoint(conn)
            if path == "leaderboard":
                return json.dumps({"ledger_size": store.size(conn), "nodes": self.rows()}).encode()
            try:
                if shelf == "ledger":
                    return store.read_file(conn, Tile.parse(name.removeprefix("tile/")))
                if shelf == "receipts":
                    note, entries = store.prove_claim(conn, name)
                    made = LedgerReceipt(roots=self.metadata.roots(), checkpoint=note, entries=tuple(entries))
                    return made.to_bytes()
            except NotFound:
                return None
        return self.metadata.read(name)

    def rows(self) -> list[dict[str, str | int]]:
        with self.engine.begin() as conn:
            return [
                {
                    "node_id": total.node_id,
                    "posted_micros": total.posted_micros,
                    "pending_micros": total.pending_micros,
                    "voided_micros": total.voided_micros,
                    "validated_tokens": total.posted_tokens,
                    "name": "not the ledger's affair",
                }
                for total in store.node_totals(conn)
            ]
