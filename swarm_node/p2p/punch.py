"""Hole punching: two hosts behind NATs dial each other at the same time, both from their listening port.

    A's first packet opens A's NAT for B. B's NAT drops it, unless B has already opened it for A. The second
    sender gets through: one connection, by a simultaneous open or into the listening socket.

1. *Observe.* The plan of a node that cannot be dialled names up to two `observers`. The node connects to each from its
   listening port, opens a stream of `/ipfs/id/1.0.0` (libp2p's identify) and reads `observedAddr`. Every node must
   answer identify.
2. *Report.* `observed` of the next `PlanRequest` has the addresses, one for each observer that answered. If they differ
   from the last report, the node requests the plan again at once.
3. *Pair.* A node is *punchable* if `observed` is one address, whose IP address is the one that its request came from,
   and whose port is at least 1024. The next version's plan may pair two: both get the other in `punches`, the one that
   fetches also in `peers`, with an empty `address`.
4. *Punch.* The node dials each of `punches` from the listening port (`SO_REUSEADDR` and `SO_REUSEPORT` on both sockets,
   before `bind`) at most five times, four seconds each, with 0.5, 1, 2 and 4 s between them, until a connection exists;
   again after 10 s, doubled up to a minute, until the next plan. It keeps that connection as those of `calls`.
5. *Roles.* The node whose peer id is the lower text begins the handshakes (negotiation, Noise, Yamux), whatever TCP
   reports: TCP may report on both sides that they opened the connection, or that they accepted it. The same holds for a
   connection that comes to the listening port from the exact address of one of `punches`. Streams go both ways.
6. *Report.* `punched` and `unpunched` of the next `PlanRequest` name those of `punches` with which it worked and did
   not, if that changed. A punched peer does not count as `answered` in a receipt.

No plan can make this host flood an address. It dials only one of `punches` per IP address (IPv6: 56 bits), written as
numbers; no port below 1024; no private address unless the coordinator has one; per minute at most 10 times one address,
observers included, and 288 times in all (`PunchBudget`).
"""

import ipaddress
import logging
import socket
from collections import deque
from collections.abc import Awaitable, Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from weakref import WeakSet

import trio
from libp2p.abc import IMuxedConn, INetConn
from libp2p.host.basic_host import BasicHost
from libp2p.identity.identify.identify import ID as IDENTIFY
from libp2p.identity.identify.identify import parse_identify_response
from libp2p.io.abc import ReadWriteCloser
from libp2p.io.trio import TrioTCPStream
from libp2p.network.connection.raw_connection import RawConnection
from libp2p.network.swarm import Swarm
from libp2p.peer.id import ID
from libp2p.protocol_muxer.multiselect_communicator import MultiselectCommunicator
from libp2p.utils.varint import decode_uvarint_from_stream
from multiaddr import Multiaddr

from protocol import limits
from protocol.errors import PeerFault
from protocol.ids import NodeId
from protocol.people.addresses import PORT_MAX, ip_of, neighbourhood
from protocol.work.messages import Peer
from swarm_node.p2p import workarounds

log = logging.getLogger(__name__)

ATTEMPTS = 5
ATTEMPT_S = 4.0
"""Time-out of one dial: three packets, after 0, 1 and 3 s. Five dials and their pauses bridge the 20 s by which one
side may get its plan later. Also the time-out of the handshakes: a host without a plan yet waits on the wrong side."""

PAUSE_S = 0.5
"""Pause after the first attempt; doubled after each further one."""

AGAIN_S, AGAIN_MAX_S = 10.0, 60.0
"""Pause after all attempts of a turn, doubled each time: the other side may have been offline."""

OBSERVE_S = 10.0
"""Time-out for an observer's answer, including the dial."""

IDENTIFY_MAX_BYTES = 8192
"""Size limit of an identify answer; ours have about 500 bytes."""

Place = tuple[str, int]
"""An IP address, as Python formats it, and a port."""


@dataclass(frozen=True)
class ReachReport:
    """Report of a node about its reachability: its observed addresses, and the peers it could and could not punch."""

    observed: tuple[str, ...] = ()
    punched: tuple[NodeId, ...] = ()
    unpunched: tuple[NodeId, ...] = ()


class ReachResults:
    """The results of punching and observing, and which of them were reported."""

    def __init__(self) -> None:
        self.observed: tuple[str, ...] = ()
        """The public address of the listening port, one entry per observer that answered last time."""
        self._worked: dict[NodeId, bool] = {}
        self._reported: dict[NodeId, bool] = {}
        self._reported_observed: tuple[str, ...] = ()
        self.on_change: Callable[[], None] = lambda: None
        """Called after each new result."""

    @property
    def has_unreported(self) -> bool:
        """True if something was not reported yet."""
        return self.observed != self._reported_observed or bool(self._changed())

    def report(self) -> ReachReport:
        """Return the observed addresses, and the peers for which the result of punching has changed."""
        changed = self._changed()
        succeeded = [name for name, worked in changed.items() if worked][: limits.DIALS_MAX]
        failed = [name for name, worked in changed.items() if not worked][: limits.DIALS_MAX]
        return ReachReport(self.observed, tuple(succeeded), tuple(failed))

    def confirm(self, report: ReachReport) -> None:
        """Record that the coordinator has this report."""
        self._reported_observed = report.observed
        before = {name: worked for name, worked in self._reported.items() if name in self._worked}
        self._reported = before | dict.fromkeys(report.punched, True) | dict.fromkeys(report.unpunched, False)

    def record_punch(self, name: NodeId, worked: bool) -> None:
        """Record that punching a peer worked, or did not."""
        before = self._worked.pop(name, None)
        self._worked[name] = worked
        while len(self._worked) > 2 * limits.PUNCHES_MAX:
            del self._worked[next(iter(self._worked))]
        if worked != before:
            log.info("punched peer=%s worked=%s", name, worked)
            self.on_change()

    def record_observed(self, observed: tuple[str, ...]) -> None:
        """Record the addresses at which observers see this host."""
        if observed != self.observed:
            log.info("others see this node at %s", " and ".join(dict.fromkeys(observed)))
            self.observed = observed
            self.on_change()

    def _changed(self) -> dict[NodeId, bool]:
        return {name: worked for name, worked in self._worked.items() if self._reported.get(name) != worked}


class PunchBudget:
    """Limits the dials per minute: per neighbourhood and in total."""

    def __init__(self) -> None:
        self._dials: deque[tuple[float, str]] = deque()

    def spend(self, host: str, now: float) -> bool:
        """Count a dial and return True, if the budget allows it."""
        while self._dials and self._dials[0][0] <= now - 60:
            self._dials.popleft()
        near = neighbourhood(host)
        to_it = sum(place == near for _, place in self._dials)
        if to_it >= limits.PUNCH_DIALS_PER_HOST or len(self._dials) >= limits.PUNCH_DIALS:
            return False
        self._dials.append((now, near))
        return True


class Punches:
    """Punched connections of one host, and the observers of its address."""

    def __init__(
        self,
        host: BasicHost,
        nursery: trio.Nursery,
        *,
        sources: Callable[[], Iterable[Place]],
        targets: Callable[[Peer], Awaitable[list[str]]],
        newcomer: Callable[[], Awaitable[None]],
    ) -> None:
        self._host, self._nursery = host, nursery
        self._swarm: Swarm = host.get_network()  # type: ignore[assignment]  # the only implementation there is
        self._own_id = host.get_id().to_base58()
        self._sources, self._targets, self._newcomer = sources, targets, newcomer
        self._budget = PunchBudget()
        self._scopes: dict[Peer, trio.CancelScope] = {}
        self._awaited: dict[Place, ID] = {}
        """Expected peer by remote address, for the peers with which this host starts the handshakes."""
        self._observing = trio.CancelScope()
        self._asked = WeakSet[INetConn]()
        """Connections from the listening port to observers."""
        self.results = ReachResults()
        self.made = WeakSet[IMuxedConn]()
        """Punched connections: they do not prove that a peer can be dialled."""

    @property
    def peers(self) -> set[ID]:
        """The peers to which connections are kept."""
        return {ID.from_base58(peer.peer_id) for peer in self._scopes}

    def follow(self, punches: Iterable[Peer], observers: Iterable[Peer]) -> None:
        """Follow another plan: keep connections to `punches` only, and ask `observers` for this host's address."""
        wanted: dict[str, Peer] = {}
        for peer in punches:
            with suppress(ValueError):  # a DNS name, or no address: a NAT has neither
                wanted.setdefault(neighbourhood(_place(peer.address)[0]), peer)  # one per address: see limits
        for peer in self._scopes.keys() - set(wanted.values()):
            self._scopes.pop(peer).cancel()
        for peer in set(wanted.values()) - self._scopes.keys():
            self._scopes[peer] = trio.CancelScope()
            self._nursery.start_soon(self._keep, peer, self._scopes[peer])
        self._observing.cancel()
        self._observing = trio.CancelScope()
        self._nursery.start_soon(self._observe, list(observers), self._observing)

    async def accept(self, stream: ReadWriteCloser) -> IMuxedConn | None:
        """Upgrade an accepted connection of a peer with which this host starts the handshakes; else return None."""
        remote = stream.get_remote_address()
        peer_id = self._awaited.get((str(ip_of(remote[0])), remote[1])) if remote else None
        return None if peer_id is None else await self._upgrade(stream, peer_id)

    async def _keep(self, peer: Peer, scope: trio.CancelScope) -> None:
        """Punch until there is a connection, and again when it is lost."""
        peer_id, name, pause_s = ID.from_base58(peer.peer_id), NodeId(peer.peer_id), AGAIN_S
        with scope:
            place = await self._place_of(peer)
            if place is None:
                log.debug("peer is not punched peer=%s address=%s", name, peer.address)
                return
            if self._begins(peer_id):
                self._awaited[place] = peer_id
            try:
                while True:
                    worked = await self._connect(peer_id, place)
                    self.results.record_punch(name, worked)
                    if worked:
                        pause_s = AGAIN_S
                        for connection in self._swarm.get_connections(peer_id):
                            await workarounds.end_of(connection)
                        await trio.sleep(PAUSE_S)
                    else:
                        await trio.sleep(pause_s)
                        pause_s = min(2 * pause_s, AGAIN_MAX_S)
            finally:
                if self._awaited.get(place) == peer_id:
                    del self._awaited[place]

    async def _place_of(self, peer: Peer) -> Place | None:
        """Return the address to dial for a peer; None if this host must not dial it."""
        try:
            (target, *_) = await self._targets(peer.model_copy(update={"also": ()}))
        except PeerFault:
            return None
        place = _place(target)
        return place if limits.PUNCH_PORT_MIN <= place[1] <= PORT_MAX else None

    async def _connect(self, peer_id: ID, place: Place) -> bool:
        """Run one turn of attempts; return True if there is a connection to the peer, whichever side opened it."""
        for attempt in range(ATTEMPTS):
            if self._swarm.get_connections(peer_id):
                return True
            if self._budget.spend(place[0], trio.current_time()):
                try:
                    with trio.fail_after(ATTEMPT_S):
                        stream = await self._dial(place)
                    await self._upgrade(stream, peer_id)
                except Exception as error:  # py-libp2p lets any layer's exception through
                    log.debug("punch failed peer=%s at %s:%d: %r", peer_id, *place, error)
            with trio.move_on_after(PAUSE_S * 2**attempt):
                while not self._swarm.get_connections(peer_id):
                    await self._newcomer()
        return bool(self._swarm.get_connections(peer_id))

    async def _dial(self, place: Place) -> TrioTCPStream:
        """Open a TCP connection from the listening port."""
        host, port = place
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        source = next((own for own in self._sources() if (":" in own[0]) == (":" in host)), None)
        if source is None:
            raise OSError("this host does not listen for that family of addresses")
        dialling = trio.socket.socket(family, socket.SOCK_STREAM)
        try:
            for option in ("SO_REUSEADDR", "SO_REUSEPORT"):  # as the listening socket has them
                if hasattr(socket, option):
                    dialling.setsockopt(socket.SOL_SOCKET, getattr(socket, option), 1)
            await dialling.bind(source)
            await dialling.connect((host, port))
        except BaseException:
            dialling.close()
            raise
        return TrioTCPStream(trio.SocketStream(dialling))

    def _begins(self, peer_id: ID) -> bool:
        return self._own_id < peer_id.to_base58()

    async def _upgrade(self, stream: ReadWriteCloser, peer_id: ID) -> IMuxedConn:
        """Secure and multiplex a punched connection, in this host's role."""
        begins = self._begins(peer_id)
        raw = RawConnection(stream, begins)
        try:
            with trio.fail_after(ATTEMPT_S):
                if begins:
                    muxed = (await self._swarm.upgrade_outbound_raw_conn(raw, peer_id)).muxed_conn
                else:
                    muxed = await self._swarm.upgrade_inbound_raw_conn(raw, Multiaddr(f"/p2p/{peer_id}"))
            if muxed.peer_id != peer_id:
                raise PeerFault(f"A different peer than {peer_id} answers a punch.")
        except BaseException:
            await workarounds.abort(stream)
            raise
        self.made.add(muxed)
        return muxed

    async def _observe(self, observers: list[Peer], scope: trio.CancelScope) -> None:
        """Ask each observer for the address that it sees; the answers stay until the next round."""
        answers: dict[str, str] = {}
        with scope:
            async with trio.open_nursery() as nursery:
                for peer in observers:
                    nursery.start_soon(self._ask, peer, answers)
            if answers:
                self.results.record_observed(tuple(answers[p.peer_id] for p in observers if p.peer_id in answers))

    async def _ask(self, peer: Peer, answers: dict[str, str]) -> None:
        try:
            with trio.fail_after(OBSERVE_S):
                if answer := await self._observed_by(peer):
                    answers[peer.peer_id] = answer
        except Exception as error:  # py-libp2p lets any layer's exception through; only this answer is missing
            log.debug("observer does not answer peer=%s: %r", peer.peer_id, error)

    async def _observed_by(self, peer: Peer) -> str | None:
        peer_id = ID.from_base58(peer.peer_id)
        before = self._swarm.get_connections(peer_id)
        connection = next((known for known in before if known in self._asked), None)
        if connection is not None:
            return await self._identify(connection)
        place = _place((await self._targets(peer))[0])
        if not self._budget.spend(place[0], trio.current_time()):
            return None
        stream = await self._dial(place)
        try:
            connection = await self._swarm.upgrade_outbound_raw_conn(RawConnection(stream, True), peer_id)
        except BaseException:
            await workarounds.abort(stream)
            raise
        self._asked.add(connection)
        try:
            return await self._identify(connection)
        finally:
            if before:  # the other one is enough
                await workarounds.cut(connection)

    async def _identify(self, connection: INetConn) -> str | None:
        """Return the address that the peer sees, from its answer to identify."""
        stream = await connection.new_stream()
        try:
            negotiate = partial(self._host.multiselect_client.select_one_of, [IDENTIFY])
            await negotiate(MultiselectCommunicator(stream), round(OBSERVE_S))
            size = await decode_uvarint_from_stream(stream)
            if not 0 < size <= IDENTIFY_MAX_BYTES:
                raise ValueError(f"an answer of {size} bytes")
            data = b""
            while len(data) < size:
                piece = await stream.read(size - len(data))
                if not piece:
                    raise ValueError("half an answer")
                data += piece
            return _host_port(parse_identify_response(data).observed_addr)
        finally:
            await workarounds.reset(stream)


def _host_port(address: bytes) -> str | None:
    """Return `host:port` of a multiaddress; None if it contains none."""
    parts = {protocol.name: value for protocol, value in Multiaddr(address).items()}
    host, port = parts.get("ip4") or parts.get("ip6"), parts.get("tcp")
    if host is None or port is None:
        return None
    ip = ip_of(host)
    return f"[{ip}]:{port}" if isinstance(ip, ipaddress.IPv6Address) else f"{ip}:{port}"


def _place(address: str) -> Place:
    """Split an address whose host is an IP address, in brackets or not."""
    host, _, port = address.rpartition(":")
    return str(ip_of(host.strip("[]"))), int(port)
