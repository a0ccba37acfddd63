"""`swarm-coordinator restore`: create a round from a backup, in a new folder and, for PostgreSQL, a new database.

- Everything is read and verified before anything is written; the folder gets its name only when it is complete.
- No file is overwritten. A backup is rejected if anything newer was published after it
  (`coordinator.service.backup.forks`).
- If only the store was copied, as before an upgrade, the rest comes from the round's folder that contains the copy.
- The settings file names the new folder, so that no command works on the old one. Leases get the time that they had
  when the backup was made.
- The next launch signs the trust documents under higher numbers: nodes know documents signed after the backup, and
  accept no older ones.
"""

import json
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import sqlalchemy as sa

from coordinator.base.files import close_to_others, full_disk_named, write_durably
from coordinator.config import Config, fixed
from coordinator.config.reading import with_values
from coordinator.service import opening
from coordinator.service.backup import database, forks, taking_over
from coordinator.service.backup.archive import (
    SEALED,
    ArchiveReader,
    BackupInvalid,
    Contents,
    discard,
    plain,
    reading,
    require_sound,
    unseal,
)
from coordinator.service.backup.making import NOT_SAVED, check_store, newest_document
from coordinator.service.backup.store_copy import assemble, is_copied
from coordinator.store import schema
from coordinator.store.facts import ROUND_ID, get_fact
from coordinator.transactions.policy_versions import newest_version
from ledger import store
from ledger.gaps import Keys
from protocol.errors import ConfigInvalid
from protocol.policy import root_document

Tell = Callable[[str, int, int], None]

PIECE_BYTES = 2**20


MISSING = "missing-entries.jsonl"
"""File with the published entries that a take-over left out, if a source had them."""


@dataclass(frozen=True)
class TakeOver:
    """The operator's decision about a copy that may lack published entries."""

    after_gap: bool = False
    root_keys: tuple[Path, ...] = ()


@dataclass(frozen=True)
class Restored:
    """The result of a restore."""

    contents: Contents
    ledger_size: int
    version: int
    missing: str = ""
    """Description of the published entries that are missing."""
    gap_root: int = 0
    """Number of the root document that declares the gap; 0 if nothing is missing."""
    signatures_missing: int = 0
    """Number of signatures of root keys that this document still needs."""


def describe(source: Path) -> Contents:
    """Return the list of a backup's contents."""
    with reading(source) as reader:
        return Contents.read(reader)


def restore(
    source: Path,
    folder: Path,
    *,
    store_url: str,
    passphrase: str | None,
    seen: Sequence[str],
    nothing_newer: bool,
    tell: Tell,
    take_over: TakeOver | None = None,
) -> Restored:
    """Create a round from a backup; `seen` names newer checkpoints, or `nothing_newer` confirms that there are none."""
    partial = folder.with_name(f".{folder.name}.partial")
    _require_room(folder)
    with reading(source) as reader, full_disk_named(folder.parent):
        contents = Contents.read(reader)
        _require_usable(contents, store_url, seen, nothing_newer)
        try:
            _unpack(reader, contents, partial, tell)
            if contents.keys == "sealed":  # before any of the rest is used
                _unseal(reader, contents, partial, passphrase)
            if contents.folder == "as it is":
                _take_along(source, contents, partial, tell)
            before = fixed.load_resolved(partial)
            config = _resolve(partial, folder, store_url)
            keys = forks.keys_of(contents.round_id, partial / "metadata")
            known = _published(partial, before, keys, seen, take_over)
            if not (take_over or is_copied(entry.name for entry in contents.files)):
                forks.refuse_what_is_newer(known, contents.ledger_size)
            where = _place_store(partial, contents, config, tell)
            with database.opened(where) as connection:
                made = _continued(partial, connection, contents, known, seen, take_over)
                _record_restore(connection, contents, made)
            shutil.rmtree(partial / "store", ignore_errors=True)
            mark = {"made_ms": contents.made_ms, "root_version": made.gap_root}
            # An existing mark is of a round that was restored and not launched since.
            if made.gap_root or not (partial / opening.RESTORED).exists():
                write_durably(partial / opening.RESTORED, json.dumps(mark).encode())
            opening.touch(partial, contents.made_ms)
            close_to_others(partial)
            partial.chmod(0o755)
            partial.rename(folder)
        except BaseException:
            discard(partial)
            raise
    return made


def _require_room(folder: Path) -> None:
    if folder.exists():
        raise ConfigInvalid(f"{folder} exists already and is not overwritten.", hint="Choose a new folder.")
    folder.parent.mkdir(parents=True, exist_ok=True)
    discard(folder.with_name(f".{folder.name}.partial"))


def _require_usable(contents: Contents, store_url: str, seen: Sequence[str], nothing_newer: bool) -> None:
    schema.require_known(contents.schema_number)
    if (contents.database == "postgresql") != bool(store_url):
        raise ConfigInvalid(
            f"This backup is of a round on {contents.database}.",
            hint="Give an empty PostgreSQL with --store-url." if not store_url else "Omit --store-url.",
        )
    if not (seen or nothing_newer):
        raise BackupInvalid(
            f"This backup has {contents.ledger_size} entries. If the coordinator signed more after it, continuing from "
            "here would sign a second history of them, which every node can prove.",
            hint="Give the newest checkpoint with --seen (seen.msgpack of a node's home, or a checkpoint file), or "
            "confirm with --nothing-newer that the coordinator has not run since.",
        )


def _unpack(reader: ArchiveReader, contents: Contents, partial: Path, tell: Tell) -> None:
    """Verify all files of a backup, then write those of the round's folder."""
    for number, entry in enumerate(contents.files):
        tell("verifying", number, len(contents.files))
        require_sound(reader, entry)
    partial.mkdir(mode=0o700)
    for number, entry in enumerate(contents.files):
        tell("unpacking", number, len(contents.files))
        top, _, inner = entry.name.partition("/")
        if top in ("folder", "store") and inner:
            _copy(reader, entry.name, partial / plain(inner if top == "folder" else entry.name))
    (partial / "operator.toml").unlink(missing_ok=True)  # in older backups of a restored round
    _copy(reader, "operator.toml", partial / "operator.toml")


def _copy(reader: ArchiveReader, name: str, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    with reader.open(name) as source, target.open("xb") as file:
        shutil.copyfileobj(source, file, PIECE_BYTES)


def _take_along(copy: Path, contents: Contents, partial: Path, tell: Tell) -> None:
    """Copy the rest of a stopped round whose store alone was copied into its `backups`."""
    folder = copy.absolute().parent.parent
    root = folder / "metadata" / "1.root.json"
    if not root.is_file() or root_document.fingerprint(root.read_bytes()) != contents.round_id:
        raise BackupInvalid(
            f"{copy} is a copy of the store alone, but {folder} is not the folder of its round.",
            hint="Put the copy back into backups/ of the round's folder, where `upgrade` created it.",
        )
    tell("copying the round's folder", 0, 1)
    with opening.only_coordinator(folder):
        shutil.copytree(folder, partial, ignore=_not_taken(folder), dirs_exist_ok=True)
    if (version := newest_document(partial)) > contents.version:
        raise BackupInvalid(
            f"Version {version} was published after this copy was made; the copy ends with version {contents.version}.",
            hint=forks.WHAT_TO_DO,
        )


def _not_taken(folder: Path) -> Callable[[str, list[str]], set[str]]:
    """Return a filter for names in a round's folder that are created again, or come from the copy."""
    made_again = {*NOT_SAVED} - {"resolved.json", "uploads"}

    def ignore(place: str, names: list[str]) -> set[str]:
        at_top = Path(place) == folder
        return {name for name in names if at_top and (name in made_again or name.startswith((".", database.FILE)))}

    return ignore


def _resolve(partial: Path, folder: Path, store_url: str) -> Config:
    """Write and return the round's settings, with its new folder and store."""
    table = json.loads((partial / "resolved.json").read_text())
    table["round"]["directory"] = str(folder.absolute())
    table["store"]["url"] = store_url
    config = Config.model_validate(table)
    write_durably(partial / "resolved.json", config.model_dump_json(indent=2).encode())
    settings = {"round.directory": str(folder.absolute()), **({"store.url": store_url} if store_url else {})}
    changed = with_values((partial / "operator.toml").read_text(encoding="utf-8"), settings)
    if changed is not None:
        write_durably(partial / "operator.toml", changed.encode())
    return config


def _published(
    partial: Path, before: Config, keys: Keys, seen: Sequence[str], take_over: TakeOver | None
) -> list[forks.SeenCheckpoint]:
    """Return the known published checkpoints; raise an error if the coordinator is running."""
    forks.refuse_company(before, keys)
    if not (take_over and take_over.after_gap):
        forks.refuse_newer_origins(before, partial / "metadata")
    return [*forks.named_sources(seen, keys), *forks.left_behind(before, keys)]


def _place_store(partial: Path, contents: Contents, config: Config, tell: Tell) -> Path | str:
    """Put the store in its place for the round, and return this place."""
    place = partial / "store"
    if is_copied(entry.name for entry in contents.files):
        assemble(place, partial / database.FILE)
    elif config.store.url:
        if place.exists():
            database.load(place, config.store.url, tell)
        with database.opened(config.store.url) as connection:  # PostgreSQL's own replication may have copied it
            if schema.stored_number(connection) is None:
                raise ConfigInvalid("The database at --store-url is empty.", hint="Give the promoted replica.")
        return config.store.url
    else:
        (place / database.FILE).rename(partial / database.FILE)
    check_store(partial / database.FILE)
    return partial / database.FILE


def _continued(
    partial: Path,
    connection: sa.Connection,
    contents: Contents,
    known: list[forks.SeenCheckpoint],
    seen: Sequence[str],
    take_over: TakeOver | None,
) -> Restored:
    """Check that the log continues the published one; else list the missing entries, and prepare a gap on request."""
    size, version = store.size(connection), newest_version(connection).version
    if get_fact(connection, ROUND_ID) != contents.round_id:
        raise ConfigInvalid("The database at --store-url belongs to another round.", hint="Give the promoted standby.")
    if (signed := newest_document(partial)) < version:
        raise BackupInvalid(
            f"The store has version {version}, but the copy of the round's folder ends with version {signed}.",
            hint="Use the copy with the latest finished pass; `backup --follow` keeps both consistent.",
        )
    forks.require_continued(connection, known)
    newest = forks.newest(known, size)
    if newest is None:
        return Restored(contents, size, version)
    if not take_over:
        forks.refuse_what_is_newer(known, size)
    entries = taking_over.missing_entries(connection, seen, newest)
    said = taking_over.described(size, newest.checkpoint.size, entries)
    if not (take_over and take_over.after_gap):
        raise taking_over.refuse(said)
    if entries is not None:
        taking_over.write_missing(partial / MISSING, size, entries)
    number, signatures = taking_over.prepare_gap(partial, connection, newest.checkpoint.size, take_over.root_keys)
    return Restored(contents, size, version, said, number, signatures)


def _unseal(reader: ArchiveReader, contents: Contents, partial: Path, passphrase: str | None) -> None:
    if passphrase is None:
        raise ConfigInvalid("The keys of this backup are sealed.", hint="Give the passphrase with --passphrase-file.")
    with reader.open(SEALED) as file:
        secrets = unseal(file.read(), passphrase, contents.digest())
    for name, data in secrets.items():
        write_durably(partial / plain(name), data)


def _record_restore(connection: sa.Connection, contents: Contents, made: Restored) -> None:
    """Record the restore in the round's history; a store of an older schema has no table for it."""
    if contents.schema_number == schema.SCHEMA:
        from coordinator.transactions import orders

        connection.exec_driver_sql("BEGIN")
        moment_ms = time.time_ns() // 1_000_000
        gap = f"; root {made.gap_root} resumes the log after a gap" if made.gap_root else ""
        reason = f"from a copy of {made.ledger_size} entries{gap}"
        orders.record(connection, "restore", "round", reason, now_ms=moment_ms)
        connection.exec_driver_sql("COMMIT")
