"""The Merkle tree of RFC 6962 over the log: roots, inclusion and consistency proofs, and their checks.

- A leaf's hash is SHA-256 of a zero byte and the entry; an inner one's is SHA-256 of a one byte and both children; the
  empty tree's is SHA-256 of nothing.
- A `Subtree` is a perfect subtree: the leaves from `index << level` on, `1 << level` of them. Once full, it never
  changes.
- Every root and every proof is built from nodes. The caller passes `hash_of`, which reads them: from a store's tiles,
  from served tiles, or from a list. The sizes alone determine the nodes.
- A check computes the root from the proof and compares; a proof of a wrong length is rejected before any hashing.

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
"""Leaves of a tree: it fits into an SQL integer, and a proof has at most 62 hashes."""

EMPTY_ROOT = Hash(sha256().digest())

Range = tuple[int, int]
"""Leaves from the first number (inclusive) to the second (exclusive)."""


@dataclass(frozen=True, slots=True)
class Subtree:
    """A perfect subtree: the leaves from `index << level` on, `1 << level` of them."""

    level: int
    index: int


HashOf = Callable[[Subtree], Hash]


def leaf_hash(entry: bytes) -> Hash:
    return Hash(sha256(b"\0" + entry).digest())


def inner_hash(left: bytes, right: bytes) -> Hash:
    return Hash(sha256(b"\1" + left + right).digest())


def nodes_of(leaves: Range) -> list[Subtree]:
    """Return the fewest perfect subtrees that make up a range, from left to right."""
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
    """Return the root of the first `size` leaves."""
    return range_root((0, size), hash_of) if size else EMPTY_ROOT


def root_of(leaves: Sequence[Hash]) -> Hash:
    """Return the root of a tree whose leaves' hashes are all in memory."""
    if len(leaves) < 2:
        return leaves[0] if leaves else EMPTY_ROOT
    middle = _split(len(leaves))
    return inner_hash(root_of(leaves[:middle]), root_of(leaves[middle:]))


def range_root(leaves: Range, hash_of: HashOf) -> Hash:
    """Return the root of a range that is a node of the tree."""
    hashes = [hash_of(node) for node in nodes_of(leaves)]
    joined = hashes.pop()
    while hashes:
        joined = inner_hash(hashes.pop(), joined)
    return joined


def inclusion_ranges(index: int, size: int) -> list[Range]:
    """Return the siblings on the way from a leaf up to the root."""
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
    """Return the ranges that make up the old and the new root: the seed, then its siblings on the way up."""
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
    """Return the proof that consists of these ranges."""
    return [range_root(leaves, hash_of) for leaves in ranges]


def root_by_inclusion(leaf: Hash, index: int, size: int, proof: Sequence[bytes]) -> Hash:
    """Return the root of a tree with this leaf at `index`, by the proof."""
    joined = leaf
    for (start, _), sibling in _paired(inclusion_ranges(index, size), proof):
        joined = inner_hash(joined, sibling) if start > index else inner_hash(sibling, joined)
    return joined


def roots_by_consistency(old: int, new: int, seeded: Sequence[bytes]) -> tuple[Hash, Hash]:
    """Return the roots of the old and the new tree that follow from a proof with its seed.

    If the new root is right, so is the old one: it is the root of the new tree's first `old` leaves.
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
    """Return the proof in the form of RFC 6962, which omits the seed if it is the old root itself."""
    return list(seeded[1:] if _seed_is_old_root(old, new) else seeded)


def check_inclusion(entry: bytes, index: int, size: int, root: bytes, proof: Sequence[bytes]) -> None:
    """Raise `ProofInvalid` unless the proof shows that the entry is at `index` in the tree of this root."""
    if root_by_inclusion(leaf_hash(entry), index, size, proof) != root:
        raise ProofInvalid(f"The entry is not at index {index} in the tree of {size} entries.")


def check_consistency(old: int, old_root: bytes, new: int, new_root: bytes, proof: Sequence[bytes]) -> None:
    """Raise `ProofInvalid` unless a proof in the form of RFC 6962 shows that the new tree begins with the old one."""
    seeded = [old_root, *proof] if _seed_is_old_root(old, new) else proof
    if roots_by_consistency(old, new, seeded) != (old_root, new_root):
        raise ProofInvalid(f"The tree of {new} entries does not begin with the tree of {old}.")


def _seed_is_old_root(old: int, new: int) -> bool:
    return consistency_ranges(old, new)[0] == (0, old)


def _split(count: int) -> int:
    """Return the number of leaves in the left child of a tree of `count`: the largest smaller power of two."""
    return 1 << ((count - 1).bit_length() - 1)


def _paired(ranges: list[Range], proof: Sequence[bytes]) -> list[tuple[Range, bytes]]:
    if len(proof) != len(ranges) or any(len(item) != HASH_BYTES for item in proof):
        raise ProofInvalid(f"The proof is not {len(ranges)} hashes of {HASH_BYTES} bytes.")
    return list(zip(ranges, proof, strict=True))
