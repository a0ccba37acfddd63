"""Connections of the seeder in a large swarm: for those whom it feeds, and for others while they need it."""

from collections.abc import Awaitable, Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from protocol.work.messages import FetchPlan, Peer
from swarm_node.p2p.link import Link
from tests.swarm_node.p2p_world import (
    PATIENT_SECONDS,
    QUICK,
    as_peer,
    as_seeder,
    fetch,
    holds_exactly,
    honest,
    make_version,
    node,
    plan_of,
    refuse,
    stall,
    store,
)

pytestmark = pytest.mark.trio

VERSION = make_version()
UNHURRIED = replace(QUICK, deadlines=replace(QUICK.deadlines, patience_s=PATIENT_SECONDS))
"""Long enough for a peer that stalls, so that only refusals could make anybody give the seeder up."""
PATIENT = replace(QUICK.picker, ahead_s=PATIENT_SECONDS, overdue_s=PATIENT_SECONDS, last_overdue_s=PATIENT_SECONDS)
NEVER_LATE = replace(UNHURRIED, picker=PATIENT)
"""No parent is late on however busy a machine, and so nobody else is asked for what is its."""
SIZE = sum(map(len, VERSION.chunks.values()))


def spare_seeder(parent: Peer, seeder: Peer, *, help_rate: float) -> FetchPlan:
    """All stripes are the parent's; of the seeder no more is to be asked than so many bytes per second, 0 freely."""
    plan = plan_of(parent)
    return plan.model_copy(update={"peers": (*plan.peers, seeder), "help_rate": help_rate})


@pytest.mark.parametrize(("help_rate", "connects"), [(1.0, False), (0.0, True)], ids=["large swarm", "small swarm"])
async def test_a_seeder_that_feeds_nothing_of_the_plan_is_connected_to_in_a_small_swarm_only(
    tmp_path: Path, help_rate: float, connects: bool
) -> None:
    full = store(tmp_path / "full", VERSION.chunks)
    blobs = store(tmp_path / "me")
    async with node(1, honest(full)) as seeder, node(2, honest(full)) as parent, node(3) as me:
        plan = spare_seeder(as_peer(parent), as_seeder(seeder), help_rate=help_rate)
        report = await fetch(VERSION, plan, me, blobs, rules=NEVER_LATE)
        assert (seeder.node_id in me.connected() | me.dials._under_way.keys()) is connects
    assert holds_exactly(blobs, VERSION.chunks)
    # In a small swarm a seeder that is there before the parent may have been asked for the first chunk.
    assert connects or report.bytes_from["peer"] == SIZE
    assert report.bytes_from["peer"] + report.bytes_from["seeder"] == SIZE


async def test_it_is_connected_to_when_a_parent_is_late(tmp_path: Path) -> None:
    blobs, full = store(tmp_path / "me"), store(tmp_path / "full", VERSION.chunks)
    async with node(1, honest(full)) as seeder, node(2, stall) as parent, node(3) as me:
        plan = spare_seeder(as_peer(parent), as_seeder(seeder), help_rate=1e9)
        report = await fetch(VERSION, plan, me, blobs, rules=UNHURRIED)
    assert holds_exactly(blobs, VERSION.chunks)
    assert report.bytes_from["seeder"] == SIZE


async def test_a_seeder_that_is_full_for_a_while_is_not_given_up(tmp_path: Path) -> None:
    blobs = store(tmp_path / "me")
    handler: Callable[[Link], Awaitable[None]] = honest(store(tmp_path / "full", VERSION.chunks))
    async with node(1, handler) as seeder:
        introduced = as_seeder(seeder)
    port = int(introduced.address.rpartition(":")[2])
    async with node(2, stall) as parent, node(3) as me, trio.open_nursery() as nursery:
        plan = spare_seeder(as_peer(parent), introduced, help_rate=1e9)
        nursery.start_soon(partial(fetch, VERSION, plan, me, blobs, rules=UNHURRIED))
        await refuse(port, 2 * QUICK.picker.strikes_max)
        async with node(1, handler, port=port):
            with trio.fail_after(PATIENT_SECONDS):
                while not holds_exactly(blobs, VERSION.chunks):
                    await wait_all_tasks_blocked(0.01)
