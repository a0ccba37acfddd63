"""The plan: every node gets every stripe, no link is promised more than it carries, and the bound is near."""

import sys
from collections import Counter
from collections.abc import Callable
from random import Random
from types import FrameType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.rules import topology
from coordinator.rules.topology import FAN_OUT_MAX, SOURCE, SPARES, STRIPES, NodeLinks, Topology, fluid_bound_s, plan

W = 2.5e6

rates = st.sampled_from([0.25, 0.5, 1.0, 2.0, 4.0])
swarms = st.lists(st.tuples(rates, rates, st.booleans()), min_size=1, max_size=40)


def uniform(count: int, up: float = 1.0, down: float = 1.0) -> list[NodeLinks]:
    return [NodeLinks(f"node-{number:05d}", up * W, down * W) for number in range(count)]


def slots_used(topology: Topology) -> Counter[str]:
    return Counter(parent for parents in topology.parents.values() for parent in parents)


def assert_is_a_tree_per_stripe(topology: Topology) -> None:
    for stripe in range(topology.stripes):
        reached, left = {SOURCE}, dict.fromkeys(topology.parents)
        while children := [name for name in left if topology.parents[name][stripe] in reached]:
            reached.update(children)
            left = {name: None for name in left if name not in reached}
        assert not left, "a circle"
    for name, parents in topology.parents.items():
        assert len(parents) == topology.stripes
        assert name not in parents
        assert all(parent == SOURCE or parent in topology.parents for parent in parents)


@given(st.floats(min_value=0.5, max_value=50.0), swarms)
def test_every_node_gets_every_stripe_down_a_tree_from_the_source(
    source_up: float, links: list[tuple[float, float, bool]]
) -> None:
    nodes = [NodeLinks(str(at), up * W, down * W, dialable) for at, (up, down, dialable) in enumerate(links)]
    planned = plan(source_up * W, nodes)
    assert planned.parents.keys() == {node.name for node in nodes}
    assert_is_a_tree_per_stripe(planned)


@given(st.floats(min_value=0.5, max_value=50.0), swarms)
def test_who_cannot_be_dialled_feeds_only_who_can(source_up: float, links: list[tuple[float, float, bool]]) -> None:
    nodes = [NodeLinks(str(at), up * W, down * W, dialable) for at, (up, down, dialable) in enumerate(links)]
    planned = plan(source_up * W, nodes)
    for child, parents in planned.parents.items():
        for parent in parents:
            assert parent == SOURCE or parent in planned.dialable or child in planned.dialable


@pytest.mark.parametrize("count", [1, 2, 4, 8, 16, 100, 1000])
@pytest.mark.parametrize("source", [3.0, 8.0])
@pytest.mark.parametrize("mix", [(1.0,), (0.5, 1.0, 2.0)])
def test_at_the_planned_rate_no_link_carries_more_than_it_can(
    count: int, source: float, mix: tuple[float, ...]
) -> None:
    down = 2.0 if len(mix) > 1 else 1.0
    nodes = [NodeLinks(f"{at:05d}", mix[at % len(mix)] * W, down * W) for at in range(count)]
    planned = plan(source * W, nodes)
    used, width = slots_used(planned), planned.rate / STRIPES
    assert used[SOURCE] * width <= source * W * 1.1
    assert all(used[node.name] * width <= node.up * 1.1 for node in nodes)
    size = 2.0**30
    assert size / planned.rate <= 1.05 * fluid_bound_s(size, source * W, nodes)


@pytest.mark.parametrize("count", [4, 8, 16, 64, 300])
@pytest.mark.parametrize("source", [3.0, 8.0])
@pytest.mark.parametrize("mix", [(1.0,), (0.5, 1.0, 2.0)])
@pytest.mark.parametrize("share", [0.25, 0.5, 0.7])
def test_uplinks_of_nodes_that_cannot_be_dialled_are_used_and_the_source_carries_no_more_for_it(
    count: int, source: float, mix: tuple[float, ...], share: float
) -> None:
    shy = Random(count).sample(range(count), round(count * share))
    nodes = [NodeLinks(f"{at:05d}", mix[at % len(mix)] * W, 2 * W, at not in shy) for at in range(count)]
    planned = plan(source * W, nodes)
    used, width = slots_used(planned), planned.rate / STRIPES
    assert used[SOURCE] * width <= source * W * 1.1
    assert all(used[node.name] * width <= node.up * 1.1 for node in nodes)
    assert any(used[node.name] for node in nodes if not node.dialable)
    size = 2.0**30
    assert size / planned.rate <= 1.05 * fluid_bound_s(size, source * W, nodes)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("count", [4, 6, 8, 16])
def test_the_source_gives_everybody_about_as_much_and_no_more_to_who_passes_on_the_most(count: int, seed: int) -> None:
    mix = (0.5, 1.0, 2.0)
    nodes = [NodeLinks(f"{at}", mix[at % len(mix)] * W, 2 * W) for at in range(count)]
    Random(seed).shuffle(nodes)
    planned = plan(3 * W, nodes)
    of_source = {name: parents.count(SOURCE) for name, parents in planned.parents.items()}
    usual = slots_used(planned)[SOURCE] / len(nodes)
    assert max(of_source.values()) <= usual + 2
    assert all(of_source[node.name] <= usual + 1 for node in nodes if node.up == 2 * W)


def test_the_trees_of_a_large_swarm_are_flat_and_nobody_has_too_many_children() -> None:
    planned = plan(8 * W, uniform(5000))
    assert max(map(planned.hops, planned.parents)) <= 4
    children: dict[str, set[str]] = {}
    for child, parents in planned.parents.items():
        for parent in parents:
            children.setdefault(parent, set()).add(child)
    children.pop(SOURCE)
    assert max(map(len, children.values())) <= FAN_OUT_MAX
    assert all(len(planned.upstreams(name)) <= STRIPES + topology.SPARES + 1 for name in planned.parents)


def test_good_uploaders_sit_high() -> None:
    nodes = [*uniform(30, up=0.2), NodeLinks("strong", 20 * W, W)]
    planned = plan(2 * W, nodes)
    used = slots_used(planned)
    assert used["strong"] > 10 * max(used[node.name] for node in nodes[:30])
    passed_on = [stripe for stripe in range(STRIPES) if any(p[stripe] == "strong" for p in planned.parents.values())]
    assert all(planned.parents["strong"][stripe] == SOURCE for stripe in passed_on)


def test_a_node_that_receives_slowly_passes_nothing_on() -> None:
    nodes = [*uniform(8), NodeLinks("slow", 5 * W, 0.1 * W)]
    assert slots_used(plan(3 * W, nodes))["slow"] == 0


def test_a_plan_is_the_same_every_time() -> None:
    nodes = [NodeLinks(f"{at}", (1 + at % 3) * W, 2 * W) for at in range(50)]
    assert plan(3 * W, nodes) == plan(3 * W, nodes)


def test_a_newcomer_gets_every_stripe_and_moves_nobody() -> None:
    planned = plan(3 * W, uniform(20))
    before = {name: list(parents) for name, parents in planned.parents.items()}
    topology.join(planned, [NodeLinks("late", W, W)])
    assert {name: parents for name, parents in planned.parents.items() if name != "late"} == before
    assert_is_a_tree_per_stripe(planned)


def test_a_newcomer_is_fed_by_whom_the_plan_names_the_more_by_those_with_uplink_to_spare() -> None:
    planned = plan(3 * W, uniform(20))
    for at in range(50):
        topology.join(planned, [NodeLinks(f"late-{at}", W, W)])
    feeds = Counter(parent for at in range(50) for parent in planned.parents[f"late-{at}"])
    assert all(planned.parents[f"late-{at}"].count(SOURCE) >= 1 for at in range(50))
    assert feeds.keys() <= {SOURCE, *planned.planned}
    assert len(feeds) > 10, "no few have to bear all"
    wide = plan(3 * W, [*uniform(19), NodeLinks("wide", 20 * W, 20 * W)])
    for at in range(50):
        topology.join(wide, [NodeLinks(f"late-{at}", W, W)])
    shares = Counter(parent for at in range(50) for parent in wide.parents[f"late-{at}"])
    assert shares["wide"] > 2 * shares["node-00000"]


def test_free_keys_that_join_slow_nobody_down() -> None:
    """Free keys register by hundreds and fetch nothing: they get no slot, no requests and no help."""
    planned = plan(3 * W, uniform(20))
    help_rate = planned.help_rate
    topology.join(planned, [NodeLinks(f"key-{at}", W, W) for at in range(400)])
    topology.join(planned, [NodeLinks("late", W, W)])
    assert planned.help_rate == help_rate > 0
    for name in [*planned.planned, "late"]:
        assert not any(upstream.startswith("key-") for upstream in planned.upstreams(name))
        topology.renew_spares(planned, name)
        assert not any(upstream.startswith("key-") for upstream in planned.upstreams(name))


def test_who_shares_nothing_feeds_no_leaf() -> None:
    planned = plan(3 * W, [NodeLinks("selfish", 0.0, W), NodeLinks("open", W, W)])
    for at in range(10):
        topology.join(planned, [NodeLinks(f"late-{at}", W, W)])
    assert not planned.children("selfish")
    assert all("selfish" not in planned.upstreams(f"late-{at}") for at in range(10))


def test_who_leaves_takes_only_its_edges_along() -> None:
    planned = plan(3 * W, uniform(20))
    gone = max(planned.parents, key=lambda name: slots_used(planned)[name])
    before = {name: list(parents) for name, parents in planned.parents.items() if name != gone}
    topology.leave(planned, [gone])
    assert_is_a_tree_per_stripe(planned)
    for name, parents in planned.parents.items():
        assert [parent for parent in before[name] if parent != gone] == [
            parent for parent, earlier in zip(parents, before[name], strict=True) if earlier != gone
        ]
        assert gone not in planned.upstreams(name)


@pytest.mark.parametrize("dialable", [True, False])
def test_a_node_that_comes_and_goes_leaves_nothing_behind(dialable: bool) -> None:
    planned = plan(3 * W, uniform(20))
    before = (len(planned.turns), set(planned.feeding), set(planned.dialable), planned.planned)
    for _ in range(10):
        topology.join(planned, [NodeLinks("flapping", W, W, dialable)])
        topology.leave(planned, ["flapping"])
    assert (len(planned.turns), planned.feeding, planned.dialable, planned.planned) == before


def test_many_come_and_go_at_once_and_everybody_is_in_a_tree_and_knows_whom_it_feeds() -> None:
    planned = plan(3 * W, uniform(60))
    gone = list(planned.parents)[::3]
    topology.leave(planned, gone)
    topology.join(planned, [NodeLinks(name, W, W, dialable=bool(at % 2)) for at, name in enumerate([*gone, "late"])])
    assert_is_a_tree_per_stripe(planned)
    for name in planned.parents:
        assert set(planned.children(name)) == {child for child, parents in planned.parents.items() if name in parents}
        assert name not in planned.upstreams(name)


@pytest.mark.parametrize("change", ["leave", "join", "join one by one"])
def test_flapping_nodes_cost_their_own_edges_and_not_those_of_the_swarm(change: str) -> None:
    """Counted in steps of Python: free identities may come and go by thousands."""
    many = 200

    def took(swarm: int) -> int:
        planned = plan(3 * W, uniform(swarm))
        if change == "leave":
            return steps(lambda: topology.leave(planned, list(planned.parents)[-many:]))
        late = [NodeLinks(f"late-{at}", W, W) for at in range(many)]
        together = [late] if change == "join" else [[one] for one in late]

        def join() -> None:
            for some in together:
                topology.join(planned, some)

        return steps(join)

    assert took(4_000) < 2 * took(1_000)


def steps(effect: Callable[[], None]) -> int:
    """Return the number of Python instructions that a call runs."""
    counted = 0

    def trace(frame: FrameType, event: str, _argument: object) -> Any:
        nonlocal counted
        frame.f_trace_opcodes = True
        counted += event == "opcode"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        effect()
    finally:
        sys.settrace(before)
    return counted


def test_who_has_lost_all_others_to_turn_to_is_told_of_others() -> None:
    planned = plan(3 * W, uniform(60))
    name, *others = planned.parents
    lost = planned.upstreams(name).keys() - {SOURCE}
    topology.leave(planned, lost)
    assert planned.upstreams(name).keys() == {SOURCE}
    topology.renew_spares(planned, name)
    found = planned.upstreams(name).keys() - {SOURCE}
    assert len(found) == SPARES
    assert found <= set(others) - lost
    before = planned.upstreams(name)
    topology.renew_spares(planned, name)
    assert planned.upstreams(name) == before, "of whom nobody has left since"


def test_where_nobody_can_be_dialled_the_source_feeds_everybody() -> None:
    planned = plan(3 * W, [NodeLinks(str(at), W, W, dialable=False) for at in range(5)])
    assert slots_used(planned) == {SOURCE: 5 * STRIPES}
    assert planned.rate == pytest.approx(3 * W / 5)


def test_who_cannot_be_dialled_calls_its_children() -> None:
    planned = plan(2 * W, [*uniform(6), NodeLinks("shy", 4 * W, W, dialable=False)])
    children = planned.children("shy")
    assert children == [name for name, parents in planned.parents.items() if "shy" in parents]
    assert set(children) <= planned.dialable
    assert children


def test_nobody_to_feed_is_an_empty_plan() -> None:
    assert plan(W, []).parents == {}


@pytest.mark.parametrize(
    ("source", "count", "up", "down", "seconds"),
    [(8.0, 4, 1.0, 1.0, 1.0), (0.5, 1, 9.0, 9.0, 2.0), (1.0, 100, 0.0, 9.0, 100.0), (3.0, 16, 1.0, 2.0, 16 / 19)],
    ids=["downlinks", "source", "uplinks alone", "all uplinks together"],
)
def test_the_fluid_bound_is_the_narrowest_of_three(
    source: float, count: int, up: float, down: float, seconds: float
) -> None:
    assert fluid_bound_s(W, source * W, uniform(count, up, down)) == pytest.approx(seconds)


def test_uplinks_that_cannot_reach_each_other_count_for_nothing_in_the_bound() -> None:
    shy = [NodeLinks(f"shy-{at}", 9 * W, 9 * W, dialable=False) for at in range(6)]
    assert fluid_bound_s(W, W, [*uniform(2, 1.0, 9.0), *shy]) == pytest.approx(6 / (1 + 2))


def kinds_of(count: int, *, punchable: float, hidden: float, seed: int = 0) -> list[NodeLinks]:
    """Equal nodes, of which these shares cannot be dialled."""
    order = Random(count + seed).sample(range(count), count)
    punched, lost = order[: round(count * punchable)], order[round(count * punchable) :][: round(count * hidden)]
    return [
        NodeLinks(f"{at:05d}", W, 4 * W, at not in punched and at not in lost, at in punched) for at in range(count)
    ]


@given(st.floats(min_value=0.5, max_value=50.0), swarms, st.randoms(use_true_random=False))
def test_who_is_punchable_feeds_only_who_is_or_can_be_dialled(
    source_up: float, links: list[tuple[float, float, bool]], rng: Random
) -> None:
    nodes = [
        NodeLinks(str(at), up * W, down * W, dialable, not dialable and rng.random() < 0.5)
        for at, (up, down, dialable) in enumerate(links)
    ]
    planned = plan(source_up * W, nodes)
    assert_is_a_tree_per_stripe(planned)
    can_meet = planned.dialable, planned.punchable
    for child, parents in planned.parents.items():
        for parent in parents:
            is_open = parent == SOURCE or parent in planned.dialable or child in planned.dialable
            assert is_open or all(name in can_meet[1] for name in (parent, child))


@pytest.mark.parametrize("count", [1, 2, 5, 16, 100])
@pytest.mark.parametrize("punchable", [0.5, 0.75, 1.0])
def test_where_all_others_are_punchable_the_trees_are_those_of_nodes_that_can_be_dialled(
    count: int, punchable: float
) -> None:
    nodes = kinds_of(count, punchable=punchable, hidden=0.0)
    open_ones = [NodeLinks(node.name, node.up, node.down) for node in nodes]
    planned = plan(3 * W, nodes)
    assert planned.parents == plan(3 * W, open_ones).parents
    assert fluid_bound_s(W, 3 * W, nodes) == fluid_bound_s(W, 3 * W, open_ones)
    assert set(planned.turns) - {SOURCE} <= planned.dialable, "newcomers get no parent that they cannot reach"


@pytest.mark.parametrize("count", [8, 16, 64, 300])
@pytest.mark.parametrize(("punchable", "hidden"), [(0.5, 0.25), (0.25, 0.5), (0.7, 0.2)])
def test_beside_hidden_nodes_the_punchable_ones_feed_each_other_and_the_source_carries_little_more(
    count: int, punchable: float, hidden: float
) -> None:
    nodes = kinds_of(count, punchable=punchable, hidden=hidden)
    planned = plan(3 * W, nodes)
    used, width = slots_used(planned), planned.rate / STRIPES
    assert used[SOURCE] * width <= 1.25 * 3 * W
    assert all(used[node.name] * width <= node.up * 1.1 for node in nodes)
    assert any(set(planned.children(name)) & planned.punchable for name in planned.punchable)
    size = 2.0**30
    assert size / planned.rate <= 1.05 * fluid_bound_s(size, 3 * W, nodes)


def test_a_punchable_node_that_leaves_is_forgotten() -> None:
    planned = plan(3 * W, kinds_of(8, punchable=0.5, hidden=0.0))
    topology.leave(planned, list(planned.punchable))
    assert not planned.punchable
    assert_is_a_tree_per_stripe(planned)
