"""A round saved under load, killed, and brought back elsewhere: it goes on, nodes find it sound, no fork is signed."""

import json
import shutil
import sqlite3
import subprocess
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from coordinator.service.backup import making
from tests.processes.light_node import Labourer, at_work
from tests.processes.programs import PATIENCE_S, Program, Swarm, script, until
from tests.processes.rounds import Coordinator, Operator, Settings, assert_ledger_is_sound, operator_of

pytestmark = pytest.mark.processes

LABOURERS = 3

SETTINGS: Settings = {
    "sampling": {"samples_per_group": 4},
    "learner": {"groups_per_update": 4},
    "staleness": {"max_updates": 100},
    "publish": {"chunk_size_bytes": 4096},
}


def run(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([script(command[0]), *command[1:]], capture_output=True, text=True, timeout=PATIENCE_S)


def assert_nodes_find_it_sound(coordinator: Coordinator, home: Path) -> None:
    """All of the ledger is proved, and it continues the newest checkpoint that was seen from this home."""
    for words in (("verify", coordinator.join_string), ("witness", coordinator.join_string, "--home", str(home))):
        checked = run("swarm-node", "ledger", *words)
        assert checked.returncode == 0, checked.stderr


def entries(coordinator: Coordinator) -> int:
    return int(coordinator.http.get("/v1/ledger/checkpoint").text.splitlines()[1])


def work(coordinator: Coordinator, crowd: list[Labourer], more: int) -> None:
    """Work until `more` further verdicts arrived, and the last of them is published."""

    def heard() -> int:
        return sum(len(labourer.acknowledged) for labourer in crowd)

    wanted = heard() + more
    until(f"{wanted} verdicts", lambda: heard() >= wanted)
    size = int(coordinator.fresh("/v1/leaderboard")["ledger_size"])
    until(f"{size} entries to be published", lambda: entries(coordinator) >= size)


def relaunch(swarm: Swarm, coordinator: Coordinator, folder: Path) -> Program:
    """The restored round at the address of the lost one."""
    more_work = "staleness.max_updates=200"
    settings = ["--set", more_work, "--no-learner", "--no-auditor"]
    program = swarm.start("restored", script("swarm-coordinator"), "launch", str(folder / "operator.toml"), *settings)
    assert program.said(r"swarm-node join (\S+)$")[1] == coordinator.join_string
    return program


def train(operator: Operator, number: int) -> None:
    """Make an update as the learner does, up to the version."""
    assert operator.client.batch(number).groups
    operator.publish(number)


def test_a_round_that_is_saved_under_load_goes_on_elsewhere_and_no_fork_is_signed(swarm: Swarm, policy: Path) -> None:
    coordinator = Coordinator(swarm, SETTINGS).start()
    operator = operator_of(swarm, coordinator, policy)
    operator.publish()
    passphrase = swarm.folder / "passphrase"
    passphrase.write_text("correct horse battery")
    early, late, home = (swarm.folder / name for name in ("early", "late.tar", "home"))

    def save(target: Path) -> None:
        done = run(
            "swarm-coordinator", "backup", str(coordinator.config_file), str(target),
            "--passphrase-file", str(passphrase),
        )  # fmt: skip
        assert done.returncode == 0, done.stderr

    def restore(source: Path, folder: str, *said: str) -> subprocess.CompletedProcess[str]:
        return run(
            "swarm-coordinator", "restore", str(source), str(swarm.folder / folder),
            "--passphrase-file", str(passphrase), *said,
        )  # fmt: skip

    with at_work(*[coordinator.join_string] * LABOURERS) as crowd:
        work(coordinator, crowd, 10)
        save(early)
        size = entries(coordinator)
        train(operator, 1)
        until("newer entries to be published", lambda: entries(coordinator) > size)
        assert_nodes_find_it_sound(coordinator, home)
        save(late)
        alive = restore(late, "elsewhere", "--nothing-newer")
        assert (alive.returncode, "still answers" in alive.stderr) == (1, True), alive.stderr
    coordinator.program.kill()
    moved = swarm.folder / "lost"
    coordinator.folder.rename(moved)

    (seen,) = home.rglob("seen.msgpack")
    old = restore(early, "elsewhere", "--seen", str(seen))
    assert old.returncode == 1
    assert "second history" in old.stderr
    assert not (swarm.folder / "elsewhere").exists()
    moved.rename(coordinator.folder)
    old = restore(early, "elsewhere", "--nothing-newer")
    assert old.returncode == 1, "the folder that was left behind knows better"
    shutil.rmtree(coordinator.folder)

    done = restore(late, "elsewhere", "--seen", str(seen))
    assert done.returncode == 0, done.stderr
    before = json.loads((swarm.folder / "elsewhere" / "metadata" / "timestamp.json").read_text())["signed"]["version"]
    relaunch(swarm, coordinator, swarm.folder / "elsewhere")
    after = json.loads((swarm.folder / "elsewhere" / "metadata" / "timestamp.json").read_text())["signed"]["version"]
    assert after > before + 1
    saved = entries(coordinator)
    with at_work(*[coordinator.join_string] * LABOURERS) as crowd:
        work(coordinator, crowd, 8)
    assert entries(coordinator) > saved
    train(operator, 2)
    assert_nodes_find_it_sound(coordinator, home)
    coordinator.folder = swarm.folder / "elsewhere"
    assert_ledger_is_sound(coordinator)


@pytest.mark.slow
def test_a_round_that_publishes_all_the_time_is_saved(swarm: Swarm, policy: Path) -> None:
    """Versions follow each other without a pause, from before the first backup until after the last."""
    coordinator = Coordinator(swarm, SETTINGS).start()
    operator = operator_of(swarm, coordinator, policy)
    operator.publish()
    known, target = 0, swarm.folder / "saved"
    with publishing(operator):
        for _ in range(3):
            shutil.rmtree(target, ignore_errors=True)
            known = coordinator.status()["version"]
            done = run("swarm-coordinator", "backup", str(coordinator.config_file), str(target), "--no-keys")
            assert done.returncode == 0, done.stderr
            assert coordinator.status()["version"] > known
    coordinator.program.kill()
    coordinator.folder.rename(swarm.folder / "gone")
    done = run("swarm-coordinator", "restore", str(target), str(swarm.folder / "new"), "--nothing-newer")
    assert done.returncode == 0, done.stderr
    with closing(sqlite3.connect(swarm.folder / "new" / "state.db")) as store:
        (saved,) = store.execute("SELECT max(version) FROM versions").fetchone()
    assert saved >= known
    assert making.newest_document(swarm.folder / "new") == saved


@contextmanager
def publishing(operator: Operator) -> Iterator[None]:
    """Versions, as fast as they can be."""
    enough = threading.Event()

    def publish() -> None:
        while not enough.is_set():
            operator.publish()

    with ThreadPoolExecutor(1) as pool:
        done = pool.submit(publish)
        try:
            yield
        finally:
            enough.set()
        done.result(PATIENCE_S)
