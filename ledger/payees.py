"""The payees of a batch as a Merkle tree: its root is in the ledger, each payee proves their share with a few hashes.

- A leaf is the payee (`protocol.people.owner.payee_bytes`) and the amount in micro-units, 32 bytes, big-endian: a
  contract can put that together itself. The tree is the log's, RFC 6962.
"""

from collections.abc import Sequence
from hashlib import sha256
from typing import NamedTuple

from ledger import tiles, tree
from ledger.tree import Hash, HashOf, leaf_hash
from protocol.people.owner import AMOUNT_BYTES, payee_bytes


class Payee(NamedTuple):
    """An owner's address, and what all nodes of this owner get."""

    owner: str
    address: str
    amount_micros: int

    @property
    def leaf(self) -> bytes:
        return leaf(self.address, self.amount_micros)


def leaf(address: str, amount_micros: int) -> bytes:
    return payee_bytes(address) + amount_micros.to_bytes(AMOUNT_BYTES)


def key(round_id: str, batch: int) -> bytes:
    """32 bytes that no other batch of any round has: rails know it by them, and a contract's payees."""
    return sha256(f"echo-swarm/payout/{round_id}/{batch}".encode()).digest()


def root(payees: Sequence[Payee]) -> Hash:
    return tree.root(len(payees), _hash_of(payees))


def proof(payees: Sequence[Payee], place: int) -> list[Hash]:
    """The hashes that lead from one payee's leaf to the root."""
    return tree.prove(tree.inclusion_ranges(place, len(payees)), _hash_of(payees))


def proofs(payees: Sequence[Payee]) -> list[list[Hash]]:
    """For each payee the hashes that lead from the leaf to the root."""
    hash_of = _hash_of(payees)
    return [tree.prove(tree.inclusion_ranges(place, len(payees)), hash_of) for place in range(len(payees))]


def _hash_of(payees: Sequence[Payee]) -> HashOf:
    grown = dict(tiles.grown(0, [leaf_hash(payee.leaf) for payee in payees], lambda tile: b""))
    return tiles.hashes_in(len(payees), grown.__getitem__)
