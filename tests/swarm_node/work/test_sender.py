"""A finished rollout is sent before other requests, a turn beside them, and all requests share the limits of one."""

import threading
from collections.abc import Iterable
from pathlib import Path
from typing import Any, cast

import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from protocol import limits
from protocol.errors import SwarmError, UnknownNode, Unreachable
from protocol.ids import LeaseId
from protocol.wire.signing import NodeKey, open_envelope
from protocol.work.evidence import RejectionEvidence
from protocol.work.messages import Submission, SubmissionReply, Verdict
from protocol.work.rollout import RolloutClaim, Sample, pack_tokens
from swarm_node.ledger.receipts import Claims
from swarm_node.work.outbox import Outbox
from swarm_node.work.records import Rejections
from swarm_node.work.sender import BEGIN_S, ROLLOUTS_PER_REQUEST, Sender
from swarm_node.work.verdicts import VerdictRecorder
from tests.swarm_node.worker_world import settled

pytestmark = pytest.mark.trio

SAMPLE = Sample(tokens=pack_tokens([1]), logprobs=bytes(4), finish="stop")


async def test_who_waits_for_the_sender_goes_on_once_the_rollout_is_about_to_be_sent(tmp_path: Path) -> None:
    sent, answered = list[int](), trio.Event()

    class SlowCoordinator:
        async def submit(self, message: Submission) -> SubmissionReply:
            sent.append(len(message.rollouts))
            await answered.wait()
            raise Unreachable("away")

    outbox = Outbox(tmp_path)
    sender = Sender(cast(Any, SlowCoordinator()), outbox, cast(Any, None))

    async def no_turns(_leases: object) -> None:
        raise AssertionError

    async with trio.open_nursery() as nursery:
        nursery.start_soon(sender.run, no_turns)
        await sender.begun()
        outbox.put(LeaseId("1" * 32), b"rollout")
        sender.wake()
        while not sent:
            await sender.begun()
            await trio.lowlevel.checkpoint()
        assert sent == [1]
        outbox.put(LeaseId("2" * 32), b"another")
        sender.wake()
        with trio.fail_after(100 * BEGIN_S):
            await sender.begun()  # the sender waits for an answer: nobody waits for it for long
        assert sent == [1]
        nursery.cancel_scope.cancel()


class HoldingCoordinator:
    """A coordinator that holds each submission until it is answered."""

    def __init__(self) -> None:
        self.held: list[tuple[Submission, trio.Event]] = []
        self.error: SwarmError | None = None

    async def submit(self, message: Submission) -> SubmissionReply:
        answered = trio.Event()
        self.held.append((message, answered))
        await answered.wait()
        if self.error is not None:
            raise self.error
        leases = [RolloutClaim.from_bytes(open_envelope("rollout", each).payload).lease_id for each in message.rollouts]
        return SubmissionReply(verdicts=tuple(Verdict(lease_id=lease, outcome="accepted") for lease in leases))

    def answer(self, number: int = 0) -> None:
        self.held.pop(number)[1].set()


class HeldRejections(Rejections):
    """Rejections that are stored once `go_on` is set."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.begun, self.go_on = 0, threading.Event()
        self.go_on.set()

    def record(self, lease_id: str, envelope: bytes, evidence: RejectionEvidence) -> None:
        self.begun += 1
        self.go_on.wait()
        super().record(lease_id, envelope, evidence)


class HeldClaims(Claims):
    """Claims that are stored once `go_on` is set."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.go_on = threading.Event()
        self.go_on.set()

    def add(self, envelopes: Iterable[bytes]) -> list[str]:
        self.go_on.wait()
        return super().add(envelopes)


class Sending:
    """A sender with its outbox, and a coordinator that holds its requests."""

    def __init__(self, folder: Path, nursery: trio.Nursery) -> None:
        self.coordinator, self.outbox = HoldingCoordinator(), Outbox(folder / "outbox")
        self.rejections = HeldRejections(folder / "refusals")
        self.claims = HeldClaims(folder / "claims")
        self.verdicts = VerdictRecorder(self.outbox, self.claims, self.rejections)
        self.sender = Sender(cast(Any, self.coordinator), self.outbox, self.verdicts)
        nursery.start_soon(self.sender.run, self._no_turns)
        self._key, self._count = NodeKey(bytes(32)), 0

    async def store(self, *, turn: bool = False) -> list[int]:
        """Store a rollout; return the sizes of the requests under way, once nothing else happens."""
        self._count += 1
        lease_id = f"{self._count:032x}"
        claim = RolloutClaim(round_id="0" * 64, lease_id=lease_id, lease_digest="0" * 64, samples=(SAMPLE,))
        self.outbox.put(LeaseId(lease_id), self._key.seal("rollout", claim.to_bytes()))
        self.sender.wake(at_once=turn)
        return await self.under_way()

    async def under_way(self) -> list[int]:
        await settled()
        return [len(message.rollouts) for message, _ in self.coordinator.held]

    async def _no_turns(self, _leases: object) -> None:
        raise AssertionError


async def test_a_turn_is_sent_while_another_request_is_under_way_and_other_rollouts_share_the_next(
    tmp_path: Path,
) -> None:
    async with trio.open_nursery() as nursery:
        sending = Sending(tmp_path, nursery)
        assert await sending.store() == [1]
        assert await sending.store() == [1]
        assert await sending.store() == [1]
        assert await sending.store(turn=True) == [1, 3], "what is unsent goes with it"
        assert await sending.store(turn=True) == [1, 3, 1]
        sending.coordinator.answer(1)
        assert await sending.under_way() == [1, 1]
        assert len(sending.outbox) == 2
        nursery.cancel_scope.cancel()


async def test_turns_beside_each_other_are_no_more_than_one_request_may_have(tmp_path: Path) -> None:
    async with trio.open_nursery() as nursery:
        sending = Sending(tmp_path, nursery)
        for _ in range(ROLLOUTS_PER_REQUEST):
            await sending.store(turn=True)
        assert await sending.store(turn=True) == [1] * ROLLOUTS_PER_REQUEST
        sending.coordinator.answer(3)
        assert await sending.under_way() == [1] * ROLLOUTS_PER_REQUEST
        assert sending.verdicts.counts == {"accepted": 1}
        nursery.cancel_scope.cancel()


async def test_the_evidence_of_requests_refused_together_is_stored_one_after_the_other(tmp_path: Path) -> None:
    async with trio.open_nursery() as nursery:
        sending = Sending(tmp_path, nursery)
        assert await sending.store(turn=True) == [1]
        assert await sending.store(turn=True) == [1, 1]
        sending.coordinator.error = UnknownNode("restored")
        sending.rejections.go_on.clear()
        sending.coordinator.answer()
        sending.coordinator.answer()
        await wait_all_tasks_blocked(cushion=0.1)
        begun = sending.rejections.begun
        sending.rejections.go_on.set()
        assert begun == 1
        await settled()
        assert len(list(sending.rejections)) == 2
        nursery.cancel_scope.cancel()


async def test_after_a_failure_no_turn_is_sent_beside_though_an_older_answer_is_recorded_later(tmp_path: Path) -> None:
    async with trio.open_nursery() as nursery:
        sending = Sending(tmp_path, nursery)
        await sending.store()
        assert await sending.store(turn=True) == [1, 1]
        sending.claims.go_on.clear()
        try:
            sending.coordinator.answer()
            await wait_all_tasks_blocked(cushion=0.1)
            sending.coordinator.error = Unreachable("away")
            sending.coordinator.answer()
            await wait_all_tasks_blocked(cushion=0.1)
        finally:
            sending.claims.go_on.set()
        assert await sending.under_way() == [1], "the turn is sent again"
        assert sending.verdicts.counts == {"accepted": 1}
        assert await sending.store(turn=True) == [1]
        nursery.cancel_scope.cancel()


async def test_while_the_coordinator_answers_nothing_there_is_one_request_and_a_failure_of_all_counts_once(
    tmp_path: Path, mock_clock: MockClock
) -> None:
    async with trio.open_nursery() as nursery:
        sending = Sending(tmp_path, nursery)
        for _ in range(ROLLOUTS_PER_REQUEST - 1):
            await sending.store(turn=True)
        sending.coordinator.error = Unreachable("away")
        for _ in range(ROLLOUTS_PER_REQUEST - 1):
            sending.coordinator.answer()
        assert await sending.under_way() == []
        assert await sending.store(turn=True) == []
        mock_clock.jump(limits.RETRY_PAUSES_S[0])
        assert await sending.under_way() == [ROLLOUTS_PER_REQUEST]
        assert await sending.store(turn=True) == [ROLLOUTS_PER_REQUEST]
        sending.coordinator.error = None
        sending.coordinator.answer()
        assert await sending.under_way() == [1]
        assert await sending.store(turn=True) == [1, 1]
        nursery.cancel_scope.cancel()


async def test_who_leaves_sends_the_rest_at_once_whatever_pause_a_failure_began(
    tmp_path: Path, mock_clock: MockClock
) -> None:
    async with trio.open_nursery() as nursery:
        sending = Sending(tmp_path, nursery)
        await sending.store()
        sending.coordinator.error = Unreachable("away")
        sending.coordinator.answer()
        assert await sending.under_way() == [], "the pause has begun"
        sending.coordinator.error = None
        flushed = trio.Event()

        async def flush() -> None:
            await sending.sender.flush()
            flushed.set()

        nursery.start_soon(flush)
        assert await sending.under_way() == [1]
        assert not flushed.is_set()
        sending.coordinator.answer()
        await settled()
        assert (flushed.is_set(), len(sending.outbox)) == (True, 0)
        nursery.cancel_scope.cancel()


async def test_who_leaves_while_the_coordinator_is_away_does_not_wait_and_keeps_the_rollouts(
    tmp_path: Path, mock_clock: MockClock
) -> None:
    async with trio.open_nursery() as nursery:
        sending = Sending(tmp_path, nursery)
        await sending.store()
        sending.coordinator.error = Unreachable("away")
        nursery.start_soon(sending.sender.flush)
        await settled()
        sending.coordinator.answer()
        await settled()
        assert len(nursery.child_tasks) == 1, "only the sender itself"
        assert len(sending.outbox) == 1
        nursery.cancel_scope.cancel()
