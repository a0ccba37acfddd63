"""Protection against forks: a backup must not be restored if anything was signed after it.

Nodes keep the newest checkpoint that they saw, and require that every later one continues it. A round restored from
before it would sign different entries in place of the published ones: a fork, of which nodes hold the proof. The only
way to continue is a gap that the root keys sign (`coordinator.service.backup.taking_over`).

- All possible sources are checked: the coordinator's own address, the original folder of the backup, the origins.
- A file that contains a checkpoint, as in each node's home, counts if the ledger's key has signed the checkpoint.
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
    "Use a newer backup, or the original folder of the round. If there is none, `restore --take-over` lists the "
    "missing entries, and can continue after a gap that the root keys sign."
)


@dataclass(frozen=True)
class SeenCheckpoint:
    """A checkpoint, and the source that holds it."""

    where: str
    checkpoint: Checkpoint


def keys_of(round_id: str, metadata: Path) -> Keys:
    """Return all keys that the ledger ever had, from a folder of root documents."""
    roots = sorted(metadata.glob("*.root.json"), key=lambda path: int(path.name.partition(".")[0]))
    return Keys([path.read_bytes() for path in roots], round_id)


def checkpoints_in(data: bytes, where: str, keys: Keys) -> Iterator[SeenCheckpoint]:
    """Yield the signed checkpoints of a round anywhere in `data`, without those that an earlier gap removed."""
    name = re.escape(keys.newest_first[0].name.encode())
    note = re.compile(rb"%s\n[0-9]{1,19}\n[A-Za-z0-9+/=]{44}\n\n(?:\xe2\x80\x94 [^\n ]+ [A-Za-z0-9+/=]+\n)+" % name)
    for match in note.finditer(data):
        try:
            yield SeenCheckpoint(where, keys.counts_as(match[0]))
        except SwarmError:  # not signed by this ledger's key
            continue


def named_sources(sources: Sequence[str], keys: Keys) -> list[SeenCheckpoint]:
    """Return the checkpoints in the operator's sources: files, folders of `ledger verify --save`, or addresses."""
    checkpoints = []
    for source in sources:
        if source.startswith(("http://", "https://")):
            data = get(f"{source.rstrip('/')}/v1/ledger/checkpoint") or b""
        else:
            path = Path(source)
            data = _read(path / "ledger" / "checkpoint" if path.is_dir() else path)
        seen = list(checkpoints_in(data, source, keys))
        if not seen:
            raise BackupInvalid(f"{source} contains no checkpoint signed by this round's ledger.")
        checkpoints += seen
    return checkpoints


def newest(seen: Sequence[SeenCheckpoint], ledger_size: int) -> SeenCheckpoint | None:
    """Return the largest checkpoint above `ledger_size` entries; None if there is none."""
    beyond = [candidate for candidate in seen if candidate.checkpoint.size > ledger_size]
    return max(beyond, key=lambda candidate: candidate.checkpoint.size, default=None)


def refuse_what_is_newer(seen: Sequence[SeenCheckpoint], ledger_size: int) -> None:
    if newer := newest(seen, ledger_size):
        raise BackupInvalid(
            f"{newer.where} has seen {newer.checkpoint.size} entries of the ledger, and this backup has {ledger_size}: "
            "continuing from it would sign a second history.",
            hint=WHAT_TO_DO,
        )


def refuse_company(config: Config, keys: Keys) -> None:
    """Raise an error if a coordinator answers at the round's address: two would sign two histories."""
    url = config.round.public_url or f"http://{config.round.listen}"
    if list(checkpoints_in(get(f"{url.rstrip('/')}/v1/ledger/checkpoint") or b"", url, keys)):
        raise BackupInvalid(
            f"The coordinator of this round still answers at {url}.", hint="Stop it, then make a new backup."
        )


def left_behind(config: Config, keys: Keys) -> list[SeenCheckpoint]:
    """Return the last checkpoint in the original folder of the round, if it is on this machine."""
    path = config.round.directory / "state.db"
    if config.store.url or not path.is_file():
        return []
    with suppress(sa.exc.DatabaseError), opened(path) as connection:  # a damaged store has no checkpoint
        return list(checkpoints_in(store.checkpoint(connection) or b"", str(config.round.directory), keys))
    return []


def refuse_newer_origins(config: Config, metadata: Path) -> None:
    """Raise an error if an origin has a newer snapshot than the backup: it was published after the backup."""
    restored = _snapshot((metadata / "timestamp.json").read_bytes())
    for url in config.publish.origins:
        published = _snapshot(get(f"{url.rstrip('/')}/{document_path('timestamp.json')}") or b"")
        if published > restored:
            raise BackupInvalid(
                f"{url} has versions published after this backup (snapshot {published}; the backup has {restored}).",
                hint=WHAT_TO_DO,
            )


def require_continued(connection: sa.Connection, seen: Sequence[SeenCheckpoint]) -> None:
    """Raise an error if the store's log contradicts a checkpoint in `seen`."""
    size = store.size(connection)
    for known in seen:
        if known.checkpoint.size <= size and store.root_at(connection, known.checkpoint.size) != known.checkpoint.root:
            raise BackupInvalid(f"{known.where} has seen a different history of this ledger than the backup.")


def _snapshot(timestamp: bytes) -> int:
    """Return the number of the snapshot in a timestamp document; 0 if the document is not valid."""
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
