"""The proof of a payout convinces or is refused, and a node keeps those of its owner's."""

from pathlib import Path

import pytest
import trio

from coordinator.publishing.signed_metadata import SignedMetadata
from ledger import payees, payout_proof, store
from ledger.entry import Entry, PayoutBatch
from ledger.payees import Payee
from ledger.payout_proof import PayoutProof, PayoutReply
from protocol.errors import CheckpointInvalid, MalformedMessage, NotFound, ProofInvalid, SwarmError, UntrustedRoot
from swarm_node.ledger.receipts import fetch_payouts
from tests.ledger.values import credit, paid, payout, post
from tests.swarm_node.log_world import LIFE, NOW, Log, otherwise_signed

PAYEES = [Payee(f"owner {number}", f"text:account {number}", 60 * number) for number in (1, 2, 3)]
"""Payees of a batch of 360, out of three nodes' earnings."""
MINE = 1
EARNED: list[Entry] = [post(3), credit(4), credit(5, of=3), post(4), post(5)]
PAID: list[Entry] = [paid(1), paid(1, of=2), paid(1, of=3)]


def head(number: int = 1) -> PayoutBatch:
    return PayoutBatch(batch=number, payees_root=payees.root(PAYEES).hex(), payees=3, amount_micros=360)


def shares(number: int = 1) -> list[Entry]:
    return [head(number), payout(number, micros=240), payout(number, of=2, micros=60), payout(number, of=3, micros=60)]


@pytest.fixture
def metadata(tmp_path: Path) -> SignedMetadata:
    return SignedMetadata.create(tmp_path / "keys", tmp_path / "metadata", 3600.0, NOW)


@pytest.fixture
def log(metadata: SignedMetadata) -> Log:
    return Log(metadata, LIFE, [*EARNED, *shares()])


def shown(log: Log, number: int = 1, place: int = MINE) -> PayoutProof:
    """Return the batch as a coordinator makes it, for an owner of the first node."""
    effects = [f"payout_batch:{number}", payout(number).effect, paid(number).effect]
    with log.engine.begin() as conn:
        note, entries = store.prove(conn, effects, about="the batch")
    return PayoutProof(
        roots=log.metadata.roots(),
        checkpoint=note,
        entries=tuple(entries),
        place=place,
        address=PAYEES[place].address,
        amount_micros=PAYEES[place].amount_micros,
        proof=tuple(payees.proof(PAYEES, place)),
    )


class TestProof:
    """A file that convinces or is refused."""

    @pytest.mark.parametrize("place", [0, 1, 2])
    def test_every_payee_has_a_proof_that_needs_no_network(self, log: Log, place: int) -> None:
        line = payout_proof.check(shown(log, place=place).to_bytes(), log.round_id)
        assert (line.batch, line.address, line.amount_micros) == (head(), *PAYEES[place][1:])
        assert line.proof == tuple(payees.proofs(PAYEES)[place])

    def test_it_says_how_far_the_payout_is(self, log: Log) -> None:
        sound = shown(log)
        without = sound.model_copy(update={"entries": sound.entries[:1]})
        assert payout_proof.check(without.to_bytes(), log.round_id).state == "published"
        assert payout_proof.check(sound.to_bytes(), log.round_id).state == "paying"
        log.add(PAID)
        line = payout_proof.check(shown(log).to_bytes(), log.round_id)
        assert (line.state, line.paid) == ("paid", paid(1))

    def test_proof_of_a_payout_tampered_anywhere_is_refused(self, log: Log) -> None:
        log.add([*shares(2), *PAID])
        sound, other = shown(log), shown(log, number=2)
        first, share, end = sound.entries
        wrong: list[dict[str, object]] = [
            {"amount_micros": sound.amount_micros + 1},
            {"address": "text:account 3"},
            {"place": 2},
            {"place": 3},
            {"proof": sound.proof[1:]},
            {"proof": sound.proof[::-1]},
            {"entries": (first.model_copy(update={"entry": head(2).body}), share)},
            {"entries": (share, end)},
            {"entries": (first, end)},
            {"entries": (first, other.entries[1])},
            {"entries": (first, other.entries[1], end)},
            {"entries": (first, share, share)},
            {"checkpoint": otherwise_signed(sound.checkpoint)},
        ]
        for change in wrong:
            with pytest.raises((ProofInvalid, CheckpointInvalid)):
                payout_proof.check(sound.model_copy(update=change).to_bytes(), log.round_id)
        with pytest.raises(UntrustedRoot):
            payout_proof.check(sound.to_bytes(), "0" * 64)
        for data in (b"", b"\x80", sound.model_copy(update={"entries": (first, share, end, end)}).to_bytes()):
            with pytest.raises(MalformedMessage):
                payout_proof.check(data, log.round_id)


class Coordinator:
    """Answers as it is told, and notes what it was asked."""

    def __init__(self, *answers: PayoutProof | SwarmError | None) -> None:
        self.answers = list(answers)
        self.asked: list[int] = []

    async def __call__(self, number: int) -> PayoutReply:
        self.asked.append(number)
        answer = self.answers[number - 1] if number <= len(self.answers) else None
        if isinstance(answer, SwarmError):
            raise answer
        return PayoutReply(batches=len(self.answers), payout=answer)


class TestFetching:
    """Files that a node keeps."""

    @pytest.fixture
    def folder(self, tmp_path: Path) -> Path:
        return tmp_path / "payouts"

    def fetch(self, coordinator: Coordinator | None, log: Log, folder: Path) -> dict[int, str | None]:
        async def all_of_them() -> dict[int, str | None]:
            found = fetch_payouts(coordinator, log.round_id, folder)
            return {number: line.state if line else None async for number, line in found}

        return trio.run(all_of_them)

    def test_batches_are_asked_for_until_they_are_paid(self, log: Log, folder: Path) -> None:
        assert self.fetch(Coordinator(), log, folder) == {}
        waiting = NotFound("No published entry is about batch 3.")
        early = Coordinator(None, None, waiting)
        assert self.fetch(early, log, folder) == {3: None}
        begun = Coordinator(shown(log), None)
        assert self.fetch(begun, log, folder) == {1: "paying"}
        log.add([*PAID, *shares(2)])
        later = Coordinator(shown(log), None, waiting)
        assert self.fetch(later, log, folder) == {1: "paid", 3: None}
        last = Coordinator(None, shown(log, number=2))
        assert self.fetch(last, log, folder) == {1: "paid", 2: "paying"}
        assert (begun.asked, later.asked, last.asked) == ([1, 2], [1, 2, 3], [2])
        assert self.fetch(None, log, folder) == {1: "paid", 2: "paying"}

    def test_proof_of_another_batch_is_not_kept(self, log: Log, folder: Path) -> None:
        with pytest.raises(ProofInvalid, match="asked for"):
            self.fetch(Coordinator(None, shown(log)), log, folder)
        assert not list(folder.iterdir())

    def test_proof_that_contradicts_the_kept_one_leaves_the_evidence_in_its_place(self, log: Log, folder: Path) -> None:
        self.fetch(Coordinator(shown(log)), log, folder)
        (kept,) = folder.iterdir()
        before = kept.read_bytes()
        with pytest.raises(ProofInvalid, match="contradicts"):
            self.fetch(Coordinator(shown(log, place=0)), log, folder)
        assert kept.read_bytes() == before

    def test_kept_proof_that_was_damaged_is_named(self, log: Log, folder: Path) -> None:
        self.fetch(Coordinator(shown(log)), log, folder)
        (kept,) = folder.iterdir()
        kept.write_bytes(shown(log).model_copy(update={"place": 0}).to_bytes())
        with pytest.raises(ProofInvalid, match=kept.name):
            self.fetch(None, log, folder)
