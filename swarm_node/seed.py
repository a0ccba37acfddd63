"""The seeder: serves a folder of chunks over libp2p until it is stopped.

- The coordinator writes the folder, and new chunks are served as soon as they appear. The seeder only reads it, but
  removes a damaged chunk: so the next version that has the chunk writes it again.
- The first JSON line on stdout reports that it is ready, its id and its addresses. Later lines report the peers that
  received chunks, and the bytes sent in its best recent second. No receiver can measure that: a receiver may be limited
  by its own link.
- It ends when stdin reaches its end (the parent has ended) or on SIGINT or SIGTERM, without an error, within 1 s.
"""

import json
import os
import signal
import sys
from contextlib import suppress
from pathlib import Path

import trio

from swarm_node.chunks.blobs import BlobStore
from swarm_node.p2p.host import HostSettings, open_host
from swarm_node.p2p.serve import ChunkServer

SETTINGS = HostSettings(connections_inbound_max=HostSettings.connections_max)
"""The seeder never dials, so children may use all its connections."""

FADING = 0.995
"""Decay of the best second per second with traffic: a slower link is noticed within minutes."""

TOLD_CHANGE = 0.02

SERVED_MAX = 500
"""Peers in one line: a line has at most 64 KiB."""


async def seed(blobs_dir: Path, key_seed: bytes, host: str, port: int) -> None:
    """Serve until stdin ends or a signal comes."""
    with trio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
        async with open_host(key_seed, host, port, SETTINGS) as running, trio.open_nursery() as nursery:
            server = ChunkServer(BlobStore(blobs_dir))
            running.serve(server.handle)
            _report({"peer_id": running.node_id, "addrs": list(running.addresses)})
            nursery.start_soon(_report_served, server)
            nursery.start_soon(_report_best_second, server)
            nursery.start_soon(_end_with_stdin, nursery.cancel_scope)
            async for _ in signals:
                nursery.cancel_scope.cancel()


async def _report_served(server: ChunkServer) -> None:
    """Report the peers that received chunks: at once, for the next version may come soon; then once a second."""
    while True:
        await server.wait_served()
        _report({"served": server.report_served(SERVED_MAX)})
        await trio.sleep(1.0)


async def _report_best_second(server: ChunkServer) -> None:
    """Report the best second so far if it has changed."""
    best = reported = 0.0
    before, since = server.bytes_sent, trio.current_time()
    while True:
        await trio.sleep(1.0)  # the second that is measured
        sent, now = server.bytes_sent, trio.current_time()
        if sent > before:
            best = max((sent - before) / (now - since), FADING * best)
            if abs(best - reported) > TOLD_CHANGE * reported:
                reported = best
                _report({"bytes_per_s": round(best)})
        before, since = sent, now


def _report(what: dict[str, object]) -> None:
    with suppress(BrokenPipeError):  # the parent has ended already, so standard input will end
        os.write(sys.stdout.fileno(), f"{json.dumps(what)}\n".encode())


async def _end_with_stdin(scope: trio.CancelScope) -> None:
    # A thread and a plain read: an event loop would make the parent's end of the stream non-blocking too.
    while await trio.to_thread.run_sync(_read_stdin, abandon_on_cancel=True):
        pass
    scope.cancel()


def _read_stdin() -> bytes:
    return os.read(sys.stdin.fileno(), 4096)
