"""The machine is lost at any moment of a round that a standby copy follows: the copy goes on, and nothing forks.

The machine is its processes and the round's folder: they are killed and deleted. What strangers have seen stays: every
checkpoint that was served is kept here, as nodes and witnesses keep them.
"""

import random
import shutil
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import httpx
import psutil
import pytest
import sqlalchemy as sa

from coordinator.learner.client import CoordinatorClient
from coordinator.service.backup import restoring
from coordinator.service.backup.archive import BackupInvalid
from coordinator.service.backup.restoring import Restored, TakeOver
from ledger import proof, store
from ledger.checkpoint import Checkpoint
from ledger.gaps import Keys
from protocol.errors import SwarmError
from protocol.work.learning import UpdateReport
from protocol.work.messages import Verdict
from tests.processes.light_node import Labourer, at_work
from tests.processes.programs import Program, Swarm, said, script, until
from tests.processes.rounds import NOBODY_LEARNS, Coordinator, Settings, assert_ledger_is_sound, operator_of
from tests.processes.test_forked_ledger import sees_the_log

pytestmark = pytest.mark.processes

LOSSES = (3, pytest.param(8, marks=pytest.mark.slow))
"""Each is at a moment of its own, so that many runs of a few show as much as a run of many."""

LABOURERS = 3
PASSPHRASE = "correct horse battery"
SETTINGS: Settings = {
    "sampling": {"samples_per_group": 2},
    "learner": {"groups_per_update": 4},
    "staleness": {"max_updates": 100},
    "leases": {"timeout_s": 5.0},
    "publish": {"chunk_size_bytes": 4096},
}


def now_ms() -> int:
    return time.time_ns() // 1_000_000


class Trainer(threading.Thread):
    """Plays a learner that is lost with its machine: whatever the round says now is what it goes on from."""

    def __init__(self, coordinator: Coordinator, policy: Path) -> None:
        super().__init__(name="trainer", daemon=True)
        self._client = CoordinatorClient(coordinator.url, (coordinator.folder / "operator.token").read_text())
        self._coordinator = coordinator
        self._policy = policy
        self._enough = threading.Event()

    def run(self) -> None:
        while not self._enough.is_set():
            try:
                state = self._client.state()
                number = int(self._coordinator.http.get("/v1/status").json()["batch"]) + 1
                self._client.batch(number)
                self._client.report(UpdateReport(number=number, mismatched=(), metrics={}, idle_s=0.0, busy_s=0.0))
                self._client.publish(state.newest_version + 1, number, self._policy)
                self._enough.wait(0.1)
            except (SwarmError, httpx.HTTPError):
                self._enough.wait(0.05)

    def finish(self) -> None:
        self._enough.set()
        self.join(timeout=60)
        self._client.close()


class Strangers(threading.Thread):
    """A group of witnesses that keep every checkpoint that they see."""

    def __init__(self, url: str) -> None:
        super().__init__(name="strangers", daemon=True)
        self._http = httpx.Client(base_url=url)
        self._enough = threading.Event()
        self.notes: dict[int, bytes] = {}
        """Notes by size; two of one size are the same, or that is a fork."""
        self.forks: list[tuple[bytes, bytes]] = []

    def run(self) -> None:
        while not self._enough.wait(0.02):
            try:
                answer = self._http.get("/v1/ledger/checkpoint")
            except httpx.HTTPError:
                continue
            if answer.status_code == 200:
                size = int(answer.text.splitlines()[1])
                if self.notes.setdefault(size, answer.content).splitlines()[2] != answer.content.splitlines()[2]:
                    self.forks.append((self.notes[size], answer.content))

    def newest(self) -> bytes:
        return self.notes[max(self.notes)]

    def finish(self) -> None:
        self._enough.set()
        self.join(timeout=60)
        self._http.close()


class Punctual(dict[str, tuple[bytes, Verdict]]):
    """Notes when each verdict came, in ms."""

    def __init__(self) -> None:
        super().__init__()
        self.came_ms: dict[str, int] = {}

    def __setitem__(self, lease_id: str, verdict: tuple[bytes, Verdict]) -> None:
        self.came_ms.setdefault(lease_id, now_ms())
        super().__setitem__(lease_id, verdict)


@pytest.fixture
def swarm(tmp_path: Path) -> Iterator[Swarm]:
    """The programs of one test."""
    made = Swarm(tmp_path / "swarm")
    yield made
    made.close()


@contextmanager
def strangers(url: str) -> Iterator[Strangers]:
    made = Strangers(url)
    made.start()
    try:
        yield made
    finally:
        made.finish()


def follow(swarm: Swarm, coordinator: Coordinator, target: Path) -> Program:
    """A follower that has made its first pass."""
    passphrase = swarm.folder / "passphrase"
    passphrase.write_text(PASSPHRASE)
    return swarm.start(
        "follower", script("swarm-coordinator"), "backup", str(coordinator.config_file), str(target), "--follow",
        "--every", "0.2", "--passphrase-file", str(passphrase),
    )  # fmt: skip


def lose_the_machine(swarm: Swarm, coordinator: Coordinator) -> None:
    """Every process of the test runs on it; the strangers are threads."""
    while members := swarm.members():
        for process in members:
            with suppress(psutil.NoSuchProcess):
                process.kill()
    shutil.rmtree(coordinator.folder)


def take_over(coordinator: Coordinator, target: Path, *seen: Path, after_gap: bool = False) -> Restored:
    """The copy becomes the round, in the place of the lost one."""
    return restoring.restore(
        target,
        coordinator.folder,
        store_url="",
        passphrase=PASSPHRASE,
        seen=[str(path) for path in seen],
        nothing_newer=not seen,
        tell=lambda *_: None,
        take_over=TakeOver(after_gap),
    )


def accepted(coordinator: Coordinator) -> set[str]:
    with coordinator.copy_of_store() as connection:
        return set(connection.execute(sa.text("SELECT lease_id FROM rollouts")).scalars())


def checkpoints_of(coordinator: Coordinator, notes: dict[int, bytes]) -> list[Checkpoint]:
    roots = sorted((coordinator.folder / "metadata").glob("*.root.json"), key=lambda path: int(path.name.split(".")[0]))
    keys = Keys([path.read_bytes() for path in roots], coordinator.join_string.partition("#")[2])
    return [keys.counts_as(note) for note in notes.values()]


def assert_everything_published_is_there(coordinator: Coordinator, seen: Strangers) -> None:
    assert seen.forks == []
    with coordinator.copy_of_store() as connection:
        for checkpoint in checkpoints_of(coordinator, seen.notes):
            assert store.root_at(connection, checkpoint.size) == checkpoint.root


@pytest.mark.parametrize("losses", LOSSES)
def test_standby_copy_goes_on_after_the_machine_was_lost_at_any_moment(swarm: Swarm, policy: Path, losses: int) -> None:
    seed = random.SystemRandom().randrange(2**32)
    print(f"seed {seed}")
    chance = random.Random(seed)
    coordinator = Coordinator(swarm, SETTINGS).start()
    operator_of(swarm, coordinator, policy).publish()
    target, seen_file, home = swarm.folder / "standby", swarm.folder / "seen", swarm.folder / "home"
    trainer = Trainer(coordinator, policy)
    lags, must_be_there, began_ms = list[int](), set[str](), now_ms()
    with strangers(coordinator.url) as seen, at_work(*[coordinator.join_string] * LABOURERS) as crowd:
        for labourer in crowd:
            labourer.acknowledged = Punctual()
        trainer.start()
        follower = follow(swarm, coordinator, target)
        for loss in range(losses):
            follower.said("standby copy: at most")
            wanted = verdicts(crowd) + chance.randint(1, 12)
            until(f"{wanted} verdicts before loss {loss}", lambda: verdicts(crowd) >= wanted)  # noqa: B023  # used at once
            threading.Event().wait(chance.random() / 2)  # anywhere in a pass, a checkpoint or a publication
            lose_the_machine(swarm, coordinator)
            lost_ms = now_ms()
            seen_file.write_bytes(seen.newest())
            made = take_over(coordinator, target, seen_file)
            assert made.gap_root == 0
            taken_ms = made.contents.made_ms
            lags.append(lost_ms - taken_ms)
            must_be_there |= {lease for lease, came in accepted_ms(crowd).items() if began_ms <= came <= taken_ms}
            late = must_be_there - accepted(coordinator)
            assert not late, f"loss {loss}: acknowledged before the copy was made, and not in it"
            follower, began_ms = follow(swarm, coordinator, target), now_ms()
            coordinator.start()
            sees_the_log(coordinator.join_string, home)
        wanted = verdicts(crowd) + 10
        until(f"{wanted} verdicts after the last loss", lambda: verdicts(crowd) >= wanted)
    trainer.finish()
    print(f"the copy was {sorted(lags)[len(lags) // 2]} ms behind (median), {max(lags)} ms at most")
    assert_everything_published_is_there(coordinator, seen)
    assert_ledger_is_sound(coordinator)


def accepted_ms(crowd: list[Labourer]) -> dict[str, int]:
    """The leases that were answered with an acceptance, and when."""
    times = {}
    for node in crowd:
        assert isinstance(node.acknowledged, Punctual)
        for lease, (_, verdict) in list(node.acknowledged.items()):
            if verdict.outcome != "rejected":
                times[lease] = node.acknowledged.came_ms[lease]
    return times


def verdicts(crowd: list[Labourer]) -> int:
    return sum(len(node.acknowledged) for node in crowd)


@pytest.mark.slow
def test_copy_that_lacks_published_entries_goes_on_only_after_a_gap_that_root_keys_sign(
    swarm: Swarm, policy: Path
) -> None:
    """The missing entries are listed; nodes, witnesses and `verify` accept the shorter log by the root keys alone."""
    coordinator = Coordinator(swarm, {**SETTINGS, **NOBODY_LEARNS}).start()
    operator = operator_of(swarm, coordinator, policy)
    operator.publish()
    stick, target, home, saved = (swarm.folder / name for name in ("stick", "standby", "home", "saved"))
    stick.mkdir()
    (coordinator.folder / "keys" / "root.pem").rename(stick / "root.pem")
    with strangers(coordinator.url) as seen:
        with at_work(*[coordinator.join_string] * LABOURERS) as crowd:
            until("some verdicts", lambda: verdicts(crowd) >= 10)
            follower = follow(swarm, coordinator, target)
            follower.said("standby copy: at most")
            follower.interrupt()
            copied = int(coordinator.fresh("/v1/leaderboard")["ledger_size"])  # at most
            until("more entries to be published", lambda: max(seen.notes) > copied + 10)
        said(swarm, "swarm-node", "ledger", "verify", coordinator.join_string, "--save", str(saved))
        before = sees_the_log(coordinator.join_string, home)
        lose_the_machine(swarm, coordinator)
    assert before > copied

    seen_file = swarm.folder / "seen"
    seen_file.write_bytes(seen.newest())
    with pytest.raises(BackupInvalid, match=r"copy lacks them\. No given source has them"):
        take_over(coordinator, target, seen_file)
    with pytest.raises(BackupInvalid, match=r"They are: .*pending"):
        take_over(coordinator, target, saved)
    assert not coordinator.folder.exists()
    made = take_over(coordinator, target, seen_file, saved, after_gap=True)
    assert (made.gap_root, made.signatures_missing) == (2, 1)
    refused = said(swarm, "swarm-coordinator", "launch", str(coordinator.config_file), code=2)
    assert "lacks signatures" in refused
    pending = str(coordinator.folder / "pending.root.json")
    said(swarm, "swarm-coordinator", "keys", "sign", pending, "--root-keys", str(stick))
    said(swarm, "swarm-coordinator", "keys", "install", str(coordinator.config_file))

    coordinator.start()
    with strangers(coordinator.url) as later, at_work(coordinator.join_string) as crowd:
        until("the resumed log to be published", lambda: bool(later.notes) and max(later.notes) > made.ledger_size + 2)
        until("some verdicts", lambda: verdicts(crowd) >= 5)
    assert_everything_published_is_there(coordinator, later)
    assert sees_the_log(coordinator.join_string, home) > made.ledger_size
    (kept,) = home.rglob("gap-*.msgpack")
    assert kept.name == f"gap-{made.ledger_size}-{before}.msgpack"
    checked = said(swarm, "swarm-node", "ledger", "verify", coordinator.join_string)
    assert f"root 2 resumes the log after its first {made.ledger_size} entries" in checked
    said(swarm, "swarm-node", "ledger", "witness", coordinator.join_string, "--home", str(home))
    with pytest.raises(SwarmError):
        checked_fork(coordinator, seen.newest(), later.newest())
    assert_ledger_is_sound(coordinator)


def checked_fork(coordinator: Coordinator, first: bytes, other: bytes) -> None:
    """Two checkpoints of two sides of a gap are no fork, whatever proof comes with them."""
    roots = tuple((coordinator.folder / "metadata" / f"{number}.root.json").read_bytes() for number in (1, 2))
    made = proof.Fork(roots=roots, earlier=first, later=other, proof=())
    proof.check_fork(made.to_bytes(), coordinator.join_string.partition("#")[2])
