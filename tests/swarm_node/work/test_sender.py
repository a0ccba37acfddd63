"""A node whose work is refused again and again stops, and says why; a finished rollout goes before other requests."""

from pathlib import Path
from typing import Any, cast

import pytest
import trio

from protocol.errors import Unreachable
from protocol.ids import LeaseId
from protocol.work.messages import Submission, SubmissionReply, Verdict
from swarm_node.work.sender import BEGIN_S, LATE_MAX, REJECTIONS_MAX, Guard, Outbox, RejectedTooOften, Sender

pytestmark = pytest.mark.trio


def rejected(number: int, code: str) -> tuple[LeaseId, Verdict]:
    lease = LeaseId(f"{number:032x}")
    return lease, Verdict(lease_id=lease, outcome="rejected", code=code, message=f"no {number}")


def accepted() -> tuple[LeaseId, Verdict]:
    lease = LeaseId("f" * 32)
    return lease, Verdict(lease_id=lease, outcome="accepted")


async def has_tripped(guard: Guard) -> RejectedTooOften | None:
    """The error that the guard raises, if it does before anything else happens."""
    if not guard.tripped:
        return None
    with pytest.raises(RejectedTooOften) as caught:
        await guard.run()
    return caught.value


async def test_faults_in_a_row_stop_the_node_with_codes_and_evidence() -> None:
    guard = Guard()
    for number in range(REJECTIONS_MAX):
        assert await has_tripped(guard) is None
        guard.record(*rejected(number, "tokens_invalid" if number % 2 else "logprobs_invalid"))
    error = await has_tripped(guard)
    assert error is not None
    assert "logprobs_invalid, tokens_invalid" in error.message
    assert f"no {REJECTIONS_MAX - 1}" in error.message
    assert f"{REJECTIONS_MAX - 1:032x}" in error.hint


async def test_anything_accepted_begins_the_count_anew() -> None:
    guard = Guard()
    for number in range(3 * REJECTIONS_MAX):
        guard.record(*rejected(number, "tokens_invalid"))
        if number % (REJECTIONS_MAX - 1) == 0:
            guard.record(*accepted())
    assert await has_tripped(guard) is None


async def test_an_outbox_that_comes_too_late_once_is_forgiven_and_a_node_that_is_always_late_is_stopped() -> None:
    guard = Guard()
    for number in range(LATE_MAX - 1):
        guard.record(*rejected(number, "lease_closed"))
    assert await has_tripped(guard) is None
    guard.record(*rejected(LATE_MAX, "stale_version"))
    error = await has_tripped(guard)
    assert error is not None
    assert "too late" in error.message


async def test_the_operators_faults_are_not_held_against_the_node() -> None:
    guard = Guard()
    for number in range(10 * REJECTIONS_MAX):
        guard.record(*rejected(number, "budget_exhausted"))
    assert await has_tripped(guard) is None


async def test_who_waits_for_the_sender_goes_on_once_the_rollout_is_about_to_be_sent(tmp_path: Path) -> None:
    sent, answered = list[int](), trio.Event()

    class SlowCoordinator:
        async def submit(self, message: Submission) -> SubmissionReply:
            sent.append(len(message.rollouts))
            await answered.wait()
            raise Unreachable("away")

    outbox = Outbox(tmp_path)
    sender = Sender(cast(Any, SlowCoordinator()), outbox, cast(Any, None), cast(Any, None))

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
