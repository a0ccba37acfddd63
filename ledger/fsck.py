"""The proof that a store's tables say what its entries say: fold everything again, grow the tree again, and compare.

- Pure: `store.rebuild` brings the rows.
- Every difference is reported, none is repaired: which side is right is for a person to decide.
- Entries are read one at a time; only the folded book and the tree's hashes are held.
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
    """Where a table does not say what the entries, or an entry's own bytes, say it should."""

    where: str
    expected: str
    found: str


@dataclass(frozen=True, slots=True)
class StoredEntry:
    """A row of the log, not yet believed."""

    index: int
    content_hash: str
    effect: str
    kind: str
    body: bytes
    recorded_ms: int


@dataclass(frozen=True)
class KeptTables:
    """What a store keeps beside its log."""

    balances: Mapping[str, int]
    claims: Mapping[str, tuple[object, ...]]
    tiles: Mapping[Tile, bytes]
    signed: tuple[int, bytes, bytes] | None
    """Size, root and note of the last checkpoint."""


def differences(size: int, stored: Iterable[StoredEntry], kept: KeptTables) -> list[Difference]:
    """Everything wrong with a store: its log of so many entries, and what is kept beside it."""
    found: list[Difference] = []
    leaves: list[Hash] = []
    try:
        state, refused = book.fold(_readable(size, stored, leaves, found))
        book.check(state)
    except BookBroken as error:
        return [*found, Difference("fold of the entries", "conservation", str(error))]
    found += [
        Difference(f"entry {index}", EntryOutcome.APPLIED.value, outcome.value) for index, outcome in refused.items()
    ]
    found += _compare("account", {str(account): micros for account, micros in state.balances.items()}, kept.balances)
    found += _compare("claim", {claim_id: tuple(claim) for claim_id, claim in state.claims.items()}, kept.claims)
    return found + _tree_differences(leaves, kept)


def _tree_differences(leaves: list[Hash], kept: KeptTables) -> list[Difference]:
    """Where the tiles or the signed checkpoint are not those of a tree over these leaves."""
    expected = dict(grown(0, leaves, lambda tile: b""))
    found = list(_compare("tile", _digests(expected), _digests(kept.tiles)))
    if kept.signed:
        size, signed, data = kept.signed
        root = tree.root(size, hashes_in(len(leaves), expected.__getitem__)) if size <= len(leaves) else b""
        if root != signed:
            found.append(Difference(f"checkpoint of {size} entries", root.hex(), signed.hex()))
        found += _note_differences(size, signed, data)
    return found


def _note_differences(size: int, root: bytes, data: bytes) -> Iterator[Difference]:
    """Whether the note that is served says what was signed; by whose key is for those to check who know it."""
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
    size: int, stored: Iterable[StoredEntry], leaves: list[Hash], found: list[Difference]
) -> Iterator[tuple[int, Entry]]:
    """Every entry that can be read; notes the ones that are missing, unreadable, or not what their row says."""
    expected = 0
    for row in stored:
        if row.index != expected:
            found.append(Difference("index", str(expected), str(row.index)))
        expected = row.index + 1
        leaves.append(leaf_hash(row.body))
        try:
            entry = parse(row.body)
        except SwarmError as error:
            found.append(Difference(f"entry {row.index}", "the bytes of a ledger entry", str(error)))
            continue
        follows = (chunks.digest(row.body), entry.effect, entry.kind)
        if follows != (row.content_hash, row.effect, row.kind):
            found.append(Difference(f"entry {row.index}", str(follows), str((row.content_hash, row.effect, row.kind))))
        yield row.index, entry
    if expected != size:
        found.append(Difference("head", str(expected), str(size)))


def _compare(what: str, expected: Mapping[str, object], found: Mapping[str, object]) -> Iterator[Difference]:
    for name in sorted(expected.keys() | found.keys()):
        if expected.get(name) != found.get(name):
            yield Difference(f"{what} {name}", str(expected.get(name)), str(found.get(name)))
