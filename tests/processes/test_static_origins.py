"""Real nodes fetch whole versions from real static servers and a real object store, and from nowhere else.

- The seeder's address leads nowhere, and a proxy in front of the coordinator lets no chunk pass.
- Bad origins stand beside the good one.
"""

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.coordinator.object_store import BUCKET, object_store
from tests.processes.impostor import Impostor
from tests.processes.nginx import NGINX, start_nginx
from tests.processes.programs import Program, Swarm, free_address, until
from tests.processes.rounds import Coordinator, join, operator_of, other_weights
from tests.swarm_node.web import Web, lies, redirects_to

pytestmark = pytest.mark.processes


def python_server(swarm: Swarm, root: Path, address: str) -> Program:
    host, _, port = address.rpartition(":")
    command = [sys.executable, "-P", "-u", "-m", "http.server", port, "--bind", host, "--directory", str(root)]
    program = swarm.start("http.server", *command)
    program.said("Serving HTTP")
    return program


def nginx(swarm: Swarm, root: Path, address: str) -> Program:
    folder = swarm.folder / "nginx"
    folder.mkdir()
    return start_nginx(swarm, folder, f"server {{ listen {address}; root {root}; }}")


@pytest.fixture(scope="module")
def bad() -> Iterator[list[Web]]:
    """An origin that lies, and one that would lead nodes elsewhere."""
    made = [Web(lies), Web(redirects_to("http://127.0.0.1:1/"))]
    yield made
    for server in made:
        server.close()


class Scene:
    """A coordinator with one version, and a node that is to have it from origins."""

    def __init__(self, swarm: Swarm, policy: Path, folder: Path, origins: list[str], **publish: object) -> None:
        swarm.folder = folder
        self._swarm, self._policy = swarm, policy
        self.coordinator = Coordinator(
            swarm,
            {
                "round": {"seeder_public": "127.0.0.1:1"},
                "publish": {"origins": origins, "chunk_size_bytes": 1024, **publish},
                "leases": {"heartbeat_s": 0.2},
            },
        ).start()
        self.public = self.coordinator.folder / "public"
        self._operator = operator_of(swarm, self.coordinator, policy)
        self._operator.publish(0)
        self.wall = Impostor(self.coordinator.address)
        swarm.at_end(self.wall.close)

    def join(self, *, blocked: str = "/v1/chunks") -> Program:
        """A node, and a wall between it and the coordinator's chunks."""
        self.wall.blocked = blocked
        anchor = self.coordinator.join_string.partition("#")[2]
        return join(self._swarm, "node", f"{self.wall.url}#{anchor}")

    def publish_other_weights(self) -> int:
        """Publish a version of which no chunk is known; return its number."""
        version = self._operator.client.state().newest_version + 1
        self._operator.policy = other_weights(self._policy, self._swarm.folder / f"changed-{version}", version)
        return self._operator.publish(version - 1)

    def end(self, node: Program) -> None:
        """End both programs in time."""
        node.interrupt()
        self.coordinator.program.interrupt()


def fetches(node: Program, version: int) -> None:
    """The node says that every byte of the version came from origins."""
    match = node.said(rf"version fetched version={version} .*from_peers=0 from_seeder=0 from_http=(\d+) on_disk=(\d+)")
    assert int(match[1]) > 0
    node.said(f"version loaded version={version} ")


@dataclass(frozen=True)
class Served:
    """A scene whose good origin is a static server, beside bad ones; its tests run in the order of this file."""

    scene: Scene
    node: Program
    server: Program
    address: str


@pytest.fixture(scope="module", params=[pytest.param(python_server, marks=pytest.mark.slow), nginx])
def served(
    request: pytest.FixtureRequest, policy: Path, bad: list[Web], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Served]:
    swarm, address = Swarm(tmp_path_factory.mktemp("static")), free_address()
    scene = Scene(swarm, policy, swarm.folder, [*(web.url for web in bad), f"http://{address}"])
    start = request.param if NGINX else python_server
    server = start(swarm, scene.public, address)
    yield Served(scene, scene.join(), server, address)
    swarm.close()


def test_a_version_comes_from_a_static_server_alone(served: Served, bad: list[Web]) -> None:
    fetches(served.node, 1)
    fetches(served.node, served.scene.publish_other_weights())
    assert all(sum(web.asked.values()) for web in bad)
    assert not [line for line in served.node.log.splitlines() if "work stopped" in line]


def test_a_version_comes_from_a_static_server_while_the_coordinator_says_nothing(served: Served) -> None:
    wall = served.scene.wall
    blocked, wall.blocked = wall.blocked, "/"
    fetches(served.node, served.scene.publish_other_weights())
    wall.blocked = blocked
    assert not [line for line in served.node.log.splitlines() if "work stopped" in line]


def test_an_origin_that_dies_is_replaced_by_the_coordinator(served: Served) -> None:
    served.scene.wall.blocked = ""
    served.server.kill()
    version = served.scene.publish_other_weights()
    served.node.said(f"version loaded version={version} ")
    skipped = f"origin skipped url=http://{served.address}"
    until("the node to have passed the dead origin over", lambda: skipped in served.node.log)
    served.scene.end(served.node)


def test_a_version_comes_from_an_object_store_alone(
    swarm: Swarm, policy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with object_store(checks_readers=False) as store:
        for name, value in store.environment.items():
            monkeypatch.setenv(name, value)
        store.open_to_readers()
        origin = f"{store.endpoint}/{BUCKET}/rounds/1"
        scene = Scene(swarm, policy, tmp_path, [origin], upload=f"s3://{BUCKET}/rounds/1")
        assert any(name.startswith("rounds/1/chunks/") for name in store.objects())
        node = scene.join()
        fetches(node, 1)
        files = [path for path in scene.coordinator.folder.rglob("*") if path.is_file()]
        assert not [path for path in files if store.secret in _text(path)]
        for child in scene.coordinator.program.descendants():
            assert not [name for name in child.environ() if name.startswith("AWS_")]
        scene.end(node)


def _text(path: Path) -> str:
    return path.read_bytes().decode(errors="replace")
