"""The libp2p host: known peers over Noise only, and nothing a stranger does outlives its connection."""

import logging
import os
import signal
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import trio
from libp2p import new_host
from libp2p.abc import IHost
from libp2p.crypto.ed25519 import create_new_key_pair
from libp2p.custom_types import TProtocol
from libp2p.host.exceptions import StreamFailure
from libp2p.network.stream.exceptions import StreamReset
from libp2p.peer.id import ID
from libp2p.peer.peerinfo import PeerInfo
from libp2p.security.insecure.transport import PLAINTEXT_PROTOCOL_ID, InsecureTransport
from libp2p.stream_muxer.exceptions import MuxedStreamError
from multiaddr import Multiaddr
from trio.testing import wait_all_tasks_blocked

from protocol import limits
from protocol.errors import ConfigInvalid, PeerFault
from protocol.ids import ChunkId
from protocol.wire.frames import Bye, Farewell, Want
from protocol.wire.signing import NodeKey
from swarm_node.p2p import workarounds
from swarm_node.p2p.host import Host, HostSettings, open_host
from swarm_node.p2p.link import Link, PeerStalled, PeerVanished
from swarm_node.p2p.noise import WrongPeer
from swarm_node.p2p.yamux_frames import INITIAL_WINDOW_BYTES
from tests.swarm_node.p2p_world import PATIENT_SECONDS, as_peer, key, node, server_process, stall, store

DIAL_S = 5.0
LEAVING_SECONDS = 12.0


async def say_goodbye(link: Link) -> None:
    await link.close()


async def is_answered(host: Host, other: Host) -> bool:
    link = await host.connect(as_peer(other), dial_s=DIAL_S)
    with trio.fail_after(DIAL_S):
        while not (messages := await link.receive()):
            pass
    return messages == [Bye(Farewell.DONE)]


async def until_nobody_is_connected(host: Host) -> None:
    with trio.fail_after(PATIENT_SECONDS):
        while host.connected():
            await wait_all_tasks_blocked(0.01)


def test_the_workarounds_fit_the_installed_libp2p() -> None:
    assert version("libp2p") == workarounds.PINNED_VERSION == "0.8.1"


@pytest.mark.trio
async def test_the_peer_id_is_the_node_id_of_the_same_key() -> None:
    async with node(7) as host:
        assert host.node_id == NodeKey(key(7)).node_id


@pytest.mark.trio
async def test_two_hosts_talk_and_know_each_other() -> None:
    seen: list[str] = []

    async def note(link: Link) -> None:
        seen.append(link.peer)
        await link.close()

    async with node(1, note) as one, node(2) as two:
        assert await is_answered(two, one)
        assert seen == [two.node_id]
        assert two.connected() == {one.node_id}


@asynccontextmanager
async def plaintext_host() -> AsyncIterator[IHost]:
    """An attacker who claims to be whoever it likes, since plaintext proves nothing."""
    pair = create_new_key_pair(key(66))
    host = new_host(key_pair=pair, sec_opt={PLAINTEXT_PROTOCOL_ID: InsecureTransport(pair)})
    async with host.run([Multiaddr("/ip4/127.0.0.1/tcp/0")]):
        yield host


@pytest.mark.trio
async def test_plaintext_impersonation_is_not_even_negotiated() -> None:
    streams: list[Link] = []

    async def note(link: Link) -> None:
        streams.append(link)

    async with node(1, note) as host, plaintext_host() as attacker:
        address = Multiaddr("/ip4/127.0.0.1/tcp/" + host.addresses[0].split(":")[1])
        with pytest.raises(Exception, match="unable to connect"), trio.fail_after(PATIENT_SECONDS):
            await attacker.connect(PeerInfo(ID.from_base58(host.node_id), [address]))
        assert host.connected() == set()
        assert streams == []


@pytest.mark.trio
@pytest.mark.parametrize(
    "error", [ValueError("our bug"), KeyError(), PeerFault("theirs"), ExceptionGroup("both", [OSError(), KeyError()])]
)
async def test_a_handler_that_raises_ends_its_stream_and_not_the_host(error: Exception) -> None:
    raises = True

    async def handler(link: Link) -> None:
        if raises:
            await link.receive()
            raise error
        await link.close()

    async with node(1, handler) as one, node(2) as two:
        link = await two.connect(as_peer(one), dial_s=DIAL_S)
        await link.send(Want(ChunkId("0" * 64)), stall_s=DIAL_S)
        with pytest.raises(PeerVanished), trio.fail_after(DIAL_S):
            await link.receive()
        raises = False
        assert await is_answered(two, one)


@pytest.mark.trio
async def test_connections_give_their_slot_back() -> None:
    """Stock libp2p keeps every slot until the host ends: with three slots the fourth connection would be the last."""
    async with node(1, say_goodbye, HostSettings(connections_max=3)) as one:
        for number in range(10, 20):
            async with node(number) as other:
                assert await is_answered(other, one)
            await until_nobody_is_connected(one)


@pytest.mark.trio
async def test_one_address_cannot_take_every_connection() -> None:
    async with node(1, say_goodbye, HostSettings(connections_per_address=2)) as one:
        async with node(2) as two, node(3) as three:
            assert await is_answered(two, one)
            assert await is_answered(three, one)
            async with node(4) as four:
                with pytest.raises(PeerFault):
                    await four.connect(as_peer(one), dial_s=DIAL_S)
        await until_nobody_is_connected(one)
        async with node(5) as five:
            assert await is_answered(five, one)


def has_ipv6() -> bool:
    with socket.socket(socket.AF_INET6) as probe, suppress(OSError):
        probe.bind(("::1", 0))
        return True
    return False


@pytest.mark.parametrize(("ip", "neighbourhood"), [("127.0.0.1", "127.0.0.1"), ("::1", "::/56")])
@pytest.mark.trio
async def test_a_link_knows_where_its_peer_is(ip: str, neighbourhood: str) -> None:
    """Stock libp2p does not know it of IPv6; so the bounds of one address would be those of all."""
    if ":" in ip and not has_ipv6():
        pytest.skip("no IPv6 on loopback here")  # of IPv4 it is tested everywhere
    seen: list[str] = []

    async def look(link: Link) -> None:
        seen.append(link.neighbourhood)
        await link.close()

    async with open_host(key(1), ip, 0) as one, node(2) as two:
        one.serve(look)
        assert await is_answered(two, one)
    assert seen == [neighbourhood]


@pytest.mark.parametrize("address", ["127.0.0.1:6379", "192.168.1.1:80", "localhost:22", "[::1]:5432"])
@pytest.mark.trio
async def test_a_plan_that_points_into_the_owners_network_is_not_followed_there(address: str) -> None:
    async with node(1, say_goodbye) as one, node(2) as two:
        two.own_network = False
        with pytest.raises(PeerVanished, match="may be dialled"):
            await two.connect(as_peer(one).model_copy(update={"address": address}), dial_s=DIAL_S)


@pytest.mark.trio
async def test_silent_sockets_are_dropped_and_do_not_keep_others_out() -> None:
    async with node(1, say_goodbye, HostSettings(upgrade_s=5.0)) as one, node(2) as two:
        port = int(one.addresses[0].split(":")[1])
        silent = [await trio.open_tcp_stream("127.0.0.1", port) for _ in range(20)]
        assert await is_answered(two, one)
        with trio.fail_after(PATIENT_SECONDS):
            for stream in silent:
                while await stream.receive_some():  # multistream's greeting, then the end
                    pass
                await stream.aclose()


@pytest.mark.trio
@pytest.mark.parametrize("garbage", [b"\x00" * 4096, b"GET / HTTP/1.1\r\n\r\n", os.urandom(4096)])
async def test_garbage_on_the_port_harms_nobody(garbage: bytes) -> None:
    async with node(1, say_goodbye) as one, node(2) as two:
        port = int(one.addresses[0].split(":")[1])
        stream = await trio.open_tcp_stream("127.0.0.1", port)
        await stream.send_all(garbage)
        await stream.aclose()
        assert await is_answered(two, one)


@pytest.mark.trio
async def test_garbage_in_place_of_a_protocol_name_ends_its_stream_only() -> None:
    async with node(1, say_goodbye) as one, node(2) as two:
        assert await is_answered(two, one)
        for garbage in (b"\xff" * 100, b"\x03\xff\xfe\n", b"\x01", b""):
            stream = await two._swarm.new_stream(ID.from_base58(one.node_id))
            await stream.write(garbage)
            await stream.close()
        assert await is_answered(two, one)


GREETING = b"\x13/multistream/1.0.0\n"


@pytest.mark.trio
async def test_a_protocol_name_without_end_is_not_kept() -> None:
    """The windows of the muxer bound what waits to be read, not what a negotiation reads."""
    async with node(1, say_goodbye) as one, node(2) as two:
        assert await is_answered(two, one)
        stream: Any = await two._swarm.new_stream(ID.from_base58(one.node_id))
        await stream.write(GREETING + b"\xff\xff\xff\xff\x0f")
        with pytest.raises(MuxedStreamError), trio.fail_after(PATIENT_SECONDS):
            await stream.muxed_stream.write(bytes(600_000))


@pytest.mark.trio
async def test_a_stranger_whose_first_word_has_no_end_is_let_go_at_once() -> None:
    async with (
        node(1, say_goodbye, HostSettings(upgrade_s=PATIENT_SECONDS)) as one,
        await trio.open_tcp_stream("127.0.0.1", int(one.addresses[0].split(":")[1])) as stranger,
    ):
        with trio.fail_after(PATIENT_SECONDS / 2), suppress(trio.BrokenResourceError):
            await stranger.send_all(b"\xff\xff\xff\xff\x0f")
            while await stranger.receive_some():  # multistream's greeting, then the end
                pass


@pytest.mark.trio
async def test_protocols_are_not_proposed_for_ever() -> None:
    async with node(1, say_goodbye) as one, node(2) as two:
        assert await is_answered(two, one)
        stream = await two._swarm.new_stream(ID.from_base58(one.node_id))
        await stream.write(GREETING + 1000 * b"\x02x\n")
        answered = b""
        with trio.fail_after(PATIENT_SECONDS), suppress(StreamReset):
            while len(answered) < 3000:
                answered += await stream.read(2**16)
        assert answered.count(b"na\n") < 2 * limits.NEGOTIATION_WORDS_MAX


@pytest.mark.trio
@pytest.mark.parametrize("protocol", ["/ipfs/id/push/1.0.0", "/ipfs/ping/1.0.0"])
async def test_what_a_stranger_says_unasked_is_not_listened_to(protocol: str) -> None:
    """Pushed addresses would be stored, and dialled, in our own network, too; pings are work without end."""
    async with node(1, say_goodbye) as one, node(2) as two:
        assert await is_answered(two, one)
        with pytest.raises(StreamFailure), trio.fail_after(PATIENT_SECONDS):
            await two._host.new_stream(ID.from_base58(one.node_id), [TProtocol(protocol)])


@pytest.mark.trio
async def test_one_address_cannot_take_every_window() -> None:
    """Streams that a stranger opens and forgets hold windows, without which we could open none ourselves."""
    share = 4 * INITIAL_WINDOW_BYTES
    settings = HostSettings(receive_max_bytes=2 * share, receive_per_address_bytes=share)
    async with node(1, say_goodbye, settings) as one, node(2) as two, node(3) as three, node(4, say_goodbye) as four:
        for stranger in (two, three):
            assert await is_answered(stranger, one)
        for stranger in (two, three, two, three, two, three):
            await stranger._swarm.new_stream(ID.from_base58(one.node_id))
        with trio.fail_after(PATIENT_SECONDS):
            while one.budget.left > share:
                await wait_all_tasks_blocked(0.01)
        assert one.budget.left == share
        assert await is_answered(one, four)


@pytest.mark.trio
async def test_a_name_to_listen_on_is_not_taken_for_every_interface() -> None:
    async with open_host(key(1), "localhost", 0) as host:
        assert all(address.startswith(("127.0.0.1:", "[::1]:")) for address in host.addresses)
    with pytest.raises(ConfigInvalid, match="Cannot listen"):
        async with open_host(key(1), "no-such-host.invalid", 0):
            pytest.fail("it listens somewhere")


@pytest.mark.trio
async def test_a_connection_without_streams_is_cut_after_a_while() -> None:
    async with node(1, say_goodbye, HostSettings(idle_s=0.1)) as one, node(2) as two:
        assert await is_answered(two, one)
        await until_nobody_is_connected(one)
        assert await is_answered(two, one)  # reconnecting is no trouble


@pytest.mark.trio
async def test_an_impostor_is_named() -> None:
    async with node(1, say_goodbye) as impostor, node(2) as victim, node(3) as me:
        entry = as_peer(victim).model_copy(update={"address": impostor.addresses[0]})
        with pytest.raises(WrongPeer, match="different peer"):
            await me.connect(entry, dial_s=DIAL_S)


@pytest.mark.trio
async def test_a_peer_that_is_not_there_is_named_and_may_come_back() -> None:
    async with node(2) as me:
        async with node(1, say_goodbye) as gone:
            entry = as_peer(gone)
        with pytest.raises(PeerVanished, match="cannot be reached"):
            await me.connect(entry, dial_s=DIAL_S)
        host, port = entry.address.split(":")
        async with open_host(key(1), host, int(port)) as back:
            back.serve(say_goodbye)
            assert await is_answered(me, back)


@pytest.mark.trio
async def test_what_ended_a_connection_is_told_with_its_code() -> None:
    async with node(1, stall) as other, node(2) as me:
        link = await me.connect(as_peer(other), dial_s=DIAL_S)
        await me.disconnect(other.node_id)
        with pytest.raises(PeerVanished, match=r"We closed the connection\. \[connection_lost\]"):
            await link.receive()


@pytest.mark.trio
async def test_a_dial_into_a_black_hole_ends_at_its_deadline() -> None:
    with socket.socket() as full:
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        address = "127.0.0.1:" + str(full.getsockname()[1])
        async with node(2) as me, node(1) as other:
            entry = as_peer(other).model_copy(update={"address": address})
            with pytest.raises(PeerStalled, match="did not answer"):
                await me.connect(entry, dial_s=0.2)


@pytest.mark.trio
@pytest.mark.processes
async def test_a_frozen_peer_costs_its_deadline_and_leaving_does_not_wait_for_it(tmp_path: Path) -> None:
    with server_process(store(tmp_path), 1) as (process, entry):
        async with node(2) as me:
            link = await me.connect(entry, dial_s=DIAL_S)
            process.send_signal(signal.SIGSTOP)
            await link.send(Want(ChunkId("0" * 64)), stall_s=1.0)
            with pytest.raises(PeerStalled):
                await me.connect(entry, dial_s=0.2)
            left_at = trio.current_time()
        assert trio.current_time() - left_at < LEAVING_SECONDS


@pytest.mark.trio
async def test_leaving_with_many_connections_takes_a_moment() -> None:
    async with node(1, stall) as one:
        async with node(2) as two, node(3) as three, node(4) as four, node(5) as five:
            for host in (two, three, four, five):
                await host.connect(as_peer(one), dial_s=DIAL_S)
            started = trio.current_time()
        assert trio.current_time() - started < LEAVING_SECONDS


@pytest.mark.trio
async def test_a_second_node_on_the_same_port_is_refused_and_not_mixed_in() -> None:
    async with node(1) as one:
        host, port = one.addresses[0].split(":")
        with pytest.raises(ConfigInvalid, match="Cannot listen"):
            async with open_host(key(2), host, int(port)):
                pytest.fail("two hosts share a port")


@pytest.mark.trio
async def test_libp2p_says_nothing_on_its_own(capfd: pytest.CaptureFixture[str]) -> None:
    before = list(logging.getLogger().handlers)
    async with node(1, say_goodbye) as one, node(2) as two:
        assert await is_answered(two, one)
    assert logging.getLogger().handlers == before
    assert capfd.readouterr() == ("", "")


@pytest.mark.trio
async def test_an_error_of_the_caller_leaves_the_host_unwrapped() -> None:
    with pytest.raises(ConfigInvalid, match="mine"):
        async with node(1):
            raise ConfigInvalid("mine")
