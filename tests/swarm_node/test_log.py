"""The node and the ledger: what it sees must continue what it saw, and everything can be rebuilt from public files.

- A coordinator's real store and keys, its files as a real coordinator names them, and one that lies.
"""

import json
import os
import resource
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path

import pytest
import trio
import trio.testing
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import load_pem_private_key
from sqlalchemy import Engine

from coordinator import rotation
from coordinator.role_keys import LEDGER, RoleKeys
from coordinator.signed_metadata import SignedMetadata
from ledger import proof, store, witness
from ledger.checkpoint import Checkpoint, ledger_key, sign
from ledger.entry import Entry
from ledger.note import Key, Kind
from ledger.proof import Fork, Receipt
from ledger.tiles import Tile
from protocol import chunks, trust
from protocol.errors import (
    CheckpointInvalid,
    LedgerForked,
    MalformedMessage,
    NotCanonical,
    NotFound,
    NotWitnessed,
    ProofInvalid,
    RolledBack,
    SwarmError,
    UntrustedMetadata,
    UntrustedRoot,
)
from protocol.ids import NodeId
from protocol.signing import NodeKey
from swarm_node import receipts
from swarm_node.log_reader import Folder, LogReader, Saving
from swarm_node.log_verify import Verified, Witnesses, verify
from swarm_node.log_watch import LOOK_EVERY_S, LogWatch
from swarm_node.receipts import Claims
from tests.ledger.engines import sqlite_memory
from tests.ledger.values import claim, credit, deposit, node, post, version, void

NOW = datetime.now(UTC)
NOBODY = Witnesses()
LIFE: list[Entry] = [deposit(10**9), version(1), credit(1), credit(2), credit(3, of=2), post(1), void(2)]
MORE: list[Entry] = [credit(number) for number in range(10, 600)]


class Log:
    """A round's public files, made anew from its store whenever they are asked for."""

    def __init__(self, metadata: SignedMetadata, *histories: Sequence[Entry]) -> None:
        self.metadata = metadata
        self.round_id = metadata.round_id
        self.lies: dict[str, bytes | None] = {}
        self.engine: Engine = sqlite_memory()
        with self.engine.begin() as conn:
            store.create(conn)
        for history in histories:
            self.add(history)

    @property
    def key(self) -> Key:
        return ledger_key(self.round_id, self.metadata.ledger_public())

    def add(self, entries: Sequence[Entry]) -> None:
        with self.engine.begin() as conn:
            store.append_all(conn, entries, 0)
            store.publish(conn, self.key, self.metadata.sign_for_ledger)

    def sign(self, size: int, root: bytes) -> None:
        """Sign what is not so."""
        lie = Checkpoint(self.key.name, size, root)
        self.lies["ledger/checkpoint"] = sign(lie, self.key, self.metadata.sign_for_ledger)

    async def file(self, path: str, max_bytes: int) -> bytes | None:
        data = self.lies[path] if path in self.lies else self._honest(path)
        assert data is None or len(data) <= max_bytes
        return data

    def _honest(self, path: str) -> bytes | None:
        shelf, _, name = path.partition("/")
        with self.engine.begin() as conn:
            if path == "ledger/checkpoint":
                return store.checkpoint(conn)
            if path == "leaderboard":
                return json.dumps({"ledger_size": store.size(conn), "nodes": self.rows()}).encode()
            try:
                if shelf == "ledger":
                    return store.read_file(conn, Tile.parse(name.removeprefix("tile/")))
                if shelf == "receipts":
                    note, entries = store.prove_claim(conn, name)
                    made = Receipt(roots=self.metadata.roots(), checkpoint=note, entries=tuple(entries))
                    return made.to_bytes()
            except NotFound:
                return None
        return self.metadata.read(name)

    def rows(self) -> list[dict[str, str | int]]:
        with self.engine.begin() as conn:
            return [
                {
                    "node_id": total.node_id,
                    "posted_micros": total.posted_micros,
                    "pending_micros": total.pending_micros,
                    "voided_micros": total.voided_micros,
                    "validated_tokens": total.posted_tokens,
                    "name": "not the ledger's affair",
                }
                for total in store.node_totals(conn)
            ]


@pytest.fixture
def metadata(tmp_path: Path) -> SignedMetadata:
    return SignedMetadata.create(tmp_path / "keys", tmp_path / "metadata", 3600.0, NOW)


@pytest.fixture
def log(metadata: SignedMetadata) -> Log:
    return Log(metadata, LIFE)


class Watcher:
    """A machine that remembers over restarts."""

    def __init__(self, folder: Path, round_id: str) -> None:
        self.folder = folder
        self.round_id = round_id

    def sees(self, log: Log) -> int:
        return trio.run(LogWatch(LogReader(log), self.round_id, self.folder).look)[1].size

    def refuses(self, log: Log, error: type[SwarmError]) -> SwarmError:
        before = self.seen()
        with pytest.raises(SwarmError) as caught:
            self.sees(log)
        assert type(caught.value) is error, caught.value
        assert self.seen() == before
        return caught.value

    def seen(self) -> bytes:
        path = self.folder / "seen.msgpack"
        return path.read_bytes() if path.exists() else b""

    def forks(self) -> list[Path]:
        return sorted(self.folder.glob("fork-*"))


@pytest.fixture
def watcher(tmp_path: Path, log: Log) -> Watcher:
    made = Watcher(tmp_path / "node", log.round_id)
    assert made.sees(log) == len(LIFE)
    return made


@contextmanager
def no_room_for_files() -> Iterator[None]:
    """What a quota does: no file of this process can be longer than a few bytes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (16, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


class TestWatch:
    """Every checkpoint continues the one before."""

    def test_a_log_that_grows_is_followed(self, watcher: Watcher, log: Log) -> None:
        assert watcher.sees(log) == len(LIFE)
        log.add(MORE)
        assert watcher.sees(log) == len(LIFE) + len(MORE)
        assert not watcher.forks()

    @pytest.mark.parametrize("more", [[], MORE, MORE[:1]], ids=["same size", "many more", "one more"])
    def test_rewritten_history_stops_and_is_proved_to_anybody(
        self, watcher: Watcher, log: Log, more: list[Entry]
    ) -> None:
        rewritten = Log(log.metadata, [deposit(10**9, "wire-2"), *LIFE[1:]], more)
        said = watcher.refuses(rewritten, LedgerForked)
        [path] = watcher.forks()
        assert str(path) in str(said)
        earlier, later = proof.check_fork(path.read_bytes(), log.round_id)
        assert (earlier.size, later.size) == (len(LIFE), len(LIFE) + len(more))
        watcher.refuses(log, LedgerForked)  # for good, whatever is served next

    def test_truncated_log_is_refused(self, watcher: Watcher, log: Log) -> None:
        watcher.refuses(Log(log.metadata, LIFE[:4]), RolledBack)
        assert not watcher.forks()

    def test_checkpoint_signed_by_somebody_else_is_refused(self, watcher: Watcher, log: Log) -> None:
        thief = Ed25519PrivateKey.from_private_bytes(bytes(32))
        forged = ledger_key(log.round_id, thief.public_key().public_bytes_raw())
        log.lies["ledger/checkpoint"] = sign(Checkpoint(forged.name, 99, bytes(32)), forged, thief.sign)
        watcher.refuses(log, CheckpointInvalid)

    def test_signed_root_that_no_tiles_make_is_refused(self, watcher: Watcher, log: Log) -> None:
        log.add(MORE)
        log.sign(len(LIFE) + len(MORE), bytes(32))
        watcher.refuses(log, ProofInvalid)
        assert not watcher.forks()

    @pytest.mark.parametrize("tile", [b"", bytes(32), bytes(8192), None], ids=["empty", "short", "wrong", "withheld"])
    def test_tampered_or_withheld_tiles_prove_nothing(self, watcher: Watcher, log: Log, tile: bytes | None) -> None:
        log.add(MORE)
        log.lies["ledger/tile/0/000"] = tile
        watcher.refuses(log, NotFound if tile is None else ProofInvalid)

    def test_fork_is_told_of_though_its_proof_finds_no_room(self, watcher: Watcher, log: Log) -> None:
        rewritten = Log(log.metadata, [deposit(10**9, "wire-2"), *LIFE[1:]])
        with no_room_for_files(), pytest.raises(LedgerForked, match="no room"):
            watcher.sees(rewritten)

    def test_garbage_is_refused(self, watcher: Watcher, log: Log) -> None:
        for garbage in (b"", b"\xff" * 100, b"x\n" * 8_000):
            log.lies["ledger/checkpoint"] = garbage
            watcher.refuses(log, CheckpointInvalid)

    def test_replaced_key_is_followed_and_the_old_one_refused(self, watcher: Watcher, log: Log, tmp_path: Path) -> None:
        stolen, old = log.metadata.ledger_public(), (tmp_path / "keys" / "ledger.pem").read_bytes()
        keys = RoleKeys(tmp_path / "keys")
        rotation.install(log.metadata, keys, rotation.prepare(log.metadata, keys, LEDGER, 1, 1, NOW), NOW)
        assert not (tmp_path / "keys" / "ledger.pem").exists()
        assert log.metadata.ledger_public() != stolen
        log.add(MORE)
        assert watcher.sees(log) == len(LIFE) + len(MORE)
        thief = load_pem_private_key(old, password=None)
        assert isinstance(thief, Ed25519PrivateKey)
        forged = ledger_key(log.round_id, stolen)
        log.lies["ledger/checkpoint"] = sign(Checkpoint(forged.name, 9_999, bytes(32)), forged, thief.sign)
        watcher.refuses(log, CheckpointInvalid)


class TestPatience:
    """What ends a node that works, and what it waits for."""

    def run(self, watcher: Watcher, log: Log, change: Callable[[int], None]) -> None:
        """Let the watch run, with a change before each of ten looks."""

        async def running() -> None:
            watch = LogWatch(LogReader(log), watcher.round_id, watcher.folder)
            async with trio.open_nursery() as nursery:
                nursery.start_soon(watch.run)
                for number in range(10):
                    change(number)
                    await trio.testing.wait_all_tasks_blocked()
                    await trio.sleep(LOOK_EVERY_S)
                nursery.cancel_scope.cancel()

        trio.run(running, clock=trio.testing.MockClock(autojump_threshold=0.5))

    def test_disk_that_is_full_for_long_ends_nobody_and_is_told_of(
        self, watcher: Watcher, log: Log, caplog: pytest.LogCaptureFixture
    ) -> None:
        log.add(MORE)
        with no_room_for_files():
            self.run(watcher, log, lambda _number: None)
        assert [record.getMessage() for record in caplog.records if "disk_full" in record.getMessage()]
        assert watcher.sees(log) == len(LIFE) + len(MORE)

    def test_proxy_that_says_not_found_in_the_coordinators_place_ends_nobody(self, watcher: Watcher, log: Log) -> None:
        def away(number: int) -> None:
            log.lies = {"ledger/checkpoint": None} if number < 8 else {}

        self.run(watcher, log, away)

    def test_log_that_proves_nothing_time_after_time_ends_the_node(self, watcher: Watcher, log: Log) -> None:
        log.add(MORE)
        log.lies["ledger/tile/0/000"] = bytes(8192)
        with pytest.raises(BaseExceptionGroup) as caught:
            self.run(watcher, log, lambda _number: None)
        assert caught.group_contains(ProofInvalid)


class TestProofs:
    """Files that convince or are refused."""

    @pytest.fixture
    def receipt(self, log: Log) -> Receipt:
        return Receipt.from_bytes(trio.run(LogReader(log).receipt, claim(1)))

    def test_receipt_proves_its_claim_without_a_network(self, log: Log, receipt: Receipt) -> None:
        assert proof.check_claim(receipt.to_bytes(), log.round_id, claim(1)) == (credit(1), post(1))
        with pytest.raises(ProofInvalid):
            proof.check_claim(receipt.to_bytes(), log.round_id, claim(2))

    def test_receipt_outlives_the_key_that_signed_it(self, log: Log, receipt: Receipt, tmp_path: Path) -> None:
        keys = RoleKeys(tmp_path / "keys")
        rotation.install(log.metadata, keys, rotation.prepare(log.metadata, keys, LEDGER, 1, 1, NOW), NOW)
        renewed = receipt.model_copy(update={"roots": log.metadata.roots()})
        assert proof.check_claim(renewed.to_bytes(), log.round_id, claim(1))[1] == post(1)

    def test_receipt_tampered_anywhere_is_refused(self, log: Log, receipt: Receipt) -> None:
        first, second = receipt.entries
        other = Log(log.metadata, [*LIFE, credit(7)])
        wrong: list[dict[str, object]] = [
            {"entries": (first.model_copy(update={"entry": credit(1, tokens=200).body}), second)},
            {"entries": (first.model_copy(update={"index": 3}), second)},
            {"entries": (first.model_copy(update={"proof": first.proof[::-1]}), second)},
            {"entries": (first.model_copy(update={"proof": first.proof[1:]}), second)},
            {"entries": (first, second.model_copy(update={"proof": first.proof}))},
            {"checkpoint": trio.run(LogReader(other).checkpoint)},
            {"checkpoint": receipt.checkpoint[:-3] + b"A=\n"},
        ]
        for change in wrong:
            with pytest.raises((ProofInvalid, CheckpointInvalid)):
                proof.check_receipt(receipt.model_copy(update=change).to_bytes(), log.round_id)

    def test_receipt_under_forged_or_foreign_roots_is_refused(self, log: Log, receipt: Receipt, tmp_path: Path) -> None:
        foreign = SignedMetadata.create(tmp_path / "k", tmp_path / "m", 3600.0, NOW)
        with pytest.raises(UntrustedRoot):
            proof.check_receipt(receipt.to_bytes(), foreign.round_id)
        grafted = receipt.model_copy(update={"roots": (*receipt.roots, *foreign.roots())})
        with pytest.raises(UntrustedMetadata):
            proof.check_receipt(grafted.to_bytes(), log.round_id)

    def test_huge_proof_and_garbage_are_refused_before_they_are_hashed(self, log: Log, receipt: Receipt) -> None:
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
                trust.ledger_key(log.metadata.roots()[0].replace(b'"x-echo-swarm-ledger"', field))


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
        async def first(owner: NodeId) -> receipts.Receipt | None:
            found = receipts.fetch(LogReader(log), log.round_id, owner, [claim(1)], tmp_path / "receipts")
            return [receipt async for _, receipt in found][0]

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
        kept = (tmp_path / "receipts" / f"{claim(4)}.receipt").read_bytes()
        with pytest.raises(ProofInvalid, match="contradicts"):
            trio.run(fetch, Log(log.metadata, LIFE, [credit(4, tokens=50)]))
        assert (tmp_path / "receipts" / f"{claim(4)}.receipt").read_bytes() == kept

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
        log.lies[f"receipts/{claim(1)}"] = b"no more"
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

    @pytest.mark.parametrize("garbage", [b"", b"[]", b'{"ledger_size": -1, "nodes": []}', b'{"nodes": [NaN]}'])
    def test_garbage_for_a_leaderboard_is_refused(self, log: Log, garbage: bytes) -> None:
        log.lies["leaderboard"] = garbage
        with pytest.raises(MalformedMessage):
            self.verify(log)

    def test_witnesses_are_demanded(self, log: Log) -> None:
        private = Ed25519PrivateKey.from_private_bytes(bytes(32))
        key = Key("somebody", private.public_key().public_bytes_raw(), Kind.WITNESS)
        with pytest.raises(NotWitnessed):
            self.verify(log, Witnesses((key,), 1))
        note = trio.run(LogReader(log).checkpoint)
        log.lies["ledger/checkpoint"] = witness.cosign(note, key, private.sign, 5)
        assert self.verify(log, Witnesses((key,), 1)).entries == len(LIFE)
