"""Wiring of the node agent: every machine is made here, and they know each other only through here."""

import fcntl
import logging
import secrets
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from random import Random

import trio

from protocol.errors import ConfigInvalid, SwarmError, UnknownNode, Unreachable
from protocol.messages import Heartbeat, HeartbeatReply, Register
from swarm_node import identity
from swarm_node.api_client import Coordinator
from swarm_node.arrivals import Arrivals
from swarm_node.blobs import BlobStore
from swarm_node.engine.client import open_engine
from swarm_node.join_string import JoinString
from swarm_node.origins import open_origins
from swarm_node.outbox import Outbox
from swarm_node.p2p.host import open_host
from swarm_node.p2p.serve import ChunkServer
from swarm_node.policies import PolicyFollower
from swarm_node.sender import Sender
from swarm_node.updater import Updater
from swarm_node.worker import Worker

log = logging.getLogger(__name__)

FINAL_SEND_S = 10.0
"""At the end of the round, how long the last rollouts may take to be judged."""


@dataclass(frozen=True)
class Settings:
    """What the owner chose."""

    join: JoinString
    home: Path
    name: str
    price_micros_per_mtok: int
    listen: str
    advertise: str
    groups_per_request: int
    engine_command: list[str]


@dataclass(frozen=True)
class Earnings:
    """What a run of the agent came to."""

    accepted: int
    rejected: dict[str, int]
    tokens: int
    credit_micros: int


async def run(settings: Settings) -> Earnings:
    """Take part in a round until it is finished or a signal comes."""
    me = identity.load_or_create(settings.home / "node.key")
    folder = settings.home / "rounds" / settings.join.round_id[:16]
    coordinator = Coordinator(settings.join.url, settings.join.round_id, me.key)
    host_name, _, port = settings.listen.rpartition(":")
    with _only_agent(settings.home), trio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
        log.info("node started id=%s home=%s", me.key.node_id, settings.home)
        outbox = Outbox(folder / "outbox")
        sender = Sender(coordinator, outbox)
        blobs = BlobStore(folder / "blobs")
        blobs.clean()
        async with (
            open_origins(coordinator) as origins,
            open_host(me.seed, host_name, int(port)) as host,
            open_engine(settings.engine_command, log=None) as engine,
            trio.open_nursery() as nursery,
        ):
            arrivals = Arrivals()
            server = ChunkServer(blobs, arrivals)
            host.serve(server.handle)
            policies = PolicyFollower(
                coordinator=coordinator,
                origins=origins,
                updater=Updater(origins, settings.join.round_id, folder / "trust.msgpack"),
                blobs=blobs,
                arrivals=arrivals,
                folder=folder / "policies",
                host=host,
                rng=Random(secrets.randbits(64)),
            )
            worker = Worker(
                coordinator=coordinator,
                policies=policies,
                engine=engine,
                outbox=outbox,
                sender=sender,
                key=me.key,
                round_id=settings.join.round_id,
                groups_per_request=settings.groups_per_request,
            )
            pulse = _Pulse(settings, coordinator, policies, worker, server, host.addresses)
            nursery.start_soon(_stop_on_signal, signals, nursery.cancel_scope)
            await pulse.register()
            nursery.start_soon(pulse.run)
            nursery.start_soon(policies.run)
            nursery.start_soon(sender.run)
            nursery.start_soon(worker.run)
            await worker.finished.wait()
            await _drain(sender, outbox)
            with suppress(SwarmError):  # the round is over, whether or not this is still heard
                await pulse.beat()
            nursery.cancel_scope.cancel()
    await coordinator.close()
    accepted = sender.verdicts.pop("accepted", 0) + sender.verdicts.pop("already_accepted", 0)
    return Earnings(accepted, dict(sender.verdicts), sender.tokens, sender.credit_micros)


class _Pulse:
    """Registers, and tells the coordinator regularly what this node holds, does and has moved."""

    def __init__(
        self,
        settings: Settings,
        coordinator: Coordinator,
        policies: PolicyFollower,
        worker: Worker,
        server: ChunkServer,
        addresses: tuple[str, ...],
    ) -> None:
        self._settings = settings
        self._coordinator = coordinator
        self._policies = policies
        self._worker = worker
        self._server = server
        self._addresses = (settings.advertise,) if settings.advertise else addresses
        self._session = secrets.token_hex(8)

    async def register(self) -> None:
        """Introduce this node; waits for a coordinator that is not up yet, and ends on a refusal."""
        message = Register(
            name=self._settings.name,
            price_micros_per_mtok=self._settings.price_micros_per_mtok,
            addresses=self._addresses,
            agent=f"echo-swarm/{version('echo-swarm')}",
        )
        told = False
        while True:
            try:
                self._take(await self._coordinator.register(message))
                log.info(
                    "registered price_micros_per_mtok=%d addresses=%s", message.price_micros_per_mtok, self._addresses
                )
                return
            except Unreachable as error:
                if not told:
                    log.warning("waiting for the coordinator: %s", error)
                told = True
                await trio.sleep(1.0)

    async def run(self) -> None:
        """Beat for ever; a coordinator that goes away is told of once, and once when it is back."""
        told = False
        while True:
            pause_s = 2.0
            try:
                pause_s = (await self.beat()).heartbeat_s
                if told:
                    log.info("the coordinator answers again")
                told = False
            except UnknownNode:
                await self.register()
            except SwarmError as error:
                if not told:
                    log.warning("waiting for the coordinator: %s", error)
                told = True
            await trio.sleep(min(max(pause_s, 0.1), 60.0))

    async def beat(self) -> HeartbeatReply:
        traffic = self._policies.traffic
        blames = tuple(traffic.blames)
        message = Heartbeat(
            session=self._session,
            version=self._worker.version,
            phase=self._worker.phase.value,
            tokens_per_s=self._worker.tokens_per_s,
            transfer=traffic.message(self._server.bytes_sent),
            blames=blames,
        )
        reply = await self._coordinator.heartbeat(message)
        traffic.blames = [blame for blame in traffic.blames if blame not in blames]
        self._take(reply)
        return reply

    def _take(self, reply: HeartbeatReply) -> None:
        self._policies.hint(reply.newest_version)
        if reply.finished:
            self._worker.finished.set()


async def _drain(sender: Sender, outbox: Outbox) -> None:
    """Give the last rollouts their chance."""
    with trio.move_on_after(FINAL_SEND_S):
        while len(outbox):
            sender.wake()
            await trio.sleep(0.1)


async def _stop_on_signal(signals: object, scope: trio.CancelScope) -> None:
    async for number in signals:  # type: ignore[attr-defined]  # trio names no type for it
        log.info("stopping signal=%s", signal.Signals(number).name)
        scope.cancel()


@contextmanager
def _only_agent(home: Path) -> Iterator[None]:
    """One agent per home: two would share a key, an outbox and a port."""
    with (home / "agent.lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise ConfigInvalid(
                f"Another agent is running in {home}.", hint="Stop it, or give this one its own --home."
            ) from None
        yield
