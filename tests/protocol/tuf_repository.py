"""A round's trust repository in memory, honest by default, whose every document a test can forge.

- `documents` is what a node would fetch, by name; `publish` and `renew` keep it consistent.
- Tests attack by changing a signed part and calling `put`, with whatever keys they like, or by putting bytes in place.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from securesystemslib.signer import CryptoSigner
from tuf.api.metadata import Metadata, MetaFile, Root, Snapshot, TargetFile, Targets, Timestamp

from protocol import limits
from protocol.errors import SwarmError
from protocol.policy import root_document, trust
from protocol.policy.manifest import PolicyManifest, target_path
from protocol.policy.root_document import Documents
from protocol.policy.trust import Conversation, Refreshed, WantedDocument

NOW = datetime(2030, 1, 1, tzinfo=UTC)
HOUR, DAY, YEAR = timedelta(hours=1), timedelta(days=1), timedelta(days=365)
ROLES = ("root", "targets", "snapshot", "timestamp")


def signer() -> CryptoSigner:
    return CryptoSigner.generate_ed25519()


def manifest_bytes(round_id: str, version: int, task: str = "arithmetic") -> bytes:
    return PolicyManifest.from_value(
        {
            "round_id": round_id,
            "version": version,
            "update": version - 1,
            "parent": None,
            "task": task,
            "sampler": {"temperature": 1.0, "max_new_tokens": 8},
            "chunk_size_bytes": 1024,
            "files": [{"path": "model.safetensors", "size_bytes": 1, "digest": "d" * 64, "chunks": ["c" * 64]}],
        }
    ).to_bytes()


def converse(
    conversation: Conversation, fetch: Callable[[str], bytes | None]
) -> tuple[Refreshed, list[WantedDocument]]:
    """Hold a conversation to its end, and say what it asked for."""
    asked: list[WantedDocument] = []
    answer: bytes | None = None
    while True:
        try:
            wanted = conversation.send(answer)
        except StopIteration as done:
            result: Refreshed = done.value
            return result, asked
        assert wanted.max_bytes <= max(limits.METADATA_MAX_BYTES, limits.MANIFEST_MAX_BYTES)
        asked.append(wanted)
        answer = fetch(wanted.name)
        assert answer is not None or wanted.optional, f"{wanted.name} is asked for and not there"


@dataclass
class Repository:
    """The parts as the operator holds them, and the documents as nodes see them."""

    keys: dict[str, CryptoSigner] = field(default_factory=lambda: {role: signer() for role in ROLES})
    documents: dict[str, bytes] = field(default_factory=dict)
    root: Root = field(default_factory=lambda: Root(expires=NOW + YEAR))
    targets: Targets = field(default_factory=lambda: Targets(expires=NOW + YEAR))
    snapshot: Snapshot = field(default_factory=lambda: Snapshot(expires=NOW + YEAR))
    timestamp: Timestamp = field(default_factory=lambda: Timestamp(expires=NOW + HOUR))

    def __post_init__(self) -> None:
        for role, key in self.keys.items():
            self.root.add_key(key.public_key, role)
        self.put("1.root.json", self.root, self.keys["root"])
        self.put_all()

    @property
    def round_id(self) -> str:
        return root_document.fingerprint(self.documents["1.root.json"])

    def newcomer(self) -> Documents:
        return root_document.pin(self.documents["1.root.json"], self.round_id)

    def put(self, name: str, part: Any, *keys: CryptoSigner) -> None:
        """Serve a signed part under a name."""
        document: Metadata[Any] = Metadata(part)
        for key in keys:
            document.sign(key, append=True)
        self.documents[name] = document.to_bytes()

    def put_all(self) -> None:
        """Serve targets, snapshot and timestamp as they stand, each naming the next."""
        self.put(f"{self.targets.version}.targets.json", self.targets, self.keys["targets"])
        self.snapshot.meta = {"targets.json": MetaFile(self.targets.version)}
        self.put(f"{self.snapshot.version}.snapshot.json", self.snapshot, self.keys["snapshot"])
        self.timestamp.snapshot_meta = MetaFile(self.snapshot.version)
        self.put("timestamp.json", self.timestamp, self.keys["timestamp"])

    def publish(self, version: int, data: bytes | None = None) -> None:
        """Add a policy version the way the coordinator does."""
        path = target_path(version)
        data = manifest_bytes(self.round_id, version) if data is None else data
        self.documents[path] = data
        self.targets.targets[path] = TargetFile.from_data(path, data, ["sha256"])
        for part in (self.targets, self.snapshot, self.timestamp):
            part.version += 1
        self.put_all()

    def renew(self, lifetime: timedelta = HOUR, now: datetime = NOW) -> None:
        """Sign a fresh timestamp over the same snapshot."""
        self.timestamp.version += 1
        self.timestamp.expires = now + lifetime
        self.put("timestamp.json", self.timestamp, self.keys["timestamp"])

    def rotate(self, role: str, *signed_by: CryptoSigner) -> None:
        """Replace a role's key by a new root, signed by the given keys: by default the old and the new root key."""
        old, new = self.keys[role], signer()
        root_before = self.keys["root"]
        self.root.revoke_key(old.public_key.keyid, role)
        self.root.add_key(new.public_key, role)
        self.keys[role] = new
        self.root.version += 1
        by = signed_by or (root_before, *({self.keys["root"]} - {root_before}))
        self.put(f"{self.root.version}.root.json", self.root, *by)

    def answer(self, conversation: Conversation) -> tuple[Refreshed, list[WantedDocument]]:
        return converse(conversation, self.documents.get)

    def refresh(self, stored: Documents, now: datetime = NOW) -> Refreshed:
        return self.answer(trust.refresh(stored, now))[0]


Seen = tuple[Repository, Documents]
"""A repository, and the trust state of a node that has followed it."""


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
