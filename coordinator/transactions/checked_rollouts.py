"""Envelopes of rollouts and fragments, read before the writer sees them: form, signature and signer.

1. An envelope names its lease; `named_lease` finds that without decoding what is signed.
2. If the leases were looked up, an envelope that names no lease of its sender, or is larger than an answer to its lease
   can be, is refused before its signature is checked or any of its values is decoded.
3. After `MALFORMED_MAX` envelopes of a request that cannot be read, the others are left unread.

- All functions are pure. `coordinator.transactions.claims` does the checks that need the store afterwards.
"""

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import NamedTuple

from coordinator.transactions import partial_rollouts
from coordinator.transactions.partial_rollouts import SignedFragment
from protocol import limits
from protocol.breach import different
from protocol.errors import LeaseOfAnother, MessageTooLarge, NotRead, SwarmError, UnknownLease
from protocol.ids import ClaimId, NodeId
from protocol.policy import chunks
from protocol.wire.signing import Envelope, check_envelope
from protocol.work import evidence
from protocol.work.evidence import RejectionEvidence
from protocol.work.lease import Lease, answer_max_bytes, named_lease
from protocol.work.rollout import RolloutClaim


class LeaseHolder(NamedTuple):
    """The node that a lease was given to, and its offer."""

    node_id: str
    offer: bytes


Owners = Mapping[str, LeaseHolder]
"""The holders of leases, by lease id."""


@dataclass(frozen=True)
class CheckedRollout:
    """A rollout whose form and signature are right."""

    envelope: bytes
    claim: RolloutClaim
    claim_id: ClaimId

    @property
    def lease_id(self) -> str:
        return self.claim.lease_id


@dataclass(frozen=True)
class Unreadable:
    """A rollout that is refused whatever the store contains, with the evidence."""

    lease_id: str
    """The lease that ends by the refusal; empty if none does."""
    error: SwarmError
    evidence: RejectionEvidence


@dataclass(frozen=True)
class Known:
    """The leases of a request as the store has them, read before its envelopes are decoded."""

    node: NodeId
    owners: Owners
    max_new_tokens: int

    def require_fitting(self, lease_id: str, size: int) -> None:
        """Refuse an envelope of this size that names this lease, if it cannot be an answer to it."""
        owner, offer = self.owners.get(lease_id, ("", b""))
        if not owner:
            seen = different("lease_id", "one that was given out in this round", lease_id)
            raise UnknownLease("No such lease was given out in this round.", breach=seen)
        if owner != self.node:
            seen = different("signer", "the node that the lease was given to", self.node)
            raise LeaseOfAnother("This lease belongs to another node.", breach=seen)
        most = answer_max_bytes(Lease.from_bytes(offer).samples, self.max_new_tokens)
        if size > most:
            raise MessageTooLarge(
                f"The envelope has {size} bytes; an answer to its lease has at most {most}.",
                breach=different("message", f"at most {most} bytes", f"{size} bytes"),
            )


def are_heavy(envelopes: Sequence[bytes]) -> bool:
    """Return True if the leases of these envelopes have to be looked up before they are decoded."""
    return len(envelopes) > 1 or sum(map(len, envelopes)) > limits.READ_AT_ONCE_BYTES


def leases_named(envelopes: Iterable[bytes]) -> set[str]:
    """Return the leases that these envelopes name; an envelope that cannot be read names none."""
    named, malformed = set[str](), 0
    for envelope in envelopes:
        if malformed == limits.MALFORMED_MAX:
            break
        try:
            named.add(named_lease(Envelope.from_bytes(envelope, max_bytes=limits.REQUEST_MAX_BYTES).payload))
        except SwarmError:
            malformed += 1
    return named - {""}


def read_rollouts(
    node: NodeId, envelopes: Sequence[bytes], known: Known | None = None
) -> list[CheckedRollout | Unreadable]:
    """Return the rollouts of one request, in their order."""
    rollouts = list[CheckedRollout | Unreadable]()
    malformed = 0
    for envelope in envelopes:
        lease_id = claim_id = ""
        try:
            if malformed == limits.MALFORMED_MAX:
                raise NotRead(
                    f"{malformed} rollouts before this one in its request cannot be read.", hint="Send it by itself."
                )
            read = Envelope.from_bytes(envelope, max_bytes=limits.REQUEST_MAX_BYTES)
            claim_id = chunks.digest(read.payload)
            if known and (named := named_lease(read.payload)):
                known.require_fitting(named, len(envelope))
            signed = check_envelope("rollout", read)
            claim = RolloutClaim.from_bytes(signed.payload)
            lease_id = claim.lease_id
            if signed.signer != node:
                raise LeaseOfAnother(
                    "The rollout is signed by another node than the one that sends it.",
                    breach=different("signer", node, signed.signer),
                )
        except SwarmError as error:
            malformed += not isinstance(error, NotRead)
            claim_id = claim_id or chunks.digest(envelope)
            seen = evidence.build_evidence(error, envelope=envelope, lease_id=lease_id, claim_id=claim_id)
            rollouts.append(Unreadable(lease_id, error, seen))
        else:
            rollouts.append(CheckedRollout(envelope, claim, ClaimId(claim_id)))
    return rollouts


def read_fragments(node: NodeId, envelopes: Sequence[bytes], known: Known | None = None) -> list[SignedFragment]:
    """Return the fragments of one request that can be read: the first one of each lease."""
    fragments: dict[str, SignedFragment] = {}
    malformed = 0
    for envelope in envelopes:
        if malformed == limits.MALFORMED_MAX:
            break
        malformed += 1
        with suppress(SwarmError):
            if known:
                named = named_lease(Envelope.from_bytes(envelope, max_bytes=limits.REQUEST_MAX_BYTES).payload)
                if named in fragments:
                    malformed -= 1
                    continue
                known.require_fitting(named, len(envelope))
            signed = partial_rollouts.read(node, envelope)
            fragments.setdefault(signed.fragment.lease_id, signed)
            malformed -= 1
    return list(fragments.values())
