"""Offers of leases: requests them from the coordinator, and decides for each lease whether this node starts it.

- A lease that cannot be completed in time, or pays too little, is never started (`lease_pacing`): it is returned.
- A lease is in the lease log before it is started.
- Leases that wait for the lease log when the owner's gate closes at once are returned.
- A reply with other leases than were requested is an error of the coordinator: all of them are returned.
- `no_work` is the reason for the owner why nothing is sampled; it is logged when it changes.
"""

import logging
from collections.abc import Callable, Sequence

import trio

from protocol.errors import DiskFull, LeaseClosed
from protocol.work.lease import Lease
from protocol.work.messages import LeaseReply, LeaseRequest, Reason
from swarm_node.coordinator_api.client import Coordinator
from swarm_node.work.held_leases import HeldLeases
from swarm_node.work.lease_pacing import LeasePacing, NodePace, sort_out
from swarm_node.work.pulse import NO_WORK, Gate
from swarm_node.work.records import LeaseLog

log = logging.getLogger(__name__)

DECLINED_PAUSE_S = 30.0
"""Pause after declined leases: the next ones would not be better."""

TURN_DUE = "the environments of its episodes have not answered yet; the next turns come by themselves"
"""The reason why a node between two turns has no work."""


class LeaseOffers:
    """Requests for leases, and decisions about the leases that are offered."""

    def __init__(
        self,
        *,
        coordinator: Coordinator,
        leases: HeldLeases,
        lease_log: LeaseLog,
        gate: Gate,
        pacing: LeasePacing,
        pace: Callable[[], NodePace],
        price_floor: Callable[[], int] = lambda: 0,
    ) -> None:
        self._coordinator = coordinator
        self._leases = leases
        self._lease_log = lease_log
        self._gate = gate
        self.pacing = pacing
        self._pace = pace
        self._price_floor = price_floor
        self.no_work = ""
        """Reason why there is no work, from the coordinator's reply or its offer; empty if there is work."""
        self.last_price_micros_per_mtok: int | None = None
        """Price of the lease that was accepted last; None before the first."""

    async def request(self, request: LeaseRequest) -> LeaseReply:
        """Request leases; raise an error if the coordinator offers others than this node requested."""
        reply = await self._coordinator.lease(request)
        self.pacing.record_request()
        new = self._leases.add_offered(reply.leases)
        if not len(new) == len(reply.leases) <= request.groups or any(
            lease.version != request.version for lease in reply.leases
        ):
            await self._leases.return_leases(sorted(new))
            raise LeaseClosed("The coordinator offers leases that this node did not ask for, or one of them twice.")
        return reply

    async def accept(self, offered: Sequence[Lease]) -> tuple[Lease, ...]:
        """Return the offered leases that are to be started; return the others to the coordinator at once."""
        if not offered:
            return ()
        if self._gate.decision.at_once:
            await self._leases.return_leases([lease.lease_id for lease in offered])
            return ()
        now_ms, price_floor = self._coordinator.now_ms(), self._price_floor()
        offer = sort_out(offered, now_ms=now_ms, pace=self._pace(), price_floor=price_floor)
        if offer.declined:
            if not self.no_work:
                log.warning("leases declined count=%d: %s", len(offer.declined), offer.why)
            await self._leases.return_leases(offer.declined)
            self.pacing.pause(DECLINED_PAUSE_S)
        self.no_work = "" if offer.begun else offer.why
        if not offer.begun:
            return ()
        lease_ids = [lease.lease_id for lease in offer.begun]
        try:
            await trio.to_thread.run_sync(self._lease_log.record, offer.begun)
        except (DiskFull, LeaseClosed):
            await self._leases.return_leases(lease_ids)
            raise
        if self._gate.decision.at_once:  # since then: they were not open, so `Worker.return_open` left them out
            await self._leases.return_leases(lease_ids)
            return ()
        self.last_price_micros_per_mtok = offer.begun[-1].price_micros_per_mtok
        return offer.begun

    def record_no_work(self, reason: Reason, *, turn_due: bool) -> None:
        """Record why there is no work, and log a reason that is new; a next turn that is due is none to log."""
        if reason not in NO_WORK and self.no_work in ("", TURN_DUE):
            self.no_work = TURN_DUE if turn_due else ""
        elif reason in NO_WORK and self.no_work != NO_WORK[reason]:
            log.warning("no work: %s", NO_WORK[reason])
            self.no_work = NO_WORK[reason]
