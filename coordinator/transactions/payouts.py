"""Payout batches: from published balances to payees, and from a rail's reference to the last entry.

1. `create`, one transaction: each owner who is owed enough and has an address that counts gets a place in a batch, and
   the balances of the owner's nodes go from payable to paying, rounded down to the rail's smallest payment. From then
   on, no other batch can have them.
2. `export` writes CSV and JSON, with the same bytes every time.
3. `prove` shows a payee their own line, with the proof that the log has it.
4. `settle`: the rail sends (idempotent by the batch's key), its reference is stored, the rail reports the payment's
   status, and the balances go from paying to paid, one transaction. An interrupted step is done again.

- Only credit that a signed checkpoint covers is paid out: everybody can check it before the money moves.
- The minimum applies to the sum of an owner's nodes: ten small nodes are paid as one large node.
- A batch is settled by the rail that it was made for: another one does not know its key.
- An owner's address and nodes must be in the log, and the payees of a batch must have the root that the log names: the
  tables beside it are not signed, and somebody may have altered them.
- No batch is ever undone: people must solve the case of a payee who cannot be paid.
"""

import csv
import io
import json
from collections import defaultdict
from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import NamedTuple

import sqlalchemy as sa

from coordinator.base.files import write_durably
from coordinator.store.state import Database
from coordinator.store.tables import nodes, payees, payout_batches
from coordinator.transactions import owners
from coordinator.transactions.rails.base import Rail, Status, TransferBatch
from ledger import payees as tree_of
from ledger import store
from ledger.accounts import AccountKind
from ledger.book import ClaimState, EntryOutcome
from ledger.entry import Paid, Payout, PayoutBatch, Post, Reinstate
from ledger.payees import Payee
from ledger.payout_proof import PayoutProof, PayoutReply
from ledger.tables import balances_table, checkpoint_table, claims_table
from protocol.errors import NotFound, PayoutFailed
from protocol.ids import NodeId
from protocol.text.money import CREDITS, Unit

PAGE_ENTRIES = 1_000


class BatchState(StrEnum):
    """The stored state of a batch."""

    MADE = "made"
    SENT = "sent"  # the rail has returned a reference
    SETTLED = "settled"


class StoredBatch(NamedTuple):
    """A batch as it is stored."""

    number: int
    state: BatchState
    rail: str
    reference: str | None
    checkpoint_size: int
    made_ms: int


class PayoutTerms(NamedTuple):
    """The terms by which batches are made."""

    rail: str
    scheme: str
    minimum_micros: int
    unit: Unit = CREDITS
    step_micros: int = 1
    """The rail's smallest payment: amounts are multiples of it, and the rest of an owner's balance stays payable."""


def create(connection: sa.Connection, terms: PayoutTerms, *, now_ms: int) -> int:
    """Make the next batch, of all owners who can be paid, and return its number."""
    size = connection.execute(sa.select(checkpoint_table.c.size)).scalar()
    if size is None:
        raise PayoutFailed("No checkpoint is signed yet.", hint="Launch the round first.")
    recipients, shares = _payable(connection, size, terms, now_ms)
    if not recipients:
        least = max(terms.minimum_micros, terms.step_micros)
        raise PayoutFailed(
            f"No owner with an address that counts is owed {terms.unit.exact(least)}.",
            hint="Owners set one with `swarm-node keys address`; it counts after payouts.address_delay_h.",
        )
    number = 1 + (connection.execute(sa.select(sa.func.max(payout_batches.c.batch))).scalar() or 0)
    moves = [Payout(batch=number, node_id=node, amount_micros=micros) for node, micros in shares]
    head = _head(recipients)
    entry = PayoutBatch(batch=number, payees_root=head.root, payees=head.payees, amount_micros=head.amount_micros)
    outcomes = store.append_all(connection, [entry, *moves], now_ms)
    if any(outcome is not EntryOutcome.APPLIED for outcome in outcomes):
        raise PayoutFailed(f"The ledger refuses batch {number}: {', '.join(sorted(set(outcomes)))}.")
    connection.execute(
        sa.insert(payout_batches).values(
            batch=number, state=BatchState.MADE.value, rail=terms.rail, checkpoint_size=size, made_ms=now_ms
        )
    )
    rows = [{"batch": number, "place": place, **payee._asdict()} for place, payee in enumerate(recipients)]
    connection.execute(sa.insert(payees), rows)
    return number


def listed(connection: sa.Connection) -> list[StoredBatch]:
    """Return all batches, the oldest first."""
    cols = payout_batches.c
    columns = (cols.batch, cols.state, cols.rail, cols.reference, cols.checkpoint_size, cols.made_ms)
    rows = connection.execute(sa.select(*columns).order_by(cols.batch))
    return [StoredBatch(number, BatchState(state), *rest) for number, state, *rest in rows]


class BatchSum(NamedTuple):
    """The amount of a batch, and the number of its payees."""

    amount_micros: int
    payees: int


def sums(connection: sa.Connection) -> dict[int, BatchSum]:
    """Return the sum of each batch, by its number."""
    cols = payees.c
    columns = (cols.batch, sa.func.sum(cols.amount_micros), sa.func.count())
    rows = connection.execute(sa.select(*columns).group_by(cols.batch))
    return {number: BatchSum(int(micros), count) for number, micros, count in rows}


class LoadedBatch(NamedTuple):
    """A batch as it is stored, and in the form that its rail sends."""

    row: StoredBatch
    batch: TransferBatch


def load(connection: sa.Connection, number: int, round_id: str) -> LoadedBatch:
    """Return a batch with its payees and their amounts."""
    row = next((row for row in listed(connection) if row.number == number), None)
    if row is None:
        raise NotFound(f"There is no batch {number}.", hint="See `swarm-coordinator payout list`.")
    batch = TransferBatch(round_id, number, _payees_of(connection, number))
    logged = store.find(connection, f"payout_batch:{number}")
    head = logged.entry if logged else None
    if not isinstance(head, PayoutBatch) or (head.payees_root, head.payees, head.amount_micros) != _head(batch.payees):
        raise PayoutFailed(
            f"The payees of batch {number} in the store are not those that the ledger names.",
            hint="Send no money: somebody may have altered the store. Compare it with a backup.",
        )
    return LoadedBatch(row, batch)


class BatchHead(NamedTuple):
    """The terms of a batch in the ledger: the root of its payees, their number and their sum."""

    root: str
    payees: int
    amount_micros: int


def _head(recipients: Sequence[Payee]) -> BatchHead:
    total = sum(payee.amount_micros for payee in recipients)
    return BatchHead(tree_of.root(recipients).hex(), len(recipients), total)


def export(batch: TransferBatch, folder: Path) -> tuple[Path, Path]:
    """Write a batch as CSV for people and as JSON for programs; return the two paths."""
    path = folder / f"batch-{batch.number:06}"
    table = io.StringIO()
    writer = csv.writer(table, lineterminator="\n")
    writer.writerow(("place", *Payee._fields))
    writer.writerows((place, *payee) for place, payee in enumerate(batch.payees))
    write_durably(path.with_suffix(".csv"), table.getvalue().encode())
    write_durably(path.with_suffix(".json"), json.dumps(as_json(batch), indent=1).encode())
    return path.with_suffix(".csv"), path.with_suffix(".json")


def as_json(batch: TransferBatch) -> dict[str, object]:
    """Return the batch with its root, and the proof of each payee."""
    proofs = tree_of.proofs(batch.payees)
    return {
        "round_id": batch.round_id,
        "batch": batch.number,
        "key": batch.key.hex(),
        "root": batch.root.hex(),
        "amount_micros": batch.amount_micros,
        "payees": [
            {"place": place, **payee._asdict(), "proof": [item.hex() for item in proof]}
            for place, (payee, proof) in enumerate(zip(batch.payees, proofs, strict=True))
        ],
    }


def prove(connection: sa.Connection, node: NodeId, number: int, roots: tuple[bytes, ...]) -> PayoutReply:
    """Return the payout of a node's owner in a batch, with the proof by a published entry."""
    batches = connection.execute(sa.select(sa.func.max(payout_batches.c.batch))).scalar() or 0
    owner = owners.owner_of(connection, node)
    mine = (payees.c.batch == number) & (payees.c.owner == owner)
    place = connection.execute(sa.select(payees.c.place).where(mine)).scalar()
    if place is None:
        return PayoutReply(batches=batches, payout=None)
    effects = [f"payout_batch:{number}"]
    if (claim_id := _share_of(connection, owner, node, number)) is not None:
        effects += [f"payout:{claim_id}", f"paid:{claim_id}"]
    note, entries = store.prove(connection, effects, about=f"batch {number}")
    everybody = _payees_of(connection, number)
    shown = PayoutProof(
        roots=roots,
        checkpoint=note,
        entries=tuple(entries),
        place=place,
        address=everybody[place].address,
        amount_micros=everybody[place].amount_micros,
        proof=tuple(tree_of.proof(everybody, place)),
    )
    return PayoutReply(batches=batches, payout=shown)


def settle(database: Database, row: StoredBatch, batch: TransferBatch, rail: Rail, *, now_ms: int) -> Status:
    """Send a batch, record the status that its rail reports, and return it; safe to repeat and to run concurrently."""
    if row.state is BatchState.SETTLED:
        return Status.DONE
    reference = row.reference or rail.send(batch)
    if database.run_now(_sent, batch.number, reference) is BatchState.SETTLED:
        return Status.DONE
    status = rail.status(reference)
    if status is Status.DONE:
        database.run_now(_paid, batch.number, reference, now_ms)
    elif status is Status.FAILED:
        database.run_now(_forget, batch.number, reference)
    return status


def _payable(
    connection: sa.Connection, size: int, terms: PayoutTerms, now_ms: int
) -> tuple[list[Payee], list[tuple[NodeId, int]]]:
    """Return the payees with their amounts, by owner, and the amounts that come from each node's balance."""
    addresses, owner_of = owners.addresses(connection, now_ms), owners.owners_of(connection)
    shares: dict[str, list[tuple[NodeId, int]]] = defaultdict(list)
    for node, micros in sorted(_published(connection, size).items()):
        shares[owner_of.get(node, node)].append((node, micros))
    recipients, moves = [], []
    for owner, mine in sorted(shares.items()):
        owed, address = sum(micros for _, micros in mine), addresses.get(owner, "")
        amount = owed - owed % terms.step_micros
        if address and address.startswith(terms.scheme) and owed >= terms.minimum_micros and amount:
            owners.require_logged(connection, owner, address, [node for node, _ in mine])
            recipients.append(Payee(owner, address, amount))
            moves += _shares_of(amount, mine)
    return recipients, moves


def _shares_of(amount: int, owed: list[tuple[NodeId, int]]) -> list[tuple[NodeId, int]]:
    """Return what each node's balance gives to an amount; what is too much stays in the last balances."""
    shares = []
    for node, micros in owed:
        share = min(micros, amount)
        amount -= share
        if share:
            shares.append((node, share))
    return shares


def _payees_of(connection: sa.Connection, number: int) -> tuple[Payee, ...]:
    cols = payees.c
    columns = sa.select(cols.owner, cols.address, cols.amount_micros)
    rows = connection.execute(columns.where(cols.batch == number).order_by(cols.place))
    return tuple(Payee(*row) for row in rows)


def _share_of(connection: sa.Connection, owner: str, node: NodeId, number: int) -> str | None:
    """Return the payout of one of an owner's nodes in a batch; of `node`, if it has one."""
    of_node = claims_table.c.claim_id == sa.literal(f"{number}:") + nodes.c.node_id
    shares = sa.select(claims_table.c.claim_id).join(nodes, of_node).where(nodes.c.owner == owner)
    claim_id: str | None = connection.execute(
        shares.order_by(nodes.c.node_id != node, nodes.c.node_id).limit(1)
    ).scalar()
    return claim_id


def _published(connection: sa.Connection, size: int) -> dict[NodeId, int]:
    """Return the micro-units owed to each node by the first `size` entries, less those in batches since."""
    prefix = f"{AccountKind.PAYABLE}:"
    cols = balances_table.c
    rows = connection.execute(sa.select(cols.account, cols.micros).where(cols.account.startswith(prefix)))
    owed = {NodeId(account.removeprefix(prefix)): micros for account, micros in rows}
    for claim_id in _credited_since(connection, size):
        claim = connection.execute(sa.select(claims_table).where(claims_table.c.claim_id == claim_id)).one()
        owed[NodeId(claim.node_id)] -= claim.amount_micros
    return {node: micros for node, micros in owed.items() if micros > 0}


def _credited_since(connection: sa.Connection, size: int) -> list[str]:
    """Return the claims that became payable after the checkpoint."""
    claims: list[str] = []
    while page := store.entries(connection, size, PAGE_ENTRIES):
        claims += [recorded.entry.claim_id for recorded in page if isinstance(recorded.entry, Post | Reinstate)]
        size = page[-1].index + 1
    return claims


def _sent(connection: sa.Connection, number: int, reference: str) -> BatchState:
    """Store the only reference of a batch before it has any effect, and return the batch's state."""
    cols = payout_batches.c
    free = (cols.batch == number) & (cols.reference.is_(None) | (cols.reference == reference))
    values = {"reference": reference, "state": BatchState.SENT.value}
    try:
        changed = connection.execute(
            sa.update(payout_batches).where(free, cols.state != BatchState.SETTLED.value).values(**values)
        ).rowcount
    except sa.exc.IntegrityError:
        raise PayoutFailed(f"Reference {reference} belongs to another batch.", hint="See `payout list`.") from None
    if changed:
        return BatchState.SENT
    if connection.execute(sa.select(cols.batch).where(free)).first() is None:
        raise PayoutFailed(f"Batch {number} was sent by another reference.", hint="See `payout list`.")
    return BatchState.SETTLED  # by another process


def _paid(connection: sa.Connection, number: int, reference: str, now_ms: int) -> None:
    """Move every node's share from paying to paid."""
    if _sent(connection, number, reference) is BatchState.SETTLED:
        return
    prefix = f"{number}:"
    under_way = claims_table.c.claim_id.startswith(prefix) & (claims_table.c.state == ClaimState.PAYING.value)
    shares = connection.execute(sa.select(claims_table.c.node_id).where(under_way).order_by("node_id")).scalars()
    moves = [Paid(batch=number, node_id=NodeId(node), reference=reference) for node in shares]
    outcomes = store.append_all(connection, moves, now_ms)
    if any(outcome is not EntryOutcome.APPLIED for outcome in outcomes):
        raise PayoutFailed(f"The ledger refuses to settle batch {number}: {', '.join(sorted(set(outcomes)))}.")
    which = payout_batches.c.batch == number
    connection.execute(sa.update(payout_batches).where(which).values(state=BatchState.SETTLED.value))


def _forget(connection: sa.Connection, number: int, reference: str) -> None:
    """Remove a reference that, as the rail reports, will never pay: the batch may be sent again."""
    cols = payout_batches.c
    under_way = (cols.batch == number) & (cols.reference == reference) & (cols.state == BatchState.SENT.value)
    connection.execute(sa.update(payout_batches).where(under_way).values(reference=None, state=BatchState.MADE.value))
