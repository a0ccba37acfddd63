"""Opening of a round: its folder, lock, keys, books, and the settings that its history allows.

- Opening an existing folder continues that round; opening an empty one creates keys, store and the operator's deposit.
- A coordinator that leads touches its lock every second. A process that finds the lock free knows since when the round
  has had no leader, whatever ended it.
- Every root is in the log before the leader signs or serves under it; if the files are not those that the log names,
  nothing is signed. Static copies and processes beside may show a new root earlier, until the next launch.
- Other users of the machine cannot read the round's folder, except the files that are served from it.
- Settings on which batches, versions, leases or the ledger depend cannot change after the first launch. Until then,
  what depends on them is made again at every opening.
- The problems of a round that was not launched yet are copied aside, and the longest prompts are checked against the
  model's positions. The round's folder is made after that, and the copy gets its place in one step.
"""

import fcntl
import json
import logging
import os
import secrets
from collections.abc import Collection
from contextlib import ExitStack
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import IO

import sqlalchemy as sa

from coordinator.base.files import (
    PUBLIC,
    close_to_others,
    make_folder,
    move_durably,
    nearest_folder,
    open_private,
    sync,
    unwritable_named,
    write_durably,
)
from coordinator.config import Config, fixed
from coordinator.learner import start
from coordinator.publishing.signed_metadata import SignedMetadata, utc_now
from coordinator.store.facts import ROUND_ID, Fact, get_fact, set_fact
from coordinator.tasks.import_child import prepare
from coordinator.tasks.importing import copy_digest, needs_data
from coordinator.tasks.kinds import FOLDER
from coordinator.tasks.prompt_room import prompt_too_long
from coordinator.tasks.task import open_task
from coordinator.transactions import lottery
from coordinator.transactions.lottery import AuditTerms
from ledger import store
from ledger.entry import Deposit, Root
from ledger.fsck import Difference
from ledger.tables import entries_table
from protocol.errors import ConfigInvalid
from protocol.policy import chunks, root_document

log = logging.getLogger(__name__)

LOCK = "coordinator.lock"

OPENING = "opening"
"""The reference of the deposit that `init` makes."""

PROBLEMS = Fact("problems", "")
"""The fact with the digest of the round's copy of its problems."""

RESTORED = "restored.json"
"""File with the time of the backup; it exists until the first launch after a restore."""

NUMBERS_PER_S = 10
"""Documents are signed far less often, so numbers after the restore are above all numbers before it."""


def only_coordinator(folder: Path) -> IO[str]:
    """Lock the round for one coordinator: two would sign the same version numbers."""
    with unwritable_named(folder):
        make_folder(folder, public=True)
        lock = open_private(folder / LOCK)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        lock.close()
        raise ConfigInvalid(
            f"A coordinator is running in {folder}.", hint="Stop it, or choose another round.directory."
        ) from None
    return lock


def led_until_ms(folder: Path) -> int | None:
    """Return the time at which the last coordinator stopped; None while one is running."""
    try:
        with only_coordinator(folder):
            return touched_ms(folder)
    except ConfigInvalid:  # it is running, or may be: another user's round
        return None


def touched_ms(folder: Path) -> int:
    """Return the time at which a coordinator last touched the lock; now, in a new round."""
    return int((folder / LOCK).stat().st_mtime * 1000)


def touch(folder: Path, moment_ms: int | None = None) -> None:
    """Touch the lock: this coordinator still leads, or led until `moment_ms`."""
    (folder / LOCK).touch()
    if moment_ms is not None:
        os.utime(folder / LOCK, (moment_ms / 1000, moment_ms / 1000))


def lead(config: Config) -> IO[str]:
    """Become the round's only leader, with settings that its history allows."""
    folder = config.round.directory
    _require_fixed(config)
    with ExitStack() as held:
        copy, is_draft = None, not fixed.was_launched(folder)
        if is_draft:
            start.require_usable(config.model)
            copy = _checked_copy(config, held)
        lock = only_coordinator(folder)
        try:
            if is_draft and not (folder / fixed.DRAFT).exists():
                write_durably(folder / fixed.DRAFT, b"")
            if closed := close_to_others(folder):
                log.info("closed to other users of this machine: %s (not %s)", ", ".join(closed), ", ".join(PUBLIC))
            if copy:
                move_durably(copy, folder / FOLDER)
            prepare(config, anew=False)
            write_durably(folder / fixed.RESOLVED, config.model_dump_json(indent=2).encode())
        except BaseException:  # raised again
            lock.close()
            raise
    return lock


def mark_launched(folder: Path) -> None:
    """Fix the settings: from now on, the round has a history."""
    (folder / fixed.DRAFT).unlink(missing_ok=True)
    sync(folder)


def _checked_copy(config: Config, held: ExitStack) -> Path | None:
    """Copy a new round's problems aside, and refuse a prompt that is too long; return the copy's folder, if any.

    The copy is next to the round's folder, so that it can be moved, until `held` ends.
    """
    beside = nearest_folder(config.round.directory)
    with unwritable_named(config.round.directory):
        aside = Path(held.enter_context(TemporaryDirectory(dir=beside, prefix=".problems-")))
    copied = config.model_copy(update={"round": config.round.model_copy(update={"directory": aside})})
    prepare(copied, anew=True)
    try:
        read_file = start.text_reader(config)
    except ConfigInvalid as error:
        log.warning("The lengths of the prompts are not checked: %s", error.message)
    else:
        start.require_text(config.model, read_file)
        if long := prompt_too_long(copied, open_task(copied), read_file):
            raise ConfigInvalid(f"{long.place} is too long. {long.message}", hint=long.next_step)
    return aside / FOLDER if needs_data(config) else None


def _require_fixed(config: Config) -> None:
    """Reject changes of the settings on which the history of a launched round depends; name all of them."""
    changed = fixed.changes(config)
    if changed:
        said = ", ".join(f"{change.path} = {change.was}, not {change.wanted}" for change in changed)
        raise ConfigInvalid(
            f"The round in {config.round.directory} was launched with {said}.",
            hint="Keep the old values, or give the new round another round.directory.",
        )


def led_as(config: Config, roots: int) -> str:
    """Return a digest of what all processes of a round must share: every setting, and the number of roots."""
    return chunks.digest(f"{roots} {config.model_dump_json()}".encode())


def open_metadata(config: Config, folder: Path, *, leads: bool) -> SignedMetadata:
    """Open the signed documents; create them for a new round, and again for a draft whose unit has changed."""
    keys, metadata = folder / "keys", folder / "metadata"
    lifetime_s = config.publish.timestamp_lifetime_s
    if leads and not fixed.was_launched(folder):
        _forget_other_unit(config, metadata)
    if leads and not (metadata / "timestamp.json").exists():
        return SignedMetadata.create(keys, metadata, lifetime_s, utc_now(), unit=config.round.money)
    return SignedMetadata(keys, metadata, lifetime_s)


def _forget_other_unit(config: Config, metadata: Path) -> None:
    """Delete the documents of a draft that name another unit than the settings: the join string names it, too."""
    first = metadata / "1.root.json"
    if not first.exists() or root_document.unit_of(first.read_bytes()) == config.round.money:
        return
    log.warning(
        "round.unit or round.unit_decimals has changed: the round gets new keys and another join string. "
        "Forget the earlier string, and keep the new keys/root.pem offline."
    )
    draft = metadata.parent / fixed.DRAFT
    write_durably(draft, draft.read_bytes() + f"{root_document.fingerprint(first.read_bytes())}\n".encode())
    (metadata / "timestamp.json").unlink(missing_ok=True)  # first: without it, the documents are created again
    for path in metadata.glob("*.json"):
        path.unlink()


def require_resumption(metadata: SignedMetadata, folder: Path) -> None:
    """Reject a round that resumes after a gap until its root keys have signed the gap."""
    mark = folder / RESTORED
    number = int(json.loads(mark.read_text()).get("root_version", 0)) if mark.exists() else 0
    if metadata.root().version < number:
        raise ConfigInvalid(
            f"The log of this round resumes after a gap, but root {number}, which declares the gap, lacks signatures.",
            hint="Have holders of root keys `keys sign` a copy of pending.root.json, then `keys install` it.",
        )


def mend_metadata(metadata: SignedMetadata, folder: Path) -> None:
    """Sign again what the newest root's keys have not signed; after a restore, under higher numbers than before."""
    metadata.mend(utc_now())
    mark = folder / RESTORED
    if mark.exists():
        made_ms = int(json.loads(mark.read_text())["made_ms"])
        now = utc_now()
        metadata.leap(_numbers_since(made_ms, int(1000 * now.timestamp())), now)
        mark.unlink()


def _numbers_since(made_ms: int, now_ms: int) -> int:
    """Return the increase of the documents' numbers at the first launch after a restore."""
    return max(0, now_ms - made_ms) * NUMBERS_PER_S // 1000 + NUMBERS_PER_S


def open_token(folder: Path) -> str:
    path = folder / "operator.token"
    _make_secret(path)
    return path.read_text()


def open_notify_key(folder: Path) -> bytes:
    """Return the key that signs messages to the operator's webhook; the first call makes it."""
    path = folder / "notify.key"
    _make_secret(path)
    return path.read_text().strip().encode()


def audit_terms(config: Config, folder: Path) -> AuditTerms:
    """Return the terms of audits; create their master key with the round."""
    path = folder / "keys" / "audit.key"
    _make_secret(path)
    return AuditTerms(bytes.fromhex(path.read_text()), config.audit)


def _make_secret(path: Path) -> None:
    if not path.exists():
        write_durably(path, secrets.token_hex(32).encode())


def open_books(
    connection: sa.Connection,
    round_id: str,
    budget_micros: int,
    moment_ms: int,
    *,
    is_draft: bool = False,
    earlier: Collection[str] = (),
) -> None:
    """Bind the store to this round, or check that it is bound to it.

    The books of a draft begin again if its budget has changed, or its id: `earlier` are the ids that it had.
    """
    owner = get_fact(connection, ROUND_ID)
    is_ours = is_draft and owner in (round_id, *earlier)
    if is_ours and not (owner == round_id and _opened_with(connection) == budget_micros):
        store.begin_again(connection)
        lottery.forget_epochs(connection)
        owner = ""
    if owner not in ("", round_id):
        raise ConfigInvalid(
            f"The store at store.url belongs to round {owner[:16]}…, but metadata/1.root.json to another round.",
            hint="Use a separate database for each round. If this database is right, restore that file from a backup.",
        )
    if not owner:
        set_fact(connection, ROUND_ID, round_id)
    if budget_micros:
        store.append(connection, Deposit(reference=OPENING, amount_micros=budget_micros), moment_ms)


def require_books(connection: sa.Connection, where: Path | str) -> None:
    """Refuse an empty store in a launched round: its log would begin a second time, under the same keys."""
    has_entries = connection.execute(sa.select(entries_table.c.effect).limit(1)).first() is not None
    if not has_entries and not get_fact(connection, ROUND_ID):
        name = where if isinstance(where, Path) else "the database at store.url"
        raise ConfigInvalid(
            f"The round was launched before, and its store is empty: {name}.",
            hint="Restore the last backup into a new folder with `swarm-coordinator restore`. A new round needs "
            "another round.directory.",
        )


def _opened_with(connection: sa.Connection) -> int:
    """Return the opening deposit; 0 if there is none."""
    stmt = sa.select(entries_table.c.body).where(entries_table.c.effect == f"deposit:{OPENING}")
    body: bytes | None = connection.execute(stmt).scalar()
    return Deposit.from_bytes(body).amount_micros if body else 0


def log_roots(connection: sa.Connection, metadata: SignedMetadata, moment_ms: int) -> None:
    """Append every served root that is not in the log yet; raise an error if a logged root differs from its file."""
    for other in root_differences(connection, metadata):
        raise ConfigInvalid(
            f"{other.where} is missing, or differs from the file that the round's log names.",
            hint="Restore it from a backup. With a different file, readers would detect keys replaced in secret.",
        )
    roots = [Root.from_document(number, document) for number, document in enumerate(metadata.roots(), 1)]
    store.append_all(connection, roots, moment_ms)


def root_differences(connection: sa.Connection, metadata: SignedMetadata) -> list[Difference]:
    """Return the logged roots whose files are missing or different, with the BLAKE3 digests (`b3sum`) of both."""
    cols, differences = entries_table.c, []
    for number in count(1):
        logged: bytes | None = connection.execute(sa.select(cols.body).where(cols.effect == f"root:{number}")).scalar()
        if logged is None:  # they are appended in order
            break
        expected, name = Root.from_bytes(logged).root_digest, f"{number}.root.json"
        document = metadata.read(name)
        digest = chunks.digest(document) if document is not None else "nothing"
        if digest != expected:
            differences.append(Difference(f"metadata/{name}", expected, digest))
    return differences


def open_problems(connection: sa.Connection, config: Config, *, is_draft: bool = False) -> None:
    """Bind the store to the round's copy of its problems, or check that it is the same copy."""
    if not needs_data(config):
        return
    folder = config.round.directory / FOLDER
    digest, began_with = copy_digest(folder), get_fact(connection, PROBLEMS)
    if began_with not in ("", digest) and not is_draft:
        raise ConfigInvalid(
            f"The problems in {folder} differ from those of the round's start: {digest[:16]}…, not {began_with[:16]}….",
            hint="Restore that folder from a backup, or delete it and restore the old source. "
            "For new problems, use another round.directory.",
        )
    if began_with != digest:
        set_fact(connection, PROBLEMS, digest)
