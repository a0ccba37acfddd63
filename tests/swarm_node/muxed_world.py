"""Two muxed connections face to face: over a pipe in memory, or over loopback, stock and ours in any pairing."""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import trio
from libp2p import new_host
from libp2p.abc import IHost
from libp2p.connection_types import ConnectionType
from libp2p.crypto.ed25519 import create_new_key_pair
from libp2p.io.abc import ReadWriteCloser
from libp2p.network.config import ConnectionConfig
from libp2p.network.connection.raw_connection import RawConnection
from libp2p.peer.id import ID
from libp2p.peer.peerinfo import PeerInfo
from libp2p.stream_muxer.yamux.yamux import Yamux
from multiaddr import Multiaddr
from trio.testing import memory_stream_pair

from swarm_node.p2p import workarounds
from swarm_node.p2p.host import HostSettings, open_host
from swarm_node.p2p.yamux import YamuxConnection
from tests.swarm_node.p2p_world import key

PROTOCOL = "/echo-swarm/test/1"


class Pipe(ReadWriteCloser):
    """One end of a wire in memory, which can be frozen: it then takes nothing and gives nothing."""

    def __init__(self, stream: trio.StapledStream[Any, Any]) -> None:
        self._stream = stream
        self.thawed = trio.Event()
        self.thawed.set()

    async def read(self, n: int | None = None) -> bytes:
        try:
            data = bytes(await self._stream.receive_some(n))
        except trio.ClosedResourceError:
            return b""
        await self.thawed.wait()
        return data

    async def write(self, data: bytes) -> None:
        await self.thawed.wait()
        await self._stream.send_all(data)

    async def close(self) -> None:
        await self._stream.aclose()

    def get_remote_address(self) -> tuple[str, int] | None:
        return None

    def freeze(self) -> None:
        self.thawed = trio.Event()


class End:
    """One side of a connection: its pipe, and the muxer on top of Noise."""

    def __init__(self, pipe: Pipe, muxed: Any) -> None:
        self.pipe, self.muxed = pipe, muxed


@asynccontextmanager
async def face_to_face(
    dialer: Callable[..., Any] = YamuxConnection, listener: Callable[..., Any] = YamuxConnection
) -> AsyncIterator[tuple[End, End]]:
    """A dialer and a listener whose Noise handshake is done and whose muxers run."""
    workarounds.install()
    pairs = [create_new_key_pair(key(number)) for number in (1, 2)]
    pipes = [Pipe(stream) for stream in memory_stream_pair()]
    raws = [RawConnection(pipe, side == 0, ConnectionType.DIRECT) for side, pipe in enumerate(pipes)]
    ids = [ID.from_pubkey(pair.public_key) for pair in pairs]
    noises = [next(iter(workarounds.noise_only(pair).values())) for pair in pairs]
    secured: list[Any] = [None, None]

    async def dial() -> None:
        secured[0] = await noises[0].secure_outbound(raws[0], ids[1])

    async def listen() -> None:
        secured[1] = await noises[1].secure_inbound(raws[1])

    async with trio.open_nursery() as nursery:
        nursery.start_soon(dial)
        nursery.start_soon(listen)
    ends = [
        End(pipe, make(session, peer))
        for pipe, make, session, peer in zip(pipes, (dialer, listener), secured, reversed(ids), strict=True)
    ]
    async with trio.open_nursery() as nursery:
        for end in ends:
            nursery.start_soon(end.muxed.start)
            await end.muxed.event_started.wait()
        try:
            yield ends[0], ends[1]
        finally:
            nursery.cancel_scope.cancel()


def stock_muxer(conn: Any, peer: ID) -> Yamux:
    return Yamux(conn, peer)


@asynccontextmanager
async def host_of(kind: str, number: int, *, connections_max: int = 256) -> AsyncIterator[IHost]:
    """A host on loopback: `stock` as py-libp2p makes it, or `ours`."""
    if kind == "ours":
        async with open_host(key(number), "127.0.0.1", 0, HostSettings(connections_max=connections_max)) as host:
            yield host._host
        return
    workarounds.install()  # for the silence of its log; what it cures is given to hosts one by one
    config = ConnectionConfig(
        max_connections=connections_max, min_connections=0, low_watermark=0, high_watermark=connections_max
    )
    stock: Any = new_host(key_pair=create_new_key_pair(key(number)), connection_config=config)
    async with stock.run([Multiaddr("/ip4/127.0.0.1/tcp/0")]):
        try:
            yield stock
        finally:  # what stock leaves open when it is stopped
            with trio.CancelScope(shield=True):
                await workarounds.stop_listening(stock)
                await close_all(stock)


async def close_all(host: Any) -> None:
    """Close the sockets of a host."""
    for of_peer in list(host.get_network().connections.values()):
        for connection in of_peer:
            await connection.muxed_conn.secured_conn.close()


def info_of(host: Any) -> PeerInfo:
    """Return the address at which to dial it."""
    listeners = host.get_network().listeners
    return PeerInfo(host.get_id(), [address for listener in listeners.values() for address in listener.get_addrs()])
