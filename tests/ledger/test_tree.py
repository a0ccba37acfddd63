"""The tree: RFC 6962's answers, three implementations that agree, and proofs that no change survives."""

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pymerkle import InmemoryTree
from pymerkle.proof import InclusionProof

from ledger import tree
from ledger.tree import Hash, HashOf, Subtree, inner_hash, leaf_hash
from protocol.errors import ProofInvalid
from tests.ledger import naive_tree

KNOWN_ENTRIES = [
    bytes.fromhex(text)
    for text in ("", "00", "10", "2021", "3031", "40414243", "5051525354555657", "606162636465666768696a6b6c6d6e6f")
]
"""The inputs that implementations of Certificate Transparency test with, and the roots after each."""

KNOWN_ROOTS = (
    "6e340b9cffb37a989ca544e6bb780a2c78901d3fb33738768511a30617afa01d",
    "fac54203e7cc696cf0dfcb42c92a1d9dbaf70ad9e621f4bd8d98662f00e3c125",
    "aeb6bcfe274b70a14fb067a5e5578264db0fa9b51af5e0ba159158f329e06e77",
    "d37ee418976dd95753c1c73862b9398fa2a2cf9b4ff0fdfe8b30cd95209614b7",
    "4e3bbb1f7b478dcfe71fb631631519a3bca12c9aefca1612bfce4c13a86264d4",
    "76e67dadbcdf1e10e1b74ddc608abd2f98dfb16fbce75277b5232a127f2087ef",
    "ddb89be403809e325750d3d263cd78929c2942b7942a34b77e122c9594a74c8c",
    "5dc9da79a70659a9ad559cb701ded9a2ab9d823aad2f4960cfe370eff4604328",
)

ENTRIES = [bytes([number, 7]) for number in range(20)]
SIZES = st.integers(1, 70)


def hashes_of(entries: Sequence[bytes]) -> HashOf:
    """Nodes straight from the entries."""

    def hash_of(node: Subtree) -> Hash:
        if node.level == 0:
            return leaf_hash(entries[node.index])
        left = Subtree(node.level - 1, 2 * node.index)
        return inner_hash(hash_of(left), hash_of(Subtree(left.level, left.index + 1)))

    return hash_of


def consistency(old: int, entries: Sequence[bytes]) -> list[Hash]:
    """A proof as the RFC writes it."""
    seeded = tree.prove(tree.consistency_ranges(old, len(entries)), hashes_of(entries))
    return tree.without_seed(old, len(entries), seeded)


def test_known_roots() -> None:
    hash_of = hashes_of(KNOWN_ENTRIES)
    assert tree.root(0, hash_of).hex() == "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"
    assert tuple(tree.root(size, hash_of).hex() for size in range(1, 9)) == KNOWN_ROOTS


def test_known_proofs() -> None:
    beginnings = [[item.hex()[:8] for item in consistency(*case)] for case in ((6, KNOWN_ENTRIES), (1, KNOWN_ENTRIES))]
    assert beginnings == [["0ebc5d34", "ca854ea1", "d37ee418"], ["96a296d2", "5f083f0a", "6b47aaf2"]]
    path = tree.prove(tree.inclusion_ranges(0, 8), hashes_of(KNOWN_ENTRIES))
    assert [item.hex()[:8] for item in path] == ["96a296d2", "5f083f0a", "6b47aaf2"]


def test_another_implementation_makes_the_same_roots_and_takes_our_proofs() -> None:
    other = InmemoryTree(algorithm="sha256")
    other.append_entries(ENTRIES)
    hash_of = hashes_of(ENTRIES)
    for size in range(1, len(ENTRIES) + 1):
        root = other.get_root(size)
        assert root == tree.root(size, hash_of)
        for index in range(size):
            theirs = other.prove_inclusion(index + 1, size)
            ours = [leaf_hash(ENTRIES[index]), *tree.prove(tree.inclusion_ranges(index, size), hash_of)]
            InclusionProof("sha256", True, size, index + 1, theirs.rule, ours).verify(ours[0], root)
            tree.check_inclusion(ENTRIES[index], index, size, root, theirs.path[1:])
        for old in range(1, size + 1):
            proof = consistency(old, ENTRIES[:size])
            tree.check_consistency(old, other.get_root(old), size, root, proof)


@given(size=SIZES, data=st.data())
def test_proofs_are_those_of_the_rfc(size: int, data: st.DataObject) -> None:
    entries = [number.to_bytes(2) for number in range(size)]
    index, old = data.draw(st.integers(0, size - 1)), data.draw(st.integers(1, size))
    assert tree.root(size, hashes_of(entries)) == naive_tree.mth(entries)
    assert tree.prove(tree.inclusion_ranges(index, size), hashes_of(entries)) == naive_tree.path(index, entries)
    assert consistency(old, entries) == naive_tree.proof(old, entries)


@settings(max_examples=60)
@given(size=SIZES, data=st.data())
def test_receipt_for_an_entry_that_is_not_there_is_refused(size: int, data: st.DataObject) -> None:
    entries = [number.to_bytes(2) for number in range(size)]
    index = data.draw(st.integers(0, size - 1))
    root, proof = naive_tree.mth(entries), naive_tree.path(index, entries)
    tree.check_inclusion(entries[index], index, size, root, proof)
    wrong = [
        (b"another entry", index, size, root, proof),
        (entries[index], index, size, leaf_hash(b"another root"), proof),
        (entries[index], index, size, root, [*proof, root]),
        (entries[index], index + size, size, root, proof),
        (entries[index], -1, size, root, proof),
        *((entries[index], other, size, root, proof) for other in range(size) if other != index),
        *((entries[index], index, size, root, _tampered(proof, place)) for place in range(len(proof))),
    ]
    for case in wrong:
        with pytest.raises(ProofInvalid):
            tree.check_inclusion(*case)


@settings(max_examples=60)
@given(new=SIZES, data=st.data())
def test_rewritten_history_has_no_consistency_proof(new: int, data: st.DataObject) -> None:
    old = data.draw(st.integers(1, new))
    entries = [number.to_bytes(2) for number in range(new)]
    rewritten = [*entries]
    rewritten[data.draw(st.integers(0, old - 1))] = b"better for me"
    signed = naive_tree.mth(entries[:old])
    tree.check_consistency(old, signed, new, naive_tree.mth(entries), naive_tree.proof(old, entries))
    for proof in (naive_tree.proof(old, entries), naive_tree.proof(old, rewritten)):
        with pytest.raises(ProofInvalid):
            tree.check_consistency(old, signed, new, naive_tree.mth(rewritten), proof)


@pytest.mark.parametrize(
    ("old", "new", "proof"),
    [
        (5, 3, []),  # a truncated log
        (0, 3, []),  # nothing proves what began with nothing
        (3, 5, [bytes(32)] * 1_000),  # huge
        (3, 5, [bytes(31)] * 4),  # no hashes
        (3, 5, []),
        (4, 4, [bytes(32)]),
        (1, 2**63, [bytes(32)] * 63),  # no tree is that large
    ],
)
def test_proof_that_cannot_be_one_is_refused_before_anything_is_hashed(old: int, new: int, proof: list[bytes]) -> None:
    with pytest.raises(ProofInvalid):
        tree.check_consistency(old, bytes(32), new, bytes(32), proof)


def _tampered(proof: list[bytes], place: int) -> list[bytes]:
    changed = bytes([proof[place][0] ^ 1]) + proof[place][1:]
    return [*proof[:place], changed, *proof[place + 1 :]]
