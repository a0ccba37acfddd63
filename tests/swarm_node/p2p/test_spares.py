"""Peers whom the plan gives no stripes: whatever ends an exchange with one, it is opened again."""

from pathlib import Path

import pytest

from protocol.wire.frames import Farewell
from swarm_node.chunks.arrivals import Arrivals
from swarm_node.p2p.link import Link
from swarm_node.p2p.serve import ChunkServer
from tests.swarm_node.p2p_world import QUICK, as_peer, fetch, holds_exactly, make_version, node, plan_of, store

VERSION = make_version()


@pytest.mark.trio
@pytest.mark.parametrize(
    ("farewell", "times"),
    [(Farewell.IDLE, QUICK.picker.strikes_max), (Farewell.BUSY, QUICK.picker.strikes_max - 1)],
    ids=["idle, which is no failure", "busy"],
)
async def test_a_spare_that_hung_up_says_again_what_it_holds_and_serves_it(
    tmp_path: Path, farewell: Farewell, times: int
) -> None:
    news, farewells = Arrivals(), [farewell] * times
    server = ChunkServer(store(tmp_path / "spare", VERSION.chunks), news)

    async def hang_up_at_first(link: Link) -> None:
        if farewells:
            await link.close(farewells.pop())
        else:
            await server.handle(link)

    blobs = store(tmp_path / "me")
    async with node(1, hang_up_at_first) as spare, node(2) as me:
        plan = plan_of().model_copy(update={"peers": (as_peer(spare),)})
        with news.expecting((), VERSION.chunks):
            report = await fetch(VERSION, plan, me, blobs)
    assert holds_exactly(blobs, VERSION.chunks)
    assert len(report.failures) == (times if farewell is Farewell.BUSY else 0)
