"""A plan whose nodes are all gone is exchanged for another one while the download goes on."""

from collections import Counter
from collections.abc import Awaitable, Callable
from itertools import accumulate, takewhile
from pathlib import Path
from random import Random

import pytest
import trio
from trio.testing import MockClock

from protocol.errors import Unreachable
from protocol.ids import ChunkId
from protocol.policy.manifest import PolicyManifest
from protocol.wire.signing import NodeKey
from protocol.work.messages import FetchPlan, Peer, PlanRequest
from swarm_node.p2p.download import FIRST_S, LONGEST_S, DownloadProgress, ask_while_alone, pauses_s
from swarm_node.p2p.serve import ChunkServer, ServeLimits
from tests.swarm_node.p2p.test_on_demand import spare_seeder
from tests.swarm_node.p2p_world import (
    Version,
    as_peer,
    as_seeder,
    fetch,
    holds_exactly,
    honest,
    make_version,
    node,
    plan_of,
    store,
)
from tests.swarm_node.versions.test_follower import Round, follows

VERSION, OLD = make_version(24), make_version(1, seed=9)
NOBODY = Peer(peer_id=NodeKey(b"n" * 32).node_id, address="127.0.0.1:1", kind="peer")


class Moved(Round):
    """A round with one plan for the first question and another one from then on; its own files are away."""

    def __init__(self, version: Version, first: FetchPlan, later: FetchPlan) -> None:
        super().__init__(version, NOBODY)
        self._plans = [first, later]

    async def plan(self, request: PlanRequest) -> FetchPlan:
        self.planned = self._plans[min(self.plans, 1)]
        return await super().plan(request)

    def fetcher_for(self, manifest: PolicyManifest) -> Callable[[ChunkId], Awaitable[bytes]]:
        async def origin(chunk: ChunkId) -> bytes:
            await trio.lowlevel.checkpoint()
            raise Unreachable("The coordinator's files are away.")

        return origin


@pytest.mark.trio
@pytest.mark.parametrize("is_large", [False, True], ids=["small swarm", "large swarm"])
async def test_a_node_whose_seeder_has_moved_hears_of_that_within_seconds(tmp_path: Path, is_large: bool) -> None:
    """The node is in a large swarm, where it is knocked at a seeder's door for a minute, too."""
    async with node(1, honest(store(tmp_path / "seeder", VERSION.chunks))) as seeder, node(2) as me:
        here = as_seeder(seeder)
        there = here.model_copy(update={"address": NOBODY.address})
        first, later = plan_of(there), plan_of(here)
        if is_large:
            first, later = (spare_seeder(NOBODY, seeder, help_rate=1e9) for seeder in (there, here))
        world = Moved(VERSION, first, later)
        await follows(world.follower(tmp_path, held=OLD, host=me), VERSION)
    assert world.plans == 2


@pytest.mark.trio
async def test_when_all_are_lost_in_the_middle_the_rest_comes_from_who_is_named_next(tmp_path: Path) -> None:
    """Chunks that came stay, what is on its way from an origin goes on, and both senders are in the report."""
    blobs, full = store(tmp_path / "me"), store(tmp_path / "full", VERSION.chunks)
    half = dict(list(VERSION.chunks.items())[::2])
    asked, came = list[int](), trio.Event()

    async def origin(chunk: ChunkId) -> bytes:
        await trio.sleep_forever()
        raise AssertionError

    def on_progress(progress: DownloadProgress) -> None:
        if progress.chunks_done == len(half):
            came.set()

    async with node(1, honest(full)) as next_one, node(3) as me, trio.open_nursery() as nursery:

        async def another_plan() -> FetchPlan:
            asked.append(len(list(blobs._files())))
            return plan_of(as_peer(next_one))

        async def until_half_came(task_status: trio.TaskStatus[Peer]) -> None:
            server = ChunkServer(store(tmp_path / "half", half), limits=ServeLimits(grace_s=0.05))
            async with node(2, server.handle) as first:
                task_status.started(as_peer(first))
                await came.wait()

        first = await nursery.start(until_half_came)
        report = await fetch(
            VERSION, plan_of(first), me, blobs, origin=origin, another_plan=another_plan, on_progress=on_progress
        )
    assert asked == [len(half)]
    assert holds_exactly(blobs, VERSION.chunks)
    assert set(report.bytes_from_node) == set(report.busy_s) == {first.peer_id, next_one.node_id}
    assert report.bytes_twice == 0


def test_a_thousand_nodes_that_lose_everybody_ask_one_after_the_other() -> None:
    """All of them within seconds, at most half of them in any second, and seldom if that does not help."""
    asked = Counter[int]()
    for number in range(1000):
        for at in takewhile(lambda at: at < 600, accumulate(pauses_s(Random(number)))):
            asked[int(at)] += 1
    assert sum(asked[second] for second in range(5)) >= 1000
    assert max(asked.values()) < 500
    assert sum(asked[second] for second in range(300, 600)) <= 1.1 * 1000 * 300 / LONGEST_S


@pytest.mark.trio
async def test_who_has_company_asks_nothing_and_soon_again_once_it_is_lost(autojump_clock: MockClock) -> None:
    asked: list[float] = []

    async def ask() -> None:
        asked.append(trio.current_time())

    def is_alone() -> bool:
        return not 100 < trio.current_time() < 200

    with trio.move_on_after(210):
        await ask_while_alone(is_alone, ask, Random(1))
    before, after = [at for at in asked if at < 150], [at for at in asked if at > 150]
    assert max(before) <= 100
    assert 200 <= min(after) <= 200 + 2 * FIRST_S
