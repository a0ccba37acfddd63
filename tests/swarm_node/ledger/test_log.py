"""Receipts and forks convince or are refused, and everything can be rebuilt from a round's public files."""

import json
import os
from pathlib import Path

import pytest
import trio
import trio.testing
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from coordinator.publishing import rotation
from coordinator.publishing.signed_metadata import LEDGER, RoleKeys, SignedMetadata
from ledger import proof, witness
from ledger.entry import Entry
from ledger.note import KeyKind, NoteKey
from ledger.proof import Fork, LedgerReceipt
from ledger.witness import Witnesses
from protocol.errors import (
    CheckpointInvalid,
    MalformedMessage,
    NotCanonical,
    NotWitnessed,
    ProofInvalid,
    SwarmError,
    UntrustedMetadata,
    UntrustedRoot,
)
from protocol.ids import NodeId
from protocol.policy import chunks, root_document
from protocol.wire.signing import NodeKey
from swarm_node.ledger import receipts
from swarm_node.ledger.log_reader import Folder, LogReader, Saving
from swarm_node.ledger.log_verify import Verified, verify
from swarm_node.ledger.receipts import Claims
from tests.ledger.values import batch, claim, credit, node, paid, payout, post, void
from tests.swarm_node.log_world import LIFE, MORE, NOW, Log, otherwise_signed

NOBODY = Witnesses()


@pytest.fixture
def metadata(tmp_path: Path) -> SignedMetadata:
    return SignedMetadata.create(tmp_path / "keys", tmp_path / "metadata", 3600.0, NOW)


@pytest.fixture
def log(metadata: SignedMetadata) -> Log:
    return Log(metadata, LIFE)


class TestProofs:
    """Files that convince or are refused."""

    @pytest.fixture
    def receipt(self, log: Log) -> LedgerReceipt:
        return LedgerReceipt.from_bytes(trio.run(LogReader(log).receipt, claim(1)))

    def test_receipt_proves_its_claim_without_a_network(self, log: Log, receipt: LedgerReceipt) -> None:
        assert proof.check_receipt(receipt.to_bytes(), log.round_id)[1] == [credit(1), post(1)]

    def test_receipt_outlives_the_key_that_signed_it(self, log: Log, receipt: LedgerReceipt, tmp_path: Path) -> None:
        keys = RoleKeys(tmp_path / "keys")
        rotation.install(log.metadata, keys, rotation.prepare(log.metadata, keys, LEDGER, 1, 1, NOW), NOW)
        renewed = receipt.model_copy(update={"roots": log.metadata.roots()})
        assert proof.check_receipt(renewed.to_bytes(), log.round_id)[1] == [credit(1), post(1)]

    def test_receipt_tampered_anywhere_is_refused(self, log: Log, receipt: LedgerReceipt) -> None:
        first, second = receipt.entries
        other = Log(log.metadata, [*LIFE, credit(7)])
        wrong: list[dict[str, object]] = [
            {"entries": (first.model_copy(update={"entry": credit(1, tokens=200).body}), second)},
            {"entries": (first.model_copy(update={"index": 3}), second)},
            {"entries": (first.model_copy(update={"proof": first.proof[::-1]}), second)},
            {"entries": (first.model_copy(update={"proof": first.proof[1:]}), second)},
            {"entries": (first, second.model_copy(update={"proof": first.proof}))},
            {"checkpoint": trio.run(LogReader(other).checkpoint)},
            {"checkpoint": otherwise_signed(receipt.checkpoint)},
        ]
        for change in wrong:
            with pytest.raises((ProofInvalid, CheckpointInvalid)):
                proof.check_receipt(receipt.model_copy(update=change).to_bytes(), log.round_id)

    def test_receipt_under_forged_or_foreign_roots_is_refused(
        self, log: Log, receipt: LedgerReceipt, tmp_path: Path
    ) -> None:
        foreign = SignedMetadata.create(tmp_path / "k", tmp_path / "m", 3600.0, NOW)
        with pytest.raises(UntrustedRoot):
            proof.check_receipt(receipt.to_bytes(), foreign.round_id)
        grafted = receipt.model_copy(update={"roots": (*receipt.roots, *foreign.roots())})
        with pytest.raises(UntrustedMetadata):
            proof.check_receipt(grafted.to_bytes(), log.round_id)

    def test_huge_proof_and_garbage_are_refused_before_they_are_hashed(self, log: Log, receipt: LedgerReceipt) -> None:
        huge = receipt.entries[0].model_copy(update={"proof": (bytes(32),) * 65})
        for data in (receipt.model_copy(update={"entries": (huge,)}).to_bytes(), b"", b"\xc1", bytes(1_000)):
            with pytest.raises((MalformedMessage, NotCanonical)):
                proof.check_receipt(data, log.round_id)

    def test_two_consistent_checkpoints_are_no_fork(self, log: Log) -> None:
        earlier = trio.run(LogReader(log).checkpoint)
        log.add(MORE)
        later = trio.run(LogReader(log).checkpoint)
        for hashes in ((), (bytes(32),) * 5):
            accusation = Fork(roots=log.metadata.roots(), earlier=earlier, later=later, proof=hashes)
            with pytest.raises(ProofInvalid):
                proof.check_fork(accusation.to_bytes(), log.round_id)
        with pytest.raises(ProofInvalid):
            proof.check_fork(
                Fork(roots=log.metadata.roots(), earlier=later, later=later, proof=()).to_bytes(), log.round_id
            )

    def test_root_without_a_ledger_key_is_refused(self, log: Log) -> None:
        for field in (b'"x-other"', b'"x-echo-swarm-ledgers"'):
            with pytest.raises(SwarmError):
                root_document.ledger_key(log.metadata.roots()[0].replace(b'"x-echo-swarm-ledger"', field))


class TestReceipts:
    """A node's own."""

    def test_claims_are_kept_once_and_a_torn_line_is_passed_over(self, tmp_path: Path) -> None:
        claims = Claims(tmp_path / "claims")
        assert list(claims) == []
        (tmp_path / "claims").write_text(f"{claim(1)}\n{claim(1)}\n{claim(2)[:9]}")
        assert list(claims) == [claim(1)]

    @pytest.mark.parametrize("lost", [1, 9, 64, 65])
    def test_claims_after_a_torn_one_are_kept(self, tmp_path: Path, lost: int) -> None:
        path = tmp_path / "claims"
        claims = Claims(path)
        envelopes = [NodeKey(bytes(32)).seal("rollout", bytes([number])) for number in range(3)]
        claims.add(envelopes[:2])
        os.truncate(path, path.stat().st_size - lost)
        claims.add(envelopes[1:])
        assert list(claims) == [chunks.digest(bytes([number])) for number in range(3)]

    def test_credit_of_this_nodes_work_to_another_node_is_no_receipt(self, log: Log, tmp_path: Path) -> None:
        async def first(owner: NodeId) -> receipts.ClaimReceipt | None:
            found = receipts.fetch(LogReader(log), log.round_id, owner, [claim(1)], tmp_path / "receipts")
            return [receipt async for _, receipt in found].pop()

        with pytest.raises(ProofInvalid, match="another node"):
            trio.run(first, node(2))
        assert not list((tmp_path / "receipts").iterdir())
        assert trio.run(first, node(1))

    def test_receipt_that_contradicts_the_kept_one_leaves_the_evidence_in_its_place(
        self, log: Log, tmp_path: Path
    ) -> None:
        async def fetch(source: Log) -> None:
            async for _ in receipts.fetch(LogReader(source), log.round_id, node(1), [claim(4)], tmp_path / "receipts"):
                pass

        log.add([credit(4)])
        trio.run(fetch, log)
        (path,) = (tmp_path / "receipts").iterdir()
        kept = path.read_bytes()
        with pytest.raises(ProofInvalid, match="contradicts"):
            trio.run(fetch, Log(log.metadata, LIFE, [credit(4, tokens=50)]))
        assert path.read_bytes() == kept

    def test_pending_ones_are_fetched_again_and_settled_ones_not(self, log: Log, tmp_path: Path) -> None:
        log.add([credit(4)])

        def fetch() -> dict[str, str]:
            async def all_of_them() -> dict[str, str]:
                names = [claim(number) for number in (1, 2, 4, 77)]
                found = receipts.fetch(LogReader(log), log.round_id, node(1), names, tmp_path / "receipts")
                return {name: receipt.state if receipt else "" async for name, receipt in found}

            return trio.run(all_of_them)

        assert fetch() == {claim(1): "posted", claim(2): "voided", claim(4): "pending", claim(77): ""}
        log.add([post(4)])
        log.posts.clear()
        log.refused.add(claim(1))
        assert fetch() == {claim(1): "posted", claim(2): "voided", claim(4): "posted", claim(77): ""}


class TestVerify:
    """The whole log."""

    def verify(self, log: Log, witnesses: Witnesses = NOBODY, reader: LogReader | None = None) -> Verified:
        return trio.run(verify, reader or LogReader(log), log.round_id, witnesses, lambda _done, _all: None)

    def test_honest_log_is_proved_and_so_are_its_saved_files(self, log: Log, tmp_path: Path) -> None:
        log.add(MORE)
        found = self.verify(log, reader=LogReader(Saving(log, tmp_path / "saved")))
        assert (found.entries, found.nodes) == (len(LIFE) + len(MORE), 2)
        assert found.balances[f"payable:{node(1)}"] == credit(1).amount_micros
        assert self.verify(log, reader=LogReader(Folder(tmp_path / "saved"))) == found

    def test_leaderboard_behind_the_checkpoint_is_compared_at_its_size(self, log: Log) -> None:
        log.lies["leaderboard"] = json.dumps({"ledger_size": len(LIFE), "nodes": log.rows()}).encode()
        log.add(MORE)
        assert self.verify(log).entries == len(LIFE) + len(MORE)

    @pytest.mark.parametrize("field", ["posted_micros", "pending_micros", "voided_micros", "validated_tokens"])
    def test_leaderboard_that_says_anything_else_is_refused(self, log: Log, field: str) -> None:
        rows = log.rows()
        rows[0][field] = int(rows[0][field]) + 1
        for lie in (rows, rows[1:], [*log.rows(), {**rows[0], "node_id": node(9)}]):
            log.lies["leaderboard"] = json.dumps({"ledger_size": len(LIFE), "nodes": lie}).encode()
            with pytest.raises(ProofInvalid, match="leaderboard"):
                self.verify(log)

    def test_leaderboard_that_names_a_node_twice_is_refused(self, log: Log) -> None:
        rows = log.rows()
        boast = {**rows[0], "posted_micros": 10**9}
        log.lies["leaderboard"] = json.dumps({"ledger_size": len(LIFE), "nodes": [boast, *rows]}).encode()
        with pytest.raises(ProofInvalid, match="twice"):
            self.verify(log)

    def test_entry_that_was_changed_left_out_or_slipped_in_is_refused(self, log: Log) -> None:
        bundle = f"ledger/tile/entries/000.p/{len(LIFE)}"
        sound = trio.run(log.file, bundle, 10**6)
        assert sound
        short, long = post(3).body, credit(3, of=9).body
        lies = [
            sound.replace(credit(3, of=2).body, long),
            sound[: -len(void(2).body)] + void(2, "replay_mismatcx").body,
            sound[: -len(void(2).body) - 2],
            sound + len(short).to_bytes(2) + short,
            b"",
        ]
        for lie in lies:
            log.lies[bundle] = lie
            with pytest.raises((ProofInvalid, MalformedMessage)):
                self.verify(log)

    def test_signed_nonsense_is_refused(self, log: Log) -> None:
        """Even the operator cannot have money made of nothing, or a claim settled twice, in a log that verifies."""
        bodies = [entry.body for entry in [*LIFE, post(2)]]
        log.lies[f"ledger/tile/entries/000.p/{len(bodies)}"] = b"".join(len(body).to_bytes(2) + body for body in bodies)
        log.sign(len(bodies), bytes(32))
        with pytest.raises(ProofInvalid, match="already_voided"):
            self.verify(log)

    @pytest.mark.parametrize(
        ("moved", "said"),
        [
            ([payout(1)], "unknown_batch"),
            ([batch(1, micros=299), payout(1)], "beyond_batch"),
            ([batch(1, micros=300, payees=2), payout(1)], "beyond_batch"),
            ([batch(1, micros=300), payout(1, micros=299), paid(1)], "batch_incomplete"),
        ],
        ids=["no batch", "beyond its total", "fewer than its payees", "less than its total"],
    )
    def test_money_moved_outside_of_a_published_batch_is_refused(self, log: Log, moved: list[Entry], said: str) -> None:
        """The batch is published by an operator who signs it, and who would show each payee a proof of some batch."""
        bodies = [entry.body for entry in [*LIFE, *moved]]
        log.lies[f"ledger/tile/entries/000.p/{len(bodies)}"] = b"".join(len(body).to_bytes(2) + body for body in bodies)
        log.sign(len(bodies), bytes(32))
        with pytest.raises(ProofInvalid, match=said):
            self.verify(log)

    @pytest.mark.parametrize("garbage", [b"", b"[]", b'{"ledger_size": -1, "nodes": []}', b'{"nodes": [NaN]}'])
    def test_garbage_for_a_leaderboard_is_refused(self, log: Log, garbage: bytes) -> None:
        log.lies["leaderboard"] = garbage
        with pytest.raises(MalformedMessage):
            self.verify(log)

    def test_witnesses_are_demanded(self, log: Log) -> None:
        private = Ed25519PrivateKey.from_private_bytes(bytes(32))
        key = NoteKey("somebody", private.public_key().public_bytes_raw(), KeyKind.WITNESS)
        with pytest.raises(NotWitnessed):
            self.verify(log, Witnesses((key,), 1))
        note = trio.run(LogReader(log).checkpoint)
        log.lies["ledger/checkpoint"] = witness.cosign(note, key, private.sign, 5)
        assert self.verify(log, Witnesses((key,), 1)).entries == len(LIFE)
