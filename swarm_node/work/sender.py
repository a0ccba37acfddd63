"""The sender: sends the outbox to the coordinator and records each verdict.

- A rollout leaves the outbox only after its verdict; after a lost answer it is sent again, which is harmless.
- The claims of accepted rollouts are recorded before that: their ids are needed to request receipts.
- Every rejection is logged with its code and reason, and counted by the guard, which stops a node with too many. Its
  evidence is stored first, also when a whole request is refused and its rollouts stay. If the disk is full the rollout
  still leaves the outbox, since it would be rejected again as already judged.
- One request at a time, so that the groups that end meanwhile share the next one. A turn of an episode is sent at once,
  beside the others, since the next turn depends on it. After a failure none is, until the next answer.
- All requests under way share the limits of one: with eight rollouts under way a turn waits. One rollout that is larger
  than the space left is still sent.
- The answer may have leases, for the next turns of episodes: the worker gets them before the verdicts are recorded. The
  answer to rollouts that are sent again has none; then the worker gets the turn by an ordinary request.

The guard stops a node whose work is rejected repeatedly:

- An owner must not waste power or collect faults without knowing it.
- A rejection that is the node's fault counts against `REJECTIONS_MAX` in a row; one for lateness, as after a network
  failure, counts against a larger number. An accepted rollout resets both counts.
- It keeps what the owner needs for `swarm-node why`: lease, code and the coordinator's message.

The outbox: finished rollouts, stored on the disk until the coordinator has judged them.

- One file per lease, named after it; a lease answered twice is the same file.
- `put` returns when the bytes are synced: after that neither a crash nor a network failure loses the work.
- Rollouts left unsent by a crash are sent at the next start; the coordinator recognises duplicates.
"""

import logging
import math
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Collection, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import trio

from protocol import limits
from protocol.errors import ERRORS, DiskFull, LeaseClosed, StaleVersion, SwarmError, Unreachable
from protocol.ids import LeaseId
from protocol.work import evidence
from protocol.work.evidence import RejectionEvidence
from protocol.work.lease import Lease
from protocol.work.messages import Submission, Verdict
from swarm_node.base.clock import now_ms
from swarm_node.base.disk import disk_named, write_durably
from swarm_node.coordinator_api.client import Coordinator
from swarm_node.ledger.receipts import Claims
from swarm_node.work.rejections import Rejections

_SUFFIX = ".rollout"


class Outbox:
    """Signed rollouts that wait for a verdict."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        with disk_named(folder):
            (folder / "incoming").mkdir(parents=True, exist_ok=True)
        for leftover in (folder / "incoming").iterdir():
            leftover.unlink(missing_ok=True)

    def put(self, lease_id: LeaseId, envelope: bytes) -> None:
        write_durably(self._folder / f"{lease_id}{_SUFFIX}", envelope, temp_folder=self._folder / "incoming")

    def waiting(self, count: int, max_bytes: int, *, but: Collection[LeaseId] = frozenset()) -> dict[LeaseId, bytes]:
        """Return the oldest unsent rollouts without `but`: at least one, then as many as fit into both limits.

        Files with the same time stamp are sorted by name, so that the order is stable. A file that is removed
        meanwhile, as after the verdict of another request, is skipped.
        """
        taken: dict[LeaseId, bytes] = {}
        with disk_named(self._folder):
            unsent = list[tuple[int, Path]]()
            for path in self._folder.glob(f"*{_SUFFIX}"):
                with suppress(FileNotFoundError):
                    if path.stem not in but:
                        unsent.append((path.stat().st_mtime_ns, path))
            for _, path in sorted(unsent)[:count]:
                with suppress(FileNotFoundError):
                    envelope = path.read_bytes()
                    if taken and sum(map(len, taken.values())) + len(envelope) > max_bytes:
                        break
                    taken[LeaseId(path.stem)] = envelope
        return taken

    def remove(self, lease_id: LeaseId) -> None:
        """Delete a rollout that was judged."""
        with disk_named(self._folder):
            (self._folder / f"{lease_id}{_SUFFIX}").unlink(missing_ok=True)

    def __len__(self) -> int:
        return sum(1 for _ in self._folder.glob(f"*{_SUFFIX}"))


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


log = logging.getLogger(__name__)

ROLLOUTS_PER_REQUEST = 8
ROLLOUT_BYTES_PER_REQUEST = limits.MESSAGE_MAX_BYTES // 2
"""Leaves space for the message around them; a single larger rollout is still sent alone."""

BEGIN_S = 0.02
"""Longest wait of the worker for the sender, which may wait for the answer to its last request."""

WORD_S = 30.0
"""Interval of log lines about credit."""

ANSWERS_MAX = 20
"""Answers that the owner's page and `status --json` show."""

PAUSES_S = (0.5, 1.0, 2.0, 5.0, 10.0)
"""Pauses between attempts while the coordinator does not accept rollouts; the last is repeated."""


AddTurns = Callable[[Sequence[Lease]], Awaitable[None]]
"""Starts or returns the leases of next turns."""


class Sender:
    """Sender of the outbox; call `wake` after adding a rollout."""

    def __init__(self, coordinator: Coordinator, outbox: Outbox, claims: Claims, rejections: Rejections) -> None:
        self._coordinator = coordinator
        self._outbox = outbox
        self._claims = claims
        self._rejections = rejections
        self._woken = trio.Event()
        self._begun = trio.Event()
        """Set when the rollouts so far are about to be sent."""
        self._turn_stored = trio.Event()
        """Set when a turn is stored, and replaced then."""
        self._choosing, self._recording = trio.Lock(), trio.Lock()
        self._sending: dict[LeaseId, int] = {}
        """Sizes of the rollouts in the requests under way, in bytes."""
        self._is_idle = False
        self._is_answered = True
        """False after a request without an answer, until the next one with an answer."""
        self._next_word = -math.inf
        self._has_room = True
        """True if the disk had space for the last evidence."""
        self.verdicts: Counter[str] = Counter()
        """Count by outcome, or by code for rejections."""
        self.guard = Guard()
        self.answers: deque[JudgedRollout] = deque(maxlen=ANSWERS_MAX)
        """The last verdicts, the newest last."""
        self.tokens = 0
        self.credit_micros = 0

    def wake(self, *, at_once: bool = False) -> None:
        """Send what is in the outbox; `at_once` also while another request is under way."""
        self._woken.set()
        if self._begun.is_set():
            self._begun = trio.Event()
        if at_once and not self._is_idle:
            self._turn_stored.set()
        self._is_idle = False

    async def begun(self) -> None:
        """Wait until the request with the rollouts in the outbox is about to be sent, for at most `BEGIN_S`.

        A request for more work before it would delay the verdict by a commit, and a caller may wait for that.
        """
        with trio.move_on_after(BEGIN_S):
            await self._begun.wait()

    async def run(self, add_turns: AddTurns) -> None:
        """Send rollouts until cancelled; call `add_turns` with leases in the coordinator's answers."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._send_in_order, add_turns)
            while True:
                await self._turn_stored.wait()
                self._turn_stored = trio.Event()
                if self._is_answered:
                    nursery.start_soon(self._send_beside, add_turns)

    async def _send_in_order(self, add_turns: AddTurns) -> None:
        """Send one request after the other, after a failure with a pause."""
        failures = 0
        while True:
            self._woken = trio.Event()
            sent = await self._try_to_send(add_turns)
            if sent is None:
                await trio.sleep(PAUSES_S[min(failures, len(PAUSES_S) - 1)])
                failures += 1
                continue
            failures = 0
            if not sent:
                self._is_idle = not self._woken.is_set()
                await self._woken.wait()
                self._is_idle = False

    async def _send_beside(self, add_turns: AddTurns) -> None:
        """Send what is in no request yet; after a failure `_send_in_order` sends it again."""
        while await self._try_to_send(add_turns):
            pass
        self._woken.set()

    async def _try_to_send(self, add_turns: AddTurns) -> int | None:
        """Send one request; return the number of judged rollouts, or None after a failure."""
        try:
            sent = await self.send_some(add_turns)
        except SwarmError as error:
            level = logging.DEBUG if isinstance(error, Unreachable) else logging.WARNING
            log.log(level, "rollouts not sent yet code=%s: %s", error.code, error)
            self._is_answered = False
            return None
        if sent:
            self._is_answered = True
            self._log_credit()
        return sent

    def _log_credit(self) -> None:
        """Log the credit at intervals."""
        if self.verdicts and trio.current_time() >= self._next_word:
            self._next_word = trio.current_time() + WORD_S
            log.info(
                "credited tokens=%d credit_micros=%d verdicts=%s", self.tokens, self.credit_micros, dict(self.verdicts)
            )

    async def send_some(self, add_turns: AddTurns) -> int:
        """Send the oldest rollouts that are in no request yet; return the number that were judged."""
        async with self._choosing:
            waiting = await trio.to_thread.run_sync(self._waiting)
            self._sending |= {lease_id: len(envelope) for lease_id, envelope in waiting.items()}
        self._begun.set()
        try:
            return await self._send(waiting, add_turns) if waiting else 0
        finally:
            for lease_id in waiting:
                del self._sending[lease_id]

    def _waiting(self) -> dict[LeaseId, bytes]:
        """Return the oldest rollouts that are in no request, as far as the limits of all requests allow."""
        room_bytes = ROLLOUT_BYTES_PER_REQUEST - sum(self._sending.values())
        count = ROLLOUTS_PER_REQUEST - len(self._sending) if room_bytes > 0 else 0
        return self._outbox.waiting(count, room_bytes, but=self._sending)

    async def _send(self, waiting: dict[LeaseId, bytes], add_turns: AddTurns) -> int:
        try:
            reply = await self._coordinator.submit(Submission(rollouts=tuple(waiting.values())))
        except SwarmError as error:
            async with self._recording:
                await trio.to_thread.run_sync(self._keep_all, waiting, error)
            raise
        if reply.leases:
            await add_turns(reply.leases)
        async with self._recording:
            await self._record_verdicts(waiting, reply.verdicts)
        return len(waiting)

    async def _record_verdicts(self, waiting: dict[LeaseId, bytes], verdicts: Sequence[Verdict]) -> None:
        judged = list(zip(waiting, verdicts, strict=True))
        accepted = {lease_id: waiting[lease_id] for lease_id, verdict in judged if verdict.outcome != "rejected"}
        claim_ids = await trio.to_thread.run_sync(self._claims.add, accepted.values())
        claims = dict(zip(accepted, claim_ids, strict=True))
        for lease_id, verdict in judged:
            self._record(JudgedRollout(now_ms(), lease_id, claims.get(lease_id, ""), verdict))
            if verdict.outcome != "rejected":
                await trio.to_thread.run_sync(self._rejections.forget, lease_id)  # from an earlier request
            elif verdict.evidence is not None:
                await trio.to_thread.run_sync(self._keep, lease_id, waiting[lease_id], verdict.evidence)
            await trio.to_thread.run_sync(self._outbox.remove, lease_id)

    def _keep_all(self, waiting: dict[LeaseId, bytes], error: SwarmError) -> None:
        """Store the evidence of a refused request; nothing is stored if the coordinator only cannot accept them now."""
        if error.code in evidence.RULES:
            for lease_id, envelope in waiting.items():
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

    def _record(self, answer: JudgedRollout) -> None:
        lease_id, verdict = answer.lease_id, answer.verdict
        self.verdicts[verdict.code or verdict.outcome] += 1
        self.answers.append(answer)
        self.guard.record(lease_id, verdict)
        if verdict.outcome == "rejected":
            log.warning("rollout rejected lease=%s code=%s: %s", lease_id, verdict.code, verdict.message)
            return
        self.tokens += verdict.tokens
        self.credit_micros += verdict.credit_micros
