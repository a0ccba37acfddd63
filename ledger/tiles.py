"""The log as static files in the format of C2SP tlog-tiles: hash tiles, entry bundles, their names and tree nodes.

- A hash tile of level L has up to 256 hashes of nodes of level 8·L, a bundle the entries below a tile of level 0.
  Each hash takes 32 bytes; each entry is preceded by its length in two bytes, high byte first.
- A full file never changes. The last one of a level is partial: a prefix of the full file, with its width in its name.
- A name is `<level>/<number>[.p/<width>]`, for bundles `entries/<number>[.p/<width>]`; the number is written in groups
  of three digits, all but the last with an `x`: 1234067 is `x001/x234/067`.
- Only `grown` builds tiles: from the leaves to add it computes the tiles with new content.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Self

from ledger.tree import HASH_BYTES, TREE_SIZE_MAX, Hash, Subtree, inner_hash
from protocol.errors import NotFound, ProofInvalid

LEVELS_PER_TILE = 8
TILE_HASHES = 1 << LEVELS_PER_TILE
TILE_BYTES = TILE_HASHES * HASH_BYTES

BUNDLE_MAX_BYTES = TILE_HASHES * (2 + 65_535)

_NAME = re.compile(r"(entries|0|[1-9]\d?)/((?:x\d{3}/){0,6}\d{3})(?:\.p/([1-9]\d{0,2}))?", re.ASCII)


@dataclass(frozen=True, slots=True)
class Tile:
    """A file of the log; a bundle is the tile of level -1."""

    level: int
    number: int
    width: int = TILE_HASHES

    BUNDLE = -1

    @property
    def name(self) -> str:
        """The path of the tile below the tiles' address."""
        groups = [f"{self.number % 1000:03}"]
        rest = self.number // 1000
        while rest:
            groups.insert(0, f"x{rest % 1000:03}")
            rest //= 1000
        shelf = "entries" if self.level == Tile.BUNDLE else str(self.level)
        partial = "" if self.width == TILE_HASHES else f".p/{self.width}"
        return f"{shelf}/{'/'.join(groups)}{partial}"

    @property
    def first(self) -> int:
        """The index of its first hash or entry."""
        return self.number * TILE_HASHES

    @classmethod
    def parse(cls, name: str) -> Self:
        """Return the tile of a name; each tile has one name, and tiles beyond the largest tree have none."""
        match = _NAME.fullmatch(name)
        if match:
            level = Tile.BUNDLE if match[1] == "entries" else int(match[1])
            tile = cls(level, int(re.sub(r"[x/]", "", match[2])), int(match[3] or TILE_HASHES))
            if tile.name == name and tile.first < TREE_SIZE_MAX:
                return tile
        raise NotFound(f"{name[:80]!r} is not the name of a tile.")


def tile_of(level: int, number: int, size: int) -> Tile:
    """Return a tile with its width in a tree of `size` leaves."""
    hashes = size >> (LEVELS_PER_TILE * max(level, 0))
    return Tile(level, number, min(TILE_HASHES, hashes - number * TILE_HASHES))


def tile_with(node: Subtree, size: int) -> Tile:
    """Return the tile from which a node of a tree of `size` leaves is computed."""
    level, height = divmod(node.level, LEVELS_PER_TILE)
    return tile_of(level, node.index >> (LEVELS_PER_TILE - height), size)


def node_in(tile: bytes, node: Subtree) -> Hash:
    """Return a node's hash, from the hashes of its tile."""
    height = node.level % LEVELS_PER_TILE
    first = (node.index << height) % TILE_HASHES
    hashes = _hashes(tile[first * HASH_BYTES : (first + (1 << height)) * HASH_BYTES])
    if len(hashes) != 1 << height:
        raise ProofInvalid(f"The tile ends before node {node.index} of level {node.level}.")
    return _root(hashes)


def hashes_in(size: int, read: Callable[[Tile], bytes]) -> Callable[[Subtree], Hash]:
    """Return a function that computes node hashes for `ledger.tree` from tiles; each tile is read once."""
    seen: dict[Tile, bytes] = {}

    def hash_of(node: Subtree) -> Hash:
        tile = tile_with(node, size)
        if tile not in seen:
            seen[tile] = read(tile)
        return node_in(seen[tile], node)

    return hash_of


def grown(size: int, leaves: Sequence[Hash], read: Callable[[Tile], bytes]) -> Iterator[tuple[Tile, bytes]]:
    """Yield every tile that changes when leaves are added to a tree of `size`, with its content; lower levels first.

    The last tile of a level is read if it is partial; the root of a full tile is added to the level above.
    """
    level, hashes = 0, leaves
    while hashes:
        count = size >> (LEVELS_PER_TILE * level)
        number = count // TILE_HASHES
        before = read(Tile(level, number, count % TILE_HASHES)) if count % TILE_HASHES else b""
        data, full = before + b"".join(hashes), []
        for start in range(0, len(data), TILE_BYTES):
            piece = data[start : start + TILE_BYTES]
            yield Tile(level, number, len(piece) // HASH_BYTES), piece
            if len(piece) == TILE_BYTES:
                full.append(_root(_hashes(piece)))
            number += 1
        level, hashes = level + 1, full


def bundle(entries: Iterable[bytes]) -> bytes:
    """Return the bundle file of some entries."""
    return b"".join(len(entry).to_bytes(2) + entry for entry in entries)


def unbundle(data: bytes, width: int) -> list[bytes]:
    """Return the entries of a bundle file, which must have exactly `width`."""
    entries: list[bytes] = []
    position = 0
    while position < len(data) and len(entries) < width:
        end = position + 2 + int.from_bytes(data[position : position + 2])
        entries.append(data[position + 2 : end])
        position = end
    if len(entries) != width or position != len(data):
        raise ProofInvalid(f"The bundle does not have exactly {width} entries.")
    return entries


def _hashes(data: bytes) -> list[Hash]:
    return [Hash(data[start : start + HASH_BYTES]) for start in range(0, len(data), HASH_BYTES)]


def _root(hashes: list[Hash]) -> Hash:
    """Return the root of a perfect subtree with these leaves."""
    while len(hashes) > 1:
        hashes = [inner_hash(left, right) for left, right in zip(hashes[::2], hashes[1::2], strict=True)]
    return hashes[0]
