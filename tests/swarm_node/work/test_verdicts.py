"""Verdicts are counted for the owner; a node whose work is refused again and again stops, and says why."""

from pathlib import Path

import pytest

from protocol.ids import LeaseId
from protocol.wire.signing import NodeKey
from protocol.work.messages import Verdict
from swarm_node.ledger.receipts import Claims
from swarm_node.work.outbox import Outbox
from swarm_node.work.records import Rejections
from swarm_node.work.verdicts import ANSWERS_MAX, LATE_MAX, REJECTIONS_MAX, Guard, RejectedTooOften, VerdictRecorder

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


async def test_rollouts_that_came_too_late_together_are_one_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The whole outbox may be late after a restart."""
    codes = ["stale_version", "stale_version", "tokens_invalid", "lease_closed", "stale_version", "tokens_invalid"]
    verdicts = dict(rejected(number, code) for number, code in enumerate(codes))
    sent = {lease_id: NodeKey(bytes(32)).seal("rollout", lease_id.encode()) for lease_id in verdicts}
    recorder = VerdictRecorder(
        Outbox(tmp_path / "outbox"), Claims(tmp_path / "claims"), Rejections(tmp_path / "refusals")
    )
    await recorder.record(sent, list(verdicts.values()))
    lines = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert lines == [
        f"rollout rejected lease={0:032x} code=stale_version: no 0 (2 more with this code)",
        f"rollout rejected lease={2:032x} code=tokens_invalid: no 2",
        f"rollout rejected lease={3:032x} code=lease_closed: no 3",
        f"rollout rejected lease={5:032x} code=tokens_invalid: no 5",
    ]
    assert recorder.rejected == {"stale_version": 3, "tokens_invalid": 2, "lease_closed": 1}


async def test_the_last_answers_name_the_claims_whose_receipts_can_be_fetched(tmp_path: Path) -> None:
    key, outbox = NodeKey(bytes(32)), Outbox(tmp_path / "outbox")
    first, second, third = (LeaseId(f"{number:032x}") for number in range(3))
    sent = {lease_id: key.seal("rollout", lease_id.encode()) for lease_id in (first, second, third)}
    recorder = VerdictRecorder(outbox, Claims(tmp_path / "claims"), Rejections(tmp_path / "refusals"))
    verdicts = [
        Verdict(lease_id=first, outcome="accepted", tokens=7, credit_micros=5),
        Verdict(lease_id=second, outcome="rejected", code="tokens_invalid"),
        Verdict(lease_id=third, outcome="already_accepted"),
    ]
    await recorder.record(sent, verdicts)
    claims = list(Claims(tmp_path / "claims"))
    assert [(answer.lease_id, answer.claim_id) for answer in recorder.answers] == [
        (first, claims[0]), (second, ""), (third, claims[1]),
    ]  # fmt: skip
    assert recorder.answers[0].verdict.tokens == 7
    assert (recorder.accepted, recorder.rejected) == (2, {"tokens_invalid": 1})
    assert (recorder.tokens, recorder.credit_micros) == (7, 5)
    for _ in range(ANSWERS_MAX):
        await recorder.record({first: sent[first]}, verdicts[:1])
    assert len(recorder.answers) == ANSWERS_MAX
    assert len(claims) == len(list(Claims(tmp_path / "claims")))
