"""Versions as patches, between real programs: who follows fetches little, who joins late gets the same bytes."""

import shutil
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from tests.processes.programs import Program, Swarm, until
from tests.processes.rounds import Coordinator, Operator, Settings, join, operator_of
from tests.safetensors_files import next_file

pytestmark = pytest.mark.processes

SETTINGS: Settings = {"publish": {"chunk_size_bytes": 4096}, "leases": {"heartbeat_s": 0.2}}
MODEL = "model.safetensors"


class Scene:
    """A round whose operator publishes by hand, and a node that follows."""

    def __init__(self, swarm: Swarm, policy: Path) -> None:
        self.policy = shutil.copytree(policy, swarm.folder / "policy")
        self.swarm = swarm
        self.coordinator = Coordinator(swarm, SETTINGS).start()
        self.operator: Operator = operator_of(swarm, self.coordinator, self.policy)
        self.operator.publish()
        self.node = self.join("follower")
        self.full = fetched(self.node, 1)

    def join(self, name: str) -> Program:
        return join(self.swarm, name, self.coordinator.join_string)

    def publish(self) -> int:
        """Publish a version with one weight in a hundred changed."""
        weights = self.policy / MODEL
        version = self.operator.client.state().newest_version + 1
        weights.write_bytes(next_file(weights.read_bytes(), seed=version))
        return self.operator.publish(version - 1)

    def folder(self, name: str, version: int) -> Path:
        """Return the folder of a version at a node, once the node has it."""
        pattern = f"rounds/*/policies/{version:012d}-*"
        paths = until(f"{name} to hold version {version}", lambda: list((self.swarm.folder / name).glob(pattern)))
        return paths[0]

    def holds(self, name: str, version: int) -> bool:
        files = {path.name: path.read_bytes() for path in self.folder(name, version).iterdir()}
        return files == {path.name: path.read_bytes() for path in self.policy.iterdir()}


def fetched(node: Program, version: int) -> int:
    """The bytes a node fetched for a version."""
    counts = node.said(rf"version fetched version={version} .*from_peers=(\d+) from_seeder=(\d+) from_http=(\d+)")
    return sum(map(int, counts.groups()))


@pytest.fixture
def scene(tmp_path: Path, policy: Path) -> Iterator[Scene]:
    with closing(Swarm(tmp_path / "swarm")) as swarm:
        yield Scene(swarm, policy)


def test_a_follower_fetches_patches_and_a_newcomer_the_anchor_too(scene: Scene) -> None:
    assert scene.holds("follower", 1)
    for version in (2, 3, 4):
        assert scene.publish() == version
        assert fetched(scene.node, version) < scene.full / 20
        assert scene.holds("follower", version)
    late = fetched(scene.join("late"), 4)
    assert scene.full < late < 1.2 * scene.full
    assert scene.holds("late", 4)


@pytest.mark.slow
def test_a_killed_follower_with_a_damaged_base_takes_the_anchor(scene: Scene) -> None:
    base = scene.folder("follower", 1) / MODEL
    scene.node.kill()
    data = bytearray(base.read_bytes())
    data[-1] ^= 1
    base.write_bytes(data)
    shutil.rmtree(next((scene.swarm.folder / "follower").glob("rounds/*/blobs")))
    scene.publish()
    assert fetched(scene.join("follower"), 2) > (scene.policy / MODEL).stat().st_size
    assert scene.holds("follower", 2)


def test_a_killed_follower_goes_on_from_the_version_it_had(scene: Scene) -> None:
    scene.node.kill()
    for _ in range(3):
        scene.publish()
    assert fetched(scene.join("follower"), 4) < scene.full / 5
    assert scene.holds("follower", 4)
