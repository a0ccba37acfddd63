"""`swarm-coordinator backup --follow`: a standby copy of a running round, seconds behind it.

    TARGET/backup.json     the list of the copy: every file with its digest; replaced in one step
    TARGET/files/ab/ab…    files of the round's folder, by their digests
    TARGET/store/          the store: a base and the logs since (`coordinator.service.backup.store_copy`)

A pass, every second:

1. The learner's newest checkpoint gets a second name, if it is a new one.
2. The store's log is read up to its last commit. Right after it, new documents and chunks get a second name.
   If a version was activated in between, both are repeated. A version that is signed and not active yet may be among
   them: the next launch activates it.
3. All other new files in the round's folder get a second name, too.
4. New data is written to the target and synced, then the new list replaces the old one. Keys are sealed with the list's
   digest in every pass.
5. The pass records for the round what the copy has (`coordinator.reports.standby`).

- The target is a complete copy at every moment: that of the last finished pass. Listed files do not change, except for
  bytes beyond their listed size; files in no list are deleted after the next pass.
- A target that fails is retried for ever, and the round continues.
- A round whose own disk is full is copied, too.
"""

import fcntl
import logging
import math
import os
import secrets
import shutil
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

import sqlalchemy as sa
from blake3 import blake3

from coordinator.base.files import full_disk_named, link_or_copy, make_folder, open_private, sync, write_durably
from coordinator.config import Config, fixed
from coordinator.reports import standby
from coordinator.reports.standby import Confirmed
from coordinator.service.backup import database, making
from coordinator.service.backup.archive import (
    CONTENTS,
    FILES,
    PIECE_BYTES,
    SEALED,
    BackupInvalid,
    Contents,
    Entry,
    Sealer,
    escaped,
    standby_path,
)
from coordinator.service.backup.making import FIRST, MOVING, NOT_SAVED, SECRET, StoreState
from coordinator.service.backup.store_copy import StoreCopy
from protocol.errors import ConfigInvalid, DiskFull, SwarmError
from protocol.text.plain import counted

log = logging.getLogger(__name__)

Tell = Callable[[str, int, int], None]

ATTEMPTS = 20
"""Attempts of one pass to find a moment without an activation; then the next pass tries."""

REPORT_EVERY_S = 10.0

PROBLEM_MAX_CHARS = 500

KEYS_AGAIN_S = 60.0
"""Time between two reads of the keys, which the operator seldom changes."""

Mark = tuple[int, int, int]
"""Inode, size and time of a file: a new mark means new bytes, since files are never changed in place."""


@dataclass
class Pass:
    """The result of one pass."""

    taken_ms: int
    version: int
    ledger_size: int
    files: int
    copied_bytes: int
    took_s: float


@dataclass
class _Found:
    """Files of the round's folder, by their names in the copy: known ones, and new ones with a second name."""

    known: dict[str, tuple[Mark, Entry]] = field(default_factory=dict)
    held: dict[str, tuple[Mark, Path]] = field(default_factory=dict)


class Follower:
    """A follower that copies one round to one target; a context manager."""

    def __init__(self, config: Config, config_file: Path, target: Path, sealer: Sealer | None, tell: Tell) -> None:
        self._config = config
        self._config_file = config_file
        self._folder = config.round.directory.absolute()
        self._target = target.absolute()
        self._sealer = sealer
        self._tell = tell
        self._opened = ExitStack()
        self._places = (self._folder / ".standby", self._target / FILES / ".held")
        """Folders for second names: on the round's disk, or, if that is nearly full, on the target's."""
        self._place = self._places[0]
        self._store: StoreCopy | None = None
        self._is_open = False
        self._listed: set[str] = set()
        """Paths in the last list; also those of an earlier run until the first pass has ended."""
        self._known: dict[str, tuple[Mark, Entry]] = {}
        self._learner: tuple[str, list[Entry]] = ("", [])
        """The learner's checkpoint in the copy: its name and its files."""
        self._secrets: dict[str, bytes] = {}
        self._secrets_s = -KEYS_AGAIN_S
        self._copied_bytes = 0
        self._last_taken_ms = 0
        self.lag_max_s = 0.0
        """Longest lag of the copy since the last report, which sets it to 0."""

    @property
    def has_begun(self) -> bool:
        """Return True if a first pass has ended: later failures are retried."""
        return self._is_open

    def __enter__(self) -> "Follower":
        fixed.require_round(self._folder)
        if self._target.is_relative_to(self._folder):
            raise ConfigInvalid(
                f"{self._target} is inside the round's own folder.", hint="Choose a folder on another disk."
            )
        with ExitStack() as opened:
            lock = opened.enter_context(open_private(self._folder / "standby.lock"))
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                hint = "Stop the other one first."
                raise ConfigInvalid("Another `backup --follow` is already running for this round.", hint=hint) from None
            opened.callback(standby.forget, self._folder)
            opened.callback(self._forget_held)
            opened.callback(self._close_store)
            self._opened = opened.pop_all()
        return self

    def __exit__(self, *_raised: object) -> None:
        self._opened.close()

    def step(self) -> Pass:
        """Run one pass; after a failure, the next pass repeats the work."""
        began_s, self._copied_bytes = time.monotonic(), 0
        with full_disk_named(self._target):
            self._open_target()
            self._forget_held()
            self._place = self._places[making.lacks_room_for_names(self._folder)]
            make_folder(self._place)
            learner = self._hold_learner()
            files, state, signed = self._moment()
            self._walk(files, self._folder, but=MOVING)
            made = self._write(files, learner, state)
            self._confirm(made, signed)
            self._forget_unlisted(made)
        if self._store and self._store.needs_base:
            self._store.renew()
        took_s = time.monotonic() - began_s
        return Pass(made.made_ms, signed, made.ledger_size, len(made.files), self._copied_bytes, took_s)

    def failed(self, error: Exception) -> None:
        """Record why a pass failed; the round must not fill its own disk for a copy that cannot be written."""
        if self._store:
            if isinstance(error, BackupInvalid):
                self._store.renew()
            elif self._store.relieve():
                log.warning(
                    "the database log for the standby copy was discarded: the next pass copies the whole database"
                )
        with suppress(OSError, SwarmError):  # the round's own disk may be full
            if (last := standby.read(self._folder)) is not None:
                standby.write(self._folder, last.model_copy(update={"problem": str(error)[:PROBLEM_MAX_CHARS]}))

    def _open_target(self) -> None:
        """Read the target's list at the first pass; raise an error if the target has disappeared since."""
        if self._is_open:
            if not (self._target / CONTENTS).exists():
                raise ConfigInvalid(
                    f"The standby copy at {self._target} is missing.",
                    hint="Mount its disk again. If it is lost, restart `backup --follow`.",
                )
            return
        entries: dict[str, Entry] = {}
        if (self._target / CONTENTS).exists():
            there = Contents.model_validate_json((self._target / CONTENTS).read_bytes())
            if there.round_id != self._read_state().round_id:
                raise ConfigInvalid(
                    f"{self._target} is the standby copy of another round.", hint="Choose another folder."
                )
            entries = {entry.name: entry for entry in there.files}
        elif self._target.is_dir() and any(path.name != FILES for path in self._target.iterdir()):
            raise ConfigInvalid(f"{self._target} is not empty and not a standby copy.", hint="Choose another folder.")
        make_folder(self._target / FILES)
        there_now = (path for path in self._target.glob("*/**/*") if path.is_file())
        self._listed = {path.relative_to(self._target).as_posix() for path in there_now}
        if not self._config.store.url:
            self._store = StoreCopy(self._folder / database.FILE, self._target, entries)

    def _close_store(self) -> None:
        if self._store:
            self._store.close()

    def _forget_held(self) -> None:
        for place in self._places:
            shutil.rmtree(place, ignore_errors=True)

    def _hold_learner(self) -> dict[str, Path]:
        """Return the files of a new checkpoint, with a second name (step 1)."""
        checkpoints = self._folder / FIRST / making.CHECKPOINTS
        names = [path.name for path in checkpoints.glob("*") if path.name.isdigit()]
        if not names or max(names) == self._learner[0]:
            return {}
        try:
            return making.hold_checkpoint(checkpoints, self._place / making.CHECKPOINTS)
        except BackupInvalid as error:
            log.warning("the standby copy keeps the learner's previous checkpoint: %s", error)
            return {}

    def _moment(self) -> tuple[_Found, StoreState, int]:
        """Return the new files, the state of the store, and the newest signed version (step 2)."""
        for _ in range(ATTEMPTS):
            taken_ms, before = time.time_ns() // 1_000_000, self._read_state()
            if self._store:
                self._store.pull(self._tell)
            files = _Found()
            for name in MOVING:
                self._walk(files, self._folder / name)
            signed = making.newest_document(self._folder)
            if before.version == self._read_state().version and before.version <= signed <= before.version + 1:
                before.taken_ms = taken_ms
                return files, before, signed
            for _, path in files.held.values():
                path.unlink(missing_ok=True)
        raise ConfigInvalid("A version was activated at every attempt of this pass.", hint="The next pass tries again.")

    def _read_state(self) -> StoreState:
        state = StoreState()
        with database.moment(self._config.state) as connection:
            state.read(connection)
        return state

    def _walk(self, files: _Found, place: Path, but: tuple[str, ...] = ()) -> None:
        """Give every new file below `place` a second name (steps 2 and 3); known files keep their entries."""
        for inner, path in _files(self._folder, place):
            name = f"folder/{escaped(inner)}"
            is_later = (
                name in files.known
                or name in files.held
                or f"{inner}/".startswith(tuple(f"{skipped}/" for skipped in but))
            )
            if is_later:
                continue
            with suppress(FileNotFoundError):  # deleted meanwhile, so not needed
                status = path.stat()
                mark = (status.st_ino, status.st_size, status.st_mtime_ns)
                if (last := self._known.get(name)) and last[0] == mark:
                    files.known[name] = last
                    continue
                held = self._place / secrets.token_hex(8)
                link_or_copy(path, held)
                files.held[name] = (mark, held)

    def _write(self, round_files: _Found, learner: dict[str, Path], state: StoreState) -> Contents:
        """Write the new files, the store's logs and the list to the target (step 4)."""
        known, trained = dict(round_files.known), self._learner
        for number, (name, (mark, path)) in enumerate(round_files.held.items()):
            self._tell("writing", number, len(round_files.held))
            known[name] = (mark, self._add(name, path))
        if learner:
            inside = f"folder/{FIRST}/{making.CHECKPOINTS}"
            files = [self._add(f"{inside}/{name}", path) for name, path in learner.items()]
            trained = (next(iter(learner)).partition("/")[0], files)
        entries = [*(entry for _, entry in known.values()), *trained[1], *(self._store.push() if self._store else ())]
        entries.append(self._put("folder/resolved.json", making.without_password(self._folder)))
        entries.append(self._put("operator.toml", self._config_file.read_bytes()))
        entries.sort(key=lambda entry: entry.name)
        made = state.contents(self._config, keys="sealed" if self._sealer else "left out", files=tuple(entries))
        if self._sealer:
            sealed = self._put(SEALED, self._sealer.seal(self._secret_files(), made.digest()))
            made = made.model_copy(update={"files": (*made.files, sealed)})
        write_durably(self._target / CONTENTS, made.model_dump_json(indent=1).encode())
        self._known, self._learner, self._is_open = known, trained, True
        return made

    def _secret_files(self) -> dict[str, bytes]:
        if time.monotonic() - self._secrets_s >= KEYS_AGAIN_S:
            self._secrets, self._secrets_s = making.secret_contents(self._config), time.monotonic()
        return self._secrets

    def _put(self, name: str, data: bytes) -> Entry:
        entry = Entry(name=name, size_bytes=len(data), digest=blake3(data).hexdigest())
        path = self._target / standby_path(entry)
        if not path.exists():
            write_durably(path, data)
            self._copied_bytes += len(data)
        return entry

    def _add(self, name: str, path: Path) -> Entry:
        """Write a file of the round under its digest, unless it exists: an earlier run wrote most of them.

        A file that grows meanwhile, such as a log of figures, is copied up to its first length.
        """
        size_bytes = path.stat().st_size
        entry = Entry(name=name, size_bytes=size_bytes, digest=_copied(path, size_bytes, None))
        final = self._target / standby_path(entry)
        if final.exists():
            return entry
        draft = self._target / FILES / ".draft"
        with draft.open("wb") as file:
            os.fchmod(file.fileno(), 0o600)
            if _copied(path, size_bytes, file) != entry.digest:
                raise ConfigInvalid(f"{name} was changed while it was copied.", hint="The next pass copies it again.")
            file.flush()
            os.fsync(file.fileno())
        make_folder(final.parent)
        draft.replace(final)
        sync(final.parent)
        self._copied_bytes += size_bytes
        return entry

    def _confirm(self, made: Contents, signed: int) -> None:
        """Record for the round what the copy has (step 5)."""
        behind_s = (time.time_ns() // 1_000_000 - (self._last_taken_ms or made.made_ms)) / 1000
        self._last_taken_ms, self.lag_max_s = made.made_ms, max(self.lag_max_s, behind_s)
        size = made.ledger_size if self._store else None
        confirmed = Confirmed(
            target=str(self._target), taken_ms=made.made_ms, ledger_size=size, version=signed, lag_max_s=behind_s
        )
        with suppress(DiskFull):  # the round's own disk, which has an alarm: the round no longer waits for the copy
            standby.write(self._folder, confirmed)

    def _forget_unlisted(self, made: Contents) -> None:
        """Delete the files that the new list does not name."""
        listed = {standby_path(entry) for entry in made.files}
        for name in self._listed - listed:
            (self._target / name).unlink(missing_ok=True)
        self._listed = listed


def follow(follower: Follower, every_s: float, stop: threading.Event, say: Callable[[str], None]) -> None:
    """Run passes until `stop` is set; call `say` every `REPORT_EVERY_S`, and for each new problem."""
    reported_s, problem, copied_bytes = -math.inf, "", 0
    while not stop.is_set():
        began_s = time.monotonic()
        try:
            done = follower.step()
        except (SwarmError, OSError, sqlite3.Error, sa.exc.SQLAlchemyError) as error:
            if not follower.has_begun:
                raise
            follower.failed(error)
            if str(error) != problem:
                say(f"standby copy failed, retrying every {every_s:g} s: {error}")
            problem = str(error)
        else:
            copied_bytes += done.copied_bytes
            if problem or time.monotonic() - reported_s >= REPORT_EVERY_S:
                say(_line(done, follower.lag_max_s, copied_bytes))
                reported_s, problem, copied_bytes, follower.lag_max_s = time.monotonic(), "", 0, 0.0
        stop.wait(max(0.0, every_s - (time.monotonic() - began_s)))


def _copied(path: Path, size_bytes: int, file: IO[bytes] | None) -> str:
    """Return the digest of the first `size_bytes` of `path`; also write them to `file` if given."""
    hasher = blake3()
    with path.open("rb") as source:
        while piece := source.read(min(PIECE_BYTES, size_bytes)):
            hasher.update(piece)
            size_bytes -= len(piece)
            if file:
                file.write(piece)
    return hasher.hexdigest()


def _line(done: Pass, lag_max_s: float, copied_bytes: int) -> str:
    """Return the report of a pass for the operator, in one line."""
    return (
        f"standby copy: at most {lag_max_s:.1f} s behind, version {done.version}, "
        f"{counted(done.ledger_size, 'ledger entry', 'ledger entries')}, {counted(done.files, 'file')}; "
        f"{copied_bytes / 1e6:.1f} MB copied, the last pass took {done.took_s:.2f} s"
    )


def _files(folder: Path, place: Path) -> Iterator[tuple[str, Path]]:
    """Yield every finished file to be saved, with its path in the round's folder."""
    if place.is_file():
        yield place.relative_to(folder).as_posix(), place
        return
    for path in making.below(place):
        inner = path.relative_to(folder)
        top, unfinished = inner.parts[0], any(making.is_unfinished(part) for part in inner.parts)
        is_round_s = top not in (*NOT_SAVED, *SECRET) and not top.startswith(database.FILE)
        of_learner = top == FIRST and len(inner.parts) > 1 and inner.parts[1] in making.LEARNER_NOT_SAVED
        if is_round_s and not of_learner and not unfinished and path.suffix != ".key" and not path.is_symlink():
            yield inner.as_posix(), path
