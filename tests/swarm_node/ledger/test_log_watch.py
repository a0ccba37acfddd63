"""A node's view of the ledger must continue what it saw before."""

import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import trio
import trio.testing
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import load_pem_private_key

from coordinator.publishing import rotation
from coordinator.publishing.signed_metadata import LEDGER, RoleKeys, SignedMetadata
from ledger import proof
from ledger.checkpoint import Checkpoint, ledger_key, sign
from ledger.entry import Entry
from protocol.errors import (
    CheckpointInvalid,
    LedgerForked,
    NotFound,
    Overloaded,
    ProofInvalid,
    RolledBack,
    SwarmError,
    Unreachable,
)
from swarm_node.ledger.log_reader import BUSY_TRIES, LogReader
from swarm_node.ledger.log_watch import REFUSED_TRIES, TRIES, WITHHELD_TRIES, LogWatch, Overtaken
from tests.ledger.values import deposit
from tests.swarm_node.log_world import LIFE, MORE, NOW, Log


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
        return trio.run(LogWatch(LogReader(log), self.round_id, self.folder).refresh)[1].size

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
    """Limit files as a quota does: no file of this process can be longer than a few bytes."""
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

    def test_a_fork_that_another_program_of_this_home_was_shown_is_found(self, watcher: Watcher, log: Log) -> None:
        """The agent runs on while `why` is shown a history of its own."""
        agent, why = (LogWatch(LogReader(log), log.round_id, watcher.folder) for _ in range(2))
        trio.run(agent.refresh)
        log.add(MORE[:1])
        trio.run(why.refresh)
        private = Log(log.metadata, LIFE, [deposit(1, "wire-9"), *MORE[:2]])
        agent._reader = LogReader(private)
        with pytest.raises(LedgerForked):
            trio.run(agent.refresh)
        [path] = watcher.forks()
        proof.check_fork(path.read_bytes(), log.round_id)
        with pytest.raises(LedgerForked):
            trio.run(why.refresh)

    def test_what_two_programs_see_at_once_is_not_taken_for_one_history(self, watcher: Watcher, log: Log) -> None:
        log.add(MORE[:1])
        private = Log(log.metadata, LIFE, [deposit(1, "wire-9"), *MORE[:2]])

        class Between(LogReader):
            async def checkpoint(self) -> bytes:
                await LogWatch(LogReader(log), log.round_id, watcher.folder).refresh()
                return await super().checkpoint()

        agent = LogWatch(Between(private), log.round_id, watcher.folder)
        with pytest.raises(Overtaken, match="at the same time"):
            trio.run(agent.refresh)
        watcher.refuses(private, LedgerForked)
        assert watcher.forks()

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


class Changing:
    """A log that changes whenever its checkpoint is about to be looked at, and ends the looking in time."""

    def __init__(self, log: Log, change: Callable[[int], None], looks: int, end: trio.CancelScope) -> None:
        self._log = log
        self._change = change
        self._left = iter(range(looks))
        self._end = end

    async def file(self, path: str, max_bytes: int) -> bytes | None:
        if path == "ledger/checkpoint":
            if (number := next(self._left, None)) is None:
                self._end.cancel()
                await trio.lowlevel.checkpoint()
            else:
                self._change(number)
        return await self._log.file(path, max_bytes)


class TestPatience:
    """Events that end a node that works, and those that it waits for."""

    def run(self, watcher: Watcher, log: Log, change: Callable[[int], None], looks: int = 10) -> None:
        """Let the watch run, with a change before each look."""

        async def running() -> None:
            async with trio.open_nursery() as nursery:
                changing = Changing(log, change, looks, nursery.cancel_scope)
                nursery.start_soon(LogWatch(LogReader(changing), watcher.round_id, watcher.folder).run)

        trio.run(running, clock=trio.testing.MockClock(autojump_threshold=0))

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

    @pytest.mark.parametrize(
        ("tile", "looks"),
        [(None, WITHHELD_TRIES), (Unreachable("HTTP 502"), WITHHELD_TRIES), (Overloaded("HTTP 503"), REFUSED_TRIES)],
        ids=["not found", "unreachable", "busy"],
    )
    def test_fork_hidden_by_withholding_tiles_ends_the_node_in_the_end(
        self, watcher: Watcher, log: Log, tile: SwarmError | None, looks: int
    ) -> None:
        rewritten = Log(log.metadata, [deposit(10**9, "wire-2"), *LIFE[1:]], MORE)
        rewritten.lies["ledger/tile/0/000"] = tile
        with pytest.raises(BaseExceptionGroup) as caught:
            self.run(watcher, rewritten, lambda _number: None, looks + 1)
        assert caught.group_contains(ProofInvalid)

    def test_node_that_is_restarted_every_few_hours_waits_no_longer_for_a_fork_hidden_by_503(
        self, watcher: Watcher, log: Log
    ) -> None:
        log.add(MORE)
        log.lies["ledger/tile/0/000"] = Overloaded("HTTP 503")
        for _ in range(3):
            self.run(watcher, log, lambda _number: None, REFUSED_TRIES // 3 - 1)
        with pytest.raises(BaseExceptionGroup) as caught:
            self.run(watcher, log, lambda _number: None, 4)
        assert caught.group_contains(ProofInvalid)
        log.lies = {}
        self.run(watcher, log, lambda _number: None)
        log.add([deposit(1, "later")])
        log.lies["ledger/tile/0/000"] = Overloaded("HTTP 503")
        self.run(watcher, log, lambda _number: None)

    def test_showing_the_old_checkpoint_in_between_buys_a_hidden_fork_no_time(self, watcher: Watcher, log: Log) -> None:
        old = log.lies["ledger/checkpoint"] = trio.run(log.file, "ledger/checkpoint", 10**4)
        log.add(MORE)

        def alternate(number: int) -> None:
            log.lies = {"ledger/tile/0/000": None} if number % 2 else {"ledger/checkpoint": old}

        with pytest.raises(BaseExceptionGroup) as caught:
            self.run(watcher, log, alternate, 2 * WITHHELD_TRIES + 2)
        assert caught.group_contains(ProofInvalid)

    def test_chain_of_roots_that_is_withheld_proves_nothing_either(self, watcher: Watcher, log: Log) -> None:
        log.lies["metadata/2.root.json"] = Unreachable("HTTP 503")
        log.lies["ledger/checkpoint"] = b"signed by a key that the next root is said to name"
        watcher.refuses(log, NotFound)

    def test_tiles_that_are_away_for_a_while_end_nobody_and_are_told_of_once(
        self, watcher: Watcher, log: Log, caplog: pytest.LogCaptureFixture
    ) -> None:
        def hiccup(number: int) -> None:
            if number in (1, WITHHELD_TRIES + 1):
                log.add(MORE[:300] if number == 1 else MORE[300:])
            log.lies = dict.fromkeys(("ledger/tile/0/000", "ledger/tile/0/001")) if number % WITHHELD_TRIES else {}

        self.run(watcher, log, hiccup, 2 * WITHHELD_TRIES + 1)
        assert len([one for one in caplog.records if "not its proof" in one.getMessage()]) == 2

    def test_crowd_that_floods_the_coordinators_reads_for_a_night_ends_nobody(
        self, watcher: Watcher, log: Log, caplog: pytest.LogCaptureFixture
    ) -> None:
        log.add(MORE)
        times: list[float] = []

        def flood(number: int) -> None:
            times.append(trio.current_time())
            log.lies = {"ledger/tile/0/000": Overloaded("HTTP 503", retry_after_s=8)} if number < 100 else {}

        self.run(watcher, log, flood, 102)
        assert times[100] - times[0] > 12 * 3600
        assert times[101] - times[100] < 60, "after a proof, the pauses are short again"
        assert len([one for one in caplog.records if "not its proof" in one.getMessage()]) == 1
        assert watcher.sees(log) == len(LIFE) + len(MORE)

    def test_tile_that_a_busy_server_refuses_is_requested_again_after_its_pause(
        self, watcher: Watcher, log: Log
    ) -> None:
        """A proof takes several files: a server that refuses most requests would never be proved as a whole."""
        log.add(MORE)
        refusals: dict[str, int] = {}

        class Busy:
            async def file(self, path: str, max_bytes: int) -> bytes | None:
                refusals[path] = refusals.get(path, 0) + 1
                if refusals[path] < BUSY_TRIES:
                    raise Overloaded("HTTP 503", retry_after_s=7)
                return await log.file(path, max_bytes)

        clock = trio.testing.MockClock(autojump_threshold=0)
        trio.run(LogWatch(LogReader(Busy()), log.round_id, watcher.folder).refresh, clock=clock)
        assert set(refusals.values()) == {BUSY_TRIES}
        assert "ledger/tile/0/000" in refusals
        assert watcher.sees(log) == len(LIFE) + len(MORE)

    def test_why_that_is_asked_again_and_again_ends_no_agent(self, watcher: Watcher, log: Log) -> None:
        """The command keeps a newer checkpoint while each of the agent's looks is under way."""
        looks, more = 3 * TRIES, iter(MORE)

        class Between(LogReader):
            async def checkpoint(self) -> bytes:
                note = await super().checkpoint()
                log.add([next(more)])
                await LogWatch(LogReader(log), log.round_id, watcher.folder).refresh()
                return note

        async def running() -> None:
            async with trio.open_nursery() as nursery:
                reader = Between(Changing(log, lambda _number: None, looks, nursery.cancel_scope))
                nursery.start_soon(LogWatch(reader, log.round_id, watcher.folder).run)

        trio.run(running, clock=trio.testing.MockClock(autojump_threshold=0))
        assert watcher.sees(log) == len(LIFE) + looks
