"""The Merkle tree as RFC 6962 defines it, word for word: slow, recursive, and not a line shared with ours."""

from collections.abc import Sequence
from hashlib import sha256


def mth(entries: Sequence[bytes]) -> bytes:
    """MTH(D[n]) of section 2.1."""
    if not entries:
        return sha256().digest()
    if len(entries) == 1:
        return sha256(b"\x00" + entries[0]).digest()
    middle = k(len(entries))
    return sha256(b"\x01" + mth(entries[:middle]) + mth(entries[middle:])).digest()


def path(m: int, entries: Sequence[bytes]) -> list[bytes]:
    """PATH(m, D[n]) of section 2.1.1."""
    if len(entries) == 1:
        return []
    middle = k(len(entries))
    if m < middle:
        return [*path(m, entries[:middle]), mth(entries[middle:])]
    return [*path(m - middle, entries[middle:]), mth(entries[:middle])]


def proof(m: int, entries: Sequence[bytes]) -> list[bytes]:
    """PROOF(m, D[n]) of section 2.1.2."""
    return _subproof(m, entries, True)


def _subproof(m: int, entries: Sequence[bytes], complete: bool) -> list[bytes]:
    if m == len(entries):
        return [] if complete else [mth(entries)]
    middle = k(len(entries))
    if m <= middle:
        return [*_subproof(m, entries[:middle], complete), mth(entries[middle:])]
    return [*_subproof(m - middle, entries[middle:], False), mth(entries[:middle])]


def k(n: int) -> int:
    """The largest power of two smaller than n."""
    power = 1
    while power * 2 < n:
        power *= 2
    return power
