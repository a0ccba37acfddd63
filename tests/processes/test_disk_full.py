"""A node whose disk is full says so with the next step, stays alive, loses nothing, and goes on when there is room."""

import re
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.processes.programs import Program, Swarm, said, until
from tests.processes.rounds import (
    NOBODY_LEARNS,
    Coordinator,
    Operator,
    Settings,
    assert_ledger_is_sound,
    join,
    operator_of,
    outbox_of,
)

pytestmark = pytest.mark.processes

SETTINGS: Settings = {
    "sampling": {"samples_per_group": 4, "max_new_tokens": 64},
    **NOBODY_LEARNS,
    "leases": {"heartbeat_s": 0.5},
    "publish": {"chunk_size_bytes": 4096},
}

NEXT_STEP = "No disk space left .* Free some space"
TOO_LARGE = "cannot store the new version code=version_too_large: Version {} needs .* are free .* Free some space"


@dataclass(frozen=True)
class Disk:
    """A small file system; root only."""

    root: Path

    def resize(self, size: str) -> None:
        subprocess.run(["mount", "-o", f"remount,size={size}", self.root], check=True)

    def fill(self) -> None:
        """Leave not one page."""
        with (self.root / "ballast").open("wb", buffering=0) as ballast:
            while (more := shutil.disk_usage(self.root).free) > 0:
                with suppress(OSError):  # a program took the last page meanwhile
                    ballast.write(bytes(min(more, 1 << 16)))

    def free(self) -> None:
        (self.root / "ballast").unlink()


@pytest.fixture(scope="module")
def disk(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Disk]:
    """Too small for a version."""
    root = tmp_path_factory.mktemp("disk")
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=32k", "none", root], capture_output=True)
    if mounted.returncode != 0:
        pytest.skip("this user may not mount a small file system")
    yield Disk(root)
    subprocess.run(["umount", "--lazy", root], check=True)


@dataclass(frozen=True)
class Scene:
    """A real node that lives on the small disk."""

    swarm: Swarm
    coordinator: Coordinator
    operator: Operator
    node: Program
    disk: Disk


@pytest.fixture(scope="module")
def scene(disk: Disk, swarm: Swarm, policy: Path) -> Scene:
    coordinator = Coordinator(swarm, SETTINGS).start()
    operator = operator_of(swarm, coordinator, policy)
    operator.publish()
    return Scene(swarm, coordinator, operator, join(swarm, "node", coordinator.join_string, home=disk.root), disk)


def works(scene: Scene) -> None:
    before = scene.coordinator.accepted_groups()
    until("the node to work", lambda: scene.coordinator.accepted_groups() > before)


def test_node_that_starts_on_a_full_disk_says_so_and_leaves_no_half_key(swarm: Swarm, disk: Disk) -> None:
    home = disk.root / "newcomer"
    disk.fill()
    node = join(swarm, "newcomer", f"http://127.0.0.1:1#{'0' * 64}", home=home)
    assert node.process.wait(timeout=60) == 1
    assert re.search(rf"{NEXT_STEP}.*\[disk_full\]", node.log)
    assert "Traceback" not in node.log
    assert not list(home.glob("*"))
    disk.free()


def test_version_that_does_not_fit_is_not_begun_and_status_says_so_until_there_is_room(scene: Scene) -> None:
    scene.node.said(TOO_LARGE.format(1))
    assert scene.node.running
    assert not [path for path in scene.disk.root.rglob("blobs/**/*") if path.is_file()]
    status = said(scene.swarm, "swarm-node", "status", "--home", str(scene.disk.root))
    assert re.search("with a problem for .*Version 1 needs .* are free", status)
    scene.disk.resize("4m")
    scene.node.said("version fetched version=1")
    works(scene)


def test_full_disk_in_the_outbox_is_named_and_nothing_acknowledged_is_lost(scene: Scene) -> None:
    scene.disk.resize("4m")
    works(scene)
    before = len(scene.node.log)
    scene.disk.fill()
    scene.node.said(f"work stopped code=disk_full: .*{NEXT_STEP}", after=before)
    until("what is finished to be delivered, and the rest given back", lambda: not scene.coordinator.open_leases())
    assert scene.node.running
    assert scene.coordinator.leases()["skipped"] > 0
    kept = scene.coordinator.accepted_groups()
    scene.disk.free()
    until("what was delivered to be noted, which takes a line's room", lambda: not outbox_of(scene.disk.root))
    works(scene)
    assert scene.coordinator.accepted_groups() > kept
    assert scene.coordinator.status()["rejected"] == {}
    assert_ledger_is_sound(scene.coordinator)


@pytest.mark.slow
def test_a_later_version_that_does_not_fit_is_named_and_work_goes_on_until_there_is_room(
    scene: Scene, large_policy: Path
) -> None:
    scene.disk.resize("4m")
    works(scene)
    before = len(scene.node.log)
    scene.operator.policy = large_policy
    version = scene.operator.publish()
    scene.node.said(TOO_LARGE.format(version), after=before)
    works(scene)
    scene.disk.resize("40m")
    scene.node.said(f"version loaded version={version} ", after=before)
    works(scene)
    assert_ledger_is_sound(scene.coordinator)
