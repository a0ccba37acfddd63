"""Plans of the coordinator for the broadcast of versions, as this node requests, follows and reports on them.

- A plan names the peers to ask for a version, those that this node must call because it feeds them, and a peer to
  dial as a probe.
- A request for a plan reports how this node can be reached; the plan of the next version uses it.
- Without a plan, the peers of the last one are asked, which may have the version now, and the origins.
- After a download, the transfer receipt names the peers that sent the version, and those that could be dialled.
"""

import logging

from protocol import limits
from protocol.errors import SwarmError
from protocol.policy.manifest import PolicyManifest
from protocol.work.messages import FetchPlan, PeerUpload, PlanRequest, TransferReceipt
from swarm_node.coordinator_api.client import Coordinator
from swarm_node.coordinator_api.origins import Origins
from swarm_node.p2p.download import FetchReport
from swarm_node.p2p.host import Host
from swarm_node.reach.listening import CAN, CANNOT

log = logging.getLogger(__name__)


class BroadcastPlans:
    """Plans of one round, as this node follows them."""

    def __init__(self, coordinator: Coordinator, origins: Origins, host: Host) -> None:
        self._coordinator = coordinator
        self._origins = origins
        self._host = host
        self.punches = host.punches
        self._plan: FetchPlan | None = None
        """The last plan that was followed; the peers in its `calls` are called."""
        self.version = 0
        """Version of the last plan that was followed; 0 before the first."""
        self.dialled: bool | None = None
        """True if other nodes could recently dial this node, by the last plan that knew."""

    async def begin(self, version: int) -> FetchPlan | None:
        """Follow the plan of a version from this node's present network; None if the coordinator gives no plan."""
        self._host.own_network = await self._origins.at_home()
        return await self.renew(version)

    async def renew(self, version: int) -> FetchPlan | None:
        """Request and follow the plan of a version; None if the coordinator gives none."""
        try:
            plan = await self.report_place(version)
        except SwarmError as error:
            log.info("no download plan version=%d code=%s: %s", version, error.code, error)
            return None
        self._host.call(peer for peer in plan.calls if peer.address)
        self.punches.follow(plan.punches, plan.observers)
        if plan.probe and plan.probe.address:
            self._host.dials.start(plan.probe)
        self.version, self._plan = version, plan
        if plan.dialled is not None and plan.dialled != self.dialled:
            self.dialled = plan.dialled
            log.info("version=%d: %s", version, CAN if plan.dialled else CANNOT)
        return plan

    async def report_place(self, version: int) -> FetchPlan:
        """Report how this node can be reached, with a request for a plan; return the plan."""
        report = self.punches.results.report()
        request = PlanRequest(
            version=version, observed=report.observed, punched=report.punched, unpunched=report.unpunched
        )
        plan = await self._coordinator.plan(request)
        self.punches.results.confirm(report)
        return plan

    def substitute(self) -> FetchPlan:
        """Return a plan without stripes: the peers of the last plan."""
        peers = [peer.model_copy(update={"stripes": ()}) for peer in (self._plan.peers if self._plan else ())]
        return FetchPlan(stripes=1, peers=tuple(peers), rate=0.0, hops=1, help_rate=0.0)

    def receipt(self, manifest: PolicyManifest, report: FetchReport) -> TransferReceipt:
        """Return the transfer receipt of a download."""
        seconds = min(max(report.seconds, limits.FETCH_MIN_S), limits.FETCH_MAX_S)
        uploads = [
            PeerUpload(
                peer_id=name,
                size_bytes=size,
                busy_s=seconds if (busy_s := report.busy_s[name]) is None else min(busy_s, seconds),
            )
            for name, size in report.bytes_from_node.items()
        ]
        answered, unanswered = self._host.dials.take_report()
        to_dial = {peer.peer_id for plan in report.plans for peer in (*plan.peers, *plan.calls) if not peer.calls}
        probe = next((plan.probe.peer_id for plan in report.plans if plan.probe), None)
        return TransferReceipt(
            round_id=manifest.round_id,
            version=manifest.version,
            seconds=seconds,
            uploads=tuple(uploads[: limits.PEERS_MAX]),
            from_origins=report.bytes_from["origin"],
            answered=tuple(answered[: limits.DIALS_MAX]),
            unanswered=tuple([name for name in unanswered if name in to_dial][: limits.DIALS_MAX]),
            missed_probe=probe if probe in unanswered else None,
        )

    async def send(self, receipt: TransferReceipt) -> None:
        """Send a transfer receipt; one that is lost is not sent again."""
        try:
            await self._coordinator.fetched(receipt)
        except SwarmError as error:
            log.debug("transfer receipt not sent version=%d code=%s", receipt.version, error.code)
