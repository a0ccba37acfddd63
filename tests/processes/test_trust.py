"""What a node does when the coordinator's word cannot be trusted: it says why, works no more, and goes on afterwards."""

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from tuf.api.metadata import Metadata, Timestamp

from coordinator.signed_metadata import SignedMetadata
from protocol.manifest import target_path
from tests.processes.impostor import Impostor
from tests.processes.programs import Program, Swarm, until
from tests.processes.rounds import Coordinator, Operator, Settings, join, operator_of

pytestmark = pytest.mark.processes

LIFETIME_S = 8.0
SETTINGS: Settings = {
    "sampling": {"samples_per_group": 2, "max_new_tokens": 64},
    "learner": {"groups_per_update": 100_000},
    "leases": {"heartbeat_s": 0.2},
    "publish": {"timestamp_lifetime_s": LIFETIME_S},
}


@dataclass
class Scene:
    """A real node that works for a real coordinator, with somebody in between."""

    swarm: Swarm
    coordinator: Coordinator
    operator: Operator
    impostor: Impostor
    node: Program

    @property
    def metadata(self) -> Path:
        return self.coordinator.folder / "metadata"

    def copy_of_metadata(self, name: str) -> Path:
        """The documents as they are now."""
        copy = self.swarm.folder / name
        shutil.copytree(self.metadata, copy, ignore=shutil.ignore_patterns(".*"))
        return copy

    def works(self) -> None:
        """Wait until rollouts come in that were asked for from now on."""
        before = self.coordinator.accepted_groups() + 64
        until("the node to work", lambda: self.coordinator.accepted_groups() > before)

    def refuses(self, code: str, why: str, attack: Callable[[], None]) -> None:
        """Under the attack the node says why it stops, and takes no lease; without it, it goes on."""
        self.works()
        said = len(self.node.log)
        attack()
        self.node.said(rf"work stopped code={code}: .*{why}", after=said)
        self._sees_metadata(2)  # a lease that was asked for meanwhile is answered and done
        until("the last leases to be answered", lambda: not self.coordinator.leases().get("open"))
        leases, accepted = self.impostor.asked["/v1/leases"], self.coordinator.accepted_groups()
        self._sees_metadata(3)
        assert self.impostor.asked["/v1/leases"] == leases
        assert self.coordinator.accepted_groups() == accepted
        assert self.node.log.count(f"work stopped code={code}", said) == 1
        said = len(self.node.log)
        self.impostor.metadata = None
        self.node.said("work goes on", after=said)
        self.works()

    def _sees_metadata(self, times: int) -> None:
        path = "/v1/metadata/timestamp.json"
        wanted = self.impostor.asked[path] + times
        until("the node to look again", lambda: self.impostor.asked[path] >= wanted)


@pytest.fixture(scope="module")
def scene(swarm: Swarm, policy: Path) -> Scene:
    coordinator = Coordinator(swarm, SETTINGS).start()
    operator = operator_of(swarm, coordinator, policy)
    operator.publish()
    impostor = Impostor(coordinator.address)
    swarm.at_end(impostor.close)
    node = join(swarm, "node", f"{impostor.url}#{coordinator.join_string.partition('#')[2]}")
    return Scene(swarm, coordinator, operator, impostor, node)


def test_version_signed_by_somebody_else_is_refused(scene: Scene) -> None:
    """A whole sound set of documents, newer than all others, by keys that the pinned root does not name."""

    def attack() -> None:
        now, folder = datetime.now(UTC), scene.swarm.folder / "forged"
        forged = SignedMetadata.create(scene.swarm.folder / "other-keys", folder, 3600, now)
        manifest = (scene.metadata / target_path(1)).read_bytes()
        for version in range(1, 10):
            forged.add_manifest(version, manifest, 4, now)
        for _ in range(1000):
            forged.renew_timestamp(now)
        scene.impostor.metadata = folder
        scene.operator.publish()

    scene.refuses("untrusted_metadata", "not sound", attack)


def test_older_set_of_metadata_served_again_is_refused(scene: Scene) -> None:
    old = scene.copy_of_metadata("old")
    scene.operator.publish()
    newest = scene.coordinator.status()["version"]
    scene.node.said(f"version loaded version={newest} ")

    def attack() -> None:
        scene.impostor.metadata = old
        scene.operator.publish()

    scene.refuses("rolled_back", "Older trust metadata", attack)


def test_frozen_metadata_is_refused_once_it_expires(scene: Scene) -> None:
    """Somebody withholds every newer version: the last set he lets through runs out."""

    def attack() -> None:
        scene.impostor.metadata = frozen = scene.copy_of_metadata("frozen")
        timestamp = Metadata[Timestamp].from_file(str(frozen / "timestamp.json")).signed
        assert timestamp.expires <= datetime.now(UTC) + timedelta(seconds=LIFETIME_S)
        until("the frozen timestamp to expire", lambda: timestamp.is_expired(datetime.now(UTC)))
        scene.operator.publish()

    scene.refuses("metadata_expired", "withheld", attack)


def test_one_flipped_bit_in_a_signed_document_is_refused(scene: Scene) -> None:
    def attack() -> None:
        damaged = scene.copy_of_metadata("damaged")
        document = damaged / "timestamp.json"
        text = document.read_text()
        version = Metadata[Timestamp].from_file(str(document)).signed.version
        assert f'"version": {version}' in text
        document.write_text(text.replace(f'"version": {version}', f'"version": {version + 1_000_000}'))
        scene.impostor.metadata = damaged
        scene.operator.publish()

    scene.refuses("untrusted_metadata", "not sound", attack)


def test_manifest_that_is_not_the_signed_one_is_refused(scene: Scene) -> None:
    """The newest version's signatures are sound, but its manifest is another one's."""

    def attack() -> None:
        version = scene.operator.publish() + 1
        scene.impostor.metadata = swapped = scene.copy_of_metadata("swapped")
        shutil.rmtree(swapped)
        scene.operator.publish()
        shutil.copytree(scene.metadata, swapped, ignore=shutil.ignore_patterns(".*"))
        shutil.copyfile(scene.metadata / target_path(version - 1), swapped / target_path(version))
        scene.operator.publish()

    scene.refuses("untrusted_metadata", "not sound", attack)


def test_wrong_fingerprint_in_the_join_string_is_refused(scene: Scene) -> None:
    """The true coordinator does not take requests that were signed for another round."""
    node = join(scene.swarm, "misled", f"{scene.coordinator.url}#{'0' * 64}")
    assert node.process.wait(timeout=60) == 1
    assert "[wrong_audience]" in node.log
    assert "join string" in node.log


def test_root_that_the_join_string_does_not_name_is_refused(scene: Scene) -> None:
    """Somebody with a root of his own sits in the coordinator's place from the first day."""
    folder = scene.swarm.folder / "usurped"
    SignedMetadata.create(scene.swarm.folder / "usurpers-keys", folder, 3600, datetime.now(UTC))
    usurper = Impostor(scene.coordinator.address)
    usurper.metadata = folder
    scene.swarm.at_end(usurper.close)
    node = join(scene.swarm, "victim", f"{usurper.url}#{scene.coordinator.join_string.partition('#')[2]}")
    node.said("work stopped code=untrusted_root: .*fingerprint.*join string")
    until("the node to look again", lambda: usurper.asked["/v1/metadata/1.root.json"] >= 3)
    assert usurper.asked["/v1/leases"] == 0
    assert not list((scene.swarm.folder / "victim").rglob("trust.msgpack"))
    node.interrupt()
    assert node.process.returncode == 0


@pytest.mark.parametrize("text", ["", "not-an-address", "http://127.0.0.1:1", "http://127.0.0.1:1#beef"])
def test_join_string_without_a_fingerprint_is_wrong_usage(swarm: Swarm, text: str) -> None:
    node = join(swarm, "misspelt", text)
    assert node.process.wait(timeout=60) == 2
    assert "[config_invalid]" in node.log
    assert "Traceback" not in node.log
