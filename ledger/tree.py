"""The Merkle tree of RFC 6962 over the log: its roots, what proves an entry or a later tree, and the checks of both.

- A leaf's hash is SHA-256 of a zero byte and the entry; an inner one's is SHA-256 of a one byte and both children; the
  empty tree's is SHA-256 of nothing.
- A `Subtree` is a perfect subtree: the leaves from `index << level` on, `1 << level` of them. Once full, it never
  changes.
- Every root and every proof is put together from nodes. Who makes one passes `hash_of`, which knows where these are
  kept: in a store's tiles, in tiles that somebody served, in a list. Which nodes it takes follows from the sizes alone.
- A check computes what the proof would mean and compares; a proof of another length than the sizes ask for is refused
  before anything is hashed.

The ranges of a proof for leaf 2 of 7, from the leaf up, and of the proof that a tree of 3 grew into one of 7:

    inclusion    [3, 4)  [0, 2)  [4, 7)
    consistency  [2, 3)  [3, 4)  [0, 2)  [4, 7)      the first is the seed, the end of the old tree
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import NewType

from protocol.errors import ProofInvalid

Hash = NewType("Hash", bytes)

HASH_BYTES = 32

TREE_SIZE_MAX = 2**62
"""Leaves of a tree: SQL's integers hold it, and a proof has at most 62 hashes."""

EMPTY_ROOT = Hash(sha256().digest())

Range = tuple[int, int]
"""Leaves from the first number up to, but not including, the second."""


@dataclass(frozen=True, slots=True)
class Subtree:
    """A perfect subtree."""

    level: int
    index: int


HashOf = Callable[[Subtree], Hash]


def leaf_hash(entry: bytes) -> Hash:
    return Hash(sha256(b"\0" + entry).digest())


def inner_hash(left: bytes, right: bytes) -> Hash:
    return Hash(sha256(b"\1" + left + right).digest())


def nodes_of(leaves: Range) -> list[Subtree]:
    """The fewest perfect subtrees that make up a range, from left to right."""
    start, end = leaves
    nodes = []
    while start < end:
        level = (end - start).bit_length() - 1
        if start:
            level = min(level, (start & -start).bit_length() - 1)
        nodes.append(Subtree(level, start >> level))
        start += 1 << level
    return nodes


def root(size: int, hash_of: HashOf) -> Hash:
    """The root of the first `size` leaves."""
    return range_root((0, size), hash_of) if size else EMPTY_ROOT


def range_root(leaves: Range, hash_of: HashOf) -> Hash:
    """The root of a range that a split of the tree makes."""
    hashes = [hash_of(node) for node in nodes_of(leaves)]
    found = hashes.pop()
    while hashes:
        found = inner_hash(hashes.pop(), found)
    return found


def inclusion_ranges(index: int, size: int) -> list[Range]:
    """The siblings on the way from a leaf up to the root."""
    if not 0 <= index < size <= TREE_SIZE_MAX:
        raise ProofInvalid(f"A tree of {size} leaves has no leaf {index}.")
    ranges, (start, end) = [], (0, size)
    while end - start > 1:
        middle = start + _split(end - start)
        if index < middle:
            ranges.append((middle, end))
            end = middle
        else:
            ranges.append((start, middle))
            start = middle
    return ranges[::-1]


def consistency_ranges(old: int, new: int) -> list[Range]:
    """What makes up the old root and the new one: the seed, then its siblings on the way up."""
    if not 0 < old <= new <= TREE_SIZE_MAX:
        raise ProofInvalid(f"A tree of {old} leaves has not grown into one of {new}.")
    ranges, (start, end) = [], (0, new)
    while end != old:
        middle = start + _split(end - start)
        if old <= middle:
            ranges.append((middle, end))
            end = middle
        else:
            ranges.append((start, middle))
            start = middle
    return [(start, end), *ranges[::-1]]


def prove(ranges: Iterable[Range], hash_of: HashOf) -> list[Hash]:
    """The proof that consists of these ranges."""
    return [range_root(leaves, hash_of) for leaves in ranges]


def root_by_inclusion(leaf: Hash, index: int, size: int, proof: Sequence[bytes]) -> Hash:
    """The root of a tree that has this leaf there, if the proof is right."""
    found = leaf
    for (start, _), sibling in _paired(inclusion_ranges(index, size), proof):
        found = inner_hash(found, sibling) if start > index else inner_hash(sibling, found)
    return found


def roots_by_consistency(old: int, new: int, seeded: Sequence[bytes]) -> tuple[Hash, Hash]:
    """The roots of the old and the new tree that a proof, with its seed, is made of.

    Whoever finds the right new root has the right old one, too: that of the new tree's first `old` leaves.
    """
    (_, seed), *pairs = _paired(consistency_ranges(old, new), seeded)
    old_root = new_root = Hash(seed)
    for (start, _), sibling in pairs:
        if start >= old:
            new_root = inner_hash(new_root, sibling)
        else:
            old_root, new_root = inner_hash(sibling, old_root), inner_hash(sibling, new_root)
    return old_root, new_root


def without_seed(old: int, new: int, seeded: Sequence[Hash]) -> list[Hash]:
    """The proof as RFC 6962 writes it: where the seed is the old root itself, it is known and left out."""
    return list(seeded[1:] if _seed_is_old_root(old, new) else seeded)


def check_inclusion(entry: bytes, index: int, size: int, root: bytes, proof: Sequence[bytes]) -> None:
    """Refuse a proof that this entry stands there in the tree of this root."""
    if root_by_inclusion(leaf_hash(entry), index, size, proof) != root:
        raise ProofInvalid(f"Entry {index} is not in the tree of {size} entries, or it is another one there.")


def check_consistency(old: int, old_root: bytes, new: int, new_root: bytes, proof: Sequence[bytes]) -> None:
    """Refuse a proof, as RFC 6962 writes it, that the new tree begins with all leaves of the old one."""
    seeded = [old_root, *proof] if _seed_is_old_root(old, new) else proof
    if roots_by_consistency(old, new, seeded) != (old_root, new_root):
        raise ProofInvalid(f"The tree of {new} entries does not begin with the tree of {old}.")


def _seed_is_old_root(old: int, new: int) -> bool:
    return consistency_ranges(old, new)[0] == (0, old)


def _split(count: int) -> int:
    """How many of so many leaves the left child has: the largest power of two that is less."""
    return 1 << ((count - 1).bit_length() - 1)


def _paired(ranges: list[Range], proof: Sequence[bytes]) -> list[tuple[Range, bytes]]:
    if len(proof) != len(ranges) or any(len(item) != HASH_BYTES for item in proof):
        raise ProofInvalid(f"The proof should be {len(ranges)} hashes of {HASH_BYTES} bytes, and is not.")
    return list(zip(ranges, proof, strict=True))
