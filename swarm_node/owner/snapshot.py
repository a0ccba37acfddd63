"""What a running agent says of itself: to `swarm-node status`, and to the live view. One look, plain values.

- Micro-units of credit are the coordinator's word, as old as `earnings_ms` says; what this run was credited with is
  counted here.
- Nothing secret is in it, but whoever reads it sees addresses: the control socket is the owner's alone.
"""

import os
from dataclasses import asdict, dataclass
from typing import Any

from swarm_node.allowance.governor import Governor
from swarm_node.base.clock import now_ms
from swarm_node.ledger.notices import Notices
from swarm_node.machine import use
from swarm_node.member import Member
from swarm_node.work.outbox import Outbox
from swarm_node.work.pulse import Pulse
from swarm_node.work.sender import Sender
from swarm_node.work.worker import Worker


@dataclass(frozen=True)
class AgentSnapshot:
    """An agent at one moment."""

    now_ms: int
    node_id: str
    name: str
    coordinator: str
    home: str
    pid: int
    started_ms: int
    phase: str
    resting: str
    """Why the owner's limits let it not work; empty if they do."""
    finishing: bool
    no_work: str
    """Why the coordinator gives none, as far as it concerns the owner."""
    distrust: str
    """Why no version may be worked with."""
    trouble: str
    """What else stands in the way, and what to do about it; empty if nothing does."""
    trouble_ms: int
    """Since when."""
    version: int
    version_age_s: float | None
    """Since this node heard of it."""
    newest_version: int
    engine: str
    tokens_per_s: float
    open_leases: int
    unsent: int
    accepted: int
    rejected: dict[str, int]
    tokens: int
    credit_micros: int
    """In this run, as the lines above."""
    pending_micros: int | None
    payable_micros: int | None
    earnings_ms: int | None
    """When the coordinator said so; None if it has not yet."""
    last_verdict: dict[str, Any] | None
    download: dict[str, Any] | None
    """The version on its way, its bytes, and from how many peers."""
    transfer: dict[str, int]
    uploaded_month_bytes: int
    upload_cap_bytes: int | None
    no_upload: str
    reach: str
    """Whether others can connect to this node."""
    dialled: bool | None
    """The same, as the coordinator says; None if it does not."""
    addresses: list[str]
    """Where others may dial it."""
    mapping: str
    """What became of the attempt to have the router forward the port; empty before, or where none was made."""
    cards: list[dict[str, Any]]
    celsius: float | None
    watts: float | None
    limits: dict[str, Any]
    """Those that differ from their defaults."""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Agent:
    """The parts that a snapshot is taken of."""

    member: Member
    pulse: Pulse
    worker: Worker
    sender: Sender
    outbox: Outbox
    notices: Notices
    governor: Governor
    started_ms: int

    def snapshot(self) -> AgentSnapshot:
        """As it is now; asks the outbox's folder, and nobody else."""
        verdicts = dict(self.sender.verdicts)
        accepted = verdicts.pop("accepted", 0) + verdicts.pop("already_accepted", 0)
        policies, governor = self.member.policies, self.governor
        heat = use.heat()
        troubles = (self.pulse.trouble, self.worker.trouble, policies.trouble)
        trouble = next((one for one in troubles if one.error), self.pulse.trouble)
        return AgentSnapshot(
            now_ms=now_ms(),
            node_id=self.member.key.node_id,
            name=self.member.settings.name,
            coordinator=self.member.settings.join.url,
            home=str(self.member.settings.home),
            pid=os.getpid(),
            started_ms=self.started_ms,
            phase=self.worker.phase.value,
            resting=governor.decision.reason_line,
            finishing=governor.finishing,
            no_work=self.worker.idle_for,
            distrust="" if policies.distrust is None else str(policies.distrust),
            trouble=str(trouble.error or ""),
            trouble_ms=trouble.since_ms,
            version=self.worker.version,
            version_age_s=policies.milestones.heard_ago_s(self.worker.version),
            newest_version=policies.newest,
            engine=self.worker.engine_name,
            tokens_per_s=self.worker.tokens_per_s,
            open_leases=self.worker.open_leases,
            unsent=len(self.outbox),
            accepted=accepted,
            rejected=verdicts,
            tokens=self.sender.tokens,
            credit_micros=self.sender.credit_micros,
            **self._earned(),
            last_verdict=self._last_verdict(),
            download=policies.download.to_json() if policies.download else None,
            transfer=policies.traffic.message(self.member.server.bytes_sent).model_dump(),
            uploaded_month_bytes=self.member.uploads.this_month(),
            upload_cap_bytes=self.member.uploads.cap_bytes,
            no_upload=governor.decision.no_upload,
            reach=self.member.reach.describe(policies.dialled),
            dialled=policies.dialled,
            addresses=list(self.member.addresses),
            mapping=self.member.reach.mapping,
            cards=[card._asdict() for card in governor.cards.cards],
            celsius=heat.celsius,
            watts=heat.watts,
            limits=governor.limits.model_dump(exclude_defaults=True),
        )

    def _earned(self) -> dict[str, int | None]:
        told = self.notices.last
        row = None if told is None else next((r for r in told[1].nodes if r.node_id == self.member.key.node_id), None)
        return {
            "pending_micros": row.pending_micros if row else None,
            "payable_micros": row.payable_micros if row else None,
            "earnings_ms": told[0] if told else None,
        }

    def _last_verdict(self) -> dict[str, Any] | None:
        if self.sender.last is None:
            return None
        at_ms, lease_id, verdict = self.sender.last
        said = {"outcome": verdict.outcome, "code": verdict.code, "message": verdict.message}
        return {"at_ms": at_ms, "lease_id": lease_id, "credit_micros": verdict.credit_micros, **said}
