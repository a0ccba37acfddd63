"""Partial rollouts: fragments that a lost node left of its group, and their continuation by others, as effects.

- A node's fragments of an open lease are kept as it signed them; nothing is credited for them yet.
- A lease that expires or is skipped leaves them to its group. The next node that holds the same version, and whose
  engine can continue, gets a lease of the same seed with the tokens so far as its prefixes. For any other node the
  group starts again, and the fragments are deleted. So are those of a rejected lease, and those after `HANDS_MAX`
  nodes.
- When the group is whole, each node is credited for its own tokens at its own lease's price: the last one for its
  rollout, each earlier one for its part: the claim that its fragments make, audited and settled as any other.
- A lease makes one claim at the most: a rollout, or the fragments that it left.
- The state of a lease is cached under its last fragment, which stands for all: a wrong fragment, however often it
  comes, makes the coordinator read only that last one again.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import sqlalchemy as sa

from coordinator.store.tables import fragments, leases, parts, rollouts
from ledger import store
from ledger.book import BookBroken, EntryOutcome
from ledger.entry import Pending, amount
from ledger.prepared import Prepared
from protocol import limits
from protocol.errors import FragmentMismatch, LeaseClosed
from protocol.ids import ClaimId, LeaseId, NodeId
from protocol.policy import chunks
from protocol.wire.signing import Envelope, open_envelope
from protocol.work.fragment import Begun, Fragment, Grown, check_fragment, combine_fragments, grown, joined
from protocol.work.lease import OPEN, Lease, Prefix
from protocol.work.rollout import PolicyBounds


class StoredFragment(NamedTuple):
    """A fragment's number in its lease, and what its node signed."""

    number: int
    envelope: bytes


# Built once: making a statement costs more than running it, and this runs for every rollout.
_parts_of = Prepared(sa.select(parts.c.claim_id).where(parts.c.whole.in_(sa.bindparam("wholes", expanding=True))))
_forget = Prepared(sa.delete(fragments).where(fragments.c.lease_id.in_(sa.bindparam("leases", expanding=True))))

_mine = (leases.c.lease_id == sa.bindparam("lease")) & (leases.c.node_id == sa.bindparam("node"))
_open_offer = Prepared(sa.select(leases.c.offer).where(_mine, leases.c.state.in_([state.value for state in OPEN])))
_add_fragment = Prepared(sa.insert(fragments))
_last = Prepared(
    sa.select(fragments.c.number, fragments.c.envelope)
    .where(fragments.c.lease_id == sa.bindparam("lease"))
    .order_by(fragments.c.number.desc())
    .limit(1),
    StoredFragment,
)

REMEMBERED_MAX = 1024
"""Leases whose state is cached; for others the fragments are read again."""

_remembered: dict[str, tuple[Grown, ...]] = {}
"""States by the digest of the last fragment, which covers all earlier ones by `previous`; the latest used come last."""


@dataclass(frozen=True)
class SignedFragment:
    """A fragment whose signature was checked."""

    fragment: Fragment
    digest: str
    envelope: bytes


@dataclass(frozen=True)
class Told:
    """The fragments of one lease together: its node's claim, if another node finishes the group."""

    claim_id: ClaimId
    node_id: NodeId
    lease: Lease
    samples: tuple[Begun, ...]

    @property
    def prefixes(self) -> tuple[Prefix, ...]:
        """Return the prefixes from which the next node continues."""
        return joined(self.lease, self.samples)

    @property
    def pending(self) -> Pending:
        """Return the pending credit: its tokens at its lease's price."""
        tokens = sum(sample.count for sample in self.samples)
        price = self.lease.price_micros_per_mtok
        return Pending(
            claim_id=self.claim_id,
            lease_id=LeaseId(self.lease.lease_id),
            node_id=self.node_id,
            tokens=tokens,
            price_micros_per_mtok=price,
            amount_micros=amount(tokens, price),
        )


def read(node: NodeId, envelope: bytes) -> SignedFragment:
    """Return a fragment from its envelope, if `node` has signed it."""
    signed = open_envelope("fragment", envelope)
    if signed.signer != node:
        raise LeaseClosed("The fragment is signed by another node than the one that sends it.")
    return SignedFragment(Fragment.from_bytes(signed.payload), chunks.digest(signed.payload), envelope)


def record_fragment(
    connection: sa.Connection, node: NodeId, word: SignedFragment, *, round_id: str, bounds: PolicyBounds
) -> LeaseId:
    """Store a fragment of an open lease of this node, unless it is stored already; return the lease's id."""
    fragment = word.fragment
    offer = _open_offer(connection, lease=fragment.lease_id, node=node).scalar()
    if offer is None:
        raise LeaseClosed("This lease has ended, or is another node's.")
    last = _last(connection, lease=fragment.lease_id).first()
    head = chunks.digest(Envelope.from_bytes(last.envelope).payload) if last else ""
    if word.digest != head:
        number = last.number + 1 if last else 0
        if number == limits.FRAGMENTS_MAX:
            raise FragmentMismatch(f"{limits.FRAGMENTS_MAX} fragments of one lease are enough.")
        lease = Lease.from_bytes(offer)
        before = _grown_until(connection, lease, head) if fragment.previous == head else ()
        check_fragment(fragment, lease, round_id, bounds, before=before, head=head)
        row = {"lease_id": fragment.lease_id, "number": number, "envelope": word.envelope}
        _add_fragment(connection, **row)
        _remember(word.digest, grown(before, fragment))
    return LeaseId(fragment.lease_id)


def _grown_until(connection: sa.Connection, lease: Lease, head: str) -> tuple[Grown, ...]:
    """Return the state of a lease whose last fragment has the digest `head`."""
    state = _remembered.pop(head, None)
    if state is None:
        state = (Grown(),) * lease.samples
        if not head:
            return state
        for payload in _payloads(connection, lease.lease_id):
            state = grown(state, Fragment.from_bytes(payload))
    _remember(head, state)
    return state


def _remember(head: str, known: tuple[Grown, ...]) -> None:
    while len(_remembered) >= REMEMBERED_MAX:
        del _remembered[next(iter(_remembered))]
    _remembered[head] = known


def chain(connection: sa.Connection, lease_id: str | None) -> list[Told]:
    """Return the partial rollouts of a group up to and including this lease, the first node's first."""
    partials: list[Told] = []
    while lease_id is not None:
        row = connection.execute(
            sa.select(leases.c.node_id, leases.c.offer, leases.c.continues).where(leases.c.lease_id == lease_id)
        ).one()
        payloads, lease = _payloads(connection, lease_id), Lease.from_bytes(row.offer)
        samples = combine_fragments(lease, [Fragment.from_bytes(payload) for payload in payloads])
        partials.append(Told(ClaimId(chunks.digest(payloads[-1])), NodeId(row.node_id), lease, samples))
        lease_id = row.continues
    return partials[::-1]


def left_by(connection: sa.Connection, lease_id: str, *, sound: bool) -> str | None:
    """Return the lease to continue from after this one has ended: itself, the one that it continued, or None."""
    known = connection.execute(sa.select(fragments.c.number).where(fragments.c.lease_id == lease_id).limit(1)).first()
    before = _before(connection, lease_id)
    if known and sound and _hands(connection, before) < limits.HANDS_MAX:
        return lease_id
    if known:
        forget(connection, [lease_id])
    return before


def _hands(connection: sa.Connection, lease_id: str | None) -> int:
    """Return how many leases left fragments up to and including this one, at most `HANDS_MAX`."""
    count = 0
    while lease_id is not None and count < limits.HANDS_MAX:
        count, lease_id = count + 1, _before(connection, lease_id)
    return count


def _before(connection: sa.Connection, lease_id: str) -> str | None:
    """Return the lease that this one continues."""
    before: str | None = connection.execute(
        sa.select(leases.c.continues).where(leases.c.lease_id == lease_id)
    ).scalar_one()
    return before


def forget(connection: sa.Connection, lease_ids: Iterable[str]) -> None:
    """Delete the fragments of these leases, so that no node continues from them."""
    _forget(connection, leases=list(lease_ids))


def credit(connection: sa.Connection, whole: Pending, told: Sequence[Told], now_ms: int) -> None:
    """Credit a rollout to its node's pending account, and the parts that it continued to those of their nodes."""
    outcomes = store.append_all(connection, [whole, *(partial.pending for partial in told)], now_ms)
    if set(outcomes) != {EntryOutcome.APPLIED}:
        raise BookBroken(f"The ledger refuses to credit claim {whole.claim_id} and what it goes on from: {outcomes}.")
    for partial in told:
        connection.execute(
            sa.insert(parts).values(
                claim_id=partial.claim_id,
                whole=whole.claim_id,
                lease_id=partial.lease.lease_id,
                node_id=partial.node_id,
                tokens=partial.pending.tokens,
                credit_micros=partial.pending.amount_micros,
                credited_ms=now_ms,
            )
        )


def parts_of(connection: sa.Connection, wholes: Sequence[str]) -> list[str]:
    """Return the claims of the parts that these rollouts finished."""
    return _parts_of(connection, wholes=list(wholes)).scalars()


def whole_of(connection: sa.Connection, claim_id: str) -> str:
    """Return the rollout that a part went into; for a rollout, itself."""
    return connection.execute(sa.select(parts.c.whole).where(parts.c.claim_id == claim_id)).scalar() or claim_id


class SignedWork(NamedTuple):
    """The envelopes that a node signed for a lease: the rollout, or the fragments that it left."""

    rollout: bytes = b""
    fragments: tuple[bytes, ...] = ()


def signed(connection: sa.Connection, lease_id: str) -> SignedWork:
    """Return what a node signed for a lease."""
    rollout = connection.execute(sa.select(rollouts.c.envelope).where(rollouts.c.lease_id == lease_id)).scalar()
    return SignedWork(rollout) if rollout else SignedWork(fragments=tuple(_envelopes(connection, lease_id)))


def _payloads(connection: sa.Connection, lease_id: str) -> list[bytes]:
    """Return the signed payloads; the signatures were checked at intake."""
    return [Envelope.from_bytes(envelope).payload for envelope in _envelopes(connection, lease_id)]


def _envelopes(connection: sa.Connection, lease_id: str) -> Sequence[bytes]:
    stored = sa.select(fragments.c.envelope).where(fragments.c.lease_id == lease_id).order_by(fragments.c.number)
    return connection.execute(stored).scalars().all()
