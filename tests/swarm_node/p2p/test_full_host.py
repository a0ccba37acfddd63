"""A host that callers have filled: newcomers find the door closed, and it still reaches those whom it dials."""

from contextlib import AsyncExitStack

import pytest
import trio
from libp2p.peer.id import ID
from trio.testing import wait_all_tasks_blocked

from protocol.errors import PeerFault
from protocol.wire.frames import Bye, Farewell
from swarm_node.p2p.host import Host, HostSettings
from swarm_node.p2p.link import Link
from swarm_node.p2p.yamux_frames import INITIAL_WINDOW_BYTES
from swarm_node.seed import SETTINGS as SEEDER
from tests.swarm_node.p2p_world import PATIENT_SECONDS, as_peer, node, stall

ROOM = HostSettings(connections_max=4, connections_inbound_max=3)
DIAL_S = 5.0


async def say_goodbye(link: Link) -> None:
    await link.close()


async def is_answered(host: Host, other: Host) -> bool:
    link = await host.connect(as_peer(other), dial_s=DIAL_S)
    with trio.fail_after(PATIENT_SECONDS):
        while not (messages := await link.receive()):
            pass
    return messages == [Bye(Farewell.DONE)]


@pytest.mark.trio
async def test_however_many_call_a_host_it_can_dial_its_parents() -> None:
    async with AsyncExitStack() as world:
        mine = await world.enter_async_context(node(1, stall, ROOM))
        parent = await world.enter_async_context(node(2, say_goodbye))
        callers = [await world.enter_async_context(node(10 + number)) for number in range(ROOM.connections_max)]
        let_in = 0
        for caller in callers:
            try:
                await caller.connect(as_peer(mine), dial_s=DIAL_S)
                let_in += 1
            except PeerFault:
                assert let_in == ROOM.connections_inbound_max
        assert let_in == len(mine.connected()) == ROOM.connections_inbound_max
        assert await is_answered(mine, parent)


@pytest.mark.trio
async def test_however_many_streams_callers_open_from_however_many_addresses_it_has_one_for_its_parents() -> None:
    """An owner of a few IPv6 networks calls from as many addresses; here one may have everything."""
    streams = 8
    room = HostSettings(
        receive_max_bytes=streams * INITIAL_WINDOW_BYTES,
        receive_callers_bytes=6 * INITIAL_WINDOW_BYTES,
        streams_max=streams,
    )
    async with node(1, stall, room) as mine, node(2, say_goodbye) as parent, node(3) as caller:
        await caller.connect(as_peer(mine), dial_s=DIAL_S)
        for _ in range(2 * streams):
            await caller._swarm.new_stream(ID.from_base58(mine.node_id))
        with trio.fail_after(PATIENT_SECONDS):
            while mine.budget.left > 2 * INITIAL_WINDOW_BYTES:
                await wait_all_tasks_blocked(0.01)
        assert await is_answered(mine, parent)


def test_a_quarter_is_kept_for_those_whom_a_node_dials_and_a_seeder_dials_nobody() -> None:
    ours = HostSettings()
    assert 4 * ours.connections_inbound_max == 3 * ours.connections_max
    assert 4 * ours.receive_callers_bytes == 3 * ours.receive_max_bytes
    assert 4 * (ours.receive_callers_bytes // INITIAL_WINDOW_BYTES) == 3 * ours.streams_max
    assert SEEDER.connections_inbound_max == SEEDER.connections_max == ours.connections_max
