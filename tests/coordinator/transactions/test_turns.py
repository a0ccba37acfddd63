"""Episodes as chains of leases: each turn is paid alone, the next begins where it ended, the last makes them one."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import sqlalchemy as sa

from coordinator.store import tables
from coordinator.transactions import leases, offers, scoring, standings
from protocol.errors import LeaseMismatch
from protocol.tasks import Reward
from protocol.wire.signing import NodeKey
from protocol.work.lease import Lease, Prefix
from protocol.work.messages import Verdict
from protocol.work.rollout import PolicyBounds, RolloutClaim, Sample, pack_logprobs, pack_tokens, unpack_tokens
from tests.coordinator.world import END, PRICE, ROUND, SAMPLES, VOCAB, World

TURN, LONGEST, TURNS = 2, 24, 3
READ = 77
"""The environment's answer to each turn."""


@pytest.fixture
def play(world: World) -> World:
    """A round in which every sample takes three turns, unless its second token says that it gives up."""
    world.terms = replace(world.terms, turn_tokens_max=TURN, max_new_tokens=LONGEST)
    world.judge = replace(
        world.judge, terms=world.terms, reward=None, bounds=PolicyBounds(VOCAB, frozenset({END}), LONGEST)
    )
    return world


def say(key: NodeKey, lease: Lease, first: int = 20, **change: Any) -> bytes:
    """The signed turn of every sample whose episode goes on."""
    samples = tuple(
        Sample(tokens=b"", logprobs=b"", finish=prefix.finish)
        if prefix.finish
        else Sample(tokens=pack_tokens([first + number, END]), logprobs=pack_logprobs([-0.5, -0.25]), finish="stop")
        for number, prefix in enumerate(lease.prefixes or (Prefix(tokens=b"", finish=""),) * lease.samples)
    )
    fields = {"round_id": ROUND, "lease_id": lease.lease_id, "lease_digest": lease.digest, "samples": samples}
    return key.seal("rollout", RolloutClaim(**fields | change).to_bytes())


def environment(world: World, ends: Callable[[int, int], bool] = lambda number, turns: turns == TURNS) -> int:
    """Let the environment answer all turns that wait; return how many these were."""
    waiting = world.run(scoring.waiting, 64)
    for each in waiting:
        over = [episode is None or ends(number, len(episode.turns)) for number, episode in enumerate(each.episodes)]
        inserted = [Prefix(tokens=b"" if done else pack_tokens([READ]), finish="stop" if done else "") for done in over]
        rewards = [
            Reward(float(number), "ok", {"turns": len(episode.turns)}) if episode and done else None
            for number, (episode, done) in enumerate(zip(each.episodes, over, strict=True))
        ]
        assert world.run(
            scoring.answered, each.claim_id, inserted, rewards, timeout_ms=world.terms.timeout_ms, now_ms=world.now_ms
        )
    return len(waiting)


def turns_for(world: World, key: NodeKey, *leases: Lease, sent_again: bool = False) -> tuple[Lease, ...]:
    """The next turns that a submission's reply carries."""
    lease_ids = [lease.lease_id for lease in leases]
    given: tuple[Lease, ...] = world.run(
        offers.offer_turns,
        key.node_id,
        [] if sent_again else lease_ids,
        sent_again=lease_ids if sent_again else [],
        terms=world.terms,
        draw=world.draw,
        now_ms=world.now_ms,
    )
    return given


def first_turn(world: World, key: NodeKey) -> tuple[Lease, Verdict]:
    lease = world.lease(key)
    verdict = world.submit(key, say(key, lease))
    assert verdict.outcome == "accepted", verdict
    return lease, verdict


def played(world: World, key: NodeKey) -> list[Lease]:
    """Play a whole group with one node; its leases."""
    leases = [world.lease(key)]
    while True:
        assert world.submit(key, say(key, leases[-1])).outcome == "accepted"
        assert environment(world) == 1
        following = turns_for(world, key, leases[-1])
        if not following:
            return leases
        leases += following


def test_a_group_between_two_turns_counts_for_the_share_of_its_owner(play: World) -> None:
    """The share of an owner is half of four groups, with four owners at work."""
    play.terms = replace(play.terms, max_owner_share=0.5, groups_per_update=4, staleness=0)
    play.judge = replace(play.judge, terms=play.terms)
    greedy, *others = [play.join(number) for number in range(1, 5)]
    leases = {key.node_id: first_turn(play, key)[0] for key in (greedy, *others)}
    environment(play)
    assert list(play.group_states().values()) == ["turn"] * 4
    for key in (greedy, *others):
        assert play.run(standings.at_work, key.node_id) == 1
    assert play.run(standings.share_of, 4, 0.5, proven_only=False) == 2
    (following,) = turns_for(play, greedy, leases[greedy.node_id])
    assert play.run(standings.at_work, greedy.node_id) == 1, "a lease and its earlier turn are one group"
    play.submit(greedy, say(greedy, following))
    assert play.run(standings.at_work, greedy.node_id) == 1


def tokens(packed: bytes) -> list[int]:
    return [int(token) for token in unpack_tokens(packed)]


def states(world: World) -> list[str]:
    return [row["state"] for row in world.rows(tables.rollouts)]


def test_a_group_is_a_chain_of_leases_and_the_learner_gets_it_whole(play: World) -> None:
    key = play.join(1)
    leases = played(play, key)
    assert len(leases) == TURNS
    assert len({lease.seed for lease in leases}) == len({lease.version for lease in leases}) == 1
    assert [tokens(leases[1].prefixes[0].tokens), tokens(leases[2].prefixes[1].tokens)] == [
        [20, END, READ],
        [21, END, READ, 21, END, READ],
    ]
    assert states(play) == ["part", "part", "buffered"]
    played(play, key)
    batch = play.batch(1)
    assert batch is not None
    group = batch.groups[0]
    assert tokens(group.samples[0].tokens) == [20, END, READ, 20, END, READ, 20, END]
    assert list(group.samples[0].sampled) == [1, 1, 0, 1, 1, 0, 1, 1]
    assert np.frombuffer(group.samples[0].logprobs, "<f4").tolist() == [-0.5, -0.25, 0, -0.5, -0.25, 0, -0.5, -0.25]
    assert [sample.reward for sample in group.samples] == [0.0, 1.0]
    assert [each.ends for each in group.earlier] == [(2, 2), (5, 5)]


@pytest.mark.parametrize("fails", [False, True])
def test_a_turn_is_offered_in_the_transaction_of_its_answer_which_stays_if_the_offer_fails(
    play: World, fails: bool
) -> None:
    key = play.join(1)
    lease, _ = first_turn(play, key)
    (waiting,) = play.run(scoring.waiting, 1)
    given = partial(
        offers.offer_turns,
        node=key.node_id,
        lease_ids=[lease.lease_id],
        terms=play.terms,
        draw=play.draw,
        now_ms=play.now_ms,
    )

    def offer(connection: sa.Connection) -> tuple[Lease, ...]:
        leases = given(connection)
        assert not fails
        return leases

    leases = play.run(
        scoring.answered_and_offered,
        waiting.claim_id,
        [Prefix(tokens=pack_tokens([READ]), finish="")] * SAMPLES,
        [None] * SAMPLES,
        offer=offer,
        timeout_ms=play.terms.timeout_ms,
        now_ms=play.now_ms,
    )
    assert states(play) == ["turn"]
    assert len(leases) == (not fails)
    assert len(turns_for(play, key, lease)) == fails, "what failed is undone, and can be offered again"


def test_each_turn_is_paid_when_it_is_accepted_and_settled_with_its_group(play: World) -> None:
    key = play.join(1)
    each = 2 * SAMPLES
    _, verdict = first_turn(play, key)
    assert (verdict.tokens, verdict.credit_micros) == (each, each)
    assert play.owed(key.node_id) == (each, 0)
    environment(play)
    while leases := play.offer(key, continues=True).leases:
        if play.submit(key, say(key, leases[0])).outcome == "accepted":
            environment(play)
        if "buffered" in states(play):
            break
    played(play, key)
    play.train(1)
    assert play.owed(key.node_id) == (0, 2 * TURNS * each)
    assert play.audit() == []


def test_an_episode_may_end_before_the_others_of_its_group(play: World) -> None:
    key = play.join(1)
    lease, _ = first_turn(play, key)
    environment(play, lambda number, turns: number == 0 or turns == TURNS)
    (second,) = turns_for(play, key, lease)
    assert [prefix.finish for prefix in second.prefixes] == ["stop", ""]
    assert play.submit(key, say(key, second)).tokens == 2
    environment(play)
    (third,) = turns_for(play, key, second)
    play.submit(key, say(key, third))
    environment(play)
    played(play, key)
    batch = play.batch(1)
    assert batch is not None
    assert [len(tokens(sample.tokens)) for sample in batch.groups[0].samples] == [2, 8]
    row = next(row for row in play.rows(tables.rollouts) if row["state"] == "batched")
    assert row["marks"]["components"] == {"turns": [1, 3]}


def test_any_node_with_the_version_takes_the_next_turn(play: World) -> None:
    first, second = play.join(1), play.join(2, price=2 * PRICE)
    lease, _ = first_turn(play, first)
    environment(play)
    (following,) = play.offer(second, continues=True).leases
    assert following.prefixes[0].tokens == pack_tokens([20, END, READ])
    assert following.price_micros_per_mtok == 2 * PRICE
    assert turns_for(play, first, lease) == (), "it was given away"
    assert play.submit(second, say(second, following)).credit_micros == 2 * 2 * SAMPLES


def test_a_node_that_cannot_continue_begins_groups_and_leaves_turns_alone(play: World) -> None:
    key, other = play.join(1), play.join(2)
    first_turn(play, key)
    environment(play)
    (lease,) = play.offer(other).leases
    assert not lease.prefixes
    assert play.group_states() == {0: "turn", 1: "leased"}


def test_a_node_that_dies_loses_one_turn(play: World) -> None:
    first, second = play.join(1), play.join(2)
    lease, _ = first_turn(play, first)
    environment(play)
    (lost,) = turns_for(play, first, lease)
    play.now_ms += play.terms.timeout_ms
    play.expire()
    assert play.group_states() == {0: "turn"}
    (again,) = play.offer(second, continues=True).leases
    assert (again.seed, again.prefixes) == (lost.seed, lost.prefixes)
    assert play.submit(first, say(first, lost)).code == "lease_closed"
    assert play.submit(second, say(second, again)).outcome == "accepted"


def test_a_newer_version_waits_for_the_time_of_a_lease_and_then_begins_the_group_again(play: World) -> None:
    first, second = play.join(1), play.join(2)
    first_turn(play, first)
    environment(play)
    play.publish(2, 1)
    (other,) = play.offer(second, version=2, continues=True).leases
    assert not other.prefixes, "another group"
    play.now_ms += play.terms.timeout_ms
    taken = play.offer(second, version=2, groups=8, continues=True).leases
    assert 0 in [row["group_no"] for row in play.rows(tables.leases) if row["lease_id"] == taken[0].lease_id]
    assert not taken[0].prefixes
    assert states(play) == ["unused"]
    assert play.owed(first.node_id)[0] == 2 * SAMPLES, "what it has played is still paid"


def test_turns_count_as_under_way(play: World) -> None:
    """Else new groups would take the place of those whose environment thinks, and episodes would grow stale."""
    key = play.join(1)
    room = len(play.offer(key, groups=64).leases)
    play.reopen()
    for row in play.rows(tables.leases):
        lease = Lease.from_bytes(row["offer"])
        play.submit(key, say(key, lease))
    environment(play)
    assert set(play.group_states().values()) == {"turn"}
    other = play.join(2)
    assert play.offer(other).reason == "ahead"
    assert len(play.offer(other, groups=64, continues=True).leases) == room


def test_a_node_is_asked_to_stay_with_a_version_until_its_episodes_are_over(play: World) -> None:
    key = play.join(1)
    play.terms = replace(play.terms, groups_per_update=1, staleness=0)
    reply = play.offer(key)
    (lease,) = reply.leases
    assert reply.stays
    play.publish(2, 1)
    assert play.submit(key, say(key, lease)).outcome == "accepted"
    waits = play.offer(key, continues=True, finishing=True)
    assert (waits.leases, waits.stays) == ((), True)
    environment(play, lambda number, turns: turns == 2)
    following = play.offer(key, continues=True, finishing=True)
    assert (len(following.leases), following.stays) == (1, True)
    play.submit(key, say(key, following.leases[0]))
    environment(play, lambda number, turns: turns == 2)
    assert not play.offer(key, continues=True, finishing=True).stays


def test_a_finishing_node_begins_no_group(play: World) -> None:
    key = play.join(1)
    assert play.offer(key, continues=True, finishing=True).leases == ()


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        pytest.param({"prefixes": lambda lease: lease.prefixes[::-1]}, "an edited observation", id="edited"),
        pytest.param({"prefixes": lambda _: ()}, "a turn left out", id="left-out"),
    ],
)
def test_a_turn_after_another_context_is_none(play: World, spoil: dict[str, Callable[[Lease], Any]], said: str) -> None:
    """The node signs the digest of the lease that it answers, and what was read is part of the lease."""
    key = play.join(1)
    lease, _ = first_turn(play, key)
    environment(play)
    (second,) = turns_for(play, key, lease)
    altered = second.model_copy(update={name: change(second) for name, change in spoil.items()})
    verdict = play.submit(key, say(key, second, lease_digest=altered.digest))
    assert verdict.code == LeaseMismatch.code, said


def test_a_turn_cannot_be_played_twice_or_answer_another_turn(play: World) -> None:
    key = play.join(1)
    lease, verdict = first_turn(play, key)
    again = play.submit(key, say(key, lease))
    assert (again.outcome, again.credit_micros) == ("already_accepted", verdict.credit_micros)
    assert play.submit(key, say(key, lease, first=30)).code == "lease_conflict"
    environment(play)
    (second,) = turns_for(play, key, lease)
    assert play.submit(key, say(key, lease, first=30)).code == "lease_conflict"
    assert play.submit(key, say(key, second)).outcome == "accepted"
    assert play.owed(key.node_id)[0] == 2 * verdict.credit_micros


@pytest.mark.parametrize(
    "sample",
    [
        Sample(tokens=pack_tokens([20, 21, END]), logprobs=pack_logprobs([-0.5] * 3), finish="stop"),
        Sample(tokens=pack_tokens([20, 21, 22]), logprobs=pack_logprobs([-0.5] * 3), finish="length"),
        Sample(tokens=pack_tokens([20]), logprobs=pack_logprobs([-0.5]), finish="length"),
        Sample(tokens=b"", logprobs=b"", finish="stop"),
    ],
)
def test_a_turn_is_at_most_as_long_as_its_lease_says(play: World, sample: Sample) -> None:
    key = play.join(1)
    lease = play.lease(key)
    verdict = play.submit(key, say(key, lease, samples=(sample,) * SAMPLES))
    assert verdict.code == "tokens_invalid"


def test_tokens_after_the_end_of_an_episode_are_refused(play: World) -> None:
    key = play.join(1)
    lease, _ = first_turn(play, key)
    environment(play, lambda number, turns: number == 0)
    (second,) = turns_for(play, key, lease)
    more = Sample(tokens=pack_tokens([20, END]), logprobs=pack_logprobs([-0.5, -0.5]), finish="stop")
    assert play.submit(key, say(key, second, samples=(more, more))).code == "tokens_invalid"


def test_an_environment_that_fails_costs_the_group_and_no_node(play: World) -> None:
    key = play.join(1)
    lease, _ = first_turn(play, key)
    environment(play)
    (second,) = turns_for(play, key, lease)
    play.submit(key, say(key, second))
    (waiting,) = play.run(scoring.waiting, 1)
    play.run(scoring.give_up, waiting.claim_id, "it broke", audits=play.audits, now_ms=play.now_ms)
    assert play.group_states() == {0: "verifier_error"}
    assert sorted(states(play)) == ["unused", "verifier_error"]
    play.release_leftovers()
    assert play.owed(key.node_id) == (0, 2 * 2 * SAMPLES)


def test_a_fault_in_a_turn_ends_the_episodes_and_pays_those_who_did_no_wrong(play: World) -> None:
    cheat, honest = play.join(1), play.join(2)
    lease, _ = first_turn(play, cheat)
    environment(play)
    (second,) = play.offer(honest, continues=True).leases
    assert play.submit(honest, say(honest, second)).outcome == "accepted"
    environment(play)
    (third,) = play.offer(honest, continues=True).leases
    claim = play.rows(tables.rollouts)[0]["claim_id"]
    play.run(lambda connection: connection.execute(tables.audits.update().values(why="learner")))
    assert claim in play.take_cases()
    play.find(claim, "hard")
    assert play.group_states() == {0: "open"}
    assert states(play) == ["retracted", "unused"]
    assert play.submit(honest, say(honest, third)).outcome == "accepted", "it is paid, and nobody waits for it"
    assert lease.lease_id != third.lease_id
    assert states(play) == ["retracted", "unused", "surplus"]


def test_the_context_is_paid_as_the_lease_says(play: World) -> None:
    key = play.join(1)
    play.terms = replace(play.terms, context_share=0.5)
    lease, verdict = first_turn(play, key)
    assert (lease.context_tokens_paid, verdict.tokens) == (0, 2 * SAMPLES), "half a token of one prompt"
    environment(play)
    (second,) = turns_for(play, key, lease)
    assert second.context_tokens_paid == SAMPLES * (1 + 3) // 2
    assert play.submit(key, say(key, second)).tokens == 2 * SAMPLES + second.context_tokens_paid
    assert play.audit() == []
    reserved = play.run(lambda connection: connection.exec_driver_sql("SELECT reserved_micros FROM tally").scalar())
    assert reserved == 0


def test_a_restart_between_turns_loses_nothing(play: World) -> None:
    key = play.join(1)
    lease, _ = first_turn(play, key)
    play.reopen()
    assert environment(play) == 1
    play.reopen()
    (second,) = turns_for(play, key, lease)
    assert play.submit(key, say(key, second)).outcome == "accepted"


def restart(world: World, downtime_ms: int) -> None:
    """Kill the coordinator, and launch it again after some time."""
    terms = {"timeout_ms": world.terms.timeout_ms, "back_ms": 100}
    died_ms, world.now_ms = world.now_ms, world.now_ms + downtime_ms
    world.reopen()
    world.run(leases.extend_after_downtime, alive_ms=died_ms, now_ms=world.now_ms, **terms)


@pytest.mark.parametrize("downtime", [0.1, 10])
def test_a_turn_whose_offer_was_lost_with_the_coordinator_is_offered_again(play: World, downtime: float) -> None:
    """Else the node, which stays with the version of its open leases, would do nothing until these expire."""
    play.terms = replace(play.terms, groups_per_update=1, staleness=0)
    key = play.join(1)
    lease, _ = first_turn(play, key)
    environment(play)
    (lost,) = turns_for(play, key, lease)
    restart(play, int(downtime * play.terms.timeout_ms))
    play.publish(2, 1)
    waits = play.offer(key, continues=True, finishing=True)
    assert (waits.leases, waits.stays) == ((), True), "it cannot learn of the lease by a request for work"
    assert play.submit(key, say(key, lease)).outcome == "already_accepted"
    (again,) = turns_for(play, key, lease, sent_again=True)
    assert (again.seed, again.version, again.prefixes) == (lost.seed, lost.version, lost.prefixes)
    assert again.expires_ms == play.now_ms + play.terms.timeout_ms
    assert play.lease_states()[lost.lease_id] == "cancelled", "nobody is blamed"
    assert play.submit(key, say(key, again)).outcome == "accepted"
    assert play.audit() == []


def test_a_turn_that_its_node_may_hold_is_not_replaced(play: World) -> None:
    key = play.join(1)
    lease, _ = first_turn(play, key)
    environment(play)
    (second,) = turns_for(play, key, lease)
    play.now_ms += 1
    assert turns_for(play, key, lease, sent_again=True) == (), "no restart since"
    play.tell(key, held=[second])
    restart(play, 100)
    assert turns_for(play, key, lease, sent_again=True) == (), "reported as held"
    assert play.submit(key, say(key, second)).outcome == "accepted"


def test_two_nodes_play_for_three_updates_and_the_books_agree(play: World) -> None:
    keys = [play.join(1), play.join(2)]
    for number in range(1, 4):
        for key in keys:
            played(play, key)
        play.train(number)
    assert play.audit() == []
    assert [play.owed(key.node_id) for key in keys] == [(0, 3 * TURNS * 2 * SAMPLES)] * 2


def test_a_newcomer_on_trial_takes_no_turn_of_anothers_group(play: World) -> None:
    known, other, fresh = play.join(1), play.join(2), play.join(3)
    play.prove(known)
    play.prove(other)
    first_turn(play, known)
    environment(play)
    (lease,) = play.offer(fresh, continues=True).leases
    assert not lease.prefixes, "a trial of its own"
    assert play.offer(other, continues=True).leases[0].prefixes


def test_turns_and_new_groups_together_are_no_more_than_a_node_may_hold(play: World) -> None:
    key = play.join(1)
    play.terms = replace(play.terms, groups_per_request=1)
    first_turn(play, key)
    environment(play)
    play.lease(key)
    held = len(play.offer(key, groups=8, continues=True).leases)
    assert (held, play.terms.held_max) == (1, 2)
