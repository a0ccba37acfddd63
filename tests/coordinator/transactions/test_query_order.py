"""The order and the price that a caller chooses for its queries."""

from dataclasses import replace
from pathlib import Path

import pytest

from coordinator.transactions import api_keys
from protocol.errors import KeyBudgetUsed
from tests.coordinator.transactions.test_queries import ask, asked_in, new_key, query, respond, shown
from tests.coordinator.world import END, MAX_NEW, PRICE, World, fragment


def test_a_priority_orders_the_queries_of_its_key(world: World) -> None:
    node, key = world.join(1), new_key(world)
    ask(world, key, query(seed=1), query(seed=2, priority=5), query(seed=3), query(seed=4, priority=-1))
    seeds = [lease.seed for _ in range(4) for lease in asked_in(world.offer(node).leases)]
    assert seeds == [4, 1, 3, 2], "the lowest is first, then the oldest"


def test_a_priority_does_not_push_aside_another_key(world: World) -> None:
    node, many, few = world.join(1), new_key(world, "many"), new_key(world, "few")
    ask(world, many, *(query(seed=1, priority=-9) for _ in range(9)))
    ask(world, few, query(seed=2, priority=9))
    assert sorted(lease.seed for lease in asked_in(world.offer(node, groups=2).leases)) == [1, 2]


def test_a_query_waits_for_a_node_that_asks_no_more_than_its_price(world: World) -> None:
    dear, cheap, key = world.join(1), world.join(2, price=PRICE // 2), new_key(world)
    ask(world, key, query(max_price=PRICE // 2))
    assert shown(world)["reserved_micros"] == MAX_NEW // 2
    assert not asked_in(world.offer(dear, groups=3).leases)
    (lease,) = asked_in(world.offer(cheap).leases)
    assert lease.price_micros_per_mtok == PRICE // 2
    assert world.submit(cheap, respond(cheap, lease)).outcome == "accepted"
    assert (shown(world)["spent_micros"], shown(world)["reserved_micros"]) == (1, 0)


def test_a_budget_covers_more_at_a_lower_price_and_no_more_at_a_higher_one(world: World) -> None:
    key = new_key(world, budget_micros=MAX_NEW)
    with pytest.raises(KeyBudgetUsed):
        ask(world, key, query(), query())
    with pytest.raises(KeyBudgetUsed):
        ask(world, key, query(max_price=9 * PRICE), query(max_price=9 * PRICE))
    assert len(ask(world, key, query(max_price=PRICE // 2), query(max_price=PRICE // 2))) == 2
    assert world.run(api_keys.list_keys)[0]["left_micros"] == 0


@pytest.mark.parametrize("price", [0, 1])
def test_a_low_price_opens_no_more_queries_than_the_budget_has_micro_units(world: World, price: int) -> None:
    node, key = world.join(1, price=0), new_key(world, budget_micros=2)
    with pytest.raises(KeyBudgetUsed):
        ask(world, key, *(query(max_price=price) for _ in range(3)))
    ask(world, key, *(query(max_price=price) for _ in range(2)))
    assert shown(world)["reserved_micros"] == 2
    with pytest.raises(KeyBudgetUsed):
        ask(world, key, query(max_price=price))
    for lease in asked_in(world.offer(node, groups=2).leases):
        assert world.submit(node, respond(node, lease)).outcome == "accepted"
    assert (shown(world)["spent_micros"], shown(world)["reserved_micros"]) == (0, 0)


def test_a_round_that_pays_nothing_needs_no_budget(world: World) -> None:
    key = new_key(world, budget_micros=0)
    ask(world, key, dearest_price=0)
    assert shown(world)["reserved_micros"] == 0


@pytest.mark.parametrize(("budget_micros", "continues"), [(MAX_NEW + 1, False), (1000, True)])
def test_a_second_context_is_reserved_or_the_answer_begins_anew(
    tmp_path: Path, budget_micros: int, continues: bool
) -> None:
    """The second node is paid for reading the prompt and the tokens of the first, which were paid as drawn ones."""
    world = World(tmp_path)
    world.terms = replace(world.terms, context_share=0.5)
    world.judge = replace(world.judge, terms=world.terms)
    world.publish(1, 0)
    first, second, key = world.join(1), world.join(2), new_key(world, budget_micros=budget_micros)
    ask(world, key)
    (lease,) = asked_in(world.offer(first).leases)
    assert world.tell(first, fragment(first, lease, {0: [72, 73]})).taken
    world.give_back(first, lease)
    (rest,) = asked_in(world.offer(second, continues=True).leases)
    assert bool(rest.prefixes) == continues
    drawn = MAX_NEW - 2 if continues else MAX_NEW
    last = respond(second, rest, [*([74] * (drawn - 1)), END])
    assert world.submit(second, last).outcome == "accepted"
    assert (shown(world)["spent_micros"], shown(world)["reserved_micros"]) == (MAX_NEW + 1 + continues, 0)
