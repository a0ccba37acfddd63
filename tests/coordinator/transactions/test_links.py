"""Measured links: the receivers' word counts, once, and lies do not go far.

Who can be dialled is measured, too: who cannot calls its children, and no liar keeps anybody from feeding.
"""

from collections.abc import Sequence
from contextlib import suppress

import pytest
import sqlalchemy as sa
from pydantic import ValidationError

from coordinator.rules.topology import NodeLinks
from coordinator.service.plans import Plans
from coordinator.store.tables import versions
from coordinator.transactions import links, policy_versions
from coordinator.transactions.links import MeasuredLinks
from protocol import limits
from protocol.errors import BadSignature, MalformedMessage, WrongAudience
from protocol.ids import NodeId
from protocol.policy.chunks import digest
from protocol.wire.signing import NodeKey
from protocol.work.messages import Fetched, Peer, PeerUpload, TransferReceipt, seal_request
from tests.coordinator.world import ROUND, World, manifest

SEEDER = NodeKey(b"s" * 32).node_id
SEEDER_PEER = Peer(peer_id=SEEDER, address="127.0.0.1:9", kind="seeder")


def sealed(
    key: NodeKey,
    uploads: dict[NodeId, int],
    *,
    version: int = 1,
    seconds: float = 2.0,
    busy_s: float | None = None,
    round_id: str = ROUND,
    answered: Sequence[NodeId] = (),
    unanswered: Sequence[NodeId] = (),
    missed_probe: NodeId | None = None,
) -> Fetched:
    receipt = TransferReceipt(
        round_id=round_id,
        version=version,
        seconds=seconds,
        uploads=tuple(
            PeerUpload(peer_id=peer, size_bytes=size, busy_s=seconds if busy_s is None else busy_s)
            for peer, size in uploads.items()
        ),
        answered=tuple(answered),
        unanswered=tuple(unanswered),
        missed_probe=missed_probe,
    )
    return Fetched(receipt=key.seal("receipt", receipt.to_bytes()))


def give(world: World, node: NodeId, message: Fetched) -> None:
    world.run(links.take_receipt, node, message, round_id=ROUND, now_ms=world.now_ms)


SIZE_BYTES = 1024


def publish_version(world: World, version: int) -> None:
    made = manifest(version, version - 1)
    world.run(policy_versions.record, made, digest(made.to_bytes()), now_ms=world.now_ms)
    prepare(world)


def prepare(world: World) -> None:
    """A world's versions are empty and come from nobody; receipts are for some that have bytes and a seeder."""
    world.run(lambda connection: connection.execute(sa.update(versions).values(size_bytes=SIZE_BYTES)))
    world.run(links.know_seeder, SEEDER)


@pytest.fixture
def two(world: World) -> tuple[NodeKey, NodeKey]:
    if world.run(policy_versions.newest_version)[0] == 0:
        publish_version(world, 1)
    prepare(world)
    return world.join(1), world.join(2)


def test_an_uplink_is_what_all_receivers_got_over_the_time_of_the_slowest(
    world: World, two: tuple[NodeKey, NodeKey]
) -> None:
    one, other = two
    give(world, one.node_id, sealed(one, {SEEDER: 600, other.node_id: 400}, seconds=2.0))
    give(world, other.node_id, sealed(other, {SEEDER: 400}, seconds=4.0))
    known = world.run(links.measured)
    assert known.up == {SEEDER: 250.0, other.node_id: 200.0}
    assert known.down == {one.node_id: 1.5 * 500.0, other.node_id: 1.5 * 100.0}


def test_who_was_asked_for_little_is_not_held_for_slow(world: World, two: tuple[NodeKey, NodeKey]) -> None:
    """The node was busy for a quarter of the time: it could send four times as much."""
    one, other = two
    give(world, one.node_id, sealed(one, {other.node_id: 400}, seconds=4.0, busy_s=1.0))
    assert world.run(links.measured).up == {other.node_id: 400.0}


def test_a_receiver_cannot_make_an_uplink_out_of_hardly_any_time(world: World, two: tuple[NodeKey, NodeKey]) -> None:
    one, other = two
    give(world, one.node_id, sealed(one, {other.node_id: 400}, seconds=4.0, busy_s=0.0))
    assert world.run(links.measured).up == {other.node_id: 400 / (links.BUSY_MIN_SHARE * 4.0)}


def test_receivers_whose_times_overlap_share_the_senders_uplink(world: World, two: tuple[NodeKey, NodeKey]) -> None:
    receivers = [*two, *(world.join(number) for number in range(4, 9))]
    sender = world.join(3).node_id
    for key in receivers:
        give(world, key.node_id, sealed(key, {sender: 100}, seconds=4.0, busy_s=4.0))
    assert world.run(links.measured).up[sender] == pytest.approx(700 / 4.0, rel=0.01)


def test_a_nodes_second_word_on_a_version_changes_nothing(world: World, two: tuple[NodeKey, NodeKey]) -> None:
    one, _ = two
    give(world, one.node_id, sealed(one, {SEEDER: 600}))
    give(world, one.node_id, sealed(one, {SEEDER: 10**12}))
    assert world.run(links.measured).up == {SEEDER: 300.0}


def test_nobody_praises_itself(world: World, two: tuple[NodeKey, NodeKey]) -> None:
    one, _ = two
    give(world, one.node_id, sealed(one, {one.node_id: 10**12}))
    assert world.run(links.measured).up == {}


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
    assert world.run(links.measured).up == {SEEDER: 100.0}
    with pytest.raises(MalformedMessage):
        give(world, other.node_id, sealed(other, {SEEDER: 1}))


def test_a_link_nobody_measured_is_taken_to_be_as_usual() -> None:
    a, b = (NodeKey(bytes([number]) * 32).node_id for number in (1, 2))
    source_up, nodes = links.node_links({a: "h:1", b: "h:2"}, MeasuredLinks({a: 10.0}, {a: 40.0}), source=SEEDER)
    assert nodes == [NodeLinks(a, 10.0, 40.0), NodeLinks(b, 10.0, 40.0)]
    assert source_up == 30.0
    assert links.node_links({a: "h:1"}, MeasuredLinks({SEEDER: 77.0}), source=SEEDER)[0] == 77.0
    assert links.node_links({a: "h:1"}, MeasuredLinks({SEEDER: 77.0}), source=SEEDER, source_best=99.0)[0] == 99.0
    assert links.node_links({a: "h:1"}, MeasuredLinks({SEEDER: 77.0}), source=SEEDER, source_best=55.0)[0] == 77.0


def test_a_link_that_was_shared_at_times_is_not_taken_for_full() -> None:
    """The link is in use three quarters of the time, and feeds three nodes at once on average."""
    assert links._sending_s(100.0, 300.0, 50.0) == pytest.approx(75.0)
    assert links._sending_s(100.0, 300.0, 100.0) == 100.0, "somebody received all the time"


def test_who_cannot_be_dialled_keeps_its_uplink_and_who_shares_nothing_has_none() -> None:
    a, b, c = (NodeKey(bytes([number]) * 32).node_id for number in (1, 2, 3))
    known = MeasuredLinks({a: 10.0}, {a: 40.0}, unreachable=frozenset({a}), selfish=frozenset({c}))
    assert links.node_links({a: "h:1", b: "", c: ""}, known, source=SEEDER)[1] == [
        NodeLinks(a, 10.0, 40.0, dialable=False),
        NodeLinks(b, 10.0, 40.0, dialable=False),
        NodeLinks(c, 0.0, 40.0, dialable=False),
    ]


def test_who_most_could_not_dial_is_unreachable_until_most_can_again(
    world: World, two: tuple[NodeKey, NodeKey]
) -> None:
    one, other = two
    third, fourth = world.join(3), world.join(4)
    give(world, one.node_id, sealed(one, {}, answered=[SEEDER], unanswered=[fourth.node_id]))
    assert world.run(links.measured).unreachable == {fourth.node_id}
    give(world, other.node_id, sealed(other, {}, answered=[fourth.node_id]))
    assert world.run(links.measured).unreachable == set()  # as many say yes
    give(world, third.node_id, sealed(third, {}, answered=[SEEDER], unanswered=[fourth.node_id]))
    assert world.run(links.measured).unreachable == {fourth.node_id}
    publish_version(world, 2)
    give(world, one.node_id, sealed(one, {}, version=2, answered=[fourth.node_id]))  # its last word counts
    assert world.run(links.measured).unreachable == set()


def test_what_those_who_tried_to_dial_a_node_say_is_known_of_it_alone(
    world: World, two: tuple[NodeKey, NodeKey]
) -> None:
    one, other = two
    third, fourth = world.join(3), world.join(4)
    assert world.run(links.measured).dialled == {}
    give(world, one.node_id, sealed(one, {}, answered=[other.node_id], unanswered=[fourth.node_id]))
    give(world, third.node_id, sealed(third, {}, answered=[other.node_id]))
    assert world.run(links.measured, rates=False).dialled == {other.node_id: True, fourth.node_id: False}


def test_a_probe_in_vain_is_a_word_on_the_address_and_none_on_the_uplink(
    world: World, two: tuple[NodeKey, NodeKey]
) -> None:
    one, other = two
    give(world, one.node_id, sealed(one, {other.node_id: 50}, answered=[SEEDER], missed_probe=other.node_id))
    known = world.run(links.measured)
    assert known.unreachable == {other.node_id}
    assert known.up == {other.node_id: 25.0}


def test_what_came_by_chance_from_a_node_that_should_have_been_dialled_does_not_measure_its_uplink(
    world: World, two: tuple[NodeKey, NodeKey]
) -> None:
    one, other = two
    give(world, one.node_id, sealed(one, {SEEDER: 50, other.node_id: 6}, answered=[SEEDER], unanswered=[other.node_id]))
    known = world.run(links.measured)
    assert known.up == {SEEDER: 25.0}
    assert known.down == {one.node_id: 1.5 * 28.0}


def test_words_about_dials_are_forgotten_with_their_versions(world: World, two: tuple[NodeKey, NodeKey]) -> None:
    one, other = two
    give(world, one.node_id, sealed(one, {}, answered=[SEEDER], unanswered=[other.node_id]))
    for version in range(2, 2 + links.VERSIONS_KEPT):
        assert world.run(links.measured).unreachable == {other.node_id}
        publish_version(world, version)
        give(world, one.node_id, sealed(one, {}, version=version, answered=[SEEDER]))
    assert world.run(links.measured).unreachable == set()


def test_who_reached_nobody_has_no_say_about_others(world: World, two: tuple[NodeKey, NodeKey]) -> None:
    one, other = two
    give(world, one.node_id, sealed(one, {SEEDER: 5}, unanswered=[other.node_id]))
    assert world.run(links.measured).unreachable == set()


def test_nobody_vouches_for_its_own_address(world: World, two: tuple[NodeKey, NodeKey]) -> None:
    one, other = two
    give(world, one.node_id, sealed(one, {}, answered=[SEEDER, one.node_id]))
    give(world, other.node_id, sealed(other, {}, answered=[SEEDER], unanswered=[one.node_id]))
    assert world.run(links.measured).unreachable == {one.node_id}


def test_a_liar_who_calls_everybody_unreachable_does_not_stop_anybody_from_feeding(world: World) -> None:
    publish_version(world, 1)
    keys = [world.join(number) for number in range(1, 7)]
    liar, *honest = keys
    others = [key.node_id for key in honest]
    give(world, liar.node_id, sealed(liar, {}, answered=[SEEDER], unanswered=others))
    alone = plans_of(world, keys)
    assert feeding(alone, keys) >= set(others)  # nobody contradicts: they call the liar, and feed it

    for key in honest:
        answered = [SEEDER, *(other for other in others if other != key.node_id)]
        give(world, key.node_id, sealed(key, {}, answered=answered))
    assert world.run(links.measured).unreachable == set()
    assert feeding(plans_of(world, keys), keys) >= set(others)


def plans_of(world: World, keys: Sequence[NodeKey]) -> Plans:
    """The plan for these nodes, made of what is measured."""
    live = {key.node_id: f"{key.node_id}:1" for key in keys}
    source_up, nodes = links.node_links(live, world.run(links.measured), source=SEEDER)
    plans = Plans()
    plans.seeder = SEEDER_PEER
    plans.update(1, live, source_up, nodes, now_ms=0)
    return plans


def feeding(plans: Plans, keys: Sequence[NodeKey]) -> set[str]:
    """Return the nodes that are the first source of any node."""
    parts = [plans.plan_for(key.node_id) for key in keys]
    return {peer.peer_id for part in parts for peer in part.peers if peer.stripes and peer.kind == "peer"}


@pytest.mark.parametrize(("seconds", "busy_s"), [(5e-324, 0.0), (1e-310, 1e-310), (0.0, 0.0)])
def test_receipt_for_no_time_at_all_is_refused(seconds: float, busy_s: float) -> None:
    with pytest.raises(ValidationError):
        sealed(NodeKey(b"k" * 32), {SEEDER: 1}, seconds=seconds, busy_s=busy_s)


def test_receipt_for_no_bytes_stops_nobodys_plan(world: World) -> None:
    """The receipt was all that was known of downlinks, in a round without measurements."""
    publish_version(world, 1)
    liar, *honest = [world.join(number) for number in range(1, 4)]
    nothing = PeerUpload.model_construct(peer_id=SEEDER, size_bytes=0, busy_s=2.0)
    receipt = TransferReceipt(round_id=ROUND, version=1, seconds=2.0, uploads=(nothing,))
    with suppress(MalformedMessage):
        give(world, liar.node_id, Fetched(receipt=liar.seal("receipt", receipt.to_bytes())))
    assert plans_of(world, [liar, *honest]).plan_for(honest[0].node_id).rate > 0
    _, (link,) = links.node_links({honest[0].node_id: ""}, MeasuredLinks({}, {liar.node_id: 0.0}), source=SEEDER)
    assert (link.up, link.down) == (links.UNKNOWN_BYTES_PER_S, links.UNKNOWN_BYTES_PER_S)
    with pytest.raises(ValidationError):
        sealed(liar, {SEEDER: 0})


def test_receipt_for_endless_bytes_in_a_moment_moves_nobody_elses_links(
    world: World, two: tuple[NodeKey, NodeKey]
) -> None:
    """Nor do as many made-up friends as fit into it."""
    liar, friend = two
    honest = [world.join(number) for number in (3, 4, 5)]
    for one, other in zip(honest, [*honest[1:], honest[0]], strict=True):
        give(world, one.node_id, sealed(one, {other.node_id: 100}))
    friends = [friend.node_id, *(NodeKey(bytes([number, 1]) * 16).node_id for number in range(limits.PEERS_MAX - 1))]
    give(world, liar.node_id, sealed(liar, dict.fromkeys(friends, 2**50), seconds=limits.FETCH_MIN_S, busy_s=0.0))
    known = world.run(links.measured)
    assert known.up.keys() == {friend.node_id, *(key.node_id for key in honest)}
    shortest_s = links.BUSY_MIN_SHARE * 2.0
    assert known.up[friend.node_id] <= links.UPLOAD_MAX_VERSIONS * SIZE_BYTES / shortest_s
    newcomer = NodeKey(b"n" * 32).node_id
    _, (its,) = links.node_links({newcomer: "n:1"}, known, source=SEEDER)
    assert its.up == 50.0


@pytest.mark.parametrize("busy_s", [0.0, limits.FETCH_MAX_S])
@pytest.mark.parametrize("version", [1, 2], ids=["among-others", "first-to-tell"])
def test_receipt_of_seven_days_outweighs_no_five_honest_ones(world: World, version: int, busy_s: float) -> None:
    publish_version(world, 1)
    sender, liar, *honest = [world.join(number) for number in range(1, 8)]
    named = [sender.node_id, SEEDER]
    for key in honest:
        give(world, key.node_id, sealed(key, dict.fromkeys(named, 100)))
    before = world.run(links.measured).up
    assert before == dict.fromkeys(named, 250.0)
    if version > 1:
        publish_version(world, version)
    give(
        world,
        liar.node_id,
        sealed(liar, dict.fromkeys(named, 1), version=version, seconds=limits.FETCH_MAX_S, busy_s=busy_s),
    )
    after = world.run(links.measured).up
    for name in named:
        assert before[name] / (2 if version == 1 else 3) <= after[name] <= 2 * before[name]


def test_who_is_slow_is_believed_at_its_own_rate_and_weighs_little(world: World, two: tuple[NodeKey, NodeKey]) -> None:
    sender = world.join(9).node_id
    slow, alone = two
    for number in range(3, 8):
        key = world.join(number)
        give(world, key.node_id, sealed(key, {sender: 100}))
    give(world, slow.node_id, sealed(slow, {sender: 100, alone.node_id: 100}, seconds=20.0))
    up = world.run(links.measured).up
    assert up[alone.node_id] == pytest.approx(5.0)
    assert up[sender] == pytest.approx(515 / 3.0), "the last of it came after the others had theirs"


def test_the_largest_receipt_fits_into_a_request() -> None:
    nodes = [NodeKey(bytes([number, 1]) * 16).node_id for number in range(limits.PEERS_MAX)]
    dialled, uploads = nodes[: limits.DIALS_MAX], dict.fromkeys(nodes, limits.TRANSFER_MAX_BYTES)
    key = NodeKey(b"k" * 32)
    message = sealed(
        key, uploads, version=limits.VERSION_MAX, answered=dialled, unanswered=dialled, missed_probe=key.node_id
    )
    request = seal_request(
        key, round_id=ROUND, path="/v1/fetched", nonce=bytes(limits.NONCE_BYTES), now_ms=2**41, body=message
    )
    assert len(request) <= limits.SMALL_REQUEST_MAX_BYTES
