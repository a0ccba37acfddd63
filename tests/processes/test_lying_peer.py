"""A peer that sends wrong bytes: they are refused and fetched elsewhere, and the incidents report it."""

import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
import trio

from protocol.ids import ChunkId
from protocol.policy.chunks import blob_path, chunk_id
from protocol.wire.frames import Chunk, Want
from protocol.work.messages import FetchPlan, PlanRequest
from swarm_node.p2p.host import open_host
from swarm_node.p2p.link import Link
from tests.processes.light_node import LightNode
from tests.processes.programs import Swarm, until
from tests.processes.rounds import Coordinator, Settings, join, operator_of

pytestmark = pytest.mark.processes

SETTINGS: Settings = {
    "publish": {"chunk_size_bytes": 1024},
    "leases": {"heartbeat_s": 2.0},  # the liar beats only while the test looks, and plans name who beats
}


class Liar:
    """A registered node whose libp2p server flips one byte of every chunk."""

    def __init__(self, join_string: str, blobs: Path) -> None:
        self.node = LightNode(join_string)
        self._blobs = blobs
        self.lies: list[ChunkId] = []
        self._address = ""
        self._up, self._end = threading.Event(), trio.Event()
        self._token: trio.lowlevel.TrioToken | None = None
        self._thread = threading.Thread(target=trio.run, args=(self._serve,), name="liar")
        self._thread.start()
        assert self._up.wait(timeout=60), "the liar's server did not start"

    def appear(self) -> None:
        """Be the peer that everybody should ask."""
        self.node.register((self._address,))

    def plan(self) -> set[str]:
        """Return the kinds of sources that the coordinator's plan names."""
        plan = self.node.call("/v1/plan", PlanRequest(version=1), FetchPlan)
        return {peer.kind for peer in plan.peers}

    def close(self) -> None:
        assert self._token is not None
        self._token.run_sync_soon(self._end.set)
        self._thread.join(timeout=60)
        self.node.close()

    async def _serve(self) -> None:
        async with open_host(self.node.seed, "127.0.0.1", 0) as host:
            host.serve(self._lie)
            self._address, self._token = host.addresses[0], trio.lowlevel.current_trio_token()
            self._up.set()
            await self._end.wait()

    async def _lie(self, link: Link) -> None:
        while True:
            for message in await link.receive():
                if isinstance(message, Want):
                    data = bytearray((self._blobs / blob_path(message.chunk)).read_bytes())
                    data[len(data) // 2] ^= 1
                    self.lies.append(message.chunk)
                    await link.send(Chunk(message.chunk, bytes(data)), stall_s=5.0)


@pytest.fixture
def coordinator(swarm: Swarm, policy: Path) -> Coordinator:
    coordinator = Coordinator(swarm, SETTINGS).start()
    operator_of(swarm, coordinator, policy).publish()
    return coordinator


@pytest.fixture
def liar(coordinator: Coordinator) -> Iterator[Liar]:
    with closing(Liar(coordinator.join_string, coordinator.folder / "blobs")) as made:
        made.appear()
        until("the plan to name the seeder, too", lambda: "seeder" in made.plan())
        yield made


def test_flipped_byte_in_a_chunk_is_refused_refetched_elsewhere_and_its_sender_blamed(
    swarm: Swarm, coordinator: Coordinator, liar: Liar
) -> None:
    home = swarm.folder / "home"
    node = join(swarm, "honest", coordinator.join_string, home=home)
    until("the liar to be asked", lambda: (liar.node.beat(), liar.lies)[1])
    fetched = node.said(r"version fetched version=1 .*from_peers=(\d+) from_seeder=(\d+) from_http=(\d+)")
    assert int(fetched[1]) == 0
    assert int(fetched[2]) + int(fetched[3]) == sum(path.stat().st_size for path in chunks_in(coordinator.folder))
    node.said(rf"peer sent wrong bytes peer={liar.node.key.node_id} chunk=({'|'.join(liar.lies)})")

    until("the incidents to report the lie", lambda: unproven_blames(coordinator))
    assert coordinator.leaderboard()[liar.node.key.node_id]["blamed"] == 0, "its accuser has no validated work yet"
    assert {path.name: path.read_bytes() for path in chunks_in(home)} == {
        path.name: path.read_bytes() for path in chunks_in(coordinator.folder)
    }
    assert all(chunk_id(path.read_bytes()) == path.name for path in chunks_in(home))
    until("nothing half-written to be left", lambda: not [path for path in home.rglob("incoming/*") if path.is_file()])


def chunks_in(folder: Path) -> list[Path]:
    """The chunk files below a coordinator's or a node's folder."""
    return sorted(path for path in folder.rglob("blobs/??/*"))


def unproven_blames(coordinator: Coordinator) -> int:
    """Return how many blames of nodes without validated work the incident list sums up."""
    return sum(incident["count"] for incident in coordinator.status()["incidents"] if not incident["node_id"])
