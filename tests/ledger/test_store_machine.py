"""Random histories: the store, the pure book, and an auditor who never saw either, must tell the same story.

- The auditor keeps a plain list of what was applied and counts it again from the start for every question.
- The tree must be the one that the auditor makes of the list, by the RFC's words; what was signed is its beginning.
- A transaction that dies between any two statements leaves the story as it was.
- Histories hold duplicates, conflicts, rollbacks of the caller's transaction and reopened connections.
"""

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Literal

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from sqlalchemy import Engine, event

from ledger import store
from ledger.accounts import BUDGET, paid, payable, paying
from ledger.book import BookState, EntryOutcome
from ledger.checkpoint import Checkpoint, open_checkpoint
from ledger.entry import (
    AppealEntry,
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
    parse,
)
from ledger.tree import check_inclusion
from protocol.errors import NotFound
from tests.ledger import naive_tree, values
from tests.ledger.engines import sqlite_file, sqlite_memory
from tests.ledger.notes import KEY, PRIVATE
from tests.ledger.values import (
    appeal,
    applied,
    batch,
    claim,
    commitment,
    credit,
    deposit,
    node,
    owner_act,
    payout,
    post,
    reinstate,
    reveal,
    root,
    ruling,
    verdict,
    version,
    void,
)

SETTINGS = settings(stateful_step_count=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
"""No limit by the clock: a machine may be busy."""

NUMBERS = st.integers(1, 6)
"""Few claims, so that they meet again."""

SHARES = st.sampled_from([(1, 3), (2, 300), (1, 300), (2, 3)])
"""Shares of a batch: a node, and how much; two of them come to all of one."""

OUTCOMES: list[Literal["granted", "denied"]] = ["granted", "denied"]
SECRETS = [bytes(32), b"\1" * 32]

ENTRIES: st.SearchStrategy[Entry] = st.one_of(
    st.builds(deposit, st.sampled_from([1, 500, 2_000]), st.sampled_from(["wire-1", "wire-2", "wire-3"])),
    st.builds(
        credit, NUMBERS, of=st.integers(1, 2), tokens=st.sampled_from([1, 100]), price=st.sampled_from([0, 3_000_000])
    ),
    st.builds(post, NUMBERS),
    st.builds(void, NUMBERS, st.sampled_from(["stale", "replay_mismatch"])),
    st.builds(root, st.integers(1, 3), document=st.sampled_from("ab")),
    st.builds(version, st.integers(1, 3), manifest=st.sampled_from("ab")),
    st.builds(commitment, st.integers(1, 2), st.sampled_from(SECRETS)),
    st.builds(reveal, st.integers(1, 2), st.sampled_from(SECRETS)),
    st.builds(verdict, NUMBERS),
    st.builds(appeal, st.integers(1, 2), digest=st.sampled_from("ab")),
    st.builds(ruling, st.integers(1, 2), st.sampled_from(OUTCOMES), st.sampled_from(["right", "wrong"])),
    st.builds(reinstate, NUMBERS, by=st.integers(1, 2), reason=st.sampled_from(["right", "wrong"])),
    st.builds(owner_act, st.integers(1, 2), digest=st.sampled_from("ab")),
    st.builds(
        batch,
        st.integers(1, 2),
        micros=st.sampled_from([3, 303, 600]),
        payees=st.integers(1, 2),
        root=st.sampled_from("ab"),
    ),
    st.builds(payout, st.integers(1, 2), of=st.integers(1, 2), micros=st.sampled_from([3, 300])),
    st.builds(values.paid, st.integers(1, 2), of=st.integers(1, 2), reference=st.sampled_from(["tx-1", "tx-2"])),
)


class Auditor:
    """Counts by hand: no tables, no hashes, no states, only the list of what happened."""

    def __init__(self) -> None:
        self.happened: list[Entry] = []

    def budget(self) -> int:
        deposited = sum(entry.amount_micros for entry in self.happened if isinstance(entry, Deposit))
        spent = [entry for entry in self.happened if isinstance(entry, Pending) and not self.is_void(entry)]
        return deposited - sum(entry.amount_micros for entry in spent)

    def ended(self, pending: Pending, how: type[Post] | type[Void] | type[Reinstate]) -> bool:
        return any(isinstance(entry, how) and entry.claim_id == pending.claim_id for entry in self.happened)

    def is_void(self, pending: Pending) -> bool:
        return self.ended(pending, Void) and not self.ended(pending, Reinstate)

    def of_node(self, number: int) -> tuple[int, int]:
        """Pending and posted micros of a node."""
        mine = [entry for entry in self.happened if isinstance(entry, Pending) and entry.node_id == node(number)]
        posted = [entry for entry in mine if self.ended(entry, Post) or self.ended(entry, Reinstate)]
        waiting = [entry for entry in mine if not self.ended(entry, Post) and not self.ended(entry, Void)]
        return sum(entry.amount_micros for entry in waiting), sum(entry.amount_micros for entry in posted)

    def payouts_of(self, number: int) -> tuple[int, int]:
        """Micros of a node in batches under way, and paid."""
        mine = [entry for entry in self.happened if isinstance(entry, Payout) and entry.node_id == node(number)]
        ends = {entry.batch for entry in self.happened if isinstance(entry, Paid) and entry.node_id == node(number)}
        under_way = sum(entry.amount_micros for entry in mine if entry.batch not in ends)
        return under_way, sum(entry.amount_micros for entry in mine if entry.batch in ends)

    def owes(self, number: int) -> int:
        """Payable micros of a node."""
        return self.of_node(number)[1] - sum(self.payouts_of(number))

    def allows(self, entry: Entry) -> bool:
        """Return True if an honest clerk would book it."""
        if isinstance(entry, Reveal) and entry.commitment not in self.happened:
            return False
        if isinstance(entry, RulingEntry) and not self.asked_about(entry.claim_id):
            return False
        if isinstance(entry, OnceEntry):
            return not any(old.effect == entry.effect for old in self.happened)
        same = [old for old in self.happened if isinstance(old, ClaimEntry) and old.claim_id == entry.claim_id]
        if isinstance(entry, Pending):
            return not same and self.budget() >= entry.amount_micros
        if isinstance(entry, Payout):
            owed = {number: self.owes(number) for number in (1, 2)}
            return (
                not same
                and any(entry.node_id == node(number) and owed[number] >= entry.amount_micros for number in owed)
                and self.is_published(entry)
            )
        if isinstance(entry, Paid) and len(same) == 1:
            return sum(line.amount_micros for line in self.lines(entry.batch)) == self.published(entry.batch)
        if isinstance(entry, Reinstate):
            worth = sum(old.amount_micros for old in same if isinstance(old, Pending))
            founded = len(same) == 2 and isinstance(same[1], Void) and entry.ruling in self.happened
            return founded and self.budget() >= worth
        return len(same) == 1

    def lines(self, number: int) -> list[Payout]:
        """Return what has gone into a batch."""
        return [entry for entry in self.happened if isinstance(entry, Payout) and entry.batch == number]

    def published(self, number: int) -> int:
        """Return what a batch is to come to; 0 if nobody has said so."""
        return sum(old.amount_micros for old in self.happened if isinstance(old, PayoutBatch) and old.batch == number)

    def is_published(self, entry: Payout) -> bool:
        """Return True if a line can be one of its batch: every payee who is not served yet must still get something."""
        lines = [*self.lines(entry.batch), entry]
        heads = [old for old in self.happened if isinstance(old, PayoutBatch) and old.batch == entry.batch]
        left = self.published(entry.batch) - sum(line.amount_micros for line in lines)
        return any(left >= 0 and left + len(lines) >= head.payees for head in heads)

    def asked_about(self, claim_id: str) -> bool:
        return any(isinstance(old, AppealEntry) and old.claim_id == claim_id for old in self.happened)


class Died(Exception):
    """The process ended here, as far as the database can tell."""


@contextmanager
def dying_after(statements: int, engine: Engine) -> Iterator[None]:
    """Raise at the statement after so many."""
    left = count(statements, -1)

    def die(*_arguments: object) -> None:
        if next(left) <= 0:
            raise Died

    event.listen(engine, "before_cursor_execute", die)
    try:
        yield
    finally:
        event.remove(engine, "before_cursor_execute", die)


class LedgerMachine(RuleBasedStateMachine):
    """One history on one store."""

    def __init__(self) -> None:
        super().__init__()
        self.engine = self.open_engine()
        with self.engine.begin() as conn:
            store.create(conn)
        self.book = BookState()
        self.auditor = Auditor()
        self.signed: Checkpoint | None = None

    def open_engine(self) -> Engine:
        return sqlite_memory()

    def teardown(self) -> None:
        with self.engine.begin() as conn:
            assert store.rebuild(conn) == []
        self.engine.dispose()

    @rule(entry=ENTRIES)
    def append(self, entry: Entry) -> None:
        with self.engine.begin() as conn:
            outcome = store.append(conn, entry, 0)
        self._expect(entry, outcome)

    @rule(entries=st.lists(ENTRIES, min_size=2, max_size=5))
    def append_in_one_transaction(self, entries: list[Entry]) -> None:
        with self.engine.begin() as conn:
            outcomes = store.append_all(conn, entries, 0)
        for entry, outcome in zip(entries, outcomes, strict=True):
            self._expect(entry, outcome)

    @rule(by=st.integers(1, 2), numbers=st.lists(NUMBERS, min_size=1, max_size=3), outcome=st.sampled_from(OUTCOMES))
    def appeal_and_rule(self, by: int, numbers: list[int], outcome: Literal["granted", "denied"]) -> None:
        """Run a sequence that random entries seldom line up to."""
        self.append_in_one_transaction([void(by), *map(void, numbers), appeal(by), ruling(by, outcome)])
        self.append_in_one_transaction([reinstate(number, by=by) for number in [by, *numbers]])

    @rule(number=st.integers(1, 2), payees=st.integers(1, 3), shares=st.lists(SHARES, min_size=1, max_size=3))
    def pay_out(self, number: int, payees: int, shares: list[tuple[int, int]]) -> None:
        """Pay out: who earned something, a batch of some of that, and its payouts, in one transaction or in many."""
        self.append_in_one_transaction([deposit(2_000), credit(1), credit(2, of=2), post(1), post(2)])
        self.append(batch(number, micros=303, payees=payees))
        for of, micros in shares:
            self.append(payout(number, of=of, micros=micros))
        self.append_in_one_transaction([values.paid(number, of=of) for of, _ in shares])

    @rule(entries=st.lists(ENTRIES, min_size=1, max_size=3))
    def append_and_roll_back(self, entries: list[Entry]) -> None:
        with self.engine.connect() as conn:
            for entry in entries:
                store.append(conn, entry, 0)
            conn.rollback()

    @rule(entries=st.lists(ENTRIES, min_size=1, max_size=3), statements=st.integers(0, 12))
    def die_in_the_middle(self, entries: list[Entry], statements: int) -> None:
        with self.engine.connect() as conn, dying_after(statements, self.engine):
            with suppress(Died):
                store.append_all(conn, entries, 0)
                store.publish(conn, KEY, PRIVATE.sign)
            conn.rollback()

    @rule()
    def publish(self) -> None:
        with self.engine.begin() as conn:
            note = store.publish(conn, KEY, PRIVATE.sign)
        bodies = [entry.body for entry in self.auditor.happened]
        later = open_checkpoint(note, [KEY])
        assert (later.size, later.root) == (len(bodies), naive_tree.mth(bodies))
        if self.signed:
            assert self.signed.root == naive_tree.mth(bodies[: self.signed.size])
        self.signed = later

    @precondition(lambda self: self.signed)
    @rule(number=NUMBERS)
    def prove(self, number: int) -> None:
        assert self.signed
        under = self.auditor.happened[: self.signed.size]
        about = [entry for entry in under if isinstance(entry, ClaimEntry) and entry.claim_id == claim(number)]
        try:
            with self.engine.connect() as conn:
                note, found = store.prove_claim(conn, claim(number))
        except NotFound:
            assert not about
        else:
            assert open_checkpoint(note, [KEY]) == self.signed
            assert [parse(item.entry) for item in found] == about
            for item in found:
                check_inclusion(item.entry, item.index, self.signed.size, self.signed.root, item.proof)

    @precondition(lambda self: self.auditor.happened)
    @rule(data=st.data())
    def append_again(self, data: st.DataObject) -> None:
        entry = data.draw(st.sampled_from(self.auditor.happened))
        with self.engine.begin() as conn:
            outcome = store.append(conn, entry, 0)
        assert outcome in {
            EntryOutcome.ALREADY_APPLIED,
            EntryOutcome.ALREADY_POSTED,
            EntryOutcome.ALREADY_VOIDED,
            EntryOutcome.ALREADY_PAID,
        }
        self._expect(entry, outcome)

    def _expect(self, entry: Entry, outcome: EntryOutcome) -> None:
        self.book, expected = applied(self.book, entry)
        assert outcome is expected
        assert (outcome is EntryOutcome.APPLIED) == self.auditor.allows(entry)
        if outcome is EntryOutcome.APPLIED:
            self.auditor.happened.append(entry)

    @invariant()
    def all_three_agree(self) -> None:
        with self.engine.connect() as conn:
            balances = store.balances(conn)
            totals = {row.node_id: row for row in store.node_totals(conn)}
            recorded = [row.entry for row in store.entries(conn, 0, 1_000)]
        assert balances == self.book.balances
        assert recorded == self.auditor.happened
        assert sum(balances.values()) == 0
        assert self.book.balance(BUDGET) == self.auditor.budget()
        for number in (1, 2):
            row = totals.get(node(number))
            assert ((row.pending_micros, row.posted_micros) if row else (0, 0)) == self.auditor.of_node(number)
            assert balances.get(payable(node(number)), 0) == self.auditor.owes(number)
            found = tuple(balances.get(kind(node(number)), 0) for kind in (paying, paid))
            assert found == self.auditor.payouts_of(number)


class LedgerOnDiskMachine(LedgerMachine):
    """The machine on a file, whose connections are closed now and then."""

    def open_engine(self) -> Engine:
        self.folder = TemporaryDirectory()
        return sqlite_file(Path(self.folder.name) / "ledger.sqlite")

    @rule()
    def reopen(self) -> None:
        self.engine.dispose()

    def teardown(self) -> None:
        super().teardown()
        self.folder.cleanup()


TestLedger = LedgerMachine.TestCase
TestLedger.settings = settings(SETTINGS, max_examples=25)

TestLedgerOnDisk = LedgerOnDiskMachine.TestCase
TestLedgerOnDisk.settings = settings(SETTINGS, max_examples=6)
