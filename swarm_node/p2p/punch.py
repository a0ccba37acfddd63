"""Hole punching: two hosts that nobody can dial dial each other at the same time, both from their listening port.

    A's first packet opens A's NAT for B; it is dropped at B's, unless B's has opened that for A. Whoever sends
    second gets through: one connection, by a simultaneous open or into the listening socket.

- The coordinator says with whom (`FetchPlan.punches`), to both sides, and whom to ask for one's own address as others
  see it (`FetchPlan.observers`): these are dialled from the listening port, too, and answer by libp2p's identify.
- Both hosts may find that they opened the connection, or both that they accepted it. So the handshakes on it are begun
  by the one whose peer id is the lower string, whatever TCP says.
- A connection that is lost is punched anew until the next plan; attempts that fail pause longer each time.
- No plan makes this host flood anybody: it dials an address at one port alone, no port below `PUNCH_PORT_MIN`, no
  address of a private network unless the coordinator is there, and no more often than `PunchBudget` allows.
- What came of it is reported with the next request for a plan, if it is not what was reported before.
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
"""One dial: three packets, after 0, 1 and 3 s. Five, and what is between them, bridge the 20 s by which one side may
get its plan later. As long for the handshakes: who has no plan yet waits for them on the wrong side."""

PAUSE_S = 0.5
"""After the first attempt, and twice as long after each further one."""

AGAIN_S, AGAIN_MAX_S = 10.0, 60.0
"""After all attempts of a turn, twice as long each time: the other side may have been away."""

OBSERVE_S = 10.0
"""For an observer to answer, from the dial on."""

IDENTIFY_MAX_BYTES = 8192
"""An answer of identify; ours have about 500."""

Place = tuple[str, int]
"""An IP address, written as Python writes it, and a port."""


@dataclass(frozen=True)
class ReachReport:
    """What a node says of its place in the network: how others see it, and which holes it could punch."""

    observed: tuple[str, ...] = ()
    punched: tuple[NodeId, ...] = ()
    unpunched: tuple[NodeId, ...] = ()


class PunchBudget:
    """Bounds the dials of a minute: to each neighbourhood and in all."""

    def __init__(self) -> None:
        self._dials: deque[tuple[float, str]] = deque()

    def spend(self, host: str, now: float) -> bool:
        """Count a dial and return True, if there is room for it."""
        while self._dials and self._dials[0][0] <= now - 60:
            self._dials.popleft()
        near = neighbourhood(host)
        to_it = sum(place == near for _, place in self._dials)
        if to_it >= limits.PUNCH_DIALS_PER_HOST or len(self._dials) >= limits.PUNCH_DIALS:
            return False
        self._dials.append((now, near))
        return True


class Punches:
    """All holes of one host, and its address as others see it."""

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
        """Whose connection may come from where, of those with whom this host begins the handshakes."""
        self._observing = trio.CancelScope()
        self._asked = WeakSet[INetConn]()
        """Connections out of the listening port to observers."""
        self._worked: dict[NodeId, bool] = {}
        self._reported: dict[NodeId, bool] = {}
        self._reported_observed: tuple[str, ...] = ()
        self.observed: tuple[str, ...] = ()
        """The listening port's address, by each observer that answered the last time."""
        self.made = WeakSet[IMuxedConn]()
        """Connections that were punched: they say nothing about who can be dialled."""
        self.on_news: Callable[[], None] = lambda: None

    @property
    def peers(self) -> set[ID]:
        """With whom connections are kept."""
        return {ID.from_base58(peer.peer_id) for peer in self._scopes}

    @property
    def has_news(self) -> bool:
        """There is something that was not reported yet."""
        return self.observed != self._reported_observed or bool(self._changed())

    def report(self) -> ReachReport:
        """The observed addresses, and with whom punching worked and did not, where that has changed."""
        changed = self._changed()
        succeeded = [name for name, worked in changed.items() if worked][: limits.DIALS_MAX]
        failed = [name for name, worked in changed.items() if not worked][: limits.DIALS_MAX]
        return ReachReport(self.observed, tuple(succeeded), tuple(failed))

    def confirm(self, report: ReachReport) -> None:
        """Record that the coordinator has this report."""
        self._reported_observed = report.observed
        before = {name: worked for name, worked in self._reported.items() if name in self._worked}
        self._reported = before | dict.fromkeys(report.punched, True) | dict.fromkeys(report.unpunched, False)

    def follow(self, punches: Iterable[Peer], observers: Iterable[Peer]) -> None:
        """Go by another plan: keep connections to these and to nobody else, and ask those for this host's address."""
        wanted: dict[str, Peer] = {}
        for peer in punches:
            with suppress(ValueError):  # a name, or none: no NAT has one
                wanted.setdefault(neighbourhood(_place(peer.address)[0]), peer)  # one at each address: see limits
        for peer in self._scopes.keys() - set(wanted.values()):
            self._scopes.pop(peer).cancel()
        for peer in set(wanted.values()) - self._scopes.keys():
            self._scopes[peer] = trio.CancelScope()
            self._nursery.start_soon(self._keep, peer, self._scopes[peer])
        self._observing.cancel()
        self._observing = trio.CancelScope()
        self._nursery.start_soon(self._observe, list(observers), self._observing)

    async def accept(self, stream: ReadWriteCloser) -> IMuxedConn | None:
        """Take over an accepted connection of a peer with whom this host begins the handshakes; else return None."""
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
                    self._note(name, worked)
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
        """Where to dial a peer; None if this host is not to be sent there."""
        try:
            (target, *_) = await self._targets(peer.model_copy(update={"also": ()}))
        except PeerFault:
            return None
        place = _place(target)
        return place if limits.PUNCH_PORT_MIN <= place[1] <= PORT_MAX else None

    async def _connect(self, peer_id: ID, place: Place) -> bool:
        """One turn of attempts; return whether there is a connection to the peer, whoever opened it."""
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

    def _changed(self) -> dict[NodeId, bool]:
        return {name: worked for name, worked in self._worked.items() if self._reported.get(name) != worked}

    def _begins(self, peer_id: ID) -> bool:
        return self._own_id < peer_id.to_base58()

    async def _upgrade(self, stream: ReadWriteCloser, peer_id: ID) -> IMuxedConn:
        """Secure and multiplex a punched connection, in the role that is this host's."""
        begins = self._begins(peer_id)
        raw = RawConnection(stream, begins)
        try:
            with trio.fail_after(ATTEMPT_S):
                if begins:
                    muxed = (await self._swarm.upgrade_outbound_raw_conn(raw, peer_id)).muxed_conn
                else:
                    muxed = await self._swarm.upgrade_inbound_raw_conn(raw, Multiaddr(f"/p2p/{peer_id}"))
            if muxed.peer_id != peer_id:
                raise PeerFault(f"Somebody else than peer {peer_id} answers a punch.")
        except BaseException:
            await workarounds.abort(stream)
            raise
        self.made.add(muxed)
        return muxed

    def _note(self, name: NodeId, worked: bool) -> None:
        before = self._worked.pop(name, None)
        self._worked[name] = worked
        while len(self._worked) > 2 * limits.PUNCHES_MAX:
            del self._worked[next(iter(self._worked))]
        if worked != before:
            log.info("punched peer=%s worked=%s", name, worked)
            self.on_news()

    async def _observe(self, observers: list[Peer], scope: trio.CancelScope) -> None:
        """Ask each for the address that it sees; what they say stays until they are asked again."""
        answers: dict[str, str] = {}
        with scope:
            async with trio.open_nursery() as nursery:
                for peer in observers:
                    nursery.start_soon(self._ask, peer, answers)
            observed = tuple(answers[peer.peer_id] for peer in observers if peer.peer_id in answers)
            if observed and observed != self.observed:
                log.info("others see this node at %s", " and ".join(dict.fromkeys(observed)))
                self.observed = observed
                self.on_news()

    async def _ask(self, peer: Peer, answers: dict[str, str]) -> None:
        try:
            with trio.fail_after(OBSERVE_S):
                if answer := await self._observed_by(peer):
                    answers[peer.peer_id] = answer
        except Exception as error:  # py-libp2p lets any layer's exception through; it is one answer less
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
        """The address that the other side sees, by its answer to identify."""
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
    """`host:port` of a multiaddress; None if it names none."""
    parts = {protocol.name: value for protocol, value in Multiaddr(address).items()}
    host, port = parts.get("ip4") or parts.get("ip6"), parts.get("tcp")
    if host is None or port is None:
        return None
    ip = ip_of(host)
    return f"[{ip}]:{port}" if isinstance(ip, ipaddress.IPv6Address) else f"{ip}:{port}"


def _place(address: str) -> Place:
    """The parts of an address whose host is an IP address, in brackets or not."""
    host, _, port = address.rpartition(":")
    return str(ip_of(host.strip("[]"))), int(port)
