"""`swarm-coordinator restore --take-over`: a round goes on from a copy that may lack the last published entries.

1. What was published beyond the copy is known by checkpoints: those that the operator names, and those at the old
   address, in the old folder. Without any, the copy is continued as it is.
2. The missing entries are read wherever the operator named more than a checkpoint: a folder of `swarm-node ledger
   verify --save`, or an address that serves the log's files. They are compared with the signed root.
3. They cannot be put back: an entry stands for rows of the store (a claim's rollout, a payout's batch) that no reader
   has. So the log is resumed after a gap, if the operator says so: the next root document names the entries that were
   kept and a new ledger key (`ledger.gaps`). Root keys sign it, here or elsewhere (`keys sign`, `keys install`).
4. Until that document is installed, the round is not launched.
"""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import sqlalchemy as sa

from coordinator.base.files import write_durably
from coordinator.publishing import rotation
from coordinator.publishing.role_keys import RoleKeys
from coordinator.publishing.signed_metadata import SignedMetadata, utc_now
from coordinator.service.backup import forks
from coordinator.service.backup.archive import BackupInvalid
from coordinator.service.backup.forks import SeenCheckpoint
from ledger import store, tiles, tree
from ledger.entry import Entry, parse
from ledger.tiles import TILE_HASHES, Tile, tile_of
from ledger.tree import leaf_hash
from protocol.errors import NotFound, SwarmError

SHOWN = 20
"""Missing entries that are printed; the file has them all."""


def missing_entries(connection: sa.Connection, sources: Sequence[str], newest: SeenCheckpoint) -> list[Entry] | None:
    """(2) The published entries that a copy lacks, from the first of some sources that has them; else None."""
    for source in sources:
        try:
            bodies = _bodies(source, store.size(connection), newest.checkpoint.size)
        except (SwarmError, OSError):
            continue
        if _root_with(connection, bodies) == newest.checkpoint.root:
            return [parse(body) for body in bodies]
    return None


def described(first: int, lost_size: int, entries: list[Entry] | None) -> str:
    """The missing entries in words."""
    count = lost_size - first
    said = f"Entries {first} to {lost_size - 1} of the ledger ({count}) were published, and this copy lacks them."
    if entries is None:
        return (
            f"{said} Nobody who was named has them: name a folder of `swarm-node ledger verify --save` with --seen, if "
            "there is one."
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
    """(3) The next root's number, and how many signatures it still needs; with enough of them it is installed."""
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
    """The entries of a log's public files from an index on."""
    found: list[bytes] = []
    for number in range(start // TILE_HASHES, -(-end // TILE_HASHES)):
        bundle = tile_of(Tile.BUNDLE, number, end)
        try:
            bodies = tiles.unbundle(_file(source, bundle), bundle.width)
        except NotFound:  # it has grown since
            bodies = tiles.unbundle(_file(source, Tile(Tile.BUNDLE, number)), TILE_HASHES)[: bundle.width]
        found += bodies[max(0, start - bundle.first) :]
    return found


def _file(source: str, tile: Tile) -> bytes:
    path = f"ledger/tile/{tile.name}"
    if source.startswith(("http://", "https://")):
        data = forks.get(f"{source.rstrip('/')}/v1/{path}")
    else:
        place = Path(source) / path
        data = place.read_bytes() if place.is_file() else None
    if data is None:
        raise NotFound(f"{source} has no {path}.")
    return data


def _root_with(connection: sa.Connection, bodies: Sequence[bytes]) -> bytes:
    """The root of the copy's log with more entries behind it; nothing is written."""
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
    """What a take-over ends with where the operator has not decided for a gap."""
    return BackupInvalid(
        f"{said}\nTo sign other entries in their place would be a second history, which every node can prove.",
        hint="Use a newer copy if there is one. Else say --after-gap, with --root-keys: the root keys sign, for "
        "everybody to see, that the log goes on without these entries.",
    )
