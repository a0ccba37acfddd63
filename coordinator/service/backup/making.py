"""`swarm-coordinator backup`: a running round saved, and the result read again.

1. The learner's files, its newest checkpoint as a whole, get a second name (a hard link) in a folder of this backup, so
   that they stay as they are.
2. The store is held as it is at one moment, and right after it so are the trust documents' timestamp, chunks and
   uploads: all that a publication replaces or deletes. If a version was published in between, both are held anew:
   a document must not name what the store does not know. It is a matter of milliseconds, so publication goes on.
3. The store is copied as it was at that moment, however long that takes.
4. All else of the round's folder gets a second name, too, but for logs and older backups; of documents that were signed
   meanwhile the timestamp knows nothing.
5. Everything is written out, read again, and gets its name.
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

from coordinator.base.files import make_folder, open_private
from coordinator.config import Config
from coordinator.publishing.signed_metadata import SignedMetadata
from coordinator.service.backup import database, training
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
from coordinator.store.state import Database, get_fact
from coordinator.transactions.policy_versions import newest_version
from ledger import store
from protocol.errors import ConfigInvalid
from protocol.policy.manifest import version_of

Tell = Callable[[str, int, int], None]

ATTEMPTS = 100
"""A version is published every few minutes, and holding a moment takes milliseconds."""

PAUSE_S = 0.05
"""Between two attempts: a publication that is under way gets on."""

SECRET = ("keys", "operator.token", "evm.key")
"""What is sealed, or left out."""

NOT_SAVED = (
    "logs", "backups", "public", "resolved.json", "coordinator.lock", "payouts.lock", "backup.lock",
    "standby.lock", "standby.json", "operator.toml",
)  # fmt: skip
"""Made again by a launch, or of no use to it; `resolved.json` is saved without its password, and `operator.toml`, which
a restored round has in its folder, as the settings file of the backup."""

FIRST = "learner"
"""Saved before the store: a checkpoint must not be ahead of its round."""

MOVING = ("metadata/timestamp.json", "blobs", "uploads")
"""What a publication replaces or deletes; all else that it writes has a name for ever."""


@dataclass
class StoreState:
    """What the copied store says of itself."""

    round_id: str = ""
    schema: int = 0
    ledger_size: int = 0
    checkpoint: bytes = b""
    version: int = 0
    differences: int = 0
    taken_ms: int = 0
    """When it was copied; 0: when the backup is described."""

    def look_closely(self, connection: sa.Connection) -> None:
        """Its ledger, too."""
        self.look(connection)
        self.differences = len(store.rebuild(connection, locked=False))

    def look(self, connection: sa.Connection) -> None:
        self.schema = _schema_of(connection)
        self.round_id = get_fact(connection, "round_id", "")
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
    """Files under their names in the backup."""

    folder: Path
    files: dict[str, Path] = field(default_factory=dict)

    def keep(self, name: str, path: Path) -> None:
        """Hold on to a file as it is now; one that is gone meanwhile was not needed."""
        held = self.folder / secrets.token_hex(8)
        with suppress(FileNotFoundError):
            training.second_name(path, held)
            self.files[name] = held


def make(config: Config, config_file: Path, target: Path, *, passphrase: str | None, tell: Tell) -> Contents:
    """Save a round, which may be running; without a passphrase its keys are left out."""
    folder = config.round.directory
    if not (folder / "resolved.json").exists():
        raise ConfigInvalid(f"There is no round in {folder}.", hint="Make one with `swarm-coordinator init`.")
    if target.exists():
        raise ConfigInvalid(f"{target} exists.", hint="Name a new file or folder.")
    with _staging(folder) as staged:
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
    """Save the store alone, of whatever schema, of a round that is stopped; the rest of its folder stays as it is."""
    snapshot, place = StoreState(), "store"
    with writing(target) as (writer, partial):
        database.save(config.state, partial / place, tell, snapshot.look)
        entries = [described(partial, f"{place}/{escaped(path.name)}") for path in sorted((partial / place).iterdir())]
        entries.append(_add(writer, "operator.toml", config_file.read_bytes()))
        contents = snapshot.contents(config, keys="left out", folder="as it is", files=tuple(entries))
        _add(writer, CONTENTS, contents.model_dump_json(indent=1).encode())
    partial.rename(target)
    return contents


def _capture(config: Config, staged: _Staged, tell: Tell) -> StoreState:
    """(1) to (4)"""
    folder = config.round.directory
    secret = _secret_files(config)
    checkpoint = training.hold_checkpoint(folder / FIRST / training.FOLDER, staged.folder / training.FOLDER)
    staged.files |= {f"folder/{FIRST}/{training.FOLDER}/{name}": path for name, path in checkpoint.items()}
    for path in sorted((folder / FIRST).glob("*")):
        if path.name not in training.NOT_SAVED:
            _keep_all(staged, folder, path, but=secret)
    snapshot = StoreState()
    with _moment(config, staged, secret) as store_then:
        place = staged.folder / "store"
        database.copy(store_then, place, tell, snapshot.look_closely)
    if snapshot.differences:
        raise BackupInvalid(
            f"The store contradicts its ledger in {snapshot.differences} places: nothing is saved.",
            hint="`swarm-coordinator fsck` names them; keep older backups.",
        )
    staged.files |= {f"store/{path.name}": path for path in sorted(place.iterdir())}
    for path in sorted(folder.iterdir()):
        if not path.name.startswith((".", database.FILE)) and path.name not in (*NOT_SAVED, *SECRET, FIRST, *MOVING):
            _keep_all(staged, folder, path, but=secret)
    return snapshot


@contextmanager
def _moment(config: Config, staged: _Staged, secret: Set[Path]) -> Iterator[sa.Connection]:
    """(2) The store at a moment when nothing was being published, until what belongs to it was held."""
    folder, before = config.round.directory, dict(staged.files)
    for _ in range(ATTEMPTS):
        with database.moment(config.state) as store_then:
            _schema_of(store_then)
            for name in MOVING:
                _keep_all(staged, folder, folder / name, but=secret)
            version, _ = newest_version(store_then)
            if newest_document(folder) == version:
                yield store_then
                return
        staged.files = dict(before)
        time.sleep(PAUSE_S)
    raise BackupInvalid(
        f"A version was published at each of {ATTEMPTS} attempts, before its files could be held.",
        hint="Publish less often, or put the round on a file system with hard links: elsewhere files are copied first.",
    )


def _schema_of(connection: sa.Connection) -> int:
    there = schema.stored_number(connection)
    if there is None:
        raise ConfigInvalid("The store is empty: there is nothing to save.")
    return there


def _keep_all(staged: _Staged, folder: Path, path: Path, *, but: Set[Path]) -> None:
    """A file, or everything below a folder that is whole: what has a dot in front, or is new, is not finished.

    What is held already stays as it was then.
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
    """Every file; folders that are deleted meanwhile have none."""

    def failed(error: OSError) -> None:
        if not isinstance(error, FileNotFoundError):
            raise error

    for place, _, names in os.walk(folder, onerror=failed):
        yield from (Path(place, name) for name in names)


def newest_document(folder: Path) -> int:
    """The newest version that the signed documents of a round name."""
    metadata = SignedMetadata(folder / "keys", folder / "metadata", 0.0)
    return max((version_of(name) or 0 for name in metadata.targets()), default=0)


def _written(writer: Writer, staged: _Staged, tell: Tell) -> Iterator[Entry]:
    """(5) Every file that is held."""
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
    """The round's secrets, by their names in a backup."""
    folder = config.round.directory.absolute()
    return {escaped(path.relative_to(folder).as_posix()): path.read_bytes() for path in sorted(_secret_files(config))}


def _secret_files(config: Config) -> set[Path]:
    """What is sealed: the round's own secrets, and every other key in its folder, as of the operator's own nodes."""
    folder = config.round.directory.absolute()
    named = {path for name in SECRET for path in ((folder / name).iterdir() if name == "keys" else [folder / name])}
    others = {*folder.rglob("*.key"), config.round.tls_key.absolute()}
    return {path for path in named | others if path.is_file() and path.is_relative_to(folder)}


def without_password(folder: Path) -> bytes:
    """The settings that the round runs with; the database's password is nobody's business."""
    resolved = json.loads((folder / "resolved.json").read_text())
    if url := resolved["store"]["url"]:
        resolved["store"]["url"] = sa.make_url(url).set(password=None).render_as_string()
    return json.dumps(resolved, indent=2).encode()


@contextmanager
def _staging(folder: Path) -> Iterator[_Staged]:
    """A folder on the round's own file system, where files can have a second name; one backup at a time."""
    with open_private(folder / "backup.lock") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise ConfigInvalid("Another backup of this round is being made.", hint="Wait for it.") from None
        place = folder / ".backup"
        shutil.rmtree(place, ignore_errors=True)  # of one that was killed
        make_folder(place)
        try:
            yield _Staged(place)
        finally:
            shutil.rmtree(place, ignore_errors=True)


def check_store(where: Path) -> None:
    """Refuse a restored file whose ledger does not add up."""
    with closing(Database(where, any_schema=True)) as opened:
        if differences := opened.run_now(store.rebuild):
            raise BackupInvalid(f"The restored store contradicts its ledger in {len(differences)} places.")
