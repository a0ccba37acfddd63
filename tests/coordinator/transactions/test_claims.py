"""Intake against nodes that cheat, repeat themselves or come too late: each has a name, and nothing counts twice."""

from dataclasses import replace

import numpy as np
import pytest
import sqlalchemy as sa
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from coordinator.rules.prompt_refs import PromptRef
from coordinator.store import tables
from coordinator.transactions import checked_rollouts, claims, partial_rollouts
from ledger import store
from ledger.book import BookBroken
from ledger.entry import Pending
from ledger.tables import balances_table, tiles_table
from protocol.errors import TokensInvalid
from protocol.ids import ClaimId, LeaseId
from protocol.policy.chunks import digest
from protocol.tasks import Reward
from protocol.wire.signing import NodeKey
from protocol.work.messages import Verdict
from protocol.work.rollout import RolloutClaim, Sample, pack_logprobs, pack_tokens
from tests.coordinator.world import END, HONEST_TOKENS, PRICE, World, answer, claim, honest_sample


def refused(world: World, verdict: Verdict, code: str) -> None:
    """The verdict has that code and a text, and the code is counted."""
    assert (verdict.outcome, verdict.code) == ("rejected", code)
    assert verdict.message
    assert verdict.credit_micros == verdict.tokens == 0
    assert world.rejected()[code] >= 1


def test_a_good_answer_is_stored_and_credited_once(world: World) -> None:
    key = world.join(1)
    lease = world.lease(key)
    verdict = world.submit(key, answer(key, lease))
    assert (verdict.outcome, verdict.tokens, verdict.credit_micros) == ("accepted", HONEST_TOKENS, HONEST_TOKENS)
    assert world.owed(key.node_id) == (HONEST_TOKENS, 0)
    assert world.lease_states() == {lease.lease_id: "accepted"}
    assert world.group_states() == {0: "accepted"}
    (row,) = world.rows(tables.rollouts)
    assert np.frombuffer(row["rewards"], "<f4").tolist() == [1.0, 1.0]
    assert world.rejected() == {}


def test_the_reward_is_the_coordinators_own(world: World) -> None:
    key = world.join(1)
    lease = world.lease(key)
    wrong = Sample(tokens=pack_tokens([999, END]), logprobs=pack_logprobs([0.0, 0.0]), finish="stop")
    world.submit(key, answer(key, lease, samples=(wrong, honest_sample(lease))))
    (row,) = world.rows(tables.rollouts)
    assert np.frombuffer(row["rewards"], "<f4").tolist() == [0.0, 1.0]


def test_a_replayed_rollout_is_not_credited_twice(world: World) -> None:
    key = world.join(1)
    lease = world.lease(key)
    envelope = answer(key, lease)
    first = world.submit(key, envelope)
    before = world.dump()
    for _ in range(3):
        world.now_ms += 10 * world.terms.timeout_ms  # a retry may come long after the lease's end
        again = world.submit(key, envelope)
        assert again.outcome == "already_accepted"
        assert (again.tokens, again.credit_micros) == (first.tokens, first.credit_micros)
    assert world.dump() == before


def test_a_retry_after_a_restart_is_told_the_same(world: World) -> None:
    key = world.join(1)
    lease = world.lease(key)
    world.submit(key, answer(key, lease))
    world.reopen()
    again = world.submit(key, answer(key, lease))
    assert (again.outcome, again.credit_micros) == ("already_accepted", HONEST_TOKENS)


def test_a_second_answer_with_other_content_is_a_conflict(world: World) -> None:
    key = world.join(1)
    lease = world.lease(key)
    world.submit(key, answer(key, lease))
    owed = world.owed(key.node_id)
    better = Sample(tokens=pack_tokens([10, 10, END]), logprobs=pack_logprobs([0.0] * 3), finish="stop")
    refused(world, world.submit(key, answer(key, lease, samples=(better, better))), "lease_conflict")
    assert world.owed(key.node_id) == owed
    assert world.lease_states() == {lease.lease_id: "accepted"}
    assert world.group_states() == {0: "accepted"}


def test_a_rollout_for_anothers_lease_is_refused_and_that_lease_stays_open(world: World) -> None:
    owner, thief = world.join(1), world.join(2)
    lease = world.lease(owner)
    refused(world, world.submit(thief, answer(thief, lease)), "lease_of_another")
    assert world.lease_states() == {lease.lease_id: "offered"}
    assert world.submit(owner, answer(owner, lease)).outcome == "accepted"
    assert world.owed(thief.node_id) == (0, 0)


def test_a_stolen_rollout_is_refused_and_its_owner_still_paid(world: World) -> None:
    """The thief sends the very bytes that the owner signed, before the owner does."""
    owner, thief = world.join(1), world.join(2)
    lease = world.lease(owner)
    envelope = answer(owner, lease)
    refused(world, world.submit(thief, envelope), "lease_of_another")
    assert world.submit(owner, envelope).outcome == "accepted"


def test_a_node_cannot_answer_with_anothers_signature(world: World) -> None:
    """A paid claim must have the paid node's own signature: otherwise there is no evidence against it."""
    key, other = world.join(1), world.join(2)
    lease = world.lease(key)
    refused(world, world.submit(key, answer(other, lease)), "lease_of_another")
    assert world.owed(key.node_id) == (0, 0)


def test_a_peers_answer_to_the_same_prompt_cannot_be_copied(world: World) -> None:
    """Two leases of one prompt have other ids and seeds, and the signature covers both."""
    first, copier = world.join(1), world.join(2)
    lease = world.lease(first)
    world.give_back(first, lease)
    own = world.lease(copier)
    copied = answer(copier, own, lease_id=lease.lease_id, lease_digest=lease.digest)
    refused(world, world.submit(copier, copied), "lease_of_another")
    refused(world, world.submit(copier, answer(copier, own, lease_digest=lease.digest)), "lease_mismatch")


def test_an_answer_after_the_time_is_refused_swept_or_not(world: World) -> None:
    key = world.join(1)
    swept, unswept = world.offer(key, groups=2).leases
    world.now_ms += world.terms.timeout_ms
    refused(world, world.submit(key, answer(key, unswept)), "lease_closed")
    world.expire()
    refused(world, world.submit(key, answer(key, swept)), "lease_closed")
    assert world.rejected() == {"lease_closed": 2}
    assert set(world.lease_states().values()) == {"expired"}
    assert set(world.group_states().values()) == {"open"}


def test_an_answer_at_the_last_moment_is_taken(world: World) -> None:
    key = world.join(1)
    lease = world.lease(key)
    world.now_ms += world.terms.timeout_ms - 1
    assert world.submit(key, answer(key, lease)).outcome == "accepted"


def test_a_late_answer_does_not_take_the_prompt_from_its_new_owner(world: World) -> None:
    slow, quick = world.join(1), world.join(2)
    old = world.lease(slow)
    world.now_ms += world.terms.timeout_ms
    new = world.lease(quick)
    assert new.prompt == old.prompt
    refused(world, world.submit(slow, answer(slow, old)), "lease_closed")
    assert world.group_states() == {0: "leased"}
    assert world.submit(quick, answer(quick, new)).outcome == "accepted"


def test_a_lease_given_back_cannot_be_answered(world: World) -> None:
    key = world.join(1)
    lease = world.lease(key)
    world.give_back(key, lease)
    refused(world, world.submit(key, answer(key, lease)), "lease_closed")


def test_an_invented_lease_is_refused(world: World) -> None:
    key = world.join(1)
    lease = world.lease(key)
    refused(world, world.submit(key, answer(key, lease, lease_id="f" * 32)), "unknown_lease")
    assert world.lease_states() == {lease.lease_id: "offered"}


def test_a_rollout_of_a_version_past_the_bound_is_refused(world: World) -> None:
    slow, quick = world.join(1), world.join(2)
    lease, timely = world.offer(slow, groups=2).leases
    world.publish(2, 1)
    for number in (1, 2, 3):
        world.earn(quick, version=2)
        world.earn(quick, version=2)
        if number == 3:
            assert world.submit(slow, answer(slow, timely)).outcome == "accepted"  # just S updates behind
        world.train(number)
    refused(world, world.submit(slow, answer(slow, lease)), "stale_version")
    assert world.lease_states()[lease.lease_id] == "rejected"
    assert world.group_states()[0] == "open"


def test_a_lease_that_was_changed_on_the_way_is_nobodys_fault(world: World) -> None:
    """An attacker on the wire has a node asked something else; the audit would find its honest answer forged."""
    key = world.join(1)
    lease = world.lease(key)
    asked = lease.model_copy(update={"prompt": pack_tokens([END])})
    refused(world, world.submit(key, answer(key, asked)), "lease_mismatch")
    assert world.audit() == []  # there is nothing to be found wrong
    assert world.offer(key).leases


NAN_SAMPLE = Sample(tokens=pack_tokens([10, END]), logprobs=pack_logprobs([np.nan, -0.1]), finish="stop")


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({"samples": (NAN_SAMPLE, NAN_SAMPLE)}, "logprobs_invalid"),
        ({"lease_digest": "0" * 64}, "lease_mismatch"),
        ({"round_id": "b" * 64}, "lease_mismatch"),
        ({"samples": (NAN_SAMPLE,)}, "lease_mismatch"),
        ({"samples": (Sample(tokens=b"", logprobs=b"", finish="stop"),) * 2}, "tokens_invalid"),
    ],
    ids=lambda item: item if isinstance(item, str) else next(iter(item)),
)
def test_a_claim_that_cannot_be_true_ends_its_lease_unpaid(world: World, change: dict[str, object], code: str) -> None:
    key, other = world.join(1), world.join(2)
    lease = world.lease(key)
    refused(world, world.submit(key, answer(key, lease, **change)), code)
    assert world.owed(key.node_id) == (0, 0)
    (row,) = world.rows(tables.leases)
    assert (row["state"], row["code"]) == ("rejected", code)
    assert world.lease(other).prompt == lease.prompt
    refused(world, world.submit(key, answer(key, lease)), "lease_closed")  # no second try


def test_a_wrong_signature_is_refused_and_costs_the_lease_nothing(world: World) -> None:
    """The claim could be anybody's: it must not end the lease of the node that it names."""
    key = world.join(1)
    lease = world.lease(key)
    envelope = bytearray(answer(key, lease))
    envelope[-1] ^= 1
    refused(world, world.submit(key, bytes(envelope)), "bad_signature")
    assert world.submit(key, answer(key, lease)).outcome == "accepted"


def test_a_signed_request_is_no_rollout(world: World) -> None:
    key = world.join(1)
    lease = world.lease(key)
    refused(world, world.submit(key, key.seal("request", claim(lease).to_bytes())), "bad_signature")


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(payload=st.binary(max_size=100), signed=st.booleans())
def test_garbage_is_refused_by_name(world: World, payload: bytes, signed: bool) -> None:
    key = NodeKey(b"g" * 32)
    verdict = world.submit(key, key.seal("rollout", payload) if signed else payload)
    assert verdict.outcome == "rejected"
    assert verdict.code in {"malformed_message", "not_canonical", "non_finite_number", "message_too_large"}


def test_a_flood_of_refusals_fills_no_disk(world: World) -> None:
    key = world.join(1)
    for number in range(20):
        world.submit(key, b"garbage %d" % number)
    assert world.rejected() == {"malformed_message": 20}
    assert len(world.rows(tables.rejections)) == 1


def test_refusals_are_counted_per_node_and_code(world: World) -> None:
    one, two = world.join(1), world.join(2)
    lease = world.lease(one)
    for _ in range(2):
        world.submit(two, answer(two, lease))
    world.submit(one, answer(one, lease, lease_id="f" * 32))
    rows = {(row["node_id"], row["code"]): row for row in world.rows(tables.rejections)}
    assert {key: row["count"] for key, row in rows.items()} == {
        (two.node_id, "lease_of_another"): 2,
        (one.node_id, "unknown_lease"): 1,
    }
    assert rows[two.node_id, "lease_of_another"]["last_lease_id"] == lease.lease_id


def test_what_a_refusal_quotes_is_kept_in_every_place_without_what_a_store_cannot_keep(world: World) -> None:
    key = world.join(1)
    lease = world.lease(key)

    def quoting(source: PromptRef, completion: list[int]) -> Reward:
        raise TokensInvalid(f"The completion \0 of {source.split} is none.")

    judge = replace(world.judge, reward=quoting)
    read = checked_rollouts.read_rollouts(key.node_id, [answer(key, lease)])
    (verdict,) = world.run(claims.receive_rollouts, key.node_id, read, judge=judge, now_ms=world.now_ms)
    refused(world, verdict, "tokens_invalid")
    (row,), (counted,) = world.rows(tables.leases), world.rows(tables.rejections)
    assert row["said"] == counted["last_message"] == "The completion  of train is none."


class TestOurOwnFault:
    """A damaged store fails the request, and nothing of it has happened: no half of an acceptance, no rejection."""

    def fails(self, world: World, key: NodeKey, envelope: bytes) -> None:
        before = world.dump()
        with pytest.raises(BookBroken):
            world.submit(key, envelope)
        assert world.dump() == before

    def test_a_tile_that_is_missing_credits_and_rejects_nobody(self, world: World) -> None:
        key = world.join(1)
        envelope = answer(key, world.lease(key))
        world.run(lambda connection: connection.execute(sa.delete(tiles_table)))
        self.fails(world, key, envelope)

    def test_a_claim_that_the_ledger_has_without_its_rollout_is_not_taken_twice(self, world: World) -> None:
        key = world.join(1)
        lease = world.lease(key)
        world.run(store.append, credited(key, claim(lease), HONEST_TOKENS), 0)
        self.fails(world, key, answer(key, lease))

    def test_a_part_that_the_ledger_has_already_is_not_taken_twice(self, world: World) -> None:
        first, second = world.join(1), world.join(2)
        after = world.leave(first, {0: [10]}, heir=second)
        (left,) = world.rows(tables.fragments)
        (told,) = world.run(partial_rollouts.chain, left["lease_id"])
        world.run(store.append, told.pending, 0)
        self.fails(world, second, answer(second, after))


def credited(key: NodeKey, claimed: RolloutClaim, tokens: int) -> Pending:
    """Return the ledger's entry of an accepted claim."""
    return Pending(
        claim_id=ClaimId(digest(claimed.to_bytes())),
        lease_id=LeaseId(claimed.lease_id),
        node_id=key.node_id,
        tokens=tokens,
        price_micros_per_mtok=PRICE,
        amount_micros=tokens,
    )


class Crash(Exception):
    """Power off."""


def test_a_crash_at_any_statement_of_acceptance_leaves_no_trace(world: World) -> None:
    """The power fails at the first, second … statement; when it no longer does, the same bytes are accepted."""
    key = world.join(1)
    envelope = answer(key, world.lease(key))
    before = world.dump()

    def interrupted(connection: sa.Connection, statements: int) -> Verdict:
        left = statements

        @sa.event.listens_for(connection, "before_cursor_execute")
        def count_down(*_arguments: object) -> None:
            nonlocal left
            left -= 1
            if left < 0:
                raise Crash

        try:
            read = checked_rollouts.read_rollouts(key.node_id, [envelope])
            return claims.receive_rollouts(connection, key.node_id, read, judge=world.judge, now_ms=world.now_ms)[0]
        finally:
            sa.event.remove(connection, "before_cursor_execute", count_down)

    crashes = 0
    verdict: Verdict | None = None
    while verdict is None:
        try:
            verdict = world.run(interrupted, crashes)
        except Crash:
            crashes += 1
            assert world.dump() == before
    assert crashes > 10
    assert verdict.outcome == "accepted"
    assert world.owed(key.node_id) == (HONEST_TOKENS, 0)
    assert world.audit() == []


def test_a_budget_that_is_used_up_ends_a_lease_and_blames_nobody(world: World) -> None:
    key = world.join(1)
    world.earn(key)
    lease = world.lease(key)
    allowance = world.rows(tables.nodes)[0]["lease_allowance"]
    world.run(lambda connection: connection.execute(balances_table.update().values(micros=0)))
    refused(world, world.submit(key, answer(key, lease)), "budget_exhausted")
    assert world.lease_states()[lease.lease_id] == "cancelled"
    assert world.rows(tables.nodes)[0]["lease_allowance"] == allowance
    assert list(world.group_states().values()) == ["accepted", "open"]
