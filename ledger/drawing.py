"""The lottery of audits: claims are drawn by a secret that was committed to before, and is revealed after.

    commit to epoch e + 1 ── epoch e's claims are accepted and drawn ── reveal epoch e

- A claim is drawn if the hash of secret and claim is below its rate. A node signs its claim before the draw, so it
  cannot know the result; the secret was committed to before, so the coordinator cannot choose.
- A commitment is made while the previous epoch still draws: it is published long before its first claim.
- It fails closed: without the committed secret, every claim is audited.
- After the reveal anybody can repeat the draw: the list of claims and rates is served, and its digest is in the log.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from blake3 import blake3

from protocol.errors import ProofInvalid
from protocol.ids import Digest
from protocol.policy import chunks
from protocol.wire import canonical

ALL_PPM = 1_000_000
"""Rates are millionths: integers, so that every draw gives the same result."""

_DRAW = 2**64


@dataclass(frozen=True, slots=True)
class LotteryDraw:
    """A claim in the lottery with its rate."""

    claim_id: str
    rate_ppm: int


def commitment(secret: bytes) -> Digest:
    return chunks.digest(secret)


def is_drawn(secret: bytes | None, claim_id: str, rate_ppm: int) -> bool:
    """Return True if a claim is audited; always True without a secret."""
    if secret is None:
        return True
    ticket = int.from_bytes(blake3(claim_id.encode(), key=secret).digest(8), "big")
    return ticket * ALL_PPM < rate_ppm * _DRAW


def draws_digest(draws: Iterable[LotteryDraw]) -> Digest:
    """Return the digest of an epoch's list."""
    return chunks.digest(canonical.encode([[draw.claim_id, draw.rate_ppm] for draw in draws]))


def check(secret: bytes, digest: str, draws: list[LotteryDraw]) -> list[str]:
    """Check that `draws` is the list with this digest; return the claims that a revealed secret draws from it."""
    if draws_digest(draws) != digest:
        raise ProofInvalid("The list of draws does not match the digest in the log.")
    return [draw.claim_id for draw in draws if is_drawn(secret, draw.claim_id, draw.rate_ppm)]
