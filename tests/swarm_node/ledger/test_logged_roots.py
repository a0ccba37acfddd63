"""The roots that a log names against those that are served: nobody is told of other keys than everybody else."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import trio
from trio.testing import MockClock
from typer.testing import CliRunner

from coordinator.publishing import rotation
from coordinator.publishing.signed_metadata import LEDGER, RoleKeys, SignedMetadata
from ledger.checkpoint import Checkpoint, sign
from ledger.entry import Root
from ledger.note import NoteKey
from ledger.witness import Witnesses
from protocol.errors import CheckpointInvalid, ProofInvalid, RolledBack, UntrustedMetadata
from protocol.policy import chunks
from swarm_node.cli import app
from swarm_node.ledger.log_reader import Folder, LogReader, Saving
from swarm_node.ledger.log_verify import PATIENCE_S, Verified, verify
from tests.ledger.notes import THIEF
from tests.ledger.values import credit
from tests.swarm_node.log_world import LIFE, MORE, NOW, Log

NOBODY = Witnesses()
SECOND = "metadata/2.root.json"


@pytest.fixture
def log(tmp_path: Path) -> Log:
    """A log of the round in this folder, with its first root."""
    made = Log(SignedMetadata.create(tmp_path / "keys", tmp_path / "metadata", 600.0, NOW))
    made.log_roots()
    made.add(LIFE)
    return made


def rotate(folder: Path, role: str) -> SignedMetadata:
    """Give a role of the round in a folder other keys."""
    metadata, keys = SignedMetadata(folder / "keys", folder / "metadata", 600.0), RoleKeys(folder / "keys")
    rotation.install(metadata, keys, rotation.prepare(metadata, keys, role, 1, 1, NOW), NOW)
    return metadata


def another(folder: Path, role: str) -> SignedMetadata:
    """Return what the holder of the same root keys could show in the place of the next root."""
    for name in ("keys", "metadata"):
        shutil.copytree(folder / name, folder / "another" / name)
    return rotate(folder / "another", role)


def verified(log: Log, reader: LogReader | None = None) -> Verified:
    return trio.run(verify, reader or LogReader(log), log.round_id, NOBODY, lambda _done, _all: None)


def test_roots_in_the_log_are_those_that_are_served(log: Log, tmp_path: Path) -> None:
    assert (verified(log).served_roots, verified(log).logged_roots) == (1, 1)
    rotate(tmp_path, "timestamp")
    rotate(tmp_path, LEDGER)
    log.log_roots()
    log.add(MORE)
    saved = LogReader(Saving(log, tmp_path / "saved"))
    assert (verified(log, saved).served_roots, verified(log).logged_roots) == (3, 3)
    assert verified(log, LogReader(Folder(tmp_path / "saved"))) == verified(log)


@pytest.mark.parametrize("role", ["timestamp", "root", LEDGER])
def test_a_root_that_was_replaced_in_secret_is_found(log: Log, tmp_path: Path, role: str) -> None:
    """Same number, properly signed, other keys: shown to one reader, while the log names what all others see."""
    shown = another(tmp_path, role)
    rotate(tmp_path, role)
    log.log_roots()
    lie = shown.roots()[1]
    log.lies[SECOND] = lie
    if role == LEDGER:  # the reader's checkpoint must be signed by the key that the reader is told of
        said = log.checkpoint()
        key = NoteKey(log.key.name, shown.ledger_public())
        log.lies["ledger/checkpoint"] = sign(Checkpoint(key.name, said.size, said.root), key, shown.sign_for_ledger)
    with pytest.raises(UntrustedMetadata) as found:
        verified(log, LogReader(Saving(log, tmp_path / "saved")))
    for evidence in ("root 2", f"entry {len(LIFE) + 1}", chunks.digest(lie), chunks.digest(log.metadata.roots()[1])):
        assert evidence in found.value.message
    assert "--save" in found.value.hint
    with pytest.raises(UntrustedMetadata) as offline:
        verified(log, LogReader(Folder(tmp_path / "saved")))
    assert offline.value.message == found.value.message


def test_a_root_that_is_withheld_is_found(log: Log, tmp_path: Path) -> None:
    rotate(tmp_path, "timestamp")
    log.log_roots()
    log.lies[SECOND] = None
    with pytest.raises(RolledBack, match=f"Entry {len(LIFE) + 1} names root 2, and only 1 are served"):
        verified(log)


@pytest.mark.parametrize(
    "numbers",
    [
        (3,),  # one is passed over
        (3, 2),  # told of afterwards
    ],
)
def test_roots_out_of_their_order_are_refused(log: Log, tmp_path: Path, numbers: tuple[int, ...]) -> None:
    for _ in range(2):
        rotate(tmp_path, "timestamp")
    log.add([Root.from_document(number, log.metadata.roots()[number - 1]) for number in numbers])
    with pytest.raises(ProofInvalid, match=f"Entry {len(LIFE) + 1} names root 3, and 2 would be the next"):
        verified(log)


def test_a_log_that_is_older_than_such_entries_is_proved_and_says_so(tmp_path: Path) -> None:
    log = Log(SignedMetadata.create(tmp_path / "keys", tmp_path / "metadata", 600.0, NOW), LIFE)
    assert (verified(log).served_roots, verified(log).logged_roots) == (1, 0)
    log.log_roots()
    assert verified(log).logged_roots == 1


def test_an_owner_is_told_what_the_log_does_not_name(tmp_path: Path) -> None:
    log = Log(SignedMetadata.create(tmp_path / "keys", tmp_path / "metadata", 600.0, NOW), LIFE)

    def told() -> str:
        verified(log, LogReader(Saving(log, tmp_path / "saved")))
        words = ["ledger", "verify", f"http://127.0.0.1:1#{log.round_id}", "--from", str(tmp_path / "saved")]
        result = CliRunner().invoke(app, words)
        assert result.exit_code == 0, (result.output, result.exception)
        return result.output

    assert "Note: this old ledger has no root documents" in told()
    log.log_roots()
    assert "root documents" not in told()
    rotate(tmp_path, "timestamp")
    log.log_roots()
    assert "root documents" not in told()


class Meanwhile:
    """A log whose operator replaces keys at the very moment when a reader asks for one of its files."""

    def __init__(self, log: Log, path: str, act: Callable[[], None]) -> None:
        self._log, self._path, self._act = log, path, act
        self.happened = False

    async def file(self, path: str, max_bytes: int) -> bytes | None:
        if path.startswith(self._path) and not self.happened:
            self.happened = True
            self._act()
        return await self._log.file(path, max_bytes)


@pytest.mark.parametrize("role", ["timestamp", LEDGER])
@pytest.mark.parametrize("at", ["leaderboard", "ledger/checkpoint", "metadata/1", "metadata/2", "ledger/tile"])
def test_keys_that_are_replaced_while_a_reader_verifies_are_no_finding(
    log: Log, tmp_path: Path, role: str, at: str
) -> None:
    def act() -> None:
        rotate(tmp_path, role)
        log.log_roots()

    files = Meanwhile(log, at, act)
    if at == "ledger/tile":  # the partial bundle is asked for as wide as it was
        log.add(MORE)
    found = verified(log, LogReader(Saving(files, tmp_path / "saved")))
    assert files.happened
    assert found.logged_roots == found.served_roots <= 2
    assert verified(log, LogReader(Folder(tmp_path / "saved"))) == found
    assert (verified(log).served_roots, verified(log).logged_roots) == (2, 2)


@pytest.mark.parametrize("role", ["timestamp", "root", LEDGER])
@pytest.mark.parametrize("grows", [False, True])
def test_a_root_that_is_served_and_never_logged_is_found(log: Log, tmp_path: Path, role: str, grows: bool) -> None:
    """Else keys that one reader alone is shown were a note, for ever."""
    private = rotate(tmp_path, role).roots()[1]
    if role == LEDGER:
        log.add([])  # signed anew
    busy: LogReader = Growing(log) if grows else LogReader(log)
    with pytest.raises(UntrustedMetadata) as found:
        trio.run(verify, busy, log.round_id, NOBODY, lambda _done, _all: None, clock=MockClock(autojump_threshold=0))
    for fact in ("Root 2", chunks.digest(private), "end with root 1"):
        assert fact in found.value.message


def test_what_saved_files_lack_is_not_waited_for(log: Log, tmp_path: Path) -> None:
    rotate(tmp_path, "timestamp")

    async def waited_s(reader: LogReader) -> float:
        began = trio.current_time()
        with pytest.raises(UntrustedMetadata, match="end with root 1"):
            await verify(reader, log.round_id, NOBODY, lambda _done, _all: None)
        return trio.current_time() - began

    online, offline = LogReader(Saving(log, tmp_path / "saved")), LogReader(Folder(tmp_path / "saved"))
    assert trio.run(waited_s, online, clock=MockClock(autojump_threshold=0)) >= PATIENCE_S
    assert trio.run(waited_s, offline, clock=MockClock(autojump_threshold=0)) == 0.0


def test_a_root_that_is_logged_a_moment_later_is_no_finding(log: Log, tmp_path: Path) -> None:
    """Installed, and the coordinator just starts again; static origins show it already."""
    rotate(tmp_path, "timestamp")

    class Starting(LogReader):
        looks = 0

        async def checkpoint(self) -> bytes:
            self.looks += 1
            if self.looks == 5:
                log.log_roots()
                log.add(MORE)
            return await super().checkpoint()

    clock = MockClock(autojump_threshold=0)
    done = trio.run(verify, Starting(log), log.round_id, NOBODY, lambda _done, _all: None, clock=clock)
    assert (done.served_roots, done.logged_roots) == (2, 2)
    assert done.entries == len(LIFE) + 2 + len(MORE)


class Growing(LogReader):
    """A log that gets an entry at every look."""

    def __init__(self, log: Log) -> None:
        super().__init__(log)
        self._log, self._next = log, 10

    async def checkpoint(self) -> bytes:
        await trio.sleep(1)
        self._log.add([credit(self._next)])
        self._next += 1
        return await super().checkpoint()


def test_a_checkpoint_by_a_key_that_no_root_names_is_refused(log: Log) -> None:
    said = log.checkpoint()
    thief = NoteKey(log.key.name, THIEF.public_key().public_bytes_raw())
    log.lies["ledger/checkpoint"] = sign(Checkpoint(thief.name, said.size, said.root), thief, THIEF.sign)
    with pytest.raises(CheckpointInvalid):
        verified(log)


def test_a_damaged_root_is_refused_before_it_is_compared(log: Log, tmp_path: Path) -> None:
    rotate(tmp_path, "timestamp")
    log.log_roots()
    log.lies[SECOND] = log.metadata.roots()[1].replace(b'"version":2', b'"version":3')
    with pytest.raises(UntrustedMetadata, match="not valid"):
        verified(log)
