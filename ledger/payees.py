"""The payees of a batch as a Merkle tree: its root is in the ledger; a few hashes prove the share of each payee.

- A leaf is the payee (`protocol.people.owner.payee_bytes`) and the amount in micro-units, 32 bytes, big-endian: a
  contract can build that itself. The tree is like the log's, RFC 6962.
"""

from collections.abc import Sequence
from hashlib import sha256
from typing import NamedTuple

from ledger import tiles, tree
from ledger.tree import Hash, HashOf, leaf_hash
from protocol.people.owner import AMOUNT_BYTES, payee_bytes


class Payee(NamedTuple):
    """An owner's address, and the amount for all nodes of this owner."""

    owner: str
    address: str
    amount_micros: int

    @property
    def leaf(self) -> bytes:
        return leaf(self.address, self.amount_micros)


def leaf(address: str, amount_micros: int) -> bytes:
    return payee_bytes(address) + amount_micros.to_bytes(AMOUNT_BYTES)


def key(round_id: str, batch: int) -> bytes:
    """Return 32 bytes that identify a batch among all rounds, for rails and for a contract's payees."""
    return sha256(f"echo-swarm/payout/{round_id}/{batch}".encode()).digest()


def root(payees: Sequence[Payee]) -> Hash:
    return tree.root(len(payees), _hash_of(payees))


def proof(payees: Sequence[Payee], place: int) -> list[Hash]:
    """Return the hashes that lead from the leaf of the payee at `place` to the root."""
    return tree.prove(tree.inclusion_ranges(place, len(payees)), _hash_of(payees))


def proofs(payees: Sequence[Payee]) -> list[list[Hash]]:
    """Return, for each payee, the hashes that lead from the leaf to the root."""
    hash_of = _hash_of(payees)
    return [tree.prove(tree.inclusion_ranges(place, len(payees)), hash_of) for place in range(len(payees))]


def _hash_of(payees: Sequence[Payee]) -> HashOf:
    grown = dict(tiles.grown(0, [leaf_hash(payee.leaf) for payee in payees], lambda tile: b""))
    return tiles.hashes_in(len(payees), grown.__getitem__)
