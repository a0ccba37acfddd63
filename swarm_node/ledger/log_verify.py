"""Verification of the whole ledger from its public files: root, balances and leaderboard.

1. The checkpoint is signed by the ledger's key, and the required number of witnesses have signed a checkpoint of this
   log.
2. Every entry is valid, and can be applied to the book after the earlier ones; no credit appears or disappears.
3. The leaderboard agrees with the first `ledger_size` entries for every node.
4. All entries together give the signed root, and the first entries give the roots that the witnesses signed.
5. The log names exactly the root documents that are served, in order: in a log that names any, a served document that
   is not named was shown to this reader alone, or the keys are just being replaced.
6. If the root keys have signed that the log was resumed after a gap (`ledger.gaps`), it continues from there.
7. The audits are those that the lottery drew, by the lists that the coordinator serves:
   a. The list of a revealed epoch has the digest in the log, and names credited claims, each in only one list.
   b. A claim that the epoch's secret draws is paid only after a verdict on it; a pardon is a verdict, and anybody can
      count pardons.
   c. The same holds for a claim that is in no list: without a committed secret, every claim is audited. Claims since
      the last epoch but one cannot be checked yet.
   d. A claim that an audit found wrong is not paid after that.
8. The learner's updates are one chain: each begins with the state after the one before, and was trained on the groups
   that its batch was formed of (`ledger.training`).

The leaderboard and the witnesses' notes are fetched first, then a checkpoint that covers them, then the root documents:
so all documents that the log names are served. If a served one is not named yet, newer checkpoints are awaited for
`PATIENCE_S`. Nothing proves that each claim's *rate* was right: it depends on the owner's history, which is only partly
in the log.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any

import trio
from pydantic import BaseModel, Field, TypeAdapter, ValidationError

from ledger import book, drawing, tiles, tree, witness
from ledger.book import BookState, ClaimState, EntryOutcome, Folding
from ledger.checkpoint import Checkpoint, open_checkpoint
from ledger.drawing import ALL_PPM, LotteryDraw
from ledger.entry import Entry, Pending, Post, Reveal, Root, VerdictEntry, parse
from ledger.gaps import Gap, Keys
from ledger.proof import ledger_keys
from ledger.tiles import TILE_HASHES, Tile
from ledger.training import TrainingChain, TrainingSummary
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
from protocol.ids import Hex64
from protocol.policy import root_document
from swarm_node.ledger.log_reader import LogReader

_LIST = TypeAdapter(list[tuple[Hex64, Annotated[int, Field(ge=0, le=ALL_PPM)]]])

SLACK_EPOCHS = 1
"""The parts of a group that ends an epoch are credited in that epoch, and drawn in the next."""


@dataclass(frozen=True)
class DrawSummary:
    """Totals over the lists of all revealed epochs."""

    claims: int = 0
    drawn: int = 0
    pardoned: int = 0
    """Number of pardons among the drawn claims."""


@dataclass
class Audits:
    """The log's entries about audits, with their indexes."""

    credited: dict[str, int] = field(default_factory=dict)
    posted: dict[str, int] = field(default_factory=dict)
    verdicts: dict[str, tuple[int, str]] = field(default_factory=dict)
    reveals: list[tuple[int, Reveal]] = field(default_factory=list)

    def add(self, index: int, entry: Entry) -> None:
        """Record the next entry."""
        match entry:
            case Pending():
                self.credited[entry.claim_id] = index
            case Post():
                self.posted[entry.claim_id] = index
            case VerdictEntry():
                self.verdicts[entry.claim_id] = index, entry.outcome
            case Reveal():
                self.reveals.append((index, entry))

    def require_verdict(self, claim_id: str, why: str) -> None:
        """Raise an error if the claim was paid without a verdict before it (7b, 7c)."""
        paid = self.posted.get(claim_id)
        if paid is not None and (claim_id not in self.verdicts or self.verdicts[claim_id][0] > paid):
            raise ProofInvalid(f"Entry {paid} pays claim {claim_id[:16]}…, which {why}, and no audit had looked at it.")


async def check_draws(reader: LogReader, audits: Audits) -> DrawSummary:
    """Compare every revealed epoch with its list (7)."""
    for claim_id, (index, outcome) in audits.verdicts.items():
        if outcome == "hard" and audits.posted.get(claim_id, -1) > index:
            raise ProofInvalid(f"Entry {audits.posted[claim_id]} pays claim {claim_id[:16]}…, found wrong by an audit.")
    listed, drawn = set[str](), list[str]()
    for _, reveal in audits.reveals:
        draws = _read_draws(await reader.draws(reveal.epoch), reveal.epoch)
        drawn += drawing.check(reveal.secret, reveal.draws_digest, draws)
        for draw in draws:
            if draw.claim_id not in audits.credited or draw.claim_id in listed:
                raise ProofInvalid(f"The list of epoch {reveal.epoch} names claim {draw.claim_id[:16]}… wrongly.")
            listed.add(draw.claim_id)
    for claim_id in drawn:
        audits.require_verdict(claim_id, "was drawn")
    ends = [index for index, _ in audits.reveals][: -SLACK_EPOCHS or None]
    for claim_id, index in audits.credited.items():
        if ends and index < ends[-1] and claim_id not in listed:
            audits.require_verdict(claim_id, "is in no epoch's list")
    pardoned = sum(audits.verdicts.get(claim_id, (0, ""))[1] == "pardon" for claim_id in drawn)
    return DrawSummary(len(listed), len(drawn), pardoned)


def _read_draws(data: bytes, epoch: int) -> list[LotteryDraw]:
    try:
        return [LotteryDraw(claim_id, rate_ppm) for claim_id, rate_ppm in _LIST.validate_json(data, strict=True)]
    except ValidationError:
        raise ProofInvalid(f"The list of epoch {epoch} is none of claims and rates.") from None


PATIENCE_S = 30.0
"""Longest wait for a checkpoint that covers the leaderboard, or all roots; they are signed every few seconds."""

LOOK_EVERY_S = 0.5

SHOW = "Save the files (--save) and show them to the operator and to other participants."


class _Row(BaseModel):
    """Row of a node on the leaderboard, without the values that are not in the ledger."""

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
    """Result of a successful verification."""

    entries: int
    root: str
    nodes: int
    balances: dict[str, int]
    witnessed: int
    """Number of entries that enough witnesses have signed; 0 if no witness is required."""
    served_roots: int
    """Number of root documents that are served."""
    logged_roots: int
    """Number of root documents that the log names: all, or 0 in an old log without such entries."""
    audits: DrawSummary
    """Totals of the lottery."""
    gaps: tuple[str, ...]
    """Gaps after which the log was resumed, as signed by the root keys."""
    unit: dict[str, Any]
    """The unit of which the balances are millionths, by the root: its name and decimals."""
    training: TrainingSummary
    """Totals of the learner's updates."""


class ReadLog:
    """The tree and the book of the entries read so far."""

    def __init__(self, on_entry: Callable[[Entry], None] | None = None) -> None:
        self.size = 0
        self._on_entry = on_entry
        self.roots: list[tuple[int, Root]] = []
        """Root entries with their indexes."""
        self.audits = Audits()
        self.training = TrainingChain()
        self._folding = Folding()
        self._tiles: dict[tuple[int, int], bytes] = {}

    @property
    def state(self) -> BookState:
        return self._folding.state

    def add(self, bodies: Sequence[bytes]) -> None:
        for index, body in enumerate(bodies, self.size):
            try:
                entry = parse(body)
            except SwarmError as error:
                raise ProofInvalid(
                    f"Entry {index} cannot be read: {error.message}",
                    hint="Try newer software. If it reports the same, save the files (--save) and show them to others.",
                ) from None
            outcome = self._folding.add(entry)
            if outcome is not EntryOutcome.APPLIED:
                raise ProofInvalid(f"Entry {index} cannot stand where it stands: {outcome.value}.")
            self.audits.add(index, entry)
            self.training.add(index, entry)
            if self._on_entry is not None:
                self._on_entry(entry)
            if isinstance(entry, Root):
                self.roots.append((index, entry))
        for tile, data in tiles.grown(self.size, [leaf_hash(body) for body in bodies], self._read):
            self._tiles[tile.level, tile.number] = data
        self.size += len(bodies)

    def root(self, size: int) -> bytes:
        """Return the root of the first `size` entries."""
        return tree.root(size, tiles.hashes_in(self.size, self._read))

    def _read(self, tile: Tile) -> bytes:
        return self._tiles[tile.level, tile.number]


async def verify(
    reader: LogReader,
    round_id: str,
    witnesses: Witnesses,
    tell: Callable[[int, int], None],
    log: ReadLog | None = None,
) -> Verified:
    """Verify everything; `tell` is called with the number of verified entries and the total.

    `log` must be empty; afterwards it has everything that was read.
    """
    log = log or ReadLog()
    shown = _read_leaderboard(await reader.leaderboard())
    cosigned = await reader.cosigned()
    missing: SwarmError = ProofInvalid(
        f"The leaderboard counts {shown.ledger_size} entries, and no checkpoint covers so many."
    )
    note, checkpoint, roots = await _covering(reader, round_id, shown.ledger_size, _end(reader), missing)
    keys = Keys(roots, round_id)
    vouched = witness.vouched(keys.without_lost([note, *cosigned]), keys.newest_first, witnesses.keys)
    witnessed = witnesses.require(vouched)
    if not shown.ledger_size:
        _check_leaderboard(log.state, shown)
    await _read(reader, log, checkpoint, shown, tell)
    for signed in vouched:
        _check_vouched(log, signed)
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
    drawn = await check_draws(reader, log.audits)
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
        root_document.unit_of(roots[-1]).to_json(),
        log.training.summary,
    )


def _end(reader: LogReader) -> float:
    """Return the end of the wait for missing files: now for saved files."""
    return trio.current_time() + (PATIENCE_S if reader.grows else 0.0)


async def _read(
    reader: LogReader, log: ReadLog, checkpoint: Checkpoint, shown: _Leaderboard, tell: Callable[[int, int], None]
) -> None:
    """Read and verify the remaining entries up to this checkpoint (2, 3, 4)."""
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
        raise ProofInvalid(f"The {log.size} entries do not give the root that is signed for them.")


async def _covering(
    reader: LogReader, round_id: str, size: int, end: float, missing: SwarmError
) -> tuple[bytes, Checkpoint, tuple[bytes, ...]]:
    """Return a signed checkpoint of at least `size` entries and the chain of roots; else raise `missing` (1)."""
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
            refused = note  # the key may have just been replaced
        if trio.current_time() >= end:
            raise missing
        await trio.sleep(LOOK_EVERY_S)


def _check_vouched(log: ReadLog, vouched: Vouched) -> None:
    """Require that a witness has signed a beginning of this log (4)."""
    said = vouched.checkpoint
    if said.size > log.size:
        raise RolledBack(
            f"{vouched.key.name[:80]} has seen {said.size} entries, but the log now has {log.size}.",
            hint="Try again later; if it does not change, report it to the operator and other participants.",
        )
    if log.root(said.size) != said.root:
        raise LedgerForked(
            f"{vouched.key.name[:80]} was shown another history: its {said.size} entries are not the first of these.",
            hint=SHOW,
        )


def _check_roots(log: ReadLog, roots: Sequence[bytes]) -> None:
    """Require that the root documents served to this reader are those that the log names (5)."""
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
                f"The coordinator serves other keys than those in its log: root {number} is served as "
                f"{served.root_digest}, and entry {index} names {logged.root_digest}.",
                hint=SHOW,
            )


def _check_gaps(log: ReadLog, gaps: Sequence[Gap]) -> None:
    """Require that the log begins with the entries before the gap, and continues with the entry of its document (6).

    Entries of earlier root documents may come between: theirs were lost, too.
    """
    places = {logged.version: index for index, logged in log.roots}
    for number, gap in enumerate(gaps):
        if any(later.size <= gap.size for later in gaps[number + 1 :]):
            continue  # lost again in a later gap, with its entry
        index = places.get(gap.root_version, -1)
        follows = gap.size <= index and set(range(gap.size, index)) <= set(places.values())
        if not follows or log.root(gap.size) != gap.root:
            raise ProofInvalid(f"{gap}, but the log does not continue with the entry of that document.")


def _not_logged(log: ReadLog, roots: Sequence[bytes]) -> UntrustedMetadata:
    """Return the error for keys that the log does not name: shown only here, or not used by the coordinator yet (5)."""
    number = len(log.roots) + 1
    digest = Root.from_document(number, roots[number - 1]).root_digest
    return UntrustedMetadata(
        f"Root {number} is served as {digest}, and no entry of the log names it: its {log.size} entries end with root "
        f"{number - 1}.",
        hint=f"If keys are just being replaced, verify again when the coordinator uses the new ones. Otherwise: {SHOW}",
    )


def _read_leaderboard(data: bytes) -> _Leaderboard:
    try:
        return _Leaderboard.model_validate_json(data, strict=True)
    except ValidationError as error:
        raise MalformedMessage(f"{error.error_count()} fields of the leaderboard are wrong.") from None


def _check_leaderboard(state: BookState, shown: _Leaderboard) -> None:
    """Compare every node's row with the claims (3)."""
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
