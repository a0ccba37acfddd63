"""The seeder: serve a folder of chunks over libp2p until told to stop.

- It only reads the folder; the coordinator writes it, and new chunks are served as soon as they appear.
- The first JSON line on stdout says that it is ready, who it is and where it listens; later ones, how much it has sent
  in its best second of late. No receiver sees that: what it gets may be all that its own link takes.
- It ends when stdin reaches its end (the parent is gone) or on SIGINT or SIGTERM, quietly, within a second.
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
"""It dials nobody, and may have as many children as it takes connections."""

FADING = 0.995
"""Of the best second, with every other in which something is sent: a link that got narrower is noticed in minutes."""

TOLD_CHANGE = 0.02

SERVED_MAX = 500
"""Peers in one line: a line has at most 64 KiB."""


async def seed(blobs_dir: Path, key_seed: bytes, host: str, port: int) -> None:
    """Serve until stdin ends or a signal comes."""
    with trio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
        async with open_host(key_seed, host, port, SETTINGS) as running, trio.open_nursery() as nursery:
            server = ChunkServer(BlobStore(blobs_dir))
            running.serve(server.handle)
            _tell({"peer_id": running.node_id, "addrs": list(running.addresses)})
            nursery.start_soon(_report_deliveries, server)
            nursery.start_soon(_end_with_stdin, nursery.cancel_scope)
            async for _ in signals:
                nursery.cancel_scope.cancel()


async def _report_deliveries(server: ChunkServer) -> None:
    """Report every second to whom chunks were delivered, and the best second so far if it has changed."""
    best = told = 0.0
    before, since = server.bytes_sent, trio.current_time()
    while True:
        await trio.sleep(1.0)  # the second that is measured
        sent, now = server.bytes_sent, trio.current_time()
        if served := server.report_served(SERVED_MAX):
            _tell({"served": served})
        if sent > before:
            best = max((sent - before) / (now - since), FADING * best)
            if abs(best - told) > TOLD_CHANGE * told:
                told = best
                _tell({"bytes_per_s": round(best)})
        before, since = sent, now


def _tell(what: dict[str, object]) -> None:
    with suppress(BrokenPipeError):  # the parent is gone already, and standard input will say so
        os.write(sys.stdout.fileno(), f"{json.dumps(what)}\n".encode())


async def _end_with_stdin(scope: trio.CancelScope) -> None:
    # A thread and a plain read: an event loop would make the parent's end of the stream non-blocking too.
    while await trio.to_thread.run_sync(_read_stdin, abandon_on_cancel=True):
        pass
    scope.cancel()


def _read_stdin() -> bytes:
    return os.read(sys.stdin.fileno(), 4096)
