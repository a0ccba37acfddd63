"""Short names for entries that tests write often."""

from typing import Literal

from ledger import book
from ledger.book import BookState, EntryOutcome
from ledger.entry import (
    AppealEntry,
    Commitment,
    Deposit,
    Entry,
    FormedBatch,
    OwnerAct,
    Paid,
    Payout,
    PayoutBatch,
    Pending,
    Post,
    Reinstate,
    RetractionEntry,
    Reveal,
    Root,
    RulingEntry,
    UpdateEntry,
    VerdictEntry,
    Version,
    Void,
    amount,
)
from protocol import ids
from protocol.ids import NodeId
from protocol.policy import chunks

PRICE_MICROS_PER_MTOK = 3_000_000


def node(number: int) -> NodeId:
    return ids.node_id(number.to_bytes(32))


def claim(number: int) -> str:
    return f"{number:064x}"


def deposit(amount_micros: int, reference: str = "wire-1") -> Deposit:
    return Deposit(reference=reference, amount_micros=amount_micros)


def credit(number: int, *, of: int = 1, tokens: int = 100, price: int = PRICE_MICROS_PER_MTOK) -> Pending:
    return Pending(
        claim_id=claim(number),
        lease_id=f"{number:032x}",
        node_id=node(of),
        tokens=tokens,
        price_micros_per_mtok=price,
        amount_micros=amount(tokens, price),
    )


def version(number: int, *, manifest: str = "a") -> Version:
    return Version(version=number, manifest_digest=manifest * 64)


def root(number: int, *, document: str = "c") -> Root:
    return Root(version=number, root_digest=document * 64)


def commitment(epoch: int, secret: bytes = bytes(32)) -> Commitment:
    return Commitment(epoch=epoch, secret_digest=chunks.digest(secret))


def reveal(epoch: int, secret: bytes = bytes(32)) -> Reveal:
    return Reveal(epoch=epoch, secret=secret, draws_digest="d" * 64)


def verdict(number: int) -> VerdictEntry:
    return VerdictEntry(claim_id=claim(number), outcome="pass", validator="replay/1", evidence_digest="e" * 64)


def formed(number: int, *, groups: str = "b") -> FormedBatch:
    return FormedBatch(number=number, groups=2, groups_root=groups * 64)


def trained(
    number: int, before: str, after: str, *, attempt: int = 1, groups: str = "b", settings: str = "5", by: int = 0
) -> UpdateEntry:
    """An update from one state to another; each state is one digit."""
    return UpdateEntry(
        update=number,
        attempt=attempt,
        before=before * 64,
        after=after * 64,
        groups_root=groups * 64,
        settings_digest=settings * 64,
        seed=7,
        steps=number,
        replaced_by=by,
    )


def retraction(
    version: int, first: int, last: int, before: str, after: str, *, owners: tuple[int, ...] = (1,)
) -> RetractionEntry:
    """Updates made again without a group; each state is one digit."""
    return RetractionEntry(
        version=version,
        owners=tuple(node(number) for number in owners),
        first=first,
        last=last,
        before=before * 64,
        after=after * 64,
        left_out=1,
        left_out_root="c" * 64,
    )


def post(number: int) -> Post:
    return Post(claim_id=claim(number))


def void(number: int, reason_code: str = "replay_mismatch") -> Void:
    return Void(claim_id=claim(number), reason_code=reason_code)


def appeal(number: int, *, digest: str = "d") -> AppealEntry:
    return AppealEntry(claim_id=claim(number), statement_digest=digest * 64)


def ruling(
    number: int, outcome: Literal["granted", "denied"] = "granted", reason: str = "fault_refuted"
) -> RulingEntry:
    return RulingEntry(claim_id=claim(number), outcome=outcome, reason_code=reason)


def reinstate(number: int, *, by: int = 1, reason: str = "fault_refuted") -> Reinstate:
    return Reinstate(claim_id=claim(number), appealed_claim_id=claim(by), reason_code=reason)


def owner_act(number: int, *, owner: int = 9, of: int = 1, digest: str = "d") -> OwnerAct:
    return OwnerAct(owner=node(owner), number=number, act="delegation", node_id=node(of), statement_digest=digest * 64)


def batch(number: int, *, micros: int = 300, payees: int = 1, root: str = "e") -> PayoutBatch:
    return PayoutBatch(batch=number, payees_root=root * 64, payees=payees, amount_micros=micros)


def payout(number: int, *, of: int = 1, micros: int = 300) -> Payout:
    return Payout(batch=number, node_id=node(of), amount_micros=micros)


def paid(number: int, *, of: int = 1, reference: str = "tx-1") -> Paid:
    return Paid(batch=number, node_id=node(of), reference=reference)


def applied(state: BookState, entry: Entry) -> tuple[BookState, EntryOutcome]:
    """Return the whole book after an entry, checked, and the outcome."""
    changed, outcome = book.step(state, entry)
    after = BookState(
        {**state.balances, **changed.balances},
        {**state.claims, **changed.claims},
        {**state.once, **changed.once},
        {**state.batches, **changed.batches},
    )
    book.check(after)
    return after, outcome
