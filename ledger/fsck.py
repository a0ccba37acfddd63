"""The check of a store's tables against its entries: fold all entries again, grow the tree again, and compare.

- The module is pure: `store.rebuild` passes the rows.
- Every difference is reported, none is repaired: a person decides which side is right.
- Entries are read one at a time; only the folded book and the tree's hashes are in memory.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from ledger import book, note, tree
from ledger.book import BookBroken, EntryOutcome
from ledger.checkpoint import Checkpoint
from ledger.entry import Entry, parse
from ledger.tiles import Tile, grown, hashes_in
from ledger.tree import Hash, leaf_hash
from protocol.errors import SwarmError
from protocol.policy import chunks


@dataclass(frozen=True, slots=True)
class Difference:
    """A difference between a table and the values that follow from the entries, or from an entry's own bytes."""

    where: str
    expected: str
    found: str


@dataclass(frozen=True, slots=True)
class StoredEntry:
    """A row of the log, not yet verified."""

    index: int
    content_hash: str
    effect: str
    kind: str
    body: bytes
    recorded_ms: int


@dataclass(frozen=True)
class KeptTables:
    """The tables that a store keeps beside its log."""

    balances: Mapping[str, int]
    claims: Mapping[str, tuple[object, ...]]
    tiles: Mapping[Tile, bytes]
    signed: tuple[int, bytes, bytes] | None
    """Size, root and note of the last checkpoint."""


def differences(size: int, stored: Iterable[StoredEntry], kept: KeptTables) -> list[Difference]:
    """Return all differences in a store: in its log of `size` entries, and in the tables beside it."""
    result: list[Difference] = []
    leaves: list[Hash] = []
    try:
        state, refused = book.fold(_readable(size, stored, leaves, result))
        book.check(state)
    except BookBroken as error:
        return [*result, Difference("fold of the entries", "conservation", str(error))]
    result += [
        Difference(f"entry {index}", EntryOutcome.APPLIED.value, outcome.value) for index, outcome in refused.items()
    ]
    result += _compare("account", {str(account): micros for account, micros in state.balances.items()}, kept.balances)
    result += _compare("claim", {claim_id: tuple(claim) for claim_id, claim in state.claims.items()}, kept.claims)
    return result + _tree_differences(leaves, kept)


def _tree_differences(leaves: list[Hash], kept: KeptTables) -> list[Difference]:
    """Return the differences of the tiles and the signed checkpoint from a tree over these leaves."""
    expected = dict(grown(0, leaves, lambda tile: b""))
    result = list(_compare("tile", _digests(expected), _digests(kept.tiles)))
    if kept.signed:
        size, signed, data = kept.signed
        root = tree.root(size, hashes_in(len(leaves), expected.__getitem__)) if size <= len(leaves) else b""
        if root != signed:
            result.append(Difference(f"checkpoint of {size} entries", root.hex(), signed.hex()))
        result += _note_differences(size, signed, data)
    return result


def _note_differences(size: int, root: bytes, data: bytes) -> Iterator[Difference]:
    """Yield a difference if the served note is not of the signed checkpoint; its signature is checked elsewhere."""
    try:
        said = note.parse(data).text
    except SwarmError as error:
        said = str(error)
    expected = Checkpoint(said.partition("\n")[0], size, root).text
    if said != expected:
        yield Difference("checkpoint's note", repr(expected), repr(said))


def _digests(kept: Mapping[Tile, bytes]) -> dict[str, str]:
    return {tile.name: chunks.digest(data) for tile, data in kept.items()}


def _readable(
    size: int, stored: Iterable[StoredEntry], leaves: list[Hash], result: list[Difference]
) -> Iterator[tuple[int, Entry]]:
    """Yield every readable entry; record those that are missing, unreadable, or different from their row."""
    expected = 0
    for row in stored:
        if row.index != expected:
            result.append(Difference("index", str(expected), str(row.index)))
        expected = row.index + 1
        leaves.append(leaf_hash(row.body))
        try:
            entry = parse(row.body)
        except SwarmError as error:
            result.append(Difference(f"entry {row.index}", "the bytes of a ledger entry", str(error)))
            continue
        follows = (chunks.digest(row.body), entry.effect, entry.kind)
        if follows != (row.content_hash, row.effect, row.kind):
            result.append(Difference(f"entry {row.index}", str(follows), str((row.content_hash, row.effect, row.kind))))
        yield row.index, entry
    if expected != size:
        result.append(Difference("head", str(expected), str(size)))


def _compare(what: str, expected: Mapping[str, object], kept: Mapping[str, object]) -> Iterator[Difference]:
    for name in sorted(expected.keys() | kept.keys()):
        if expected.get(name) != kept.get(name):
            yield Difference(f"{what} {name}", str(expected.get(name)), str(kept.get(name)))
