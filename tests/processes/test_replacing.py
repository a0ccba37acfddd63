"""`policy rollback` and `policy publish` while a learner trains and nodes work, after a kill, and with nobody there."""

import json
import re
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import sqlalchemy as sa
from safetensors import numpy

from coordinator.audit.case import RoundArchive
from coordinator.config import load
from tests.processes.light_node import at_work
from tests.processes.programs import Swarm, script, until
from tests.processes.rounds import Coordinator, assert_ledger_is_sound
from tests.processes.training import KAPPA, MOVING, child, learner_log, resumed_at, training

pytestmark = pytest.mark.processes

LABOURERS = 2

WEIGHTS = "model.safetensors"

Tensors = Mapping[str, np.ndarray[Any, Any]]


@pytest.fixture(scope="module")
def coordinator(swarm: Swarm, policy: Path) -> Iterator[Coordinator]:
    settings = dict(training(policy, learning_rate=1e-3, groups_per_update=8))
    settings["objective"] = MOVING
    settings["staleness"] = {"max_updates": 60, "publish_every": KAPPA}  # and so many versions are kept
    made = Coordinator(swarm, settings).start(learner=True)
    with at_work(*[made.join_string] * LABOURERS, samples_for_s=0.25):
        yield made


def say(coordinator: Coordinator, command: str, *words: str) -> str:
    """Run a command that must succeed; return its output."""
    line = [script("swarm-coordinator"), "policy", command, str(coordinator.config_file), *words]
    done = subprocess.run(line, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def replaced(coordinator: Coordinator, command: str, *words: str) -> int:
    answer = json.loads(say(coordinator, command, *words, "--reason", "a test", "--json"))
    assert answer["changed"]
    return int(answer["version"])


def taken(coordinator: Coordinator, version: int, after: str) -> int:
    """The update at which the learner took a version."""
    match = until(
        f"the learner to take version {version}",
        lambda: re.search(rf"took version={version} update=(\d+)", learner_log(coordinator)[len(after) :]),
    )
    assert match
    return int(match[1])


def weights_of(coordinator: Coordinator, version: int) -> Tensors:
    with closing(RoundArchive(load(coordinator.config_file, []))) as archive:
        return numpy.load(archive.publisher.read_file(version, WEIGHTS))


def twice_as_large(policy: Path, target: Path) -> Path:
    """Write the policy with every weight doubled: farther away than any training here gets."""
    shutil.copytree(policy, target)
    doubled = {name: 2 * weight for name, weight in numpy.load_file(target / WEIGHTS).items()}
    numpy.save_file(doubled, target / WEIGHTS, metadata={"format": "pt"})
    return target


def distance(one: Tensors, other: Tensors) -> float:
    return sum(float(np.abs(weight - other[name]).sum()) for name, weight in one.items())


def assert_goes_on(coordinator: Coordinator, version: int, *, instead_of: int) -> None:
    """The next version is trained from this one, and not from the one that it replaced."""
    coordinator.reaches("version", version + 1)
    trained = weights_of(coordinator, version + 1)
    moved = distance(trained, weights_of(coordinator, version))
    assert 0 < moved < distance(trained, weights_of(coordinator, instead_of)) / 4


def assert_numbers_go_forward(coordinator: Coordinator) -> None:
    with coordinator.copy_of_store() as connection:
        rows = connection.execute(sa.text("SELECT version, policy_update FROM versions ORDER BY version")).all()
        negative = connection.execute(sa.text("SELECT COUNT(*) FROM rollouts WHERE batch - 1 < policy_update")).scalar()
    assert [row.version for row in rows] == list(range(1, len(rows) + 1))
    updates = [row.policy_update for row in rows]
    assert updates == sorted(updates)
    assert negative == 0
    assert_ledger_is_sound(coordinator)


def test_a_learner_at_work_goes_on_from_a_folder_and_from_the_version_that_came_back(
    coordinator: Coordinator, policy: Path, tmp_path: Path
) -> None:
    coordinator.reaches("version", 2)
    log = learner_log(coordinator)
    published = replaced(coordinator, "publish", str(twice_as_large(policy, tmp_path / "other")))
    taken(coordinator, published, log)
    assert "is complete" in say(coordinator, "verify", str(published))
    assert not list((coordinator.folder / "uploads").glob("ordered*"))
    assert_goes_on(coordinator, published, instead_of=published - 1)

    log = learner_log(coordinator)
    version = replaced(coordinator, "rollback", "2")
    assert version > published
    assert distance(weights_of(coordinator, version), weights_of(coordinator, 2)) == 0
    update = taken(coordinator, version, log)
    assert_goes_on(coordinator, version, instead_of=version - 1)
    coordinator.reaches("update", update + 2 * KAPPA)
    assert_numbers_go_forward(coordinator)


def test_a_learner_that_is_killed_before_its_next_version_takes_it_again(coordinator: Coordinator) -> None:
    newest = int(coordinator.status()["version"])
    log = learner_log(coordinator)
    version = replaced(coordinator, "rollback", str(newest - 1))
    update = taken(coordinator, version, log)
    log = learner_log(coordinator)
    child(coordinator, "learner").kill()
    if resumed_at(coordinator, log) < update:  # its checkpoint is older than what it took
        taken(coordinator, version, log)
    coordinator.reaches("version", version + 2)
    assert_numbers_go_forward(coordinator)


@pytest.mark.slow
def test_a_coordinator_killed_in_the_middle_has_done_it_or_not(coordinator: Coordinator) -> None:
    version, log = int(coordinator.status()["version"]), learner_log(coordinator)
    words = [script("swarm-coordinator"), "policy", "rollback", str(coordinator.config_file), str(version - 1)]
    with subprocess.Popen([*words, "--reason", "killed"], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as order:
        until("the order to be in work", lambda: order.poll() is not None or _is_intended(coordinator))
        coordinator.program.kill()
    coordinator.start(learner=True)
    with coordinator.copy_of_store() as connection:
        orders = connection.execute(sa.text("SELECT subject FROM orders WHERE reason LIKE '%killed'")).scalars().all()
    for subject in orders:
        taken(coordinator, int(subject.removeprefix("version ")), log)
    coordinator.reaches("version", version + 2)
    assert_numbers_go_forward(coordinator)


def _is_intended(coordinator: Coordinator) -> bool:
    with coordinator.copy_of_store() as connection:
        value = connection.execute(sa.text("SELECT value FROM facts WHERE name = 'ordered_version'")).scalar()
    return value not in (None, "null")


@pytest.mark.slow
def test_a_stopped_round_is_sent_back_and_its_learner_hears_of_it_when_it_is_launched(coordinator: Coordinator) -> None:
    coordinator.reaches("version", 2)
    coordinator.program.interrupt()
    with pytest.raises(httpx.TransportError):
        coordinator.status()
    log = learner_log(coordinator)
    with coordinator.copy_of_store() as connection:
        newest = connection.execute(sa.text("SELECT MAX(version) FROM versions")).scalar_one()
    wanted = weights_of(coordinator, newest - 1)
    assert replaced(coordinator, "rollback", str(newest - 1)) == newest + 1
    coordinator.start(learner=True)
    assert distance(weights_of(coordinator, newest + 1), wanted) == 0
    taken(coordinator, newest + 1, log)
    coordinator.reaches("version", newest + 2)
    assert_numbers_go_forward(coordinator)
