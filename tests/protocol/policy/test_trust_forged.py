"""The trust conversation against documents that the right keys never signed, or not for each other."""

import json

import pytest
from securesystemslib.signer import CryptoSigner
from tuf.api.metadata import MetaFile, TargetFile

from protocol import limits
from protocol.errors import (
    ManifestInvalid,
    RolledBack,
    SwarmError,
    UntrustedMetadata,
)
from protocol.policy import trust
from protocol.policy.manifest import target_path
from tests.protocol.tuf_repository import DAY, NOW, ROLES, Repository, Seen, manifest_bytes, refused, signer


class TestSignatures:
    """Documents that the right keys did not sign."""

    @pytest.fixture
    def names(self) -> dict[str, str]:
        return {"targets": "4.targets.json", "snapshot": "4.snapshot.json", "timestamp": "timestamp.json"}

    @pytest.mark.parametrize("role", ["targets", "snapshot", "timestamp"])
    @pytest.mark.parametrize("by", ["nobody", "a stranger", "root", "another role"])
    def test_a_document_signed_by_anybody_else_is_refused(
        self, seen: Seen, names: dict[str, str], role: str, by: str
    ) -> None:
        repository, stored = seen
        repository.publish(3)
        other_role = ROLES[ROLES.index(role) - 1]
        keys: dict[str, list[CryptoSigner]] = {
            "nobody": [],
            "a stranger": [signer()],
            "root": [repository.keys["root"]],
            "another role": [repository.keys[other_role]],
        }
        honest = repository.documents[names[role]]
        repository.put(names[role], getattr(repository, role), *keys[by])
        refused(repository, stored, UntrustedMetadata)
        repository.documents[names[role]] = honest
        assert repository.refresh(stored).documents.policy_version == 3

    @pytest.mark.parametrize("role", ["targets", "snapshot", "timestamp"])
    def test_a_document_changed_after_signing_is_refused(self, seen: Seen, names: dict[str, str], role: str) -> None:
        repository, stored = seen
        repository.publish(3)
        document = json.loads(repository.documents[names[role]])
        document["signed"]["expires"] = "2040-01-01T00:00:00Z"
        repository.documents[names[role]] = json.dumps(document).encode()
        refused(repository, stored, UntrustedMetadata)

    @pytest.mark.parametrize("role", ["targets", "snapshot", "timestamp"])
    def test_another_roles_document_is_refused(self, seen: Seen, names: dict[str, str], role: str) -> None:
        repository, stored = seen
        repository.publish(3)
        repository.documents[names[role]] = repository.documents["1.root.json"]
        refused(repository, stored, UntrustedMetadata)

    def test_the_same_signature_twice_does_not_make_two(self) -> None:
        repository = Repository()
        second = signer()
        repository.root.add_key(second.public_key, "timestamp")
        repository.root.roles["timestamp"].threshold = 2
        repository.put("1.root.json", repository.root, repository.keys["root"])
        first = repository.keys["timestamp"]
        repository.put("timestamp.json", repository.timestamp, first, first)
        refused(repository, repository.newcomer(), UntrustedMetadata)
        repository.put("timestamp.json", repository.timestamp, first, second)
        repository.refresh(repository.newcomer())


class TestEquivocation:
    """Two documents under one number."""

    def test_a_second_timestamp_of_the_same_number_is_not_taken(self, seen: Seen) -> None:
        repository, stored = seen
        repository.publish(3)
        repository.timestamp.version -= 1
        repository.put("timestamp.json", repository.timestamp, repository.keys["timestamp"])
        assert repository.refresh(stored).documents == stored


class TestMixAndMatch:
    """Documents that are honest one by one, and do not belong together."""

    def test_the_snapshot_of_another_timestamp_is_refused(self, seen: Seen) -> None:
        repository, stored = seen
        repository.publish(3)
        repository.documents["4.snapshot.json"] = repository.documents["3.snapshot.json"]
        for node in (stored, repository.newcomer()):
            refused(repository, node, RolledBack)

    def test_the_targets_of_another_snapshot_are_refused(self, seen: Seen) -> None:
        repository, stored = seen
        repository.publish(3)
        repository.documents["4.targets.json"] = repository.documents["3.targets.json"]
        for node in (stored, repository.newcomer()):
            refused(repository, node, RolledBack)

    def test_a_snapshot_with_another_hash_than_the_timestamp_names_is_refused(self, seen: Seen) -> None:
        repository, stored = seen
        repository.publish(3)
        honest = repository.documents["4.snapshot.json"]
        repository.timestamp.snapshot_meta = MetaFile.from_data(4, honest, ["sha256"])
        repository.renew()
        repository.snapshot.expires = NOW + DAY
        repository.put("4.snapshot.json", repository.snapshot, repository.keys["snapshot"])
        refused(repository, stored, UntrustedMetadata)
        repository.documents["4.snapshot.json"] = honest
        repository.refresh(stored)

    def test_another_manifest_than_the_targets_name_is_refused(self, seen: Seen) -> None:
        repository, stored = seen
        repository.publish(3)
        repository.documents[target_path(3)] = manifest_bytes(repository.round_id, 3, task="arithmetiC")
        refused(repository, stored, UntrustedMetadata)

    @pytest.mark.parametrize("change", [b"", b"x"])
    def test_a_manifest_of_another_length_is_refused(self, seen: Seen, change: bytes) -> None:
        repository, stored = seen
        repository.publish(3)
        honest = repository.documents[target_path(3)]
        repository.documents[target_path(3)] = honest + change if change else honest[:-1]
        refused(repository, stored, UntrustedMetadata)

    def test_a_signed_manifest_of_another_round_is_refused(self, seen: Seen) -> None:
        """The operator's keys, used for two rounds by mistake."""
        repository, stored = seen
        repository.publish(3, manifest_bytes("b" * 64, 3))
        refused(repository, stored, ManifestInvalid)

    def test_a_signed_manifest_of_an_older_version_under_a_new_name_is_refused(self, seen: Seen) -> None:
        repository, stored = seen
        repository.publish(3, repository.documents[target_path(1)])
        refused(repository, stored, ManifestInvalid)

    def test_a_signed_manifest_that_is_none_is_refused(self, seen: Seen) -> None:
        repository, stored = seen
        repository.publish(3, b"\xc1")
        with pytest.raises(SwarmError):
            repository.refresh(stored)

    def test_targets_that_are_no_policies_are_passed_over(self, seen: Seen) -> None:
        repository, stored = seen
        for path in ("readme.txt", "policy-4.manifest", "policy-" + "9" * 5000 + ".manifest"):
            repository.targets.targets[path] = TargetFile.from_data(path, b"", ["sha256"])
        repository.publish(3)
        assert repository.refresh(stored).documents.policy_version == 3

    def test_fast_forward_beyond_the_last_version_is_refused(self, seen: Seen) -> None:
        repository, stored = seen
        path = target_path(limits.VERSION_MAX + 1)
        data = manifest_bytes(repository.round_id, 3)
        repository.documents[path] = data
        repository.targets.targets[path] = TargetFile.from_data(path, data, ["sha256"])
        repository.publish(3)
        with pytest.raises(SwarmError):
            repository.refresh(stored)


class TestBounds:
    """The most that a stranger's bytes may cost."""

    def test_every_document_has_a_limit_before_it_is_fetched(self, seen: Seen) -> None:
        repository, _ = seen
        repository.rotate("timestamp")
        repository.put_all()
        _, asked = repository.answer(trust.refresh(repository.newcomer(), NOW))
        sizes = {wanted.name: wanted.max_bytes for wanted in asked}
        assert sizes.pop(target_path(2)) == len(repository.documents[target_path(2)])
        assert set(sizes.values()) == {limits.METADATA_MAX_BYTES}

    def test_a_signed_promise_of_a_huge_manifest_is_not_believed(self, seen: Seen) -> None:
        repository, stored = seen
        path = target_path(3)
        repository.documents[path] = b""
        repository.targets.targets[path] = TargetFile(length=10**12, hashes={"sha256": "0" * 64}, path=path)
        for part in (repository.targets, repository.snapshot, repository.timestamp):
            part.version += 1
        repository.put_all()
        conversation = trust.refresh(stored, NOW)
        wanted = conversation.send(None)
        while wanted.name != path:
            wanted = conversation.send(repository.documents.get(wanted.name))
        assert wanted.max_bytes == limits.MANIFEST_MAX_BYTES
        with pytest.raises(UntrustedMetadata):
            conversation.send(b"")
