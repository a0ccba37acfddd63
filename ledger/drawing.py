"""Which claims are audited: drawn by a secret that was committed to before, and is revealed after.

    commit to epoch e + 1 ── epoch e's claims are accepted and drawn ── reveal epoch e

- A claim is drawn if the hash of secret and claim lies below its rate. Claims are signed before that, so a node cannot
  know; the secret was committed to before, so the coordinator cannot choose.
- A commitment is made while the epoch before it still draws: it is published long before its first claim.
- Fail closed: without the secret that was committed to, everything is audited.
- After the reveal anybody can draw again: the list of claims and rates is served, and its digest is in the log.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from blake3 import blake3

from protocol.errors import ProofInvalid
from protocol.ids import Digest
from protocol.policy import chunks
from protocol.wire import canonical

ALL_PPM = 1_000_000
"""Rates are millionths: integers, so that everybody draws the same."""

_DRAW = 2**64


@dataclass(frozen=True, slots=True)
class LotteryDraw:
    """A claim in the lottery, and at which rate."""

    claim_id: str
    rate_ppm: int


def commitment(secret: bytes) -> Digest:
    return chunks.digest(secret)


def is_drawn(secret: bytes | None, claim_id: str, rate_ppm: int) -> bool:
    """Whether a claim is to be audited; always, if nobody knows the secret."""
    if secret is None:
        return True
    ticket = int.from_bytes(blake3(claim_id.encode(), key=secret).digest(8), "big")
    return ticket * ALL_PPM < rate_ppm * _DRAW


def draws_digest(draws: Iterable[LotteryDraw]) -> Digest:
    """The name of an epoch's list."""
    return chunks.digest(canonical.encode([[draw.claim_id, draw.rate_ppm] for draw in draws]))


def check(secret: bytes, digest: str, draws: list[LotteryDraw]) -> list[str]:
    """The claims that a revealed secret draws from a list, after the list was found to be the one in the log."""
    if draws_digest(draws) != digest:
        raise ProofInvalid("The list of draws is not the one whose digest is in the log.")
    return [draw.claim_id for draw in draws if is_drawn(secret, draw.claim_id, draw.rate_ppm)]
