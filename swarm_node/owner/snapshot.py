"""Snapshot of a running agent as plain values, for `swarm-node status` and the live view.

- Pending and payable micro-units come from the coordinator, at the time `earnings_ms`; the credit of this run is
  counted by the agent.
- It contains no secrets, but addresses: only the owner can access the control socket.
"""

import os
from dataclasses import asdict, dataclass, field
from typing import Any

from swarm_node.allowance.governor import Governor
from swarm_node.allowance.round_gate import RoundGate
from swarm_node.base.clock import now_ms
from swarm_node.engine.pool import EnginePool
from swarm_node.ledger.notices import Notices
from swarm_node.machine import use
from swarm_node.machine.gpu import Card
from swarm_node.member import Member
from swarm_node.work.outbox import Outbox
from swarm_node.work.pulse import Pulse
from swarm_node.work.verdicts import JudgedRollout, VerdictRecorder
from swarm_node.work.worker import Worker

ANSWER_CODE_MAX_CHARS, ANSWER_TEXT_MAX_CHARS = 64, 200
"""The coordinator writes these texts: twenty answers must fit into one answer of the control socket."""

NO_READINGS: dict[str, Any] = Card("nvidia", "")._asdict()
"""The readings of a card that its driver no longer reports: all unknown."""


@dataclass(frozen=True)
class AgentSnapshot:
    """State of an agent at one moment."""

    now_ms: int
    node_id: str
    name: str
    coordinator: str
    home: str
    pid: int
    started_ms: int
    phase: str
    resting: str
    """Reason why the owner's limits prevent work; empty if they do not."""
    finishing: bool
    no_work: str
    """The coordinator's reason for giving no work, if it concerns the owner."""
    distrust: str
    """Reason why no version can be trusted."""
    trouble: str
    """Another problem, with what to do about it; empty if there is none."""
    trouble_ms: int
    """Time at which the problem began."""
    version: int
    version_age_s: float | None
    """Seconds since this node learned of the version."""
    newest_version: int
    engine: str
    tokens_per_s: float
    open_leases: int
    unsent: int
    accepted: int
    rejected: dict[str, int]
    tokens: int
    credit_micros: int
    """Credit in this run, like the counts above."""
    pending_micros: int | None
    payable_micros: int | None
    earnings_ms: int | None
    """Time of the coordinator's answer; None before the first."""
    today_micros: int | None
    """Credit since midnight, local time, less what was voided; None before the first answer."""
    unit: dict[str, Any]
    """The unit of all amounts: name and decimals. Fields that end in `_micros` are its millionths."""
    rates: dict[str, Any] | None
    """Rate of the node, payouts of its owner, and the next one; None if the coordinator has not reported them."""
    last_verdict: dict[str, Any] | None
    answers: list[dict[str, Any]]
    """The last verdicts, the newest first; `claim_id` names the receipt of an accepted rollout."""
    download: dict[str, Any] | None
    """The version being downloaded, its bytes, and the number of peers."""
    transfer: dict[str, int]
    uploaded_month_bytes: int
    upload_cap_bytes: int | None
    no_upload: str
    reach: str
    """Text: whether other nodes can connect to this node."""
    dialled: bool | None
    """The coordinator's answer to that; None if unknown."""
    addresses: list[str]
    """Addresses at which other nodes may dial this node."""
    mapping: str
    """Result of the port mapping at the router; empty before, or without an attempt."""
    cards: list[dict[str, Any]]
    """Each graphics card: its readings, and if this node uses it also its state, speed, groups, and why it rests."""
    celsius: float | None
    watts: float | None
    limits: dict[str, Any]
    """Limits that differ from their defaults."""
    rounds: list[dict[str, Any]] = field(default_factory=list)
    """The state of each of several rounds, in the owner's order; all else is that of the round that is `shown`. Empty
    with one round."""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Agent:
    """Parts of the agent that a snapshot reads."""

    member: Member
    pulse: Pulse
    worker: Worker
    engine: EnginePool
    verdicts: VerdictRecorder
    outbox: Outbox
    notices: Notices
    governor: Governor
    gate: RoundGate
    started_ms: int

    def status(self) -> dict[str, Any]:
        """Return the current state as plain values."""
        return self.snapshot().to_json()

    def snapshot(self) -> AgentSnapshot:
        """Return the current state; reads only the outbox's folder."""
        policies, governor = self.member.policies, self.governor
        heat = use.heat()
        troubles = (self.pulse.trouble, self.worker.trouble, policies.trouble)
        trouble = next((part for part in troubles if part.error), self.pulse.trouble)
        return AgentSnapshot(
            now_ms=now_ms(),
            node_id=self.member.key.node_id,
            name=self.member.settings.name,
            coordinator=self.member.settings.join.url,
            home=str(self.member.settings.home),
            pid=os.getpid(),
            started_ms=self.started_ms,
            phase=self.worker.phase.value,
            resting=self.gate.decision.reason_line,
            finishing=self.gate.finishing,
            no_work=self.worker.offers.no_work,
            distrust="" if policies.distrust is None else str(policies.distrust),
            trouble=str(trouble.error or ""),
            trouble_ms=trouble.since_ms,
            version=self.worker.version,
            version_age_s=policies.milestones.heard_ago_s(self.worker.version),
            newest_version=policies.newest,
            engine=self.worker.engine.name,
            tokens_per_s=self.worker.tokens_per_s,
            open_leases=len(self.worker.leases.open),
            unsent=len(self.outbox),
            accepted=self.verdicts.accepted,
            rejected=self.verdicts.rejected,
            tokens=self.verdicts.tokens,
            credit_micros=self.verdicts.credit_micros,
            **self._earned(),
            unit=policies.unit.to_json(),
            rates=self.notices.rates.to_json(self.member.key.node_id) if self.notices.rates else None,
            last_verdict=self._last_verdict(),
            answers=[judged_row(judged) for judged in reversed(self.verdicts.answers)],
            download=policies.fetcher.download.to_json() if policies.fetcher.download else None,
            transfer=policies.fetcher.traffic.message(self.member.server.bytes_sent).model_dump(),
            uploaded_month_bytes=self.member.uploads.this_month(),
            upload_cap_bytes=self.member.uploads.cap_bytes,
            no_upload=governor.decision.no_upload,
            reach=self.member.reach.describe(policies.plans.dialled),
            dialled=policies.plans.dialled,
            addresses=list(self.member.addresses),
            mapping=self.member.reach.mapping,
            cards=card_states(governor, self.engine),
            celsius=heat.celsius,
            watts=heat.watts,
            limits=governor.limits.model_dump(exclude_defaults=True),
        )

    def round_row(self) -> dict[str, Any]:
        """Return what the owner sees of this round beside others."""
        state = self.status()
        names = ("phase", "version", "accepted", "open_leases", "unsent", "unit")
        earned = ("credit_micros", "pending_micros", "payable_micros", "today_micros", "earnings_ms")
        texts = {name: state[name][:ANSWER_TEXT_MAX_CHARS] for name in ("no_work", "distrust", "trouble", "resting")}
        return {name: state[name] for name in (*names, *earned)} | texts

    def _earned(self) -> dict[str, Any]:
        reported = self.notices.last
        row = (
            None
            if reported is None
            else next((r for r in reported[1].nodes if r.node_id == self.member.key.node_id), None)
        )
        return {
            "pending_micros": row.pending_micros if row else None,
            "payable_micros": row.payable_micros if row else None,
            "earnings_ms": reported[0] if reported else None,
            "today_micros": self.notices.today_micros,
        }

    def _last_verdict(self) -> dict[str, Any] | None:
        if not self.verdicts.answers:
            return None
        at_ms, lease_id, _, verdict = self.verdicts.answers[-1]
        said = {"outcome": verdict.outcome, "code": verdict.code, "message": verdict.message}
        return {"at_ms": at_ms, "lease_id": lease_id, "credit_micros": verdict.credit_micros, **said}


def judged_row(judged: JudgedRollout) -> dict[str, Any]:
    """Return an answer of the coordinator as plain values of limited size."""
    verdict = judged.verdict
    return {
        "at_ms": judged.at_ms,
        "lease_id": judged.lease_id,
        "claim_id": judged.claim_id,
        "outcome": verdict.outcome,
        "code": verdict.code[:ANSWER_CODE_MAX_CHARS],
        "message": verdict.message[:ANSWER_TEXT_MAX_CHARS],
        "tokens": verdict.tokens,
        "credit_micros": verdict.credit_micros,
    }


def card_states(governor: Governor, engine: EnginePool) -> list[dict[str, Any]]:
    """Return the cards that the driver reports and those that the engines use, by number."""
    cards: dict[int, dict[str, Any]] = {card.number: card._asdict() for card in governor.cards.cards}
    for state in engine.states():
        decision = governor.card_decisions.get(state["number"])
        reason = decision.reason_line if decision is not None and decision.reasons else state["reason"]
        readings = cards.get(state["number"], NO_READINGS)
        cards[state["number"]] = {**readings, **state, "reason": reason}
    return [cards[number] for number in sorted(cards)]
