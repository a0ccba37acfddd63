"""The whole ledger verified from its public files: root, balances, and the leaderboard that is shown.

1. The checkpoint is signed by the ledger's key, and as many witnesses as the caller wants have signed one of this log.
2. Every entry can be read, and the book takes it after those before; nothing is made or lost.
3. The leaderboard says of every node what the first `ledger_size` entries say.
4. All entries together make the signed root, and the first of them the roots that the witnesses signed.
5. The root documents that the log names, one after the other, are those that are served, and all of them: in a log that
   names any, one that is served and not named is shown to this reader alone, or the keys are just being replaced.
6. Where the root keys have signed that the log was resumed after a gap (`ledger.gaps`), it goes on from there.
7. The audits are those that the lottery drew (`swarm_node.ledger.log_draws`).

The leaderboard and the witnesses' words are fetched first, then a checkpoint that covers them, then the root documents:
so all that the log names are served. For one that it does not name yet, newer checkpoints are awaited for a while.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated

import trio
from pydantic import BaseModel, Field, ValidationError

from ledger import book, tiles, tree, witness
from ledger.book import BookState, ClaimState, EntryOutcome, Folding
from ledger.checkpoint import Checkpoint, open_checkpoint
from ledger.entry import Root, parse
from ledger.gaps import Gap, Keys
from ledger.proof import ledger_keys
from ledger.tiles import TILE_HASHES, Tile
from ledger.tree import leaf_hash
from ledger.witness import Vouched, Witnesses
from protocol.errors import (
    CheckpointInvalid,
    LedgerForked,
    MalformedMessage,
    ProofInvalid,
    RolledBack,
    SwarmError,
    UntrustedMetadata,
)
from swarm_node.ledger import log_draws
from swarm_node.ledger.log_draws import Audits, DrawSummary
from swarm_node.ledger.log_reader import LogReader

PATIENCE_S = 30.0
"""For a checkpoint that covers the leaderboard, or all roots; they are signed every few seconds."""

LOOK_EVERY_S = 0.5

SHOW = "Save the files (--save) and show them to the operator and to other participants."


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
    served_roots: int
    """How many root documents are served."""
    logged_roots: int
    """How many of them the log names: all, or 0 if it is older than such entries."""
    audits: DrawSummary
    """What the lottery drew."""
    gaps: tuple[str, ...]
    """Where the log was resumed after a gap, by the word of the root keys."""


class _VerifiedLog:
    """The tree and the book, as far as they are read."""

    def __init__(self) -> None:
        self.size = 0
        self.roots: list[tuple[int, Root]] = []
        """Each with its index."""
        self.audits = Audits()
        self._folding = Folding()
        self._tiles: dict[tuple[int, int], bytes] = {}

    @property
    def state(self) -> BookState:
        return self._folding.state

    def add(self, bodies: Sequence[bytes]) -> None:
        for index, body in enumerate(bodies, self.size):
            entry = parse(body)
            outcome = self._folding.add(entry)
            if outcome is not EntryOutcome.APPLIED:
                raise ProofInvalid(f"Entry {index} cannot stand where it stands: {outcome.value}.")
            self.audits.add(index, entry)
            if isinstance(entry, Root):
                self.roots.append((index, entry))
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
    missing: SwarmError = ProofInvalid(
        f"The leaderboard counts {shown.ledger_size} entries, and no checkpoint covers so many."
    )
    note, checkpoint, roots = await _covering(reader, round_id, shown.ledger_size, _end(reader), missing)
    keys = Keys(roots, round_id)
    vouched = witness.vouched(keys.without_lost([note, *cosigned]), keys.newest_first, witnesses.keys)
    witnessed = witnesses.require(vouched)
    log = _VerifiedLog()
    if not shown.ledger_size:
        _check_leaderboard(log.state, shown)
    await _read(reader, log, checkpoint, shown, tell)
    for one in vouched:
        _check_vouched(log, one)
    _check_roots(log, roots)
    end = _end(reader)
    while 0 < len(log.roots) < len(roots):
        missing = _not_logged(log, roots)
        if trio.current_time() >= end:
            raise missing
        _, checkpoint, roots = await _covering(reader, round_id, log.size + 1, end, missing)
        await _read(reader, log, checkpoint, shown, tell)
        _check_roots(log, roots)
    gaps = Keys(roots, round_id).gaps
    _check_gaps(log, gaps)
    drawn = await log_draws.check(reader, log.audits)
    balances = {str(account): micros for account, micros in log.state.balances.items()}
    return Verified(
        log.size,
        checkpoint.root.hex(),
        len(shown.nodes),
        balances,
        witnessed,
        len(roots),
        len(log.roots),
        drawn,
        tuple(map(str, gaps)),
    )


def _end(reader: LogReader) -> float:
    """Until when it is waited for what is missing: not at all among saved files."""
    return trio.current_time() + (PATIENCE_S if reader.grows else 0.0)


async def _read(
    reader: LogReader, log: _VerifiedLog, checkpoint: Checkpoint, shown: _Leaderboard, tell: Callable[[int, int], None]
) -> None:
    """(2, 3, 4) The entries that were not read yet, up to this checkpoint's."""
    for number in range(log.size // TILE_HASHES, -(-checkpoint.size // TILE_HASHES)):
        bodies = (await reader.entries(number, checkpoint.size))[log.size - number * TILE_HASHES :]
        count = max(0, shown.ledger_size - log.size)
        log.add(bodies[:count])
        if count and log.size == shown.ledger_size:
            _check_leaderboard(log.state, shown)
        log.add(bodies[count:])
        tell(log.size, checkpoint.size)
    book.check(log.state)
    if log.root(log.size) != checkpoint.root:
        raise ProofInvalid(f"The {log.size} entries do not make the root that is signed for them.")


async def _covering(
    reader: LogReader, round_id: str, size: int, end: float, missing: SwarmError
) -> tuple[bytes, Checkpoint, tuple[bytes, ...]]:
    """(1) A signed checkpoint of at least so many entries, and the round's chain of root documents; else `missing`."""
    roots: tuple[bytes, ...] = ()
    refused = b""
    while True:
        note = await reader.checkpoint()
        roots = await reader.roots(roots)
        try:
            checkpoint = open_checkpoint(note, ledger_keys(roots, round_id)[:1])
            if checkpoint.size >= size:
                return note, checkpoint, roots
        except CheckpointInvalid:
            if note == refused or not reader.grows:
                raise
            refused = note  # the key may have been replaced just now
        if trio.current_time() >= end:
            raise missing
        await trio.sleep(LOOK_EVERY_S)


def _check_vouched(log: _VerifiedLog, one: Vouched) -> None:
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
            hint=SHOW,
        )


def _check_roots(log: _VerifiedLog, roots: Sequence[bytes]) -> None:
    """(5) What the log says of the round's keys, to everybody, is what was served here."""
    for number, (index, logged) in enumerate(log.roots, 1):
        if logged.version != number:
            raise ProofInvalid(f"Entry {index} names root {logged.version}, and {number} would be the next.")
        if number > len(roots):
            raise RolledBack(
                f"Entry {index} names root {number}, and only {len(roots)} are served: newer keys are withheld.",
                hint=SHOW,
            )
        if (served := Root.from_document(number, roots[number - 1])) != logged:
            raise UntrustedMetadata(
                f"The coordinator names other keys here than in its log: root {number} is served as "
                f"{served.root_digest}, and entry {index} names {logged.root_digest}.",
                hint=SHOW,
            )


def _check_gaps(log: _VerifiedLog, gaps: Sequence[Gap]) -> None:
    """(6) The log begins with what was kept, and goes on with the entry of the document that says so.

    Entries of root documents before it may stand between: theirs were lost, too.
    """
    places = {logged.version: index for index, logged in log.roots}
    for number, gap in enumerate(gaps):
        if any(later.size <= gap.size for later in gaps[number + 1 :]):
            continue  # lost again, with its entry
        index = places.get(gap.root_version, -1)
        follows = gap.size <= index and set(range(gap.size, index)) <= set(places.values())
        if not follows or log.root(gap.size) != gap.root:
            raise ProofInvalid(f"{gap}, and the log does not go on from these with the entry of that document.")


def _not_logged(log: _VerifiedLog, roots: Sequence[bytes]) -> UntrustedMetadata:
    """(5) Somebody is shown keys that nobody else can know of, or the coordinator has not started with them yet."""
    number = len(log.roots) + 1
    digest = Root.from_document(number, roots[number - 1]).root_digest
    return UntrustedMetadata(
        f"Root {number} is served as {digest}, and no entry of the log names it: its {log.size} entries end with root "
        f"{number - 1}.",
        hint=f"Where keys are just being replaced, verify again when the coordinator runs with them; else: {SHOW}",
    )


def _read_leaderboard(data: bytes) -> _Leaderboard:
    try:
        return _Leaderboard.model_validate_json(data, strict=True)
    except ValidationError as error:
        raise MalformedMessage(f"{error.error_count()} fields of the leaderboard are wrong.") from None


def _check_leaderboard(state: BookState, shown: _Leaderboard) -> None:
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
