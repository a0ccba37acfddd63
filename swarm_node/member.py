"""Parts of every member of a round, with or without sampling: key, home, host, chunk server and policy follower.

- `open_home` opens what all rounds of a home share: the key, the signals, the count of uploads. `open_member` opens the
  parts of one round; `app` or `mirror` uses them.
- One process per home: two would share a key, a chunk store and a port.
"""

import logging
import secrets
import signal
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from random import Random
from typing import Any
from urllib.parse import urlsplit

import trio

from ledger.witness import Witnesses
from protocol.limits import GB
from protocol.people.addresses import host_and_port
from protocol.wire.signing import NodeKey
from swarm_node.allowance import settings as allowance
from swarm_node.allowance.governor import UploadCounter
from swarm_node.chunks.arrivals import Arrivals
from swarm_node.chunks.blobs import BlobStore
from swarm_node.coordinator_api.client import Coordinator
from swarm_node.coordinator_api.join_string import (
    POLICIES,
    ROUNDS,
    SEEN_LOG,
    TRUST_FILE,
    JoinString,
    is_in_own_network,
    round_folder,
)
from swarm_node.coordinator_api.origins import open_origins
from swarm_node.keys import identity
from swarm_node.ledger.log_reader import LogReader
from swarm_node.ledger.log_watch import NOBODY as NOBODY
from swarm_node.ledger.log_watch import LogWatch
from swarm_node.p2p.fetch import ChunkMemory
from swarm_node.p2p.host import Host, HostSettings, open_host
from swarm_node.p2p.serve import ChunkServer
from swarm_node.reach import listening
from swarm_node.reach.listening import Reachability
from swarm_node.reach.mapping import PortMapper
from swarm_node.versions.broadcast_plans import BroadcastPlans
from swarm_node.versions.fetcher import VersionFetcher
from swarm_node.versions.follower import PolicyFollower
from swarm_node.versions.other_rounds import BLOBS, OtherRounds
from swarm_node.versions.updater import Updater

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class MemberSettings:
    """Settings of every kind of member, chosen by the owner."""

    join: JoinString
    home: Path
    name: str
    """Name on the leaderboard."""
    price_micros_per_mtok: int
    listen: str = ""
    """Address to listen on; empty: `reach.listening` chooses."""
    advertise: str = ""
    share: bool = True
    """True if others may download from this node; otherwise it does not listen and publishes no address."""
    map_port: bool | None = None
    """True if the router is asked to forward the port; None: only if the coordinator is on the internet."""
    delegation: bytes | None = None
    """The owner's signed delegation."""
    limits: Mapping[str, Any] = field(default_factory=dict)
    """The owner's limits on top of those in the home, for this run."""
    witnesses: Witnesses = NOBODY
    """Witnesses that must have signed the ledger."""
    given_name: str = ""
    """The name that the owner gave; empty if `name` is a generated nickname."""
    page: bool = True
    """True if the agent serves the owner's page."""


@dataclass(frozen=True)
class NodeHome:
    """The parts of a running node that all its rounds share."""

    identity: identity.Identity
    uploads: UploadCounter
    signals: AsyncIterator[int]
    other_rounds: OtherRounds
    chunk_memory: ChunkMemory = field(default_factory=ChunkMemory)


@dataclass(frozen=True)
class Member:
    """The parts of a running member of one round."""

    settings: MemberSettings
    key: NodeKey
    folder: Path
    """Folder of this round in the home."""
    coordinator: Coordinator
    server: ChunkServer
    policies: PolicyFollower
    reach: Reachability
    uploads: UploadCounter
    log_watch: LogWatch
    mapper: PortMapper | None
    """Maps the port at the router; None if not wanted."""

    @property
    def addresses(self) -> tuple[str, ...]:
        """Addresses at which others may dial this member, while it shares."""
        return self.reach.addresses

    @property
    def shares(self) -> bool:
        """True if this member may be published now: not when its upload allowance is used up."""
        return self.settings.share and not self.uploads.used_up


@asynccontextmanager
async def open_home(home: Path, limits: Mapping[str, Any]) -> AsyncIterator[NodeHome]:
    """Open a home for the duration of the block, as its only agent."""
    me = identity.load_or_create(home / "node.key")
    with identity.only_agent(home), trio.open_signal_receiver(*_leave_signals()) as signals:
        log.info("node started id=%s home=%s", me.key.node_id, home)
        uploads = UploadCounter(home, lambda: datetime.now(UTC))
        uploads.cap_bytes = int(allowance.changed(home, dict(limits)).upload_gb * GB) or None
        try:
            yield NodeHome(me, uploads, signals, OtherRounds(home / ROUNDS))
        finally:
            uploads.close()


def _leave_signals() -> tuple[signal.Signals, ...]:
    """Return the signals at which the node leaves; `nohup` excludes a closed terminal."""
    closed = () if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN else (signal.SIGHUP,)
    return (signal.SIGINT, signal.SIGTERM, *closed)


@asynccontextmanager
async def open_member(settings: MemberSettings, node: NodeHome) -> AsyncIterator[Member]:
    """Create the parts; only the chunk server runs by itself."""
    folder = round_folder(settings.home, settings.join)
    coordinator = Coordinator(settings.join.url, settings.join.round_id, node.identity.key)
    blobs = BlobStore(folder / BLOBS)
    blobs.clean()
    async with open_origins(coordinator) as origins, _open_host(settings, node.identity.seed) as host:
        arrivals = Arrivals()
        server = ChunkServer(blobs, arrivals, meter=node.uploads.count)
        if settings.share:
            host.serve(server.handle)
        plans = BroadcastPlans(coordinator, origins, host)
        fetcher = VersionFetcher(
            folder=folder / POLICIES,
            blobs=blobs,
            arrivals=arrivals,
            origins=origins,
            plans=plans,
            host=host,
            rng=Random(secrets.randbits(64)),
            other_rounds=node.other_rounds,
            memory=node.chunk_memory,
        )
        updater = Updater(origins, settings.join.round_id, folder / TRUST_FILE)
        policies = PolicyFollower(origins=origins, updater=updater, plans=plans, fetcher=fetcher)
        advertised = tuple(filter(None, settings.advertise.split(",")))
        reach = Reachability(shares=settings.share, own=advertised or host.addresses)
        _report_listening(host.addresses, node.uploads)
        reader = LogReader(coordinator.origin)
        watch = LogWatch(reader, settings.join.round_id, folder / SEEN_LOG, settings.witnesses)
        yield Member(
            settings,
            node.identity.key,
            folder,
            coordinator,
            server,
            policies,
            reach,
            node.uploads,
            watch,
            _mapper(settings, host, reach),
        )
    await coordinator.close()


@asynccontextmanager
async def _open_host(settings: MemberSettings, key_seed: bytes) -> AsyncIterator[Host]:
    """Run the host: listening, or without sharing only dialling."""
    if not settings.share:
        async with open_host(key_seed, None, 0) as host:
            yield host
        return
    async with (
        listening.open_place(settings.listen, settings.join.url) as place,
        open_host(key_seed, place.host, place.port) as host,
    ):
        yield host


def _mapper(settings: MemberSettings, host: Host, reach: Reachability) -> PortMapper | None:
    """Return the port mapper, if the owner wants it, or if nodes on the internet must dial this one."""
    places = [listening.ListenAddress(*host_and_port(address)) for address in host.addresses]
    if settings.map_port is False or not places or places[0].is_loopback:
        return None
    if settings.map_port or settings.advertise:
        return PortMapper(places[0].port, reach) if settings.map_port else None

    async def is_on_the_internet() -> bool:
        return not await is_in_own_network(urlsplit(settings.join.url).hostname or "")

    return PortMapper(places[0].port, reach, only_if=is_on_the_internet)


def _report_listening(addresses: tuple[str, ...], uploads: UploadCounter) -> None:
    bounds = HostSettings()
    if not addresses:
        log.info(listening.NOTHING_LISTENS)
        return
    line = listening.describe(
        addresses,
        connections=bounds.connections_inbound_max,
        per_address=bounds.connections_per_address,
        upload_cap_gb=(uploads.cap_bytes or 0) / GB,
    )
    log.info("%s", line)


async def cancel_on_signal(signals: AsyncIterator[int], scope: trio.CancelScope) -> None:
    """Cancel the scope when a signal arrives."""
    async for number in signals:
        log.info("stopping signal=%s", signal.Signals(number).name)
        scope.cancel()
