"""The lottery as anybody checks it: who is drawn is audited before it is paid, and nobody is left out of the lists."""

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
import trio

from coordinator.publishing.signed_metadata import SignedMetadata
from coordinator.transactions.lottery import secret_of
from ledger import drawing
from ledger.drawing import ALL_PPM, LotteryDraw
from ledger.entry import Commitment, Entry, Reveal, VerdictEntry
from ledger.witness import Witnesses
from protocol.errors import NotFound, ProofInvalid
from swarm_node.ledger.log_reader import Folder, LogReader, Saving
from swarm_node.ledger.log_verify import DrawSummary, Verified, verify
from tests.ledger.values import claim, credit, deposit, post, void
from tests.swarm_node.log_world import NOW, Log

SECRETS = {epoch: secret_of(bytes(32), epoch) for epoch in range(1, 6)}
NEVER = 0
"""A rate at which nobody is drawn."""


@pytest.fixture
def log(tmp_path: Path) -> Log:
    bound = [Commitment(epoch=epoch, secret_digest=drawing.commitment(secret)) for epoch, secret in SECRETS.items()]
    begun: list[Entry] = [deposit(10**9), *bound]
    return Log(SignedMetadata.create(tmp_path / "keys", tmp_path / "metadata", 3600.0, NOW), begun)


def found(number: int, outcome: str = "pass") -> VerdictEntry:
    return VerdictEntry.model_validate(
        {"claim_id": claim(number), "outcome": outcome, "validator": "replay/3", "evidence_digest": "e" * 64}
    )


def reveal(log: Log, epoch: int, rates: dict[int, int], also: Sequence[LotteryDraw] = ()) -> None:
    """The epoch ends: its secret and its list are public."""
    own = [LotteryDraw(claim(number), rate) for number, rate in rates.items()]
    draws = sorted([*own, *also], key=lambda one: one.claim_id)
    log.lies[f"audits/{epoch}"] = json.dumps([[one.claim_id, one.rate_ppm] for one in draws]).encode()
    log.add([Reveal(epoch=epoch, secret=SECRETS[epoch], draws_digest=drawing.draws_digest(draws))])


def verified(log: Log, reader: LogReader | None = None) -> Verified:
    return trio.run(verify, reader or LogReader(log), log.round_id, Witnesses(), lambda _done, _all: None)


def three_epochs(log: Log) -> None:
    """Record six claims, of which two are drawn: one passes, one is pardoned."""
    log.add([credit(1), credit(2), found(1), post(1), post(2)])
    reveal(log, 1, {1: ALL_PPM, 2: NEVER})
    log.add([credit(3), credit(4), found(3, "pardon"), post(3)])
    reveal(log, 2, {3: ALL_PPM, 4: NEVER})
    log.add([credit(5), credit(6)])
    reveal(log, 3, {5: NEVER, 6: NEVER})


def test_honest_lottery_is_proved_and_so_are_its_saved_files(log: Log, tmp_path: Path) -> None:
    three_epochs(log)
    proved = verified(log, LogReader(Saving(log, tmp_path / "saved")))
    assert proved.audits == DrawSummary(claims=6, drawn=2, pardoned=1)
    assert verified(log, LogReader(Folder(tmp_path / "saved"))) == proved


@pytest.mark.parametrize("late", [(), (found(7),)], ids=["never", "afterwards"])
def test_friend_that_was_drawn_and_paid_unseen_is_named(log: Log, late: tuple[Entry, ...]) -> None:
    log.add([credit(7), post(7), *late])
    reveal(log, 1, {7: ALL_PPM})
    with pytest.raises(ProofInvalid, match="which was drawn, and no audit had looked at it"):
        verified(log)


@pytest.mark.parametrize("end", [(), (void(7),)], ids=["waits", "void"])
def test_who_was_drawn_and_is_not_paid_harms_nobody(log: Log, end: tuple[Entry, ...]) -> None:
    log.add([credit(7), *end])
    reveal(log, 1, {7: ALL_PPM})
    assert verified(log).audits == DrawSummary(claims=1, drawn=1)


def test_friend_that_is_left_out_of_every_list_is_named(log: Log) -> None:
    log.add([credit(7), post(7)])
    reveal(log, 1, {})
    assert verified(log).audits == DrawSummary(), "a part of the epoch's last group is drawn in the next one"
    reveal(log, 2, {})
    with pytest.raises(ProofInvalid, match="is in no epoch's list"):
        verified(log)


def test_epoch_whose_secret_was_lost_is_audited_whole(log: Log) -> None:
    log.add([credit(7), found(7), post(7)])
    reveal(log, 2, {})
    log.add([credit(8), post(8)])
    reveal(log, 3, {8: NEVER})
    assert verified(log).audits == DrawSummary(claims=1)


def test_what_an_audit_found_wrong_is_not_paid(log: Log) -> None:
    log.add([credit(7), found(7, "hard"), post(7)])
    with pytest.raises(ProofInvalid, match="found wrong by an audit"):
        verified(log)


def test_list_that_is_not_the_one_in_the_log_is_refused(log: Log) -> None:
    three_epochs(log)
    log.lies["audits/2"] = json.dumps([[claim(3), NEVER], [claim(4), NEVER]]).encode()
    with pytest.raises(ProofInvalid, match="does not match the digest in the log"):
        verified(log)


def test_list_that_is_withheld_is_missed(log: Log) -> None:
    three_epochs(log)
    log.lies["audits/2"] = None
    with pytest.raises(NotFound, match="audits/2"):
        verified(log)


@pytest.mark.parametrize(
    "also", [LotteryDraw(claim(1), NEVER), LotteryDraw(claim(77), NEVER)], ids=["twice", "nobody's"]
)
def test_list_of_claims_that_are_none_is_refused(log: Log, also: LotteryDraw) -> None:
    log.add([credit(1)])
    reveal(log, 1, {1: NEVER}, [also])
    with pytest.raises(ProofInvalid, match="wrongly"):
        verified(log)


@pytest.mark.parametrize(
    "garbage", [b"", b"{}", b"[[1, 2]]", b'[["x", 5]]', b"[" * 9999, json.dumps([[claim(1), -1]]).encode()]
)
def test_list_that_is_none_is_refused_by_name(log: Log, garbage: bytes) -> None:
    three_epochs(log)
    log.lies["audits/1"] = garbage
    with pytest.raises(ProofInvalid, match="none of claims and rates"):
        verified(log)
