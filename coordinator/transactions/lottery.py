"""The epochs of the audit lottery, as effects: the secret that draws now, its reveal, and the claims that it drew.

- One epoch draws at a time; the next secret is committed to already: a checkpoint has the commitment before its first
  claim.
- An epoch ends after `epoch_groups` claims, or with the round. Then its secret is in the log, with the digest of its
  list.
- Claims that are accepted after the end, since they were leased before it, have an epoch of their own, which ends when
  no lease is open any more.
- Secrets are made of one master key; a revealed one says nothing of the others.
- A secret that is not the one committed to draws nothing and is not revealed: everything is audited meanwhile.
"""

from dataclasses import dataclass, field
from typing import NamedTuple

import sqlalchemy as sa
from blake3 import blake3

from coordinator.config import AuditSection
from coordinator.store.facts import FINISHED, get_fact
from coordinator.store.tables import IS_OPEN, audits, epochs, leases
from ledger import drawing, store
from ledger.drawing import LotteryDraw
from ledger.entry import Commitment, Reveal
from ledger.prepared import Prepared


@dataclass(frozen=True)
class AuditTerms:
    """The terms of audits, from the configuration and the round's keys."""

    master: bytes = field(repr=False)
    """The key of all secrets."""
    settings: AuditSection
    probes: frozenset[str] = frozenset()
    """The operator's own nodes, on which classes are calibrated."""

    @property
    def timeout_ms(self) -> int:
        """The time after which a case without a verdict goes to another auditor."""
        return int(1000 * self.settings.timeout_s)


class DrawingEpoch(NamedTuple):
    """The epoch that draws now, and the number of its claims."""

    epoch: int
    secret_digest: str
    claims: int


class ClaimDraw(NamedTuple):
    """The epoch of a claim, whether the claim is drawn, and whether the epoch ends once it is recorded."""

    epoch: int
    is_drawn: bool
    is_last: bool


# Built once: making a statement costs more than running it, and these run for every rollout.
_drawing = Prepared(
    sa.select(epochs.c.epoch, epochs.c.secret_digest, epochs.c.claims).where(epochs.c.state == "drawing"),
    DrawingEpoch,
)
_count = Prepared(
    sa.update(epochs)
    .where(epochs.c.state == "drawing")
    .values(claims=epochs.c.claims + 1)
    .returning(epochs.c.epoch, epochs.c.secret_digest, epochs.c.claims),
    DrawingEpoch,
)


def secret_of(master: bytes, epoch: int) -> bytes:
    """Return the secret of an epoch."""
    return blake3(b"echo-swarm audit epoch %d" % epoch, key=master).digest()


def open_first_epoch(connection: sa.Connection, terms: AuditTerms, now_ms: int) -> None:
    """Open the first epoch of a round, unless it was opened before."""
    if connection.execute(sa.select(epochs.c.epoch).limit(1)).first() is None:
        _commit(connection, 1, terms, now_ms)
        _next(connection, 1, terms, now_ms)


def forget_epochs(connection: sa.Connection) -> None:
    """Delete the epochs of a round whose ledger begins again, since their commitments were entries of it."""
    connection.execute(sa.delete(epochs))


def draw(connection: sa.Connection, claim_id: str, rate_ppm: int, terms: AuditTerms) -> ClaimDraw:
    """Count a claim in the epoch that draws now, and return whether it is drawn."""
    epoch, secret_digest, claims = _count(connection).single_row()
    drawn = drawing.is_drawn(_secret(epoch, secret_digest, terms), claim_id, rate_ppm)
    return ClaimDraw(epoch, drawn, claims >= terms.settings.epoch_groups)


def end(connection: sa.Connection, terms: AuditTerms, now_ms: int) -> None:
    """Reveal the secret that draws now, and go on with the next one."""
    epoch, secret_digest, _ = _open(connection)
    secret = _secret(epoch, secret_digest, terms)
    if secret is not None:
        digest = drawing.draws_digest(draws(connection, epoch))
        store.append(connection, Reveal(epoch=epoch, secret=secret, draws_digest=digest), now_ms)
    connection.execute(sa.update(epochs).where(epochs.c.epoch == epoch).values(state="over"))
    _next(connection, epoch + 1, terms, now_ms)


def end_last(connection: sa.Connection, terms: AuditTerms, now_ms: int) -> bool:
    """End the epoch of late claims after the round, once no lease is open any more; return False before that."""
    if not get_fact(connection, FINISHED) or not _open(connection).claims:
        return False
    if connection.execute(sa.select(leases.c.lease_id).where(IS_OPEN).limit(1)).first() is not None:
        return False
    end(connection, terms, now_ms)
    return True


def draws(connection: sa.Connection, epoch: int) -> list[LotteryDraw]:
    """Return the claims of an epoch with their rates, in the order of their ids."""
    columns = sa.select(audits.c.claim_id, audits.c.rate_ppm).where(audits.c.epoch == epoch)
    return [LotteryDraw(claim_id, rate) for claim_id, rate in connection.execute(columns.order_by(audits.c.claim_id))]


def is_over(connection: sa.Connection, epoch: int) -> bool:
    """Return True if the epoch is over, so that its list may be shown."""
    return connection.execute(sa.select(epochs.c.state).where(epochs.c.epoch == epoch)).scalar() == "over"


def _open(connection: sa.Connection) -> DrawingEpoch:
    return _drawing(connection).single_row()


def _next(connection: sa.Connection, epoch: int, terms: AuditTerms, now_ms: int) -> None:
    connection.execute(sa.update(epochs).where(epochs.c.epoch == epoch).values(state="drawing"))
    _commit(connection, epoch + 1, terms, now_ms)


def _commit(connection: sa.Connection, epoch: int, terms: AuditTerms, now_ms: int) -> None:
    digest = drawing.commitment(secret_of(terms.master, epoch))
    store.append(connection, Commitment(epoch=epoch, secret_digest=digest), now_ms)
    connection.execute(sa.insert(epochs).values(epoch=epoch, secret_digest=digest, state="committed"))


def _secret(epoch: int, secret_digest: str, terms: AuditTerms) -> bytes | None:
    secret = secret_of(terms.master, epoch)
    return secret if drawing.commitment(secret) == secret_digest else None
