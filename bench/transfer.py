"""Speed of chunks from node to node over libp2p with Noise, and its CPU cost on either side.

- Sender and receiver are two processes on loopback; one chunk is sent again and again from memory, several WANTs are
  open, each is verified on arrival. So it is a node's host, muxer and frames that are measured, and neither its chunk
  store nor its picker: nothing is read from a disk or written to one.
  Round by round the same is done by stock py-libp2p and by plain asyncio TCP.
- CPU-seconds are those of the process from the first WANT to the last chunk, start-up not counted.
"""

import asyncio
import json
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from random import Random
from typing import Any

import trio

from bench.harness import Bench, no_options, quick_from_environment
from protocol.limits import MIB
from protocol.policy.chunks import chunk_id, verify
from protocol.wire.frames import Chunk, FrameReader, Message, Want, encode
from protocol.work.messages import Peer

CHUNK_BYTES = 4 * MIB
DATA = Random(1).randbytes(CHUNK_BYTES)
NAME = chunk_id(DATA)
WANTS = 4
STALL_S = 60.0
KEYS = {"send": bytes([1]) * 32, "receive": bytes([2]) * 32}
PROTOCOL = "/echo-swarm/bench/1"

Send = Callable[[Message], Awaitable[None]]
Receive = Callable[[], Awaitable[list[Message]]]


class Meter:
    """Seconds and CPU-seconds since the first WANT."""

    def __init__(self) -> None:
        self._wall, self._cpu = time.perf_counter(), time.process_time()

    def report(self) -> None:
        """Tell the parent process."""
        figures = {"seconds": time.perf_counter() - self._wall, "cpu_seconds": time.process_time() - self._cpu}
        print(json.dumps(figures), flush=True)


async def answer(send: Send, receive: Receive, chunks: int) -> None:
    """The sender: one chunk for every WANT."""
    meter: Meter | None = None
    while chunks:
        for _ in await receive():
            meter = meter or Meter()
            await send(Chunk(NAME, DATA))
            chunks -= 1
    assert meter is not None
    meter.report()


async def ask(send: Send, receive: Receive, chunks: int) -> None:
    """The receiver: a few WANTs ahead, and a check of every chunk."""
    meter = Meter()
    for _ in range(min(WANTS, chunks)):
        await send(Want(NAME))
    asked, got = min(WANTS, chunks), 0
    while got < chunks:
        for message in await receive():
            assert isinstance(message, Chunk)
            if asked < chunks:
                await send(Want(NAME))
                asked += 1
            verify(message.chunk, message.data)
            got += 1
    meter.report()


async def ours(role: str, chunks: int, address: str) -> None:
    """Host and Link as every node uses them."""
    from swarm_node.p2p.host import open_host
    from swarm_node.p2p.link import Link

    async with open_host(KEYS[role], "127.0.0.1", 0) as host:
        if role == "receive":
            peer_id, at = address.split(",")
            link = await host.connect(Peer(peer_id=peer_id, address=at, kind="peer"), dial_s=STALL_S)
            await ask(lambda message: link.send(message, stall_s=STALL_S), link.receive, chunks)
            await link.close()
            return
        done = trio.Event()

        async def handle(link: Link) -> None:
            await answer(lambda message: link.send(message, stall_s=STALL_S), link.receive, chunks)
            done.set()

        host.serve(handle)
        print(json.dumps({"address": f"{host.node_id},{host.addresses[0]}"}), flush=True)
        await done.wait()
        sys.stdin.read()


async def stock(role: str, chunks: int, address: str) -> None:
    """A host of py-libp2p as it comes, and the same frames on its streams."""
    from libp2p import new_host
    from libp2p.abc import INetStream
    from libp2p.crypto.ed25519 import create_new_key_pair
    from libp2p.custom_types import TProtocol
    from libp2p.peer.peerinfo import info_from_p2p_addr
    from multiaddr import Multiaddr

    host = new_host(key_pair=create_new_key_pair(KEYS[role]))

    def talk(stream: INetStream) -> tuple[Send, Receive]:
        frames = FrameReader()

        async def send(message: Message) -> None:
            await stream.write(encode(message))

        async def receive() -> list[Message]:
            return frames.feed(await stream.read(256 * 1024))

        return send, receive

    async with host.run([Multiaddr("/ip4/127.0.0.1/tcp/0")]):
        if role == "receive":
            info = info_from_p2p_addr(Multiaddr(address))
            await host.connect(info)
            stream = await host.new_stream(info.peer_id, [TProtocol(PROTOCOL)])
            await ask(*talk(stream), chunks)
            return
        done = trio.Event()

        async def handle(stream: INetStream) -> None:
            await answer(*talk(stream), chunks)
            done.set()
            await trio.sleep_forever()

        host.set_stream_handler(TProtocol(PROTOCOL), handle)
        print(json.dumps({"address": str(host.get_addrs()[0])}), flush=True)
        await done.wait()
        sys.stdin.read()


async def tcp(role: str, chunks: int, address: str) -> None:
    """Send the frames without encryption or streams: what the machine can do in Python."""

    def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> tuple[Send, Receive]:
        frames = FrameReader()

        async def send(message: Message) -> None:
            writer.write(encode(message))
            await writer.drain()

        async def receive() -> list[Message]:
            return frames.feed(await reader.read(256 * 1024))

        return send, receive

    if role == "receive":
        reader, writer = await asyncio.open_connection("127.0.0.1", int(address), limit=256 * 1024)
        await ask(*talk(reader, writer), chunks)
        writer.close()
        return
    done = asyncio.Event()

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await answer(*talk(reader, writer), chunks)
        await reader.read()
        writer.close()
        done.set()

    async with await asyncio.start_server(handle, "127.0.0.1", 0) as server:
        print(json.dumps({"address": str(server.sockets[0].getsockname()[1])}), flush=True)
        await done.wait()


def play(case: str, role: str, chunks: int, address: str) -> None:
    """Run one side of a case in this process."""
    if case == "tcp":
        asyncio.run(tcp(role, chunks, address))
    else:
        trio.run({"ours": ours, "stock": stock}[case], role, chunks, address)


def start(case: str, role: str, chunks: int, address: str = "") -> "subprocess.Popen[str]":
    """Start such a run in a process of its own."""
    command = [sys.executable, "-P", __file__, case, role, str(chunks), address]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def line(process: "subprocess.Popen[str]") -> dict[str, Any]:
    """The next thing a side has to say."""
    assert process.stdout is not None
    said: dict[str, Any] = json.loads(process.stdout.readline())
    return said


def measure(bench: Bench, case: str, chunks: int) -> None:
    """Measure a transfer: its speed and its cost."""
    gigabytes = chunks * CHUNK_BYTES / 1e9
    with start(case, "send", chunks) as sender:
        with start(case, "receive", chunks, line(sender)["address"]) as receiver:
            sent, received = line(sender), line(receiver)
        sender.communicate()
    bench.measure(f"{case}: speed", 1000 * gigabytes / received["seconds"], unit="MB/s")
    bench.measure(f"{case}: sender", sent["cpu_seconds"] / gigabytes, unit="CPU-s/GB")
    bench.measure(f"{case}: receiver", received["cpu_seconds"] / gigabytes, unit="CPU-s/GB")


def main() -> int:
    """Measure, print and judge."""
    no_options(__doc__)
    quick = quick_from_environment()
    chunks, rounds = (16, 3) if quick else (64, 7)
    inputs = {"chunk_bytes": CHUNK_BYTES, "chunks": chunks, "wants": WANTS, "rounds": rounds}
    bench = Bench("transfer", inputs=inputs, quick=quick)
    for _ in range(rounds):
        for case in ("ours", "stock", "tcp"):
            measure(bench, case, chunks)
    bench.ratio("ours / stock", "ours: speed", "stock: speed")
    bench.ratio("ours / tcp", "ours: speed", "tcp: speed")
    bench.goal("two nodes' hosts move at least 100 MB/s", bench.median("ours: speed"), at_least=100.0)
    bench.goal("a sender needs at most 4 CPU-seconds per GB", bench.median("ours: sender"), at_most=4.0)
    bench.goal("a receiver needs at most 4 CPU-seconds per GB", bench.median("ours: receiver"), at_most=4.0)
    return bench.finish()


if __name__ == "__main__":
    if len(sys.argv) > 1:
        play(sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4])
    else:
        raise SystemExit(main())
