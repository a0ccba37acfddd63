"""Evaluations: who measures, what comes of it, and that the learner never sees or misses a thing."""

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from coordinator.commands import evaluate
from coordinator.config import AuditSection, Config, EvalSection
from coordinator.config.round import RoundSection
from coordinator.store import tables
from coordinator.transactions import evaluations, scoring
from protocol.errors import NotFound, OutOfOrder, Unreachable
from protocol.wire.signing import NodeKey
from protocol.work.lease import Lease, Prefix
from protocol.work.messages import LeaseReply
from protocol.work.rollout import Sample, pack_logprobs, pack_tokens, unpack_tokens
from tests.coordinator.world import END, SAMPLES, World, answer, claim, fragment, honest_sample, rest


def evaluated(*, last_update: int = 100, **settings: Any) -> Config:
    return Config(eval=EvalSection(**settings), round=RoundSection(max_updates=last_update))


CONFIG = evaluated(every=2, problems=3, samples=4, patience_s=60.0)
SIZES = {"held_out": 10}


def publish(world: World, version: int, update: int, config: Config = CONFIG) -> int:
    """Publish a new version as the coordinator does."""
    world.publish(version, update)
    begun: int = world.run(evaluations.start_due_evaluations, version, SIZES, config, world.now_ms)
    return begun


def shown(world: World) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = world.run(evaluations.list_evaluations)
    return rows


def measured(reply: LeaseReply) -> list[Lease]:
    """Return the leases of an evaluation."""
    return [lease for lease in reply.leases if unpack_tokens(lease.prompt)[0] >= 5_000]


def half_right(key: NodeKey, lease: Lease) -> bytes:
    """An answer of which every other sample is right."""
    wrong = Sample(tokens=pack_tokens([END]), logprobs=pack_logprobs([-0.5]), finish="stop")
    samples = tuple(honest_sample(lease) if number % 2 else wrong for number in range(lease.samples))
    return key.seal("rollout", claim(lease, samples=samples).to_bytes())


def finish(world: World, key: NodeKey, version: int) -> None:
    """Measure all that there is of a version, and give the rest back."""
    while given := measured(reply := world.offer(key, version=version, groups=8)):
        for lease in given:
            assert world.submit(key, half_right(key, lease)).outcome == "accepted"
        world.give_back(key, *(lease for lease in reply.leases if lease not in given))
    world.give_back(key, *reply.leases)


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path, staleness=2, size=2)


def test_the_first_version_is_measured_before_anything_is_trained_on(world: World) -> None:
    key = world.join(1)
    assert publish(world, 1, 0) == 1
    reply = world.offer(key, groups=3)
    assert len(measured(reply)) == len(reply.leases) == 3
    assert {lease.samples for lease in reply.leases} == {4}
    assert not reply.stays, "there is no more"
    for lease in reply.leases:
        assert world.submit(key, half_right(key, lease)).outcome == "accepted"
    (row,) = shown(world)
    assert (row["state"], row["version"], row["update"], row["why"]) == ("done", 1, 0, "before")
    assert row["result"]["average"] == pytest.approx(0.5)
    assert row["result"]["passed"] == pytest.approx({"1": 0.5, "2": 5 / 6, "4": 1.0})
    assert (row["result"]["problems"], row["result"]["samples"]) == (3, 4)
    low, high = row["result"]["interval"]
    assert low < 0.5 < high
    (told,) = world.run(evaluations.latest_results)
    assert (told.number, told.update) == (row["number"], 0)
    assert told.figures == pytest.approx(
        {f"eval/{row['split']}/{name}": value for name, value in
         {"avg@4": 0.5, "pass@1": 0.5, "pass@2": 5 / 6, "pass@4": 1.0}.items()}
    )  # fmt: skip
    assert type(told).from_bytes(told.to_bytes()) == told


def test_what_was_measured_is_paid_and_never_trained_on(world: World) -> None:
    key = world.join(1)
    publish(world, 1, 0)
    finish(world, key, 1)
    tokens = 3 * (2 * 1 + 2 * 2)
    assert world.owed(key.node_id) == (0, tokens), "nothing is audited here, so it is payable at once"
    assert world.batch(1) is None
    for _ in range(2):
        world.earn(key)
    batch = world.batch(1)
    assert batch is not None
    assert [unpack_tokens(group.prompt)[0] for group in batch.groups] == [10, 11]
    assert world.audit() == []


def test_evaluations_come_every_so_many_versions_and_at_the_end(world: World) -> None:
    begun = [publish(world, number + 1, number) for number in range(5)]
    assert begun == [1, 0, 1, 0, 1]
    assert publish(world, 6, CONFIG.round.max_updates) == 1
    assert [row["why"] for row in shown(world)] == ["before", "every", "every", "last"]


def test_publishing_again_after_a_crash_begins_nothing_twice(world: World) -> None:
    assert [publish(world, 1, 0), publish(world, 1, 0)] == [1, 0]


def test_nothing_is_measured_unless_it_is_set(world: World) -> None:
    assert publish(world, 1, 1, evaluated(last_update=1)) == 0


def test_every_evaluation_of_a_round_has_the_same_problems() -> None:
    chosen = evaluations.choose(100, 8, split="held_out", seed=3)
    assert chosen == evaluations.choose(100, 8, split="held_out", seed=3)
    assert len(set(chosen)) == 8
    assert chosen != evaluations.choose(100, 8, split="held_out", seed=4)
    assert evaluations.choose(3, 8, split="held_out", seed=0) == [0, 1, 2]


def test_only_the_version_that_it_is_pinned_to_is_measured(world: World) -> None:
    key = world.join(1)
    publish(world, 1, 0)
    world.publish(2, 0)
    assert not measured(world.offer(key, version=2, groups=8))
    assert measured(world.offer(key, version=1, groups=2))


def start_in_the_middle(world: World, nodes: int, *, problems: int = 8) -> list[NodeKey]:
    """A round that trains, in which each of the nodes is at work, and version 3 is to be measured."""
    world.terms = replace(world.terms, groups_per_update=40)
    keys = [world.join(number + 1) for number in range(nodes)]
    config = evaluated(every=2, before_train=False, problems=problems, samples=2)
    for version in (1, 2, 3):
        publish(world, version, 0, config)
    for key in keys:
        assert not measured(world.offer(key, version=2)), "version 2 is not measured"
    return keys


def test_free_keys_that_answer_nothing_leave_most_of_an_evaluation_to_others(world: World) -> None:
    worker = world.join(1)
    world.publish(1, 0)
    for _ in range(2):
        world.earn(worker)
    world.train(1)
    config = evaluated(every=1, before_train=False, problems=8, samples=2)
    assert publish(world, 2, 1, config) == 1
    world.give_back(worker, *world.offer(worker, version=2).leases)
    hoarders = [world.join(number) for number in range(2, 30)]
    taken = [lease for key in hoarders for lease in measured(world.offer(key, version=2, groups=8))]
    assert 1 <= len(taken) <= 2, "a quarter of eight, each by another key"
    world.now_ms += world.terms.timeout_ms
    assert measured(world.offer(worker, version=2, groups=8))
    again = [lease for key in hoarders[:2] for lease in measured(world.offer(key, version=2, groups=8))]
    assert again == [], "who let one expire waits"


def test_a_share_of_the_nodes_measures_while_the_others_train(world: World) -> None:
    keys = start_in_the_middle(world, 8)
    replies = [world.offer(key, version=3, groups=2) for key in keys]
    assert [bool(measured(reply)) for reply in replies] == [True, True, *[False] * 6], "a quarter of eight"
    assert all(len(reply.leases) == 2 for reply in replies)
    assert [reply.stays for reply in replies] == [True, True, *[False] * 6]


def test_who_waits_for_the_next_turn_of_an_evaluation_still_measures(world: World) -> None:
    world.terms = replace(world.terms, turn_tokens_max=2)
    world.judge = replace(world.judge, terms=world.terms, reward=None)
    first, second = start_in_the_middle(world, 2)
    (lease,) = measured(world.offer(first, version=3))
    assert world.submit(first, answer(first, lease)).outcome == "accepted"
    (waiting,) = world.run(scoring.waiting, 64)
    assert not measured(world.offer(second, version=3)), "its environment has not answered yet"
    goes_on = [Prefix(tokens=b"", finish="")] * lease.samples
    answered = partial(scoring.answered, timeout_ms=world.terms.timeout_ms, now_ms=world.now_ms)
    assert world.run(answered, waiting.claim_id, goes_on, [None] * lease.samples)
    assert world.group_states()[waiting.group_no] == "turn"
    assert not measured(world.offer(second, version=3)), "one of two nodes may measure"


def test_who_measures_keeps_its_version_until_nothing_is_left(world: World) -> None:
    first, second = start_in_the_middle(world, 2, problems=3)
    given = world.offer(first, version=3, groups=2)
    assert (len(measured(given)), given.stays) == (2, True)
    world.publish(4, 1)
    assert not measured(world.offer(second, version=4, groups=2))
    for lease in given.leases:
        world.submit(first, half_right(first, lease))
    given = world.offer(first, version=3, groups=2)
    assert (len(measured(given)), given.stays) == (1, False)


def test_a_single_node_measures_a_share_of_what_it_does(world: World) -> None:
    (key,) = start_in_the_middle(world, 1)
    reply = world.offer(key, version=3, groups=8)
    assert (len(measured(reply)), len(reply.leases), reply.stays) == (2, 8, False)


def test_who_has_nothing_to_sample_for_the_learner_measures(world: World) -> None:
    key = world.join(1)
    config = evaluated(every=2, before_train=False, problems=8, samples=2)
    for version in (1, 2, 3):
        publish(world, version, 0, config)
    given = world.offer(key, version=3, groups=8)
    assert len(given.leases) == 8
    assert len(measured(given)) == 2
    for lease in given.leases:
        world.submit(key, half_right(key, lease) if lease in measured(given) else answer(key, lease))
    assert len(measured(world.offer(key, version=3, groups=8))) == 6, "the learner has all that it may have of it"


def test_a_lease_that_expires_is_given_again_and_counts_once(world: World) -> None:
    slow, quick = world.join(1), world.join(2)
    publish(world, 1, 0)
    lost = measured(world.offer(slow, groups=3))
    world.now_ms += 10_000
    finish(world, quick, 1)
    assert world.submit(slow, half_right(slow, lost[0])).code == "lease_closed"
    (row,) = shown(world)
    assert (row["state"], row["result"]["problems"]) == ("done", 3)


def test_a_restart_goes_on_with_what_was_begun(world: World) -> None:
    key = world.join(1)
    publish(world, 1, 0)
    lease = measured(world.offer(key, groups=1))[0]
    world.reopen()
    assert world.submit(key, half_right(key, lease)).outcome == "accepted"
    finish(world, key, 1)
    assert [row["state"] for row in shown(world)] == ["done"]


def test_work_of_an_evaluation_is_handed_on_like_any_other(world: World) -> None:
    first, heir = world.join(1), world.join(2)
    publish(world, 1, 0)
    lease = measured(world.offer(first, groups=1))[0]
    head = int(unpack_tokens(lease.prompt)[0])
    assert world.tell(first, fragment(first, lease, {0: [head]})).taken
    world.give_back(first, lease)
    (after,) = world.offer(heir, groups=1, continues=True).leases
    assert (len(after.prefixes), after.samples) == (4, 4)
    assert world.submit(heir, answer(heir, after, samples=rest(after))).outcome == "accepted"
    assert world.owed(first.node_id) == (0, 1)


def test_a_fault_takes_its_group_out_and_has_it_measured_anew(tmp_path: Path) -> None:
    world = World(tmp_path, rules=AuditSection())
    cheat, honest = world.join(1), world.join(2)
    publish(world, 1, 0)
    (lease,) = measured(world.offer(cheat, groups=1))
    world.submit(cheat, half_right(cheat, lease))
    (claim_id,) = world.take_cases()
    assert world.find(claim_id, "hard")
    finish(world, honest, 1)
    (row,) = shown(world)
    assert (row["state"], row["result"]["problems"], row["answered"]) == ("done", 3, 3)
    states = sorted(found["state"] for found in world.rows(tables.rollouts))
    assert states == ["measured"] * 3 + ["retracted"]
    assert world.owed(cheat.node_id) == (0, 0)


def test_a_fault_found_afterwards_leaves_the_result_without_it(tmp_path: Path) -> None:
    world = World(tmp_path, rules=AuditSection())
    key = world.join(1)
    publish(world, 1, 0)
    finish(world, key, 1)
    assert shown(world)[0]["result"]["problems"] == 3
    last, *others = world.take_cases()
    assert all(world.find(other) for other in others)
    assert world.find(last, "hard")
    (row,) = shown(world)
    assert (row["state"], row["result"]["problems"]) == ("done", 2)


def test_nobody_holds_the_version_any_more(world: World) -> None:
    key = world.join(1)
    publish(world, 1, 0)
    lease = measured(world.offer(key, groups=1))[0]
    world.submit(key, half_right(key, lease))
    world.publish(2, 1)

    def sweep() -> list[int]:
        ended: list[int] = world.run(evaluations.sweep, CONFIG.eval, alive_since_ms=world.now_ms, now_ms=world.now_ms)
        return ended

    def hold(version: int) -> None:
        world.run(lambda conn: conn.execute(sa.update(tables.nodes).values(version=version)))

    hold(1)
    assert sweep() == []
    hold(2)
    assert sweep() == [1]
    (row,) = shown(world)
    assert (row["state"], row["result"]["problems"]) == ("partial", 1)
    assert not measured(world.offer(key, version=1, groups=8))


def test_an_evaluation_ends_when_its_time_is_over(world: World) -> None:
    world.join(1)
    publish(world, 1, 0)
    world.now_ms += int(1000 * CONFIG.eval.patience_s)
    assert world.run(evaluations.sweep, CONFIG.eval, alive_since_ms=0, now_ms=world.now_ms) == [1]
    (row,) = shown(world)
    assert (row["state"], row["result"]) == ("void", None)
    assert not world.run(evaluations.is_running)


def test_waiting_for_an_evaluation_that_no_coordinator_ends_has_an_end(world: World) -> None:
    world.join(1)
    publish(world, 1, 0)
    with pytest.raises(Unreachable, match="Evaluation 1 did not end"):
        evaluate._await(world.database, 1, 0.0, ends_within_s=-1.0)
    assert world.run(evaluations.is_running), "it goes on when the round is launched"


def test_an_operator_may_ask_for_the_newest_version_only(world: World) -> None:
    world.publish(1, 0)
    assert world.run(evaluations.start_evaluation, 1, "validation", 5, CONFIG.eval, seed=0, now_ms=0) == 1
    world.publish(2, 1)
    with pytest.raises(OutOfOrder, match="no longer version 1"):
        world.run(evaluations.start_evaluation, 1, "validation", 5, CONFIG.eval, seed=0, now_ms=0)
    with pytest.raises(NotFound):
        world.run(evaluations.start_evaluation, 9, "validation", 5, CONFIG.eval, seed=0, now_ms=0)


def test_the_best_version_is_the_earlier_of_equal_ones(world: World) -> None:
    key = world.join(1)
    for version in (1, 3):
        if version == 3:
            world.publish(2, 0)
        publish(world, version, 0)
        finish(world, key, version)
    assert [row["result"]["average"] for row in shown(world)] == [0.5, 0.5]
    assert world.run(evaluations.best) == 1


def test_a_result_stands_beside_what_had_been_spent(world: World) -> None:
    key = world.join(1)
    world.publish(1, 0)
    world.earn(key)
    world.earn(key)
    world.train(1)
    publish(world, 2, 1, evaluated(every=1, problems=2, samples=2, last_update=9))
    (row,) = shown(world)
    assert (row["samples"], row["tokens"], row["seconds"]) == (2.0 * SAMPLES, 8.0, 4.0)
    assert row["cost"] == pytest.approx(8e-6)
