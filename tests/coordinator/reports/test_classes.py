"""Classes of nodes: admitted by the operator, bound into their leases, and used by audits."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from coordinator.reports import explain
from protocol.errors import MalformedMessage
from protocol.work.auditing import Why
from protocol.work.lease import Lease
from tests.coordinator.world import World, answer, fragment

TIGHT, LOOSE = "torch/fp32/cpu", "torch/bf16/cpu"


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    """A round that admits two classes."""
    made = World(tmp_path, staleness=100)
    made.terms = replace(made.terms, classes=(TIGHT, LOOSE))
    made.publish(1, 0)
    yield made
    made.database.close()


@pytest.mark.parametrize("numerics", [TIGHT, LOOSE])
def test_a_lease_says_as_what_its_answer_is_judged(world: World, numerics: str) -> None:
    key = world.join(1)
    (lease,) = world.offer(key, numerics=numerics).leases
    assert lease.judged_as == numerics
    world.submit(key, answer(key, lease))
    told = world.run(
        explain.explain, key.node_id, Why(about=lease.lease_id), tolerance="a/b/c", tolerances=b"", now_ms=world.now_ms
    )
    assert told.tolerance == numerics
    assert Lease.from_bytes(told.explanations[0].lease) == lease


@pytest.mark.parametrize("numerics", ["", "torch/fp16/cpu", "torch/fp32/cuda"])
def test_a_node_of_another_class_gets_no_work_and_is_told_why(world: World, numerics: str) -> None:
    reply = world.offer(world.join(1), numerics=numerics)
    assert (reply.leases, reply.reason) == ((), "numerics")


def test_an_exact_class_is_admitted_by_its_name_or_by_its_float_class_and_by_no_other(world: World) -> None:
    own, foreign = "exact/fp32/cpu-0123456789ab", "exact/fp32/cpu-000000000000"
    given = dict[tuple[str, str], bool]()
    for classes in ((own,), ("torch/fp32/cpu",), ("torch/bf16/cpu",)):
        world.terms = replace(world.terms, classes=classes)
        for named in (own, foreign, "exact/fp32/cuda-0123456789ab"):
            given[classes[0], named] = bool(world.offer(world.join(len(given) + 1), numerics=named).leases)
    assert [name for name, some in given.items() if some] == [
        (own, own),
        ("torch/fp32/cpu", own),
        ("torch/fp32/cpu", foreign),
    ]


def test_where_the_round_names_one_class_for_all_everybody_is_judged_by_it(world: World) -> None:
    world.terms = replace(world.terms, classes=(), tolerance=LOOSE)
    for numerics in ("", "abacus/wood/hand"):
        (lease,) = world.offer(world.join(1), numerics=numerics).leases
        assert lease.judged_as == ""


def test_by_default_everybody_is_judged_as_what_it_says(world: World) -> None:
    world.terms = replace(world.terms, classes=())
    for numerics in ("", TIGHT, "abacus/wood/hand"):
        (lease,) = world.offer(world.join(1), numerics=numerics).leases
        assert lease.judged_as == numerics


def test_who_goes_on_is_judged_as_itself(world: World) -> None:
    first, heir = world.join(1), world.join(2)
    (begun,) = world.offer(first, numerics=LOOSE).leases
    assert world.tell(first, fragment(first, begun, {0: [10]})).taken
    world.give_back(first, begun)
    (lease,) = world.offer(heir, continues=True, numerics=TIGHT).leases
    assert lease.prefixes
    assert (begun.judged_as, lease.judged_as) == (LOOSE, TIGHT)


@pytest.mark.parametrize("numerics", ["torch", "Torch/fp32/cpu", "a/b/c/d", "a//b", "x" * 21 + "/b/c", "a/b/c\n"])
def test_what_is_no_class_is_refused_unread(world: World, numerics: str) -> None:
    lease = world.offer(world.join(1), numerics=TIGHT).leases[0]
    with pytest.raises(MalformedMessage):
        Lease.from_value({**lease.model_dump(), "judged_as": numerics})
