"""Watch over the ledger: every checkpoint that this machine sees must continue the one it saw before.

1. The checkpoint is signed by the ledger's key, which the round's chain of roots names.
2. It is not shorter than the one seen before: entries are never removed.
3. The tiles give its root, and the same hashes give the root that was seen before. If they give another one, or two
   roots are signed for one size, the log has a fork: two histories.

4. If the owner configured witnesses, enough of them have signed a beginning of this log.
5. If the root keys have signed that the log was resumed after a gap (`ledger.gaps`), the last checkpoint counts only up
   to the gap. It is kept in a file, and a warning is logged.

- The last checkpoint is saved after step 3, and synced: a restart forgets nothing. Programs that share a folder, such
  as the agent and `why`, continue each other's checkpoint, so none is shown a separate history. A program that is
  overtaken reads again.
- A fork is written to a file that proves it to anybody (`ledger.proof`), and stops this program: as long as the file
  exists, it does not start again.
- A witness's note that is no beginning of this log proves a fork, like an earlier checkpoint. Too few witnesses are
  logged and waited for: they may be late.
- The watch waits for a coordinator that is unreachable, also if a proxy answers "not found" instead, and for disk
  space. A coordinator that answers without proof is asked `TRIES` times; one that serves checkpoints but withholds the
  tiles `WITHHELD_TRIES` times. One that refuses the tiles for load (503) is asked `REFUSED_TRIES` times, with longer
  and longer pauses: a crowd of strangers can cause these refusals. Their number is kept in a file, since few nodes run
  for a day without a restart. A log shorter than the longest one shown does not reset these counts.
"""

import logging
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import trio

from ledger import proof, tree, witness
from ledger.checkpoint import Checkpoint, open_checkpoint
from ledger.gaps import Gap, Keys
from ledger.note import NoteKey
from ledger.tree import EMPTY_ROOT
from ledger.witness import Vouched, Witnesses
from protocol.errors import (
    CheckpointInvalid,
    DiskFull,
    LedgerForked,
    NotFound,
    NotWitnessed,
    Overloaded,
    ProofInvalid,
    RolledBack,
    SwarmError,
    Unreachable,
)
from protocol.wire.message import Message
from swarm_node.base import disk
from swarm_node.base.disk import disk_named, write_durably
from swarm_node.ledger.log_reader import LogReader

log = logging.getLogger(__name__)

LOOK_EVERY_S = 20.0

TRIES = 3
"""A checkpoint may be replaced while its tiles are fetched, but not three times in a row."""

WITHHELD_TRIES = 90
"""30 min: a restart, a cache without files or the worst load is over by then; no fork stays hidden longer."""

REFUSED_TRIES = 150
"""A day, by the pauses between: nobody floods a coordinator, which divides its reads among all addresses, so long that
not one check passes; and an operator who only pretends to be busy hides a fork no longer."""

REFUSED_PAUSE_MAX_S = 600.0

SEEN_FILE = "seen.msgpack"

REFUSED_FILE = "refused"

NOBODY = Witnesses()
"""No witness is required."""

TELL = "Report this to the operator and other participants. Remove {} only if you trust the round again."


class Overtaken(SwarmError):
    """Another program of this home has read the log meanwhile; the log itself is valid."""

    code, fault = "log_overtaken", "node"


class SeenLog(Message):
    """Saved state: the roots and the checkpoint note, as served; the note is empty before the first."""

    roots: tuple[bytes, ...] = ()
    checkpoint: bytes = b""


def load_seen(folder: Path) -> SeenLog:
    """Load the last state, saved by any program; raise an error if a fork was found."""
    if forks := sorted(folder.glob("fork-*.proof")):
        raise LedgerForked(f"This round's ledger has a fork: {forks[0]} proves it.", hint=TELL.format(folder))
    path = folder / SEEN_FILE
    return SeenLog.from_bytes(path.read_bytes()) if path.exists() else SeenLog()


class LogWatch:
    """Watch over one log from one machine."""

    def __init__(self, reader: LogReader, round_id: str, folder: Path, witnesses: Witnesses = NOBODY) -> None:
        self._reader = reader
        self._round_id = round_id
        self._folder = folder
        self._witnesses = witnesses
        self._proved: set[bytes] = set()
        """Witnesses' notes that were proved to be of this log."""
        self._longest = 0
        """Size of the longest log in any checkpoint shown, proved or not."""
        self._unproved = self._withheld = self._refused = 0
        """Failed checks since a checkpoint of that size was proved."""
        self._path = folder / SEEN_FILE
        self._seen = load_seen(folder)

    @property
    def roots(self) -> tuple[bytes, ...]:
        """The chain of root documents that the last checkpoint was checked with."""
        return self._seen.roots

    async def run(self) -> None:
        """Check at intervals until cancelled; raise an error when the log cannot be trusted any more."""
        trouble = ""
        self._refused = self._load_refused()
        while True:
            try:
                await self._refresh_and_count()
                trouble = ""
            except (LedgerForked, RolledBack):
                raise
            except Overtaken as error:
                log.info("the ledger check is repeated: %s", error)  # the other program has proved its checkpoint
            except (NotFound, DiskFull, NotWitnessed, Overloaded) as error:
                if error.code != trouble and (self._seen.checkpoint or isinstance(error, DiskFull)):
                    log.warning("cannot read the ledger code=%s: %s", error.code, error)
                trouble = error.code
            except Unreachable:
                pass  # the heartbeat logs this
            except SwarmError as error:
                self._unproved += 1
                log.warning("the ledger cannot be verified code=%s times=%d: %s", error.code, self._unproved, error)
                if self._unproved >= TRIES or self._is_hidden():
                    raise
            await trio.sleep(min(LOOK_EVERY_S * 2 ** min(self._refused, 10), REFUSED_PAUSE_MAX_S))

    async def _refresh_and_count(self) -> None:
        before = self._refused
        try:
            await self.refresh()
        finally:
            if self._refused != before:
                with suppress(OSError):  # a full disk is no reason to end, and is logged elsewhere
                    (self._folder / REFUSED_FILE).write_text(str(self._refused))

    def _load_refused(self) -> int:
        """Return the refusals since the last proof, over restarts; 0 if nothing is known about them."""
        with suppress(OSError, ValueError):
            return int((self._folder / REFUSED_FILE).read_text())
        return 0

    async def refresh(self) -> tuple[bytes, Checkpoint]:
        """Return the newest checkpoint, after proving that it continues the last one seen."""
        self._seen = load_seen(self._folder)  # before the note is fetched, which is then as new or newer
        cosigned = await self._reader.cosigned() if self._witnesses.keys else ()
        note = await self._reader.checkpoint()
        try:
            return note, await self._follow(note, cosigned)
        except (NotFound, Unreachable) as error:
            is_refused = isinstance(error, Overloaded)
            self._refused += is_refused
            self._withheld += not is_refused
            patient = Overloaded if is_refused else NotFound
            raise (ProofInvalid if self._is_hidden() else patient)(
                f"A checkpoint is served, but not its proof: {error.message}",
                hint="If this goes on, ask the operator and others what they see.",
            ) from error

    def _is_hidden(self) -> bool:
        """Return True if the proof was withheld for so long that it counts as missing."""
        return self._withheld >= WITHHELD_TRIES or self._refused >= REFUSED_TRIES

    async def prove(self, earlier_note: bytes) -> None:
        """Prove that a note of this log is of a beginning of the checkpoint that `refresh` returned last."""
        keys = Keys(self._seen.roots, self._round_id)
        earlier, later = keys.counts_as(earlier_note), keys.open(self._seen.checkpoint)[0]
        if earlier.size > later.size:
            raise RolledBack(
                f"A note of {earlier.size} entries was signed, but the new checkpoint has only {later.size}.",
                hint=TELL.format(self._folder),
            )
        if earlier.size:
            gap = keys.open(earlier_note)[1]
            await self._prove(self._seen.roots, (earlier_note, self._seen.checkpoint), earlier, later, gap)

    async def _follow(self, note: bytes, cosigned: tuple[bytes, ...]) -> Checkpoint:
        roots, later = await self._open(note)
        keys = Keys(roots, self._round_id)
        seen, gap = self._last(keys)
        earlier = Checkpoint(seen.origin, gap.size, gap.root) if gap else seen
        if gap:
            self._longest = 0
        self._longest = max(self._longest, later.size)
        if later.size < earlier.size:
            raise RolledBack(
                f"The ledger had {earlier.size} entries, but the new checkpoint has only {later.size}.",
                hint=TELL.format(self._folder),
            )
        if earlier.size:
            await self._prove(roots, (self._seen.checkpoint, note), earlier, later, gap)
        if gap:
            await self._pass_gap(gap, seen)
        await trio.to_thread.run_sync(self._keep, SeenLog(roots=roots, checkpoint=note))
        vouched = await self._hear(roots, cosigned, note, later) if self._witnesses.keys else []
        if later.size == self._longest:
            self._unproved = self._withheld = self._refused = 0
        if self._witnesses.keys:
            self._witnesses.require(vouched)
        return later

    async def _hear(
        self, roots: tuple[bytes, ...], cosigned: tuple[bytes, ...], note: bytes, later: Checkpoint
    ) -> list[Vouched]:
        """Prove that each witness's note is of this log (4); the caller checks the number of witnesses."""
        keys = Keys(roots, self._round_id)
        notes = keys.without_lost([note, *cosigned])
        vouched = [
            signed
            for signed in witness.vouched(notes, keys.newest_first, self._witnesses.keys)
            if signed.checkpoint.size <= later.size  # others were signed later: they count next time
        ]
        for signed in vouched:
            if signed.note not in self._proved and signed.checkpoint.size:
                await self._prove(roots, (signed.note, note), signed.checkpoint, later)
        self._proved = {signed.note for signed in vouched}
        return vouched

    async def _open(self, note: bytes) -> tuple[tuple[bytes, ...], Checkpoint]:
        """Return the chain of roots, extended if the key was replaced since, and the checkpoint of the note (1)."""
        roots = self._seen.roots or await self._reader.roots()
        try:
            return roots, open_checkpoint(note, self._newest_key(roots))
        except CheckpointInvalid:
            roots = await self._reader.roots(roots)
            return roots, open_checkpoint(note, self._newest_key(roots))

    def _newest_key(self, roots: tuple[bytes, ...]) -> Sequence[NoteKey]:
        return proof.ledger_keys(roots, self._round_id)[:1]

    def _last(self, keys: Keys) -> tuple[Checkpoint, Gap | None]:
        """Return the last checkpoint, signed by any earlier key, and the gap that lost its last entries, if any."""
        if not self._seen.checkpoint:
            return Checkpoint("", 0, EMPTY_ROOT), None
        return keys.open(self._seen.checkpoint)

    async def _pass_gap(self, gap: Gap, seen: Checkpoint) -> None:
        """Keep the checkpoint of the lost entries, and log the gap (5)."""
        path = self._folder / f"gap-{gap.size}-{seen.size}.msgpack"
        await self._write(path, self._seen.to_bytes())
        log.warning(
            "the ledger was resumed after a gap: %s. A checkpoint of %d entries was seen before; it is kept in %s. "
            "Receipts of lost entries stay valid: show them to the operator.",
            gap, seen.size, path,
        )  # fmt: skip

    async def _prove(
        self,
        roots: tuple[bytes, ...],
        notes: tuple[bytes, bytes],
        earlier: Checkpoint,
        later: Checkpoint,
        gap: Gap | None = None,
    ) -> None:
        """Prove both roots from the same tiles; checkpoints of equal size must have the same root (3)."""
        if earlier.size == later.size:
            if earlier.root != later.root:
                self._refuse_gap(gap)
                await self._forked(roots, notes, (earlier.size, later.size), [])
            return
        ranges = tree.consistency_ranges(earlier.size, later.size)
        nodes = [node for leaves in ranges for node in tree.nodes_of(leaves)]
        hash_of = await self._reader.hashes(nodes, later.size)
        old_root, new_root = tree.roots_by_consistency(earlier.size, later.size, tree.prove(ranges, hash_of))
        if new_root != later.root:
            raise ProofInvalid(f"The tiles do not give the signed root of {later.size} entries.")
        if old_root != earlier.root:
            self._refuse_gap(gap)
            await self._forked(roots, notes, (earlier.size, later.size), tree.prove(ranges, hash_of))

    def _refuse_gap(self, gap: Gap | None) -> None:
        """Raise an error for a gap: two checkpoints cannot prove that the log contradicts the root document."""
        if gap:
            raise RolledBack(f"{gap}, but the log does not begin with these entries.", hint=TELL.format(self._folder))

    async def _forked(
        self, roots: tuple[bytes, ...], notes: tuple[bytes, bytes], sizes: tuple[int, int], seeded: Sequence[bytes]
    ) -> None:
        """Check the proof, write it, and raise `LedgerForked`, also if the disk is full."""
        made = proof.Fork(roots=roots, earlier=notes[0], later=notes[1], proof=tuple(seeded)).to_bytes()
        proof.check_fork(made, self._round_id)
        path = self._folder / f"fork-{sizes[0]}-{sizes[1]}.proof"
        said, hint = "The coordinator has signed two histories of its ledger", TELL.format(self._folder)
        try:
            await self._write(path, made)
        except DiskFull as error:
            raise LedgerForked(f"{said}, but there is no room for the proof: {error.message}", hint=hint) from error
        raise LedgerForked(f"{said}: {path} proves it.", hint=hint)

    def _keep(self, seen: SeenLog) -> None:
        """Save the state, unless another program has changed it meanwhile: then the new state must be continued."""
        meanwhile = Overtaken(
            "Another program of this home updated the ledger state at the same time.", hint="Try again."
        )
        with disk_named(self._folder):
            self._folder.mkdir(parents=True, exist_ok=True)
            with disk.hold_lock(self._folder / "seen.lock", meanwhile):
                if load_seen(self._folder) != self._seen:
                    raise meanwhile
                if seen != self._seen:
                    write_durably(self._path, seen.to_bytes(), temp_folder=self._folder)
        self._seen = seen

    async def _write(self, path: Path, data: bytes) -> None:
        with disk_named(path.parent):
            path.parent.mkdir(parents=True, exist_ok=True)
        await trio.to_thread.run_sync(lambda: write_durably(path, data, temp_folder=path.parent))
