"""The book: the effect of an entry on the accounts and on its claim, or the reason why it has none.

- All functions are pure: a state and an entry in, the changed values and a named outcome out.
- Only `APPLIED` changes anything; a refused entry changes no account and no claim.
- The life of a claim, and of a payout, is the table `TRANSITIONS`; a test walks all of it.
- A payout is stored like a claim, under a name that no claim can have: a node, an amount, and a state.
- A payout needs its batch in the book first. The payouts of a batch sum to its amount, and leave each of its payees at
  least a micro-unit; none is paid before they sum to the whole amount.
- Conservation is asserted twice: `step` on the accounts it moves, which keeps it for the whole book by induction;
  `check` over a whole book, with every account of a node against its claims.
- A broken invariant is our bug or a damaged store, never the fault of a claim: it raises `BookBroken` and stops the
  program.
"""

from collections.abc import Callable, Iterable, Mapping
from enum import StrEnum
from types import MappingProxyType
from typing import Any, NamedTuple

from ledger.accounts import BUDGET, OF_A_NODE, OUTSIDE, Account, paid, payable, paying, pending
from ledger.entry import (
    DEPOSITS_MAX_MICROS,
    ClaimEntry,
    Deposit,
    Entry,
    OnceEntry,
    Paid,
    Payout,
    PayoutBatch,
    Pending,
    Post,
    Reinstate,
    Reveal,
    RulingEntry,
    Void,
)
from protocol.ids import Digest, NodeId


class EntryOutcome(StrEnum):
    """The result of applying an entry."""

    APPLIED = "applied"
    ALREADY_APPLIED = "already_applied"  # the same entry is in the book
    ALREADY_POSTED = "already_posted"  # the claim was posted before: a void is too late
    ALREADY_VOIDED = "already_voided"  # the claim was voided before: a post is too late
    ALREADY_PAID = "already_paid"  # the payout was paid before, perhaps with another reference
    UNKNOWN_CLAIM = "unknown_claim"  # there is no pending claim to settle
    UNKNOWN_PAYOUT = "unknown_payout"  # there is no payout in progress
    UNKNOWN_BATCH = "unknown_batch"  # no batch of this number was published
    BEYOND_BATCH = "beyond_batch"  # the payouts would exceed their batch, or leave a payee nothing
    BATCH_INCOMPLETE = "batch_incomplete"  # the payouts do not sum to the batch's amount yet
    BUDGET_EXHAUSTED = "budget_exhausted"  # the free budget does not cover the credit
    NOT_PAYABLE = "not_payable"  # the node's payable credit is less
    DEPOSIT_LIMIT = "deposit_limit"  # all deposits together would exceed `DEPOSITS_MAX_MICROS`
    NOT_VOID = "not_void"  # the claim was not voided, so there is nothing to reinstate
    NOT_APPEALED = "not_appealed"  # a ruling without an appeal
    NOT_GRANTED = "not_granted"  # no ruling grants the appeal
    NOT_COMMITTED = "not_committed"  # the secret does not match its commitment
    CONFLICT = "conflict"  # the same effect is in the book with other content


class ClaimState(StrEnum):
    """States of a claim or a payout; `ABSENT` is never stored."""

    ABSENT = "absent"
    PENDING = "pending"
    POSTED = "posted"
    VOIDED = "voided"
    PAYING = "paying"
    PAID = "paid"

    __hash__ = str.__hash__  # an enum's own hash costs more than a step through the table


TRANSITIONS: dict[tuple[ClaimState, str], ClaimState | EntryOutcome] = {
    (ClaimState.ABSENT, "pending"): ClaimState.PENDING,
    (ClaimState.ABSENT, "post"): EntryOutcome.UNKNOWN_CLAIM,
    (ClaimState.ABSENT, "void"): EntryOutcome.UNKNOWN_CLAIM,
    (ClaimState.ABSENT, "reinstate"): EntryOutcome.UNKNOWN_CLAIM,
    (ClaimState.PENDING, "pending"): EntryOutcome.ALREADY_APPLIED,
    (ClaimState.PENDING, "post"): ClaimState.POSTED,
    (ClaimState.PENDING, "void"): ClaimState.VOIDED,
    (ClaimState.PENDING, "reinstate"): EntryOutcome.NOT_VOID,
    (ClaimState.POSTED, "pending"): EntryOutcome.ALREADY_APPLIED,
    (ClaimState.POSTED, "post"): EntryOutcome.ALREADY_POSTED,
    (ClaimState.POSTED, "void"): EntryOutcome.ALREADY_POSTED,
    (ClaimState.POSTED, "reinstate"): EntryOutcome.ALREADY_POSTED,
    (ClaimState.VOIDED, "pending"): EntryOutcome.ALREADY_APPLIED,
    (ClaimState.VOIDED, "post"): EntryOutcome.ALREADY_VOIDED,
    (ClaimState.VOIDED, "void"): EntryOutcome.ALREADY_VOIDED,
    (ClaimState.VOIDED, "reinstate"): ClaimState.POSTED,
    (ClaimState.ABSENT, "payout"): ClaimState.PAYING,
    (ClaimState.ABSENT, "paid"): EntryOutcome.UNKNOWN_PAYOUT,
    (ClaimState.PAYING, "payout"): EntryOutcome.ALREADY_APPLIED,
    (ClaimState.PAYING, "paid"): ClaimState.PAID,
    (ClaimState.PAID, "payout"): EntryOutcome.ALREADY_APPLIED,
    (ClaimState.PAID, "paid"): EntryOutcome.ALREADY_PAID,
}
"""State × kind of entry → the next state, or the outcome without one; a claim and a payout never share a name."""


class BookBroken(RuntimeError):
    """An invariant of the ledger does not hold."""


class Claim(NamedTuple):
    """A claim or a payout with its state; `entry_hash` names the Pending or Payout entry that created it."""

    node_id: NodeId
    state: ClaimState
    amount_micros: int
    tokens: int
    entry_hash: Digest


class BookedBatch(NamedTuple):
    """A published batch, and the part of it that the book has moved."""

    payees: int
    amount_micros: int
    payouts: int = 0
    moved_micros: int = 0

    @property
    def is_whole(self) -> bool:
        return self.moved_micros == self.amount_micros

    def after(self, amount_micros: int) -> "BookedBatch":
        return self._replace(payouts=self.payouts + 1, moved_micros=self.moved_micros + amount_micros)

    @property
    def is_possible(self) -> bool:
        """Return True if enough is left for every payee without a payout; a payout serves at most one payee."""
        return self.amount_micros - self.moved_micros >= max(0, self.payees - self.payouts)


_NOTHING: Mapping[Any, Any] = MappingProxyType({})


class BookState(NamedTuple):
    """The book, or the part of it that an entry reads or changes."""

    balances: Mapping[Account, int] = _NOTHING
    claims: Mapping[str, Claim] = _NOTHING
    once: Mapping[str, Digest] = _NOTHING
    """Effects of entries without a claim, and the content hashes of these entries."""
    batches: Mapping[int, BookedBatch] = _NOTHING

    def balance(self, account: Account) -> int:
        return self.balances.get(account, 0)


_EMPTY = BookState()


class Folding:
    """A mutable book to which entries are added in order; each costs only as much as it changes."""

    def __init__(self, before: BookState = _EMPTY) -> None:
        self._balances, self._claims = dict(before.balances), dict(before.claims)
        self._once, self._batches = dict(before.once), dict(before.batches)
        self.state = BookState(self._balances, self._claims, self._once, self._batches)

    def add(self, entry: Entry) -> EntryOutcome:
        (balances, claims, once, batches), outcome = step(self.state, entry)
        if balances:
            self._balances.update(balances)
        if claims:
            self._claims.update(claims)
        if once:
            self._once.update(once)
        if batches:
            self._batches.update(batches)
        return outcome


def fold(entries: Iterable[tuple[int, Entry]], before: BookState = _EMPTY) -> tuple[BookState, dict[int, EntryOutcome]]:
    """Return the book after many numbered entries, and the outcomes of the entries that were not applied."""
    folding = Folding(before)
    refused: dict[int, EntryOutcome] = {}
    for number, entry in entries:
        outcome = folding.add(entry)
        if outcome is not EntryOutcome.APPLIED:
            refused[number] = outcome
    return folding.state, refused


def step(state: BookState, entry: Entry) -> tuple[BookState, EntryOutcome]:
    """Return the values that an entry changes; read only its claim, effect, batch and the accounts of its `route`."""
    return _STEPS.get(entry.kind, _once)(state, entry)


def _begun(state: BookState, entry: Pending | Payout) -> tuple[BookState, EntryOutcome]:
    """Add a claim or a payout to the book."""
    known = state.claims.get(entry.claim_id)
    if known is not None and known.entry_hash != entry.content_hash:
        return _EMPTY, EntryOutcome.CONFLICT
    target = TRANSITIONS[known.state if known is not None else ClaimState.ABSENT, entry.kind]
    if isinstance(target, EntryOutcome):
        return _EMPTY, target
    source, sink = route(entry, entry.node_id)
    if state.balance(source) < entry.amount_micros:
        return _EMPTY, EntryOutcome.BUDGET_EXHAUSTED if entry.kind == "pending" else EntryOutcome.NOT_PAYABLE
    tokens = entry.tokens if entry.kind == "pending" else 0
    claim = Claim(entry.node_id, target, entry.amount_micros, tokens, entry.content_hash)
    return BookState(_moved(state, source, sink, entry.amount_micros), {entry.claim_id: claim}), EntryOutcome.APPLIED


def _settled(state: BookState, entry: Post | Void | Reinstate | Paid) -> tuple[BookState, EntryOutcome]:
    """Move a claim or a payout in the book to its next state."""
    known = state.claims.get(entry.claim_id)
    target = TRANSITIONS[known.state if known is not None else ClaimState.ABSENT, entry.kind]
    if isinstance(target, EntryOutcome):
        return _EMPTY, target
    if known is None:
        raise BookBroken(f"The table lets a {entry.kind} change an absent claim.")
    if entry.kind == "reinstate" and (refusal := _unfounded(state, entry, known)):
        return _EMPTY, refusal
    claim = Claim(known.node_id, target, known.amount_micros, known.tokens, known.entry_hash)
    source, sink = route(entry, known.node_id)
    return BookState(_moved(state, source, sink, known.amount_micros), {entry.claim_id: claim}), EntryOutcome.APPLIED


def _shared(state: BookState, entry: Payout) -> tuple[BookState, EntryOutcome]:
    """Add a node's share to a published batch, unless it exceeds the batch."""
    changed, outcome = _begun(state, entry)
    if outcome is not EntryOutcome.APPLIED:
        return _EMPTY, outcome
    if (batch := state.batches.get(entry.batch)) is None:
        return _EMPTY, EntryOutcome.UNKNOWN_BATCH
    if not (after := batch.after(entry.amount_micros)).is_possible:
        return _EMPTY, EntryOutcome.BEYOND_BATCH
    return changed._replace(batches={entry.batch: after}), outcome


def _paid_out(state: BookState, entry: Paid) -> tuple[BookState, EntryOutcome]:
    """Mark a node's share as paid, once the payouts sum to the published batch."""
    changed, outcome = _settled(state, entry)
    if outcome is not EntryOutcome.APPLIED:
        return _EMPTY, outcome
    if (batch := state.batches.get(entry.batch)) is None:
        return _EMPTY, EntryOutcome.UNKNOWN_BATCH
    return (changed, outcome) if batch.is_whole else (_EMPTY, EntryOutcome.BATCH_INCOMPLETE)


def _unfounded(state: BookState, entry: Reinstate, claim: Claim) -> EntryOutcome | None:
    """Return why a voided claim cannot be reinstated; None if it can, with its original amount."""
    if state.once.get(entry.ruling.effect) != entry.ruling.content_hash:
        return EntryOutcome.NOT_GRANTED
    return EntryOutcome.BUDGET_EXHAUSTED if state.balance(BUDGET) < claim.amount_micros else None


_ROUTES: dict[str, tuple[Callable[[NodeId], Account], Callable[[NodeId], Account]]] = {
    "pending": (lambda _node: BUDGET, pending),
    "post": (pending, payable),
    "void": (pending, lambda _node: BUDGET),
    "reinstate": (lambda _node: BUDGET, payable),
    "payout": (payable, paying),
    "paid": (paying, paid),
}
"""Kind of entry → source and destination of its amount, for its claim's node."""


def route(entry: Deposit | ClaimEntry, node: NodeId | None) -> tuple[Account, Account]:
    """Return the source and the destination account of an entry's amount; `node` is the claim's."""
    if entry.kind == "deposit":
        return OUTSIDE, BUDGET
    if node is None:
        raise BookBroken(f"A {entry.kind} needs the node of its claim.")
    source, sink = _ROUTES[entry.kind]
    return source(node), sink(node)


_STANDS_IN: dict[ClaimState, tuple[tuple[Callable[[NodeId], Account], int], ...]] = {
    ClaimState.PENDING: ((pending, 1),),
    ClaimState.POSTED: ((payable, 1),),
    ClaimState.VOIDED: (),
    ClaimState.PAYING: ((payable, -1), (paying, 1)),
    ClaimState.PAID: ((payable, -1), (paid, 1)),
}
"""State → the accounts of its node that a claim or a payout adds to, with the sign."""

_OF_A_PAYOUT = frozenset({ClaimState.PAYING, ClaimState.PAID})


def check(state: BookState) -> None:
    """Assert conservation over a whole book: no amount was created or lost."""
    owed: dict[Account, int] = {}
    for claim in state.claims.values():
        for account_of, sign in _STANDS_IN[claim.state]:
            mine = account_of(claim.node_id)
            owed[mine] = owed.get(mine, 0) + sign * claim.amount_micros
    for account in owed.keys() | state.balances.keys():
        balance = state.balance(account)
        if balance < 0 and not account.may_be_negative:
            raise BookBroken(f"Account {account} has {balance} micros, below zero.")
        if account.kind in OF_A_NODE and balance != owed.get(account, 0):
            raise BookBroken(f"Account {account} has {balance} micros, but its claims sum to {owed.get(account, 0)}.")
    if total := sum(state.balances.values()):
        raise BookBroken(f"All accounts sum to {total} micros instead of 0.")
    _check_batches(state)


def _check_batches(state: BookState) -> None:
    """Assert that every payout has a batch, and that each batch has the sum of its payouts."""
    moved = dict.fromkeys(state.batches, 0)
    for claim_id, claim in state.claims.items():
        if claim.state in _OF_A_PAYOUT:
            number = int(claim_id.partition(":")[0])
            moved[number] = moved.get(number, 0) + claim.amount_micros
    for number, micros in moved.items():
        batch = state.batches.get(number)
        if batch is None or batch.moved_micros != micros:
            raise BookBroken(f"The payouts of batch {number} sum to {micros} micros, but the book has {batch}.")


def _once(state: BookState, entry: OnceEntry) -> tuple[BookState, EntryOutcome]:
    """Apply an entry without a claim: a deposit moves money, the others move none."""
    known = state.once.get(entry.effect)
    if known is not None:
        return _EMPTY, EntryOutcome.ALREADY_APPLIED if known == entry.content_hash else EntryOutcome.CONFLICT
    if isinstance(entry, Reveal) and state.once.get(entry.commitment.effect) != entry.commitment.content_hash:
        return _EMPTY, EntryOutcome.NOT_COMMITTED
    if isinstance(entry, RulingEntry) and entry.appealed not in state.once:
        return _EMPTY, EntryOutcome.NOT_APPEALED
    balances: Mapping[Account, int] = _NOTHING
    batches: Mapping[int, BookedBatch] = _NOTHING
    if isinstance(entry, PayoutBatch):
        batches = {entry.batch: BookedBatch(entry.payees, entry.amount_micros)}
    if isinstance(entry, Deposit):
        if entry.amount_micros - state.balance(OUTSIDE) > DEPOSITS_MAX_MICROS:
            return _EMPTY, EntryOutcome.DEPOSIT_LIMIT
        balances = _moved(state, *route(entry, None), entry.amount_micros)
    return BookState(balances, once={entry.effect: entry.content_hash}, batches=batches), EntryOutcome.APPLIED


_STEPS: dict[str, Callable[[BookState, Any], tuple[BookState, EntryOutcome]]] = {
    "pending": _begun,
    "payout": _shared,
    "post": _settled,
    "void": _settled,
    "reinstate": _settled,
    "paid": _paid_out,
}
"""Kind of entry → the function that applies it; for all others `_once`."""


def _moved(state: BookState, source: Account, sink: Account, amount_micros: int) -> dict[Account, int]:
    """Return the two balances after a movement; assert that it conserves the sum and leaves no debt inside."""
    had, held = state.balances.get(source, 0), state.balances.get(sink, 0)
    left, holds = had - amount_micros, held + amount_micros
    if left + holds != had + held:
        raise BookBroken(f"Moving {amount_micros} micros from {source} to {sink} does not conserve their sum.")
    if left < 0 and not source.may_be_negative:
        raise BookBroken(f"Account {source} would fall to {left} micros; the book or its store is damaged.")
    if holds < 0 and not sink.may_be_negative:
        raise BookBroken(f"Account {sink} would fall to {holds} micros; the book or its store is damaged.")
    return {source: left, sink: holds}
