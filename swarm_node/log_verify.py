"""The whole ledger verified from its public files: root, balances, and the leaderboard that is shown.

1. The checkpoint is signed by the ledger's key, and as many witnesses as the caller wants have signed one of this log.
2. Every entry can be read, and the book takes it after those before; nothing is made or lost.
3. The leaderboard says of every node what the first `ledger_size` entries say.
4. All entries together make the signed root, and the first of them the roots that the witnesses signed.

The leaderboard and the witnesses' words are fetched first, then a checkpoint that covers them.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated

import trio
from pydantic import BaseModel, Field, ValidationError

from ledger import book, tiles, tree, witness
from ledger.book import ClaimState, Folding, Outcome, State
from ledger.checkpoint import Checkpoint, open_checkpoint
from ledger.entry import parse
from ledger.note import Key
from ledger.proof import ledger_keys
from ledger.tiles import TILE_HASHES, Tile
from ledger.tree import leaf_hash
from ledger.witness import Vouched, Witnesses
from protocol.errors import LedgerForked, MalformedMessage, ProofInvalid, RolledBack
from swarm_node.log_reader import LogReader

PATIENCE_S = 30.0
"""For a checkpoint that covers the leaderboard; they are signed every few seconds."""


class _Row(BaseModel):
    """What the leaderboard says of a node, as far as the ledger knows of it."""

    node_id: str
    posted_micros: int
    pending_micros: int
    voided_micros: int
    validated_tokens: int


class _Leaderboard(BaseModel):
    ledger_size: Annotated[int, Field(ge=0)]
    nodes: list[_Row]


@dataclass(frozen=True)
class Verified:
    """What was found true."""

    entries: int
    root: str
    nodes: int
    balances: dict[str, int]
    witnessed: int
    """How many of the entries enough witnesses vouch for; 0 if none were asked for."""


class _Log:
    """The tree and the book, as far as they are read."""

    def __init__(self) -> None:
        self.size = 0
        self._folding = Folding()
        self._tiles: dict[tuple[int, int], bytes] = {}

    @property
    def state(self) -> State:
        return self._folding.state

    def add(self, bodies: Sequence[bytes]) -> None:
        for index, body in enumerate(bodies, self.size):
            outcome = self._folding.add(parse(body))
            if outcome is not Outcome.APPLIED:
                raise ProofInvalid(f"Entry {index} cannot stand where it stands: {outcome.value}.")
        for tile, data in tiles.grown(self.size, [leaf_hash(body) for body in bodies], self._read):
            self._tiles[tile.level, tile.number] = data
        self.size += len(bodies)

    def root(self, size: int) -> bytes:
        """Of the first so many entries."""
        return tree.root(size, tiles.hashes_in(self.size, self._read))

    def _read(self, tile: Tile) -> bytes:
        return self._tiles[tile.level, tile.number]


async def verify(reader: LogReader, round_id: str, witnesses: Witnesses, tell: Callable[[int, int], None]) -> Verified:
    """Verify everything; `tell` hears how many entries of how many are done."""
    shown = _read_leaderboard(await reader.leaderboard())
    cosigned = await reader.cosigned()
    keys = ledger_keys(await reader.roots(), round_id)
    note, checkpoint = await _covering(reader, keys[:1], shown.ledger_size)
    vouched = witness.vouched([note, *cosigned], keys, witnesses.keys)
    witnessed = witnesses.require(vouched)
    log = _Log()
    if not shown.ledger_size:
        _check_leaderboard(log.state, shown)
    for number in range(-(-checkpoint.size // TILE_HASHES)):
        bodies = await reader.entries(number, checkpoint.size)
        count = max(0, shown.ledger_size - log.size)
        log.add(bodies[:count])
        if count and log.size == shown.ledger_size:
            _check_leaderboard(log.state, shown)
        log.add(bodies[count:])
        tell(log.size, checkpoint.size)
    book.check(log.state)
    if log.root(log.size) != checkpoint.root:
        raise ProofInvalid(f"The {log.size} entries do not make the root that is signed for them.")
    for one in vouched:
        _check_vouched(log, one)
    balances = {str(account): micros for account, micros in log.state.balances.items()}
    return Verified(log.size, checkpoint.root.hex(), len(shown.nodes), balances, witnessed)


async def _covering(reader: LogReader, keys: list[Key], size: int) -> tuple[bytes, Checkpoint]:
    """(1) A signed checkpoint of at least so many entries."""
    with trio.move_on_after(PATIENCE_S):
        while True:
            note = await reader.checkpoint()
            checkpoint = open_checkpoint(note, keys)
            if checkpoint.size >= size:
                return note, checkpoint
            await trio.sleep(0.5)
    raise ProofInvalid(f"The leaderboard counts {size} entries, and no checkpoint covers so many.")


def _check_vouched(log: _Log, one: Vouched) -> None:
    """(4) What a witness has signed is the beginning of this log."""
    said = one.checkpoint
    if said.size > log.size:
        raise RolledBack(
            f"{one.key.name[:80]} has seen {said.size} entries, and the log is said to have {log.size}.",
            hint="Look again; if it stays so, ask the operator, and tell others.",
        )
    if log.root(said.size) != said.root:
        raise LedgerForked(
            f"{one.key.name[:80]} was shown another history: its {said.size} entries are not the first of these.",
            hint="Keep the files (--save), and show them to the operator and to others.",
        )


def _read_leaderboard(data: bytes) -> _Leaderboard:
    try:
        return _Leaderboard.model_validate_json(data, strict=True)
    except ValidationError as error:
        raise MalformedMessage(f"{error.error_count()} fields of the leaderboard are wrong.") from None


def _check_leaderboard(state: State, shown: _Leaderboard) -> None:
    """(3) Every node's row against the claims."""
    nothing = _Row(node_id="", posted_micros=0, pending_micros=0, voided_micros=0, validated_tokens=0)
    rows = {row.node_id: row for row in shown.nodes}
    if len(rows) < len(shown.nodes):
        raise ProofInvalid("The leaderboard names a node twice.")
    expected: dict[str, _Row] = {name: nothing.model_copy(update={"node_id": name}) for name in rows}
    for claim in state.claims.values():
        row = expected.setdefault(claim.node_id, nothing.model_copy(update={"node_id": claim.node_id}))
        match claim.state:
            case ClaimState.PENDING:
                row.pending_micros += claim.amount_micros
            case ClaimState.VOIDED:
                row.voided_micros += claim.amount_micros
            case ClaimState.POSTED:
                row.posted_micros += claim.amount_micros
                row.validated_tokens += claim.tokens
    for name, row in expected.items():
        if rows.get(name) != row:
            raise ProofInvalid(f"The leaderboard says of {name[-12:]} {rows.get(name)}, the entries say {row}.")
