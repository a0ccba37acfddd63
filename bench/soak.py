"""Two days of a node's connections in minutes: what they cost must be given back.

- The node is a process of its own, with the shipped host, downloader and server; this process plays its neighbours.
- The rate is that of a swarm of a hundred on equal links. The planner gives each node 34 upstreams and makes it one of
  33 others, 56 neighbours in all; a version every ten minutes is 288 in 48 hours, and connections without a stream are
  cut after three. So: 288 versions, 16,128 connections, 19,296 streams. `ARGS="--hours 480"` takes longer.
- One neighbour in ten asks and resets its stream, one takes its WANTs back, one asks and never reads; one of fifty
  streams that the node opens is reset. Half of the connections are ended by the neighbour, half by the node.
- What the node holds is measured after every version, when nobody is connected. The first quarter, which fills caches,
  is left out of the trends; counts are compared hour with hour.
"""

import argparse
import gc
import json
import subprocess
import sys
import tempfile
from contextlib import AsyncExitStack, suppress
from functools import partial
from pathlib import Path
from random import Random
from statistics import median
from typing import IO, Any

import numpy as np
import psutil
import trio

from bench.harness import Bench, quick_from_environment
from protocol.errors import PeerFault
from protocol.ids import ChunkId, NodeId
from protocol.limits import HOST_RECEIVE_MAX_BYTES, KIB, MIB
from protocol.policy.chunks import chunk_id
from protocol.wire.frames import Bye, Cancel, Chunk, Reject, Want
from protocol.work.messages import FetchPlan, Peer
from swarm_node.chunks.arrivals import Arrivals
from swarm_node.chunks.blobs import BlobStore
from swarm_node.p2p.download import fetch_chunks
from swarm_node.p2p.host import Host, open_host
from swarm_node.p2p.link import Link
from swarm_node.p2p.serve import ChunkServer

NEIGHBOURS, UPSTREAMS, ASKERS = 56, 34, 33
VERSIONS_PER_HOUR = 6
CHUNKS_PER_VERSION = 64
CHUNK_BYTES = 16 * KIB
WANTS = 4
PATIENCE_S = 60.0
LINGER_S = 0.2
"""libp2p keeps a closed connection for half of this."""
OBJECTS_OF = ("swarm_node.", "protocol.", "libp2p.")
"""Objects of other kinds come and go: trio alone keeps up to a thousand deadlines that have passed."""
GROWTH_MAX_MIB = 4.0
"""A leak of 400 bytes per connection would be more than this in two days."""

Footprint = dict[str, float]


def chunks_of(version: int) -> dict[ChunkId, bytes]:
    """Return the chunks of a version, which are the same in both processes."""
    rng = Random(version)
    pieces = (rng.randbytes(CHUNK_BYTES) for _ in range(CHUNKS_PER_VERSION))
    return {chunk_id(piece): piece for piece in pieces}


async def be_the_node(folder: Path) -> None:
    """Fetch each version that is named on standard input, and serve it; an empty name is the end of a version."""
    blobs, arrivals = BlobStore(folder), Arrivals()
    blobs.clean()
    async with open_host(bytes(32), "127.0.0.1", 0) as host:
        host.serve(ChunkServer(blobs, arrivals).handle)
        _say({"peer_id": host.node_id, "address": host.addresses[0], "kind": "peer"})
        plan = FetchPlan.model_validate_json(sys.stdin.readline())
        while order := await trio.to_thread.run_sync(sys.stdin.readline):
            if version := order.strip():
                sizes = dict.fromkeys(chunks_of(int(version)), CHUNK_BYTES)
                rng = Random(int(version))
                report = await fetch_chunks(sizes, plan, host=host, blobs=blobs, arrivals=arrivals, rng=rng)
                await trio.to_thread.run_sync(blobs.prune, sizes)
                _say({"streams failed": len(report.failures)})
            else:
                await host.cut_all()
                await trio.sleep(LINGER_S)
                _say(footprint(host))


def footprint(host: Host) -> Footprint:
    """Return the figures that must not grow."""
    gc.collect()
    me = psutil.Process()
    return {
        "memory": me.memory_info().rss / MIB,
        "descriptors": me.num_fds(),
        "tasks": trio.lowlevel.current_statistics().tasks_living,
        "objects": sum(str(type(thing).__module__).startswith(OBJECTS_OF) for thing in gc.get_objects()),
        "connected": len(host.connected()),
        "window bytes": HOST_RECEIVE_MAX_BYTES - host.budget.left,
    }


def _say(what: object) -> None:
    print(json.dumps(what), flush=True)


class Neighbours:
    """All that the node has to do with in one version."""

    def __init__(self, hosts: list[Host], blobs: BlobStore, node: Peer, rng: Random) -> None:
        self._hosts, self._node, self._node_id, self._rng = hosts, node, NodeId(node.peer_id), rng
        self.connections = self.streams = 0
        for host in hosts[:UPSTREAMS]:
            host.serve(partial(self._serve, ChunkServer(blobs)))

    def plan(self) -> FetchPlan:
        """The upstreams, with a stripe for each."""
        upstreams = enumerate(self._hosts[:UPSTREAMS])
        peers = [Peer(peer_id=h.node_id, address=h.addresses[0], kind="peer", stripes=(n,)) for n, h in upstreams]
        return FetchPlan(stripes=UPSTREAMS, peers=tuple(peers), rate=1e9, hops=1, help_rate=1e9)

    async def ask(self, version: int) -> None:
        """Come as those who are fed by the node, all at once."""
        names = list(chunks_of(version))
        async with trio.open_nursery() as nursery:
            for host in self._hosts[-ASKERS:]:
                nursery.start_soon(self._ask, host, self._rng.sample(names, WANTS), self._rng.random())

    async def leave(self) -> None:
        """Half of the neighbours end their connection; the others leave that to the node."""
        there = [host for host in self._hosts if self._node_id in host.connected()]
        self.connections += len(there)
        for host in there[::2]:
            await host.disconnect(self._node_id)

    async def _serve(self, server: ChunkServer, link: Link) -> None:
        self.streams += 1
        if self._rng.random() < 0.02:
            await link.abort()
        else:
            await server.handle(link)

    async def _ask(self, host: Host, names: list[ChunkId], manner: float) -> None:
        self.streams += 1
        with suppress(PeerFault):
            link = await host.connect(self._node, dial_s=PATIENCE_S)
            for name in names:
                await link.send(Want(name), stall_s=PATIENCE_S)
            if manner < 0.1:
                await link.abort()
            elif manner < 0.9:
                if manner < 0.2:
                    for name in names:
                        await link.send(Cancel(name), stall_s=PATIENCE_S)
                await _answers(link)
                await link.close()


async def _answers(link: Link) -> None:
    """Wait until every WANT is answered, or the node leaves."""
    open_wants = WANTS
    while open_wants > 0:
        for message in await link.receive():
            open_wants -= isinstance(message, Chunk | Reject)
            if isinstance(message, Bye):
                return


class Node:
    """The node's process, from outside."""

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        self._orders: IO[str] = process.stdin
        self._answers: IO[str] = process.stdout

    def tell(self, order: str) -> None:
        print(order, file=self._orders, flush=True)

    async def answer(self) -> Any:
        line = await trio.to_thread.run_sync(self._answers.readline)
        if not line:
            raise RuntimeError("the node's process has ended")
        return json.loads(line)


async def soak(node: Node, hours: int, folder: Path) -> tuple[list[Footprint], Neighbours]:
    """The footprints after each version."""
    blobs, answers = BlobStore(folder), []
    blobs.clean()
    async with AsyncExitStack() as stack:
        keys = [(number + 1).to_bytes(32) for number in range(NEIGHBOURS)]
        hosts = [await stack.enter_async_context(open_host(key, "127.0.0.1", 0)) for key in keys]
        neighbours = Neighbours(hosts, blobs, Peer.model_validate(await node.answer()), Random(1))
        node.tell(neighbours.plan().model_dump_json())
        for version in range(1, VERSIONS_PER_HOUR * hours + 1):
            for chunk, data in chunks_of(version).items():
                blobs.write(chunk, data)
            node.tell(str(version))
            async with trio.open_nursery() as nursery:
                nursery.start_soon(neighbours.ask, version)
                await node.answer()
            await neighbours.leave()
            node.tell("")
            answers.append(await node.answer())
            blobs.prune(())
            if version % VERSIONS_PER_HOUR == 0:
                figures = ", ".join(f"{value:,.0f} {what}" for what, value in answers[-1].items())
                print(
                    f"hour {version // VERSIONS_PER_HOUR:2}: {neighbours.connections} connections; {figures}",
                    flush=True,
                )
    return answers, neighbours


def judge(bench: Bench, footprints: list[Footprint]) -> None:
    """Peaks and medians, the slope of memory, and the last hour against that after the first quarter."""
    for then in footprints:
        for what, value in then.items():
            bench.measure(what, value, unit="MiB" if what == "memory" else "")
    steady = footprints[len(footprints) // 4 :]
    hours = np.arange(len(steady)) / VERSIONS_PER_HOUR
    slope = np.polyfit(hours, [then["memory"] for then in steady], 1)[0]
    bench.measure("memory, slope per hour", KIB * float(slope), unit="KiB")
    first, last = steady[:VERSIONS_PER_HOUR], steady[-VERSIONS_PER_HOUR:]
    for what in footprints[0]:
        began, ended = (median(then[what] for then in hour) for hour in (first, last))
        bench.goal(f"{what}: grown by", ended - began, at_most=GROWTH_MAX_MIB if what == "memory" else 0.0)


def main() -> int:
    """Measure, print and judge."""
    parser = argparse.ArgumentParser(prog="bench.soak")
    quick = quick_from_environment()
    parser.add_argument("--hours", type=int, default=4 if quick else 48)
    parser.add_argument("--node", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.node is not None:
        trio.run(be_the_node, options.node)
        return 0
    bench = Bench("soak", inputs={"hours": options.hours, "neighbours": NEIGHBOURS}, quick=quick)
    command, pipe = [sys.executable, "-P", "-m", "bench.soak", "--node"], subprocess.PIPE
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with subprocess.Popen([*command, str(folder / "node")], stdin=pipe, stdout=pipe, text=True) as process:
            footprints, neighbours = trio.run(soak, Node(process), options.hours, folder / "neighbours")
    bench.measure("connections", neighbours.connections)
    bench.measure("streams", neighbours.streams)
    judge(bench, footprints)
    return bench.finish()


if __name__ == "__main__":
    raise SystemExit(main())
