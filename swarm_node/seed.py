"""The seeder: serve a folder of chunks over libp2p until told to stop.

- It only reads the folder; the coordinator writes it, and new chunks are served as soon as they appear.
- One JSON line on stdout says that it is ready, who it is and where it listens.
- It ends when stdin reaches its end (the parent is gone) or on SIGINT or SIGTERM, quietly, within a second.
"""

import json
import os
import signal
import sys
from contextlib import suppress
from pathlib import Path

import trio

from swarm_node.blobs import BlobStore
from swarm_node.p2p.host import open_host
from swarm_node.p2p.serve import ChunkServer


async def seed(blobs_dir: Path, key_seed: bytes, host: str, port: int) -> None:
    """Serve until stdin ends or a signal comes."""
    with trio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
        async with open_host(key_seed, host, port) as running, trio.open_nursery() as nursery:
            running.serve(ChunkServer(BlobStore(blobs_dir)).handle)
            with suppress(BrokenPipeError):  # the parent is gone already, and standard input will say so
                ready = json.dumps({"peer_id": running.node_id, "addrs": list(running.addresses)})
                os.write(sys.stdout.fileno(), f"{ready}\n".encode())
            nursery.start_soon(_end_with_stdin, nursery.cancel_scope)
            async for _ in signals:
                nursery.cancel_scope.cancel()


async def _end_with_stdin(scope: trio.CancelScope) -> None:
    # A thread and a plain read: an event loop would make the parent's end of the stream non-blocking too.
    while await trio.to_thread.run_sync(_read_stdin, abandon_on_cancel=True):
        pass
    scope.cancel()


def _read_stdin() -> bytes:
    return os.read(sys.stdin.fileno(), 4096)
