"""The libp2p host of a node: its key on the wire, one listening port, and links to peers.

- The peer id is the node id; a connection to any other peer than the expected one is refused (`WrongPeer`).
- TCP, Noise, Yamux; no discovery, announcement or port mapping: the coordinator's plan names the peers to dial.
- `connect` waits for dial, handshakes and negotiation, for at most `dial_s`. On time-out, new connections are cut; an
  older connection may be slow because it is in use, and that of a frozen peer ends by itself.
- A stream uses the existing connection, whichever side opened it. A peer that cannot be dialled (`Peer.calls`) is
  waited for; a peer that this node must call is called again whenever the connection is lost, until the next plan.
- Peers that cannot be dialled by anybody may be reached through holes in both sides' NATs (`punch`).
- A connection without a stream for `idle_s` is cut, so frozen peers do not add up; those to called peers are kept.
- Leaving the context cuts all connections first, without waiting for any peer.
- Dials are shared by all callers that wait for a peer, at most one at a time per peer. One continues to its own end
  even if no caller waits any more: otherwise a peer whose firewall drops packets would never count as tried.
- The result per peer is kept until `take_report` returns it; one success outweighs failures.
"""

import ipaddress
import logging
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import zip_longest
from typing import Any
from weakref import WeakSet, WeakValueDictionary

import trio
from libp2p import new_host
from libp2p.abc import IMuxedConn, INetConn, INetStream, INetwork, INotifee, ISecureConn
from libp2p.crypto.ed25519 import create_new_key_pair
from libp2p.custom_types import TProtocol
from libp2p.host.basic_host import BasicHost
from libp2p.network.config import ConnectionConfig, RetryConfig
from libp2p.network.swarm import Swarm
from libp2p.peer.id import ID
from multiaddr import Multiaddr

from protocol import limits
from protocol.errors import ConfigInvalid, named
from protocol.ids import NodeId
from protocol.people.addresses import host_and_port, neighbourhood
from protocol.wire import exchange
from protocol.wire.frames import Farewell
from protocol.work.messages import Peer
from swarm_node.coordinator_api.join_string import allowed
from swarm_node.p2p import workarounds
from swarm_node.p2p.link import Link, PeerStalled, PeerVanished
from swarm_node.p2p.noise import WrongPeer
from swarm_node.p2p.punch import Punches
from swarm_node.p2p.yamux import TICK_S, YamuxConnection
from swarm_node.p2p.yamux_frames import PROTOCOL_ID as YAMUX_PROTOCOL_ID
from swarm_node.p2p.yamux_stream import MuxLimits, ReceiveBudget

STAGGER_S = 0.25
"""Pause between two addresses of one peer: longer than most answers take, too short to notice."""


async def race(attempts: Iterable[Callable[[], Awaitable[object]]]) -> None:
    """Start the attempts `STAGGER_S` apart, or as soon as the previous one fails; return when the first succeeds.

    If none does, the first failure is raised.
    """
    failures: list[Exception] = []
    succeeded = False

    async def attempt(dial: Callable[[], Awaitable[object]], over: trio.Event) -> None:
        nonlocal succeeded
        try:
            await dial()
        except Exception as error:  # py-libp2p lets any layer's exception through; the first is raised below
            failures.append(error)
            over.set()
        else:
            succeeded = True
            nursery.cancel_scope.cancel()

    async with trio.open_nursery() as nursery:
        for dial in attempts:
            over = trio.Event()
            nursery.start_soon(attempt, dial, over)
            with trio.move_on_after(STAGGER_S):
                await over.wait()
    if not succeeded:
        raise failures[0]


@dataclass(eq=False)
class _Dial:
    """Dial under way."""

    done: trio.Event = field(default_factory=trio.Event)
    error: Exception | None = None


class Dials:
    """All dials of one host."""

    def __init__(self, dial: Callable[[Peer], Awaitable[None]], nursery: trio.Nursery) -> None:
        self._dial, self._nursery = dial, nursery
        self._under_way: dict[NodeId, _Dial] = {}
        self._answered: dict[NodeId, bool] = {}

    def start(self, peer: Peer) -> _Dial:
        """Dial a peer, unless that is under way."""
        name = NodeId(peer.peer_id)
        if name not in self._under_way:
            self._under_way[name] = _Dial()
            self._nursery.start_soon(self._run, peer, self._under_way[name])
        return self._under_way[name]

    async def reach(self, peer: Peer) -> None:
        """Return when the peer is connected; raise the error of a failed dial."""
        dial = self.start(peer)
        await dial.done.wait()
        if dial.error is not None:
            raise dial.error

    def record(self, name: NodeId, answered: bool) -> None:
        """Record the result of a dial, or that its connection is used again."""
        self._answered[name] = answered or self._answered.pop(name, False)
        while len(self._answered) > 2 * limits.DIALS_MAX:
            del self._answered[next(iter(self._answered))]

    def take_report(self) -> tuple[list[NodeId], list[NodeId]]:
        """Return the peers that answered and those that did not since the last call."""
        results, self._answered = self._answered, {}
        return [name for name, yes in results.items() if yes], [name for name, yes in results.items() if not yes]

    async def _run(self, peer: Peer, dial: _Dial) -> None:
        try:
            await self._dial(peer)
        except Exception as error:  # py-libp2p lets any layer's exception through; `reach` raises it
            dial.error = error
        finally:
            del self._under_way[NodeId(peer.peer_id)]
            dial.done.set()
        self.record(NodeId(peer.peer_id), dial.error is None)


log = logging.getLogger(__name__)

_EXCHANGE = TProtocol(exchange.PROTOCOL_ID)

TARGETS_MAX = 8
"""Addresses tried for one peer: two address families with four addresses each."""

CALL_AGAIN_S, CALL_AGAIN_MAX_S = 1.0, 60.0
"""Pause after a lost call, and the maximum; each failed call doubles the pause, so the first failure waits 2 s."""

LinkHandler = Callable[[Link], Awaitable[None]]


@dataclass(frozen=True)
class HostSettings:
    """Limits of one host."""

    connections_max: int = 256
    """Each costs about 70 kB and six tasks."""
    connections_inbound_max: int = 192
    """Three quarters of all slots: the rest is left for our own dials. A host that never dials needs none."""
    connections_per_address: int = 64
    """The share of an address: a stranger takes at most a quarter of all; many honest nodes may share one address."""
    streams_max: int = 1024
    """Callers have at most three quarters: the first window of each stream is a part of `receive_callers_bytes`."""
    upgrade_s: float = 10.0
    """The limit of a new connection's handshakes; a silent socket holds its slot no longer."""
    dial_s: float = 10.0
    """The limit of a dial, until the connection is established."""
    idle_s: float = 180.0
    tick_s: float = TICK_S
    """Keep-alive interval: a frozen peer is detected after two to three of these."""
    mux: MuxLimits = field(default_factory=MuxLimits)
    receive_max_bytes: int = limits.HOST_RECEIVE_MAX_BYTES
    receive_callers_bytes: int = limits.CALLERS_RECEIVE_MAX_BYTES
    receive_per_address_bytes: int = limits.ADDRESS_RECEIVE_MAX_BYTES
    """Both are limits for inbound connections only; the peers that we dial are our choice."""


class _Newcomers(INotifee):
    """Wakes the tasks that wait for a new connection."""

    def __init__(self) -> None:
        self._news = trio.Event()

    async def next(self) -> None:
        """Return when a new connection is established."""
        await self._news.wait()

    async def connected(self, network: INetwork, conn: INetConn) -> None:
        self._news.set()
        self._news = trio.Event()

    async def disconnected(self, network: INetwork, conn: INetConn) -> None: ...
    async def opened_stream(self, network: INetwork, stream: INetStream) -> None: ...
    async def closed_stream(self, network: INetwork, stream: INetStream) -> None: ...
    async def listen(self, network: INetwork, multiaddr: Multiaddr) -> None: ...
    async def listen_close(self, network: INetwork, multiaddr: Multiaddr) -> None: ...


class Host:
    """A running host; made by `open_host`."""

    def __init__(self, host: BasicHost, budget: ReceiveBudget, settings: HostSettings, nursery: trio.Nursery) -> None:
        self._host, self.budget, self._settings, self._nursery = host, budget, settings, nursery
        self._swarm: Swarm = host.get_network()  # type: ignore[assignment]  # the only implementation there is
        self.node_id = NodeId(host.get_id().to_base58())
        self.own_network = True
        """True if peers in this machine's own network may be dialled."""
        self.dials = Dials(self._dial, nursery)
        self._calls: dict[Peer, trio.CancelScope] = {}
        self._newcomers = _Newcomers()
        self._swarm.register_notifee(self._newcomers)
        self.punches = Punches(
            host, nursery, sources=self._places, targets=self._targets, newcomer=self._newcomers.next
        )

    @property
    def addresses(self) -> tuple[str, ...]:
        """The listening addresses, as `host:port`."""
        bound = (address for listener in self._swarm.listeners.values() for address in listener.get_addrs())
        return tuple(_host_port(address) for address in bound)

    def connected(self) -> set[NodeId]:
        """The peers at the other end of live connections."""
        return {NodeId(peer.to_base58()) for peer, conns in self._swarm.connections.items() if conns}

    def serve(self, handler: LinkHandler) -> None:
        """Answer every incoming exchange stream with `handler`; its failures end the stream, never the host."""

        async def on_stream(stream: INetStream) -> None:
            # A responder expects no chunks: any CHUNK frame is too large for it.
            await handler(Link(stream, NodeId(stream.muxed_conn.peer_id.to_base58()), chunk_max_bytes=0))

        self._host.set_stream_handler(_EXCHANGE, workarounds.guard(on_stream, bug_level=logging.WARNING))

    async def connect(self, peer: Peer, *, dial_s: float, chunk_max_bytes: int = limits.CHUNK_MAX_BYTES) -> Link:
        """Open an exchange stream to a peer: over an existing connection, one that the peer opens, or a new one."""
        name, peer_id = NodeId(peer.peer_id), ID.from_base58(peer.peer_id)
        before = set(self._swarm.get_connections(peer_id))
        try:
            with trio.fail_after(dial_s):
                await self._reach(peer)
                stream = await self._host.new_stream(peer_id, [_EXCHANGE])
        except trio.TooSlowError:
            await self._cut_unused(set(self._swarm.get_connections(peer_id)) - before)
            what = "did not call" if peer.calls else f"at {peer.address} did not answer"
            raise PeerStalled(f"Peer {name} {what} for {dial_s:g} s.") from None
        except Exception as error:  # py-libp2p lets any layer's exception through
            causes = list(_causes(error))
            if any(isinstance(cause, WrongPeer) for cause in causes):
                raise WrongPeer(f"A different peer than {name} answers at {peer.address}.") from error
            reason = named(causes[-1])
            where = "that was to call" if peer.calls else f"at {peer.address}"
            raise PeerVanished(f"Peer {name} {where} cannot be reached ({reason}).") from error
        if stream.muxed_conn.is_initiator and stream.muxed_conn not in self.punches.made:
            self.dials.record(name, True)
        return Link(stream, name, chunk_max_bytes=chunk_max_bytes)

    def part(self, link: Link, reason: Farewell) -> None:
        """End a link with a BYE in the background, so that the caller does not wait for a busy uplink."""
        self._nursery.start_soon(link.close, reason)

    def call(self, peers: Iterable[Peer]) -> None:
        """Keep a connection open to each of `peers`, which cannot dial this node, and to no other peer."""
        wanted = set(peers)
        for peer in self._calls.keys() - wanted:
            self._calls.pop(peer).cancel()
        for peer in wanted - self._calls.keys():
            self._calls[peer] = trio.CancelScope()
            self._nursery.start_soon(self._keep_calling, peer, self._calls[peer])

    async def _cut_unused(self, connections: Iterable[INetConn]) -> None:
        """Cut the connections without streams; the peer may be fetching over the others, although they are slow."""
        for connection in connections:
            if not connection.get_streams():
                await workarounds.cut(connection)

    async def disconnect(self, node: NodeId) -> None:
        """Cut every connection to a peer."""
        for connection in list(self._swarm.get_connections(ID.from_base58(node))):
            await workarounds.cut(connection)

    async def cut_all(self) -> None:
        """Cut every connection at once."""
        async with trio.open_nursery() as nursery:
            for connection in self._connections():
                nursery.start_soon(workarounds.cut, connection)

    async def cut_idle(self, idle_s: float) -> None:
        """Cut connections without a stream since the last check, every `idle_s`; runs until it is cancelled."""
        idle = WeakSet[INetConn]()  # connections that ended meanwhile are not kept alive until the next check
        while True:
            await trio.sleep(idle_s)
            idle = await self._cut_those_still(idle)

    async def _cut_those_still(self, idle: WeakSet[INetConn]) -> WeakSet[INetConn]:
        """Cut the connections that are still idle; return those that are idle for the first time."""
        called = {ID.from_base58(peer.peer_id) for peer in self._calls} | self.punches.peers
        now_idle = WeakSet(
            connection
            for connection in self._connections()
            if not connection.get_streams() and connection.muxed_conn.peer_id not in called
        )
        for connection in idle & now_idle:
            await workarounds.cut(connection)
        return now_idle - idle

    def _connections(self) -> list[INetConn]:
        return [connection for connections in self._swarm.connections.values() for connection in connections]

    def _places(self) -> list[tuple[str, int]]:
        """Return the listening sockets; a listener on every IPv6 address also accepts IPv4 connections."""
        places = [host_and_port(address) for address in self.addresses]
        return places + [("0.0.0.0", port) for host, port in places if host == "::"]

    async def _reach(self, peer: Peer) -> None:
        """Return when there is a connection to the peer, whichever side opened it."""
        peer_id = ID.from_base58(peer.peer_id)
        while peer.calls and not self._swarm.get_connections(peer_id):
            await self._newcomers.next()
        if not self._swarm.get_connections(peer_id):
            await self.dials.reach(peer)
        if not self._swarm.get_connections(peer_id):  # when to dial again is the caller's decision
            raise PeerVanished("It ended the connection at once.")

    async def _dial(self, peer: Peer) -> None:
        with trio.fail_after(self._settings.dial_s):
            targets = await self._targets(peer)
            peer_id = ID.from_base58(peer.peer_id)
            await race(partial(self._swarm.dial_addr, _multiaddr(target), peer_id) for target in targets)

    async def _targets(self, peer: Peer) -> list[str]:
        """Return every address that may be dialled, alternating IPv4 and IPv6, so that a dead family costs little."""
        targets: list[tuple[str, str]] = []
        for address in dict.fromkeys((peer.address, *peer.also)):
            with suppress(ConfigInvalid):  # a stranger chose it; the others may be valid
                host, port = host_and_port(address)
                for ip in await allowed(host, own_network=self.own_network):
                    targets.append((ip, f"[{ip}]:{port}"))
        if not targets:
            raise PeerVanished(f"{peer.address} leads to no address that may be dialled.")
        newer, older = ([target for ip, target in targets if (":" in ip) is wanted] for wanted in (True, False))
        first, second = (newer, older) if ":" in targets[0][0] else (older, newer)
        turns = (target for pair in zip_longest(first, second) for target in pair if target)
        return list(dict.fromkeys(turns))[:TARGETS_MAX]

    async def _keep_calling(self, peer: Peer, scope: trio.CancelScope) -> None:
        """Call a peer, and again when the connection is lost, with growing pauses while it cannot be reached."""
        peer_id, pause_s = ID.from_base58(peer.peer_id), CALL_AGAIN_S
        with scope:
            while True:
                try:
                    await self._reach(peer)
                    pause_s = CALL_AGAIN_S
                    for connection in self._swarm.get_connections(peer_id):
                        await workarounds.end_of(connection)
                except Exception as error:  # as in `connect`; the caller will ask another peer
                    log.debug("peer cannot be called peer=%s: %s", peer.peer_id, error)
                    pause_s = min(2 * pause_s, CALL_AGAIN_MAX_S)
                await trio.sleep(pause_s)


@asynccontextmanager
async def open_host(
    key_seed: bytes, host: str | None, port: int, settings: HostSettings | None = None
) -> AsyncIterator[Host]:
    """Run a host on `host:port` (port 0: any free one) for the duration of the context; without `host` it only dials.

    Other sockets of this user may share the port (SO_REUSEADDR, SO_REUSEPORT), so that dials can start from it.
    """
    workarounds.install()
    settings = settings or HostSettings()
    places = []
    if host is not None:
        host = await _ip_of(host)
        _refuse_taken_port(host, port)
        places = [_multiaddr(f"[{host}]:{port}")]
    basic = _basic_host(key_seed, settings)
    workarounds.ask_nobody(basic)
    workarounds.guard_streams(basic)
    workarounds.free_inbound_slots(
        basic, inbound_max=settings.connections_inbound_max, per_address=settings.connections_per_address
    )
    budget = ReceiveBudget(settings.receive_max_bytes)
    workarounds.use_muxer(basic, _muxer(settings, budget))
    failure: Exception | None = None
    async with basic.run(places), trio.open_nursery() as nursery:
        running = Host(basic, budget, settings, nursery)
        workarounds.answer_punches(basic, running.punches.accept)
        nursery.start_soon(running.cut_idle, settings.idle_s)
        try:
            if places and not running.addresses:
                raise ConfigInvalid(f"Cannot listen on {host}:{port}.", hint="Choose another address or port.")
            yield running
        except Exception as error:
            # Raised again below: it is the caller's error, and must not arrive wrapped in libp2p's exception groups.
            failure = error
        finally:
            nursery.cancel_scope.cancel()
            with trio.CancelScope(shield=True):
                await workarounds.stop_listening(basic)
                await running.cut_all()
    if failure is not None:
        raise failure


def _muxer(settings: HostSettings, budget: ReceiveBudget) -> Callable[[ISecureConn, ID], IMuxedConn]:
    """Return the muxer factory; all inbound connections share a part of the budget, and those from one address less."""
    callers = ReceiveBudget(settings.receive_callers_bytes, budget)
    shares = WeakValueDictionary[str, ReceiveBudget]()  # each lives as long as its connections

    def make(conn: ISecureConn, peer_id: ID) -> IMuxedConn:
        share, remote = budget, conn.get_remote_address()
        if not conn.is_initiator and remote is not None:
            share = ReceiveBudget(settings.receive_per_address_bytes, callers)
            share = shares.setdefault(neighbourhood(remote[0]), share)
        return YamuxConnection(conn, peer_id, host_budget=share, mux_limits=settings.mux, tick_s=settings.tick_s)

    return make


def _basic_host(key_seed: bytes, settings: HostSettings) -> BasicHost:
    key_pair = create_new_key_pair(key_seed)
    connection_config = ConnectionConfig(
        max_connections=settings.connections_max,
        min_connections=0,
        low_watermark=0,  # above 0, connections are dialled unasked
        high_watermark=settings.connections_max,
        max_connections_per_peer=2,
        inbound_upgrade_timeout=settings.upgrade_s,
        outbound_upgrade_timeout=settings.upgrade_s,
    )
    host = new_host(
        key_pair=key_pair,
        sec_opt=workarounds.noise_only(key_pair),
        muxer_opt={TProtocol(YAMUX_PROTOCOL_ID): YamuxConnection},
        resource_manager=workarounds.resource_manager(
            connections_max=settings.connections_max, streams_max=settings.streams_max
        ),
        connection_config=connection_config,
        disable_identify_address_discovery=True,
    )
    assert isinstance(host, BasicHost)
    swarm: Any = host.get_network()
    swarm.retry_config = RetryConfig(max_retries=0)  # whether and when to try again is the picker's decision
    return host


async def _ip_of(host: str) -> str:
    """Resolve a host name: given a name, libp2p would listen on every interface."""
    try:
        resolved = await trio.socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError as error:
        raise ConfigInvalid(
            f"Cannot listen on {host}: {error.strerror}.", hint="Name an address of this machine."
        ) from error
    return str(resolved[0][4][0])


def _refuse_taken_port(host: str, port: int) -> None:
    """Refuse a port in use: libp2p sets SO_REUSEPORT, so two nodes on one port would silently split the connections."""
    if port == 0:
        return
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise ConfigInvalid(
                f"Cannot listen on {host}:{port}: {error.strerror}.", hint="Choose another port; 0 takes any free one."
            ) from error


def _multiaddr(address: str) -> Multiaddr:
    host, _, port = address.rpartition(":")
    ip = ipaddress.ip_address(host.strip("[]"))
    return Multiaddr(f"/ip{ip.version}/{ip}/tcp/{port}")


def _host_port(address: Multiaddr) -> str:
    parts = {protocol.name: value for protocol, value in address.items()}
    return f"[{parts['ip6']}]:{parts['tcp']}" if "ip6" in parts else f"{parts['ip4']}:{parts['tcp']}"


def _causes(error: BaseException) -> Iterator[BaseException]:
    """Yield an exception and all its causes, the root cause last."""
    yield error
    for cause in (*getattr(error, "errors", ()), *getattr(error, "exceptions", ()), error.__cause__):
        if cause is not None:
            yield from _causes(cause)
