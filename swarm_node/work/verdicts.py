"""Verdicts of the coordinator: recorded on the disk, counted for the owner, and watched by a guard.

- The claims of accepted rollouts are recorded first: their ids are needed to request receipts. A rollout leaves the
  outbox last.
- Every rejection is logged with its code and reason; those of one request that came too late are one line. The guard
  counts them, which stops a node with too many. Its
  evidence is stored before the rollout leaves the outbox, also when a whole request is rejected and its rollouts stay.
  If the disk is full the rollout still leaves the outbox, since it would be rejected again as already judged.

The guard stops a node whose work is rejected repeatedly:

- An owner must not waste power or collect faults without knowing it.
- A rejection that is the node's fault counts against `REJECTIONS_MAX` in a row; one for lateness, as after a network
  failure, counts against a larger number. An accepted rollout resets both counts.
- It keeps what the owner needs for `swarm-node why`: lease, code and the coordinator's message.
"""

import logging
import math
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import trio

from protocol.errors import ERRORS, DiskFull, LeaseClosed, StaleVersion, SwarmError
from protocol.ids import LeaseId
from protocol.work import evidence
from protocol.work.evidence import RejectionEvidence
from protocol.work.messages import Verdict
from swarm_node.base.clock import now_ms
from swarm_node.ledger.receipts import Claims
from swarm_node.work.outbox import Outbox
from swarm_node.work.records import Rejections

log = logging.getLogger(__name__)

CREDIT_LINE_S = 30.0
"""Interval of log lines about credit."""

ANSWERS_MAX = 20
"""Answers that the owner's page and `status --json` show."""

REJECTIONS_MAX = 5
"""An honest node on working hardware has none; five in a row are not accidental."""

LATE_MAX = 24
"""Three full requests of late rollouts: the network was down, or the machine is too slow."""

LATE = frozenset({LeaseClosed.code, StaleVersion.code})


class RejectedTooOften(SwarmError):
    """The node stopped itself because its rollouts were rejected repeatedly."""

    code, http_status, fault = "rejected_too_often", 422, "node"


class JudgedRollout(NamedTuple):
    """The coordinator's answer to one rollout."""

    at_ms: int
    lease_id: LeaseId
    claim_id: str
    """Id by which a receipt is requested; empty for a rejected rollout."""
    verdict: Verdict


class Rejected(NamedTuple):
    """Rejection of one rollout, for the owner."""

    lease_id: str
    code: str
    message: str


class Guard:
    """Counter of consecutive rejections."""

    def __init__(self) -> None:
        self._faults = self._late = 0
        self._tripped = trio.Event()
        self.lately: deque[Rejected] = deque(maxlen=REJECTIONS_MAX)
        """The last rejections, the newest last."""

    @property
    def tripped(self) -> bool:
        return self._tripped.is_set()

    def record(self, lease_id: LeaseId, verdict: Verdict) -> None:
        """Record a verdict."""
        if verdict.outcome != "rejected":
            self._faults = self._late = 0
            return
        self.lately.append(Rejected(lease_id, verdict.code, verdict.message))
        if verdict.code in LATE:
            self._late += 1
        elif ERRORS.get(verdict.code, SwarmError).fault == "node":
            self._faults += 1
        if self._faults >= REJECTIONS_MAX or self._late >= LATE_MAX:
            self._tripped.set()

    async def run(self) -> None:
        """Raise `RejectedTooOften` when a limit is reached."""
        await self._tripped.wait()
        raise self.verdict()

    def verdict(self) -> RejectedTooOften:
        """Return the error for the owner."""
        last = self.lately[-1]
        codes = ", ".join(dict.fromkeys(rejection.code for rejection in self.lately))
        if self._faults >= REJECTIONS_MAX:
            said = f"{self._faults} rollouts in a row were rejected ({codes}); the last, lease {last.lease_id}: "
            evidence = f"`swarm-node why {last.lease_id}` shows the evidence"
            hint = f"{evidence}, `swarm-node doctor` checks the engine."
        else:
            said = f"{self._late} rollouts in a row came too late ({codes}); the last, lease {last.lease_id}: "
            hint = "Lower --groups, or run `swarm-node doctor` to check the speed of the network and the disk."
        return RejectedTooOften(said + last.message, hint=hint)


class VerdictRecorder:
    """Recorder of the coordinator's verdicts: on the disk, for the owner, and for the guard."""

    def __init__(self, outbox: Outbox, claims: Claims, rejections: Rejections) -> None:
        self._outbox = outbox
        self._claims = claims
        self._rejections = rejections
        self._recording = trio.Lock()
        """Held while the answer to one request, or its failure, is recorded."""
        self._has_room = True
        """True if the disk had space for the last evidence."""
        self._next_credit_line = -math.inf
        self.guard = Guard()
        self.counts: Counter[str] = Counter()
        """Count by outcome, or by code for rejections."""
        self.answers: deque[JudgedRollout] = deque(maxlen=ANSWERS_MAX)
        """The last verdicts, the newest last."""
        self.tokens = 0
        self.credit_micros = 0

    @property
    def accepted(self) -> int:
        """Return the number of accepted rollouts."""
        return self.counts["accepted"] + self.counts["already_accepted"]

    @property
    def rejected(self) -> dict[str, int]:
        """Return the number of rejected rollouts by code."""
        return {code: count for code, count in self.counts.items() if code not in ("accepted", "already_accepted")}

    async def record(self, sent: Mapping[LeaseId, bytes], verdicts: Sequence[Verdict]) -> None:
        """Record the verdicts on the rollouts of one request, and delete these from the outbox."""
        judged = list(zip(sent, verdicts, strict=True))
        accepted = {lease_id: sent[lease_id] for lease_id, verdict in judged if verdict.outcome != "rejected"}
        async with self._recording:
            claim_ids = await trio.to_thread.run_sync(self._claims.add, accepted.values())
            claims = dict(zip(accepted, claim_ids, strict=True))
            for lease_id, verdict in judged:
                self._count(JudgedRollout(now_ms(), lease_id, claims.get(lease_id, ""), verdict))
                if verdict.outcome != "rejected":
                    await trio.to_thread.run_sync(self._rejections.forget, lease_id)  # from an earlier request
                elif verdict.evidence is not None:
                    await trio.to_thread.run_sync(self._keep, lease_id, sent[lease_id], verdict.evidence)
                await trio.to_thread.run_sync(self._outbox.remove, lease_id)
        self._log_rejections([(lease_id, verdict) for lease_id, verdict in judged if verdict.outcome == "rejected"])
        self._log_credit()

    async def record_rejected_request(self, sent: Mapping[LeaseId, bytes], error: SwarmError) -> None:
        """Store the evidence of a rejected request; nothing is stored if the coordinator only cannot accept it now.

        In both cases it waits while an earlier answer is recorded, so that the sender sees answers and failures in
        their order.
        """
        async with self._recording:
            if error.code in evidence.RULES:
                await trio.to_thread.run_sync(self._keep_all, sent, error)

    def _count(self, answer: JudgedRollout) -> None:
        lease_id, verdict = answer.lease_id, answer.verdict
        self.counts[verdict.code or verdict.outcome] += 1
        self.answers.append(answer)
        self.guard.record(lease_id, verdict)
        if verdict.outcome != "rejected":
            self.tokens += verdict.tokens
            self.credit_micros += verdict.credit_micros

    def _log_rejections(self, rejected: Sequence[tuple[LeaseId, Verdict]]) -> None:
        """Log each rejection, but those that came too late once for each code: a whole outbox may be late."""
        late = Counter(verdict.code for _, verdict in rejected if verdict.code in LATE)
        for lease_id, verdict in rejected:
            count = late.pop(verdict.code, 0) if verdict.code in LATE else 1
            if count:
                more = f" ({count - 1} more with this code)" if count > 1 else ""
                log.warning("rollout rejected lease=%s code=%s: %s%s", lease_id, verdict.code, verdict.message, more)

    def _log_credit(self) -> None:
        """Log the credit at intervals."""
        if trio.current_time() >= self._next_credit_line:
            self._next_credit_line = trio.current_time() + CREDIT_LINE_S
            codes = ",".join(f"{code}:{count}" for code, count in self.rejected.items())
            log.info(
                "credited tokens=%d accepted=%d rejected=%d%s",
                self.tokens,
                self.accepted,
                sum(self.rejected.values()),
                f" ({codes})" if codes else "",
            )

    def _keep_all(self, sent: Mapping[LeaseId, bytes], error: SwarmError) -> None:
        for lease_id, envelope in sent.items():
            self._keep(lease_id, envelope, evidence.build_evidence(error, envelope=envelope, lease_id=lease_id))

    def _keep(self, lease_id: LeaseId, envelope: bytes, rejection: RejectionEvidence) -> None:
        """Store the evidence of a rejection if the disk has space; log once while it has none."""
        try:
            self._rejections.record(lease_id, envelope, rejection)
            self._has_room = True
        except DiskFull as error:
            if self._has_room:
                log.warning("cannot save the evidence of rejections code=%s: %s", error.code, error)
            self._has_room = False
