"""js-libp2p and ours on one wire: chunks cross both ways, and nobody passes for somebody else.

- The other side is `js/`, written from docs/protocol.md alone; it runs in Node, from a copy outside the tree.
- They may be skipped: without Node, or where npm's registry cannot be reached.
"""

import json
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import pytest
import trio

from protocol.ids import ChunkId
from protocol.limits import CHUNK_MAX_BYTES
from protocol.wire.signing import NodeKey
from protocol.work.messages import Peer
from swarm_node.chunks.arrivals import Arrivals
from swarm_node.p2p.download import fetch_chunks
from swarm_node.p2p.noise import WrongPeer
from swarm_node.p2p.serve import ChunkServer
from tests import npm
from tests.processes.programs import PATIENCE_S, script
from tests.swarm_node.p2p_world import holds_exactly, key, make_version, node, plan_of, sizes_of, store

pytestmark = pytest.mark.processes

JS = Path(__file__).with_name("js")
VERSION = make_version(40)
"""More chunks than may be asked for at once."""
LARGE = make_version(2, chunk_size=CHUNK_MAX_BYTES)
"""Chunks that are many windows long."""
CHUNKS = VERSION.chunks | LARGE.chunks
NOBODYS, TAKEN_BACK = ChunkId("ab" * 32), ChunkId("cd" * 32)


@pytest.fixture(scope="module")
def js(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The script, beside the packages of its lock file.

    Only the other implementation is skipped, where this machine cannot have it; ours is tested everywhere.
    """
    return npm.install(JS, tmp_path_factory.mktemp("js") / "peer") / "peer.js"


@contextmanager
def serving(*command: str) -> Iterator[dict[str, Any]]:
    """A program that serves until its standard input ends, and the first thing it says."""
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as process:
        try:
            assert process.stdout is not None
            yield json.loads(process.stdout.readline())
            process.communicate(timeout=PATIENCE_S)
            assert process.returncode == 0
        finally:
            process.kill()


@contextmanager
def our_seeder(folder: Path) -> Iterator[Peer]:
    """`swarm-node seed` with all chunks."""
    blobs = store(folder / "blobs", CHUNKS)
    command = ("seed", "--blobs", str(blobs.root), "--key", str(folder / "seeder.key"))
    with serving(script("swarm-node"), *command) as said:
        yield Peer(peer_id=said["peer_id"], address=said["addrs"][0], kind="seeder")


@contextmanager
def their_server(js: Path, blobs: Path) -> Iterator[Peer]:
    """The js peer with the chunks below a folder."""
    with serving("node", str(js), "serve", str(blobs)) as said:
        _, _, host, _, port, *_ = said["address"].split("/")
        yield Peer(peer_id=said["peer"], address=f"{host}:{port}", kind="peer")


def fetching(js: Path, peer: Peer, *arguments: str) -> list[str]:
    """The command with which the js peer fetches."""
    host, _, port = peer.address.partition(":")
    return ["node", str(js), "fetch", f"/ip4/{host}/tcp/{port}/p2p/{peer.peer_id}", *arguments]


def test_js_fetches_every_chunk_of_our_seeder_and_is_told_what_is_not_there(js: Path, tmp_path: Path) -> None:
    with our_seeder(tmp_path) as seeder:
        command = fetching(js, seeder, *CHUNKS, NOBODYS, "--cancel", TAKEN_BACK)
        ran = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S)
    assert ran.returncode == 0, ran.stderr
    *answers, end = map(json.loads, ran.stdout.splitlines())
    assert {answer["name"]: answer.get("bytes") or answer["rejected"] for answer in answers} == {
        **{chunk: len(data) for chunk, data in CHUNKS.items()},
        NOBODYS: "absent",
        TAKEN_BACK: "cancelled",
    }
    assert end == {"farewell": "done", "told": []}


@pytest.mark.trio
async def test_js_hears_what_we_hold_and_waits_for_what_is_on_its_way_to_us(js: Path, tmp_path: Path) -> None:
    (held, first), (late, data), *_ = VERSION.chunks.items()
    blobs, arrivals = store(tmp_path, {held: first}), Arrivals()
    async with node(1, ChunkServer(blobs, arrivals).handle) as host:
        us = Peer(peer_id=host.node_id, address=host.addresses[0], kind="peer")
        with arrivals.expecting([late], [held]), trio.fail_after(PATIENCE_S):
            async with trio.open_nursery() as nursery:
                run = partial(trio.run_process, fetching(js, us, late, held), stdout=subprocess.PIPE)
                process = await nursery.start(run)
                assert json.loads(await process.stdout.receive_some()) == {"name": held, "bytes": len(first)}
                blobs.write(late, data)
                arrivals.arrived(late, data)
                rest = b"".join([piece async for piece in process.stdout])
                answer, end = map(json.loads, rest.splitlines())
                assert answer == {"name": late, "bytes": len(data)}
                assert end["farewell"] == "done"
                assert held in end["told"]


@pytest.mark.trio
@pytest.mark.parametrize("version", [VERSION, LARGE], ids=["many chunks", "large chunks"])
async def test_we_fetch_every_chunk_from_js(js: Path, tmp_path: Path, version: Any) -> None:
    mine = store(tmp_path / "mine")
    with their_server(js, store(tmp_path / "theirs", version.chunks).root) as peer:
        async with node(1) as host:
            fetch = fetch_chunks(
                sizes_of(version), plan_of(peer), host=host, blobs=mine, arrivals=Arrivals(), rng=Random(1)
            )
            with trio.fail_after(PATIENCE_S):
                report = await fetch
    assert holds_exactly(mine, version.chunks)
    assert report.bytes_from == {"peer": sum(sizes_of(version).values())}


@pytest.mark.trio
async def test_js_with_another_key_at_a_peers_address_is_refused(js: Path, tmp_path: Path) -> None:
    with their_server(js, tmp_path) as peer:
        async with node(1) as host:
            with pytest.raises(WrongPeer):
                await host.connect(peer.model_copy(update={"peer_id": NodeKey(key(2)).node_id}), dial_s=PATIENCE_S)
            assert not host.connected()


def test_js_refuses_us_where_it_expects_somebody_else(js: Path, tmp_path: Path) -> None:
    with our_seeder(tmp_path) as seeder:
        command = fetching(js, seeder.model_copy(update={"peer_id": NodeKey(key(2)).node_id}), *CHUNKS)
        ran = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S)
    assert ran.returncode != 0
    assert ran.stdout == ""
    assert "does not match expected remote identity key" in ran.stderr
