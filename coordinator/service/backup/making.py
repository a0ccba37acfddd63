"""`swarm-coordinator backup`: save a running round, and verify the result.

1. The learner's files, its newest checkpoint as a whole, get a second name (a hard link) in a folder of this backup, so
   that they stay as they are. If the round's disk is full, they are copied beside the target. The checkpoint that is
   held is read as the learner will read it, so that training can resume from every backup.
2. The store is held at one moment, and right after it the trust documents' timestamp and chunks: everything that a
   publication replaces or deletes. If a version was published in between, both are held again: a document must not name
   a version that the store does not have. This takes milliseconds and does not stop publication.
3. The store is copied beside the target as it was at that moment, however long that takes.
4. All other files of the round's folder get a second name, too, except logs and older backups; the timestamp does not
   name documents that were signed meanwhile.
5. Everything is written, verified, and gets its name.
"""

import fcntl
import io
import json
import os
import secrets
import shutil
import time
from collections.abc import Callable, Iterator, Set
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import sqlalchemy as sa

from coordinator.base.files import full_disk_named, link_or_copy, make_folder, open_private
from coordinator.config import Config, fixed
from coordinator.publishing.signed_metadata import SignedMetadata
from coordinator.service.backup import database
from coordinator.service.backup.archive import (
    CONTENTS,
    SEALED,
    BackupInvalid,
    Contents,
    Entry,
    Writer,
    described,
    escaped,
    reading,
    require_sound,
    seal,
    writing,
)
from coordinator.store import schema
from coordinator.store.facts import ROUND_ID, get_fact
from coordinator.store.state import Database
from coordinator.transactions.policy_versions import newest_version
from ledger import store
from protocol.errors import ConfigInvalid
from protocol.policy.manifest import version_of

Tell = Callable[[str, int, int], None]

ATTEMPTS = 100
"""Attempts to hold a moment, which takes milliseconds; a version is published every few minutes."""

PAUSE_S = 0.05
"""Pause between two attempts, in which a running publication continues."""

SECRET = ("keys", "operator.token", "evm.key")
"""Files and folders with secrets: sealed, or left out."""

NOT_SAVED = (
    "logs", "backups", "public", "resolved.json", "coordinator.lock", "payouts.lock", "backup.lock",
    "standby.lock", "standby.json", "operator.toml", "draft", "auditors", "uploads",
)  # fmt: skip
"""Names that a launch creates again or does not need; `auditors` and `uploads` have versions that are in `blobs`, too:
without its upload, the first version after a restore is published in full and not as a patch. `resolved.json` is saved
separately, without its password; `operator.toml`, which a restored round has in its folder, is saved as the settings
file of the backup."""

FIRST = "learner"
"""Folder that is saved before the store: a checkpoint must not be ahead of its round."""

MOVING = ("metadata/timestamp.json", "blobs")
"""Paths that a publication replaces or deletes; all its other files are permanent."""

ROOM_FOR_NAMES_BYTES = 64 * 2**20
"""Space on the round's disk that second names of files may need; with less, files are copied to the target's disk."""


@dataclass
class StoreState:
    """The state of a copied store."""

    round_id: str = ""
    schema: int = 0
    ledger_size: int = 0
    checkpoint: bytes = b""
    version: int = 0
    differences: int = 0
    taken_ms: int = 0
    """Time of the copy; 0: the time at which the list is made."""

    def read_and_check(self, connection: sa.Connection) -> None:
        """Read the state of the store, and check its ledger."""
        self.read(connection)
        self.differences = len(store.rebuild(connection, locked=False))

    def read(self, connection: sa.Connection) -> None:
        self.schema = _schema_of(connection)
        self.round_id = get_fact(connection, ROUND_ID)
        self.ledger_size = store.size(connection)
        self.checkpoint = store.checkpoint(connection) or b""
        self.version, _ = newest_version(connection)

    def contents(self, config: Config, **rest: Any) -> Contents:
        return Contents(
            made_ms=self.taken_ms or time.time_ns() // 1_000_000,
            round_id=self.round_id,
            database="postgresql" if config.store.url else "sqlite",
            schema_number=self.schema,
            ledger_size=self.ledger_size,
            checkpoint=self.checkpoint.decode(),
            version=self.version,
            **rest,
        )


@dataclass
class _Staged:
    """Held files, by their names in the backup."""

    folder: Path
    store: Path
    """Folder for the copy of the store, on the target's disk."""
    files: dict[str, Path] = field(default_factory=dict)

    def keep(self, name: str, path: Path) -> None:
        """Give a file a second name; skip a file that was deleted meanwhile, which is not needed."""
        held = self.folder / secrets.token_hex(8)
        with suppress(FileNotFoundError):
            link_or_copy(path, held)
            self.files[name] = held


def make(config: Config, config_file: Path, target: Path, *, passphrase: str | None, tell: Tell) -> Contents:
    """Save a round, which may be running; leave out its keys if there is no passphrase."""
    folder, target = config.round.directory, target.absolute()
    fixed.require_round(folder)
    if target.exists():
        raise ConfigInvalid(f"{target} exists already.", hint="Choose a new file or folder.")
    with _only_backup(folder), full_disk_named(target.parent), _staging(folder, target) as staged:
        snapshot = _capture(config, staged, tell)
        with writing(target) as (writer, partial):
            entries = list(_written(writer, staged, tell))
            entries.append(_add(writer, "folder/resolved.json", without_password(folder)))
            entries.append(_add(writer, "operator.toml", config_file.read_bytes()))
            keys = "left out" if passphrase is None else "sealed"
            contents = snapshot.contents(config, keys=keys, files=tuple(entries))
            if passphrase is not None:
                sealed = seal(secret_contents(config), passphrase, contents.digest())
                contents = contents.model_copy(update={"files": (*entries, _add(writer, SEALED, sealed))})
            _add(writer, CONTENTS, contents.model_dump_json(indent=1).encode())
        _read_again(partial, contents, tell)
        partial.rename(target)
    return contents


def save_store(config: Config, config_file: Path, target: Path, tell: Tell) -> Contents:
    """Save only the store of a stopped round, with any schema; the rest of the round's folder is not saved."""
    snapshot, place = StoreState(), "store"
    with writing(target) as (writer, partial):
        database.save(config.state, partial / place, tell, snapshot.read)
        entries = [described(partial, f"{place}/{escaped(path.name)}") for path in sorted((partial / place).iterdir())]
        entries.append(_add(writer, "operator.toml", config_file.read_bytes()))
        contents = snapshot.contents(config, keys="left out", folder="as it is", files=tuple(entries))
        _add(writer, CONTENTS, contents.model_dump_json(indent=1).encode())
    partial.rename(target)
    return contents


def _capture(config: Config, staged: _Staged, tell: Tell) -> StoreState:
    """Hold the files of the round and copy its store (steps 1 to 4)."""
    folder = config.round.directory
    secret = _secret_files(config)
    checkpoint = hold_checkpoint(folder / FIRST / CHECKPOINTS, staged.folder / CHECKPOINTS)
    staged.files |= {f"folder/{FIRST}/{CHECKPOINTS}/{name}": path for name, path in checkpoint.items()}
    for path in sorted((folder / FIRST).glob("*")):
        if path.name not in LEARNER_NOT_SAVED:
            _keep_all(staged, folder, path, but=secret)
    snapshot = StoreState()
    with _moment(config, staged, secret) as store_then:
        database.copy(store_then, staged.store, tell, snapshot.read_and_check)
    if snapshot.differences:
        raise BackupInvalid(
            f"The store contradicts its ledger in {snapshot.differences} places. No backup was made.",
            hint="`swarm-coordinator fsck` lists them. Keep older backups.",
        )
    staged.files |= {f"store/{path.name}": path for path in sorted(staged.store.iterdir())}
    for path in sorted(folder.iterdir()):
        if not path.name.startswith((".", database.FILE)) and path.name not in (*NOT_SAVED, *SECRET, FIRST, *MOVING):
            _keep_all(staged, folder, path, but=secret)
    return snapshot


@contextmanager
def _moment(config: Config, staged: _Staged, secret: Set[Path], *, attempts: int = ATTEMPTS) -> Iterator[sa.Connection]:
    """Yield the store at a moment without a publication, with the files of that moment held (step 2)."""
    folder, before = config.round.directory, dict(staged.files)
    for _ in range(attempts):
        with database.moment(config.state) as store_then:
            _schema_of(store_then)
            for name in MOVING:
                _keep_all(staged, folder, folder / name, but=secret)
            version, _ = newest_version(store_then)
            if newest_document(folder) == version:
                yield store_then
                return
        for name in staged.files.keys() - before.keys():  # copies, where there are no hard links, would fill the disk
            staged.files.pop(name).unlink()
        time.sleep(PAUSE_S)
    raise BackupInvalid(
        f"A version was published at each of {attempts} attempts, before its files could be held.",
        hint="Publish less often, or put the round on a file system with hard links: without them, files are copied.",
    )


def _schema_of(connection: sa.Connection) -> int:
    number = schema.stored_number(connection)
    if number is None:
        raise ConfigInvalid("The store is empty: there is nothing to save.")
    return number


def _keep_all(staged: _Staged, folder: Path, path: Path, *, but: Set[Path]) -> None:
    """Hold a file, or every finished file below a folder, except those in `but`.

    Files that are held already stay as they are.
    """
    for file in sorted(below(path)) if path.is_dir() else [path]:
        inner = file.relative_to(folder)
        name = f"folder/{escaped(inner.as_posix())}"
        if name in staged.files or any(map(is_unfinished, inner.parts)) or file.absolute() in but:
            continue
        if file.is_file() and not file.is_symlink():
            staged.keep(name, file)


def is_unfinished(part: str) -> bool:
    """Return True for the name of a file or folder that is still being written."""
    return part.startswith(".") or part.endswith(".new") or part == "incoming"


def below(folder: Path) -> Iterator[Path]:
    """Yield every file below a folder; skip folders that are deleted meanwhile."""

    def failed(error: OSError) -> None:
        if not isinstance(error, FileNotFoundError):
            raise error

    for place, _, names in os.walk(folder, onerror=failed):
        yield from (Path(place, name) for name in names)


def newest_document(folder: Path) -> int:
    """Return the newest version that the signed documents of a round name."""
    metadata = SignedMetadata(folder / "keys", folder / "metadata", 0.0)
    return max((version_of(name) or 0 for name in metadata.targets()), default=0)


def _written(writer: Writer, staged: _Staged, tell: Tell) -> Iterator[Entry]:
    """Write every held file and yield its entry (step 5)."""
    for number, (name, path) in enumerate(sorted(staged.files.items())):
        tell("writing", number, len(staged.files))
        with path.open("rb") as source:
            yield writer.add(name, source, os.fstat(source.fileno()).st_size)


def _add(writer: Writer, name: str, data: bytes) -> Entry:
    return writer.add(name, io.BytesIO(data), len(data))


def _read_again(target: Path, contents: Contents, tell: Tell) -> None:
    with reading(target) as reader:
        for number, entry in enumerate(contents.files):
            tell("verifying", number, len(contents.files))
            require_sound(reader, entry)


def secret_contents(config: Config) -> dict[str, bytes]:
    """Return the round's secrets, by their names in a backup."""
    folder = config.round.directory.absolute()
    return {escaped(path.relative_to(folder).as_posix()): path.read_bytes() for path in sorted(_secret_files(config))}


def _secret_files(config: Config) -> set[Path]:
    """Return the files to be sealed: the round's secrets, and all other keys in its folder, such as of local nodes."""
    folder = config.round.directory.absolute()
    named = {path for name in SECRET for path in ((folder / name).iterdir() if name == "keys" else [folder / name])}
    others = {*folder.rglob("*.key"), config.round.tls_key.absolute()}
    return {path for path in named | others if path.is_file() and path.is_relative_to(folder)}


def without_password(folder: Path) -> bytes:
    """Return the settings with which the round runs, without the database's password."""
    resolved = json.loads((folder / "resolved.json").read_text())
    if url := resolved["store"]["url"]:
        resolved["store"]["url"] = sa.make_url(url).set(password=None).render_as_string()
    return json.dumps(resolved, indent=2).encode()


@contextmanager
def _only_backup(folder: Path) -> Iterator[None]:
    """Allow one backup of a round at a time."""
    with full_disk_named(folder), open_private(folder / "backup.lock") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise ConfigInvalid("Another backup of this round is running.", hint="Wait until it ends.") from None
        yield


@contextmanager
def _staging(folder: Path, target: Path) -> Iterator[_Staged]:
    """Yield a folder where the round's files can get a second name, with a place for the store beside the target."""
    beside, place = target.with_name(f".{target.name}.staged"), folder / ".backup"
    try:
        for left in (beside, place):  # by a killed backup
            shutil.rmtree(left, ignore_errors=True)
        target.parent.mkdir(parents=True, exist_ok=True)
        if lacks_room_for_names(folder):
            place = beside / "files"
        make_folder(beside)
        make_folder(place)
        yield _Staged(place, beside / "store")
    finally:
        for used in (beside, place):
            shutil.rmtree(used, ignore_errors=True)


def lacks_room_for_names(folder: Path) -> bool:
    """Return True if the round's disk may have no room for second names of its files."""
    return shutil.disk_usage(folder).free < ROOM_FOR_NAMES_BYTES


def check_store(where: Path) -> None:
    """Raise an error if a restored store contradicts its ledger."""
    with closing(Database(where, any_schema=True)) as opened:
        if differences := opened.run_now(store.rebuild):
            raise BackupInvalid(f"The restored store contradicts its ledger in {len(differences)} places.")


CHECKPOINTS = "checkpoints"

LEARNER_NOT_SAVED = (CHECKPOINTS, "publishing", "taking", "ranks", "retracting", "current", "offered")
"""Names in the learner's folder that are held here, or created again when needed."""


def hold_checkpoint(checkpoints: Path, place: Path) -> dict[str, Path]:
    """Hold the newest checkpoint in `place`; return its files by name, none before the first checkpoint."""
    from coordinator.learner import checkpoint  # torch

    held = checkpoint.hold_newest(checkpoints, place)
    if held is None:
        return {}
    _require_readable(held, checkpoints / held.name)
    return {f"{held.name}/{file.name}": file for file in sorted(held.iterdir())}


def _require_readable(held: Path, path: Path) -> None:
    from coordinator.learner import checkpoint

    try:
        checkpoint.require_whole(held)
    except ConfigInvalid as error:
        raise BackupInvalid(
            f"The learner's checkpoint {path} cannot be read. No backup was made. ({error})",
            hint="Keep older backups. Try again after the next version, which makes a new checkpoint.",
        ) from error
