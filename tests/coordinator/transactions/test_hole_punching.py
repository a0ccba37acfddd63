"""Hole punching: which nodes are sent to each other, by their own reports; a liar cannot report for others."""

from collections.abc import Collection
from pathlib import Path

import pytest

from coordinator.rules.topology import NodeLinks
from coordinator.service.plans import Plans
from coordinator.transactions.links import VERSIONS_KEPT, Punching
from protocol.ids import NodeId
from protocol.wire.signing import NodeKey
from protocol.work.messages import FetchPlan, Peer, PlanRequest
from tests.coordinator.served import serve

NODES = [NodeKey(bytes([number]) * 32).node_id for number in range(1, 9)]
SEEDER = Peer(peer_id=NodeKey(b"s" * 32).node_id, address="198.51.100.1:9", kind="seeder")
LIVE = dict.fromkeys(NODES, "")
HERE, THERE = "203.0.113.5", "203.0.113.6"


def said(*observed: str, punched: Collection[str] = (), unpunched: Collection[str] = ()) -> PlanRequest:
    return PlanRequest(version=1, observed=observed, punched=tuple(punched), unpunched=tuple(unpunched))


def place_of(*observed: str, caller: str = HERE) -> str | None:
    """Return the address at which a node with these reports is punched."""
    punching = Punching()
    punching.report(NODES[0], said(*observed), caller=caller, version=1, pairs=())
    return punching.punchable(1, LIVE, NODES[:1]).get(NODES[0])


def test_a_node_that_all_observers_see_at_one_address_is_punchable_there() -> None:
    assert place_of(f"{HERE}:4001") == f"{HERE}:4001"
    assert place_of(f"{HERE}:4001", f"{HERE}:4001") == f"{HERE}:4001"
    assert place_of("[2001:db8::5]:4001", caller="2001:db8::5") == "[2001:db8::5]:4001"
    assert place_of(f"{HERE}:4001", caller=f"::ffff:{HERE}") == f"{HERE}:4001"


@pytest.mark.parametrize(
    ("observed", "caller"),
    [
        ([], HERE),
        ([f"{HERE}:4001", f"{HERE}:4002"], HERE),  # symmetric
        ([f"{HERE}:4001", f"{THERE}:4001"], HERE),
        ([f"{HERE}:4001"], ""),  # a proxy hides who calls
        ([f"{HERE}:22"], HERE),
        ([f"{HERE}:99999"], HERE),
        (["home.example:4001"], HERE),
    ],
)
def test_others_are_not(observed: list[str], caller: str) -> None:
    assert place_of(*observed, caller=caller) is None


def test_a_node_that_reports_somebody_elses_address_as_its_own_brings_it_into_no_plan() -> None:
    assert place_of(f"{THERE}:4001") is None
    assert place_of(f"{THERE}:4001", f"{THERE}:4001") is None


def test_a_report_counts_until_the_next_one() -> None:
    punching = Punching()
    punching.report(NODES[0], said(f"{HERE}:4001"), caller=HERE, version=1, pairs=())
    punching.report(NODES[0], said(), caller=HERE, version=1, pairs=())
    assert punching.punchable(1, LIVE, NODES) == {}


def test_behind_one_address_one_node_is_punchable() -> None:
    punching = Punching()
    for port, node in enumerate(NODES[:3]):
        punching.report(node, said(f"{HERE}:{4001 + port}"), caller=HERE, version=1, pairs=())
    assert list(punching.punchable(1, LIVE, NODES)) == [min(NODES[:3])]


def punching_with(words: dict[NodeId, bool], *, about: NodeId, pairs: Collection[NodeId]) -> Punching:
    punching = Punching()
    punching.report(about, said(f"{HERE}:4001"), caller=HERE, version=1, pairs=())
    for node, worked in words.items():
        names = {"punched" if worked else "unpunched": [about]}
        punching.report(node, said(**names), caller=THERE, version=1, pairs=pairs)
    return punching


@pytest.mark.parametrize(
    ("words", "works"),
    [([], True), ([False], False), ([True], True), ([True, False], True), ([True, False, False], False)],
)
def test_a_node_of_which_more_say_that_punching_failed_is_not_punchable(words: list[bool], works: bool) -> None:
    about, others = NODES[0], NODES[1:]
    punching = punching_with(dict(zip(others, words, strict=False)), about=about, pairs=[about])
    assert bool(punching.punchable(2, LIVE, [about])) is works
    assert punching.punchable(1 + VERSIONS_KEPT, LIVE, [about]), "words are forgotten"


def test_a_crowd_that_was_never_sent_to_a_node_cannot_have_it_unpunchable() -> None:
    punching = punching_with(dict.fromkeys(NODES[1:], False), about=NODES[0], pairs=())
    assert punching.punchable(2, LIVE, NODES[:1])


def test_who_has_left_is_forgotten() -> None:
    punching = punching_with({NODES[1]: True}, about=NODES[0], pairs=NODES[:1])
    assert punching.punchable(2, {}, []) == {}
    assert punching.punchable(2, LIVE, NODES) == {}


def plans_of(dialable: int, punchable: int, *, hidden: int = 0, version: int = 2) -> tuple[Plans, list[NodeId]]:
    """A plan for so many nodes of each kind, of whom the punchable ones have reported where they are."""
    names = NODES[: dialable + punchable + hidden]
    plans = Plans()
    plans.seeder = SEEDER
    live = {name: f"198.51.100.{at}:1" for at, name in enumerate(names)}
    nodes = [NodeLinks(name, 1e6, 1e6, at < dialable) for at, name in enumerate(names)]
    for at in range(dialable, dialable + punchable):
        plans.report(names[at], said(f"203.0.113.{at}:4001"), caller=f"203.0.113.{at}")
    plans.update(version, live, 3e6, nodes, now_ms=0)
    return plans, names


@pytest.mark.parametrize(("dialable", "hidden"), [(0, 0), (2, 0), (2, 2), (4, 0)])
def test_both_of_a_pair_are_told_of_each_other_and_nobody_else_is(dialable: int, hidden: int) -> None:
    plans, names = plans_of(dialable, 4, hidden=hidden)
    parts: dict[NodeId, FetchPlan] = {name: plans.plan_for(name) for name in names}
    told = {(name, peer.peer_id, peer.address) for name, part in parts.items() for peer in part.punches}
    punchable = names[dialable : dialable + 4]
    assert told, "some punch"
    assert {name for name, _, _ in told} <= set(punchable)
    assert {(name, other) for name, other, _ in told} == {(other, name) for name, other, _ in told}
    assert all(address == f"203.0.113.{names.index(NodeId(other))}:4001" for _, other, address in told)
    waits = {(name, peer.peer_id) for name, part in parts.items() for peer in part.peers if peer.calls}
    calls = {(peer.peer_id, name) for name, part in parts.items() for peer in part.calls}
    assert waits <= calls | {(name, other) for name, other, _ in told}, "who is waited for calls, or is punched"


def test_who_cannot_be_dialled_is_told_whom_to_ask_for_its_address() -> None:
    plans, names = plans_of(2, 2, hidden=2)
    for at, name in enumerate(names):
        observers = plans.plan_for(name).observers
        if at < 2:
            assert observers == ()
        else:
            assert observers[0].peer_id == SEEDER.peer_id
            assert all(peer.address and not peer.stripes for peer in observers)
            assert len({peer.peer_id for peer in observers}) == 2


def test_a_report_in_the_middle_of_a_version_moves_nobody_until_the_next() -> None:
    plans, names = plans_of(2, 0, hidden=2)
    for at, name in enumerate(names[2:]):
        plans.report(name, said(f"203.0.113.{at}:4001"), caller=f"203.0.113.{at}")
    assert not any(plans.plan_for(name).punches for name in names)


@pytest.mark.asyncio
async def test_a_request_for_a_plan_reports_an_address_that_counts_only_where_it_came_from(tmp_path: Path) -> None:
    async with serve(tmp_path) as served:
        await served.publish()
        honest, liar = [await served.join(number) for number in (1, 2)]
        for key, host in ((honest, "127.0.0.1"), (liar, "203.0.113.9")):
            await served.call(key, "/v1/plan", said(f"{host}:4001"), FetchPlan)
        both = [honest.node_id, liar.node_id]
        assert served.round.plans._punching.punchable(1, dict.fromkeys(both, ""), both) == {
            honest.node_id: "127.0.0.1:4001"
        }
