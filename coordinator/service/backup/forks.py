"""Has anything been signed since a backup? Then nobody may go on from it.

Nodes keep the newest checkpoint that they saw, and demand that every later one continues it. A round that is brought
back from before would sign other entries in the place of those that were published: a fork, and nodes hold its proof.
The one way on is a gap that the root keys sign (`coordinator.service.backup.taking_over`).

- Whoever might know is asked: the coordinator's own address, the folder that the backup was made of, the origins.
- A file with a checkpoint in it, as each node's home has one, is believed as far as the ledger's key has signed it.
- The program cannot detect every newer checkpoint, so the operator names the newest one or confirms there is none.
"""

import json
import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import httpx
import sqlalchemy as sa

from coordinator.config import Config
from coordinator.service.backup.archive import BackupInvalid
from coordinator.service.backup.database import opened
from ledger import store
from ledger.checkpoint import Checkpoint
from ledger.gaps import Keys
from protocol.errors import SwarmError
from protocol.policy.origin import document_path

ASK_S = 5.0
FILE_MAX_BYTES = 2**26

WHAT_TO_DO = (
    "Take a newer backup, or the folder that it was made of. If there is none, `restore --take-over` lists what is "
    "missing, and can go on after a gap that the root keys sign."
)


@dataclass(frozen=True)
class SeenCheckpoint:
    """A checkpoint that somebody holds."""

    where: str
    checkpoint: Checkpoint


def keys_of(round_id: str, metadata: Path) -> Keys:
    """Every key that the ledger ever had, by a folder of root documents."""
    roots = sorted(metadata.glob("*.root.json"), key=lambda path: int(path.name.partition(".")[0]))
    return Keys([path.read_bytes() for path in roots], round_id)


def checkpoints_in(data: bytes, where: str, keys: Keys) -> Iterator[SeenCheckpoint]:
    """The signed checkpoints of a round that stand anywhere in a file; what an earlier gap took does not count."""
    name = re.escape(keys.newest_first[0].name.encode())
    note = re.compile(rb"%s\n[0-9]{1,19}\n[A-Za-z0-9+/=]{44}\n\n(?:\xe2\x80\x94 [^\n ]+ [A-Za-z0-9+/=]+\n)+" % name)
    for found in note.finditer(data):
        try:
            yield SeenCheckpoint(where, keys.counts_as(found[0]))
        except SwarmError:  # not by this ledger's key, and so nobody's word
            continue


def named_sources(sources: Sequence[str], keys: Keys) -> list[SeenCheckpoint]:
    """Sources that the operator names: files, folders of `ledger verify --save`, and addresses of coordinators."""
    found = []
    for source in sources:
        if source.startswith(("http://", "https://")):
            data = get(f"{source.rstrip('/')}/v1/ledger/checkpoint") or b""
        else:
            path = Path(source)
            data = _read(path / "ledger" / "checkpoint" if path.is_dir() else path)
        seen = list(checkpoints_in(data, source, keys))
        if not seen:
            raise BackupInvalid(f"{source} holds no checkpoint that this round's ledger has signed.")
        found += seen
    return found


def newest(seen: Sequence[SeenCheckpoint], ledger_size: int) -> SeenCheckpoint | None:
    """The longest log that was published beyond so many entries."""
    beyond = [one for one in seen if one.checkpoint.size > ledger_size]
    return max(beyond, key=lambda one: one.checkpoint.size, default=None)


def refuse_what_is_newer(seen: Sequence[SeenCheckpoint], ledger_size: int) -> None:
    if one := newest(seen, ledger_size):
        raise BackupInvalid(
            f"{one.where} has seen {one.checkpoint.size} entries of the ledger, and this backup has {ledger_size}: "
            "to go on from it would sign a second history.",
            hint=WHAT_TO_DO,
        )


def refuse_company(config: Config, keys: Keys) -> None:
    """Ask at the round's own address: two coordinators would sign two histories at once."""
    url = config.round.public_url or f"http://{config.round.listen}"
    if list(checkpoints_in(get(f"{url.rstrip('/')}/v1/ledger/checkpoint") or b"", url, keys)):
        raise BackupInvalid(
            f"The coordinator of this round still answers at {url}.", hint="Stop it, and take a backup after that."
        )


def left_behind(config: Config, keys: Keys) -> list[SeenCheckpoint]:
    """The last checkpoint in the folder that the backup was made of, if that is on this machine."""
    path = config.round.directory / "state.db"
    if config.store.url or not path.is_file():
        return []
    with suppress(sa.exc.DatabaseError), opened(path) as connection:  # a damaged one knows nothing any more
        return list(checkpoints_in(store.checkpoint(connection) or b"", str(config.round.directory), keys))
    return []


def refuse_newer_origins(config: Config, metadata: Path) -> None:
    """Origins hold what was published: more snapshots than the backup knows of mean versions that it does not know."""
    here = _snapshot((metadata / "timestamp.json").read_bytes())
    for url in config.publish.origins:
        there = _snapshot(get(f"{url.rstrip('/')}/{document_path('timestamp.json')}") or b"")
        if there > here:
            raise BackupInvalid(
                f"{url} has versions that were published after this backup (snapshot {there}, here {here}).",
                hint=WHAT_TO_DO,
            )


def require_continued(connection: sa.Connection, seen: Sequence[SeenCheckpoint]) -> None:
    """The store's log begins with everything that was seen, as far as it reaches."""
    size = store.size(connection)
    for one in seen:
        if one.checkpoint.size <= size and store.root_at(connection, one.checkpoint.size) != one.checkpoint.root:
            raise BackupInvalid(f"{one.where} has seen another history of this ledger than the backup has.")


def _snapshot(timestamp: bytes) -> int:
    """The number of the snapshot that a timestamp names; 0 if it is none."""
    try:
        return int(json.loads(timestamp)["signed"]["meta"]["snapshot.json"]["version"])
    except (ValueError, KeyError, TypeError):
        return 0


def get(url: str) -> bytes | None:
    try:
        response = httpx.get(url, timeout=ASK_S)
    except (httpx.HTTPError, httpx.InvalidURL):
        return None
    return response.content if response.status_code == 200 else None


def _read(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            return file.read(FILE_MAX_BYTES)
    except OSError as error:
        raise BackupInvalid(f"Cannot read {path}: {error.strerror}.") from None
