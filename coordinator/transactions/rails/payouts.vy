# pragma version 0.4.3
"""
@title Payout batches of a training round, claimed by their payees
@notice
    The operator moves tokens here and opens a batch by the root of its payees' tree. Each payee, or anybody for them,
    claims with a proof. Nobody can take back what an open batch owes.

    - A batch is opened once: its id is the key that makes paying twice impossible.
    - The tree is that of RFC 6962 with SHA-256. A leaf is the payee's 20 bytes and the amount in micro-units as 32.
    - A leaf is claimed once, and all claims of a batch together never exceed its total.
"""

from ethereum.ercs import IERC20

struct Batch:
    root: bytes32
    size: uint256
    unclaimed_micros: uint256

event Opened:
    id: indexed(bytes32)
    root: bytes32
    size: uint256
    total_micros: uint256

event Claimed:
    id: indexed(bytes32)
    index: uint256
    payee: indexed(address)
    amount_micros: uint256

operator: public(immutable(address))
token: public(immutable(IERC20))
unit: public(immutable(uint256))  # of the token's smallest units, to a micro-unit

batches: public(HashMap[bytes32, Batch])
claimed: public(HashMap[bytes32, HashMap[uint256, bool]])
reserved: public(uint256)  # owed to payees of open batches, in the token's smallest units


@deploy
def __init__(token_: IERC20, unit_: uint256):
    assert unit_ > 0, "a micro-unit is worth something"
    operator = msg.sender
    token = token_
    unit = unit_


@external
def open(id: bytes32, root: bytes32, size: uint256, total_micros: uint256):
    assert msg.sender == operator, "only the operator opens batches"
    assert size > 0 and self.batches[id].size == 0, "this batch is open already"
    self.reserved += total_micros * unit
    assert staticcall token.balanceOf(self) >= self.reserved, "move tokens here first"
    self.batches[id] = Batch(root=root, size=size, unclaimed_micros=total_micros)
    log Opened(id=id, root=root, size=size, total_micros=total_micros)


@external
def claim(id: bytes32, index: uint256, payee: address, amount_micros: uint256, proof: DynArray[bytes32, 64]):
    batch: Batch = self.batches[id]
    assert not self.claimed[id][index], "claimed already"
    leaf: bytes32 = sha256(concat(b"\x00", convert(payee, bytes20), convert(amount_micros, bytes32)))
    assert index < batch.size and self._root(leaf, index, batch.size, proof) == batch.root, "not in this batch"
    self.claimed[id][index] = True
    self.batches[id].unclaimed_micros -= amount_micros
    self.reserved -= amount_micros * unit
    assert extcall token.transfer(payee, amount_micros * unit, default_return_value=True), "the token refuses"
    log Claimed(id=id, index=index, payee=payee, amount_micros=amount_micros)


@external
def withdraw(amount: uint256):
    """
    @notice Take back tokens that no open batch owes.
    """
    assert msg.sender == operator, "only the operator withdraws"
    assert staticcall token.balanceOf(self) - amount >= self.reserved, "payees own the rest"
    assert extcall token.transfer(operator, amount, default_return_value=True), "the token refuses"


@internal
@pure
def _root(leaf: bytes32, index: uint256, size: uint256, proof: DynArray[bytes32, 64]) -> bytes32:
    """
    @notice RFC 9162, 2.1.3.2: the root of a tree that has this leaf there, if the proof is right.
    """
    found: bytes32 = leaf
    place: uint256 = index
    last: uint256 = size - 1
    for sibling: bytes32 in proof:
        assert last > 0, "the proof is too long"
        if place % 2 == 1 or place == last:
            found = sha256(concat(b"\x01", sibling, found))
            for _: uint256 in range(256):
                if place % 2 == 1 or place == 0:
                    break
                place >>= 1
                last >>= 1
        else:
            found = sha256(concat(b"\x01", found, sibling))
        place >>= 1
        last >>= 1
    assert last == 0, "the proof is too short"
    return found
