"""The trust repository on disk: whenever the coordinator dies, nodes find a complete and signed set.

- A crash between two writes is made with what really stops a publication there: the next role's key is not to be had.
- The reader is the nodes' own `protocol.policy.trust.refresh`.
"""

import shutil
import stat
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from coordinator.config.round import RoundSection
from coordinator.publishing.signed_metadata import LEDGER, ROLES, SignedMetadata
from protocol.errors import ConfigInvalid, MetadataExpired
from protocol.policy import root_document, trust
from protocol.policy.description import RoundDescription, open_description
from protocol.policy.manifest import target_path
from protocol.policy.root_document import Documents
from tests.protocol.tuf_repository import converse, manifest_bytes

NOW = datetime(2030, 1, 1, tzinfo=UTC)
LIFETIME_S = 600.0
KEEP = 3


class Repository:
    """A metadata folder and a node that watches it."""

    def __init__(self, folder: Path) -> None:
        self.keys, self.folder = folder / "keys", folder / "metadata"
        self.metadata = SignedMetadata.create(self.keys, self.folder, LIFETIME_S, NOW)
        self.node = root_document.pin((self.folder / "1.root.json").read_bytes(), self.metadata.round_id)

    def add(self, version: int, task: str = "arithmetic", now: datetime = NOW) -> None:
        data = manifest_bytes(self.metadata.round_id, version, task)
        self.metadata.add_manifest(version, data, KEEP, now)

    def look(self, now: datetime = NOW, node: Documents | None = None) -> int:
        """Return the version that a node finds: the node that watched from the start, or another."""
        refreshed, _ = converse(trust.refresh(node or self.node, now), self.metadata.read)
        if node is None:
            self.node = refreshed.documents
        return refreshed.documents.policy_version

    def newcomer(self) -> Documents:
        return root_document.pin((self.folder / "1.root.json").read_bytes(), self.metadata.round_id)

    def restart(self) -> None:
        self.metadata = SignedMetadata(self.keys, self.folder, LIFETIME_S)


@pytest.fixture
def repository(tmp_path: Path) -> Repository:
    return Repository(tmp_path)


def test_nodes_follow_every_version(repository: Repository) -> None:
    assert repository.look() == 0
    for version in range(1, 6):
        repository.add(version)
        assert repository.look() == version
        assert repository.look(node=repository.newcomer()) == version


def test_a_restart_goes_on_where_it_stood(repository: Repository) -> None:
    repository.add(1)
    repository.look()
    repository.restart()
    repository.add(2)
    assert repository.look() == 2


@pytest.mark.parametrize("missing", ["targets", "snapshot", "timestamp"])
def test_a_crash_between_two_writes_leaves_nodes_the_older_complete_set(
    repository: Repository, tmp_path: Path, missing: str
) -> None:
    repository.add(1)
    repository.look()
    key, aside = repository.keys / f"{missing}.pem", tmp_path / "aside.pem"
    shutil.move(key, aside)
    with pytest.raises(ConfigInvalid, match=missing):
        repository.add(2)
    for node in (None, repository.newcomer()):
        assert repository.look(node=node) == 1
    shutil.move(aside, key)
    repository.restart()
    repository.metadata.renew_timestamp(NOW)
    assert repository.look() == 1
    repository.add(2)
    for node in (None, repository.newcomer()):
        assert repository.look(node=node) == 2


@pytest.mark.parametrize("missing", ["targets", "snapshot", "timestamp"])
def test_other_content_after_a_crash_takes_the_place_of_what_nobody_saw(
    repository: Repository, tmp_path: Path, missing: str
) -> None:
    repository.add(1)
    repository.look()
    key, aside = repository.keys / f"{missing}.pem", tmp_path / "aside.pem"
    shutil.move(key, aside)
    with pytest.raises(ConfigInvalid):
        repository.add(2, task="never seen")
    shutil.move(aside, key)
    repository.add(2)
    assert repository.look() == 2
    assert b"never seen" not in (repository.node.manifest or b"")


def test_publishing_the_same_again_changes_nothing_for_nodes(repository: Repository) -> None:
    """The coordinator crashes between the metadata and the store, and publishes the version again."""
    repository.add(1)
    repository.add(2)
    repository.look()
    manifest = repository.node.manifest
    repository.add(2)
    assert repository.look() == 2
    assert repository.node.manifest == manifest


def test_only_the_newest_targets_stay_listed(repository: Repository) -> None:
    for version in range(1, KEEP + 3):
        repository.add(version)
    repository.look()
    listed = [target_path(version) in str(repository.node.targets) for version in range(1, KEEP + 3)]
    assert listed == [False, False, True, True, True]


def test_a_timestamp_is_good_until_it_expires_and_no_longer(repository: Repository) -> None:
    repository.add(1)
    last = NOW + timedelta(seconds=LIFETIME_S - 1)
    assert repository.look(last) == 1
    with pytest.raises(MetadataExpired):
        repository.look(last + timedelta(seconds=2))


def test_a_renewed_timestamp_lets_nodes_go_on(repository: Repository) -> None:
    repository.add(1)
    repository.look()
    later = NOW + timedelta(days=3)
    repository.metadata.renew_timestamp(later)
    assert repository.look(later) == 1
    repository.restart()
    repository.metadata.renew_timestamp(later + timedelta(days=1))
    assert repository.look(later + timedelta(days=1)) == 1


def test_renewing_needs_only_the_timestamp_key(repository: Repository) -> None:
    repository.add(1)
    for role in ("root", "targets", "snapshot"):
        (repository.keys / f"{role}.pem").unlink()
    repository.metadata.renew_timestamp(NOW)
    assert repository.look() == 1


def test_publishing_needs_no_root_key(repository: Repository) -> None:
    (repository.keys / "root.pem").unlink()
    repository.add(1)
    assert repository.look() == 1


def test_a_missing_key_is_named_with_its_place(repository: Repository) -> None:
    (repository.keys / "timestamp.pem").unlink()
    with pytest.raises(ConfigInvalid, match=r"timestamp key.*timestamp\.pem"):
        repository.metadata.renew_timestamp(NOW)


def test_private_keys_are_their_owners_alone(repository: Repository) -> None:
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in repository.keys.iterdir()}
    assert modes == {f"{role}.pem": 0o600 for role in (*ROLES, LEDGER)}


def test_no_private_key_is_among_the_public_documents(repository: Repository) -> None:
    repository.add(1)
    for path in repository.folder.iterdir():
        assert b"PRIVATE" not in path.read_bytes()


def test_every_round_has_keys_of_its_own(tmp_path: Path) -> None:
    first, second = Repository(tmp_path / "a"), Repository(tmp_path / "b")
    assert first.metadata.round_id != second.metadata.round_id
    assert (first.keys / "root.pem").read_bytes() != (first.keys / "targets.pem").read_bytes()


@pytest.mark.parametrize(
    "name",
    [
        "", ".", "..", "../keys/timestamp.pem", "/etc/passwd", "sub/1.root.json", ".1.root.json.abc",
        "1.root.json\0", "a" * 300, "9.root.json", "1.root.json/", "./1.root.json",
    ],
)  # fmt: skip
def test_a_name_that_leaves_the_folder_is_nothing(repository: Repository, name: str) -> None:
    (repository.folder / "sub").mkdir()
    (repository.folder / "sub" / "1.root.json").write_bytes(b"{}")
    (repository.folder / ".1.root.json.abc").write_bytes(b"half written")
    assert repository.metadata.read(name) is None
    assert repository.metadata.read("1.root.json") is not None


class TestDescription:
    """The operator's text about the round, as a target."""

    def described(self, repository: Repository, title: str) -> RoundDescription:
        return RoundSection(title=title).describe(repository.metadata.round_id)

    def read(self, repository: Repository) -> RoundDescription | None:
        repository.look()
        wanted = trust.wanted_description(repository.node)
        if wanted is None:
            return None
        data = repository.metadata.read(wanted.name)
        assert data is not None
        assert len(data) <= wanted.max_bytes
        return open_description(data, wanted.name, repository.node.round_id)

    def test_nodes_read_the_newest_description_beside_the_versions(self, repository: Repository) -> None:
        for title in ("First", "Second"):
            said = self.described(repository, title)
            repository.metadata.set_description(said, NOW)
            repository.add(1)
            assert self.read(repository) == said
            assert repository.look() == 1
        assert len([name for name in repository.metadata.targets() if name.startswith("description-")]) == 1

    def test_an_empty_description_removes_it(self, repository: Repository) -> None:
        repository.metadata.set_description(self.described(repository, "First"), NOW)
        repository.metadata.set_description(self.described(repository, ""), NOW)
        assert self.read(repository) is None

    @pytest.mark.parametrize("title", ["", "First"])
    def test_the_same_description_signs_nothing(self, repository: Repository, title: str) -> None:
        repository.metadata.set_description(self.described(repository, title), NOW)
        before = (repository.folder / "timestamp.json").read_bytes()
        repository.restart()
        repository.metadata.set_description(self.described(repository, title), NOW)
        assert (repository.folder / "timestamp.json").read_bytes() == before
