"""Payout batches: who gets into one, what it says, and that nobody is paid twice, whatever dies when."""

import csv
import json
import os
import shutil
import signal
from contextlib import suppress
from itertools import count
from pathlib import Path

import pytest
import sqlalchemy as sa

from coordinator.store.state import Database
from coordinator.store.tables import nodes, statements
from coordinator.transactions import owners, payouts
from coordinator.transactions.payouts import BatchState, PayoutTerms
from coordinator.transactions.rails.base import Manual, Rail, Status, TransferBatch
from ledger import store
from ledger.accounts import OUTSIDE, AccountKind, paid, payable, paying
from ledger.entry import (
    AppealEntry,
    Paid,
    Payout,
    PayoutBatch,
    Pending,
    Post,
    Reinstate,
    RulingEntry,
    Void,
    amount,
    parse,
)
from ledger.payout_proof import PayoutReply
from ledger.tree import check_inclusion
from protocol.errors import NotFound, PayoutFailed, ProofInvalid
from protocol.people.owner import Delegation, PayoutAddress, seal_statement
from protocol.wire.signing import NodeKey
from tests.coordinator.bank import Bank
from tests.coordinator.transactions.test_owners import delegate
from tests.coordinator.world import NOW_MS, PRICE, ROUND, World
from tests.ledger.notes import KEY, PRIVATE

TERMS = PayoutTerms(rail="bank", scheme="", minimum_micros=100)
LATER_MS = NOW_MS + 1_000_000
ROOTS = (b"the round's root document",)
_claims = count(1)


def owe(world: World, key: NodeKey, micros: int) -> None:
    """Validated work of a node, worth so much."""
    number = next(_claims)
    claim = f"{number:064x}"
    credit = Pending(
        claim_id=claim,
        lease_id=f"{number:032x}",
        node_id=key.node_id,
        tokens=micros,
        price_micros_per_mtok=PRICE,
        amount_micros=amount(micros, PRICE),
    )
    world.run(store.append_all, [credit, Post(claim_id=claim)], 0)
    world.run(owners.sequence, [key.node_id], 0)


def publish(world: World) -> None:
    world.run(store.publish, KEY, PRIVATE.sign)


def owner(number: int, world: World, *, nodes: int = 1, address: bool = True) -> list[NodeKey]:
    """An owner's nodes, and an address that counts."""
    boss = NodeKey((1_000 + number).to_bytes(32))
    keys = [world.join(100 * number + place) for place in range(nodes)]
    for place, key in enumerate(keys):
        delegate(world, key, boss, number=1 + place)
    if address:
        said = PayoutAddress(round_id=ROUND, address=f"text:account {number}", number=1_000)
        word = seal_statement(boss, said)
        world.run(owners.record_statement, word, round_id=ROUND, scheme="", delay_ms=0, now_ms=world.now_ms)
    return keys


def create(world: World, terms: PayoutTerms = TERMS) -> TransferBatch:
    publish(world)
    number = world.run(payouts.create, terms, now_ms=world.now_ms)
    return load(world, number)


def load(world: World, number: int) -> TransferBatch:
    batch: TransferBatch = world.run(payouts.load, number, ROUND)[1]
    return batch


def settle(world: World, batch: TransferBatch, rail: Rail) -> Status:
    row, batch = world.run(payouts.load, batch.number, ROUND)
    return payouts.settle(world.database, row, batch, rail, now_ms=world.now_ms)


def balance(world: World, key: NodeKey) -> tuple[int, int, int]:
    """Payable, paying and paid of a node."""
    found = world.run(store.balances)
    payable_, paying_, paid_ = (found.get(kind(key.node_id), 0) for kind in (payable, paying, paid))
    return payable_, paying_, paid_


def test_money_goes_from_payable_over_paying_to_paid_and_none_is_made(world: World, tmp_path: Path) -> None:
    (key,) = owner(1, world)
    owe(world, key, 250)
    batch = create(world)
    assert [tuple(payee)[1:] for payee in batch.payees] == [("text:account 1", 250)]
    assert balance(world, key) == (0, 250, 0)
    bank = Bank(tmp_path / "bank")
    assert settle(world, batch, bank) is Status.DONE
    assert balance(world, key) == (0, 0, 250)
    assert settle(world, batch, bank) is Status.DONE
    assert len(bank.transfers) == 1
    assert world.run(store.rebuild) == []
    assert sum(world.run(store.balances).values()) == 0
    assert world.run(store.balances)[OUTSIDE] < 0


def test_ten_small_nodes_are_paid_what_one_big_one_is(world: World) -> None:
    """The number of identities does not change the pay, and the minimum applies to the owner, not to each node."""
    (big,) = owner(1, world)
    small = owner(2, world, nodes=10)
    for key in small:
        owe(world, key, 30)
        owe(world, big, 30)
    batch = create(world)
    assert sorted(payee.amount_micros for payee in batch.payees) == [300, 300]
    assert all(balance(world, key) == (0, 30, 0) for key in small)


def test_amount_is_rounded_down_to_what_the_rail_pays_and_the_rest_is_carried_over(
    world: World, tmp_path: Path
) -> None:
    cents = PayoutTerms(rail="bank", scheme="", minimum_micros=1, step_micros=10_000)
    first, second = owner(1, world, nodes=2)
    (small,) = owner(2, world)
    for key, micros in ((first, 15_000), (second, 12_345), (small, 9_999)):
        owe(world, key, micros)
    batch = create(world, cents)
    assert [payee.amount_micros for payee in batch.payees] == [20_000]
    assert settle(world, batch, Bank(tmp_path / "bank")) is Status.DONE
    assert sum(balance(world, key)[0] for key in (first, second)) == 7_345
    assert balance(world, small) == (9_999, 0, 0)
    with pytest.raises(PayoutFailed, match=r"owed 0\.01 "):  # the rail's smallest payment, above the minimum
        create(world, cents)
    for key, micros in ((first, 2_655), (small, 1)):
        owe(world, key, micros)
    assert [payee.amount_micros for payee in create(world, cents).payees] == [10_000, 10_000]
    assert [balance(world, key)[0] for key in (first, second, small)] == [0, 0, 0]
    assert world.run(store.rebuild) == []


def test_who_has_no_address_that_counts_or_is_owed_too_little_waits_and_loses_nothing(world: World) -> None:
    (poor,), (nowhere,), (rich,) = owner(1, world), owner(2, world, address=False), owner(3, world)
    nobody = world.join(7)
    owe(world, poor, 99)
    owe(world, rich, 100)
    for key in (nowhere, nobody):
        owe(world, key, 500)
    batch = create(world)
    assert [payee.address for payee in batch.payees] == ["text:account 3"]
    assert [balance(world, key)[0] for key in (poor, nowhere, nobody)] == [99, 500, 500]
    owe(world, poor, 1)
    assert [payee.amount_micros for payee in create(world).payees] == [100]


def test_only_what_a_checkpoint_covers_is_paid(world: World) -> None:
    """A payment by entries that nobody can check yet is not made."""
    (key,) = owner(1, world)
    owe(world, key, 150)
    publish(world)
    owe(world, key, 1_000)
    number = world.run(payouts.create, TERMS, now_ms=world.now_ms)
    assert load(world, number).amount_micros == 150
    assert balance(world, key) == (1_000, 150, 0)
    with pytest.raises(PayoutFailed):  # the same checkpoint again
        world.run(payouts.create, TERMS, now_ms=world.now_ms)


def test_what_an_appeal_gave_back_waits_for_a_checkpoint_too(world: World) -> None:
    """Else money moves on the word of an order that nobody outside has seen."""
    (key,) = owner(1, world)
    claim = "f" * 64
    credit = Pending(
        claim_id=claim,
        lease_id="f" * 32,
        node_id=key.node_id,
        tokens=500,
        price_micros_per_mtok=PRICE,
        amount_micros=amount(500, PRICE),
    )
    world.run(store.append_all, [credit, Void(claim_id=claim, reason_code="replay_mismatch")], 0)
    publish(world)
    ruled = [
        AppealEntry(claim_id=claim, statement_digest="0" * 64),
        RulingEntry(claim_id=claim, outcome="granted", reason_code="fault_refuted"),
        Reinstate(claim_id=claim, appealed_claim_id=claim, reason_code="fault_refuted"),
    ]
    world.run(store.append_all, ruled, 0)
    world.run(owners.sequence, [key.node_id], 0)
    with pytest.raises(PayoutFailed, match="No owner"):
        world.run(payouts.create, TERMS, now_ms=world.now_ms)
    assert [payee.amount_micros for payee in create(world).payees] == [500]


def test_nothing_to_pay_makes_no_batch(world: World) -> None:
    with pytest.raises(PayoutFailed, match="checkpoint"):
        world.run(payouts.create, TERMS, now_ms=world.now_ms)
    owner(1, world)
    with pytest.raises(PayoutFailed, match="owed"):
        create(world)
    assert world.run(payouts.listed) == []
    with pytest.raises(NotFound):
        load(world, 1)


def test_addresses_of_another_scheme_wait(world: World) -> None:
    (key,) = owner(1, world)
    owe(world, key, 150)
    with pytest.raises(PayoutFailed):
        create(world, PayoutTerms(rail="evm", scheme="evm:", minimum_micros=1))


def test_the_root_in_the_ledger_proves_every_payee_and_no_other_amount(world: World, tmp_path: Path) -> None:
    for number in range(1, 6):
        (key,) = owner(number, world)
        owe(world, key, 100 * number)
    batch = create(world)
    (head,) = [row.entry for row in world.run(store.entries, 0, 1_000) if isinstance(row.entry, PayoutBatch)]
    assert (head.amount_micros, head.payees) == (1_500, 5)
    table, proofs = payouts.export(batch, tmp_path)
    exported = json.loads(proofs.read_text())
    assert exported["root"] == head.payees_root
    for payee, said in zip(batch.payees, exported["payees"], strict=True):
        proof = [bytes.fromhex(item) for item in said["proof"]]
        check_inclusion(payee.leaf, said["place"], 5, bytes.fromhex(head.payees_root), proof)
        more = payee._replace(amount_micros=payee.amount_micros + 1)
        with pytest.raises(ProofInvalid):
            check_inclusion(more.leaf, said["place"], 5, bytes.fromhex(head.payees_root), proof)
    with table.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [(row["address"], int(row["amount_micros"])) for row in rows] == [tuple(p)[1:] for p in batch.payees]
    before = table.read_bytes(), proofs.read_bytes()
    payouts.export(load(world, batch.number), tmp_path)
    assert (table.read_bytes(), proofs.read_bytes()) == before


def prove(world: World, key: NodeKey, number: int = 1) -> PayoutReply:
    found: PayoutReply = world.run(payouts.prove, key.node_id, number, ROOTS)
    return found


def test_payee_is_shown_the_own_line_once_it_is_published_and_nobody_elses(world: World) -> None:
    first, second = owner(1, world, nodes=2), owner(2, world)
    idle, stranger = world.join(199), world.join(8)
    delegate(world, idle, NodeKey((1_001).to_bytes(32)), number=9)
    for key in (first[1], *second):
        owe(world, key, 200)
    batch = create(world)
    with pytest.raises(NotFound, match="batch 1"):
        prove(world, first[0])
    publish(world)
    settle(world, batch, Manual("SEPA-1"))
    place_of = {payee.address: place for place, payee in enumerate(batch.payees)}
    for key, address, share in (
        (first[0], "text:account 1", first[1]),
        (first[1], "text:account 1", first[1]),
        (idle, "text:account 1", first[1]),
        (second[0], "text:account 2", second[0]),
    ):
        shown = prove(world, key).payout
        assert shown
        assert (shown.place, shown.address, shown.amount_micros) == (place_of[address], address, 200)
        check_inclusion(batch.payees[shown.place].leaf, shown.place, 2, batch.root, shown.proof)
        entries = [parse(item.entry) for item in shown.entries]
        paying_out = Payout(batch=1, node_id=share.node_id, amount_micros=200)
        assert entries[1:] == [paying_out], "that it was paid is not published yet"
    assert prove(world, stranger) == PayoutReply(batches=1, payout=None)
    assert prove(world, first[0], number=2) == PayoutReply(batches=1, payout=None)
    publish(world)
    shown = prove(world, first[0]).payout
    assert shown
    assert isinstance(parse(shown.entries[2].entry), Paid)


ALTERED_BATCHES = {
    "another payee": "UPDATE payees SET address = 'text:thief'",
    "another amount": "UPDATE payees SET amount_micros = amount_micros + 1 WHERE place = 0",
    "a payee more": "INSERT INTO payees SELECT batch, 2, 'thief', 'text:thief', 1 FROM payees WHERE place = 0",
    "a payee less": "DELETE FROM payees WHERE place = 1",
    "no such batch in the log": "UPDATE ledger_entries SET effect = 'payout_batch:7' WHERE effect = 'payout_batch:1'",
}
"""Changes that somebody who can write to the store may make to a batch that waits for its payment."""


@pytest.mark.parametrize("altered", ALTERED_BATCHES.values(), ids=ALTERED_BATCHES)
def test_payees_that_were_altered_in_the_store_are_not_paid(world: World, tmp_path: Path, altered: str) -> None:
    for number in (1, 2):
        owe(world, owner(number, world)[0], 500)
    batch = create(world)
    bank = Bank(tmp_path / "bank")
    world.run(lambda connection: connection.exec_driver_sql(altered))
    with pytest.raises(PayoutFailed, match="not those that the ledger names"):
        settle(world, batch, bank)
    assert not bank.transfers


def test_an_owner_with_an_address_is_paid_for_a_node_that_earned_before_it_was_delegated(world: World) -> None:
    """The address had no entry, since no node of the owner had earned: that refused the payment of all owners."""
    owner(1, world)
    key, (other,) = world.join(150), owner(2, world)
    owe(world, key, 500)
    owe(world, other, 100)
    delegate(world, key, NodeKey((1_001).to_bytes(32)), number=9)
    paid_to = [(payee.address, payee.amount_micros) for payee in create(world).payees]
    assert sorted(paid_to) == [("text:account 1", 500), ("text:account 2", 100)]


def test_an_address_that_was_altered_in_the_store_is_not_paid(world: World) -> None:
    (key,) = owner(1, world)
    owe(world, key, 500)
    world.run(lambda connection: connection.exec_driver_sql("UPDATE statements SET address = 'text:thief'"))
    with pytest.raises(PayoutFailed, match="does not have the address"):
        create(world)
    assert balance(world, key) == (500, 0, 0)


@pytest.mark.parametrize("forges_delegation", [False, True])
def test_a_node_that_was_given_to_another_owner_in_the_store_is_not_paid(world: World, forges_delegation: bool) -> None:
    """A delegation is signed by the owner alone, so a thief can sign one for any node; the log has the real ones."""
    (victim,), (rich,) = owner(1, world), owner(2, world)
    owe(world, victim, 500)
    owe(world, rich, 500)
    thief = NodeKey((1_002).to_bytes(32))

    def alter(connection: sa.Connection) -> None:
        connection.execute(sa.update(nodes).where(nodes.c.node_id == victim.node_id).values(owner=thief.node_id))
        if forges_delegation:
            word = seal_statement(thief, Delegation(node_id=victim.node_id, number=7))
            row = {"owner": thief.node_id, "number": 7, "kind": "delegation", "address": "", "envelope": word}
            row |= {"received_ms": 0, "counts_from_ms": 0, "node_id": victim.node_id, "sequenced": True}
            connection.execute(sa.insert(statements).values(**row))

    world.run(alter)
    with pytest.raises(PayoutFailed, match="does not have 1 of the nodes"):
        create(world)
    assert balance(world, victim) == (500, 0, 0)


def test_payment_by_hand_waits_for_a_reference_and_takes_one(world: World) -> None:
    (key,) = owner(1, world)
    owe(world, key, 150)
    batch = create(world)
    with pytest.raises(PayoutFailed, match="Pay the amounts"):
        settle(world, batch, Manual(""))
    assert balance(world, key) == (0, 150, 0)
    assert settle(world, batch, Manual("SEPA-1")) is Status.DONE
    assert settle(world, batch, Manual("SEPA-2")) is Status.DONE  # settled: a second word changes nothing
    (row,) = world.run(payouts.listed)
    assert (row.state, row.reference) == (BatchState.SETTLED, "SEPA-1")
    entries = [row.entry for row in world.run(store.entries, 0, 1_000)]
    assert [entry.reference for entry in entries if isinstance(entry, Paid)] == ["SEPA-1"]


def test_one_reference_settles_one_batch(world: World) -> None:
    (key,) = owner(1, world)
    for _ in range(2):
        owe(world, key, 150)
        create(world)
    settle(world, load(world, 1), Manual("SEPA-1"))
    with pytest.raises(PayoutFailed, match="another batch"):
        settle(world, load(world, 2), Manual("SEPA-1"))
    assert balance(world, key) == (0, 150, 150)


def test_what_is_under_way_is_not_sent_again_and_what_failed_is(world: World, tmp_path: Path) -> None:
    (key,) = owner(1, world)
    owe(world, key, 150)
    batch = create(world)
    for status, state in (
        (Status.UNDER_WAY, BatchState.SENT),
        (Status.FAILED, BatchState.MADE),
        (Status.DONE, BatchState.SETTLED),
    ):
        assert settle(world, batch, Bank(tmp_path / "bank", status=status)) is status
        assert [row.state for row in world.run(payouts.listed)] == [state]
    assert balance(world, key) == (0, 0, 150)


def pay_all(path: Path, folder: Path, bank: Bank) -> dict[AccountKind, int]:
    """Run an operator's commands until nothing is left to pay; return the final amounts."""
    database = Database(path)
    try:
        with suppress(PayoutFailed):
            database.run_now(payouts.create, TERMS, now_ms=LATER_MS)
        for row in database.run_now(payouts.listed):
            row, batch = database.run_now(payouts.load, row.number, ROUND)
            payouts.export(batch, folder)
            payouts.settle(database, row, batch, bank, now_ms=LATER_MS)
        assert database.run_now(store.rebuild) == []
        balances = database.run_now(store.balances)
        return {kind: sum(micros for at, micros in balances.items() if at.kind is kind) for kind in AccountKind}
    finally:
        database.close()


def dies_at(moment: int, path: Path, folder: Path) -> bool:
    """Pay in a process that is killed at the n-th statement or step of the rail; whether it came so far."""
    child = os.fork()
    if not child:
        moments = count()

        def step(*arguments: object) -> None:
            looks_at_the_schema = len(arguments) > 2 and str(arguments[2]).startswith("PRAGMA")
            if not looks_at_the_schema and next(moments) == moment:
                os.kill(os.getpid(), signal.SIGKILL)

        code = 1
        try:
            sa.event.listen(sa.engine.Engine, "before_cursor_execute", step)
            pay_all(path, folder, Bank(folder / "bank", step))
            code = 0
        finally:
            os._exit(code)
    _, status = os.waitpid(child, 0)
    assert status == 0 or os.WTERMSIG(status) == signal.SIGKILL, f"the child failed by itself: {status}"
    return status != 0


def test_nobody_is_paid_twice_or_not_at_all_wherever_it_is_killed(tmp_path: Path) -> None:
    """The program is killed between any two statements, before and after the rail, commits, and copies of the file."""
    world = World(tmp_path)
    keys = [*owner(1, world, nodes=2), *owner(2, world)]
    for key in keys:
        owe(world, key, 200)
    publish(world)
    world.database.close()
    for moment in count():
        folder = tmp_path / str(moment)
        folder.mkdir()
        path = folder / "state.db"
        shutil.copy(tmp_path / "state.db", path)
        died = dies_at(moment, path, folder)
        bank = Bank(folder / "bank")
        left = pay_all(path, folder, bank)
        assert [line.split()[1] for line in bank.transfers] == ["600"], moment
        assert (left[AccountKind.PAYABLE], left[AccountKind.PAYING], left[AccountKind.PAID]) == (0, 0, 600), moment
        shutil.rmtree(folder)
        if not died:
            break
    assert moment > 20, "the process was hardly killed at all"
