"""Defects of py-libp2p 0.8.1, and our workaround for each.

- No other module of this project touches its internals.
- Pinned: `install` refuses any other version, so an upgrade begins by reading this file.
- Each function's docstring names the workaround and the upstream defect; a test shows the workaround.
- Most workarounds apply to one host, so that a stock host in the same process stays stock.
- The Noise handshake, the Noise session and the muxer are not patched but replaced: `noise_xx`, `noise`, `yamux`
  (decision 7).
"""

import logging
import socket
import struct
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import suppress
from importlib.metadata import version
from typing import Any
from weakref import WeakKeyDictionary

import trio
from libp2p.abc import IMuxedConn, INetConn, INetStream, ISecureConn, ISecureTransport
from libp2p.crypto.keys import KeyPair
from libp2p.custom_types import TProtocol
from libp2p.exceptions import ParseError
from libp2p.host.basic_host import BasicHost, _IdentifyNotifee
from libp2p.host.ping import ID as PING
from libp2p.identity.identify_push.identify_push import ID_PUSH
from libp2p.io.abc import ReadWriteCloser
from libp2p.io.exceptions import IOException
from libp2p.io.trio import TrioTCPStream
from libp2p.io.utils import read_exactly
from libp2p.network.connection import swarm_connection
from libp2p.network.connection.raw_connection import RawConnection
from libp2p.peer.id import ID
from libp2p.protocol_muxer.exceptions import MultiselectCommunicatorError
from libp2p.protocol_muxer.multiselect_communicator import MultiselectCommunicator
from libp2p.rcmgr import ResourceLimits, ResourceManager
from libp2p.rcmgr.connection_limits import ConnectionLimits
from libp2p.stream_muxer.muxer_multistream import MuxerMultistream
from libp2p.utils.varint import decode_uvarint_from_stream
from multiaddr import Multiaddr

from protocol import limits
from protocol.errors import SwarmError, named
from protocol.people.addresses import neighbourhood
from swarm_node.p2p.noise import PROTOCOL_ID as NOISE_PROTOCOL_ID
from swarm_node.p2p.noise import Noise
from swarm_node.p2p.yamux import YamuxStream

log = logging.getLogger(__name__)

PINNED_VERSION = "0.8.1"
CLOSE_PATIENCE_S = 1.0

StreamHandler = Callable[[INetStream], Awaitable[None]]


def install() -> None:
    """Apply the process-wide workarounds; safe to call again."""
    installed = version("libp2p")
    if installed != PINNED_VERSION:
        raise RuntimeError(f"libp2p is {installed}, but the workarounds are for {PINNED_VERSION}: see {__name__}")
    _silence_logging()
    _bound_negotiations()
    _know_ipv6_addresses()


def _bound_negotiations() -> None:
    """Limit the number and the length of negotiation words. Upstream accepts words of any length, keeps them in memory,
    and answers any number of them."""
    words = WeakKeyDictionary[MultiselectCommunicator, int]()

    async def read(self: MultiselectCommunicator) -> str:
        words[self] = words.get(self, 0) + 1
        try:
            size = await decode_uvarint_from_stream(self.read_writer)
            if words[self] > limits.NEGOTIATION_WORDS_MAX or not 0 < size <= limits.NEGOTIATION_WORD_MAX_BYTES:
                raise ParseError(f"word {words[self]} has {size} bytes")
            word = await read_exactly(self.read_writer, size)
            return word.removesuffix(b"\n").decode()
        except (ParseError, IOException, UnicodeDecodeError) as error:
            raise MultiselectCommunicatorError("the other side does not negotiate") from error

    MultiselectCommunicator.read = read  # type: ignore[method-assign]  # for every negotiation, in either role


def _know_ipv6_addresses() -> None:
    """Return the address of an IPv6 socket. Upstream ignores its name, which has four parts, so all of IPv6 would be
    one neighbourhood; the first two parts are the address."""

    def get_remote_address(self: TrioTCPStream) -> tuple[str, int] | None:
        if self._cached_remote_address is None:
            with suppress(OSError):  # it is closed already
                host, port, *_ = self.stream.socket.getpeername()
                self._cached_remote_address = (host, port)
        return self._cached_remote_address

    TrioTCPStream.get_remote_address = get_remote_address  # type: ignore[method-assign]  # in either role


def _silence_logging() -> None:
    """Silence libp2p's loggers: upstream logs frames at DEBUG and every disconnect as ERROR. We log what matters."""
    root = logging.getLogger("libp2p")
    root.handlers = [logging.NullHandler()]
    root.propagate = False
    root.setLevel(logging.CRITICAL + 1)
    # This module logs through the root logger, which attaches a handler to stderr on first use.
    swarm_connection.logging = root  # type: ignore[attr-defined, assignment]  # has what it calls


def free_inbound_slots(host: BasicHost, *, inbound_max: int, per_address: int) -> None:
    """Free the slot and the task of an inbound connection when it ends, and limit inbound connections in total and per
    address. Upstream's accept task waits for the end of the *swarm*, so 250 inbound connections in a lifetime use up
    every slot; and inbound connections may fill all slots, since upstream reserves only those for its own automatic
    dials."""
    swarm: Any = host.get_network()
    swarm._inbound_limiter.total_tokens = inbound_max
    held: Counter[str] = Counter()

    async def serve(read_write_closer: ReadWriteCloser, maddr: Multiaddr, _failure_event: object) -> None:
        raw_conn = RawConnection(read_write_closer, False)
        remote = raw_conn.get_remote_address()
        place = neighbourhood(remote[0]) if remote else ""
        held[place] += 1
        try:
            if held[place] > per_address:
                raise PermissionError(f"{place} holds {per_address} connections")
            muxed_conn = await swarm.upgrade_inbound_raw_conn(raw_conn, maddr)
            await muxed_conn.event_closed.wait()
        except Exception as error:  # the other side decides what goes wrong here; it costs that connection only
            log.debug("inbound connection ended: %s", error)
        finally:
            held[place] -= 1
            if not held[place]:
                del held[place]
            with trio.CancelScope(shield=True), trio.move_on_after(CLOSE_PATIENCE_S):
                await raw_conn.close()

    swarm._do_handle_inbound_connection = serve


def answer_punches(host: BasicHost, accept: Callable[[ReadWriteCloser], Awaitable[IMuxedConn | None]]) -> None:
    """Let `accept` upgrade punched connections. Upstream makes the accepting side answer the handshakes, but of two
    hosts that dial each other at once both may have accepted, or neither."""
    swarm: Any = host.get_network()
    upgrade = swarm.upgrade_inbound_raw_conn

    async def upgraded(raw_conn: RawConnection, maddr: Multiaddr) -> IMuxedConn:
        return await accept(raw_conn.stream) or await upgrade(raw_conn, maddr)

    swarm.upgrade_inbound_raw_conn = upgraded


def noise_only(key_pair: KeyPair) -> dict[TProtocol, ISecureTransport]:
    """Offer Noise only. Upstream also offers plaintext and secio by default, so anyone could claim any peer id."""
    return {NOISE_PROTOCOL_ID: Noise(key_pair)}


def use_muxer(host: BasicHost, make: Callable[[ISecureConn, ID], IMuxedConn]) -> None:
    """Use our muxer for Yamux. Upstream creates its own Yamux, whatever the host was given."""
    swarm: Any = host.get_network()
    muxers: MuxerMultistream = swarm.upgrader.muxer_multistream

    async def new_conn(conn: ISecureConn, peer_id: ID) -> IMuxedConn:
        protocol, _ = await muxers._selector.select(conn, conn.is_initiator, muxers.negotiate_timeout)
        return muxers._annotate_connection(make(conn, peer_id), conn, protocol)

    muxers.new_conn = new_conn  # type: ignore[method-assign]  # of this host only


def resource_manager(*, connections_max: int, streams_max: int) -> ResourceManager:
    """Return a resource manager with fixed limits only. The default one also has a circuit breaker, shrinking limits
    and a rate limit, which honest bursts trigger."""
    return ResourceManager(
        limits=ResourceLimits(max_connections=2 * connections_max, max_streams=streams_max),
        connection_limits=ConnectionLimits(
            max_established_inbound=connections_max,
            max_established_outbound=connections_max,
            max_established_per_peer=4,
            max_established_total=connections_max,
        ),
        enable_metrics=False,
        enable_memory_limits=False,
        enable_circuit_breaker=False,
        enable_graceful_degradation=False,
        enable_rate_limiting=False,
    )


def guard_streams(host: BasicHost) -> None:
    """Confine exceptions to their stream. Upstream, one in a stream handler or its negotiation ends the host."""
    swarm = host.get_network()
    swarm.set_stream_handler(guard(host._swarm_stream_handler))


def guard(handler: StreamHandler, *, bug_level: int = logging.DEBUG) -> StreamHandler:
    """Wrap a handler so that failures only reset its stream; unexpected errors are logged at `bug_level`."""

    async def guarded(stream: INetStream) -> None:
        try:
            await handler(stream)
        except* SwarmError as group:
            log.debug("a peer broke the rules: %s", "; ".join(map(named, group.exceptions)))
            await reset(stream)
        except* Exception as group:  # whatever it is, it must not reach the host's nursery
            log.log(bug_level, "a stream handler failed", exc_info=group)
            await reset(stream)

    return guarded


def ask_nobody(host: BasicHost) -> None:
    """Disable outgoing identify, identify-push and ping; still answer identify. Upstream runs identify unasked in
    system tasks, where an escaping error ends the program; it stores any addresses that a peer claims or pushes,
    for later dials; and it answers pings as fast as they arrive."""
    for uninvited in (ID_PUSH, PING):
        host.multiselect.remove_handler(uninvited)
    swarm: Any = host.get_network()
    for notifee in list(swarm.notifees):
        if isinstance(notifee, _IdentifyNotifee):
            swarm.remove_notifee(notifee)


async def stop_listening(host: BasicHost) -> None:
    """Close the listeners before the host stops. Upstream cancels a stopping host before it closes its listeners, which
    then stay open, with their ports, in system tasks."""
    swarm: Any = host.get_network()
    for listener in swarm.listeners.values():
        with trio.move_on_after(CLOSE_PATIENCE_S):
            await listener.close()


async def reset(stream: INetStream) -> None:
    """Reset a stream in any state; with our muxer this never waits for the peer."""
    with trio.CancelScope(shield=True):
        await stream.reset()


def under(stream: INetStream) -> YamuxStream:
    """Return the muxed stream under a stream, for direct reads and writes. Upstream takes a lock for each read and
    write, which costs two turns of the event loop."""
    muxed: Any = stream
    assert isinstance(muxed.muxed_stream, YamuxStream)
    return muxed.muxed_stream


async def abort(stream: ReadWriteCloser) -> None:
    """Reset a connection, so that it can be dialled again: a closed one blocks its address pair for a minute."""
    if isinstance(stream, TrioTCPStream):
        with suppress(OSError):  # it is closed already
            stream.stream.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    with trio.CancelScope(shield=True), trio.move_on_after(CLOSE_PATIENCE_S):
        await stream.close()


async def end_of(connection: INetConn) -> None:
    """Wait for the end of a connection, by our muxer: upstream's connection interface has no way to wait for it."""
    muxed: Any = connection.muxed_conn
    await muxed.event_closed.wait()


async def cut(connection: INetConn) -> None:
    """End a connection at once, without GO_AWAY: `close` would first wait until that is sent."""
    muxed: Any = connection.muxed_conn
    with trio.CancelScope(shield=True), trio.move_on_after(CLOSE_PATIENCE_S):
        await muxed.cut()
