"""Measured links and the plans made of them: the receivers' word counts, once, and everybody gets a part."""

import asyncio
import threading
from pathlib import Path

import pytest

from coordinator import links, publish
from coordinator.plans import PLANNED_FOR_MS, Plans
from coordinator.topology import STRIPES, NodeLinks
from protocol import limits
from protocol.chunks import digest
from protocol.errors import BadSignature, MalformedMessage, UnknownNode, WrongAudience
from protocol.ids import NodeId
from protocol.messages import Fetched, Peer, Plan, PlanRequest, Receipt, Upload
from protocol.signing import NodeKey
from tests.coordinator.served import serve
from tests.coordinator.world import ROUND, World, manifest

SEEDER = NodeKey(b"s" * 32).node_id
SEEDER_PEER = Peer(peer_id=SEEDER, address="127.0.0.1:9", kind="seeder")


def sealed(
    key: NodeKey, uploads: dict[NodeId, int], *, version: int = 1, seconds: float = 2.0, round_id: str = ROUND
) -> Fetched:
    lines = tuple(Upload(peer_id=peer, size_bytes=size) for peer, size in uploads.items())
    receipt = Receipt(round_id=round_id, version=version, seconds=seconds, uploads=lines)
    return Fetched(receipt=key.seal("receipt", receipt.to_bytes()))


def give(world: World, node: NodeId, message: Fetched) -> None:
    world.run(links.take_receipt, node, message, round_id=ROUND, now_ms=world.now_ms)


def publish_version(world: World, version: int) -> None:
    made = manifest(version, version - 1)
    world.run(publish.record, made, digest(made.to_bytes()), now_ms=world.now_ms)


@pytest.fixture
def two(world: World) -> tuple[NodeKey, NodeKey]:
    if world.run(publish.newest_version)[0] == 0:
        publish_version(world, 1)
    return world.join(1), world.join(2)


def test_an_uplink_is_what_all_receivers_got_over_the_time_of_the_slowest(
    world: World, two: tuple[NodeKey, NodeKey]
) -> None:
    one, other = two
    give(world, one.node_id, sealed(one, {SEEDER: 600, other.node_id: 400}, seconds=2.0))
    give(world, other.node_id, sealed(other, {SEEDER: 400}, seconds=4.0))
    up, down = world.run(links.measured)
    assert up == {SEEDER: 250.0, other.node_id: 200.0}
    assert down == {one.node_id: 500.0, other.node_id: 100.0}


def test_a_nodes_second_word_on_a_version_changes_nothing(world: World, two: tuple[NodeKey, NodeKey]) -> None:
    one, _ = two
    give(world, one.node_id, sealed(one, {SEEDER: 600}))
    give(world, one.node_id, sealed(one, {SEEDER: 10**12}))
    assert world.run(links.measured)[0] == {SEEDER: 300.0}


def test_nobody_praises_itself(world: World, two: tuple[NodeKey, NodeKey]) -> None:
    one, _ = two
    give(world, one.node_id, sealed(one, {one.node_id: 10**12}))
    assert world.run(links.measured)[0] == {}


def test_a_receipt_forged_in_anothers_name_is_refused(world: World, two: tuple[NodeKey, NodeKey]) -> None:
    one, other = two
    with pytest.raises(WrongAudience):
        give(world, other.node_id, sealed(one, {SEEDER: 1}))
    forged = bytearray(sealed(one, {SEEDER: 1}).receipt)
    forged[-1] ^= 1
    with pytest.raises(BadSignature):
        give(world, one.node_id, Fetched(receipt=bytes(forged)))


def test_a_receipt_of_another_round_or_of_a_version_to_come_is_refused(
    world: World, two: tuple[NodeKey, NodeKey]
) -> None:
    one, _ = two
    with pytest.raises(WrongAudience):
        give(world, one.node_id, sealed(one, {SEEDER: 1}, round_id="b" * 64))
    for version in (2, limits.VERSION_MAX):
        with pytest.raises(MalformedMessage):
            give(world, one.node_id, sealed(one, {SEEDER: 1}, version=version))


def test_only_the_last_versions_count(world: World, two: tuple[NodeKey, NodeKey]) -> None:
    one, other = two
    give(world, one.node_id, sealed(one, {SEEDER: 10**9}))
    for version in range(2, 2 + links.VERSIONS_KEPT):
        publish_version(world, version)
        give(world, one.node_id, sealed(one, {SEEDER: 200}, version=version))
    assert world.run(links.measured)[0] == {SEEDER: 100.0}
    with pytest.raises(MalformedMessage):
        give(world, other.node_id, sealed(other, {SEEDER: 1}))


def test_a_link_nobody_measured_is_taken_to_be_as_usual_and_who_cannot_be_dialled_feeds_nobody() -> None:
    a, b, c = (NodeKey(bytes([number]) * 32).node_id for number in (1, 2, 3))
    source_up, nodes = links.node_links({a: "h:1", b: "h:2", c: ""}, {a: 10.0}, {a: 40.0}, source=SEEDER)
    assert nodes == [NodeLinks(a, 10.0, 40.0), NodeLinks(b, 10.0, 40.0), NodeLinks(c, 0.0, 40.0, dialable=False)]
    assert source_up == 30.0
    assert links.node_links({a: "h:1"}, {SEEDER: 77.0}, {}, source=SEEDER)[0] == 77.0


def planned(*names: str, version: int = 1) -> tuple[Plans, dict[NodeId, str], list[NodeLinks]]:
    plans = Plans()
    live = {NodeId(name): f"{name}:1" for name in names}
    nodes = [NodeLinks(name, 1e6, 1e6) for name in names]
    plans.update(version, live, 3e6, nodes, now_ms=0)
    return plans, live, nodes


PEERS = [NodeKey(bytes([number]) * 32).node_id for number in range(1, 9)]


def test_every_stripe_of_a_part_has_one_parent_and_the_seeder_is_always_there() -> None:
    plans, _, _ = planned(*PEERS)
    for node in PEERS:
        part = plans.part(node, SEEDER_PEER)
        assert sorted(stripe for peer in part.peers for stripe in peer.stripes) == list(range(STRIPES))
        assert node not in {peer.peer_id for peer in part.peers}
        assert SEEDER in {peer.peer_id for peer in part.peers}


def test_a_crowd_of_questions_costs_one_look_until_somebody_new_asks() -> None:
    plans, _, _ = planned(*PEERS[:4])
    assert not plans.is_stale(1, PEERS[0], now_ms=PLANNED_FOR_MS - 1)
    assert plans.is_stale(1, PEERS[0], now_ms=PLANNED_FOR_MS)
    assert plans.is_stale(2, PEERS[0], now_ms=1)
    assert plans.is_stale(1, PEERS[4], now_ms=1)


def test_joins_and_leaves_in_the_middle_of_a_broadcast_move_nobody_else() -> None:
    plans, live, nodes = planned(*PEERS[:6])
    gone, late = PEERS[0], PEERS[6]
    before = {node: plans.part(node, SEEDER_PEER) for node in PEERS[1:6]}
    live = {node: address for node, address in live.items() if node != gone} | {late: "late:1"}
    plans.update(1, live, 3e6, [*nodes[1:], NodeLinks(late, 1e6, 1e6)], now_ms=1)
    assert plans.part(late, SEEDER_PEER).peers
    for node, part in before.items():
        kept = {(peer.peer_id, stripe) for peer in part.peers for stripe in peer.stripes if peer.peer_id != gone}
        now = {(peer.peer_id, stripe) for peer in plans.part(node, SEEDER_PEER).peers for stripe in peer.stripes}
        assert kept <= now
        assert gone not in {peer for peer, _ in now}
    with pytest.raises(UnknownNode):
        plans.part(gone, SEEDER_PEER)


@pytest.mark.asyncio
async def test_nodes_register_while_a_plan_is_made_and_it_is_made_once_for_all_who_wait(tmp_path: Path) -> None:
    async with serve(tmp_path) as served:
        await served.publish()
        keys = [await served.join(number) for number in range(1, 6)]
        made = threading.Event()
        busy = asyncio.create_task(served.round.database.read(lambda _: made.wait()))
        ask = PlanRequest(version=1)
        asked = [asyncio.create_task(served.call(key, "/v1/plan", ask, Plan)) for key in keys]
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
        await served.call(keys[0], "/v1/plan", ask, Plan)
        assert served.round.plans._topology is plan
