"""Readers who want witnesses: k of n vouch for a beginning of the log, or it is said plainly who does not."""

from pathlib import Path

import pytest
import trio
import trio.testing

from coordinator.publishing.signed_metadata import SignedMetadata
from ledger import proof, witness
from ledger.checkpoint import Checkpoint, sign
from ledger.witness import Cosigned, Witnesses
from protocol.errors import CheckpointInvalid, LedgerForked, MalformedMessage, NotWitnessed, RolledBack
from swarm_node.ledger.log_reader import LogReader
from swarm_node.ledger.log_verify import Verified, verify
from swarm_node.ledger.log_watch import LogWatch
from tests.ledger import notes
from tests.swarm_node.ledger.test_log_watch import Changing
from tests.swarm_node.log_world import LIFE, MORE, NOW, Log

PAIRS = [notes.witness(number) for number in (1, 2, 3)]
KEYS = tuple(key for key, _ in PAIRS)
SIGNED = "ledger/cosigned"


@pytest.fixture
def log(tmp_path: Path) -> Log:
    """A log that the first witness saw early, the second one now, and the third one never."""
    made = Log(SignedMetadata.create(tmp_path / "keys", tmp_path / "metadata", 600.0, NOW), LIFE)
    early = by(made, 0)
    made.add(MORE)
    show(made, early, by(made, 1))
    return made


def by(log: Log, who: int, data: bytes = b"") -> bytes:
    """The newest checkpoint, or another note, with a witness's line."""
    key, private = PAIRS[who]
    return witness.cosign(data or trio.run(LogReader(log).checkpoint), key, private.sign, 5)


def show(log: Log, *cosigned: bytes) -> None:
    log.lies[SIGNED] = Cosigned(notes=cosigned).to_bytes()


def other_history(log: Log, size: int) -> bytes:
    return sign(Checkpoint(log.key.name, size, bytes(32)), log.key, log.metadata.sign_for_ledger)


def verified(log: Log, quorum: int) -> Verified:
    return trio.run(verify, LogReader(log), log.round_id, Witnesses(KEYS, quorum), lambda _done, _all: None)


def looks(log: Log, folder: Path, quorum: int) -> int:
    return trio.run(LogWatch(LogReader(log), log.round_id, folder, Witnesses(KEYS, quorum)).refresh)[1].size


class TestVerify:
    def test_k_of_n_vouch_for_what_the_kth_of_them_has_seen(self, log: Log) -> None:
        whole = len(LIFE) + len(MORE)
        assert [verified(log, quorum).witnessed for quorum in (0, 1, 2)] == [0, whole, len(LIFE)]
        with pytest.raises(NotWitnessed, match="2 of the 3 witnesses have signed this log; 3 are required"):
            verified(log, 3)

    def test_lines_below_the_checkpoint_count_as_well(self, log: Log) -> None:
        log.lies["ledger/checkpoint"] = by(log, 2)
        assert verified(log, 3).witnessed == len(LIFE)

    def test_nobody_collects_them_and_none_are_wanted(self, log: Log) -> None:
        log.lies[SIGNED] = None
        assert verified(log, 0).witnessed == 0
        with pytest.raises(NotWitnessed, match="0 of the 3"):
            verified(log, 1)

    def test_a_witness_who_was_shown_another_history_is_believed(self, log: Log) -> None:
        for size in (len(LIFE), 300, len(LIFE) + len(MORE)):
            show(log, by(log, 0, other_history(log, size)))
            with pytest.raises(LedgerForked, match="witness-1 was shown another history"):
                verified(log, 1)

    def test_a_log_that_is_shorter_than_a_witness_has_seen_is_refused(self, log: Log) -> None:
        show(log, by(log, 0, other_history(log, 10_000)))
        with pytest.raises(RolledBack, match="has seen 10000 entries"):
            verified(log, 1)

    @pytest.mark.parametrize("garbage", [b"", b"\x80", b"[]" * 50])
    def test_garbage_for_cosignatures_is_refused(self, log: Log, garbage: bytes) -> None:
        log.lies[SIGNED] = garbage
        with pytest.raises((MalformedMessage, NotWitnessed)):
            verified(log, 1)

    def test_a_forged_line_is_refused_and_a_strangers_counts_for_nobody(self, log: Log) -> None:
        key, _ = PAIRS[0]
        show(log, witness.cosign(trio.run(LogReader(log).checkpoint), key, PAIRS[1][1].sign, 5))
        with pytest.raises(CheckpointInvalid):
            verified(log, 1)
        stranger, private = notes.witness(9)
        show(log, witness.cosign(trio.run(LogReader(log).checkpoint), stranger, private.sign, 5))
        with pytest.raises(NotWitnessed):
            verified(log, 1)

    def test_one_witness_does_not_count_twice(self, log: Log) -> None:
        show(log, by(log, 0), by(log, 0))
        with pytest.raises(NotWitnessed, match="1 of the 3"):
            verified(log, 2)


class TestWatch:
    def test_a_node_accepts_what_enough_of_its_witnesses_have_seen(self, log: Log, tmp_path: Path) -> None:
        assert looks(log, tmp_path / "node", 2) == len(LIFE) + len(MORE)

    def test_too_few_witnesses_are_told_of_once_and_end_nobody(
        self, log: Log, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        with pytest.raises(NotWitnessed):
            looks(log, tmp_path / "node", 3)

        async def running() -> None:
            async with trio.open_nursery() as nursery:
                ten_looks = Changing(log, lambda _number: None, 10, nursery.cancel_scope)
                watch = LogWatch(LogReader(ten_looks), log.round_id, tmp_path / "node", Witnesses(KEYS, 3))
                nursery.start_soon(watch.run)

        trio.run(running, clock=trio.testing.MockClock(autojump_threshold=0))
        (told,) = [one.getMessage() for one in caplog.records if "not_witnessed" in one.getMessage()]
        assert "2 of the 3 witnesses" in told
        show(log, *(by(log, who) for who in range(3)))
        assert looks(log, tmp_path / "node", 3) == len(LIFE) + len(MORE)

    @pytest.mark.parametrize("size", [len(LIFE), 300, len(LIFE) + len(MORE)])
    def test_a_witness_of_another_history_leaves_a_proof_that_convinces_anybody(
        self, log: Log, tmp_path: Path, size: int
    ) -> None:
        show(log, by(log, 0, other_history(log, size)))
        with pytest.raises(LedgerForked):
            looks(log, tmp_path / "node", 1)
        (path,) = (tmp_path / "node").glob("fork-*.proof")
        earlier, later = proof.check_fork(path.read_bytes(), log.round_id)
        assert (earlier.size, later.size) == (size, len(LIFE) + len(MORE))
        with pytest.raises(LedgerForked):
            looks(log, tmp_path / "node", 1)

    def test_what_a_witness_signed_since_counts_the_next_time(self, log: Log, tmp_path: Path) -> None:
        show(log, by(log, 0, other_history(log, 10_000)))
        with pytest.raises(NotWitnessed):
            looks(log, tmp_path / "node", 1)
