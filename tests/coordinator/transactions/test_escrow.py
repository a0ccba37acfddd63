"""Escrow, from acceptance to settlement: windows, faults, bans."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from coordinator.config import AuditSection
from coordinator.rules.trust import OwnerStanding
from coordinator.store import tables
from coordinator.store.facts import FINISHED, set_fact
from coordinator.transactions import lottery, standings
from ledger import drawing, store
from ledger.drawing import ALL_PPM
from ledger.entry import Commitment, Pending, Reveal, VerdictEntry, Void
from protocol.errors import OwnerBanned
from protocol.wire.signing import NodeKey
from tests.coordinator.world import HONEST_TOKENS, PRICE, World, answer

EVERYTHING = AuditSection()
HALF = AuditSection(first_groups=1, floor=0.5, trusted_floor=0.5, escrow_factor=1.0)
"""One unaudited group stays unpaid."""


@pytest.fixture
def audited(tmp_path: Path, store_url: str) -> Iterator[World]:
    """A round in which an owner's first ten groups are all audited."""
    made = World(tmp_path, staleness=100, rules=EVERYTHING, postgres_url=store_url)
    made.publish(1, 0)
    yield made
    made.database.close()


def earn(world: World, key: NodeKey, groups: int = 1) -> list[str]:
    """The claims of so many groups."""
    before = len(world.rows(tables.rollouts))
    for _ in range(groups):
        world.earn(key)
    return [row["claim_id"] for row in world.rows(tables.rollouts)[before:]]


def let_be_drawn(world: World, drawn: bool) -> None:
    """Rates of all or nothing, so that a test knows what is drawn."""
    rate = 1.0 if drawn else 0.0
    rules = world.audits.settings.model_copy(update={"first_groups": 0, "floor": rate, "trusted_floor": rate})
    world.judge = replace(world.judge, audits=replace(world.audits, settings=rules))


def finish(world: World) -> None:
    world.run(set_fact, FINISHED, True)
    world.release_leftovers()


def entries(world: World, kind: type) -> list[object]:
    return [row.entry for row in world.run(store.entries, 0, 1000) if isinstance(row.entry, kind)]


def voids(world: World) -> dict[str, str]:
    """Return the reason of each void claim."""
    return {entry.claim_id: entry.reason_code for entry in entries(world, Void) if isinstance(entry, Void)}


def states(world: World) -> list[str]:
    return [row["state"] for row in world.rows(tables.rollouts)]


class TestSettlement:
    def test_a_newcomer_is_paid_for_what_was_audited_and_trained_on(self, audited: World) -> None:
        key = audited.join(1)
        claims = earn(audited, key, 2)
        audited.train(1)
        assert audited.owed(key.node_id) == (2 * HONEST_TOKENS, 0)
        assert audited.take_cases() == claims
        assert audited.find(claims[1])
        assert audited.owed(key.node_id) == (2 * HONEST_TOKENS, 0), "the first that is right is the pledge"
        assert audited.find(claims[0])
        assert audited.owed(key.node_id) == (HONEST_TOKENS, HONEST_TOKENS)
        finish(audited)
        assert audited.owed(key.node_id) == (0, 2 * HONEST_TOKENS), "no fault can come any more"

    def test_a_verdict_before_the_report_pays_at_the_report(self, audited: World) -> None:
        key = audited.join(1)
        for claim in earn(audited, key, 2):
            audited.find(claim)
        assert audited.owed(key.node_id) == (2 * HONEST_TOKENS, 0)
        audited.train(1)
        assert audited.owed(key.node_id) == (HONEST_TOKENS, HONEST_TOKENS)

    def test_what_was_not_drawn_waits_until_its_window_is_closed(self, audited: World) -> None:
        audited.audits = replace(audited.audits, settings=HALF)
        key = audited.join(1)
        let_be_drawn(audited, False)
        first, *_ = earn(audited, key, 2)
        standings_of = audited.rows(tables.trust)
        assert (standings_of[0]["groups"], standings_of[0]["accepted"]) == (0, 2)
        audited.run(lambda conn: standings.put(conn, key.node_id, OwnerStanding(5, 5)))
        audited.train(1)
        assert [row["settled"] for row in audited.rows(tables.audits)] == [True, False]
        assert audited.rows(tables.audits)[0]["claim_id"] == first

    def test_nothing_behind_an_audit_that_is_still_to_come_is_paid(self, audited: World) -> None:
        audited.audits = replace(audited.audits, settings=HALF)
        key = audited.join(1)
        let_be_drawn(audited, True)
        (drawn,) = earn(audited, key)
        audited.run(lambda conn: standings.put(conn, key.node_id, OwnerStanding(5, 5)))
        let_be_drawn(audited, False)
        earn(audited, key, 3)
        audited.train(1)
        audited.train(2)
        assert audited.owed(key.node_id) == (4 * HONEST_TOKENS, 0)
        audited.find(drawn)
        assert audited.owed(key.node_id) == (2 * HONEST_TOKENS, 2 * HONEST_TOKENS), "but for window and pledge"

    def test_the_pledge_is_the_dearest_group_that_was_found_right_and_no_part_of_one(self, audited: World) -> None:
        cheap, dear = audited.join(1, price=PRICE // HONEST_TOKENS), PRICE
        first, second = earn(audited, cheap, 2)
        audited.join(1, price=dear)
        third, fourth = earn(audited, cheap, 2)
        audited.train(1)
        audited.train(2)
        for claim, paid in ((first, 0), (third, 1), (second, 2), (fourth, 2 + HONEST_TOKENS)):
            audited.find(claim)
            assert audited.owed(cheap.node_id)[1] == paid

    def test_at_the_end_of_the_round_only_audits_are_waited_for(self, audited: World) -> None:
        audited.audits = replace(audited.audits, settings=HALF)
        key = audited.join(1)
        let_be_drawn(audited, False)
        earn(audited, key, 2)
        let_be_drawn(audited, True)
        (drawn,) = earn(audited, key)
        audited.run(lambda conn: standings.put(conn, key.node_id, OwnerStanding(5, 5)))
        finish(audited)
        assert audited.owed(key.node_id) == (2 * HONEST_TOKENS, HONEST_TOKENS), "the fault may still take the window"
        audited.find(drawn)
        assert audited.owed(key.node_id) == (0, 3 * HONEST_TOKENS)

    def test_a_verdict_counts_once_and_is_in_the_log(self, audited: World) -> None:
        key = audited.join(1)
        (claim,) = earn(audited, key)
        assert audited.find(claim, "pass")
        assert not audited.find(claim, "hard")
        assert not audited.find("0" * 64, "hard")
        (verdict,) = entries(audited, VerdictEntry)
        assert isinstance(verdict, VerdictEntry)
        assert (verdict.claim_id, verdict.outcome) == (claim, "pass")
        assert audited.audit() == []


class TestFaults:
    def test_one_hard_fault_voids_the_window_before_it_and_audits_what_came_after(self, audited: World) -> None:
        audited.audits = replace(audited.audits, settings=HALF)
        key = audited.join(1)
        let_be_drawn(audited, True)
        (good,) = earn(audited, key)
        audited.find(good)
        let_be_drawn(audited, False)
        older, last = earn(audited, key, 2)
        let_be_drawn(audited, True)
        (bad,) = earn(audited, key)
        let_be_drawn(audited, False)
        after = earn(audited, key, 2)
        audited.run(lambda conn: standings.put(conn, key.node_id, OwnerStanding(5, 5)))
        audited.find(bad, "hard")
        assert voids(audited) == {bad: "replay_mismatch", last: "escrow_forfeited", good: "escrow_forfeited"}
        assert audited.owed(key.node_id) == (3 * HONEST_TOKENS, 0)
        assert states(audited) == ["buffered", *["retracted"] * 5], "only what was found right is trained on"
        assert list(audited.group_states().values()) == ["accepted", *["open"] * 5]
        assert audited.take_cases() == [older, *after]
        for claim in (older, *after):
            audited.find(claim)
        assert audited.owed(key.node_id) == (HONEST_TOKENS, 2 * HONEST_TOKENS), "what proves right is paid, or pledged"
        audited.lease(key)  # one fault is no ban
        assert audited.audit() == []

    def test_a_dear_claim_behind_a_cheap_escrow_is_audited_more_often(self, audited: World) -> None:
        audited.audits = replace(
            audited.audits, settings=EVERYTHING.model_copy(update={"first_groups": 1, "floor": 0.01})
        )
        audited.judge = replace(audited.judge, audits=audited.audits)
        cheap = audited.join(1, price=PRICE // HONEST_TOKENS)
        (pledge,) = earn(audited, cheap)
        audited.find(pledge)
        audited.run(lambda conn: standings.put(conn, cheap.node_id, OwnerStanding(500, 500)))
        earn(audited, cheap, 3)
        held = sum(row["why"] == "" for row in audited.rows(tables.audits)) + 1  # the pledge
        audited.join(1, price=PRICE)
        earn(audited, cheap)
        worth = 1.25 * HONEST_TOKENS
        expected = worth / (worth + held)
        assert audited.rows(tables.audits)[-1]["rate_ppm"] == pytest.approx(1e6 * expected, abs=1)

    def test_a_second_hard_fault_bans_and_takes_all_that_no_audit_found_right(self, audited: World) -> None:
        key, honest = audited.join(1), audited.join(2)
        good, lost, lost_too, bad, worse, unseen = earn(audited, key, 6)
        earn(audited, honest)
        lease = audited.lease(key)
        for right in (good, lost, lost_too):
            audited.find(right)
        audited.find(bad, "hard")
        audited.find(worse, "hard")
        assert audited.owed(key.node_id) == (0, HONEST_TOKENS), "each fault takes one pledge"
        good, lost, lost_too = lost_too, good, lost  # of equal ones the oldest is the pledge
        assert voids(audited) == {
            lost: "escrow_forfeited",
            lost_too: "escrow_forfeited",
            bad: "replay_mismatch",
            worse: "replay_mismatch",
            unseen: "owner_banned",
        }
        assert states(audited) == ["buffered"] * 2 + ["retracted"] * 4 + ["buffered"]
        assert list(audited.group_states().values()) == ["accepted"] * 2 + ["open"] * 4 + ["accepted", "open"]
        assert audited.lease_states()[lease.lease_id] == "rejected"
        assert audited.owed(honest.node_id) == (HONEST_TOKENS, 0)
        assert audited.audit() == []
        with pytest.raises(OwnerBanned):
            audited.lease(key)
        assert audited.submit(key, answer(key, lease)).code == "lease_closed"
        assert not audited.find(unseen), "what is void waits for nobody"

    def test_a_sanction_falls_on_all_nodes_of_the_owner(self, audited: World) -> None:
        key, sister = audited.join(1), audited.join(2)
        audited.run(
            lambda conn: conn.execute(
                tables.nodes.update().where(tables.nodes.c.node_id == sister.node_id).values(owner=key.node_id)
            )
        )
        for claim in (*earn(audited, key), *earn(audited, sister)):
            audited.find(claim, "hard")
        with pytest.raises(OwnerBanned):
            audited.lease(sister)

    def test_a_soft_fault_costs_nothing(self, audited: World) -> None:
        key = audited.join(1)
        for claim in earn(audited, key, 2):
            audited.find(claim, "soft")
        audited.train(1)
        finish(audited)
        assert audited.owed(key.node_id) == (0, 2 * HONEST_TOKENS)
        assert audited.rows(tables.trust)[0]["soft"] == 2

    def test_what_was_trained_on_before_a_fault_is_still_known(self, audited: World) -> None:
        key = audited.join(1)
        claims = earn(audited, key, 2)
        audited.train(1)
        audited.publish(2, 1)
        audited.find(claims[0], "hard")
        assert audited.run(standings.provenance, key.node_id) == [{"update": 1, "groups": 2, "version": 2}]
        assert audited.group_states() == {0: "trained", 1: "trained"}

    def test_a_pardoned_claim_is_as_if_never_drawn(self, audited: World) -> None:
        key = audited.join(1)
        (claim,) = earn(audited, key)
        audited.find(claim, "pardon")
        finish(audited)
        assert audited.owed(key.node_id) == (0, HONEST_TOKENS)
        assert audited.rows(tables.trust)[0]["hard"] == 0

    def test_pardons_make_nobody_known(self, audited: World) -> None:
        key = audited.join(1)
        for claim in earn(audited, key, 2):
            audited.find(claim, "pardon")
        finish(audited)
        assert audited.owed(key.node_id) == (0, 2 * HONEST_TOKENS)
        assert audited.rows(tables.trust)[0]["groups"] == 0


class TestEpochs:
    def test_claims_are_drawn_by_a_secret_that_was_committed_to_an_epoch_before(
        self, tmp_path: Path, store_url: str
    ) -> None:
        world = World(tmp_path, staleness=100, epoch_groups=2, rules=HALF, postgres_url=store_url)
        world.publish(1, 0)
        earn(world, world.join(1), 5)
        kinds = [row.entry for row in world.run(store.entries, 0, 100)]
        said = [entry for entry in kinds if isinstance(entry, Commitment | Pending | Reveal)]
        assert [f"{entry.kind} {getattr(entry, 'epoch', '')}".strip() for entry in said] == [
            "commitment 1", "commitment 2", "pending", "pending",
            "reveal 1", "commitment 3", "pending", "pending",
            "reveal 2", "commitment 4", "pending",
        ]  # fmt: skip
        for reveal in (entry for entry in said if isinstance(entry, Reveal)):
            listed = world.run(lottery.draws, reveal.epoch)
            drawn = drawing.check(reveal.secret, reveal.draws_digest, listed)
            rows = [row for row in world.rows(tables.audits) if row["epoch"] == reveal.epoch]
            assert len(listed) == 2
            assert sorted(drawn) == sorted(row["claim_id"] for row in rows if row["why"] == "drawn")
        assert world.audit() == []
        world.database.close()

    def test_what_comes_after_the_end_is_revealed_when_no_lease_is_open(self, tmp_path: Path, store_url: str) -> None:
        world = World(tmp_path, staleness=100, postgres_url=store_url)
        world.publish(1, 0)
        key = world.join(1)
        world.earn(key)
        late, later = world.lease(key), world.lease(key)
        finish(world)
        world.run(lottery.end, world.audits, world.now_ms)
        assert not world.run(lottery.end_last, world.audits, world.now_ms), "nothing was drawn since"
        assert world.submit(key, answer(key, late)).outcome == "accepted"
        assert not world.run(lottery.end_last, world.audits, world.now_ms), "a lease is open"
        world.give_back(key, later)
        assert world.run(lottery.end_last, world.audits, world.now_ms)
        assert not world.run(lottery.end_last, world.audits, world.now_ms)
        assert [reveal.epoch for reveal in entries(world, Reveal) if isinstance(reveal, Reveal)] == [1, 2]
        assert {row["epoch"] for row in world.rows(tables.audits)} == {1, 2}
        world.database.close()

    def test_without_the_committed_secret_everything_is_audited_and_nothing_revealed(
        self, tmp_path: Path, store_url: str
    ) -> None:
        world = World(tmp_path, staleness=100, epoch_groups=2, postgres_url=store_url)
        world.publish(1, 0)
        world.judge = replace(world.judge, audits=replace(world.audits, master=b"\1" * 32))
        earn(world, world.join(1), 3)
        assert [row["why"] for row in world.rows(tables.audits)] == ["drawn"] * 3
        assert [row["rate_ppm"] for row in world.rows(tables.audits)] == [0] * 3 != [ALL_PPM] * 3
        assert entries(world, Reveal) == []
        world.database.close()
