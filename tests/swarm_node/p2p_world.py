"""A small world for the data plane's tests: versions, stores, hosts on loopback, and peers that misbehave."""

import json
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from random import Random

import trio

from protocol.ids import ChunkId
from protocol.policy.chunks import chunk_id, digest, split
from protocol.policy.manifest import FileEntry, PolicyManifest, Sampler
from protocol.wire.frames import Want
from protocol.work.messages import FetchPlan, Peer
from swarm_node.chunks.arrivals import Arrivals
from swarm_node.chunks.blobs import BlobStore
from swarm_node.p2p.download import AnotherPlan, DownloadProgress, FetchReport, FetchRules, Origin, fetch_chunks
from swarm_node.p2p.fetch import ChunkMemory, Deadlines
from swarm_node.p2p.host import Host, HostSettings, open_host
from swarm_node.p2p.link import Link
from swarm_node.p2p.serve import ChunkServer
from swarm_node.picker.sources import PickerRules

CHUNK_SIZE = 16 * 1024

QUICK = FetchRules(
    deadlines=Deadlines(dial_s=5.0, patience_s=2.0, stall_s=1.0, knock_s=0.02),
    picker=PickerRules(ahead_s=0.3, origin_patience_s=0.4, overdue_s=0.5, failure_pause_s=0.02, give_up_s=15.0),
)
"""Deadlines as short as a loaded machine allows."""

PATIENT_SECONDS = 30.0
"""No test of this folder takes longer; a hang is a failure with a place."""

POLL_S = 0.01
"""The pause between two looks: other processes of the test need the processor."""


@dataclass(frozen=True)
class Version:
    """A published policy version and its chunks."""

    manifest: PolicyManifest
    chunks: dict[ChunkId, bytes]


def make_version(chunk_count: int = 24, *, seed: int = 1, chunk_size: int = CHUNK_SIZE) -> Version:
    """One file of so many chunks, the last one short."""
    data = Random(seed).randbytes(chunk_count * chunk_size - 1)
    chunks = {chunk_id(piece): piece for piece in split(data, chunk_size)}
    entry = FileEntry(path="model.safetensors", size_bytes=len(data), digest=digest(data), chunks=tuple(chunks))
    return Version(manifest_of(entry, chunk_size=chunk_size), chunks)


def manifest_of(*files: FileEntry, chunk_size: int, version: int = 1) -> PolicyManifest:
    return PolicyManifest(
        round_id="0" * 64,
        version=version,
        update=0,
        parent=None,
        task="arithmetic",
        sampler=Sampler(temperature=1.0, max_new_tokens=8),
        chunk_size_bytes=chunk_size,
        files=files,
    )


def store(folder: Path, chunks: dict[ChunkId, bytes] | None = None) -> BlobStore:
    """A chunk store with these chunks in it."""
    blobs = BlobStore(folder)
    blobs.clean()
    for chunk, data in (chunks or {}).items():
        blobs.write(chunk, data)
    return blobs


def holds_exactly(blobs: BlobStore, chunks: dict[ChunkId, bytes]) -> bool:
    """Every chunk is there with its true bytes, and nothing else is: no bad chunk, no unfinished file."""
    files = [path for path in blobs.root.rglob("*") if path.is_file()]
    return {ChunkId(path.name): path.read_bytes() for path in files} == chunks


def key(number: int) -> bytes:
    return number.to_bytes(32)


@asynccontextmanager
async def node(
    number: int,
    handler: Callable[[Link], Awaitable[None]] | None = None,
    settings: HostSettings | None = None,
    port: int = 0,
) -> AsyncIterator[Host]:
    """A host on loopback with the given key number, serving with the given handler."""
    async with open_host(key(number), "127.0.0.1", port, settings) as host:
        if handler is not None:
            host.serve(handler)
        yield host


def plan_of(*peers: Peer) -> FetchPlan:
    """A plan that deals the stripes to these, one each."""
    dealt = [peer.model_copy(update={"stripes": (number,)}) for number, peer in enumerate(peers)]
    return FetchPlan(stripes=max(1, len(peers)), peers=tuple(dealt), rate=1e9, hops=1, help_rate=1e9)


def sizes_of(version: Version) -> dict[ChunkId, int]:
    return {chunk: len(data) for chunk, data in version.chunks.items()}


def as_peer(host: Host) -> Peer:
    return Peer(peer_id=host.node_id, address=host.addresses[0], kind="peer")


def as_seeder(host: Host) -> Peer:
    return Peer(peer_id=host.node_id, address=host.addresses[0], kind="seeder")


async def fetch(
    version: Version,
    plan: FetchPlan,
    host: Host,
    blobs: BlobStore,
    *,
    origin: Origin | None = None,
    another_plan: AnotherPlan | None = None,
    on_progress: Callable[[DownloadProgress], None] | None = None,
    arrivals: Arrivals | None = None,
    rules: FetchRules = QUICK,
    memory: ChunkMemory | None = None,
) -> FetchReport:
    """Fetch all of a version that is not yet in the store."""
    with trio.fail_after(PATIENT_SECONDS):
        return await fetch_chunks(
            sizes_of(version),
            plan,
            host=host,
            blobs=blobs,
            arrivals=arrivals or Arrivals(),
            rng=Random(3),
            origin=origin,
            another_plan=another_plan,
            on_progress=on_progress,
            rules=rules,
            memory=memory,
        )


async def next_want(link: Link) -> Want:
    """Return what the other side asks for next."""
    while True:
        for message in await link.receive():
            assert isinstance(message, Want)
            return message


async def stall(link: Link) -> None:
    """Accept a stream and never answer."""
    await trio.sleep_forever()


async def refuse(port: int, times: int) -> None:
    """Take so many connections on this port, and close each without a word: what a full host does."""
    with trio.socket.socket() as door:
        door.setsockopt(trio.socket.SOL_SOCKET, trio.socket.SO_REUSEADDR, 1)
        await door.bind(("127.0.0.1", port))
        door.listen()
        for _ in range(times):
            caller, _ = await door.accept()
            caller.close()


SERVER = """
import sys, trio
from pathlib import Path
from swarm_node.seed import seed
trio.run(seed, Path(sys.argv[1]), bytes.fromhex(sys.argv[2]), "127.0.0.1", 0)
"""


@contextmanager
def server_process(blobs: BlobStore, number: int) -> Iterator[tuple[subprocess.Popen[str], Peer]]:
    """A seeder in a process of its own, introduced as a peer."""
    command = [sys.executable, "-P", "-c", SERVER, str(blobs.root), key(number).hex()]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True) as process:
        try:
            assert process.stdout is not None
            ready = json.loads(process.stdout.readline())
            yield process, Peer(peer_id=ready["peer_id"], address=ready["addrs"][0], kind="peer")
        finally:
            process.kill()


def honest(blobs: BlobStore) -> Callable[[Link], Awaitable[None]]:
    return ChunkServer(blobs).handle
