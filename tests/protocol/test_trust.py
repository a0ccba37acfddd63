"""The trust conversation against an attacker who controls every byte on the way, and some of the keys.

- Each attack starts from a node that has seen version 2; it must end in a named error.
- A failed refresh returns nothing to store, so the node goes on from where it stood: `refused` tries that each time.
"""

import json
from copy import deepcopy
from datetime import datetime
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from securesystemslib.signer import CryptoSigner
from tuf.api.metadata import MetaFile, TargetFile

from protocol import limits, trust
from protocol.errors import (
    ManifestInvalid,
    MetadataExpired,
    RolledBack,
    SwarmError,
    UntrustedMetadata,
    UntrustedRoot,
)
from protocol.manifest import target_path
from protocol.trust import Documents
from tests.protocol.tuf_repository import DAY, HOUR, NOW, ROLES, YEAR, Repository, manifest_bytes, signer

Seen = tuple[Repository, Documents]


@pytest.fixture
def seen() -> Seen:
    """A repository with two versions, and a node that has seen both."""
    return two_versions()


def two_versions() -> Seen:
    repository = Repository()
    repository.publish(1)
    repository.publish(2)
    return repository, repository.refresh(repository.newcomer()).documents


def refused(repository: Repository, stored: Documents, error: type[SwarmError], now: datetime = NOW) -> str:
    """The refresh fails by that name; returns what it says."""
    with pytest.raises(SwarmError) as caught:
        repository.refresh(stored, now)
    assert type(caught.value) is error, caught.value
    return str(caught.value)


class TestTheHonestWay:
    """What a refresh does when nobody lies."""

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
        """Its own timestamp is long expired: that is no reason to refuse a fresh one."""
        repository, stored = seen
        repository.timestamp.expires = NOW + 31 * DAY
        repository.publish(3)
        assert repository.refresh(stored, NOW + 30 * DAY).documents.policy_version == 3


class TestThePin:
    """Step 1 for a newcomer."""

    def test_another_coordinators_root_is_refused(self) -> None:
        with pytest.raises(UntrustedRoot, match="join string"):
            trust.pin(Repository().documents["1.root.json"], Repository().round_id)

    @pytest.mark.parametrize("root", [b"", b"{}", b"\0" * 100])
    def test_a_pinned_garbage_is_refused_by_name(self, root: bytes) -> None:
        """The fingerprint fits, but it is no root: an operator's mistake, still named."""
        refused(Repository(), trust.pin(root, trust.fingerprint(root)), UntrustedMetadata)


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
        """What an attacker with only the timestamp key could do."""
        repository, stored = seen
        repository.timestamp.version += 1
        repository.timestamp.snapshot_meta = MetaFile(2)
        repository.put("timestamp.json", repository.timestamp, repository.keys["timestamp"])
        refused(repository, stored, RolledBack)

    def test_a_new_snapshot_over_older_targets_is_refused(self, seen: Seen) -> None:
        """What an attacker with the keys of snapshot and timestamp could do."""
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
        assert json.loads(repository.refresh(refreshed.documents).documents.root)["signed"]["version"] == 70


class TestBounds:
    """What a stranger's bytes may cost."""

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


DOCUMENTS = ["2.root.json", "timestamp.json", "4.snapshot.json", "4.targets.json", target_path(3)]


@pytest.fixture(scope="module")
def fed() -> Seen:
    """A node that would take one new document of every kind."""
    repository, stored = two_versions()
    repository.rotate("timestamp")
    repository.publish(3)
    assert repository.refresh(stored).documents.policy_version == 3
    return repository, stored


def served(fed: Seen, name: str, data: bytes) -> None:
    """Serve other bytes: refused by name, unless they mean the same."""
    repository = deepcopy(fed[0].documents) | {name: data}
    liar = Repository.__new__(Repository)
    liar.documents = repository
    try:
        refreshed = liar.refresh(fed[1])
    except SwarmError:
        return
    assert refreshed.documents.policy_version == 3


@pytest.mark.parametrize("name", DOCUMENTS)
@pytest.mark.parametrize(
    "data",
    [
        pytest.param(b"", id="empty"),
        pytest.param(b"null", id="null"),
        pytest.param(b"[]", id="list"),
        pytest.param(b'{"signed": {}, "signatures": []}', id="hollow"),
        pytest.param(b"[" * 100_000, id="deep"),
        pytest.param(b'{"signed":' * 50_000, id="deep maps"),
        pytest.param(b"1" * 10_000, id="long number"),
        pytest.param(b"\xff\xfe{}", id="not UTF-8"),
        pytest.param(b'{"signed": NaN, "signatures": Infinity}', id="NaN"),
        pytest.param(b'"\\ud800"', id="surrogate"),
    ],
)
def test_hostile_documents_are_refused_by_name(fed: Seen, name: str, data: bytes) -> None:
    repository = Repository.__new__(Repository)
    repository.documents = fed[0].documents | {name: data}
    with pytest.raises(SwarmError):
        repository.refresh(fed[1])


@settings(max_examples=150)
@given(st.sampled_from(DOCUMENTS), st.data())
def test_a_damaged_document_is_refused_by_name(fed: Seen, name: str, data: st.DataObject) -> None:
    damaged = bytearray(fed[0].documents[name])
    place = data.draw(st.integers(0, len(damaged)))
    damaged[place : place + data.draw(st.integers(0, 4))] = data.draw(st.binary(max_size=4))
    served(fed, name, bytes(damaged))


leaves = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5)
anything = st.recursive(
    leaves, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
)


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Every place in a JSON document."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path, *(place for key, inner in items for place in places(inner, (*path, key)))]


@settings(max_examples=150)
@given(st.sampled_from(DOCUMENTS[:-1]), st.data())
def test_a_document_of_another_shape_is_refused_by_name(fed: Seen, name: str, data: st.DataObject) -> None:
    """The parser sees these bytes before any signature is checked."""
    document = json.loads(fed[0].documents[name])
    *way, last = data.draw(st.sampled_from(places(document)[1:]))
    inside = document
    for key in way:
        inside = inside[key]
    inside[last] = data.draw(anything)
    served(fed, name, json.dumps(document).encode())
