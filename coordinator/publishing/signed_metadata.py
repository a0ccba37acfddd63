"""The round's TUF repository: keys, signed metadata, and the order in which documents become visible.

- Four roles, each with a key at first; `rotation` changes the keys and how many must sign. Beside them the
  root names the ledger's key, with which nothing but checkpoints is signed.
- Root keys sign only root documents; take `keys/root.pem` offline after `init`.
- A publication writes targets, then snapshot, then timestamp, each durably. Whatever crash comes between: the timestamp
  that nodes read names a complete, older set, and the next publication builds on that one.
- The timestamp is short-lived and signed again while the coordinator runs; a node that sees it expire stops working.
"""

import hashlib
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from securesystemslib.signer import CryptoSigner
from tuf.api.metadata import Metadata, MetaFile, Root, Snapshot, TargetFile, Targets, Timestamp, VerificationResult

from coordinator.base.files import write_durably
from coordinator.publishing.role_keys import LEDGER, ROLES, RoleKeys
from protocol.errors import ConfigInvalid
from protocol.policy import trust
from protocol.policy.manifest import target_path, version_of

LONG_LIFETIME = timedelta(days=365)


class SignedMetadata:
    """The metadata folder of one round and the keys that sign it."""

    def __init__(self, keys: Path, folder: Path, timestamp_lifetime_s: float) -> None:
        self._keys = RoleKeys(keys)
        self._folder = folder
        self._timestamp_lifetime = timedelta(seconds=timestamp_lifetime_s)

    @classmethod
    def create(cls, keys: Path, folder: Path, timestamp_lifetime_s: float, now: datetime) -> "SignedMetadata":
        """Make the keys and the first, empty set of documents."""
        self = cls(keys, folder, timestamp_lifetime_s)
        root = Root(version=1, expires=whole(now + LONG_LIFETIME), consistent_snapshot=True)
        for role in ROLES:
            root.add_key(self._keys.make(role, name=role).public_key, role)
        name_ledger_key(root, self._keys.make(LEDGER, name=LEDGER))
        document = Metadata(root)
        for signer in self._keys.signers(root, "root"):
            document.sign(signer)
        write_durably(folder / "1.root.json", document.to_bytes(), public=True)
        self._publish(Targets(), Snapshot(), Timestamp(), now)
        return self

    @property
    def round_id(self) -> str:
        """The fingerprint that join strings carry."""
        first = self.read("1.root.json")
        if first is None:
            raise ConfigInvalid(f"{self._folder}/1.root.json is missing.", hint="Put it back from a backup.")
        return trust.fingerprint(first)

    def root(self) -> Root:
        """The newest root, as it stands on the disk."""
        newest = max(int(path.name.partition(".")[0]) for path in self._folder.glob("[0-9]*.root.json"))
        return Metadata[Root].from_file(str(self._folder / f"{newest}.root.json")).signed

    def roots(self) -> tuple[bytes, ...]:
        """Every root there was, the first one first."""
        numbers = range(1, self.root().version + 1)
        return tuple((self._folder / f"{number}.root.json").read_bytes() for number in numbers)

    def ledger_public(self) -> bytes:
        """The public key of the ledger."""
        return trust.ledger_key(self.roots()[-1])

    def sign_for_ledger(self, text: bytes) -> bytes:
        """The ledger's signature of a checkpoint's text."""
        public = self.ledger_public().hex()
        for signer in self._keys.all().values():
            if signer.public_key.keyval["public"] == public:
                return bytes.fromhex(signer.sign(text).signature)
        raise ConfigInvalid("The ledger's key is missing.", hint=f"Put ledger.pem back into {self._keys.folder}.")

    def install_root(self, document: Metadata[Root], now: datetime) -> None:
        """Publish a root whose signatures were checked, and sign anew what it no longer vouches for."""
        write_durably(self._folder / f"{document.signed.version}.root.json", document.to_bytes(), public=True)
        self.mend(now)

    def mend(self, now: datetime) -> None:
        """Sign anew what the newest root does not vouch for; a crash after `install_root` leaves such documents."""
        root, (timestamp, snapshot, targets) = self.root(), self._documents()
        if not (_vouched(root, "targets", targets) and _vouched(root, "snapshot", snapshot)):
            for part in (targets.signed, snapshot.signed, timestamp.signed):
                part.version += 1
            self._publish(targets.signed, snapshot.signed, timestamp.signed, now)
        elif not _vouched(root, "timestamp", timestamp):
            self.renew_timestamp(now)

    def targets(self) -> tuple[str, ...]:
        """The names of the manifests and other files that nodes may trust now."""
        return tuple(self._documents()[2].signed.targets)

    def signers(self) -> dict[str, VerificationResult]:
        """By role: whose signatures stand under the set that nodes see, and how many must."""
        root = self.root()
        found = {"root": _vouched(root, "root", Metadata[Any].from_bytes(self.roots()[-1]))}
        for document in self._documents():
            role = str(document.signed.type)
            found[role] = _vouched(root, role, document)
        return found

    def leap(self, numbers: int, now: datetime) -> None:
        """Sign everything under higher numbers, above all that may have been signed after a backup."""
        timestamp, snapshot, targets = self._current()
        for part in (timestamp, snapshot, targets):
            part.version += numbers
        self._publish(targets, snapshot, timestamp, now)

    def add_manifest(self, version: int, manifest: bytes, keep: int, now: datetime) -> None:
        """Make a manifest the newest target; the oldest beyond `keep` leave the list."""
        write_durably(self._folder / target_path(version), manifest, public=True)
        timestamp, snapshot, targets = self._current()
        path = target_path(version)
        targets.targets[path] = TargetFile.from_data(path, manifest, ["sha256"])
        known = sorted(path for path in targets.targets if version_of(path) is not None)
        for old in known[:-keep]:
            del targets.targets[old]
        targets.version += 1
        snapshot.version += 1
        timestamp.version += 1
        self._publish(targets, snapshot, timestamp, now)

    def renew_timestamp(self, now: datetime) -> None:
        """Sign a fresh timestamp over the same snapshot."""
        timestamp, _, _ = self._current()
        timestamp.version += 1
        self._sign_timestamp(timestamp, timestamp.snapshot_meta, now)

    def read(self, name: str) -> bytes | None:
        """Return a document by its public name, or None.

        A standard TUF client asks for a target by `<SHA-256>.<name>`: the root says that snapshots are consistent.
        """
        digest, _, rest = name.partition(".")
        if len(digest) == 64 and rest:
            data = self._read_plain(rest)
            return data if data is not None and hashlib.sha256(data).hexdigest() == digest else None
        return self._read_plain(name)

    def _read_plain(self, name: str) -> bytes | None:
        path = self._folder / name
        plain = path.name == name and not name.startswith(".") and len(name) < 100
        return path.read_bytes() if plain and path.is_file() else None

    def _publish(self, targets: Targets, snapshot: Snapshot, timestamp: Timestamp, now: datetime) -> None:
        targets.expires = whole(now + LONG_LIFETIME)
        data = self._save(f"{targets.version}.targets.json", Metadata(targets), "targets")
        snapshot.expires = whole(now + LONG_LIFETIME)
        snapshot.meta = {"targets.json": MetaFile.from_data(targets.version, data, ["sha256"])}
        data = self._save(f"{snapshot.version}.snapshot.json", Metadata(snapshot), "snapshot")
        self._sign_timestamp(timestamp, MetaFile.from_data(snapshot.version, data, ["sha256"]), now)

    def _sign_timestamp(self, timestamp: Timestamp, snapshot: MetaFile, now: datetime) -> None:
        timestamp.expires = whole(now + self._timestamp_lifetime)
        timestamp.snapshot_meta = snapshot
        self._save("timestamp.json", Metadata(timestamp), "timestamp")

    def _current(self) -> tuple[Timestamp, Snapshot, Targets]:
        """What stands in the set that nodes see."""
        timestamp, snapshot, targets = self._documents()
        return timestamp.signed, snapshot.signed, targets.signed

    def _documents(self) -> tuple[Metadata[Timestamp], Metadata[Snapshot], Metadata[Targets]]:
        """The set that nodes see: what the timestamp names, not the highest number on disk."""
        timestamp = Metadata[Timestamp].from_file(str(self._folder / "timestamp.json"))
        snapshot_name = f"{timestamp.signed.snapshot_meta.version}.snapshot.json"
        snapshot = Metadata[Snapshot].from_file(str(self._folder / snapshot_name))
        targets_name = f"{snapshot.signed.meta['targets.json'].version}.targets.json"
        return timestamp, snapshot, Metadata[Targets].from_file(str(self._folder / targets_name))

    def _save(self, name: str, document: Metadata[Any], role: str) -> bytes:
        for signer in self._keys.signers(self.root(), role):
            document.sign(signer, append=True)
        data = document.to_bytes()
        write_durably(self._folder / name, data, public=True)
        return data


def _vouched(root: Root, role: str, document: Metadata[Any]) -> VerificationResult:
    """Which keys of a role have signed a document; true if they are enough."""
    return root.get_verification_result(role, document.signed_bytes, document.signatures)


def name_ledger_key(root: Root, signer: CryptoSigner) -> None:
    """Make a key the ledger's, in the place of another."""
    key = signer.public_key
    root.unrecognized_fields[trust.LEDGER_FIELD] = {"keyid": key.keyid, **key.to_dict()}


def utc_now() -> datetime:
    """The clock of the trust metadata."""
    return datetime.now(UTC)


def whole(moment: datetime) -> datetime:
    """TUF writes whole seconds."""
    return moment.replace(microsecond=0)
