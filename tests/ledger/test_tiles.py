"""Tiles and bundles: names, growth in any steps, nodes out of partial files, and files that are wrong."""

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from ledger import tiles, tree
from ledger.tiles import Tile
from ledger.tree import Hash, leaf_hash
from protocol.errors import NotFound, ProofInvalid
from tests.ledger import naive_tree

NAMES = {
    Tile(0, 0): "0/000",
    Tile(0, 999): "0/999",
    Tile(1, 1000): "1/x001/000",
    Tile(0, 1234067): "0/x001/x234/067",
    Tile(2, 5, 17): "2/005.p/17",
    Tile(Tile.BUNDLE, 1234067, 255): "entries/x001/x234/067.p/255",
}
"""The standard's own example among them."""


def hashes(count: int, first: int = 0) -> list[Hash]:
    return [leaf_hash(number.to_bytes(4)) for number in range(first, first + count)]


class Shelf:
    """Tiles as a store keeps them: the widest of each."""

    def __init__(self) -> None:
        self.size = 0
        self.kept: dict[tuple[int, int], bytes] = {}

    def read(self, tile: Tile) -> bytes:
        return self.kept[tile.level, tile.number][: 32 * tile.width]

    def add(self, leaves: list[Hash]) -> None:
        for tile, data in list(tiles.grown(self.size, leaves, self.read)):
            assert len(data) == 32 * tile.width
            self.kept[tile.level, tile.number] = data
        self.size += len(leaves)


@pytest.mark.parametrize(("tile", "name"), NAMES.items(), ids=NAMES.values())
def test_names(tile: Tile, name: str) -> None:
    assert tile.name == name
    assert Tile.parse(name) == tile


@pytest.mark.parametrize(
    "name",
    [
        "", "0", "0/0", "0/0000", "0/1234", "00/000", "-1/000", "0/x000/001", "0/000.p/0", "0/000.p/256", "0/000.p/05",
        "0/000.p/", "0/../000", "entries/x1/000", "tree/000", "0/000\n", "0/٠٠٠", "0/" + "x001/" * 40 + "000",
        "0/" + "x999/" * 6 + "999", "entries/x018/x014/x398/x509/x481/984",
    ],
)  # fmt: skip
def test_other_names_are_refused(name: str) -> None:
    with pytest.raises(NotFound):
        Tile.parse(name)


@settings(max_examples=25, deadline=None)
@given(st.lists(st.integers(0, 700), max_size=5))
@example([256])  # exactly full
@example([255, 1, 1])
@example([65_536, 1])  # a full tile of the second level
def test_tiles_are_the_same_however_the_log_grew(steps: list[int]) -> None:
    shelf, at_once = Shelf(), Shelf()
    for step in steps:
        shelf.add(hashes(step, shelf.size))
    at_once.add(hashes(sum(steps)))
    assert shelf.kept == at_once.kept


@settings(max_examples=15, deadline=None)
@given(size=st.integers(1, 800), later=st.integers(0, 300), data=st.data())
@example(size=513, later=255, data=None)
def test_old_roots_and_proofs_come_out_of_tiles_that_have_grown_since(
    size: int, later: int, data: st.DataObject | None
) -> None:
    shelf = Shelf()
    shelf.add(hashes(size + later))
    entries = [number.to_bytes(4) for number in range(size)]
    hash_of = tiles.hashes_in(size, shelf.read)
    assert tree.root(size, hash_of) == naive_tree.mth(entries)
    index = data.draw(st.integers(0, size - 1)) if data else size - 1
    assert tree.prove(tree.inclusion_ranges(index, size), hash_of) == naive_tree.path(index, entries)


def test_tile_cut_short_is_noticed() -> None:
    with pytest.raises(ProofInvalid, match="ends before"):
        tiles.node_in(bytes(32 * 3), tree.Subtree(1, 1))


@given(st.lists(st.binary(max_size=300), max_size=20))
def test_bundles_read_back(entries: list[bytes]) -> None:
    assert tiles.unbundle(tiles.bundle(entries), len(entries)) == entries


@pytest.mark.parametrize(
    ("data", "width"),
    [(b"", 1), (b"\0", 1), (b"\0\5abc", 1), (b"\0\1ab", 1), (b"\0\1a\0\1b", 1), (b"\0\1a", 2), (bytes(1000), 256)],
)
def test_bundle_with_more_fewer_or_broken_entries_is_refused(data: bytes, width: int) -> None:
    with pytest.raises(ProofInvalid):
        tiles.unbundle(data, width)
