"""Queries of the endpoint: who answers them, in which order, and what they cost whom."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import pytest
import sqlalchemy as sa

from coordinator.config import AuditSection
from coordinator.store import tables
from coordinator.transactions import api_keys, queries, query_answers
from coordinator.transactions import leases as lease_table
from coordinator.transactions.queries import Query
from coordinator.transactions.query_answers import Growth, QueryAnswer, ReadUntil
from protocol.errors import ConfigInvalid, KeyBudgetUsed, KeyRefused, NotFound, OutOfOrder, Overloaded
from protocol.wire.signing import NodeKey
from protocol.work.lease import Lease
from protocol.work.rollout import Sample, pack_logprobs, pack_tokens, unpack_logprobs, unpack_tokens
from tests.coordinator.world import END, MAX_NEW, PRICE, World, answer, claim, fragment, honest_sample

Finish = Literal["stop", "length"]
PATIENCE_MS = 60_000
PROMPT = (70, 71)


def new_key(world: World, name: str = "someone", budget_micros: int = 1000, **more: Any) -> str:
    key: str = world.run(api_keys.make, name, budget_micros, now_ms=world.now_ms, **more)
    return key


def ask(world: World, key: str, *asked: Query, dearest_price: int = PRICE, **bounds: int) -> list[int]:
    numbers: list[int] = world.run(
        queries.ask,
        key,
        asked or (query(),),
        terms=world.terms,
        dearest_price=dearest_price,
        patience_ms=PATIENCE_MS,
        now_ms=world.now_ms,
        **bounds,
    )
    return numbers


def query(samples: int = 1, tokens_max: int = MAX_NEW, **more: Any) -> Query:
    return Query(PROMPT, samples, tokens_max, **more)


def answers(world: World, numbers: Sequence[int]) -> dict[int, QueryAnswer]:
    read: dict[int, QueryAnswer] = world.run(query_answers.read_answers, numbers)
    return read


def asked_in(leases: Sequence[Lease]) -> list[Lease]:
    """The leases that answer queries."""
    return [lease for lease in leases if unpack_tokens(lease.prompt).tolist() == list(PROMPT)]


def shown(world: World, name: str = "someone") -> dict[str, Any]:
    (row,) = (row for row in world.run(api_keys.list_keys) if row["name"] == name)
    return dict(row)


def respond(key: NodeKey, lease: Lease, tokens: Sequence[int] = (72, END), finish: Finish = "stop") -> bytes:
    """An answer with one sample."""
    logprobs = pack_logprobs([-0.25] * len(tokens))
    sample = Sample(tokens=pack_tokens(list(tokens)), logprobs=logprobs, finish=finish)
    return answer(key, lease, samples=(sample,))


def test_a_query_is_leased_before_all_groups_and_its_answer_can_be_read(world: World) -> None:
    node, key = world.join(1), new_key(world)
    (number,) = ask(world, key)
    (lease,) = world.offer(node).leases
    assert (lease.samples, unpack_tokens(lease.prompt).tolist(), lease.turn_tokens_max) == (1, list(PROMPT), 0)
    assert answers(world, [number]) == {}
    assert world.submit(node, respond(node, lease)).outcome == "accepted"
    found = answers(world, [number])[number]
    (sample,) = found.samples
    assert (unpack_tokens(sample.tokens).tolist(), sample.finish) == ([72, END], "stop")
    assert unpack_logprobs(sample.logprobs).tolist() == [-0.25] * 2
    assert (found.version, found.claims) == (1, (world.rows(tables.rollouts)[0]["claim_id"],))
    assert not asked_in(world.offer(node, groups=3).leases), "it was answered"


def test_an_answer_is_paid_and_never_trained_on(world: World) -> None:
    node, key = world.join(1), new_key(world)
    ask(world, key)
    world.earn(node)
    (rollout,) = world.rows(tables.rollouts)
    assert rollout["state"] == "served"
    assert world.rows(tables.audits)[0]["used"]
    for _ in range(2):
        world.submit(node, answer(node, world.lease(node)))
    trained = world.train(1)
    assert rollout["claim_id"] not in {group.claim_id for group in trained.groups}


def test_a_limit_of_tokens_ends_the_completion(world: World) -> None:
    node, key = world.join(1), new_key(world)
    (number,) = ask(world, key, query(tokens_max=2))
    (lease,) = world.offer(node).leases
    assert (lease.tokens_max, lease.turn_tokens_max) == (2, 0)
    assert world.submit(node, respond(node, lease, [72, 73, END])).code == "tokens_invalid"
    (lease,) = world.offer(node).leases
    assert world.submit(node, respond(node, lease, [72, 73], "length")).outcome == "accepted"
    assert answers(world, [number])[number].samples[0].finish == "length"


def test_another_node_continues_a_completion_with_a_limit_of_tokens(world: World) -> None:
    first, second, key = world.join(1), world.join(2), new_key(world)
    (number,) = ask(world, key, query(tokens_max=3))
    (lease,) = world.offer(first).leases
    refused = world.tell(first, fragment(first, lease, {0: [72, 73, 74]}))
    assert not refused.taken, "it has reached its length"
    assert world.tell(first, fragment(first, lease, {0: [72, 73]})).taken
    world.give_back(first, lease)
    (rest,) = world.offer(second, continues=True).leases
    assert [unpack_tokens(prefix.tokens).tolist() for prefix in rest.prefixes] == [[72, 73]]
    assert world.submit(second, respond(second, rest, [74, 75], "length")).code == "tokens_invalid"
    (rest,) = world.offer(second, continues=True).leases
    assert world.submit(second, respond(second, rest, [74], "length")).outcome == "accepted"
    found = answers(world, [number])[number]
    assert unpack_tokens(found.samples[0].tokens).tolist() == [72, 73, 74]
    assert len(found.claims) == 2


def grown(world: World, known: dict[int, ReadUntil]) -> dict[int, list[tuple[int, int, list[int]]]]:
    """The next growth of each query, as its samples, their starts and tokens; `known` moves on."""
    found: dict[int, Growth] = world.run(query_answers.read_growth, known)
    known |= {number: growth.until for number, growth in found.items()}
    return {
        number: [(part.sample, part.start, unpack_tokens(part.tokens).tolist()) for part in growth.samples]
        for number, growth in found.items()
    }


def test_a_reader_gets_each_fragment_once_and_follows_the_node_that_continues(world: World) -> None:
    first, second, key = world.join(1), world.join(2), new_key(world)
    (number,) = ask(world, key, query(report_every_ms=250))
    known = {number: ReadUntil()}
    (lease,) = world.offer(first).leases
    assert lease.report_every_ms == 250
    assert grown(world, known) == {}
    assert world.tell(first, fragment(first, lease, {0: [72]})).taken
    assert grown(world, known) == {number: [(0, 0, [72])]}
    assert grown(world, known) == {}
    world.give_back(first, lease)
    (rest,) = world.offer(second, continues=True).leases
    assert rest.report_every_ms == 250
    assert world.tell(second, fragment(second, rest, {0: [73, 74]})).taken
    assert grown(world, known) == {number: [(0, 1, [73, 74])]}
    assert grown(world, known) == {}, "nor again what the first node reported"
    assert world.submit(second, respond(second, rest, [73, 74, END])).outcome == "accepted"
    assert unpack_tokens(answers(world, [number])[number].samples[0].tokens).tolist() == [72, 73, 74, END]


def test_a_reader_follows_a_node_that_begins_anew(world: World) -> None:
    first, second, key = world.join(1), world.join(2), new_key(world)
    (number,) = ask(world, key, query(report_every_ms=250, seed=5))
    known = {number: ReadUntil()}
    (lease,) = world.offer(first).leases
    world.tell(first, fragment(first, lease, {0: [72]}))
    grown(world, known)
    world.give_back(first, lease)
    world.now_ms += 1
    (anew,) = world.offer(second).leases
    assert (anew.seed, anew.prefixes) == (5, ())
    world.tell(second, fragment(second, anew, {0: [72, 73]}))
    assert grown(world, known) == {number: [(0, 0, [72, 73])]}


def test_nobody_reads_along_where_the_whole_answer_is_awaited(world: World) -> None:
    node, key = world.join(1), new_key(world)
    (number,) = ask(world, key)
    (lease,) = world.offer(node).leases
    assert lease.report_every_ms == 0
    world.tell(node, fragment(node, lease, {0: [72]}))
    assert grown(world, {number: ReadUntil()}) == {}


def test_only_the_version_that_a_query_names_answers_it(world: World) -> None:
    node, key = world.join(1), new_key(world)
    world.publish(2, 1)
    ask(world, key, query(version=1))
    assert not asked_in(world.offer(node, version=2).leases)
    (lease,) = asked_in(world.offer(node, version=1).leases)
    assert lease.version == 1


def test_a_version_past_the_bound_answers_nothing(world: World) -> None:
    node, key = world.join(1), new_key(world)
    ask(world, key)
    world.tighten(0)
    world.publish(2, 1)
    for _ in range(2):
        world.submit(node, answer(node, world.lease(node, version=2)))
        if not world.group_states():
            break
    assert world.rows(tables.rollouts)[0]["version"] == 2, "the newest one answers"


def test_the_same_seed_goes_to_every_node(world: World) -> None:
    first, second, key = world.join(1), world.join(2), new_key(world)
    ask(world, key, query(seed=4242))
    (lease,) = world.offer(first).leases
    assert lease.seed == 4242
    world.give_back(first, lease)
    (again,) = world.offer(second).leases
    assert (again.seed, again.lease_id != lease.lease_id) == (4242, True)


@pytest.mark.parametrize("temperature", [None, 0.0, 0.7])
def test_every_lease_of_a_query_has_its_temperature(world: World, temperature: float | None) -> None:
    first, second, key = world.join(1), world.join(2), new_key(world)
    (number,) = ask(world, key, query(temperature=temperature))
    (lease,) = world.offer(first).leases
    world.give_back(first, lease)
    (again,) = world.offer(first).leases
    assert world.tell(first, fragment(first, again, {0: [72]})).taken
    world.now_ms += world.terms.timeout_ms + 1
    world.expire()
    (after,) = world.offer(second, continues=True).leases
    assert after.prefixes
    assert [one.temperature for one in (lease, again, after)] == [temperature] * 3
    assert world.submit(second, respond(second, after, [73, END])).outcome == "accepted"
    assert unpack_tokens(answers(world, [number])[number].samples[0].tokens).tolist() == [72, 73, END]


def test_leases_for_training_have_the_versions_temperature(world: World) -> None:
    node, key = world.join(1), new_key(world)
    ask(world, key, query(temperature=0.0))
    leases = world.offer(node, groups=3).leases
    assert [lease.temperature for lease in leases] == [0.0, None, None]


def test_a_node_that_dies_costs_a_continuation(world: World) -> None:
    first, second, key = world.join(1), world.join(2), new_key(world)
    (number,) = ask(world, key)
    (lease,) = world.offer(first).leases
    assert world.tell(first, fragment(first, lease, {0: [72]})).taken
    world.now_ms += world.terms.timeout_ms + 1
    world.expire()
    (after,) = world.offer(second, continues=True).leases
    assert [unpack_tokens(prefix.tokens).tolist() for prefix in after.prefixes] == [[72]]
    assert world.submit(second, respond(second, after, [73, END])).outcome == "accepted"
    found = answers(world, [number])[number]
    assert unpack_tokens(found.samples[0].tokens).tolist() == [72, 73, END]
    assert len(found.claims) == 2
    assert [world.owed(node.node_id)[1] for node in (first, second)] == [1, 2]
    assert shown(world)["spent_micros"] == 3, "both nodes are paid"


def test_a_key_is_charged_what_nodes_are_credited(world: World) -> None:
    node, key = world.join(1, price=PRICE // 2), new_key(world)
    ask(world, key, query(samples=3))
    assert (shown(world)["reserved_micros"], shown(world)["spent_micros"]) == (3 * MAX_NEW, 0)
    (lease,) = world.offer(node).leases
    samples = tuple(honest_sample(lease) for _ in range(3))
    verdict = world.submit(node, node.seal("rollout", claim(lease, samples=samples).to_bytes()))
    assert (shown(world)["reserved_micros"], shown(world)["spent_micros"]) == (0, verdict.credit_micros)
    assert verdict.credit_micros > 0


def test_a_budget_covers_all_queries_of_a_request_or_none(world: World) -> None:
    key = new_key(world, budget_micros=2 * MAX_NEW)
    with pytest.raises(KeyBudgetUsed, match=r"may cost 0\.000004 credits, and 0\.00 credits are left"):
        ask(world, key, query(), query(), query())
    assert world.rows(tables.queries) == []
    assert shown(world)["reserved_micros"] == 0
    assert len(ask(world, key, query(), query())) == 2
    world.run(api_keys.set_budget, "someone", 3 * MAX_NEW)
    assert len(ask(world, key)) == 1


def test_a_key_may_be_unknown_expired_or_revoked(world: World) -> None:
    key = new_key(world, expires_ms=world.now_ms + 1000)
    other = new_key(world, "other")
    with pytest.raises(KeyRefused, match="not known"):
        ask(world, key + "x")
    world.now_ms += 1000
    with pytest.raises(KeyRefused, match="'someone'"):
        ask(world, key)
    world.run(api_keys.revoke, "other", now_ms=world.now_ms)
    with pytest.raises(KeyRefused, match="revoked"):
        ask(world, other)
    with pytest.raises(NotFound, match="no key 'other' to revoke"):
        world.run(api_keys.revoke, "other", now_ms=world.now_ms)


def test_a_key_has_a_name_of_its_own_and_is_stored_nowhere(world: World) -> None:
    key = new_key(world)
    with pytest.raises(ConfigInvalid, match="There is a key 'someone' already"):
        new_key(world)
    assert key.startswith(api_keys.PREFIX)
    assert key not in str(world.dump())


def test_a_key_with_many_queries_does_not_delay_a_key_with_one(world: World) -> None:
    node, many, few = world.join(1), new_key(world, "many"), new_key(world, "few")
    ask(world, many, *(query(seed=1) for _ in range(20)))
    ask(world, few, query(seed=2), query(seed=2))
    taken = world.offer(node, groups=4).leases
    assert sorted(lease.seed for lease in taken) == [1, 1, 2, 2]
    world.offer(node, groups=1)
    ask(world, few, query(seed=3))
    (lease,) = world.offer(node).leases
    assert lease.seed == 3, "fewer of its queries are under way"


def test_open_queries_are_bounded(world: World) -> None:
    bounds = {"open_max": 3, "key_open_max": 2}
    one, two = new_key(world, "one"), new_key(world, "two")
    ask(world, one, query(), query(), **bounds)
    with pytest.raises(Overloaded, match="this key"):
        ask(world, one, **bounds)
    ask(world, two, **bounds)
    with pytest.raises(Overloaded, match="all keys"):
        ask(world, two, **bounds)


def test_a_withdrawn_query_whose_node_stops_costs_its_key_nothing(world: World) -> None:
    node, key = world.join(1), new_key(world)
    numbers = ask(world, key, query(), query())
    (lease,) = world.offer(node).leases
    assert world.run(queries.withdraw, numbers, now_ms=world.now_ms) == 2
    reserved_micros = shown(world)["reserved_micros"]
    assert (reserved_micros, shown(world)["open_queries"]) == (MAX_NEW, 0), "the node may still answer one of them"
    assert world.tell(node, held=[lease]).gone == (lease.lease_id,)
    assert shown(world)["reserved_micros"] == 0
    assert not asked_in(world.offer(node, groups=4).leases)
    assert world.run(queries.withdraw, numbers, now_ms=world.now_ms) == 0
    assert shown(world)["spent_micros"] == 0


def test_a_key_pays_the_node_that_answers_a_withdrawn_query(world: World) -> None:
    node, key = world.join(1), new_key(world)
    numbers = ask(world, key)
    (lease,) = world.offer(node).leases
    world.run(queries.withdraw, numbers, now_ms=world.now_ms)
    verdict = world.submit(node, respond(node, lease))
    assert (verdict.outcome, verdict.credit_micros) == ("accepted", 2)
    assert answers(world, numbers) == {}
    row = shown(world)
    assert (row["spent_micros"], row["reserved_micros"], row["answered_queries"]) == (2, 0, 0)


def test_hanging_up_after_each_lease_drains_no_more_than_the_keys_budget(world: World) -> None:
    """The holder of a key hangs up as soon as a node has the query; its own node answers, and the round would pay."""
    accomplice, key = world.join(1), new_key(world, budget_micros=3 * MAX_NEW)
    paid_micros = 0
    for _ in range(3):
        numbers = ask(world, key)
        (lease,) = asked_in(world.offer(accomplice).leases)
        world.run(queries.withdraw, numbers, now_ms=world.now_ms)
        paid_micros += world.submit(accomplice, respond(accomplice, lease, (72,) * MAX_NEW, "length")).credit_micros
    assert paid_micros == shown(world)["spent_micros"] == 3 * MAX_NEW
    with pytest.raises(KeyBudgetUsed):
        ask(world, key)


def test_two_nodes_that_answer_a_withdrawn_query_cost_its_key_no_more_than_it_reserved(world: World) -> None:
    one, two, key = world.join(1), world.join(2), new_key(world)
    numbers = ask(world, key)
    (first,) = asked_in(world.offer(one).leases)
    on_trial = sa.update(tables.groups).where(tables.groups.c.split == "query").values(state="trial")
    world.run(lambda connection: connection.execute(on_trial))
    (second,) = asked_in(world.offer(two).leases)
    world.run(queries.withdraw, numbers, now_ms=world.now_ms)
    world.submit(one, respond(one, first))
    assert (shown(world)["spent_micros"], shown(world)["reserved_micros"]) == (2, MAX_NEW - 2)
    world.submit(two, respond(two, second, (72,) * MAX_NEW, "length"))
    assert (shown(world)["spent_micros"], shown(world)["reserved_micros"]) == (MAX_NEW, 0)
    assert world.rows(tables.queries)[0]["ended_ms"] == world.now_ms


def test_a_withdrawn_query_of_a_lost_node_frees_what_it_reserved(world: World) -> None:
    node, key = world.join(1), new_key(world)
    numbers = ask(world, key)
    world.offer(node)
    world.run(queries.withdraw, numbers, now_ms=world.now_ms)
    assert shown(world)["reserved_micros"] == MAX_NEW
    world.now_ms += world.terms.timeout_ms
    world.run(lease_table.expire, terms=world.terms, now_ms=world.now_ms)
    assert (shown(world)["reserved_micros"], shown(world)["spent_micros"]) == (0, 0)


def test_queries_of_a_killed_process_end_after_their_time(world: World) -> None:
    node, key = world.join(1), new_key(world)
    ask(world, key)
    world.now_ms += PATIENCE_MS
    assert not asked_in(world.offer(node).leases)
    ask(world, key, query(seed=5))
    assert [row["state"] for row in world.rows(tables.queries)] == ["withdrawn", "open"]
    assert shown(world)["reserved_micros"] == MAX_NEW


def test_a_fault_gives_the_key_its_money_back(tmp_path: Path) -> None:
    world = World(tmp_path, rules=AuditSection())
    world.publish(1, 0)
    node, key = world.join(1), new_key(world)
    numbers = ask(world, key)
    (lease,) = world.offer(node).leases
    world.submit(node, respond(node, lease))
    assert shown(world)["spent_micros"] == 2
    (claim_id,) = world.take_cases()
    assert world.find(claim_id, "hard")
    assert world.rows(tables.rollouts)[0]["state"] == "retracted"
    assert shown(world)["spent_micros"] == 0
    assert answers(world, numbers), "its caller may still read what it was answered"


def test_a_query_never_reserves_more_than_the_round_has(world: World, tmp_path: Path) -> None:
    (tmp_path / "poor").mkdir()
    poor = World(tmp_path / "poor", staleness=2, size=2, budget_micros=10)
    poor.publish(1, 0)
    node, key = poor.join(1), new_key(poor)
    ask(poor, key, query(samples=3), query(samples=1), query(samples=2))
    assert not asked_in(poor.offer(node, groups=3).leases), "12 micro-units may be needed, and there are 10"


def test_newcomers_on_trial_get_no_queries(world: World) -> None:
    known, newcomer, key = world.join(1), world.join(2), new_key(world)
    world.prove(known)
    world.offer(known)
    ask(world, key)
    assert not asked_in(world.offer(newcomer).leases)
    assert asked_in(world.offer(known).leases)


def not_training(world: World) -> World:
    """A round whose trainer is not ours: there are no groups for a learner."""
    world.terms = replace(world.terms, trains=False)
    world.judge = replace(world.judge, terms=world.terms)
    return world


def test_a_round_that_does_not_train_offers_queries_only(world: World) -> None:
    node, key = not_training(world).join(1), new_key(world)
    reply = world.offer(node, groups=3)
    assert (reply.leases, reply.reason) == ((), "ahead")
    ask(world, key)
    assert len(asked_in(world.offer(node, groups=3).leases)) == 1


def test_a_newcomer_on_trial_answers_a_query_where_nothing_is_trained(world: World) -> None:
    known, newcomer, key = not_training(world).join(1), world.join(2), new_key(world)
    world.prove(known)
    world.offer(known)  # one that is no newcomer asks
    (number,) = ask(world, key)
    (lease,) = asked_in(world.offer(newcomer, groups=3).leases)
    assert not world.offer(newcomer).leases, "it has one lease at a time"
    assert world.submit(newcomer, respond(newcomer, lease)).outcome == "accepted"
    assert number in answers(world, [number])
    assert world.rows(tables.rollouts)[0]["state"] == "served"


def test_a_query_of_a_silent_newcomer_goes_to_a_known_node_at_once(world: World) -> None:
    known, newcomer, key = not_training(world).join(1), world.join(2), new_key(world, budget_micros=4)
    world.prove(known)
    world.offer(known)
    (number,) = ask(world, key)
    (trial,) = asked_in(world.offer(newcomer).leases)
    assert not world.offer(world.join(3)).leases, "another newcomer does not double it"
    (lease,) = asked_in(world.offer(known).leases)
    assert world.submit(known, respond(known, lease)).outcome == "accepted"
    assert number in answers(world, [number])
    spent = shown(world)["spent_micros"]
    assert world.submit(newcomer, respond(newcomer, trial)).outcome == "accepted", "it is paid, and proves its owner"
    assert shown(world)["spent_micros"] == spent, "the key pays for one answer"
    assert [row["state"] for row in world.rows(tables.rollouts)] == ["served", "surplus"]


def test_the_staleness_bound_counts_the_updates_of_a_trainer(world: World) -> None:
    node, key = not_training(world).join(1), new_key(world)
    world.publish(2, 1)
    world.publish(3, 1 + world.terms.staleness)
    ask(world, key)
    assert not world.offer(node, version=1).leases, "three updates behind, two are allowed"
    assert asked_in(world.offer(node, version=2).leases)


def test_statements_of_a_lease_do_not_change_without_queries(world: World) -> None:
    node, key = world.join(1), new_key(world)
    before = world.offer(node)
    numbers = ask(world, key)
    world.run(queries.withdraw, numbers, now_ms=world.now_ms)
    assert asked_in(world.offer(node).leases) == asked_in(before.leases) == []


DAY_MS = 86_400_000


def forget(world: World, days: float = 1.0) -> list[int]:
    """Delete what is older than some days; the numbers of the queries that are left."""
    old = world.run(queries.find_old, world.now_ms - int(days * DAY_MS))
    world.run(queries.forget, old)
    return [row["number"] for row in world.rows(tables.queries)]


def settled(world: World) -> bool:
    return all(row["settled"] for row in world.rows(tables.audits))


def test_old_queries_are_deleted_and_what_proves_their_payment_stays(world: World) -> None:
    node, key = world.join(1), new_key(world)
    for _ in range(3):
        ask(world, key)
        world.earn(node)
    withdrawn, newest = ask(world, key, query(), query())
    world.run(queries.withdraw, [withdrawn, newest], now_ms=world.now_ms)
    assert settled(world)
    before = {table: world.rows(table) for table in (tables.rollouts, tables.audits, tables.leases)}
    said, owed = shown(world), world.owed(node.node_id)
    assert forget(world) == [1, 2, 3, withdrawn, newest], "they ended just now"
    world.now_ms += 2 * DAY_MS
    assert forget(world) == [newest], "the newest keeps its number taken"
    assert {table: world.rows(table) for table in before} == before
    assert (shown(world), world.owed(node.node_id)) == (said, owed), "the counts of a key go on"
    assert (said["answered_queries"], said["tokens"]) == (3, sum(row["tokens"] for row in before[tables.rollouts]))
    assert world.audit() == []
    assert ask(world, key) == [newest + 1]
    world.earn(node)
    assert shown(world)["answered_queries"] == 4


def test_open_and_unsettled_queries_are_kept_however_old(tmp_path: Path) -> None:
    """An audit may still find a fault, and the key then gets its money back."""
    world = World(tmp_path, rules=AuditSection())
    world.publish(1, 0)
    node, key = world.join(1), new_key(world)
    (answered,) = ask(world, key)
    world.earn(node)
    assert not settled(world)
    waiting, newest = ask(world, key, query(), query())
    world.now_ms += 50 * DAY_MS
    assert forget(world) == [answered, waiting, newest]
    world.database.close()


def test_queries_are_deleted_a_few_at_a_time_and_each_is_counted_once(world: World) -> None:
    node, one, other = world.join(1), new_key(world, "one"), new_key(world, "other")
    for key in (one, one, other, one):
        ask(world, key)
        world.earn(node)
    world.now_ms += DAY_MS
    old = world.run(queries.find_old, world.now_ms, 2)
    assert old == (1, 2)
    world.run(queries.forget, old)
    with pytest.raises(OutOfOrder, match="deleted meanwhile"):
        world.run(queries.forget, old)
    assert forget(world, 0.5) == [4]
    assert [shown(world, name)["answered_queries"] for name in ("one", "other")] == [3, 1]


def test_usage_counts_all_parts_of_an_answer_and_none_that_is_refunded(world: World) -> None:
    first, second, key = world.join(1), world.join(2), new_key(world)
    ask(world, key)
    (lease,) = world.offer(first).leases
    assert world.tell(first, fragment(first, lease, {0: [72]})).taken
    world.give_back(first, lease)
    (rest,) = world.offer(second, continues=True).leases
    assert world.submit(second, respond(second, rest, [73, END])).outcome == "accepted"
    listed = shown(world)
    assert (listed["answered_queries"], listed["tokens"]) == (1, 3)
    assert listed["left_micros"] == listed["budget_micros"] - listed["spent_micros"]


def test_an_answer_is_found_by_the_number_of_its_group(world: World, store_url: str) -> None:
    """The plan is SQLite's: without an index, it reads every answer that was ever given."""
    if store_url:
        return
    node, key = world.join(1), new_key(world)
    (number,) = ask(world, key)
    (lease,) = world.offer(node).leases
    world.submit(node, respond(node, lease))

    def plans(connection: sa.Connection) -> str:
        statements: list[tuple[str, Any]] = []

        def hear(_connection: object, _cursor: object, text: str, given: Any, *_rest: object) -> None:
            statements.append((text, tuple(given)))

        sa.event.listen(connection, "before_cursor_execute", hear)
        query_answers.read_answers(connection, [number])
        queries._cost(connection, -1)
        sa.event.remove(connection, "before_cursor_execute", hear)
        found = (connection.exec_driver_sql(f"EXPLAIN QUERY PLAN {text}", given).all() for text, given in statements)
        return "\n".join(row.detail for rows in found for row in rows if "rollouts" in row.detail)

    assert world.run(plans).count("rollouts_of_query") >= 2
    assert "rollouts_by_state" not in world.run(plans)
