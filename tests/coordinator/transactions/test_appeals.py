"""Appeals: who may make them and how often, what a ruling pays and lifts, and what nobody gets by asking."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from coordinator.config import AuditSection
from coordinator.reports import explain, moderation
from coordinator.rules.trust import OwnerStanding
from coordinator.store import tables
from coordinator.store.facts import FINISHED, set_fact
from coordinator.transactions import appeals, owners, standings, tally
from coordinator.transactions.appeals import Ruled
from ledger import store
from ledger.entry import AppealEntry, Reinstate, RulingEntry
from protocol import limits
from protocol.errors import (
    BadSignature,
    BudgetExhausted,
    KeyRevoked,
    LeaseOfAnother,
    MalformedMessage,
    MessageTooLarge,
    NotFound,
    OwnerBanned,
    SwarmError,
    WrongAudience,
)
from protocol.people.owner import Delegation, Revocation, seal_statement
from protocol.wire.signing import NodeKey
from protocol.work.appeal import Appeal, AppealReply, seal_appeal
from protocol.work.auditing import Explanation, Explanations, Why
from tests.coordinator.served import serve
from tests.coordinator.transactions.test_escrow import HALF, earn, entries, let_be_drawn, voids
from tests.coordinator.world import HONEST_TOKENS, ROUND, World

RULES = AuditSection()


@pytest.fixture
def world(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[World]:
    """A round in which an owner's first ten groups are all audited."""
    url = request.getfixturevalue("postgres_url") if getattr(request, "param", "") == "postgresql" else ""
    made = World(tmp_path, staleness=100, rules=RULES, postgres_url=url)
    made.publish(1, 0)
    yield made
    assert made.audit() == []
    made.database.close()


def sealed(key: NodeKey, about: str, reason: str = "My card is sound.", **change: Any) -> bytes:
    return seal_appeal(key, Appeal(**({"round_id": ROUND, "about": about, "reason": reason} | change)))


def appeal(world: World, key: NodeKey, about: str, reason: str = "My card is sound.") -> AppealReply:
    reply: AppealReply = world.run(
        appeals.record_appeal, sealed(key, about, reason), round_id=ROUND, now_ms=world.now_ms
    )
    return reply


def rule(world: World, number: int = 1, outcome: Ruled = "granted", code: str = "fault_refuted") -> dict[str, Any]:
    """Rule on an appeal of this round, by default the first; return the result."""
    given: dict[str, Any] = {"given_by": "me", "audit": world.audits.settings, "now_ms": world.now_ms}
    done: dict[str, Any] = world.run(appeals.rule, called(world, number), outcome, code, "We looked again.", **given)
    return done


def called(world: World, place: int) -> int:
    """The number of an appeal; a PostgreSQL that is used again goes on counting."""
    numbers = sorted(row["number"] for row in world.rows(tables.appeals))
    return int(numbers[place - 1]) if place <= len(numbers) else 10**6 + place


def asked(world: World, key: NodeKey, about: str) -> Explanation:
    message = Why.from_value({"about": about})
    context: dict[str, Any] = {"tolerance": "", "tolerances": b"", "now_ms": world.now_ms}
    explained: Explanations = world.run(explain.explain, key.node_id, message, **context)
    return explained.explanations[0]


def a_fault(world: World) -> tuple[NodeKey, str, str, str]:
    """A node with a proven claim beside its pledge, the claim of its window, and the one at fault."""
    world.audits = replace(world.audits, settings=HALF)
    key = world.join(1)
    let_be_drawn(world, True)
    pledge, good = earn(world, key, 2)
    world.find(pledge)
    world.find(good)
    let_be_drawn(world, False)
    (window,) = earn(world, key)
    let_be_drawn(world, True)
    (bad,) = earn(world, key)
    world.run(lambda conn: standings.put(conn, key.node_id, OwnerStanding(5, 4)))
    world.find(bad, "hard")
    return key, good, window, bad


def a_ban(world: World) -> tuple[NodeKey, list[str]]:
    """A node with two claims at fault and one that the ban took."""
    key = world.join(1)
    claims = earn(world, key, 3)
    for bad in claims[:2]:
        world.find(bad, "hard")
        world.now_ms += 1
    return key, claims


class TestEntries:
    def test_appeals_of_free_keys_are_no_entries_before_they_are_ruled_on(self, world: World) -> None:
        """A forged group and a signature cost nothing, and an entry is for ever."""
        before = world.run(store.size)
        claims = list[str]()
        for number in range(1, 6):
            key = world.join(number)
            (bad,) = earn(world, key)
            world.find(bad, "hard")
            claims.append(bad)
        forged = world.run(store.size)
        assert forged - before == 5 * 3, "a claim, a verdict and a void of each"
        for number, bad in enumerate(claims, 1):
            assert appeal(world, NodeKey(number.to_bytes(32)), bad).outcome == "recorded"
        assert world.run(store.size) == forged
        rule(world, outcome="denied")
        last = [type(row.entry) for row in world.run(store.entries, forged, 10)]
        assert last == [AppealEntry, RulingEntry]

    def test_an_appeal_of_an_owner_who_was_paid_is_an_entry_at_once(self, world: World) -> None:
        key = world.join(1)
        pledge, paid, bad = earn(world, key, 3)
        world.find(pledge)
        world.find(paid)
        world.train(1)
        world.find(bad, "hard")
        appeal(world, key, bad)
        assert len(entries(world, AppealEntry)) == 1
        rule(world)
        assert len(entries(world, AppealEntry)) == 1


class TestGranted:
    def test_a_granted_appeal_pays_what_the_fault_took_and_restores_the_owner(self, world: World) -> None:
        key, _, window, bad = a_fault(world)
        before = world.budget()
        assert world.run(standings.find_standing, key.node_id) == OwnerStanding(hard=1)
        assert appeal(world, key, bad).outcome == "recorded"
        done = rule(world)
        assert (done["reinstated_claims"], done["reinstated_micros"]) == (3, 3 * HONEST_TOKENS)
        assert world.owed(key.node_id)[1] == 3 * HONEST_TOKENS
        assert world.budget() == before - 3 * HONEST_TOKENS
        assert world.run(standings.find_standing, key.node_id) == OwnerStanding(5, 4 + 2), (
            "the counts before it, and what was taken"
        )
        paid = [entry.claim_id for entry in entries(world, Reinstate) if isinstance(entry, Reinstate)]
        assert paid[1:] == [window, bad], "behind the pledge"

    def test_the_same_ruling_again_pays_nothing_again(self, world: World) -> None:
        key, _, _, bad = a_fault(world)
        appeal(world, key, bad)
        rule(world)
        before = world.dump()
        for outcome in ("granted", "denied"):
            done = rule(world, outcome=outcome)
            assert (done["changed"], done["reinstated_micros"], done["state"]) == (False, 0, "granted")
        assert appeal(world, key, bad).outcome == "already_recorded"
        assert world.dump() == before

    def test_any_claim_that_a_fault_took_names_the_one_appeal(self, world: World) -> None:
        key, _, window, bad = a_fault(world)
        first, again = appeal(world, key, window), appeal(world, key, bad, "Once more.")
        assert (first.outcome, again.outcome) == ("recorded", "already_recorded")
        assert first.claim_id == again.claim_id == bad
        rule(world)
        assert len(entries(world, AppealEntry)) == 1

    def test_lifting_either_fault_of_two_ends_the_ban_and_pays_what_that_took(self, world: World) -> None:
        key, (first, second, unseen) = a_ban(world)
        with pytest.raises(OwnerBanned):
            world.lease(key)
        assert appeal(world, key, first).number == called(world, 1)
        assert rule(world)["reinstated_claims"] == 2
        assert voids(world).keys() == {first, second, unseen}
        assert world.owed(key.node_id) == (0, 2 * HONEST_TOKENS), "the second fault stands"
        assert world.run(standings.find_standing, key.node_id).hard == 1
        world.lease(key)

    def test_lifting_both_faults_pays_each_claim_once(self, world: World) -> None:
        key, (first, second, unseen) = a_ban(world)
        appeal(world, key, unseen)
        appeal(world, key, first)
        assert [row["claim_id"] for row in world.run(appeals.listed)] == [second, first], (
            "the ban is the second fault's"
        )
        assert rule(world, 1)["reinstated_claims"] == 2
        assert rule(world, 2)["reinstated_claims"] == 1
        assert world.owed(key.node_id) == (0, 3 * HONEST_TOKENS)
        assert world.run(standings.find_standing, key.node_id).hard == 0

    def test_counts_that_a_lifted_fault_took_come_back_only_with_the_fault_after_it(self, world: World) -> None:
        key = world.join(1)
        first, right, second = earn(world, key, 3)
        world.run(lambda conn: standings.put(conn, key.node_id, OwnerStanding(7, 5)))
        world.find(first, "hard")
        world.find(right)
        world.find(second, "hard")
        appeal(world, key, first)
        rule(world, 1)
        assert world.run(standings.find_standing, key.node_id) == OwnerStanding(0, 1, hard=1), (
            "the second fault would have taken them"
        )
        appeal(world, key, second)
        rule(world, 2)
        assert world.run(standings.find_standing, key.node_id) == OwnerStanding(7, 5 + 3)

    def test_a_ban_by_order_is_lifted_with_a_trace_and_no_fault_left(self, world: World) -> None:
        key = world.join(1)
        first, second = earn(world, key, 2)
        terms: dict[str, Any] = {"given_by": "me", "terms": world.audits, "now_ms": 5}
        world.run(moderation.order, "ban", key.node_id, "a mistake", **terms)
        assert appeal(world, key, second).claim_id == first, "one appeal stands for the ban"
        assert rule(world)["reinstated_micros"] == 2 * HONEST_TOKENS
        assert world.run(standings.find_standing, key.node_id).hard == 0
        world.lease(key)
        assert [row["action"] for row in world.rows(tables.orders)] == ["ban", "unban"]
        world.run(moderation.order, "ban", key.node_id, "again", **terms)
        with pytest.raises(OwnerBanned, match="again"):
            world.lease(key)

    def test_a_ban_by_order_stays_when_a_fault_is_lifted(self, world: World) -> None:
        key, (first, _, _) = a_ban(world)
        terms: dict[str, Any] = {"given_by": "me", "terms": world.audits, "now_ms": world.now_ms}
        world.run(moderation.order, "unban", key.node_id, "a chance", **terms)
        (later,) = earn(world, key)
        world.run(moderation.order, "ban", key.node_id, "sold its key", **terms)
        appeal(world, key, first)
        rule(world)
        with pytest.raises(OwnerBanned, match="sold its key"):
            world.lease(key)
        assert voids(world)[later] == OwnerBanned.code
        assert world.owed(key.node_id) == (0, HONEST_TOKENS), "what the order took stays taken"

    def test_without_budget_nothing_is_ruled(self, world: World) -> None:
        key, _, _, bad = a_fault(world)
        appeal(world, key, bad)
        lease, promised = world.lease(world.join(2)), world.budget()
        dear = sa.update(tables.leases).where(tables.leases.c.lease_id == lease.lease_id)
        world.run(lambda conn: conn.execute(dear.values(max_cost_micros=promised)))
        world.run(tally.recount)
        before = world.dump()
        with pytest.raises(BudgetExhausted, match="nothing was ruled"):
            rule(world)
        assert world.dump() == before


class TestDenied:
    def test_a_denied_appeal_changes_nothing_but_the_log(self, world: World) -> None:
        key, _, _, bad = a_fault(world)
        before = (world.owed(key.node_id), world.budget(), world.run(standings.find_standing, key.node_id))
        appeal(world, key, bad)
        assert rule(world, outcome="denied", code="fault_confirmed")["changed"]
        assert (world.owed(key.node_id), world.budget(), world.run(standings.find_standing, key.node_id)) == before
        (ruling,) = entries(world, RulingEntry)
        assert isinstance(ruling, RulingEntry)
        assert (ruling.outcome, ruling.reason_code) == ("denied", "fault_confirmed")
        assert not rule(world, outcome="granted")["changed"], "a ruling is final"
        assert entries(world, Reinstate) == []

    def test_there_is_no_ruling_on_what_nobody_appealed(self, world: World) -> None:
        with pytest.raises(NotFound, match="no appeal 1000007"):
            rule(world, 7)


def owner_of(world: World, key: NodeKey) -> NodeKey:
    """Assign a node to another owner from now on."""
    owner = NodeKey(bytes([9] * 32))
    delegation = seal_statement(owner, Delegation(node_id=key.node_id, number=1))
    world.run(owners.delegate, key.node_id, delegation, now_ms=world.now_ms)
    return owner


def revoke(world: World, owner: NodeKey, key: NodeKey) -> None:
    said = seal_statement(owner, Revocation(node_id=key.node_id, number=2))
    world.run(owners.record_statement, said, round_id=ROUND, scheme="", delay_ms=0, now_ms=world.now_ms)


class TestWho:
    def test_a_banned_node_and_its_owner_are_heard_and_strangers_are_not(self, world: World) -> None:
        key, (first, second, _) = a_ban(world)
        owner, stranger = owner_of(world, key), world.join(3)
        with pytest.raises(LeaseOfAnother):
            appeal(world, stranger, first)
        assert appeal(world, key, first).outcome == "recorded"
        assert appeal(world, owner, second).outcome == "recorded"
        assert {row["signer"] for row in world.run(appeals.listed)} == {key.node_id, owner.node_id}

    def test_a_thief_of_a_node_key_does_not_use_up_its_owners_appeal(self, world: World) -> None:
        key, (first, second, _) = a_ban(world)
        owner = owner_of(world, key)
        assert appeal(world, key, first, "I forged it, and will again.").outcome == "recorded"
        assert appeal(world, owner, first, "The key was stolen.").outcome == "recorded"
        for again in (key, owner):
            assert appeal(world, again, first, "And another word.").outcome == "already_recorded"
        revoke(world, owner, key)
        with pytest.raises(KeyRevoked):
            appeal(world, key, second, "That one, too.")
        (row,) = world.run(appeals.listed)
        assert (row["signer"], row["reason"]) == (owner.node_id, "The key was stolen.")
        assert len(world.rows(tables.appeals)) == 1
        rule(world, 1, "denied")
        assert appeal(world, owner, first, "Still.").standing == "denied"
        assert appeal(world, owner, second).outcome == "recorded"

    def test_what_took_nothing_cannot_be_appealed(self, world: World) -> None:
        key, good, _, _ = a_fault(world)
        with pytest.raises(NotFound, match=r"was not taken: it is pending"):
            appeal(world, key, good)
        for about in ("f" * 32, "f" * 64):
            with pytest.raises(NotFound, match="Nothing was credited"):
                appeal(world, key, about)
        assert world.rows(tables.appeals) == []

    def test_forged_replayed_and_swollen_appeals_cost_no_row(self, world: World) -> None:
        key, _, _, bad = a_fault(world)
        sound = sealed(key, bad)
        wrong: list[tuple[bytes, type[SwarmError]]] = [
            (b"", MalformedMessage),
            (sound[:-1], MalformedMessage),
            (sound[:-1] + bytes([sound[-1] ^ 1]), BadSignature),
            (sealed(key, bad, round_id="b" * 64), WrongAudience),
            (key.seal("owner", Appeal(round_id=ROUND, about=bad, reason="").to_bytes()), BadSignature),
            (bytes(limits.APPEAL_MAX_BYTES + 1), MessageTooLarge),
        ]
        for data, error in wrong:
            with pytest.raises(error):
                world.run(appeals.record_appeal, data, round_id=ROUND, now_ms=0)
        with pytest.raises(ValueError, match="at most 500"):
            sealed(key, bad, "x" * (limits.APPEAL_REASON_MAX_CHARS + 1))
        assert world.rows(tables.appeals) == []
        assert len(sealed(key, bad, "\U0001f9ec" * limits.APPEAL_REASON_MAX_CHARS)) <= limits.APPEAL_MAX_BYTES

    def test_an_owner_cannot_flood_the_operator(self, world: World) -> None:
        key = world.join(1)
        for _ in range(limits.APPEALS_OPEN_MAX):
            (bad,) = earn(world, key)
            world.find(bad, "hard")
            appeal(world, key, bad)
            world.run(lambda conn: standings.forgive(conn, key.node_id))
            world.run(lambda conn: standings.put(conn, key.node_id, OwnerStanding()))
        (bad,) = earn(world, key)
        world.find(bad, "hard")
        with pytest.raises(MessageTooLarge, match="8 appeals of this owner wait"):
            appeal(world, key, bad)
        rule(world, 1, "denied")
        assert appeal(world, key, bad).number == called(world, limits.APPEALS_OPEN_MAX + 1)

    def test_no_words_of_a_person_are_in_the_log(self, world: World) -> None:
        key, _, _, bad = a_fault(world)
        appeal(world, key, bad, "I am Ann of Bern, +41 555 0100")
        rule(world)
        bodies = b"".join(row.entry.body for row in world.run(store.entries, 0, 1000))
        assert b"Ann" not in bodies
        assert b"looked again" not in bodies


class TestTold:
    def test_why_names_the_next_step_and_then_the_ruling(self, world: World) -> None:
        from swarm_node.commands.why import lines

        key, good, window, bad = a_fault(world)
        assert asked(world, key, good).appeal == ""
        lost = asked(world, key, window)
        assert (lost.appeal, lost.code) == ("possible", "escrow_forfeited")
        assert f"swarm-node appeal {lost.lease_id}" in "\n".join(lines(lost))
        assert f"the fault in claim {bad}" in "\n".join(lines(lost)), "what took it"
        appeal(world, key, window)
        assert asked(world, key, bad).appeal == "open"
        rule(world, outcome="denied", code="fault_confirmed")
        told = asked(world, key, bad)
        assert (told.appeal, told.ruling) == ("denied", "fault_confirmed: We looked again.")
        assert "appeal denied: fault_confirmed" in "\n".join(lines(told))

    def test_the_operator_sees_words_evidence_and_what_it_would_pay(self, world: World) -> None:
        key, (first, _, _) = a_ban(world)
        appeal(world, key, first, "Look again.")
        found = world.run(appeals.appeal_report, called(world, 1), world.audits.settings)
        assert (found["reason"], found["finding"], found["amount_micros"]) == ("Look again.", "hard", 2 * HONEST_TOKENS)
        assert found["ends_ban"]
        assert json.loads(found["report"]) == {}
        assert found["free_micros"] == world.budget()


@pytest.mark.asyncio
async def test_over_http_a_node_appeals_and_only_the_operator_rules(tmp_path: Path) -> None:
    async with serve(tmp_path) as served:
        await served.publish()
        node = await served.join(1)
        (lease,) = await served.lease(node)
        await served.submit(node, served.answer(node, lease))
        ban = {"action": "ban", "node": "n1", "reason": "a mistake", "given_by": "me"}
        assert (await served.client.post("/v1/operator/orders", json=ban, headers=served.operator)).status == 200
        said = Appeal(round_id=served.round.round_id, about=lease.lease_id, reason="Why?")
        response = await served.post("/v1/appeals", seal_appeal(node, said))
        assert response.status == 200
        reply = AppealReply.from_bytes(await response.read())
        ruling = {
            "number": reply.number, "outcome": "granted", "reason_code": "a_mistake", "said": "Sorry.",
            "given_by": "me",
        }  # fmt: skip
        for method, path in (("GET", "appeals"), ("GET", "appeals/1"), ("POST", "rulings")):
            refused = await served.client.request(method, f"/v1/operator/{path}", json=ruling)
            assert refused.status == 401
        for wrong in ("", "[]", '{"number": 1}', json.dumps(ruling | {"said": "\x1b[2J"})):
            refused = await served.client.post("/v1/operator/rulings", data=wrong, headers=served.operator)
            assert refused.status == 400
        done = await served.client.post("/v1/operator/rulings", json=ruling, headers=served.operator)
        assert (await done.json())["reinstated_claims"] == 1
        listed = await (await served.client.get("/v1/operator/appeals", headers=served.operator)).json()
        assert [(row["state"], row["reason"], row["said"]) for row in listed] == [("granted", "Why?", "Sorry.")]
        assert await served.round.database.run(store.rebuild) == []
        page = await (await served.client.get("/entries/0")).text()
        assert "credited after a granted appeal" in page


def test_a_restart_between_appeal_and_ruling_loses_neither(world: World) -> None:
    key, _, _, bad = a_fault(world)
    appeal(world, key, bad)
    world.reopen()
    world.run(set_fact, FINISHED, True)
    assert rule(world)["reinstated_claims"] == 3
    world.reopen()
    assert not rule(world)["changed"]
