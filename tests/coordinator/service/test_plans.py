"""Parts of a plan: who asks whom, who calls whom, and what joins and leaves change."""

import asyncio
import threading
from collections.abc import Collection
from pathlib import Path

import pytest
import sqlalchemy as sa

from coordinator.rules.topology import FAN_OUT_MAX, SPARES, STRIPES, NodeLinks
from coordinator.service.plans import PLANNED_FOR_MS, Plans
from protocol import limits
from protocol.errors import UnknownNode
from protocol.ids import NodeId
from protocol.wire.signing import NodeKey
from protocol.work.messages import FetchPlan, Peer, PlanRequest
from tests.coordinator.served import serve

SEEDER = NodeKey(b"s" * 32).node_id
SEEDER_PEER = Peer(peer_id=SEEDER, address="127.0.0.1:9", kind="seeder")


def planned(
    *names: str, version: int = 1, shy: Collection[str] = ()
) -> tuple[Plans, dict[NodeId, str], list[NodeLinks]]:
    plans = Plans()
    plans.seeder = SEEDER_PEER
    live = {NodeId(name): f"{name}:1" for name in names}
    nodes = [NodeLinks(name, 1e6, 1e6, name not in shy) for name in names]
    plans.update(version, live, 3e6, nodes, now_ms=0)
    return plans, live, nodes


PEERS = [NodeKey(bytes([number]) * 32).node_id for number in range(1, 9)]


def test_every_stripe_of_a_part_has_one_parent_and_the_seeder_is_always_there() -> None:
    plans, _, _ = planned(*PEERS)
    for node in PEERS:
        part = plans.plan_for(node)
        assert sorted(stripe for peer in part.peers for stripe in peer.stripes) == list(range(STRIPES))
        assert node not in {peer.peer_id for peer in part.peers}
        assert SEEDER in {peer.peer_id for peer in part.peers}


def test_a_node_is_told_whether_others_could_dial_it_where_anybody_tried() -> None:
    plans, live, nodes = planned(*PEERS)
    plans.update(1, live, 3e6, nodes, now_ms=1, dialled={PEERS[0]: True, PEERS[1]: False})
    assert [plans.plan_for(node).dialled for node in PEERS[:3]] == [True, False, None]


def test_who_cannot_be_dialled_is_told_whom_to_call_and_its_children_to_wait_for_that() -> None:
    shy = set(PEERS[:3])
    plans, _, _ = planned(*PEERS, shy=shy)
    parts = {node: plans.plan_for(node) for node in PEERS}
    waited_for = {(peer.peer_id, node) for node, part in parts.items() for peer in part.peers if peer.calls}
    called = {(node, peer.peer_id) for node, part in parts.items() for peer in part.calls}
    assert waited_for == called
    assert {caller for caller, _ in called} == shy
    assert all(peer.address == f"{peer.peer_id}:1" for part in parts.values() for peer in part.calls)
    dialled = {peer.peer_id for part in parts.values() for peer in part.peers if not peer.calls}
    assert dialled.isdisjoint(shy)


def test_a_fast_node_that_cannot_be_dialled_is_told_to_call_as_many_as_it_may_feed() -> None:
    callers, others = ([NodeKey(bytes([kind, number]) * 16).node_id for number in range(200)] for kind in (1, 2))
    nodes = [NodeLinks(name, 2e7, 2e7, dialable=False) for name in callers[:2]]
    nodes += [NodeLinks(name, 1e6, 1e6) for name in others]
    plans = Plans()
    plans.seeder = SEEDER_PEER
    plans.update(1, {NodeId(node.name): f"{node.name}:1" for node in nodes}, 8e6, nodes, now_ms=0)
    assert max(len(plans.plan_for(name).calls) for name in callers[:2]) == FAN_OUT_MAX == limits.CALLS_MAX


def test_who_could_not_be_dialled_is_tried_by_one_and_with_every_version_by_another() -> None:
    shy, probers = PEERS[:2], []
    for version in range(1, 8):
        plans, _, _ = planned(*PEERS, version=version, shy=shy)
        probes = {node: plans.plan_for(node).probe for node in PEERS}
        tried = {probe.peer_id: node for node, probe in probes.items() if probe}
        assert tried.keys() == set(shy)
        probers.append(tried[shy[0]])
    assert set(probers) == set(PEERS) - {shy[0]}


def test_who_names_no_address_is_not_tried() -> None:
    plans = Plans()
    plans.seeder = SEEDER_PEER
    nodes = [NodeLinks(PEERS[0], 1e6, 1e6, dialable=False), NodeLinks(PEERS[1], 1e6, 1e6)]
    plans.update(1, {PEERS[0]: "", PEERS[1]: "b:1"}, 1e6, nodes, now_ms=0)
    assert plans.plan_for(PEERS[1]).probe is None
    assert [peer.peer_id for peer in plans.plan_for(PEERS[0]).calls] == [PEERS[1]]


def test_a_crowd_of_questions_costs_one_look() -> None:
    plans, _, _ = planned(*PEERS[:4])
    assert not plans.is_stale(1, now_ms=PLANNED_FOR_MS - 1)
    assert plans.is_stale(1, now_ms=PLANNED_FOR_MS)
    assert plans.is_stale(2, now_ms=1)


def test_a_newcomer_that_asks_between_two_looks_is_fed_and_feeds_nobody() -> None:
    plans, live, nodes = planned(*PEERS[:4])
    plans.fit_in(PEERS[4])
    part = plans.plan_for(PEERS[4])
    assert sorted(stripe for peer in part.peers for stripe in peer.stripes) == list(range(STRIPES))
    assert not part.calls
    plans.update(1, live | {PEERS[4]: "late:1"}, 3e6, [*nodes, NodeLinks(PEERS[4], 1e6, 1e6)], now_ms=PLANNED_FOR_MS)
    assert plans.plan_for(PEERS[4]) == part
    plans.update(1, live, 3e6, nodes, now_ms=2 * PLANNED_FOR_MS)
    with pytest.raises(UnknownNode):
        plans.plan_for(PEERS[4])


def test_joins_and_leaves_in_the_middle_of_a_broadcast_move_nobody_else() -> None:
    plans, live, nodes = planned(*PEERS[:6])
    gone, late = PEERS[0], PEERS[6]
    before = {node: plans.plan_for(node) for node in PEERS[1:6]}
    live = {node: address for node, address in live.items() if node != gone} | {late: "late:1"}
    plans.update(1, live, 3e6, [*nodes[1:], NodeLinks(late, 1e6, 1e6)], now_ms=1)
    assert plans.plan_for(late).peers
    for node, part in before.items():
        kept = {(peer.peer_id, stripe) for peer in part.peers for stripe in peer.stripes if peer.peer_id != gone}
        now = {(peer.peer_id, stripe) for peer in plans.plan_for(node).peers for stripe in peer.stripes}
        assert kept <= now
        assert gone not in {peer for peer, _ in now}
    with pytest.raises(UnknownNode):
        plans.plan_for(gone)


def test_who_asks_again_when_all_whom_it_was_told_of_have_left_is_told_of_others() -> None:
    """The node had only the seeder, which in a large swarm accepts connections only from its children."""
    names = [NodeKey(bytes([number]) * 32).node_id for number in range(1, 41)]
    plans, live, nodes = planned(*names)
    gone = {peer.peer_id for peer in plans.plan_for(names[0]).peers}
    live = {node: address for node, address in live.items() if node not in gone}
    plans.update(1, live, 3e6, [node for node in nodes if node.name in live], now_ms=PLANNED_FOR_MS)
    told = {peer.peer_id for peer in plans.plan_for(names[0]).peers}
    assert len(told - {SEEDER}) == SPARES
    assert told - {SEEDER} <= live.keys()


@pytest.mark.asyncio
async def test_nodes_register_while_a_plan_is_made_and_it_is_made_once_for_all_who_wait(tmp_path: Path) -> None:
    async with serve(tmp_path) as served:
        await served.publish()
        keys = [await served.join(number) for number in range(1, 6)]
        made = threading.Event()
        busy = asyncio.create_task(served.round.database.read(lambda _: made.wait()))
        ask = PlanRequest(version=1)
        asked = [asyncio.create_task(served.call(key, "/v1/plan", ask, FetchPlan)) for key in keys]
        try:
            async with asyncio.timeout(30):
                for number in range(1, 6):
                    await served.join(number)
            assert not any(task.done() for task in asked)
        finally:
            made.set()
        assert all(plan.peers for plan in await asyncio.gather(*asked))
        await busy
        plan = served.round.plans._topology
        await served.call(keys[0], "/v1/plan", ask, FetchPlan)
        assert served.round.plans._topology is plan


@pytest.mark.asyncio
async def test_what_receivers_have_witnessed_is_read_once_for_a_version(tmp_path: Path) -> None:
    """The read takes half a second in a swarm of a thousand; new nodes, and nodes without sources, ask at any time."""
    said: list[str] = []

    def hear(_connection: object, _cursor: object, statement: str, *_rest: object) -> None:
        said.append(statement)

    async with serve(tmp_path) as served:
        await served.publish()
        key = await served.join(1)
        # Of this engine alone: once one listened to all, each statement of the process asks for listeners.
        sa.event.listen(served.round.database._engine, "before_cursor_execute", hear)
        for _ in range(3):
            await served.call(key, "/v1/plan", PlanRequest(version=1), FetchPlan)
            served.round.plans._looked_ms -= PLANNED_FOR_MS
    assert sum("FROM dials" in statement for statement in said) == 3, "who can be dialled may have changed"
    assert sum("FROM receipts" in statement for statement in said) == 1


def test_every_address_of_a_node_is_told_to_those_who_dial_it() -> None:
    plans, live, nodes = planned(*PEERS)
    also = {PEERS[0]: ("[2001:db8::1]:1", "198.51.100.1:1")}
    plans.update(2, live, 3e6, nodes, now_ms=1, also=also)
    told = [peer for node in PEERS[1:] for peer in plans.plan_for(node).peers if peer.peer_id == PEERS[0]]
    assert told
    assert {(peer.address, peer.also) for peer in told} == {(f"{PEERS[0]}:1", also[PEERS[0]])}
