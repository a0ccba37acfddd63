"""The round's TUF repository: keys, signed metadata, and the order in which documents become visible.

- Four roles with a key each. The root key signs only `1.root.json`; take `keys/root.pem` offline after `init`.
- A publication writes targets, then snapshot, then timestamp, each durably. Whatever crash comes between: the timestamp
  that nodes read names a complete, older set, and the next publication builds on that one.
- The timestamp is short-lived and signed again while the coordinator runs; a node that sees it expire stops working.
"""

from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import load_pem_private_key
from securesystemslib.signer import CryptoSigner
from tuf.api.metadata import Metadata, MetaFile, Root, Snapshot, TargetFile, Targets, Timestamp

from coordinator.files import write_durably
from protocol import trust
from protocol.errors import ConfigInvalid
from protocol.manifest import target_path, version_of

ROLES = ("root", "targets", "snapshot", "timestamp")
LONG_LIFETIME = timedelta(days=365)


class SignedMetadata:
    """The metadata folder of one round and the keys that sign it."""

    def __init__(self, keys: Path, folder: Path, timestamp_lifetime_s: float) -> None:
        self._keys = keys
        self._folder = folder
        self._timestamp_lifetime = timedelta(seconds=timestamp_lifetime_s)

    @classmethod
    def create(cls, keys: Path, folder: Path, timestamp_lifetime_s: float, now: datetime) -> "SignedMetadata":
        """Make the keys and the first, empty set of documents."""
        signers = {role: CryptoSigner.generate_ed25519() for role in ROLES}
        for role, signer in signers.items():
            write_durably(keys / f"{role}.pem", signer.private_bytes, private=True)
        root = Root(version=1, expires=_whole(now + LONG_LIFETIME), consistent_snapshot=True)
        for role, signer in signers.items():
            root.add_key(signer.public_key, role)
        self = cls(keys, folder, timestamp_lifetime_s)
        self._save("1.root.json", Metadata(root), "root")
        self._publish(Targets(), Snapshot(), Timestamp(), now)
        return self

    @property
    def round_id(self) -> str:
        """The fingerprint that join strings carry."""
        return trust.fingerprint((self._folder / "1.root.json").read_bytes())

    def add_manifest(self, version: int, manifest: bytes, keep: int, now: datetime) -> None:
        """Make a manifest the newest target; the oldest beyond `keep` leave the list."""
        write_durably(self._folder / target_path(version), manifest)
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
        """A document by its public name, or None."""
        path = self._folder / name
        plain = path.name == name and not name.startswith(".") and len(name) < 100
        return path.read_bytes() if plain and path.is_file() else None

    def _publish(self, targets: Targets, snapshot: Snapshot, timestamp: Timestamp, now: datetime) -> None:
        targets.expires = _whole(now + LONG_LIFETIME)
        data = self._save(f"{targets.version}.targets.json", Metadata(targets), "targets")
        snapshot.expires = _whole(now + LONG_LIFETIME)
        snapshot.meta = {"targets.json": MetaFile.from_data(targets.version, data, ["sha256"])}
        data = self._save(f"{snapshot.version}.snapshot.json", Metadata(snapshot), "snapshot")
        self._sign_timestamp(timestamp, MetaFile.from_data(snapshot.version, data, ["sha256"]), now)

    def _sign_timestamp(self, timestamp: Timestamp, snapshot: MetaFile, now: datetime) -> None:
        timestamp.expires = _whole(now + self._timestamp_lifetime)
        timestamp.snapshot_meta = snapshot
        self._save("timestamp.json", Metadata(timestamp), "timestamp")

    def _current(self) -> tuple[Timestamp, Snapshot, Targets]:
        """The set that nodes see: what the timestamp names, not the highest number on disk."""
        timestamp = Metadata[Timestamp].from_file(str(self._folder / "timestamp.json")).signed
        snapshot_name = f"{timestamp.snapshot_meta.version}.snapshot.json"
        snapshot = Metadata[Snapshot].from_file(str(self._folder / snapshot_name)).signed
        targets_name = f"{snapshot.meta['targets.json'].version}.targets.json"
        return timestamp, snapshot, Metadata[Targets].from_file(str(self._folder / targets_name)).signed

    def _save(self, name: str, document: Metadata, role: str) -> bytes:  # type: ignore[type-arg]  # any role's document
        document.sign(self._signer(role))
        data = document.to_bytes()
        write_durably(self._folder / name, data)
        return data

    def _signer(self, role: str) -> CryptoSigner:
        path = self._keys / f"{role}.pem"
        try:
            key = load_pem_private_key(path.read_bytes(), password=None)
        except FileNotFoundError:
            raise ConfigInvalid(f"The {role} key is missing.", hint=f"Put it back at {path}.") from None
        assert isinstance(key, Ed25519PrivateKey)
        return CryptoSigner(key)


def utc_now() -> datetime:
    """The clock of the trust metadata."""
    return datetime.now(UTC)


def _whole(moment: datetime) -> datetime:
    """TUF writes whole seconds."""
    return moment.replace(microsecond=0)
