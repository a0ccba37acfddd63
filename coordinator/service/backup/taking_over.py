"""`swarm-coordinator restore --take-over`: continue a round from a copy that may lack the last published entries.

1. Checkpoints show what was published beyond the copy: those that the operator gives, and those at the old address and
   in the old folder. If none is beyond the copy, the copy is continued as it is.
2. The missing entries are read from the sources that have more than a checkpoint: a folder of `swarm-node ledger verify
   --save`, or an address that serves the log's files. They are compared with the signed root.
3. They cannot be restored: an entry stands for rows of the store (a claim's rollout, a payout's batch) that no reader
   has. So the log resumes after a gap, if the operator decides so: the next root document names the kept entries and a
   new ledger key (`ledger.gaps`). Root keys sign it, here or elsewhere (`keys sign`, `keys install`).
4. The round cannot be launched until that document is installed.
"""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import sqlalchemy as sa

from coordinator.base.files import write_durably
from coordinator.publishing import rotation
from coordinator.publishing.signed_metadata import RoleKeys, SignedMetadata, utc_now
from coordinator.service.backup import forks
from coordinator.service.backup.archive import BackupInvalid
from coordinator.service.backup.forks import SeenCheckpoint
from ledger import store, tiles, tree
from ledger.entry import Entry, parse
from ledger.tiles import TILE_HASHES, Tile, tile_of
from ledger.tree import leaf_hash
from protocol.errors import NotFound, SwarmError

SHOWN = 20
"""Limit of missing entries that are printed; the file has all."""


def missing_entries(connection: sa.Connection, sources: Sequence[str], newest: SeenCheckpoint) -> list[Entry] | None:
    """Return the missing entries from the first of `sources` that has them; None if none has (step 2)."""
    for source in sources:
        try:
            bodies = _bodies(source, store.size(connection), newest.checkpoint.size)
        except (SwarmError, OSError):
            continue
        if _root_with(connection, bodies) == newest.checkpoint.root:
            return [parse(body) for body in bodies]
    return None


def described(first: int, lost_size: int, entries: list[Entry] | None) -> str:
    """Return a description of the missing entries."""
    count = lost_size - first
    said = f"Entries {first} to {lost_size - 1} of the ledger ({count}) were published, and this copy lacks them."
    if entries is None:
        return (
            f"{said} No given source has them. If there is a folder of `swarm-node ledger verify --save`, give it with "
            "--seen."
        )
    kinds = ", ".join(f"{count} {kind}" for kind, count in sorted(Counter(entry.kind for entry in entries).items()))
    lines = [f"  {index} {_line(entry)}" for index, entry in enumerate(entries[:SHOWN], first)]
    rest = f"\n  and {len(entries) - SHOWN} more" if len(entries) > SHOWN else ""
    return f"{said} They are: {kinds}.\n" + "\n".join(lines) + rest


def write_missing(path: Path, first: int, entries: Sequence[Entry]) -> None:
    """Write the missing entries as JSON, one a line."""
    lines = [json.dumps({"index": index} | _plain(entry.model_dump())) for index, entry in enumerate(entries, first)]
    write_durably(path, "".join(f"{line}\n" for line in lines).encode())


def prepare_gap(folder: Path, connection: sa.Connection, lost_size: int, root_keys: Sequence[Path]) -> tuple[int, int]:
    """Prepare the next root, and install it if it has enough signatures (step 3).

    Return its number, and the number of signatures that it still needs.
    """
    metadata = SignedMetadata(folder / "keys", folder / "metadata", 0.0)
    keys = RoleKeys(folder / "keys", root_keys)
    size = store.size(connection)
    gap: Mapping[str, int | str] = {
        "size": size,
        "root": store.root_at(connection, size).hex(),
        "lost_size": lost_size,
    }
    number = metadata.root().version + 1
    data = rotation.prepare_resumption(metadata, keys, gap, utc_now())
    missing = rotation.missing_signatures(metadata, data)
    if missing:
        write_durably(folder / rotation.PENDING, data)
    else:
        rotation.install(metadata, keys, data, utc_now())
    return number, missing


def _bodies(source: str, start: int, end: int) -> list[bytes]:
    """Return the entries of a log's public files from index `start` to `end`."""
    entries: list[bytes] = []
    for number in range(start // TILE_HASHES, -(-end // TILE_HASHES)):
        bundle = tile_of(Tile.BUNDLE, number, end)
        try:
            bodies = tiles.unbundle(_file(source, bundle), bundle.width)
        except NotFound:  # the bundle has grown since
            bodies = tiles.unbundle(_file(source, Tile(Tile.BUNDLE, number)), TILE_HASHES)[: bundle.width]
        entries += bodies[max(0, start - bundle.first) :]
    return entries


def _file(source: str, tile: Tile) -> bytes:
    path = f"ledger/tile/{tile.name}"
    if source.startswith(("http://", "https://")):
        data = forks.get(f"{source.rstrip('/')}/v1/{path}")
    else:
        place = Path(source) / path
        data = place.read_bytes() if place.is_file() else None
    if data is None:
        raise NotFound(f"{source} has no file {path}.")
    return data


def _root_with(connection: sa.Connection, bodies: Sequence[bytes]) -> bytes:
    """Return the root of the copy's log with `bodies` appended, without writing anything."""
    size = store.size(connection)
    grown: dict[tuple[int, int], bytes] = {}

    def read(tile: Tile) -> bytes:
        if (tile.level, tile.number) in grown:
            return grown[tile.level, tile.number]
        return store.read_file(connection, tile)

    for tile, data in tiles.grown(
        size, [leaf_hash(body) for body in bodies], lambda tile: store.read_file(connection, tile)
    ):
        grown[tile.level, tile.number] = data
    return tree.root(size + len(bodies), tiles.hashes_in(size + len(bodies), read))


def _line(entry: Entry) -> str:
    fields = _plain(entry.model_dump(exclude={"kind"}))
    return f"{entry.kind}: " + ", ".join(f"{name} {value}" for name, value in fields.items())


def _plain(fields: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value.hex() if isinstance(value, bytes) else value for name, value in fields.items()}


def refuse(said: str) -> BackupInvalid:
    """Return the error of a take-over without the operator's decision for a gap."""
    return BackupInvalid(
        f"{said}\nSigning other entries in their place would create a second history, which every node can prove.",
        hint="Use a newer copy if there is one. Otherwise give --after-gap with --root-keys: the root keys then sign "
        "publicly that the log continues without these entries.",
    )
