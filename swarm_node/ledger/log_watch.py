"""The watch over the ledger: every checkpoint that this machine sees must continue the one it saw before.

1. The checkpoint is signed by the ledger's key, which the round's chain of roots names.
2. It is not shorter than the one seen before: entries do not go away.
3. The tiles make its root, and out of the same hashes the root that was seen before. If they make another one, or two
   roots are signed for one size, the log has a fork: one history is told here, another was told before.

4. Where the owner named witnesses, enough of them have signed a beginning of this log.
5. Where the root keys have signed that the log was resumed after a gap (`ledger.gaps`), what was seen counts up to
   there. What was seen is kept in a file, and the owner is told.

- What was seen is replaced after step 3, and synced: a restart forgets nothing. Programs that share a folder, as the
  agent and `why`, continue what the other saw: none is shown a history of its own. Who is overtaken looks again.
- A fork is written to a file that convinces anybody (`ledger.proof`), and stops this program for good: as long as the
  file is there, it does not start again.
- What a witness has signed and is no beginning of this log proves a fork as well as what was seen before. Too few
  witnesses are told of, and waited for: they may be late.
- A coordinator that is away is waited for, also where a proxy says "not found" in its place; so is room on the disk.
  One that answers and proves nothing is asked `TRIES` times, one that serves checkpoints and withholds what proves them
  `WITHHELD_TRIES` times; what is shown in between and is shorter than the longest log shown buys it no time.
"""

import logging
from collections.abc import Sequence
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
    ProofInvalid,
    RolledBack,
    SwarmError,
    Unreachable,
)
from protocol.wire.message import Message
from swarm_node.base import locks
from swarm_node.base.disk import disk_named, write_durably
from swarm_node.ledger.log_reader import LogReader

log = logging.getLogger(__name__)

LOOK_EVERY_S = 20.0

TRIES = 3
"""A checkpoint may be replaced while its tiles are fetched; not three times in a row."""

WITHHELD_TRIES = 90
"""Half an hour: a restart, a cache that lost files or the worst load is over by then; no fork hides longer."""

NOBODY = Witnesses()
"""Nobody has to."""

TELL = "Report this to the operator and other participants. Remove {} only if you trust the round again."


class Overtaken(SwarmError):
    """Another program of this home has looked at the log meanwhile; nothing is wrong with it."""

    code, fault = "log_overtaken", "node"


class SeenLog(Message):
    """What is kept: the roots and the note, as they were served; no note before the first."""

    roots: tuple[bytes, ...] = ()
    checkpoint: bytes = b""


class LogWatch:
    """One log, seen from one machine."""

    def __init__(self, reader: LogReader, round_id: str, folder: Path, witnesses: Witnesses = NOBODY) -> None:
        self._reader = reader
        self._round_id = round_id
        self._folder = folder
        self._witnesses = witnesses
        self._proved: set[bytes] = set()
        """Witnesses' notes that were found to be of this log."""
        self._longest = 0
        """Entries of the longest log that a checkpoint was shown for, proved or not."""
        self._unproved = self._withheld = 0
        """Looks in vain since that was proved."""
        self._path = folder / "seen.msgpack"
        self._seen = self._recall()

    async def run(self) -> None:
        """Look for ever; raises when the log cannot be trusted any more."""
        trouble = ""
        while True:
            try:
                await self.refresh()
                trouble = ""
            except (LedgerForked, RolledBack):
                raise
            except Overtaken as error:
                log.info("the ledger check is repeated: %s", error)  # what the other saw, it has proved
            except Unreachable:
                pass  # the heartbeat tells the owner
            except (NotFound, DiskFull, NotWitnessed) as error:
                if error.code != trouble and (self._seen.checkpoint or isinstance(error, DiskFull)):
                    log.warning("cannot read the ledger code=%s: %s", error.code, error)
                trouble = error.code
            except SwarmError as error:
                self._unproved += 1
                log.warning("the ledger cannot be verified code=%s times=%d: %s", error.code, self._unproved, error)
                if self._unproved >= TRIES or self._withheld >= WITHHELD_TRIES:
                    raise
            await trio.sleep(LOOK_EVERY_S)

    def _recall(self) -> SeenLog:
        """What was seen last, by whichever program; raises if one has found a fork."""
        if forks := sorted(self._folder.glob("fork-*.proof")):
            raise LedgerForked(f"This round's ledger has a fork: {forks[0]} proves it.", hint=TELL.format(self._folder))
        return SeenLog.from_bytes(self._path.read_bytes()) if self._path.exists() else SeenLog()

    async def refresh(self) -> tuple[bytes, Checkpoint]:
        """The newest checkpoint, after it was proved to continue the last one seen."""
        self._seen = self._recall()  # before the note is fetched, which is then as new or newer
        cosigned = await self._reader.cosigned() if self._witnesses.keys else ()
        note = await self._reader.checkpoint()
        try:
            return note, await self._follow(note, cosigned)
        except (NotFound, Unreachable) as error:
            self._withheld += 1
            patient = self._withheld < WITHHELD_TRIES
            raise (NotFound if patient else ProofInvalid)(
                f"A checkpoint is served, but not what proves it: {error.message}",
                hint="If this goes on, ask the operator and others what they see.",
            ) from error

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
                f"The ledger had {earlier.size} entries, and is now said to have {later.size}.",
                hint=TELL.format(self._folder),
            )
        if earlier.size:
            await self._prove(roots, (self._seen.checkpoint, note), earlier, later, gap)
        if gap:
            await self._pass_gap(gap, seen)
        await trio.to_thread.run_sync(self._keep, SeenLog(roots=roots, checkpoint=note))
        found = await self._hear(roots, cosigned, note, later) if self._witnesses.keys else []
        if later.size == self._longest:
            self._unproved = self._withheld = 0
        if self._witnesses.keys:
            self._witnesses.require(found)
        return later

    async def _hear(
        self, roots: tuple[bytes, ...], cosigned: tuple[bytes, ...], note: bytes, later: Checkpoint
    ) -> list[Vouched]:
        """(4) Each witness's note is of this log; whether they are enough is for the end."""
        keys = Keys(roots, self._round_id)
        notes = keys.without_lost([note, *cosigned])
        found = [
            one
            for one in witness.vouched(notes, keys.newest_first, self._witnesses.keys)
            if one.checkpoint.size <= later.size  # else signed since: it counts the next time
        ]
        for one in found:
            if one.note not in self._proved and one.checkpoint.size:
                await self._prove(roots, (one.note, note), one.checkpoint, later)
        self._proved = {one.note for one in found}
        return found

    async def _open(self, note: bytes) -> tuple[tuple[bytes, ...], Checkpoint]:
        """(1) The chain of roots, longer than before if the key was replaced since, and what the note says."""
        roots = self._seen.roots or await self._reader.roots()
        try:
            return roots, open_checkpoint(note, self._newest_key(roots))
        except CheckpointInvalid:
            roots = await self._reader.roots(roots)
            return roots, open_checkpoint(note, self._newest_key(roots))

    def _newest_key(self, roots: tuple[bytes, ...]) -> Sequence[NoteKey]:
        return proof.ledger_keys(roots, self._round_id)[:1]

    def _last(self, keys: Keys) -> tuple[Checkpoint, Gap | None]:
        """What was seen, by whichever key it was signed then; and the gap that took its last entries since."""
        if not self._seen.checkpoint:
            return Checkpoint("", 0, EMPTY_ROOT), None
        return keys.open(self._seen.checkpoint)

    async def _pass_gap(self, gap: Gap, seen: Checkpoint) -> None:
        """(5) Keep what was seen of the lost entries, and report the gap."""
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
        """(3) Both roots out of the same tiles; those of equal sizes are the same."""
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
            raise ProofInvalid(f"The tiles do not make the signed root of {later.size} entries.")
        if old_root != earlier.root:
            self._refuse_gap(gap)
            await self._forked(roots, notes, (earlier.size, later.size), tree.prove(ranges, hash_of))

    def _refuse_gap(self, gap: Gap | None) -> None:
        """Of a gap there is no proof by two checkpoints: the root document says one thing, and the log another."""
        if gap:
            raise RolledBack(f"{gap}, and the log does not begin with these.", hint=TELL.format(self._folder))

    async def _forked(
        self, roots: tuple[bytes, ...], notes: tuple[bytes, bytes], sizes: tuple[int, int], seeded: Sequence[bytes]
    ) -> None:
        """See that the proof holds, write it, and stop; without room for it, too."""
        made = proof.Fork(roots=roots, earlier=notes[0], later=notes[1], proof=tuple(seeded)).to_bytes()
        proof.check_fork(made, self._round_id)
        path = self._folder / f"fork-{sizes[0]}-{sizes[1]}.proof"
        said, hint = "The coordinator has signed two histories of its ledger", TELL.format(self._folder)
        try:
            await self._write(path, made)
        except DiskFull as error:
            raise LedgerForked(f"{said}, and there is no room for the proof: {error.message}", hint=hint) from error
        raise LedgerForked(f"{said}: {path} proves it.", hint=hint)

    def _keep(self, seen: SeenLog) -> None:
        """Replace what was seen, unless another program has meanwhile: this must continue that, then."""
        meanwhile = Overtaken(
            "Another program of this home updated the ledger state at the same time.", hint="Try again."
        )
        with disk_named(self._folder):
            self._folder.mkdir(parents=True, exist_ok=True)
            with locks.hold_lock(self._folder / "seen.lock", meanwhile):
                if self._recall() != self._seen:
                    raise meanwhile
                if seen != self._seen:
                    write_durably(self._path, seen.to_bytes(), temp_folder=self._folder)
        self._seen = seen

    async def _write(self, path: Path, data: bytes) -> None:
        with disk_named(path.parent):
            path.parent.mkdir(parents=True, exist_ok=True)
        await trio.to_thread.run_sync(lambda: write_durably(path, data, temp_folder=path.parent))
