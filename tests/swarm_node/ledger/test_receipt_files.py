"""Receipts of many claims: one request for 256, one file for a thousand, each checked as a single one is."""

import itertools
from collections.abc import Iterable
from pathlib import Path

import pytest
import trio

from coordinator.publishing.signed_metadata import SignedMetadata
from ledger import proof
from ledger.entry import Entry
from ledger.proof import ClaimProof, LedgerReceipt, LedgerReceipts
from protocol import limits
from protocol.errors import NotFound, ProofInvalid, SwarmError, Unreachable
from swarm_node.ledger import receipts
from swarm_node.ledger.log_reader import Folder, LogReader, Saving
from tests.ledger.values import claim, credit, deposit, node, post, void
from tests.swarm_node.log_world import NOW, Log

CLAIMS = 1_100
"""One full file, five requests for it, and a second file."""
SETTLED: list[Entry] = [deposit(10**9), *(entry for n in range(CLAIMS) for entry in (credit(n), post(n)))]
NAMES = [claim(number) for number in range(CLAIMS)]


@pytest.fixture(scope="module")
def metadata(tmp_path_factory: pytest.TempPathFactory) -> SignedMetadata:
    folder = tmp_path_factory.mktemp("round")
    return SignedMetadata.create(folder / "keys", folder / "metadata", 600.0, NOW)


@pytest.fixture
def log(metadata: SignedMetadata) -> Log:
    return Log(metadata, SETTLED)


def fetch(
    source: Log | None, log: Log, folder: Path, names: Iterable[str] = NAMES, done: list[int] | None = None
) -> dict[str, str]:
    """Fetch receipts; return each claim's state, and nothing for those without a receipt."""

    async def all_of_them() -> dict[str, str]:
        reader = LogReader(source) if source else None
        told = done if done is not None else []
        found = receipts.fetch(reader, log.round_id, node(1), names, folder, told.append)
        return {name: receipt.state if receipt else "" async for name, receipt in found}

    return trio.run(all_of_them)


def test_many_receipts_take_few_requests_and_one_file_per_thousand(log: Log, tmp_path: Path) -> None:
    done: list[int] = []
    assert fetch(log, log, tmp_path, done=done) == dict.fromkeys(NAMES, "posted")
    assert log.posts == ["receipts"] * 5
    assert list(itertools.accumulate(done))[-1] == CLAIMS
    assert done == [0, 256, 256, 256, 232, 0, 100]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["000000.receipts", "000001.receipts"]
    kept = [LedgerReceipts.from_bytes(path.read_bytes()) for path in sorted(tmp_path.iterdir())]
    assert [len(file.claims) for file in kept] == [limits.RECEIPTS_FILE_MAX, 100]
    assert [len(file.checkpoints) for file in kept] == [1, 1], "all are under one checkpoint"

    log.posts.clear()
    done.clear()
    assert fetch(log, log, tmp_path, done=done) == dict.fromkeys(NAMES, "posted")
    assert (log.posts, done) == ([], [1000, 100]), "what is kept is not fetched again"
    assert fetch(None, log, tmp_path) == dict.fromkeys(NAMES, "posted"), "and is checked without a network"


def test_what_was_fetched_before_an_interruption_is_kept(log: Log, tmp_path: Path) -> None:
    class Breaking(Log):
        async def post(self, path: str, content: bytes, max_bytes: int) -> bytes | None:
            if len(log.posts) == 2:
                raise Unreachable("The coordinator went away.")
            return await log.post(path, content, max_bytes)

    with pytest.raises(Unreachable):
        fetch(Breaking(log.metadata), log, tmp_path)
    kept = LedgerReceipts.from_bytes((tmp_path / "000000.receipts").read_bytes())
    assert len(kept.claims) == 2 * limits.RECEIPTS_MAX
    log.refused.update(found.claim_id for found in kept.claims)
    assert fetch(log, log, tmp_path) == dict.fromkeys(NAMES, "posted")


def test_later_settlements_stand_under_a_later_checkpoint(metadata: SignedMetadata, tmp_path: Path) -> None:
    log = Log(metadata, [deposit(10**9), credit(1), credit(2), credit(3), post(1)])
    names = [claim(number) for number in (1, 2, 3, 4)]
    assert list(fetch(log, log, tmp_path, names).values()) == ["posted", "pending", "pending", ""]
    log.refused.add(claim(1))
    log.add([post(2), void(3), credit(4)])
    assert list(fetch(log, log, tmp_path, names).values()) == ["posted", "posted", "voided", "pending"]
    kept = LedgerReceipts.from_bytes((tmp_path / "000000.receipts").read_bytes())
    assert [found.checkpoint for found in kept.claims] == [0, 1, 1, 1]
    log.refused.add(claim(2))
    log.add([post(4)])
    fetch(log, log, tmp_path, names)
    kept = LedgerReceipts.from_bytes((tmp_path / "000000.receipts").read_bytes())
    assert len(kept.checkpoints) == 3
    assert len(proof.check_claims(kept, log.round_id)) == 4


def test_an_older_coordinator_is_asked_for_each_claim(log: Log, tmp_path: Path) -> None:
    log.lies["receipts"] = None
    names = [*NAMES[:3], claim(CLAIMS + 7)]
    assert list(fetch(log, log, tmp_path, names).values()) == ["posted"] * 3 + [""]
    assert [path.name for path in tmp_path.iterdir()] == ["000000.receipts"]
    log.refused.update(NAMES[:3])
    del log.lies["receipts"]
    assert fetch(log, log, tmp_path, NAMES[:3]) == dict.fromkeys(NAMES[:3], "posted")


def single(log: Log, number: int) -> bytes:
    return trio.run(LogReader(log).receipt, claim(number))


def test_files_of_single_claims_move_into_the_file_of_many(log: Log, tmp_path: Path) -> None:
    for number in (0, 1):
        (tmp_path / f"{claim(number)}.receipt").write_bytes(single(log, number))
    assert fetch(None, log, tmp_path, NAMES[:3]) == {NAMES[0]: "posted", NAMES[1]: "posted", NAMES[2]: ""}
    assert len(list(tmp_path.iterdir())) == 2, "without a network, nothing is written"
    log.refused.update(NAMES[:2])
    assert fetch(log, log, tmp_path, NAMES[:3]) == dict.fromkeys(NAMES[:3], "posted")
    assert [path.name for path in tmp_path.iterdir()] == ["000000.receipts"]
    assert fetch(None, log, tmp_path, NAMES[:3]) == dict.fromkeys(NAMES[:3], "posted")


def test_a_receipt_is_found_in_a_file_of_many_and_stands_for_itself(log: Log, tmp_path: Path) -> None:
    fetch(log, log, tmp_path)
    data = receipts.kept_receipt(tmp_path, claim(1_050))
    assert data is not None
    assert LedgerReceipt.from_bytes(data) == LedgerReceipt.from_bytes(single(log, 1_050))
    assert proof.check_receipt(data, log.round_id)[1] == [credit(1_050), post(1_050)]
    assert receipts.kept_receipt(tmp_path, claim(CLAIMS + 1)) is None


def answer(log: Log, *numbers: int) -> LedgerReceipts:
    data = trio.run(LogReader(log).receipts, [claim(number) for number in numbers])
    assert data is not None
    return LedgerReceipts.from_bytes(data)


def is_refused(log: Log, folder: Path) -> bool:
    """Return True if the answer about the second and third claim is refused by name."""
    try:
        fetch(log, log, folder, NAMES[1:3])
    except SwarmError:
        return True
    return False


def test_tampered_receipts_of_many_claims_are_refused_and_not_kept(log: Log, tmp_path: Path) -> None:
    honest = answer(log, 1, 2)
    first, second = honest.claims
    pending, settled = first.entries
    other = answer(log, 3).claims[0]
    changes: dict[str, dict[str, object]] = {
        "another entry": {"entries": (pending.model_copy(update={"entry": second.entries[0].entry}), settled)},
        "another place": {"entries": (pending.model_copy(update={"index": pending.index + 1}), settled)},
        "half a hash": {"entries": (pending.model_copy(update={"proof": pending.proof[:-1]}), settled)},
        "a hash less": {"entries": (pending.model_copy(update={"proof": pending.proof[32:]}), settled)},
        "a settlement alone": {"entries": (settled,)},
        "another claim's entries": {"entries": other.entries},
        "no checkpoint": {"checkpoint": 1},
        "another id": {"claim_id": claim(3)},
    }
    forged: list[tuple[str, tuple[ClaimProof, ...]]] = [
        (name, (first.model_copy(update=change), second)) for name, change in changes.items()
    ]
    forged += [("a claim twice", (first, first)), ("what nobody asked for", (first, second, other))]
    for name, claims in forged:
        log.lies["receipts"] = honest.model_copy(update={"claims": claims}).to_bytes()
        assert is_refused(log, tmp_path), name
        assert list(tmp_path.iterdir()) == [], name
    log.lies["receipts"] = honest.to_bytes()
    assert fetch(log, log, tmp_path, NAMES[1:3]) == dict.fromkeys(NAMES[1:3], "posted")


def test_other_roots_than_before_are_evidence(log: Log, tmp_path: Path) -> None:
    fetch(log, log, tmp_path / "mine", NAMES[:1])
    other = SignedMetadata.create(tmp_path / "keys", tmp_path / "metadata", 600.0, NOW)
    foreign = Log(other, SETTLED)
    with pytest.raises(SwarmError):
        fetch(foreign, log, tmp_path / "mine", NAMES[:2])
    assert fetch(None, log, tmp_path / "mine", NAMES[:1]) == {NAMES[0]: "posted"}


def test_a_withheld_receipt_is_missing_and_others_are_kept(log: Log, tmp_path: Path) -> None:
    honest = answer(log, 1, 2)
    empty = honest.claims[0].model_copy(update={"entries": ()})
    for name, kept in (("left out", honest.claims[1:]), ("empty", (empty, honest.claims[1]))):
        log.lies["receipts"] = honest.model_copy(update={"claims": kept}).to_bytes()
        assert fetch(log, log, tmp_path / name, NAMES[1:3]) == {NAMES[1]: "", NAMES[2]: "posted"}


def test_nothing_is_written_where_nothing_is_published(metadata: SignedMetadata, tmp_path: Path) -> None:
    log = Log(metadata, [deposit(10)])
    assert fetch(log, log, tmp_path, NAMES[:2]) == dict.fromkeys(NAMES[:2], "")
    assert list(tmp_path.iterdir()) == []


def test_a_folder_of_saved_files_answers_no_request_for_many(log: Log, tmp_path: Path) -> None:
    saved = LogReader(Folder(tmp_path))
    assert trio.run(saved.receipts, NAMES[:1]) is None
    assert trio.run(LogReader(Saving(log, tmp_path)).receipts, NAMES[:1]) is None, "only single ones can be saved"
    with pytest.raises(NotFound):
        trio.run(saved.receipt, NAMES[0])


def test_a_file_that_contradicts_the_log_is_not_overwritten(metadata: SignedMetadata, tmp_path: Path) -> None:
    first = Log(metadata, [deposit(10**9), credit(1)])
    fetch(first, first, tmp_path, [claim(1)])
    before = (tmp_path / "000000.receipts").read_bytes()
    with pytest.raises(ProofInvalid, match=r"contradicts .*000000\.receipts"):
        fetch(Log(metadata, [deposit(10**9), credit(1, tokens=50)]), first, tmp_path, [claim(1)])
    assert (tmp_path / "000000.receipts").read_bytes() == before
