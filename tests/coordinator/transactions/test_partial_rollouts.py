"""Work of lost nodes is handed on, and everybody is paid for their own tokens once."""

from collections.abc import Callable
from pathlib import Path

import pytest
import sqlalchemy as sa

from coordinator.store import tables
from coordinator.transactions import checked_rollouts, claims
from protocol import limits
from protocol.policy.chunks import digest
from protocol.wire.signing import NodeKey, open_envelope
from protocol.work.fragment import Fragment, FragmentPart
from protocol.work.lease import Lease
from protocol.work.rollout import Sample, pack_logprobs, pack_tokens, unpack_tokens
from tests.coordinator.world import END, MAX_COST, PRICE, SAMPLES, World, answer, fragment

FIRST = 10
"""The honest first token of group 0."""


def lost(world: World, key: NodeKey) -> Lease:
    """A lease whose node told of one whole sample and of half of the other, and was never heard again."""
    lease = world.lease(key)
    assert world.tell(key, fragment(key, lease, {0: [FIRST, END], 1: [FIRST]})).taken == (lease.lease_id,)
    world.now_ms += world.terms.timeout_ms
    world.expire()
    return lease


def heir_of(world: World, key: NodeKey, *, version: int = 1) -> Lease:
    (lease,) = world.offer(key, version=version, continues=True).leases
    return lease


def tokens(sample: bytes) -> list[int]:
    return [int(token) for token in unpack_tokens(sample)]


def test_what_a_lost_node_told_of_is_gone_on_with_and_both_are_paid_for_their_own_tokens(world: World) -> None:
    first, second = world.join(1), world.join(2, price=2 * PRICE)
    before = lost(world, first)
    after = heir_of(world, second)
    assert (after.seed, after.version, after.prompt) == (before.seed, before.version, before.prompt)
    assert [(tokens(prefix.tokens), prefix.finish) for prefix in after.prefixes] == [
        ([FIRST, END], "stop"),
        ([FIRST], ""),
    ]
    verdict = world.submit(second, answer(second, after))
    assert (verdict.outcome, verdict.tokens, verdict.credit_micros) == ("accepted", 1, 2)
    assert (world.owed(first.node_id), world.owed(second.node_id)) == ((3, 0), (2, 0))

    world.earn(first)
    batch = world.batch(1)
    assert batch is not None
    group = batch.groups[0]
    assert [tokens(sample.tokens) for sample in group.samples] == [[FIRST, END]] * SAMPLES
    assert [sample.reward for sample in group.samples] == [1.0, 1.0]
    assert [len(sample.logprobs) for sample in group.samples] == [8, 8]
    assert [one.ends for one in group.earlier] == [(2, 1)]
    world.report(1)
    assert (world.owed(first.node_id), world.owed(second.node_id)) == ((0, 7), (0, 2))
    assert world.audit() == []


def test_tokens_that_do_not_fit_their_probabilities_wait_for_an_audit_and_who_went_on_is_paid(world: World) -> None:
    first, second = world.join(1), world.join(2)
    lost(world, first)
    world.submit(second, answer(second, heir_of(world, second)))
    world.earn(second)
    batch = world.batch(1)
    assert batch is not None
    (earlier,) = batch.groups[0].earlier
    world.report(1, [earlier.claim_id])
    assert (world.owed(first.node_id), world.owed(second.node_id)) == ((3, 0), (0, 5))
    assert world.take_cases() == [earlier.claim_id]
    world.find(earlier.claim_id, "hard")
    assert (world.owed(first.node_id), world.owed(second.node_id)) == ((0, 0), (0, 5))


def test_a_third_node_goes_on_from_both(world: World) -> None:
    keys = [world.join(number) for number in (1, 2, 3)]
    first = world.lease(keys[0])
    world.tell(keys[0], fragment(keys[0], first, {0: [FIRST]}))
    world.give_back(keys[0], first)
    second = heir_of(world, keys[1])
    world.tell(keys[1], fragment(keys[1], second, {1: [FIRST]}))
    world.give_back(keys[1], second)
    third = heir_of(world, keys[2])
    assert [tokens(prefix.tokens) for prefix in third.prefixes] == [[FIRST], [FIRST]]
    assert world.submit(keys[2], answer(keys[2], third)).tokens == 2
    assert [world.owed(key.node_id)[0] for key in keys] == [1, 1, 2]


def test_a_group_is_handed_on_so_often_and_no_more_however_many_tell_a_token_of_it_and_give_it_back(
    world: World,
) -> None:
    keys = [world.join(number) for number in range(limits.HANDS_MAX + 1)]
    lease = world.lease(keys[0])
    for number, key in enumerate(keys):
        assert world.tell(key, fragment(key, lease, {number % SAMPLES: [FIRST]})).taken
        world.give_back(key, lease)
        lease = heir_of(world, keys[(number + 1) % len(keys)])
        assert _told_before(lease) == min(number + 1, limits.HANDS_MAX)
    assert len(world.rows(tables.fragments)) == limits.HANDS_MAX


def _told_before(lease: Lease) -> int:
    return sum(len(prefix.tokens) // 4 for prefix in lease.prefixes)


def test_a_node_that_told_nothing_leaves_what_it_was_given(world: World) -> None:
    first, second, third = (world.join(number) for number in (1, 2, 3))
    lost(world, first)
    world.give_back(second, given := heir_of(world, second))
    assert heir_of(world, third).prefixes == given.prefixes


def test_what_a_rejected_lease_has_told_is_forgotten_and_what_it_was_given_is_not(world: World) -> None:
    first, cheat, third = (world.join(number) for number in (1, 2, 3))
    lost(world, first)
    given = heir_of(world, cheat)
    world.tell(cheat, fragment(cheat, given, {1: [77]}))
    assert world.submit(cheat, answer(cheat, given, lease_digest="0" * 64)).code == "lease_mismatch"
    assert heir_of(world, third).prefixes == given.prefixes


@pytest.mark.parametrize("why", ["engine", "version"])
def test_whoever_cannot_go_on_starts_afresh_and_what_was_told_is_forgotten(world: World, why: str) -> None:
    first, second = world.join(1), world.join(2)
    before = lost(world, first)
    world.publish(2, 1)
    if why == "engine":
        (after,) = world.offer(second).leases
    else:
        after = heir_of(world, second, version=2)
    assert (after.prompt, after.prefixes) == (before.prompt, ())
    assert after.seed != before.seed
    assert world.rows(tables.fragments) == []
    assert world.submit(second, answer(second, after)).tokens == 2 * SAMPLES
    assert world.owed(first.node_id) == (0, 0)


def test_a_node_whose_version_does_not_fit_takes_other_open_groups_first(world: World) -> None:
    first, second = world.join(1), world.join(2)
    told, untold = world.offer(first, groups=2).leases
    world.tell(first, fragment(first, told, {0: [FIRST]}))
    world.give_back(first, told, untold)
    assert world.lease(second).prompt == untold.prompt


def test_the_budget_covers_what_is_done_and_what_is_left(tmp_path: Path, store_url: str) -> None:
    """The first one works at ten times the price: to go on would cost more than to start afresh."""
    world = World(tmp_path, budget_micros=11 * MAX_COST, postgres_url=store_url)
    world.publish(1, 0)
    dear, cheap = world.join(1, price=10 * PRICE), world.join(2)
    lost(world, dear)
    assert heir_of(world, cheap).prefixes == ()
    world.database.close()


def test_an_answer_after_the_work_was_handed_on_is_not_paid_twice(world: World) -> None:
    first, second = world.join(1), world.join(2)
    before = lost(world, first)
    assert world.submit(first, answer(first, before)).code == "lease_closed"
    world.submit(second, answer(second, heir_of(world, second)))
    assert world.submit(first, answer(first, before)).code == "lease_closed"
    assert world.owed(first.node_id) == (3, 0)


def test_an_answer_that_is_just_too_late_costs_no_more_than_silence(world: World) -> None:
    """A node that sent fragments is paid for them, whether or not it answers between the deadline and the sweep."""
    first, second = world.join(1), world.join(2)
    before = world.lease(first)
    assert world.tell(first, fragment(first, before, {0: [FIRST, END], 1: [FIRST]})).taken
    world.now_ms += world.terms.timeout_ms
    assert world.submit(first, answer(first, before)).code == "lease_closed"
    assert world.expire() == 0, "it ended by that"
    assert world.lease_states() == {before.lease_id: "expired"}
    after = heir_of(world, second)
    assert [tokens(prefix.tokens) for prefix in after.prefixes] == [[FIRST, END], [FIRST]]
    assert world.submit(second, answer(second, after)).outcome == "accepted"
    assert world.owed(first.node_id) == (3, 0)
    assert world.audit() == []


def test_a_whole_answer_makes_what_was_told_superfluous(world: World) -> None:
    key = world.join(1)
    lease = world.lease(key)
    world.tell(key, fragment(key, lease, {0: [FIRST]}))
    assert world.submit(key, answer(key, lease)).tokens == 2 * SAMPLES
    assert world.rows(tables.fragments) == world.rows(tables.parts) == []


def test_a_lease_says_how_far_it_is_and_its_node_hears_when_it_has_ended(world: World) -> None:
    key = world.join(1)
    held, told, gone = world.offer(key, groups=3).leases
    world.give_back(key, gone)
    reply = world.tell(key, fragment(key, told, {0: [FIRST]}), held=[held, gone])
    assert (reply.gone, reply.taken) == ((gone.lease_id,), (told.lease_id,))
    states = world.lease_states()
    assert [states[lease.lease_id] for lease in (held, told, gone)] == ["held", "generating", "skipped"]


def test_a_fragment_sent_again_is_kept_once_and_the_next_one_follows_it(world: World) -> None:
    key = world.join(1)
    lease = world.lease(key)
    first = fragment(key, lease, {0: [FIRST]})
    head = digest(open_envelope("fragment", first).payload)
    assert world.tell(key, first, first).taken == (lease.lease_id,)
    assert world.tell(key, first).taken == (lease.lease_id,)
    assert world.tell(key, fragment(key, lease, {1: [FIRST]}, previous=head)).taken
    assert len(world.rows(tables.fragments)) == 2


def test_what_is_told_wrongly_over_and_over_has_no_more_read_again_than_the_last_that_was_kept(world: World) -> None:
    """Else one node's small requests keep the one writer busy, by all that it has told before of all its leases."""
    key = world.join(1)
    lease = world.lease(key)
    head, kept = "", list[bytes]()
    for sample, start in ((0, 0), (1, 0), (0, 1), (1, 1)):
        (part,) = _parts(fragment(key, lease, {sample: [FIRST]}))
        parts = (part.model_copy(update={"start": start}),)
        kept.append(fragment(key, lease, {}, parts=parts, previous=head))
        assert world.tell(key, kept[-1]).taken
        head = digest(open_envelope("fragment", kept[-1]).payload)
    out_of_turn = [*kept[:-1], fragment(key, lease, {0: [FIRST]}, previous="c" * 64)]
    in_turn = [fragment(key, lease, {0: [FIRST]}, previous=head), fragment(key, lease, {1: [END]}, previous=head)]
    world.tell(key, in_turn[0])  # another process has told of the others
    for wrong in (*out_of_turn, *in_turn):
        taken, reads = _told_and_read(world, key, wrong)
        assert (taken, [limit for limit in reads if not limit]) == ((), [])
    assert len(world.rows(tables.fragments)) == len(kept)


def _told_and_read(world: World, key: NodeKey, told: bytes) -> tuple[tuple[str, ...], list[bool]]:
    """Submit fragments; return the leases whose fragments were stored, and for each read whether it was of one."""
    reads: list[bool] = []

    def tell(connection: sa.Connection) -> tuple[str, ...]:
        @sa.event.listens_for(connection, "before_cursor_execute")
        def hear(_connection: object, _cursor: object, text: str, *_rest: object) -> None:
            if "fragments.envelope" in text:
                reads.append("LIMIT" in text)

        words = checked_rollouts.read_fragments(key.node_id, [told])
        return claims.take_progress(connection, key.node_id, [], words, judge=world.judge, now_ms=world.now_ms).taken

    taken: tuple[str, ...] = world.run(tell)
    assert reads
    return taken, reads


@pytest.mark.parametrize(
    "attack",
    ["another's lease", "another's key", "another round", "out of turn", "whole", "garbage", "end within", "twice"],
)
def test_a_fragment_that_cannot_be_is_not_kept(world: World, attack: str) -> None:
    key, thief = world.join(1), world.join(2)
    lease = world.lease(key)
    good = {0: [FIRST]}
    told: dict[str, Callable[[], bytes]] = {
        "another's lease": lambda: fragment(thief, lease, good),
        "another's key": lambda: fragment(thief, lease, good),
        "another round": lambda: fragment(key, lease, good, round_id="b" * 64),
        "out of turn": lambda: fragment(key, lease, good, previous="c" * 64),
        "whole": lambda: fragment(key, lease, {0: [END], 1: [END]}),
        "garbage": lambda: b"garbage",
        "end within": lambda: fragment(key, lease, {0: [END, FIRST]}),
        "twice": lambda: fragment(key, lease, good, parts=_twice(key, lease)),
    }
    sender = thief if attack == "another's lease" else key
    assert world.tell(sender, told[attack]()).taken == ()
    assert world.rows(tables.fragments) == []
    assert world.lease_states() == {lease.lease_id: "offered"}


def test_an_answer_that_goes_on_where_the_prefix_was_complete_is_refused(world: World) -> None:
    first, second = world.join(1), world.join(2)
    lost(world, first)
    lease = heir_of(world, second)
    more = Sample(tokens=pack_tokens([END]), logprobs=pack_logprobs([0.0]), finish="stop")
    assert world.submit(second, answer(second, lease, samples=(more, more))).code == "tokens_invalid"


def _twice(key: NodeKey, lease: Lease) -> tuple[FragmentPart, FragmentPart]:
    (part,) = _parts(fragment(key, lease, {0: [FIRST]}))
    return (part, part)


def _parts(told: bytes) -> tuple[FragmentPart, ...]:
    return Fragment.from_bytes(open_envelope("fragment", told).payload).parts
