"""The pulse: registration, and regular heartbeats with this node's version, activity and transfers.

- The node retries while the coordinator is unreachable or failing, or a clock is wrong; `trouble` logs which it is.
  Errors that retries cannot fix end the node: a refusal of its key, owner, price or age; and an address at which no
  coordinator is, unless this node has trusted the round there before.
- Between two heartbeats, one request stays open until a newer version is published, so that the node learns of it at
  once.
- While another agent uses this node's key, both log it and show it as their trouble; each heartbeat says so.
- An agent that ends sends a last heartbeat, so that the operator sees that it left, and when.
- A sharing node that could not reach the coordinator registers again: it may have another address now, at which others
  must dial it. The same when an address was added or lost, such as the router's.
- The coordinator's statement about new versions is a hint; the follower verifies it.

Activity of a member, the gate that permits it, and the coordinator's reasons for giving no work, in words.
"""

import logging
import secrets
from contextlib import suppress
from enum import StrEnum
from importlib.metadata import version
from typing import Protocol

import trio

from protocol.errors import KeyInUse, KeyRevoked, RequestExpired, SwarmError, UnknownNode, Unreachable, WrongAddress
from protocol.work.messages import Heartbeat, HeartbeatReply, Reason, Register, VersionRequest
from swarm_node.allowance.rules import Decision
from swarm_node.base.trouble import Trouble
from swarm_node.coordinator_api.join_string import was_trusted
from swarm_node.member import Member

NO_WORK: dict[Reason, str] = {
    "numerics": "this round does not accept this node's engine and precision, or they are not calibrated yet: "
    "`swarm-node why` shows claims that are held until then. "
    "Wait for the operator, or join with another --engine or --dtype",
    "paused": "the operator paused this node; the round's page shows when and why",
    "standby": "cheaper nodes do the work; this node is on standby and is activated when needed",
    "budget": "the budget of the round or of this hour is used up",
    "audits": "the coordinator's audits are delayed; work continues when they catch up",
}
"""Explanations for the owner; the other reasons end by themselves."""


class Gate(Protocol):
    """The owner's permission for this node to work."""

    @property
    def decision(self) -> Decision: ...

    @property
    def finishing(self) -> bool: ...

    async def opened(self) -> None:
        """Return when the node may work, or must finish."""

    async def closed(self) -> None:
        """Return when the node must not work."""


class Phase(StrEnum):
    """Activity of a member; a worker never mirrors, and a mirror does nothing else."""

    OFFLINE = "offline"
    IDLE = "idle"
    GENERATING = "generating"
    MIRRORING = "mirroring"
    RESTING = "resting"
    """The owner's settings permit no work for now."""
    LEFT = "left"
    """The agent ends; only its last heartbeat says so."""


log = logging.getLogger(__name__)

AGAIN_S = 0.2
"""Pause after an answer without news, so that a coordinator that answers at once is not flooded."""

REGISTER_AGAIN_S, REGISTER_AGAIN_MAX_S = 1.0, 30.0
REGISTER_AGAIN_SHARE = 0.1
"""The pause between two registrations, as a share of the time for which they have failed."""

LEAVE_S = 2.0
"""Longest wait for the answer to the last heartbeat: the owner waits for the end of the agent."""

SHARED_KEY_S = 10.0
"""Pause between two heartbeats while another agent uses this node's key."""

WAITING = "waiting for the coordinator"


class Activity(Protocol):
    """Activity of a member, as reported in its heartbeat."""

    finished: trio.Event
    """Set when the coordinator says that the round has ended."""

    @property
    def version(self) -> int: ...

    @property
    def phase(self) -> Phase: ...

    @property
    def tokens_per_s(self) -> float: ...


class Pulse:
    """Registration and heartbeats of one member."""

    def __init__(self, member: Member, activity: Activity) -> None:
        self._member = member
        self._coordinator = member.coordinator
        self._activity = activity
        self._session = secrets.token_hex(8)
        self._newest = 0
        self._shares = False
        self._addresses: tuple[str, ...] = ()
        """The dialable addresses that were last registered."""
        self._was_cut_off = False
        """True if the coordinator was unreachable since the last registration."""
        self.trouble = Trouble()

    async def register(self) -> None:
        """Register this node; retry after temporary errors, and raise all others."""
        settings = self._member.settings
        self._shares, self._was_cut_off = self._member.shares, False
        self._addresses = self._member.addresses if self._shares else ()
        message = Register(
            name=settings.name,
            price_micros_per_mtok=settings.price_micros_per_mtok,
            addresses=self._addresses,
            shares=self._shares,
            agent=f"echo-swarm/{version('echo-swarm')}",
            delegation=settings.delegation,
        )
        while True:
            try:
                self._apply(await self._coordinator.register(message))
                log.info(
                    "registered price_micros_per_mtok=%d addresses=%s",
                    message.price_micros_per_mtok,
                    ",".join(message.addresses) or "none",
                )
                return self._answered()
            except SwarmError as error:
                if error.http_status < 500 and not isinstance(error, RequestExpired):
                    raise
                if isinstance(error, WrongAddress) and not was_trusted(settings.home, settings.join):
                    raise
                waited_s = REGISTER_AGAIN_SHARE * self.trouble.lasts_s
                pause_s = min(max(REGISTER_AGAIN_S, waited_s), REGISTER_AGAIN_MAX_S)
                self.trouble.record(error, WAITING, next_try_s=pause_s)
                await trio.sleep(pause_s)

    async def run(self) -> None:
        """Send heartbeats until cancelled; log once when the coordinator is lost, and once when it is back."""
        while True:
            pause_s = 2.0
            try:
                if self._should_register_again:
                    await self.register()
                pause_s = (await self.beat()).heartbeat_s
                self._answered()
            except UnknownNode:
                await self.register()
            except KeyRevoked:
                raise
            except KeyInUse as error:
                pause_s = SHARED_KEY_S
                self.trouble.record(error, "this node's key is in use elsewhere")
            except SwarmError as error:
                self._note_cut(error)
                self.trouble.record(error, WAITING, next_try_s=pause_s)
            await trio.sleep(min(max(pause_s, 0.1), 60.0))

    async def listen(self) -> None:
        """Learn of every version when it is published; runs until cancelled."""
        while True:
            known = self._newest
            try:
                self._apply(await self._coordinator.newer_version(VersionRequest(newer_than=known)))
            except SwarmError as error:  # the heartbeat logs this
                self._note_cut(error)
                await trio.sleep(1.0)
            if self._newest <= known:
                await trio.sleep(AGAIN_S)

    async def leave(self) -> None:
        """Send the last heartbeat, also under cancellation; ignore failures of the coordinator."""
        with trio.move_on_after(LEAVE_S, shield=True), suppress(SwarmError):
            await self.beat(Phase.LEFT)

    async def beat(self, phase: Phase | None = None) -> HeartbeatReply:
        """Send a heartbeat with this phase; None: that of the activity."""
        traffic = self._member.policies.fetcher.traffic
        message = Heartbeat(
            session=self._session,
            version=self._activity.version,
            phase=(phase or self._activity.phase).value,
            tokens_per_s=self._activity.tokens_per_s,
            transfer=traffic.message(self._member.server.bytes_sent),
            blames=tuple(traffic.blames),
            reached=self._member.policies.milestones.unreported(),
        )
        try:
            reply = await self._coordinator.heartbeat(message)
        except KeyInUse:  # what the heartbeat says counts
            self._acknowledge(message)
            raise
        self._apply(reply)
        self._acknowledge(message)
        return reply

    def _acknowledge(self, message: Heartbeat) -> None:
        """Record that the coordinator received a heartbeat."""
        policies = self._member.policies
        traffic = policies.fetcher.traffic
        traffic.blames = [blame for blame in traffic.blames if blame not in message.blames]
        policies.milestones.acknowledge(message.reached, newest_version=self._newest)

    @property
    def _should_register_again(self) -> bool:
        """True if sharing has stopped or started (allowance used up, new month), or the addresses may differ."""
        if not self._shares or not self._member.shares:
            return self._member.shares != self._shares
        return self._was_cut_off or self._member.addresses != self._addresses

    def _note_cut(self, error: SwarmError) -> None:
        self._was_cut_off |= isinstance(error, Unreachable)

    def _answered(self) -> None:
        is_alone = isinstance(self.trouble.error, KeyInUse)
        self.trouble.clear("no other agent uses this node's key now" if is_alone else "the coordinator answers again")

    def _apply(self, reply: HeartbeatReply) -> None:
        self._newest = reply.newest_version
        self._member.policies.hint(reply.newest_version)
        if reply.finished:
            self._activity.finished.set()
