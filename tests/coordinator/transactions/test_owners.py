"""Owners: whose node is whose for ever, keys out of service, addresses that wait."""

from typing import Any

import pytest
import sqlalchemy as sa

from coordinator.reports import moderation
from coordinator.rules.trust import OwnerStanding
from coordinator.store import tables
from coordinator.transactions import owners, registry, standings
from coordinator.transactions.orders import Action
from ledger import store
from ledger.entry import OwnerAct
from protocol import limits
from protocol.errors import (
    KeyRevoked,
    LeaseClosed,
    MalformedMessage,
    OwnerBanned,
    OwnerConflict,
    StatementStale,
    SwarmError,
    TooManyStatements,
    UnknownOwner,
    WrongAudience,
)
from protocol.people.owner import (
    Delegation,
    Earnings,
    PayoutAddress,
    Revocation,
    Statement,
    StatementReply,
    seal_statement,
)
from protocol.policy import chunks
from protocol.wire.signing import NodeKey
from protocol.work.messages import Register
from tests.coordinator.world import HONEST_TOKENS, PRICE, ROUND, World, answer, fragment

OWNER, THIEF = NodeKey(b"o" * 32), NodeKey(b"t" * 32)
DELAY_MS = 1_000
DAY_MS = 86_400_000


def delegate(world: World, key: NodeKey, owner: NodeKey = OWNER, *, number: int = 1, to: NodeKey | None = None) -> None:
    """Register with a delegation."""
    word = seal_statement(owner, Delegation(node_id=(to or key).node_id, number=number))
    message = Register(name="n", price_micros_per_mtok=PRICE, addresses=(), agent="", delegation=word)
    world.run(registry.register, key.node_id, message, max_price=10 * PRICE, now_ms=world.now_ms)


def say(world: World, said: Statement, owner: NodeKey = OWNER, *, scheme: str = "") -> StatementReply:
    reply: StatementReply = world.run(
        owners.record_statement,
        seal_statement(owner, said),
        round_id=ROUND,
        scheme=scheme,
        delay_ms=DELAY_MS,
        now_ms=world.now_ms,
    )
    return reply


def address(number: int, where: str = "text:mine", round_id: str = ROUND) -> PayoutAddress:
    return PayoutAddress(round_id=round_id, address=where, number=number)


def counts(world: World) -> str:
    found: dict[str, str] = world.run(owners.addresses, world.now_ms)
    return found.get(OWNER.node_id, "")


def earnings(world: World, key: NodeKey) -> Earnings:
    found: Earnings = world.run(owners.earnings, key.node_id, now_ms=world.now_ms)
    return found


def acts(world: World) -> list[OwnerAct]:
    return [row.entry for row in world.run(store.entries, 0, 1_000) if isinstance(row.entry, OwnerAct)]


def owner_of(world: World, key: NodeKey) -> str:
    found: dict[str, str] = world.run(owners.owners_of)
    return found[key.node_id]


def test_a_node_is_its_own_until_it_shows_a_delegation_and_registering_again_without_keeps_the_owner(
    world: World,
) -> None:
    key = world.join(1)
    assert owner_of(world, key) == key.node_id
    delegate(world, key)
    world.join(1)
    assert owner_of(world, key) == OWNER.node_id


def paid_for(world: World, *keys: NodeKey) -> None:
    """Have each of these nodes' work trained on and found right: the world audits nothing."""
    world.publish(1, 0)
    for key in keys:
        world.earn(key)
    world.release_leftovers()


def test_delegation_is_an_entry_by_its_digest_and_the_same_again_is_none(world: World) -> None:
    key = world.join(1)
    delegate(world, key)
    delegate(world, key)
    delegate(world, key, number=2)
    paid_for(world, key)
    delegate(world, key)
    (row,) = world.rows(tables.statements)
    (act,) = acts(world)
    assert act.statement_digest == chunks.digest(row["envelope"])
    assert (act.owner, act.act, act.node_id, act.number) == (OWNER.node_id, "delegation", key.node_id, 1)


def test_a_free_owner_adds_no_entry_by_however_many_nodes_addresses_and_revocations(world: World) -> None:
    """Each was an entry for ever: a thousand addresses, and a delegation for every key that costs nothing."""
    before = world.run(store.size)
    for number in range(1, 20):
        delegate(world, world.join(number), number=number)
    for day in range(3):
        for number in range(limits.ADDRESSES_PER_DAY - 1):
            say(world, address(100 + 10 * day + number))
        world.now_ms += DAY_MS
    say(world, Revocation(node_id=NodeKey((1).to_bytes(32)).node_id, number=1_000))
    assert world.run(store.size) == before
    assert counts(world) == "text:mine", "what counts does so without an entry"


def test_an_owners_word_is_in_the_log_with_the_first_payment_and_what_no_node_earned_is_not(world: World) -> None:
    key, other, idle = (world.join(number) for number in (1, 2, 3))
    for number, each in enumerate((key, other, idle), 1):
        delegate(world, each, number=number)
    say(world, address(4))
    say(world, Revocation(node_id=other.node_id, number=5))
    paid_for(world, key)
    assert [(act.act, act.number) for act in acts(world)] == [("delegation", 1), ("address", 4)]
    say(world, address(6, "text:new"))
    say(world, Revocation(node_id=key.node_id, number=7))
    say(world, Revocation(node_id=idle.node_id, number=8))
    logged = [(act.act, act.number) for act in acts(world)]
    assert logged == [("delegation", 1), ("address", 4), ("address", 6), ("revocation", 7)]
    assert world.audit() == []


def test_a_node_that_earned_alone_is_in_the_log_with_its_owner_at_once(world: World) -> None:
    key = world.join(1)
    paid_for(world, key)
    delegate(world, key)
    assert [act.node_id for act in acts(world)] == [key.node_id]


def test_stolen_node_key_cannot_take_the_node_to_another_owner(world: World) -> None:
    key = world.join(1)
    delegate(world, key)
    with pytest.raises(OwnerConflict):
        delegate(world, key, THIEF)
    assert owner_of(world, key) == OWNER.node_id


def test_delegation_to_another_node_is_refused(world: World) -> None:
    """An owner's file that was copied works for nobody else."""
    with pytest.raises(OwnerConflict):
        delegate(world, world.join(1), to=world.join(2))


def test_anything_else_in_the_place_of_a_delegation_is_refused_and_nothing_is_registered(world: World) -> None:
    key = NodeKey(b"1" * 32)
    for word in (b"", b"garbage", bytes(100), seal_statement(OWNER, Revocation(node_id=key.node_id, number=1))):
        message = Register(name="n", price_micros_per_mtok=PRICE, addresses=(), agent="", delegation=word)
        with pytest.raises(SwarmError):
            world.run(registry.register, key.node_id, message, max_price=PRICE, now_ms=0)
    assert world.rows(tables.nodes) == []


def order(world: World, action: Action, key: NodeKey) -> dict[str, Any]:
    """Apply an operator's order about a node."""
    given: dict[str, Any] = {"given_by": "me", "terms": world.audits, "now_ms": world.now_ms}
    done: dict[str, Any] = world.run(moderation.order, action, key.node_id, "because", **given)
    return done


def test_whitewashing_by_a_fresh_owners_delegation_leaves_a_node_banned(world: World) -> None:
    world.publish(1, 0)
    key, sister = world.join(1), world.join(2)
    order(world, "ban", key)
    delegate(world, key)
    delegate(world, sister, number=2)
    assert owner_of(world, key) == OWNER.node_id, "who can have paid what it earned"
    with pytest.raises(OwnerBanned, match="because"):
        world.lease(key)
    world.lease(sister)
    listed = {row["node_id"]: row["banned_ms"] for row in world.run(moderation.listed, alive_since_ms=0)}
    assert listed == {key.node_id: world.now_ms, sister.node_id: None}


def test_whitewashing_by_a_delegation_before_the_second_verdict_saves_no_node(world: World) -> None:
    """The ban falls on the key that the claims were made under, whoever it works for by then."""
    world.publish(1, 0)
    key, sister = world.join(1), world.join(2)
    for _ in range(2):
        world.earn(key)
    wrong = [row["claim_id"] for row in world.rows(tables.rollouts)]
    world.run(lambda connection: connection.execute(tables.audits.update().values(why="drawn")))
    world.find(wrong[0], "hard")
    delegate(world, key)
    delegate(world, sister, number=2)
    lease = world.lease(key)
    world.find(wrong[1], "hard")
    assert world.lease_states()[lease.lease_id] == "rejected"
    with pytest.raises(OwnerBanned):
        world.lease(key)
    world.lease(sister)
    assert order(world, "unban", key) == {
        "action": "unban", "node_id": key.node_id, "owner": key.node_id, "changed": True,
    }  # fmt: skip
    world.lease(key)


def test_a_banned_owners_node_joins_anew_by_another_key_and_owner_only(world: World) -> None:
    world.publish(1, 0)
    key, later = world.join(1), NodeKey(b"2" * 32)
    delegate(world, key)
    order(world, "ban", key)
    say(world, Revocation(node_id=key.node_id, number=2))
    for owner, refusal in ((OWNER, KeyRevoked), (THIEF, KeyRevoked)):
        with pytest.raises(refusal):
            delegate(world, key, owner, number=3)
    with pytest.raises(OwnerBanned):
        delegate(world, later, number=4)
    delegate(world, later, THIEF, number=5)
    world.lease(later)


def test_hiding_groups_from_a_retraction_by_a_delegation_to_a_banned_owner_is_refused(world: World) -> None:
    """A retraction would count the node's groups as taken back, and might have trained on them already."""
    world.publish(1, 0)
    key, accomplice = world.join(1), world.join(2)
    delegate(world, key)
    world.earn(accomplice)
    order(world, "ban", key)
    with pytest.raises(OwnerBanned, match="no node can be delegated"):
        delegate(world, accomplice, number=2)
    assert owner_of(world, accomplice) == accomplice.node_id
    delegate(world, key)  # the same delegation again, as each registration sends it


def test_one_number_for_two_nodes_is_refused(world: World) -> None:
    delegate(world, world.join(1))
    with pytest.raises(StatementStale):
        delegate(world, world.join(2))
    assert owner_of(world, world.join(2)) == world.join(2).node_id


def test_revoked_node_gets_no_work_and_cannot_come_back(world: World) -> None:
    world.publish(1, 0)
    key = world.join(1)
    delegate(world, key)
    lease = world.lease(key)
    say(world, Revocation(node_id=key.node_id, number=2))
    with pytest.raises(KeyRevoked):
        world.offer(key)
    with pytest.raises(KeyRevoked):
        world.join(1)
    with pytest.raises(KeyRevoked):
        delegate(world, key, number=3)
    assert lease.lease_id in world.lease_states()


def test_garbage_told_under_a_stolen_key_goes_nowhere_once_it_is_revoked(world: World) -> None:
    """A fault on it would fall on the owner, who has done all that an owner can."""
    stolen, heir = world.join(1), world.join(2)
    delegate(world, stolen)
    left, held = world.lease(stolen), world.lease(stolen)
    assert world.tell(stolen, fragment(stolen, left, {0: [77]})).taken
    world.give_back(stolen, left)
    say(world, Revocation(node_id=stolen.node_id, number=2))
    assert not world.tell(stolen, fragment(stolen, held, {0: [77]})).taken
    assert world.submit(stolen, answer(stolen, held)).code == LeaseClosed.code
    given = world.offer(heir, groups=2, continues=True).leases
    assert [lease.prefixes for lease in given] == [(), ()]
    assert {lease.prompt for lease in given} == {left.prompt, held.prompt}, "at once, and not when its time is over"
    (row,) = [row for row in world.rows(tables.leases) if row["lease_id"] == held.lease_id]
    assert (row["state"], row["code"]) == ("rejected", KeyRevoked.code)
    assert world.rows(tables.fragments) == []


def test_what_a_revoked_node_earned_stays_its_owners(world: World) -> None:
    world.publish(1, 0)
    key, other = world.join(1), world.join(2)
    delegate(world, key, number=1)
    delegate(world, other, number=2)
    world.earn(key)
    say(world, Revocation(node_id=key.node_id, number=3))
    found = earnings(world, other)
    assert found.total.pending_micros == HONEST_TOKENS
    assert [(row.node_id, row.revoked) for row in found.nodes] == [(key.node_id, True), (other.node_id, False)]


def test_revocation_by_another_owner_or_of_a_stranger_is_refused(world: World) -> None:
    mine, theirs = world.join(1), world.join(2)
    delegate(world, mine)
    delegate(world, theirs, THIEF)
    for node in (mine.node_id, NodeKey(b"x" * 32).node_id):
        with pytest.raises(OwnerConflict):
            say(world, Revocation(node_id=node, number=9), THIEF)
    assert [row["kind"] for row in world.rows(tables.statements)] == 2 * ["delegation"]


def test_revoking_again_under_ever_new_numbers_fills_no_disk(world: World) -> None:
    key = world.join(1)
    delegate(world, key)
    outcomes = [say(world, Revocation(node_id=key.node_id, number=number)).outcome for number in range(2, 9)]
    assert outcomes == ["recorded"] + 6 * ["already_recorded"]
    assert len(world.rows(tables.statements)) == 2


def test_owner_without_a_node_can_say_nothing(world: World) -> None:
    """Keys cost nothing: a stranger with a million of them leaves no row."""
    key = world.join(1)
    for owner in (OWNER, key):  # a node's own key is no owner's key either
        with pytest.raises(UnknownOwner):
            say(world, address(1), owner)
    assert world.rows(tables.statements) == []


def test_address_counts_after_the_delay_and_not_a_millisecond_before(world: World) -> None:
    delegate(world, world.join(1))
    assert say(world, address(2)).counts_from_ms == world.now_ms + DELAY_MS
    world.now_ms += DELAY_MS - 1
    assert counts(world) == ""
    world.now_ms += 1
    assert counts(world) == "text:mine"


def test_changing_again_restarts_the_delay_and_the_last_address_that_counted_goes_on_counting(world: World) -> None:
    key = world.join(1)
    delegate(world, key)
    say(world, address(2))
    world.now_ms += DELAY_MS
    say(world, address(3, "text:thief"))
    world.now_ms += DELAY_MS - 1
    say(world, address(4))  # the owner notices at the last moment
    assert earnings(world, key).next_address == "text:mine"
    for _ in range(3):
        world.now_ms += DELAY_MS // 2
        assert counts(world) == "text:mine"
    found = earnings(world, key)
    assert (found.address, found.next_address, found.next_from_ms) == ("text:mine", "", 0)


def test_stolen_owner_key_cannot_date_its_address_so_late_that_the_owner_cannot_answer(world: World) -> None:
    delegate(world, world.join(1))
    for far in (world.now_ms + 1_000 * limits.CLOCK_SKEW_MAX_S + 1, limits.STATEMENT_NUMBER_MAX):
        with pytest.raises(StatementStale, match="clock"):
            say(world, address(far, "text:thief"))
    say(world, address(world.now_ms + 1_000 * limits.CLOCK_SKEW_MAX_S))


def test_stolen_owner_key_cannot_use_up_all_changes_and_have_the_last_word(world: World) -> None:
    delegate(world, world.join(1))
    say(world, address(2))
    world.now_ms += DELAY_MS
    for number in range(3, 2 + limits.ADDRESSES_PER_DAY):
        say(world, address(number, "text:thief"))
    with pytest.raises(TooManyStatements):
        say(world, address(10_000))
    world.now_ms += 10 * DELAY_MS
    assert counts(world) == "text:mine"


def test_what_an_owner_of_many_nodes_asks_costs_no_more_questions_to_the_store(world: World) -> None:
    """Identities are free, and the answer is computed where everybody's work waits."""

    def asked(connection: sa.Connection) -> int:
        statements = list[str]()

        def note(*said: Any) -> None:
            statements.append(said[2])

        sa.event.listen(connection, "before_cursor_execute", note)
        try:
            owners.earnings(connection, key.node_id, now_ms=world.now_ms)
        finally:
            sa.event.remove(connection, "before_cursor_execute", note)
        return len(statements)

    key = world.join(1)
    delegate(world, key)
    alone = world.run(asked)
    for number in range(2, 12):
        delegate(world, world.join(number), number=number)
    assert world.run(asked) == alone
    assert len(earnings(world, key).nodes) == 11


def test_replayed_old_address_is_refused(world: World) -> None:
    delegate(world, world.join(1))
    say(world, address(2, "text:old"))
    say(world, address(3))
    assert say(world, address(2, "text:old")).outcome == "already_recorded"
    world.now_ms += DELAY_MS
    assert counts(world) == "text:mine"
    with pytest.raises(StatementStale):
        say(world, address(3, "text:other"))
    with pytest.raises(StatementStale):
        say(world, address(1, "text:other"))


def test_address_signed_for_another_round_or_another_rail_is_refused(world: World) -> None:
    delegate(world, world.join(1))
    with pytest.raises(WrongAudience):
        say(world, address(2, round_id="b" * 64))
    with pytest.raises(MalformedMessage):
        say(world, address(2), scheme="evm:")


def test_ever_new_addresses_have_an_end_every_day(world: World) -> None:
    key = world.join(1)
    delegate(world, key)
    for number in range(limits.ADDRESSES_PER_DAY):
        say(world, address(2 + number))
        world.now_ms += 60_000
    with pytest.raises(TooManyStatements, match=r"after 2025-11-14 ..:.. UTC") as refused:
        say(world, address(10_000))
    assert refused.value.retry_after_s == (DAY_MS - limits.ADDRESSES_PER_DAY * 60_000) // 1_000
    say(world, Revocation(node_id=key.node_id, number=10_001))  # which is never refused for that
    world.now_ms += 1_000 * refused.value.retry_after_s
    assert say(world, address(10_002)).outcome == "recorded", "the first of them is a day old"


def test_an_owners_changes_of_a_day_grow_with_the_work_that_was_found_right(world: World) -> None:
    delegate(world, world.join(1))
    for groups, more in ((limits.GROUPS_PER_ADDRESS, 1), (10**6, limits.ADDRESSES_PER_DAY_MAX)):
        assert owners.addresses_per_day(groups) == min(limits.ADDRESSES_PER_DAY_MAX, limits.ADDRESSES_PER_DAY + more)
    world.run(standings.count, OWNER.node_id, 1)
    world.run(standings.put, OWNER.node_id, OwnerStanding(claims=1, groups=limits.GROUPS_PER_ADDRESS))
    for number in range(limits.ADDRESSES_PER_DAY + 1):
        say(world, address(2 + number))
    with pytest.raises(TooManyStatements):
        say(world, address(10_000))


def test_a_key_that_is_rotated_with_its_history_keeps_what_the_old_one_earned(world: World) -> None:
    old, new = NodeKey(b"1" * 32), NodeKey(b"2" * 32)
    message = Register(name="old", price_micros_per_mtok=PRICE, addresses=(), agent="")
    world.run(registry.register, old.node_id, message, max_price=10 * PRICE, now_ms=world.now_ms)
    delegate(world, new, old)
    found = earnings(world, new)
    assert found.owner == old.node_id
    assert {row.node_id for row in found.nodes} == {old.node_id, new.node_id}
    assert say(world, Revocation(node_id=old.node_id, number=2), old).outcome == "recorded"
    assert world.run(owners.owners_of)[new.node_id] == old.node_id
