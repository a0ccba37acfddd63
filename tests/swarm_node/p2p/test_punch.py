"""Hole punching between two hosts on loopback: roles, observers, and what a hostile plan cannot make a host do.

No NAT is between them; tests/processes/test_behind_nat.py has those.
"""

import socket
from collections.abc import Callable
from pathlib import Path

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from protocol import limits
from protocol.wire.signing import NodeKey
from protocol.work.messages import Peer
from swarm_node.p2p.host import Host
from swarm_node.p2p.punch import PunchBudget, ReachReport
from tests.swarm_node.p2p_world import (
    PATIENT_SECONDS,
    as_peer,
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


def caller(host: Host) -> Peer:
    """A node that cannot be dialled, as plans name it among the sources."""
    return Peer(peer_id=host.node_id, address="", kind="peer")


async def until(what: str, look: Callable[[], object]) -> None:
    with trio.move_on_after(PATIENT_SECONDS):
        while not look():
            await wait_all_tasks_blocked(0.01)
        return
    pytest.fail(f"Waited {PATIENT_SECONDS:g} s for {what}.")


@pytest.mark.parametrize("order", [(1, 2), (2, 1)])
async def test_two_that_dial_each_other_at_once_have_one_connection_and_feed_each_other(
    tmp_path: Path, order: tuple[int, int]
) -> None:
    blobs = store(tmp_path / "me")
    first, second = order
    async with node(first, honest(store(tmp_path / "it", VERSION.chunks))) as it, node(second) as me:
        it.punches.follow([as_peer(me)], [])
        me.punches.follow([as_peer(it)], [])
        report = await fetch(VERSION, plan_of(caller(it)), me, blobs)
        assert holds_exactly(blobs, VERSION.chunks)
        assert report.failures == []
        assert [len(host._connections()) for host in (it, me)] == [1, 1]
        assert me.dials.take_report() == ([], []), "who was punched is not known to be dialable"
        await until(
            "both to know that it worked",
            lambda: it.punches.results.has_unreported and me.punches.results.has_unreported,
        )
        assert it.punches.results.report() == ReachReport(punched=(me.node_id,))
        assert me.punches.results.report() == ReachReport(punched=(it.node_id,))
        me.punches.results.confirm(me.punches.results.report())
        assert me.punches.results.report() == ReachReport()
        assert not me.punches.results.has_unreported


@pytest.mark.parametrize("begins", [True, False])
async def test_who_begins_the_handshakes_is_decided_by_the_peer_ids_and_not_by_who_was_dialled(begins: bool) -> None:
    """One side alone dials here, so that the other accepts: in half of the cases against its role."""
    async with node(1, stall) as one, node(2, stall) as two:
        low, high = sorted((one, two), key=lambda host: host.node_id)
        dialling, accepting = (low, high) if begins else (high, low)
        while accepting.punches._budget.spend("127.0.0.1", trio.current_time()):
            pass  # from now on it dials nobody
        accepting.punches.follow([as_peer(dialling)], [])
        await wait_all_tasks_blocked()
        dialling.punches.follow([as_peer(accepting)], [])
        await until("a connection", lambda: one._connections() and two._connections())
        (of_low,), (of_high,) = low._connections(), high._connections()
        assert of_low.muxed_conn.is_initiator
        assert not of_high.muxed_conn.is_initiator


async def test_who_gets_its_plan_later_is_connected_although_the_first_dial_met_nobody_who_knew_of_it() -> None:
    async with node(1, stall) as one, node(2, stall) as two:
        low, high = sorted((one, two), key=lambda host: host.node_id)
        high.punches.follow([as_peer(low)], [])
        await until("a dial, which the other side answers as any", lambda: high.punches._budget._dials)
        await wait_all_tasks_blocked(0.1)
        assert not one._connections()
        low.punches.follow([as_peer(high)], [])
        await until("a connection", lambda: one._connections() and two._connections())


async def test_a_punched_connection_that_is_lost_is_made_again() -> None:
    async with node(1, stall) as one, node(2, stall) as two:
        one.punches.follow([as_peer(two)], [])
        two.punches.follow([as_peer(one)], [])
        await until("a connection", lambda: one._connections() and two._connections())
        before = one._connections()
        await one.disconnect(two.node_id)
        await until("another", lambda: one._connections() and one._connections() != before)


async def test_an_observer_says_where_it_sees_the_listening_port() -> None:
    async with node(1, stall) as observer, node(2, stall) as other, node(3, stall) as me:
        me.punches.follow([], [as_peer(observer), as_peer(other)])
        await until("both answers", lambda: me.punches.results.has_unreported)
        assert me.punches.results.observed == 2 * me.addresses
        me.punches.results.confirm(me.punches.results.report())
        me.punches.follow([], [as_peer(observer), as_peer(other)])  # over the connections that there are
        await wait_all_tasks_blocked(0.1)
        assert [len(host._connections()) for host in (observer, other, me)] == [1, 1, 2]
        assert not me.punches.results.has_unreported


async def test_an_observer_to_whom_there_is_a_connection_is_asked_over_another_one() -> None:
    async with node(1, stall) as observer, node(3, stall) as me:
        link = await me.connect(as_peer(observer), dial_s=PATIENT_SECONDS)
        me.punches.follow([], [as_peer(observer)])
        await until("its answer", lambda: me.punches.results.observed)
        assert me.punches.results.observed == me.addresses
        await until("the second connection to be cut", lambda: len(me._connections()) == 1)
        await link.close()


async def test_an_observer_that_never_answers_costs_nothing() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        async with node(3, stall) as me:
            address = "127.0.0.1:" + str(silent.getsockname()[1])
            me.punches.follow([], [Peer(peer_id=NodeKey(key(9)).node_id, address=address, kind="seeder")])
            await wait_all_tasks_blocked(0.1)
            assert me.punches.results.observed == ()
            assert not me.punches.results.has_unreported


def strangers(count: int, address: Callable[[int], str]) -> list[Peer]:
    return [Peer(peer_id=NodeKey(key(100 + at)).node_id, address=address(at), kind="peer") for at in range(count)]


async def test_a_plan_that_names_a_third_partys_host_many_times_has_it_dialled_at_one_port() -> None:
    with socket.create_server(("127.0.0.1", 0)) as victim, socket.create_server(("127.0.0.1", 0)) as other_port:
        async with node(3, stall) as me:
            ports = [door.getsockname()[1] for door in (victim, other_port)]
            me.punches.follow(strangers(40, lambda at: f"127.0.0.1:{ports[at % 2]}"), [])
            await until("the first dial", lambda: me.punches._budget._dials)
            await wait_all_tasks_blocked(0.2)
            assert len(me.punches.peers) == 1
            assert len(me.punches._budget._dials) == 1
            other_port.settimeout(0)
            with pytest.raises(BlockingIOError):
                other_port.accept()


async def test_new_plans_again_and_again_do_not_have_a_third_party_dialled_more_often() -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        address = "127.0.0.1:" + str(closed.getsockname()[1])
        async with node(3, stall) as me:
            for peer in strangers(3 * limits.PUNCH_DIALS_PER_HOST, lambda _: address):
                me.punches.follow([peer], [])
                await wait_all_tasks_blocked()
            assert len(me.punches._budget._dials) == limits.PUNCH_DIALS_PER_HOST


@pytest.mark.parametrize("address", ["127.0.0.1:22", "127.0.0.1:0", "victim.example:4001", "127.0.0.1:70000"])
async def test_a_plan_cannot_have_other_services_or_names_dialled(address: str) -> None:
    async with node(3, stall) as me:
        me.punches.follow(strangers(1, lambda _: address), [])
        await wait_all_tasks_blocked(0.05)
        assert not me.punches._budget._dials


async def test_a_plan_of_a_coordinator_elsewhere_cannot_have_this_machines_network_dialled() -> None:
    async with node(3, stall) as me:
        me.own_network = False
        me.punches.follow(strangers(1, lambda _: "127.0.0.1:4001"), [])
        me.punches.follow(strangers(1, lambda _: "192.168.1.1:4001"), [])
        await wait_all_tasks_blocked(0.05)
        assert not me.punches._budget._dials


async def test_no_minute_has_more_dials_than_the_budget() -> None:
    budget = PunchBudget()
    assert sum(budget.spend("203.0.113.1", at / 10) for at in range(100)) == limits.PUNCH_DIALS_PER_HOST
    assert not budget.spend("203.0.113.1", 59.9)
    assert budget.spend("203.0.113.1", 60.0)
    budget = PunchBudget()
    assert sum(budget.spend(f"203.0.{at // 250}.{at % 250}", 0.0) for at in range(1000)) == limits.PUNCH_DIALS
    assert not budget.spend("2001:db8::1", 59.0)
    assert sum(PunchBudget().spend("2001:db8::1", 0.0) for _ in range(3)) == 3
