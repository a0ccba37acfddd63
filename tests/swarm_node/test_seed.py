"""The seeder as a process: says that it is ready, serves new chunks at once, and ends quietly when told."""

import json
import signal
import subprocess
from pathlib import Path

import pytest
import trio

from protocol.wire.frames import Chunk, Want
from protocol.wire.signing import NodeKey
from tests.swarm_node.p2p_world import key, make_version, node, server_process, store

END_SECONDS = 10.0
"""One, and more for a machine that has other work; waiting for the peer would take two minutes."""
VERSION = make_version(chunk_count=2)

pytestmark = pytest.mark.processes


@pytest.mark.trio
async def test_a_seeder_serves_a_chunk_that_is_published_while_it_runs(tmp_path: Path) -> None:
    blobs = store(tmp_path)
    with server_process(blobs, 5) as (_, entry):
        assert entry.peer_id == NodeKey(key(5)).node_id
        for chunk, data in VERSION.chunks.items():
            blobs.write(chunk, data)
        async with node(6) as me:
            link = await me.connect(entry, dial_s=5.0)
            for chunk, data in VERSION.chunks.items():
                await link.send(Want(chunk), stall_s=5.0)
                while not (messages := await link.receive()):
                    pass
                assert messages == [Chunk(chunk, data)]


@pytest.mark.trio
async def test_a_seeder_reports_to_whom_it_delivered_and_what_left_in_its_best_second(tmp_path: Path) -> None:
    blobs = store(tmp_path)
    for chunk, data in VERSION.chunks.items():
        blobs.write(chunk, data)
    with server_process(blobs, 5) as (process, entry):
        async with node(6) as me:
            link = await me.connect(entry, dial_s=5.0)
            for chunk in VERSION.chunks:
                await link.send(Want(chunk), stall_s=5.0)
                while not await link.receive():
                    pass
            name = me.node_id
        assert process.stdout is not None
        reports = [json.loads(await trio.to_thread.run_sync(process.stdout.readline)) for _ in range(2)]
        assert reports[0] == {"served": [name]}
        assert 0 < reports[1]["bytes_per_s"] <= sum(map(len, VERSION.chunks.values()))


def end_of_stdin(process: subprocess.Popen[str]) -> None:
    assert process.stdin is not None
    process.stdin.close()


def interrupt(process: subprocess.Popen[str]) -> None:
    process.send_signal(signal.SIGINT)


@pytest.mark.trio
@pytest.mark.parametrize("end", [end_of_stdin, interrupt, subprocess.Popen.terminate])
async def test_a_seeder_with_a_busy_peer_ends_at_once_and_without_a_word(tmp_path: Path, end: object) -> None:
    assert callable(end)
    with server_process(store(tmp_path), 5) as (process, entry):
        async with node(6) as me:
            await me.connect(entry, dial_s=5.0)
            end(process)
            assert process.wait(END_SECONDS) == 0
            assert process.stderr is not None
            assert process.stderr.read() == ""
