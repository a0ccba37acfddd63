"""Reader of the ledger's public files, from a coordinator or from a saved folder.

- The reader verifies nothing: callers verify checkpoints, and compare tiles and entries with a signed root.
- The files have the same names below a coordinator's `/v1` and in a folder.
- A file that the server refuses for load is requested `BUSY_TRIES` times, each after the time in Retry-After.
- A partial file may have been replaced by the full one; then the full one is cut.
"""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Protocol, runtime_checkable

import trio

from ledger import tiles
from ledger.note import NOTE_MAX_BYTES
from ledger.proof import ReceiptsRequest
from ledger.tiles import BUNDLE_MAX_BYTES, TILE_BYTES, TILE_HASHES, Tile, tile_of, tile_with
from ledger.tree import HASH_BYTES, HashOf, Subtree
from ledger.witness import WITNESSES_MAX, Cosigned
from protocol import limits
from protocol.errors import NotFound, Overloaded
from swarm_node.base.disk import write_durably

LEADERBOARD_MAX_BYTES = 64 * limits.MIB
"""100,000 nodes, about 500 bytes each."""

DRAWS_MAX_BYTES = 64 * limits.MIB
"""About 80 bytes per claim; an epoch has 256 claims, or all that came after a round's end."""

COSIGNED_MAX_BYTES = WITNESSES_MAX * NOTE_MAX_BYTES + limits.KIB

BUSY_TRIES = 5
"""A proof takes several files, and a busy server may refuse each: to begin anew for one of them would add load."""

BUSY_PAUSE_S = 2.0
"""The shortest pause before a refused file is requested again."""


NO_TILES: Mapping[Tile, bytes] = {}


class PublicFiles(Protocol):
    """Source of public files."""

    async def file(self, path: str, max_bytes: int) -> bytes | None: ...


@runtime_checkable
class AnsweringServer(Protocol):
    """Source that also answers requests, as a coordinator does and a folder does not."""

    async def post(self, path: str, content: bytes, max_bytes: int) -> bytes | None: ...


class Folder:
    """Public files saved in a folder."""

    def __init__(self, path: Path) -> None:
        self._path = path

    async def file(self, path: str, max_bytes: int) -> bytes | None:
        file_path = self._path / path
        if not file_path.is_file() or file_path.stat().st_size > max_bytes:
            return None
        return await trio.to_thread.run_sync(file_path.read_bytes)


class Saving:
    """Public files from another source, saved while they are read."""

    def __init__(self, files: PublicFiles, path: Path) -> None:
        self._files = files
        self._path = path

    async def file(self, path: str, max_bytes: int) -> bytes | None:
        data = await self._files.file(path, max_bytes)
        if data is not None:
            target = self._path / path
            target.parent.mkdir(parents=True, exist_ok=True)
            await trio.to_thread.run_sync(lambda: write_durably(target, data, temp_folder=self._path))
        return data


class LogReader:
    """Reader of one log."""

    def __init__(self, files: PublicFiles) -> None:
        self._files = files
        self.grows = not isinstance(files, Folder)
        """True if missing files may still appear."""

    async def roots(self, known: tuple[bytes, ...] = ()) -> tuple[bytes, ...]:
        """Return the chain of root documents that are published now."""
        roots = list(known)
        while len(roots) < limits.ROOT_ROTATIONS_MAX:
            data = await self._file(f"metadata/{len(roots) + 1}.root.json", limits.METADATA_MAX_BYTES)
            if data is None:
                break
            roots.append(data)
        if not roots:
            raise NotFound("There is no root document.", hint="Check that this address is a coordinator.")
        return tuple(roots)

    async def checkpoint(self) -> bytes:
        return await self._need("ledger/checkpoint", NOTE_MAX_BYTES)

    async def cosigned(self) -> tuple[bytes, ...]:
        """Return the notes that the round's witnesses have signed; empty if the coordinator serves none."""
        data = await self._file("ledger/cosigned", COSIGNED_MAX_BYTES)
        return Cosigned.from_bytes(data).notes if data else ()

    async def leaderboard(self) -> bytes:
        return await self._need("leaderboard", LEADERBOARD_MAX_BYTES)

    async def draws(self, epoch: int) -> bytes:
        """Return the list of a revealed epoch."""
        return await self._need(f"audits/{epoch}", DRAWS_MAX_BYTES)

    async def receipt(self, claim_id: str) -> bytes:
        return await self._need(f"receipts/{claim_id}", limits.MESSAGE_MAX_BYTES)

    async def receipts(self, claims: Sequence[str]) -> bytes | None:
        """Return the receipts of many claims; None if the coordinator cannot answer such a request."""
        if not isinstance(self._files, AnsweringServer):
            return None
        request = ReceiptsRequest(claims=tuple(claims)).to_bytes()
        return await self._files.post("receipts", request, limits.MESSAGE_MAX_BYTES)

    async def hashes(self, nodes: Iterable[Subtree], size: int, own: Mapping[Tile, bytes] = NO_TILES) -> HashOf:
        """Fetch the tiles of these tree nodes, except the caller's `own`; return the lookup of their hashes."""
        wanted = dict.fromkeys(tile_with(node, size) for node in nodes)
        fetched = {tile: own[tile] if tile in own else await self._tile(tile) for tile in wanted}
        return tiles.hashes_in(size, fetched.__getitem__)

    async def entries(self, number: int, size: int) -> list[bytes]:
        """Return the entries of bundle `number` in a log of `size` entries."""
        bundle = tile_of(Tile.BUNDLE, number, size)
        full = Tile(Tile.BUNDLE, number)
        data = await self._file(f"ledger/tile/{bundle.name}", BUNDLE_MAX_BYTES)
        if data is not None or bundle == full:
            return tiles.unbundle(data or b"", bundle.width)
        return tiles.unbundle(await self._need(f"ledger/tile/{full.name}", BUNDLE_MAX_BYTES), TILE_HASHES)[
            : bundle.width
        ]

    async def _tile(self, tile: Tile) -> bytes:
        data = await self._file(f"ledger/tile/{tile.name}", TILE_BYTES)
        if data is None:
            data = await self._need(f"ledger/tile/{Tile(tile.level, tile.number).name}", TILE_BYTES)
        return data[: tile.width * HASH_BYTES]

    async def _file(self, path: str, max_bytes: int) -> bytes | None:
        for _ in range(BUSY_TRIES - 1):
            try:
                return await self._files.file(path, max_bytes)
            except Overloaded as error:
                await trio.sleep(max(error.retry_after_s, BUSY_PAUSE_S))
        return await self._files.file(path, max_bytes)

    async def _need(self, path: str, max_bytes: int) -> bytes:
        data = await self._file(path, max_bytes)
        if data is None:
            raise NotFound(f"There is no {path}.")
        return data
