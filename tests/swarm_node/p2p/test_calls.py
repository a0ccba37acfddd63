"""Nodes that cannot be dialled: they call, and are asked over the connection that they opened.

In these tests the children are given no address of such a node; that is all that keeps them from dialling it.
"""

import socket
from collections.abc import AsyncIterator, Collection, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import trio
from libp2p import new_host
from libp2p.abc import IHost
from libp2p.crypto.ed25519 import Ed25519PrivateKey, create_new_key_pair
from libp2p.crypto.keys import KeyPair, PublicKey
from libp2p.crypto.x25519 import create_new_key_pair as create_new_x25519_key_pair
from libp2p.io.abc import ReadWriteCloser
from libp2p.io.trio import TrioTCPStream
from libp2p.network.connection.raw_connection import RawConnection
from libp2p.peer.id import ID
from libp2p.peer.peerinfo import PeerInfo
from libp2p.protocol_muxer.multiselect_communicator import MultiselectCommunicator
from libp2p.security.noise.transport import PROTOCOL_ID as NOISE_PROTOCOL_ID
from libp2p.security.noise.transport import Transport
from multiaddr import Multiaddr
from trio.testing import wait_all_tasks_blocked

from protocol.ids import NodeId
from protocol.wire.signing import NodeKey
from protocol.work.messages import Peer
from swarm_node.p2p.download import NoSource
from swarm_node.p2p.host import Host, HostSettings
from swarm_node.p2p.link import PeerStalled, PeerVanished
from swarm_node.p2p.noise import Noise, WrongPeer
from tests.swarm_node.p2p_world import (
    PATIENT_SECONDS,
    QUICK,
    as_peer,
    as_seeder,
    fetch,
    holds_exactly,
    honest,
    key,
    make_version,
    node,
    plan_of,
    stall,
    store,
)

pytestmark = pytest.mark.trio

VERSION = make_version()
DIAL_S = 5.0
IMPATIENT = replace(QUICK, deadlines=replace(QUICK.deadlines, dial_s=0.2), picker=replace(QUICK.picker, give_up_s=1.0))


def caller(host: Host) -> Peer:
    """A node as its children's plan names it when it cannot be dialled."""
    return Peer(peer_id=host.node_id, address="", kind="peer")


async def until_connected(host: Host, peers: Collection[NodeId]) -> None:
    with trio.fail_after(PATIENT_SECONDS):
        while host.connected() != set(peers):
            await wait_all_tasks_blocked(0.01)


@contextmanager
def black_hole() -> Iterator[str]:
    """An address that takes connections and never says a word."""
    with socket.socket() as full:
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        yield "127.0.0.1:" + str(full.getsockname()[1])


async def test_a_node_that_cannot_be_dialled_feeds_a_child_over_the_connection_it_opened(tmp_path: Path) -> None:
    blobs = store(tmp_path / "me")
    async with node(1, honest(store(tmp_path / "shy", VERSION.chunks))) as shy, node(2) as child:
        shy.call([as_peer(child)])
        report = await fetch(VERSION, plan_of(caller(shy)), child, blobs)
        assert child.dials.take_report() == ([], [])
    assert holds_exactly(blobs, VERSION.chunks)
    assert report.bytes_from["peer"] == sum(map(len, VERSION.chunks.values()))
    assert report.failures == []


async def test_a_child_that_asks_before_its_parent_has_its_plan_waits_for_the_call(tmp_path: Path) -> None:
    blobs = store(tmp_path / "me")
    async with (
        node(1, honest(store(tmp_path / "shy", VERSION.chunks))) as shy,
        node(2) as child,
        trio.open_nursery() as nursery,
    ):
        nursery.start_soon(fetch, VERSION, plan_of(caller(shy)), child, blobs)
        await wait_all_tasks_blocked()
        shy.call([as_peer(child)])
    assert holds_exactly(blobs, VERSION.chunks)


async def test_a_parent_that_never_calls_is_a_failed_source_and_no_more(tmp_path: Path) -> None:
    blobs, other = store(tmp_path / "me"), store(tmp_path / "other")
    async with (
        node(1, honest(store(tmp_path / "seeder", VERSION.chunks))) as seeder,
        node(2) as silent,
        node(3) as child,
    ):
        with pytest.raises(NoSource, match="did not call"):
            await fetch(VERSION, plan_of(caller(silent)), child, other, rules=IMPATIENT)
        report = await fetch(VERSION, plan_of(caller(silent), as_seeder(seeder)), child, blobs, rules=IMPATIENT)
        assert NodeId(silent.node_id) not in {name for told in child.dials.take_report() for name in told}
    assert report.bytes_from["seeder"] == sum(map(len, VERSION.chunks.values()))
    assert holds_exactly(blobs, VERSION.chunks)


async def test_a_call_that_is_lost_is_made_again() -> None:
    async with node(1, stall) as shy, node(2) as child:
        shy.call([as_peer(child)])
        await until_connected(child, {shy.node_id})
        await child.disconnect(shy.node_id)
        await until_connected(child, ())
        await until_connected(child, {shy.node_id})


async def test_a_child_that_cannot_be_reached_yet_is_called_again() -> None:
    async with node(1, stall) as shy:
        async with node(2) as gone:
            entry = as_peer(gone)
        shy.call([entry])
        await shy.dials.start(entry).done.wait()
        host, port = entry.address.split(":")
        async with node(2, port=int(port)) as child:
            assert child.addresses == (f"{host}:{port}",)
            await until_connected(child, {shy.node_id})


async def test_a_peer_that_hangs_up_after_the_handshakes_is_dialled_once_and_not_without_a_pause() -> None:
    pair = create_new_key_pair(key(9))
    dials = 0

    async def hang_up(stream: trio.SocketStream) -> None:
        nonlocal dials
        dials += 1
        raw = RawConnection(TrioTCPStream(stream), False)
        await agree(raw, "/noise")
        await agree(await Noise(pair).secure_inbound(raw), "/yamux/1.0.0")
        await stream.aclose()

    async with node(1) as one, trio.open_nursery() as nursery:
        (listener,) = await nursery.start(partial(trio.serve_tcp, hang_up, 0, host="127.0.0.1"))
        address = f"127.0.0.1:{listener.socket.getsockname()[1]}"
        rude = Peer(peer_id=ID.from_pubkey(pair.public_key).to_base58(), address=address, kind="peer")
        with pytest.raises(PeerVanished):
            await one.connect(rude, dial_s=DIAL_S)
        assert dials == 1
        nursery.cancel_scope.cancel()


async def agree(stream: ReadWriteCloser, protocol: str) -> None:
    """Answer a negotiation whose first proposal is this protocol."""
    words = MultiselectCommunicator(stream)
    for word in ("/multistream/1.0.0", protocol):
        assert await words.read() == word
        await words.write(word)


async def test_calls_are_kept_while_they_are_idle_and_until_another_plan_names_them_no_more() -> None:
    async with (
        node(1, stall, HostSettings(idle_s=0.05)) as shy,
        node(2) as child,
        node(3) as other,
    ):
        shy.call([as_peer(child)])
        await until_connected(shy, {child.node_id})
        kept = child._connections()
        for _ in range(2):  # another connection that is idle, too, is cut meanwhile
            await shy.dials.reach(as_peer(other))
            await until_connected(shy, {child.node_id})
        assert child._connections() == kept
        shy.call([])
        await until_connected(shy, ())


class Borrowed(Ed25519PrivateKey):
    """An attacker's private key, whose owner says that another public key belongs to it."""

    claimed: PublicKey

    def get_public_key(self) -> PublicKey:
        return self.claimed


@asynccontextmanager
async def impostor_of(victim: bytes) -> AsyncIterator[IHost]:
    """A host that calls in a victim's name, over Noise, and signs with its own key."""
    claimed, own = create_new_key_pair(victim).public_key, create_new_key_pair(key(66)).private_key
    assert isinstance(own, Ed25519PrivateKey)
    borrowed = Borrowed(own.impl)
    borrowed.claimed = claimed
    pair = KeyPair(borrowed, claimed)
    noise = Transport(pair, noise_privkey=create_new_x25519_key_pair().private_key)
    host = new_host(key_pair=pair, sec_opt={NOISE_PROTOCOL_ID: noise})
    async with host.run([Multiaddr("/ip4/127.0.0.1/tcp/0")]):
        yield host


async def test_a_call_in_anothers_name_is_refused() -> None:
    victim = Peer(peer_id=NodeKey(key(9)).node_id, address="", kind="peer")
    async with node(2) as child, impostor_of(key(9)) as impostor:
        assert impostor.get_id().to_base58() == victim.peer_id
        address = Multiaddr("/ip4/127.0.0.1/tcp/" + child.addresses[0].split(":")[1])
        with pytest.raises(Exception, match="unable to connect"), trio.fail_after(PATIENT_SECONDS):
            await impostor.connect(PeerInfo(ID.from_base58(child.node_id), [address]))
        assert child.connected() == set()
        with pytest.raises(PeerStalled, match="did not call"):
            await child.connect(victim, dial_s=0.1)


async def test_a_call_of_somebody_else_is_not_taken_for_the_one_that_is_waited_for() -> None:
    async with node(1, stall) as somebody, node(2) as child:
        somebody.call([as_peer(child)])
        await until_connected(child, {somebody.node_id})
        awaited = Peer(peer_id=NodeKey(key(9)).node_id, address="", kind="peer")
        with pytest.raises(PeerStalled, match="did not call"):
            await child.connect(awaited, dial_s=0.1)


async def test_a_host_tells_once_whom_it_could_dial_and_whom_not() -> None:
    async with node(1, stall) as one, node(2, stall) as two, node(4) as me:
        async with node(3) as gone:
            dead = as_peer(gone)
        mistaken = as_peer(two).model_copy(update={"peer_id": NodeKey(key(9)).node_id})
        await me.connect(as_peer(one), dial_s=DIAL_S)
        with pytest.raises(WrongPeer):
            await me.connect(mistaken, dial_s=DIAL_S)
        with pytest.raises(Exception, match="fail to open connection"):
            await me.dials.reach(dead)
        assert me.dials.take_report() == ([one.node_id], [mistaken.peer_id, dead.peer_id])
        await me.connect(as_peer(one), dial_s=DIAL_S)  # the connection is still the one that we opened
        assert me.dials.take_report() == ([one.node_id], [])
        assert me.dials.take_report() == ([], [])


async def test_a_dial_goes_on_to_its_end_when_nobody_waits_any_more() -> None:
    with black_hole() as address:
        async with node(1, settings=HostSettings(dial_s=2.0)) as me:
            silent = Peer(peer_id=NodeKey(key(9)).node_id, address=address, kind="peer")
            with pytest.raises(PeerStalled, match="did not answer"):
                await me.connect(silent, dial_s=0.01)
            assert me.dials.take_report() == ([], [])
            with trio.fail_after(PATIENT_SECONDS):
                await me.dials.start(silent).done.wait()
            await wait_all_tasks_blocked()
            assert me.dials.take_report() == ([], [silent.peer_id])


async def test_all_who_want_a_peer_share_one_dial() -> None:
    async with node(1, stall) as one, node(2) as me:
        async with trio.open_nursery() as nursery:
            for _ in range(4):
                nursery.start_soon(me.dials.reach, as_peer(one))
        assert len(me._connections()) == 1


async def test_a_peer_that_called_is_dialled_all_the_same_when_it_is_to_be_tried() -> None:
    async with node(1, stall) as shy, node(2) as child:
        shy.call([as_peer(child)])
        await until_connected(child, {shy.node_id})
        with trio.fail_after(PATIENT_SECONDS):
            await child.dials.reach(as_peer(shy))
        assert child.dials.take_report() == ([shy.node_id], [])


async def test_a_peer_whose_first_address_leads_nowhere_is_reached_at_another() -> None:
    async with node(1, stall) as host, node(2) as me:
        with black_hole() as silent, socket.socket() as closed:
            closed.bind(("127.0.0.1", 0))
            nobody = "127.0.0.1:" + str(closed.getsockname()[1])
            peer = Peer(peer_id=host.node_id, address=silent, also=(nobody, host.addresses[0]), kind="peer")
            with trio.fail_after(PATIENT_SECONDS):
                link = await me.connect(peer, dial_s=PATIENT_SECONDS)
            assert link.peer == host.node_id
            assert me.dials.take_report() == ([host.node_id], [])
            await link.close()


async def test_somebody_else_at_one_address_does_not_keep_from_the_right_one() -> None:
    async with node(1, stall) as host, node(2) as me, node(3, stall) as impostor:
        peer = Peer(peer_id=host.node_id, address=impostor.addresses[0], also=host.addresses, kind="peer")
        with trio.fail_after(PATIENT_SECONDS):
            await (await me.connect(peer, dial_s=PATIENT_SECONDS)).close()
