"""The trust conversation: the honest way, and an attacker who serves what was once honestly signed.

- Each attack starts from a node that has seen version 2; it must end in a named error.
- A failed refresh returns nothing to store, so the node goes on from where it stood.
"""

import json

import pytest
from tuf.api.metadata import MetaFile

from protocol import limits
from protocol.errors import (
    MetadataExpired,
    RolledBack,
    UntrustedMetadata,
    UntrustedRoot,
)
from protocol.policy import root_document, trust
from protocol.policy.manifest import target_path
from protocol.policy.root_document import Documents
from tests.protocol.tuf_repository import DAY, HOUR, NOW, ROLES, YEAR, Repository, Seen, refused, signer


class TestTheHonestWay:
    """Refreshes when nobody lies."""

    def test_a_newcomer_gets_the_newest_version(self) -> None:
        repository = Repository()
        repository.publish(1)
        repository.publish(2)
        refreshed, asked = repository.answer(trust.refresh(repository.newcomer(), NOW))
        assert refreshed.manifest is not None
        assert refreshed.manifest.version == refreshed.documents.policy_version == 2
        assert [wanted.name for wanted in asked] == [
            "2.root.json", "timestamp.json", "3.snapshot.json", "3.targets.json", target_path(2),
        ]  # fmt: skip
        assert [wanted.optional for wanted in asked] == [True, False, False, False, False]

    def test_before_the_first_version_there_is_nothing_to_load(self) -> None:
        repository = Repository()
        refreshed = repository.refresh(repository.newcomer())
        assert refreshed.manifest is None
        assert refreshed.documents.policy_version == 0

    def test_nothing_new_costs_two_small_requests(self, seen: Seen) -> None:
        repository, stored = seen
        refreshed, asked = repository.answer(trust.refresh(stored, NOW))
        assert [wanted.name for wanted in asked] == ["2.root.json", "timestamp.json"]
        assert refreshed.documents == stored
        assert refreshed.manifest is not None

    def test_a_renewed_timestamp_fetches_nothing_else(self, seen: Seen) -> None:
        repository, stored = seen
        repository.renew(now=NOW + DAY)
        refreshed, asked = repository.answer(trust.refresh(stored, NOW + DAY))
        assert [wanted.name for wanted in asked] == ["2.root.json", "timestamp.json"]
        assert refreshed.documents.timestamp == repository.documents["timestamp.json"] != stored.timestamp

    def test_a_new_version_replaces_the_documents(self, seen: Seen) -> None:
        repository, stored = seen
        repository.publish(3)
        refreshed = repository.refresh(stored)
        assert refreshed.documents == Documents(
            round_id=repository.round_id,
            root=repository.documents["1.root.json"],
            timestamp=repository.documents["timestamp.json"],
            snapshot=repository.documents["4.snapshot.json"],
            targets=repository.documents["4.targets.json"],
            manifest=repository.documents[target_path(3)],
            policy_version=3,
        )

    def test_a_node_that_slept_for_a_month_catches_up(self, seen: Seen) -> None:
        """An own timestamp that is long expired is no reason to refuse a fresh one."""
        repository, stored = seen
        repository.timestamp.expires = NOW + 31 * DAY
        repository.publish(3)
        assert repository.refresh(stored, NOW + 30 * DAY).documents.policy_version == 3


class TestThePin:
    """Step 1 for a newcomer."""

    def test_another_coordinators_root_is_refused(self) -> None:
        with pytest.raises(UntrustedRoot, match="join string"):
            root_document.pin(Repository().documents["1.root.json"], Repository().round_id)

    @pytest.mark.parametrize("root", [b"", b"{}", b"\0" * 100])
    def test_a_pinned_garbage_is_refused_by_name(self, root: bytes) -> None:
        """The fingerprint fits, but it is no root: an operator's mistake, still named."""
        refused(Repository(), root_document.pin(root, root_document.fingerprint(root)), UntrustedMetadata)


def test_a_fingerprint_that_differs_in_its_last_digit_is_shown_whole() -> None:
    right = root_document.fingerprint(b"root")
    wrong = right[:-1] + ("0" if right[-1] != "0" else "1")
    with pytest.raises(UntrustedRoot) as refused:
        root_document.pin(b"root", wrong)
    assert right in refused.value.message
    assert wrong in refused.value.message


class TestRollback:
    """Older, honestly signed documents served again."""

    def test_an_older_timestamp_is_refused(self, seen: Seen) -> None:
        repository, stored = seen
        older = dict(repository.documents)
        repository.publish(3)
        stored = repository.refresh(stored).documents
        repository.documents |= older
        refused(repository, stored, RolledBack)

    def test_it_is_refused_even_after_ours_expired(self, seen: Seen) -> None:
        repository, stored = seen
        repository.timestamp.version -= 1
        repository.timestamp.expires = NOW + 3 * DAY
        repository.put("timestamp.json", repository.timestamp, repository.keys["timestamp"])
        refused(repository, stored, RolledBack, NOW + 2 * DAY)

    def test_a_new_timestamp_over_an_older_snapshot_is_refused(self, seen: Seen) -> None:
        """The powers of an attacker with only the timestamp key."""
        repository, stored = seen
        repository.timestamp.version += 1
        repository.timestamp.snapshot_meta = MetaFile(2)
        repository.put("timestamp.json", repository.timestamp, repository.keys["timestamp"])
        refused(repository, stored, RolledBack)

    def test_a_new_snapshot_over_older_targets_is_refused(self, seen: Seen) -> None:
        """The powers of an attacker with the keys of snapshot and timestamp."""
        repository, stored = seen
        repository.snapshot.version += 1
        repository.snapshot.meta = {"targets.json": MetaFile(2)}
        repository.put(f"{repository.snapshot.version}.snapshot.json", repository.snapshot, repository.keys["snapshot"])
        repository.timestamp.snapshot_meta = MetaFile(repository.snapshot.version)
        repository.renew()
        refused(repository, stored, RolledBack)

    def test_a_snapshot_that_forgets_the_targets_is_refused(self, seen: Seen) -> None:
        repository, stored = seen
        repository.snapshot.version += 1
        repository.snapshot.meta = {}
        repository.put(f"{repository.snapshot.version}.snapshot.json", repository.snapshot, repository.keys["snapshot"])
        repository.timestamp.snapshot_meta = MetaFile(repository.snapshot.version)
        repository.renew()
        refused(repository, stored, UntrustedMetadata)

    @pytest.mark.parametrize("left", [[1], []])
    def test_new_targets_without_the_newest_policy_are_refused(self, seen: Seen, left: list[int]) -> None:
        repository, stored = seen
        paths = [target_path(version) for version in left]
        repository.targets.targets = {path: repository.targets.targets[path] for path in paths}
        for part in (repository.targets, repository.snapshot, repository.timestamp):
            part.version += 1
        repository.put_all()
        assert "version 2 was already published" in refused(repository, stored, RolledBack)

    def test_rotated_keys_do_not_reset_the_policy_version(self, seen: Seen) -> None:
        """TUF forgets timestamp and snapshot when their keys change; what a node has worked on, it never forgets."""
        repository, stored = seen
        for role in ("timestamp", "snapshot"):
            repository.rotate(role)
        del repository.targets.targets[target_path(2)]
        repository.targets.version = repository.snapshot.version = repository.timestamp.version = 1
        repository.put_all()
        refused(repository, stored, RolledBack)


class TestFreeze:
    """News withheld, with documents that were once good."""

    def test_a_frozen_timestamp_is_refused_when_it_expires(self, seen: Seen) -> None:
        repository, stored = seen
        repository.refresh(stored, NOW + HOUR / 2)
        said = refused(repository, stored, MetadataExpired, NOW + 2 * HOUR)
        assert "clock" in said

    def test_a_newer_but_expired_timestamp_is_refused(self, seen: Seen) -> None:
        repository, stored = seen
        repository.renew(lifetime=HOUR)
        refused(repository, stored, MetadataExpired, NOW + 2 * HOUR)
        refused(repository, repository.newcomer(), MetadataExpired, NOW + 2 * HOUR)

    @pytest.mark.parametrize("role", ["snapshot", "targets", "root"])
    def test_every_other_document_expires_too(self, role: str) -> None:
        repository = Repository()
        getattr(repository, role).expires = NOW + DAY
        repository.put("1.root.json", repository.root, repository.keys["root"])
        repository.timestamp.expires = NOW + YEAR
        repository.publish(1)
        stored = repository.refresh(repository.newcomer()).documents
        refused(repository, repository.newcomer(), MetadataExpired, NOW + 2 * DAY)
        refused(repository, stored, MetadataExpired, NOW + 2 * DAY)


class TestRootRotation:
    """New keys, only from those who held the old ones."""

    @pytest.mark.parametrize("role", ROLES)
    def test_a_signed_rotation_of_any_key_is_followed(self, seen: Seen, role: str) -> None:
        repository, stored = seen
        repository.rotate(role)
        repository.publish(3)
        refreshed = repository.refresh(stored)
        assert refreshed.documents.root == repository.documents["2.root.json"]
        assert refreshed.documents.policy_version == 3
        assert refreshed.documents.round_id == repository.round_id
        assert repository.refresh(refreshed.documents).documents == refreshed.documents

    def test_a_chain_of_rotations_is_walked_one_by_one(self, seen: Seen) -> None:
        repository, stored = seen
        for role in (*ROLES, "root", "root"):
            repository.rotate(role)
        repository.publish(3)
        assert repository.refresh(stored).documents.root == repository.documents["7.root.json"]

    def test_an_old_key_is_worthless_after_its_rotation(self, seen: Seen) -> None:
        repository, stored = seen
        stolen = repository.keys["timestamp"]
        repository.rotate("timestamp")
        repository.put_all()
        stored = repository.refresh(stored).documents
        repository.timestamp.version += 1
        repository.put("timestamp.json", repository.timestamp, stolen)
        refused(repository, stored, UntrustedMetadata)

    @pytest.mark.parametrize("by", ["the new key alone", "the old key alone", "a stranger", "nobody"])
    def test_a_rotation_that_is_not_signed_by_old_and_new_is_refused(self, seen: Seen, by: str) -> None:
        repository, stored = seen
        old = repository.keys["root"]
        repository.rotate("root")
        keys = {
            "the new key alone": [repository.keys["root"]],
            "the old key alone": [old],
            "a stranger": [signer()],
            "nobody": [],
        }
        repository.put("2.root.json", repository.root, *keys[by])
        refused(repository, stored, UntrustedMetadata)

    def test_a_skipped_root_is_refused(self, seen: Seen) -> None:
        repository, stored = seen
        repository.root.version += 1
        repository.rotate("timestamp")
        repository.documents["2.root.json"] = repository.documents.pop("3.root.json")
        refused(repository, stored, RolledBack)

    def test_an_old_root_served_as_the_next_one_is_refused(self, seen: Seen) -> None:
        repository, stored = seen
        repository.documents["2.root.json"] = repository.documents["1.root.json"]
        refused(repository, stored, RolledBack)

    def test_an_endless_chain_of_roots_does_not_hold_a_node(self, seen: Seen) -> None:
        repository, stored = seen
        for _ in range(limits.ROOT_ROTATIONS_MAX + 5):
            repository.root.version += 1
            repository.put(f"{repository.root.version}.root.json", repository.root, repository.keys["root"])
        refreshed, asked = repository.answer(trust.refresh(stored, NOW))
        assert sum(wanted.optional for wanted in asked) == limits.ROOT_ROTATIONS_MAX
        # The rest comes next time.
        assert json.loads(refreshed.documents.root)["signed"]["version"] == limits.ROOT_ROTATIONS_MAX + 1
        root = json.loads(repository.refresh(refreshed.documents).documents.root)
        assert root["signed"]["version"] == limits.ROOT_ROTATIONS_MAX + 6
