"""A verdict that a node is told is what the public log says of it, or `why` says loudly that it is not."""

import json
from pathlib import Path
from typing import Any, Literal, cast

import pytest
import trio

from coordinator.publishing.signed_metadata import SignedMetadata
from ledger import tiles
from ledger.entry import Entry, VerdictEntry
from ledger.proof import LedgerReceipt
from ledger.tiles import TILE_HASHES, Tile, tile_of
from protocol.errors import LedgerForked, NotFound, ProofInvalid, SwarmError
from protocol.policy import chunks
from protocol.work.auditing import Explanation, Explanations
from swarm_node.commands import why
from swarm_node.ledger import ledger_check
from swarm_node.ledger.ledger_check import Logged
from swarm_node.ledger.log_reader import LogReader
from swarm_node.ledger.log_watch import LogWatch
from swarm_node.ledger.receipts import RECEIPTS
from tests.ledger.values import appeal, claim, credit, deposit, node, post, reinstate, ruling, void
from tests.swarm_node.log_world import MORE, NOW, Log

REPORT = json.dumps({"outcome": "hard fail"}).encode()
CLAIM = 1
BEFORE: list[Entry] = [deposit(10**9), credit(CLAIM)]


@pytest.fixture
def log(tmp_path: Path) -> Log:
    return Log(SignedMetadata.create(tmp_path / "keys", tmp_path / "metadata", 3600.0, NOW), BEFORE)


def verdict(outcome: Literal["pass", "hard"] = "hard", report: bytes = REPORT, of: int = CLAIM) -> VerdictEntry:
    digest = chunks.digest(report)
    return VerdictEntry(claim_id=claim(of), outcome=outcome, validator="replay/1", evidence_digest=digest)


def told(**change: Any) -> Explanation:
    """Return what the coordinator says to the node."""
    words = {
        "lease_id": f"{CLAIM:032x}", "claim_id": claim(CLAIM), "state": "voided", "code": "replay_mismatch", "said": "",
        "finding": "hard", "appeal": "possible", "ruling": "", "report": REPORT, "lease": b"", "rollout": b"",
    }  # fmt: skip
    return Explanation.model_validate(words | change)


def receipt_of(number: int) -> str:
    return f"receipts/{claim(number)}"


def found(log: Log, folder: Path, explanation: Explanation | None = None) -> Logged:
    reader = LogReader(log)
    watch = LogWatch(reader, log.round_id, folder / "seen")
    return trio.run(
        ledger_check.find_entry, reader, watch, log.round_id, node(1), explanation or told(), folder / RECEIPTS
    )


def refuses(log: Log, folder: Path, explanation: Explanation | None = None) -> SwarmError:
    with pytest.raises(ProofInvalid) as caught:
        found(log, folder, explanation)
    return caught.value


@pytest.mark.parametrize(
    "between",
    [
        0,
        TILE_HASHES - len(BEFORE) - 2,  # the last entry but one of the credit's bundle
        TILE_HASHES - len(BEFORE) - 1,  # the last one
        TILE_HASHES - len(BEFORE),  # the first of the next
        2 * TILE_HASHES,
    ],
)
def test_a_verdict_is_found_wherever_it_stands_and_proved(log: Log, tmp_path: Path, between: int) -> None:
    many: list[Entry] = [credit(number) for number in range(10, 10 + between)]
    log.add([*many, verdict(), void(CLAIM), *MORE[between:]])
    place = len(BEFORE) + between
    assert found(log, tmp_path) == Logged("logged", place, len(BEFORE) + max(between, len(MORE)) + 2)


def test_a_verdict_that_no_checkpoint_has_yet_is_not_called_logged(log: Log, tmp_path: Path) -> None:
    ends: list[Entry] = [verdict(), void(CLAIM)]
    for size, entry in enumerate(ends, len(BEFORE)):
        assert found(log, tmp_path) == Logged("not_yet", None, size)
        log.add([entry])
    assert found(log, tmp_path) == Logged("logged", len(BEFORE), len(BEFORE) + 2)


def test_a_verdict_on_a_claim_that_is_pending_is_logged_before_its_settlement(log: Log, tmp_path: Path) -> None:
    log.add([verdict("pass"), *MORE])
    pending = told(state="pending", finding="pass", code="")
    assert found(log, tmp_path, pending) == Logged("logged", len(BEFORE), len(BEFORE) + 1 + len(MORE))


def test_without_a_receipt_nothing_is_compared_and_nothing_called_not_yet(log: Log, tmp_path: Path) -> None:
    """Else a coordinator hid its lie for ever by withholding one file."""
    log.add([verdict("pass"), post(CLAIM)])
    log.lies[receipt_of(CLAIM)] = None
    with pytest.raises(NotFound, match="shows no receipt"):
        found(log, tmp_path)


def test_a_receipt_that_this_home_keeps_finds_the_lie_where_the_coordinator_shows_none(
    log: Log, tmp_path: Path
) -> None:
    kept = log._honest(receipt_of(CLAIM)) or b""
    (tmp_path / RECEIPTS).mkdir()
    (tmp_path / RECEIPTS / f"{claim(CLAIM)}.receipt").write_bytes(kept)
    log.add([verdict("pass"), post(CLAIM)])
    log.lies[receipt_of(CLAIM)] = None
    assert "has the verdict pass" in refuses(log, tmp_path).message


def test_a_receipt_that_points_behind_the_end_is_not_believed(log: Log, tmp_path: Path) -> None:
    log.add([verdict("pass"), post(CLAIM)])
    honest = LedgerReceipt.from_bytes(log._honest(receipt_of(CLAIM)) or b"")
    (credited, *rest) = honest.entries
    moved = honest.model_copy(update={"entries": (credited.model_copy(update={"index": 99}), *rest)})
    log.lies[receipt_of(CLAIM)] = moved.to_bytes()
    refuses(log, tmp_path)


def test_a_log_that_is_shown_shorter_than_the_receipts_is_no_answer(log: Log, tmp_path: Path) -> None:
    before = log._honest("ledger/checkpoint")
    log.add([verdict("pass"), post(CLAIM)])
    log.lies["ledger/checkpoint"] = before
    assert "but the checkpoint only 2" in refuses(log, tmp_path).message


@pytest.mark.parametrize(("finding", "state"), [("", "pending"), ("waiting", "pending"), ("", "expired")])
def test_where_nothing_was_told_that_the_log_has_nothing_is_looked_for(
    log: Log, tmp_path: Path, finding: str, state: str
) -> None:
    assert found(log, tmp_path, told(finding=finding, state=state, report=b"")) == Logged("nothing_told")


def test_another_nodes_claim_is_not_taken_for_this_ones(log: Log, tmp_path: Path) -> None:
    """A coordinator tells a node of a fault that is really there: another's."""
    log.add([credit(5, of=2), verdict(of=5), void(5)])
    lie = told(lease_id=f"{5:032x}", claim_id=claim(5))
    assert str(node(2)) in refuses(log, tmp_path, lie).message


def test_another_lease_of_this_node_is_not_taken_for_the_one_that_was_asked_about(log: Log, tmp_path: Path) -> None:
    log.add([credit(5), verdict(of=5), void(5)])
    assert f"{5:032x}" in refuses(log, tmp_path, told(claim_id=claim(5))).message


@pytest.mark.parametrize("name", ["", "../secret", "A" * 64])
def test_what_is_settled_names_its_claim(log: Log, tmp_path: Path, name: str) -> None:
    assert "names no claim" in refuses(log, tmp_path, told(claim_id=name)).message


def unjudged(**change: Any) -> Explanation:
    """A claim that no audit was told of."""
    return told(**{"finding": "", "report": b"", "code": "escrow_forfeited", "appeal": ""} | change)


def test_a_settlement_without_an_audit_is_looked_up_as_well(log: Log, tmp_path: Path) -> None:
    log.add([void(CLAIM, "escrow_forfeited")])
    assert found(log, tmp_path, unjudged()) == Logged("logged", 2, 3)


@pytest.mark.parametrize(
    ("end", "lie", "words"),
    [
        (post(CLAIM), {}, "posted; the coordinator reported it as void"),
        (void(CLAIM, "owner_banned"), {}, "void for owner_banned; the coordinator reported escrow_forfeited"),
        (void(CLAIM), {"state": "posted", "code": ""}, "but it is void in the log"),
    ],
)
def test_another_settlement_than_the_logged_one_is_a_lie(
    log: Log, tmp_path: Path, end: Entry, lie: dict[str, str], words: str
) -> None:
    log.add([end, *MORE])
    assert words in refuses(log, tmp_path, unjudged(**lie)).message


def test_what_an_appeal_gave_back_is_posted_by_the_log_too(log: Log, tmp_path: Path) -> None:
    log.add([verdict(), void(CLAIM), appeal(CLAIM), ruling(CLAIM)])
    back = told(state="posted", code="", appeal="granted")
    assert found(log, tmp_path, back) == Logged("not_yet", None, 6)
    log.add([reinstate(CLAIM)])
    assert found(log, tmp_path, back) == Logged("logged", 2, 7)
    assert found(log, tmp_path) == Logged("logged", 2, 7)  # told just before


def test_another_report_than_the_logged_one_is_the_coordinators_lie(log: Log, tmp_path: Path) -> None:
    """The coordinator tells the node one story, and the log another."""
    log.add([verdict(), void(CLAIM), *MORE])
    error = refuses(log, tmp_path, told(report=REPORT + b" "))
    assert (error.fault, "Entry 2" in error.message) == ("coordinator", True)
    assert chunks.digest(REPORT) in error.message
    assert chunks.digest(REPORT + b" ") in error.message


def test_another_finding_than_the_logged_one_is_a_lie_with_the_same_report(log: Log, tmp_path: Path) -> None:
    log.add([verdict("pass"), post(CLAIM)])
    assert "pass" in refuses(log, tmp_path).message


@pytest.mark.parametrize("end", [void(CLAIM), post(CLAIM)])
def test_a_verdict_is_a_lie_where_the_log_settled_the_claim_without_one(log: Log, tmp_path: Path, end: Entry) -> None:
    log.add([end, *MORE])
    assert "without a verdict" in refuses(log, tmp_path).message


def test_a_verdict_on_another_claim_is_not_this_ones(log: Log, tmp_path: Path) -> None:
    log.add([credit(2), verdict(of=2)])
    assert found(log, tmp_path) == Logged("not_yet", None, len(BEFORE) + 2)


def test_a_verdict_cannot_be_put_into_the_entries_or_left_out_for_one_node(log: Log, tmp_path: Path) -> None:
    """The bundle that it is told is not the one that is signed."""
    log.add([*MORE, verdict("pass")])
    size = len(BEFORE) + len(MORE) + 1
    for number in range(-(-size // TILE_HASHES)):
        bundle = tile_of(Tile.BUNDLE, number, size)
        path = f"ledger/tile/{bundle.name}"
        entries = tiles.unbundle(log._honest(path) or b"", bundle.width)
        for place in (2 if not number else 0, bundle.width // 2, bundle.width - 1):
            forged = [*entries[:place], verdict("hard").body, *entries[place + 1 :]]
            log.lies = {path: tiles.bundle(forged)}
            with pytest.raises(ProofInvalid):
                found(log, tmp_path)
    log.lies = {}
    assert "pass" in refuses(log, tmp_path).message


def test_a_receipt_that_points_behind_the_verdict_hides_nothing(log: Log, tmp_path: Path) -> None:
    log.add([verdict("pass"), credit(2)])
    log.lies[f"receipts/{claim(CLAIM)}"] = log._honest(f"receipts/{claim(2)}")
    assert "receipt" in refuses(log, tmp_path).message


def test_a_fork_that_shows_the_node_another_log_is_found_before_the_verdict(log: Log, tmp_path: Path) -> None:
    log.add([verdict("pass"), post(CLAIM)])
    assert found(log, tmp_path, told(finding="pass", state="posted", code="")).entry == 2
    other = Log(log.metadata, [*BEFORE, verdict(), void(CLAIM), credit(2)])
    with pytest.raises(LedgerForked):
        found(other, tmp_path)


def test_the_owner_reads_where_it_is_logged_and_scripts_too() -> None:
    answer = Explanations(tolerance="", tolerances=b"", explanations=(told(),))
    states = {
        "logged": "entry 7",
        "not_yet": "Not in the ledger yet",
        "not_compared": "",
        "contradicted": "",
        "not_asked": "",
    }
    for state, words in states.items():
        place = Logged(cast(Any, state), 7 if state == "logged" else None, 9)
        assert words in "\n".join(why.report(answer, [], place, as_json=False))
        (line,) = why.report(answer, [], place, as_json=True)
        assert json.loads(line)["logged"] == {"state": state, "entry": place.entry, "of": 9}
    (line,) = why.report(answer, [], as_json=True)
    assert json.loads(line)["logged"]["state"] == "not_asked"
