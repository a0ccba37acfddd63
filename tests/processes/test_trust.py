"""An untrusted coordinator: a node says why and stops; it continues when valid metadata is served again."""

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from tuf.api.metadata import Metadata, Timestamp

from coordinator.publishing.signed_metadata import SignedMetadata
from protocol.policy.manifest import target_path
from tests.processes.impostor import Impostor
from tests.processes.programs import Program, Swarm, until
from tests.processes.rounds import Coordinator, Operator, Settings, join, operator_of

pytestmark = pytest.mark.processes

GROUPS_PER_VERSION = 16
"""No learner runs: each new version is leave for so many more groups, and until the next one the node has no work."""

LIFETIME_S = 8.0
STALENESS = 4
SETTINGS: Settings = {
    "staleness": {"max_updates": STALENESS},
    "sampling": {"samples_per_group": 2, "max_new_tokens": 16},
    "learner": {"groups_per_update": GROUPS_PER_VERSION},
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

    def publish(self) -> int:
        """Publish a version, and with it some work."""
        return self.operator.publish(int(self.coordinator.status()["version"]))

    def work_done(self) -> bool:
        """Return True if the node has answered all available work."""
        allowed = (STALENESS + int(self.coordinator.status()["version"])) * GROUPS_PER_VERSION
        return self.coordinator.accepted_groups() == allowed

    def refuses(self, code: str, why: str, attack: Callable[[], None]) -> None:
        """Attack and publish: the node says why it stops and requests no lease; it continues without the attack."""
        until("the node to have done all work", self.work_done)
        said = len(self.node.log)
        attack()
        self.node.said(rf"work stopped code={code}: .*{why}", after=said)
        self.sees_metadata(2)  # a lease that was asked for meanwhile is given
        until("what was leased meanwhile to be answered", lambda: not self.coordinator.open_leases())
        asked, accepted = self.impostor.asked["/v1/leases"], self.coordinator.accepted_groups()
        self.sees_metadata(3)
        assert self.impostor.asked["/v1/leases"] == asked
        assert self.coordinator.accepted_groups() == accepted
        assert not self.work_done()
        assert self.node.log.count(f"work stopped code={code}", said) == 1
        said = len(self.node.log)
        self.impostor.metadata = None
        self.node.said("work continues", after=said)
        until("the node to do the work that waited", self.work_done)

    def sees_metadata(self, times: int) -> None:
        path = "/v1/metadata/timestamp.json"
        wanted = self.impostor.asked[path] + times
        until("the node to look again", lambda: self.impostor.asked[path] >= wanted)


@pytest.fixture(scope="module")
def scene(swarm: Swarm, policy: Path) -> Scene:
    coordinator = Coordinator(swarm, SETTINGS).start()
    operator = operator_of(swarm, coordinator, policy)
    operator.publish(0)
    impostor = Impostor(coordinator.address)
    swarm.at_end(impostor.close)
    node = join(swarm, "node", f"{impostor.url}#{coordinator.join_string.partition('#')[2]}")
    return Scene(swarm, coordinator, operator, impostor, node)


def test_proof_that_is_short_is_renewed_before_it_ends(scene: Scene) -> None:
    first = Metadata[Timestamp].from_file(str(scene.metadata / "timestamp.json")).signed
    until("the work to be done", scene.work_done)
    until("the node's first proof to expire", lambda: first.is_expired(datetime.now(UTC)))
    scene.sees_metadata(1)
    assert "work stopped" not in scene.node.log


def test_version_signed_by_somebody_else_is_refused(scene: Scene) -> None:
    """A whole sound set of documents, newer than all others, by keys that the pinned root does not name."""

    def attack() -> None:
        now, folder = datetime.now(UTC), scene.swarm.folder / "forged"
        forged = SignedMetadata.create(scene.swarm.folder / "other-keys", folder, 3600, now)
        manifest = (scene.metadata / target_path(1)).read_bytes()
        for version in range(1, 10):
            forged.add_manifest(version, manifest, 4, now)
        for _ in range(100):
            forged.renew_timestamp(now)
        scene.impostor.metadata = folder
        scene.publish()

    scene.refuses("untrusted_metadata", "not valid", attack)


def test_older_set_of_metadata_served_again_is_refused(scene: Scene) -> None:
    old = scene.copy_of_metadata("old")
    scene.publish()
    newest = scene.coordinator.status()["version"]
    scene.node.said(f"version loaded version={newest} ")

    def attack() -> None:
        scene.impostor.metadata = old
        scene.publish()

    scene.refuses("rolled_back", "Older trust metadata", attack)


def test_frozen_metadata_is_refused_once_it_expires(scene: Scene) -> None:
    """An attacker withholds every newer version: the last metadata that it passes on expires."""

    def attack() -> None:
        scene.impostor.metadata = frozen = scene.copy_of_metadata("frozen")
        timestamp = Metadata[Timestamp].from_file(str(frozen / "timestamp.json")).signed
        assert timestamp.expires <= datetime.now(UTC) + timedelta(seconds=LIFETIME_S)
        until("the frozen timestamp to expire", lambda: timestamp.is_expired(datetime.now(UTC)))
        scene.publish()

    scene.refuses("metadata_expired", "withheld", attack)


def test_silence_about_versions_stops_work_when_the_last_proof_runs_out(scene: Scene) -> None:
    """An attacker drops every request about versions, and passes everything else on."""

    def attack() -> None:
        scene.impostor.metadata = scene.swarm.folder / "nothing"
        scene.impostor.metadata.mkdir()
        scene.publish()

    scene.refuses("metadata_expired", "withheld", attack)


def test_one_wrong_digit_in_a_signature_is_refused(scene: Scene) -> None:
    def attack() -> None:
        damaged = scene.copy_of_metadata("damaged")
        document = damaged / "timestamp.json"
        data = bytearray(document.read_bytes())
        digit = data.index(b'"sig":"') + len('"sig":"')
        data[digit] = ord("1") if data[digit] == ord("0") else ord("0")
        document.write_bytes(data)
        scene.impostor.metadata = damaged
        scene.publish()

    scene.refuses("untrusted_metadata", "not valid", attack)


def test_manifest_that_is_not_the_signed_one_is_refused(scene: Scene) -> None:
    """The newest version's signatures are sound, but its manifest is another one's."""

    def attack() -> None:
        scene.impostor.metadata = scene.copy_of_metadata("before")
        version = scene.publish()
        swapped = scene.copy_of_metadata("swapped")
        shutil.copyfile(swapped / target_path(version - 1), swapped / target_path(version))
        scene.impostor.metadata = swapped
        scene.publish()

    scene.refuses("untrusted_metadata", "not valid", attack)


def test_wrong_fingerprint_in_the_join_string_is_refused(scene: Scene) -> None:
    """The node ends before it signs a request for a round that the coordinator does not serve."""
    node = join(scene.swarm, "misled", f"{scene.coordinator.url}#{'0' * 64}")
    assert node.process.wait(timeout=60) == 1
    assert "[untrusted_root]" in node.log
    assert "join string" in node.log
    assert "wrong_audience" not in node.log


def test_root_that_the_join_string_does_not_name_is_refused(scene: Scene) -> None:
    """An attacker with its own root answers as the coordinator from the first day."""
    folder = scene.swarm.folder / "usurped"
    SignedMetadata.create(scene.swarm.folder / "usurpers-keys", folder, 3600, datetime.now(UTC))
    usurper = Impostor(scene.coordinator.address)
    usurper.metadata = folder
    scene.swarm.at_end(usurper.close)
    node = join(scene.swarm, "victim", f"{usurper.url}#{scene.coordinator.join_string.partition('#')[2]}")
    assert node.process.wait(timeout=60) == 1
    assert "[untrusted_root]" in node.log
    assert usurper.asked["/v1/leases"] == 0
    assert not list((scene.swarm.folder / "victim").rglob("trust.msgpack"))


def test_join_string_without_a_fingerprint_is_wrong_usage(scene: Scene) -> None:
    node = join(scene.swarm, "misspelt", scene.coordinator.url)
    assert node.process.wait(timeout=60) == 2
    assert "[config_invalid]" in node.log
    assert "phrase" in node.log
    assert "Traceback" not in node.log
