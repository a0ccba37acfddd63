"""The sender: brings the outbox to the coordinator and takes note of each verdict.

- A rollout leaves the outbox only for a verdict on it; a lost answer means sending it again, which is harmless.
- The claims of accepted rollouts are noted before that: by their names the owner gets receipts.
- Every rejection is told to the owner with its code and reason, and to the guard, which stops a node that has too many.
  Its evidence is kept first, also where a whole request is refused and its rollouts wait; without room on the disk the
  rollout leaves the outbox all the same, since it would be rejected again for having been judged.

The guard stops a node whose work is rejected again and again:

- Nobody should burn power in vain, nor collect faults without knowing it.
- A refusal that is the node's fault counts against `REJECTIONS_MAX` in a row; one that only came too late, as after a
  lost line, against a larger number. Anything accepted begins the count anew.
- What is kept is what the owner needs: lease, code and the coordinator's words, for `swarm-node why`.
"""

import logging
import math
from collections import Counter, deque
from typing import NamedTuple

import trio

from protocol import limits
from protocol.errors import ERRORS, DiskFull, LeaseClosed, StaleVersion, SwarmError, Unreachable
from protocol.ids import LeaseId
from protocol.work import evidence
from protocol.work.evidence import RejectionEvidence
from protocol.work.messages import Submission, Verdict
from swarm_node.base.clock import now_ms
from swarm_node.coordinator_api.client import Coordinator
from swarm_node.ledger.receipts import Claims
from swarm_node.work.outbox import Outbox
from swarm_node.work.rejections import Refusals

REJECTIONS_MAX = 5
"""An honest node on sound hardware has none; five in a row are no accident."""

LATE_MAX = 24
"""Three requests full of rollouts that came back too late: a line that was away, or a machine that is too slow."""

LATE = frozenset({LeaseClosed.code, StaleVersion.code})


class RejectedTooOften(SwarmError):
    """This node's rollouts were refused again and again, so it stopped by itself."""

    code, http_status, fault = "rejected_too_often", 422, "node"


class Rejected(NamedTuple):
    """One refusal."""

    lease_id: str
    code: str
    message: str


class Guard:
    """Counts refusals in a row."""

    def __init__(self) -> None:
        self._faults = self._late = 0
        self._tripped = trio.Event()
        self.lately: deque[Rejected] = deque(maxlen=REJECTIONS_MAX)
        """The last refusals, the newest last."""

    @property
    def tripped(self) -> bool:
        return self._tripped.is_set()

    def record(self, lease_id: LeaseId, verdict: Verdict) -> None:
        """Take note of a verdict."""
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
        """Raise when it is enough."""
        await self._tripped.wait()
        raise self.verdict()

    def verdict(self) -> RejectedTooOften:
        """What is said to the owner."""
        last = self.lately[-1]
        codes = ", ".join(dict.fromkeys(one.code for one in self.lately))
        if self._faults >= REJECTIONS_MAX:
            said = f"{self._faults} rollouts in a row were rejected ({codes}); the last, lease {last.lease_id}: "
            evidence = f"`swarm-node why JOIN_STRING {last.lease_id}` shows the evidence"
            hint = f"{evidence}, `swarm-node doctor` checks the engine."
        else:
            said = f"{self._late} rollouts in a row came too late ({codes}); the last, lease {last.lease_id}: "
            hint = "Lower --groups, or run `swarm-node doctor` to check the speed of the network and the disk."
        return RejectedTooOften(said + last.message, hint=hint)


log = logging.getLogger(__name__)

ROLLOUTS_PER_REQUEST = 8
ROLLOUT_BYTES_PER_REQUEST = limits.MESSAGE_MAX_BYTES // 2
"""Leaves room for the words around them; a single larger one still goes alone."""

WORD_S = 30.0
"""Between two lines about what was earned."""

PAUSES_S = (0.5, 1.0, 2.0, 5.0, 10.0)
"""Between attempts while the coordinator does not take rollouts; the last is repeated."""


class Sender:
    """Sends what is in the outbox; `wake` it when something was put there."""

    def __init__(self, coordinator: Coordinator, outbox: Outbox, claims: Claims, refusals: Refusals) -> None:
        self._coordinator = coordinator
        self._outbox = outbox
        self._claims = claims
        self._refusals = refusals
        self._woken = trio.Event()
        self._next_word = -math.inf
        self._has_room = True
        """For evidence, the last time that some was kept."""
        self.verdicts: Counter[str] = Counter()
        """Outcome, or the code of a rejection → how often."""
        self.guard = Guard()
        self.last: tuple[int, LeaseId, Verdict] | None = None
        """The last verdict, and when it came."""
        self.tokens = 0
        self.credit_micros = 0

    def wake(self) -> None:
        self._woken.set()

    async def run(self) -> None:
        """Send for ever."""
        failures = 0
        while True:
            self._woken = trio.Event()
            try:
                sent = await self.send_some()
                failures = 0
                self._tell()
            except SwarmError as error:
                level = logging.DEBUG if isinstance(error, Unreachable) else logging.WARNING
                log.log(level, "rollouts not sent yet code=%s: %s", error.code, error)
                await trio.sleep(PAUSES_S[min(failures, len(PAUSES_S) - 1)])
                failures += 1
                continue
            if not sent:
                await self._woken.wait()

    def _tell(self) -> None:
        """Say now and then what was earned."""
        if self.verdicts and trio.current_time() >= self._next_word:
            self._next_word = trio.current_time() + WORD_S
            log.info(
                "credited tokens=%d credit_micros=%d verdicts=%s", self.tokens, self.credit_micros, dict(self.verdicts)
            )

    async def send_some(self) -> int:
        """Send the oldest rollouts; how many were judged."""
        waiting = await trio.to_thread.run_sync(self._outbox.waiting, ROLLOUTS_PER_REQUEST, ROLLOUT_BYTES_PER_REQUEST)
        if not waiting:
            return 0
        try:
            reply = await self._coordinator.submit(Submission(rollouts=tuple(waiting.values())))
        except SwarmError as error:
            await trio.to_thread.run_sync(self._keep_all, waiting, error)
            raise
        judged = list(zip(waiting, reply.verdicts, strict=True))
        accepted = [waiting[lease_id] for lease_id, verdict in judged if verdict.outcome != "rejected"]
        await trio.to_thread.run_sync(self._claims.add, accepted)
        for lease_id, verdict in judged:
            self._note(lease_id, verdict)
            if verdict.outcome != "rejected":
                await trio.to_thread.run_sync(self._refusals.forget, lease_id)  # of a request before this one
            elif verdict.evidence is not None:
                await trio.to_thread.run_sync(self._keep, lease_id, waiting[lease_id], verdict.evidence)
            await trio.to_thread.run_sync(self._outbox.remove, lease_id)
        return len(waiting)

    def _keep_all(self, waiting: dict[LeaseId, bytes], error: SwarmError) -> None:
        """The request that brings these was refused; of a coordinator that cannot take them now nothing is kept."""
        if error.code in evidence.RULES:
            for lease_id, envelope in waiting.items():
                self._keep(lease_id, envelope, evidence.build_evidence(error, envelope=envelope, lease_id=lease_id))

    def _keep(self, lease_id: LeaseId, envelope: bytes, found: RejectionEvidence) -> None:
        """Keep the evidence of one refusal, if there is room; said once while there is none."""
        try:
            self._refusals.keep(lease_id, envelope, found)
            self._has_room = True
        except DiskFull as error:
            if self._has_room:
                log.warning("cannot save the evidence of rejections code=%s: %s", error.code, error)
            self._has_room = False

    def _note(self, lease_id: LeaseId, verdict: Verdict) -> None:
        self.verdicts[verdict.code or verdict.outcome] += 1
        self.last = (now_ms(), lease_id, verdict)
        self.guard.record(lease_id, verdict)
        if verdict.outcome == "rejected":
            log.warning("rollout rejected lease=%s code=%s: %s", lease_id, verdict.code, verdict.message)
            return
        self.tokens += verdict.tokens
        self.credit_micros += verdict.credit_micros
