"""Parts of groups that others finished: audited by lot, held in escrow and punished as whole groups are."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from coordinator.config import AuditSection
from coordinator.reports import explain
from coordinator.rules.trust import OwnerStanding
from coordinator.store import tables
from coordinator.store.facts import FINISHED, set_fact
from coordinator.transactions import audits, lottery, standings
from ledger import store
from ledger.entry import Pending, Void
from protocol.errors import OwnerBanned
from protocol.policy.chunks import digest
from protocol.wire.signing import NodeKey, open_envelope
from protocol.work.auditing import AuditCase, Cases, Explanations, Why
from protocol.work.fragment import check_fragments
from protocol.work.lease import Lease
from protocol.work.messages import Verdict
from protocol.work.rollout import RolloutClaim, check_claim
from tests.coordinator.transactions.test_owners import delegate
from tests.coordinator.world import HONEST_TOKENS, ROUND, World, answer, fragment

HALF = AuditSection(first_groups=1, floor=0.5, trusted_floor=0.5, escrow_factor=1.0)
"""One unaudited group stays unpaid."""


@pytest.fixture
def audited(tmp_path: Path, store_url: str) -> Iterator[World]:
    """A round in which an owner's first ten groups, and parts meanwhile, are all audited."""
    made = World(tmp_path, staleness=100, rules=AuditSection(), postgres_url=store_url)
    made.publish(1, 0)
    yield made
    made.database.close()


def share(world: World, key: NodeKey, heir: NodeKey, tokens: dict[int, list[int]] | None = None) -> tuple[str, str]:
    """A group that one node begins, by one token unless it is said, and another finishes; the claims of both."""
    lease = world.leave(key, tokens or {0: [first_token(world)]}, heir=heir)
    assert world.submit(heir, answer(heir, lease)).outcome == "accepted"
    part, whole = world.rows(tables.parts)[-1], world.rows(tables.rollouts)[-1]
    assert part["whole"] == whole["claim_id"]
    return part["claim_id"], whole["claim_id"]


def first_token(world: World) -> int:
    """The honest one of the next group."""
    waiting = [number for number, state in world.group_states().items() if state == "open"]
    return 10 + (waiting[0] if waiting else len(world.group_states()))


def is_drawn(world: World, drawn: bool) -> None:
    """Rates of all or nothing, so that a test knows what is drawn."""
    rate = 1.0 if drawn else 0.0
    rules = world.audits.settings.model_copy(update={"first_groups": 0, "floor": rate, "trusted_floor": rate})
    world.judge = replace(world.judge, audits=replace(world.audits, settings=rules))


def voided(world: World) -> dict[str, str]:
    entries = [row.entry for row in world.run(store.entries, 0, 1000)]
    return {entry.claim_id: entry.reason_code for entry in entries if isinstance(entry, Void)}


def test_structural_mismatch_what_is_audited_is_what_was_paid(audited: World) -> None:
    """An auditor who read other tokens out of the same bytes than the till did would pass what nobody checked."""
    first, heir = audited.join(1), audited.join(2)
    share(audited, first, heir)
    assert audited.earn(first).outcome == "accepted"
    paid = {
        row.entry.claim_id: row.entry.tokens
        for row in audited.run(store.entries, 0, 1000)
        if isinstance(row.entry, Pending)
    }
    taken: Cases = audited.run(audits.assign_cases, "auditor", 64, terms=audited.audits, now_ms=audited.now_ms)
    read = {case.claim_id: tokens_of(audited, case) for case in taken.cases}
    assert read == {claim_id: (claim_id, tokens) for claim_id, tokens in paid.items()}
    assert len(read) == 3


def tokens_of(world: World, case: AuditCase) -> tuple[str, int]:
    """The claim that a case is about, and how many tokens an auditor looks at, from the signed bytes alone."""
    lease, bounds = Lease.from_bytes(case.lease), world.judge.bounds
    if case.fragments:
        payloads = [open_envelope("fragment", told).payload for told in case.fragments]
        said = check_fragments(payloads, lease, ROUND, bounds)
    else:
        payloads = [open_envelope("rollout", case.rollout).payload]
        said = check_claim(RolloutClaim.from_bytes(payloads[0]), lease, ROUND, bounds)
    return digest(payloads[-1]), sum(len(one.tokens) for one in said)


def money(world: World, *keys: NodeKey) -> list[tuple[int, int]]:
    return [world.owed(key.node_id) for key in keys]


def ban(world: World, wrong: list[Verdict]) -> None:
    """The owner's claims that were accepted by these verdicts are found wrong."""
    leased = {verdict.lease_id for verdict in wrong}
    for row in world.rows(tables.rollouts):
        if row["lease_id"] in leased:
            world.find(row["claim_id"], "hard")


def why(world: World, key: NodeKey, about: str) -> Explanations:
    told: Explanations = world.run(
        explain.explain, key.node_id, Why(about=about), tolerance="a/b/c", tolerances=b"", now_ms=world.now_ms
    )
    return told


class TestSettlement:
    def test_nothing_that_was_drawn_is_paid_before_its_audit(self, audited: World) -> None:
        first, heir = audited.join(1), audited.join(2)
        part, whole = share(audited, first, heir)
        audited.earn(heir)
        dearer = audited.rows(tables.rollouts)[-1]["claim_id"]
        audited.train(1)
        assert money(audited, first, heir) == [(1, 0), (3 + HONEST_TOKENS, 0)]
        assert set(audited.take_cases()) > {part, whole}
        audited.find(part)
        assert money(audited, first, heir) == [(0, 1), (3 + HONEST_TOKENS, 0)]
        audited.find(whole)
        assert money(audited, first, heir) == [(0, 1), (3 + HONEST_TOKENS, 0)], "a part is no pledge, a group is"
        audited.find(dearer)
        assert money(audited, first, heir) == [(0, 1), (HONEST_TOKENS, 3)]

    def test_a_part_that_was_audited_is_paid_with_the_use_of_its_group(self, audited: World) -> None:
        first, heir = audited.join(1), audited.join(2)
        part, _ = share(audited, first, heir)
        audited.find(part)
        assert money(audited, first) == [(1, 0)]
        audited.earn(heir)
        audited.train(1)
        assert money(audited, first) == [(0, 1)]

    def test_parts_of_one_token_close_no_window_and_earn_no_trust(self, audited: World) -> None:
        audited.audits = replace(audited.audits, settings=HALF)
        key, heir = audited.join(1), audited.join(2)
        is_drawn(audited, False)
        audited.earn(key)
        for _ in range(5):
            share(audited, key, heir)
        assert audited.run(standings.find_standing, key.node_id) == OwnerStanding(claims=1)
        audited.run(lambda conn: standings.put(conn, key.node_id, OwnerStanding(2, 2)))
        for number in (1, 2, 3):
            audited.train(number)
        assert money(audited, key) == [(HONEST_TOKENS + 5, 0)]
        audited.earn(key)
        audited.earn(key)
        audited.train(4)
        assert money(audited, key) == [(HONEST_TOKENS, 2 * HONEST_TOKENS + 5)], "one more group, and five parts"
        assert audited.run(standings.find_standing, key.node_id) == OwnerStanding(claims=4, groups=4)

    def test_parts_of_a_group_that_another_answered_first_are_paid_after_their_audit(self, audited: World) -> None:
        first, heir = audited.join(1), audited.join(2)
        lease = audited.leave(first, {0: [10]}, heir=heir)
        audited.run(lambda conn: conn.execute(tables.leases.update().values(surplus=True)))
        assert audited.submit(heir, answer(heir, lease)).outcome == "accepted"
        (part,) = audited.rows(tables.parts)
        assert money(audited, first, heir) == [(1, 0), (3, 0)]
        audited.find(part["claim_id"])
        assert money(audited, first, heir) == [(0, 1), (3, 0)]


class TestFaults:
    def test_garbage_takes_its_group_out_of_the_buffer_and_who_went_on_from_it_is_paid(self, audited: World) -> None:
        cheat, heir = audited.join(1), audited.join(2)
        part, whole = share(audited, cheat, heir, {0: [77]})
        audited.find(part, "hard")
        assert [row["state"] for row in audited.rows(tables.rollouts)] == ["retracted"]
        assert voided(audited) == {part: "replay_mismatch"}
        assert money(audited, cheat, heir) == [(0, 0), (3, 0)], "the heir's own audit is still to come"
        audited.find(whole)
        assert money(audited, cheat, heir) == [(0, 0), (3, 0)], "its pledge"
        (afresh,) = audited.offer(heir, continues=True).leases
        assert (afresh.prefixes, audited.group_states()) == ((), {0: "leased"})
        audited.run(set_fact, FINISHED, True)
        audited.release_leftovers()
        assert money(audited, cheat, heir) == [(0, 0), (0, 3)]
        assert audited.audit() == []

    def test_whoever_was_gone_on_from_by_a_cheat_is_paid_after_its_own_audit(self, audited: World) -> None:
        honest, cheat = audited.join(1), audited.join(2)
        part, whole = share(audited, honest, cheat)
        audited.find(whole, "hard")
        assert money(audited, honest, cheat) == [(1, 0), (0, 0)]
        audited.find(part)
        assert money(audited, honest, cheat) == [(0, 1), (0, 0)]

    def test_garbage_that_was_trained_on_is_not_paid_and_known(self, audited: World) -> None:
        cheat, heir = audited.join(1), audited.join(2)
        part, whole = share(audited, cheat, heir, {0: [77]})
        audited.earn(heir)
        audited.train(1)
        audited.publish(2, 1)
        audited.find(whole)
        audited.find(audited.rows(tables.rollouts)[-1]["claim_id"])
        audited.find(part, "hard")
        assert money(audited, cheat, heir) == [(0, 0), (HONEST_TOKENS, 3)]
        for key in (cheat, heir):
            (provenance,) = audited.run(standings.provenance, key.node_id)
            assert provenance == {"update": 1, "groups": 1 + (key is heir), "version": 2}

    def test_a_second_part_of_garbage_bans(self, audited: World) -> None:
        cheat, heir = audited.join(1), audited.join(2)
        wrong = [share(audited, cheat, heir, {0: [77]})[0] for _ in range(3)]
        for claim in wrong[:2]:
            audited.find(claim, "hard")
        assert voided(audited) == dict(zip(wrong, ("replay_mismatch", "replay_mismatch", "owner_banned"), strict=True))
        assert [row["state"] for row in audited.rows(tables.rollouts)] == ["retracted"] * 3
        assert money(audited, cheat, heir) == [(0, 0), (9, 0)]
        for row in audited.rows(tables.rollouts):
            audited.find(row["claim_id"])
        assert money(audited, cheat, heir) == [(0, 0), (3, 6)]
        assert audited.audit() == []

    def test_part_and_whole_of_one_group_are_one_fault(self, audited: World) -> None:
        """Part and whole have the same seed, prompt and version: a false alarm for one is one for the other."""
        node = audited.join(1)
        claims = share(audited, node, node, {0: [77]})
        for claim in claims:
            assert audited.find(claim, "hard")
            assert audited.run(standings.find_standing, node.node_id).hard == 1
        assert voided(audited) == dict.fromkeys(claims, "replay_mismatch")
        another, _ = share(audited, node, node, {0: [77]})
        audited.find(another, "hard")
        with pytest.raises(OwnerBanned, match="2 rollouts"):
            audited.lease(node)
        assert audited.audit() == []

    def test_of_two_faults_on_one_group_the_last_lifted_counts(self, audited: World) -> None:
        node = audited.join(1)
        first, second = (share(audited, node, node, {0: [77]}) for _ in range(2))
        for claim in (*first, second[0]):
            audited.find(claim, "hard")
        left = []
        for claim in (first[0], second[0], first[1]):
            audited.run(standings.lift_fault, claim)
            left.append(audited.run(standings.find_standing, node.node_id).hard)
        assert left == [2, 1, 0]

    def test_one_fault_has_unaudited_parts_audited(self, audited: World) -> None:
        cheat, heir = audited.join(1), audited.join(2)
        part, _ = share(audited, cheat, heir, {0: [77]})
        is_drawn(audited, False)
        unseen, _ = share(audited, cheat, heir, {0: [78]})
        audited.find(part, "hard")
        assert unseen in audited.take_cases()


class TestBans:
    def test_nobody_goes_on_from_what_a_banned_owner_has_told(self, audited: World) -> None:
        cheat, heir = audited.join(1), audited.join(2)
        wrong = [audited.earn(cheat), audited.earn(cheat)]
        lease = audited.lease(cheat)
        audited.tell(cheat, fragment(cheat, lease, {0: [77]}))
        audited.give_back(cheat, lease)
        ban(audited, wrong)
        given = audited.offer(heir, groups=4, continues=True).leases
        assert lease.prompt in {one.prompt for one in given}
        assert not any(one.prefixes for one in given)
        assert audited.rows(tables.fragments) == []

    @pytest.mark.parametrize(
        "order", ["ban answer", "delegate ban answer", "ban delegate answer", "delegate answer ban"]
    )
    def test_what_was_gone_on_with_when_its_owner_was_banned_is_not_trained_on(
        self, audited: World, order: str
    ) -> None:
        """Whomever the node works for by then: the ban falls on the key."""
        cheat, heir = audited.join(1), audited.join(2)
        wrong = [audited.earn(cheat), audited.earn(cheat)]
        lease = audited.leave(cheat, {0: [77]}, heir=heir)
        steps: dict[str, Callable[[], object]] = {
            "delegate": lambda: delegate(audited, cheat),
            "ban": lambda: ban(audited, wrong),
            "answer": lambda: audited.submit(heir, answer(heir, lease)),
        }
        for step in order.split():
            steps[step]()
        (part,) = audited.rows(tables.parts)
        assert voided(audited)[part["claim_id"]] == "owner_banned"
        whole = audited.rows(tables.rollouts)[-1]
        assert (whole["state"], audited.group_states()[whole["group_no"]]) == ("retracted", "open")
        assert money(audited, cheat, heir) == [(0, 0), (3, 0)]
        audited.find(whole["claim_id"])
        audited.run(set_fact, FINISHED, True)
        audited.release_leftovers()
        assert money(audited, cheat, heir) == [(0, 0), (0, 3)]
        assert audited.audit() == []
        theirs = [row for row in audited.rows(tables.audits) if row["node_id"] == cheat.node_id]
        assert {row["owner"] for row in theirs} == {cheat.node_id}, "where an appeal against the ban finds them"
        assert len({row["place"] for row in theirs}) == len(theirs)


class TestEvidence:
    def test_a_case_has_what_its_node_signed_and_its_own_lease(self, audited: World) -> None:
        first, heir = audited.join(1), audited.join(2)
        part, whole = share(audited, first, heir)
        taken: Cases = audited.run(audits.assign_cases, "a", 8, terms=audited.audits, now_ms=audited.now_ms)
        cases = {case.claim_id: case for case in taken.cases}
        assert (cases[part].rollout, cases[whole].fragments) == (b"", ())
        (envelope,) = cases[part].fragments
        signed = open_envelope("fragment", envelope)
        assert (signed.signer, digest(signed.payload)) == (first.node_id, part)
        offers = {row["node_id"]: row["offer"] for row in audited.rows(tables.leases)}
        assert {name: case.lease for name, case in cases.items()} == {
            part: offers[first.node_id],
            whole: offers[heir.node_id],
        }

    def test_its_node_hears_why_and_nobody_else(self, audited: World) -> None:
        first, heir = audited.join(1), audited.join(2)
        part, _ = share(audited, first, heir, {0: [77]})
        audited.find(part, "hard")
        (lease_id,) = [row["lease_id"] for row in audited.rows(tables.leases) if row["node_id"] == first.node_id]
        for about in (part, lease_id):
            (told,) = why(audited, first, about).explanations
            assert (told.claim_id, told.state, told.code, told.finding) == (part, "voided", "replay_mismatch", "hard")
            assert told.rollout == b""
            assert [digest(open_envelope("fragment", one).payload) for one in told.fragments] == [part]
        assert part not in {told.claim_id for told in why(audited, heir, "").explanations}

    def test_fragments_that_are_no_claim_yet_are_no_evidence(self, audited: World) -> None:
        first, heir = audited.join(1), audited.join(2)
        audited.leave(first, {0: [10]}, heir=heir)
        (row,) = [row for row in audited.rows(tables.leases) if row["node_id"] == first.node_id]
        (told,) = why(audited, first, row["lease_id"]).explanations
        assert (told.claim_id, told.state, told.fragments) == ("", "skipped", ())

    def test_parts_are_in_the_list_that_is_drawn_from(self, audited: World) -> None:
        first, heir = audited.join(1), audited.join(2)
        claims = share(audited, first, heir)
        assert {draw.claim_id for draw in audited.run(lottery.draws, 1)} == set(claims)
